"""Empty modules in the place of packages that are not installed.

gemma and MaxText import TensorFlow, Google's cloud clients and others, which their train steps do not
use.  With :func:`empty_modules` they can be imported without these.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

#: The packages that gemma and MaxText import, and that their train steps do not use.
PACKAGES = frozenset({
    "altair", "aqt", "array_record", "cloud_tpu_diagnostics", "cv2", "drjax", "gcsfs", "google",
    "jsonlines", "mediapy", "ml_goodput_measurement", "mlperf_logging", "pylatexenc", "skimage",
    "sklearn", "tensorboard", "tensorboardX", "tensorflow", "tensorflow_datasets",
    "tensorflow_text", "tiktoken", "vertexai", "xmanager", "xprof",
})  # fmt: skip


class _Empty(types.ModuleType):
    """A module that has every name: classes under capitals, and modules under others."""

    def __call__(self, *_: Any, **__: Any) -> _Empty:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {}) if name[0].isupper() else _Empty(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that no other finder has found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """An empty module has nothing to run."""


@contextlib.contextmanager
def empty_modules() -> Iterator[None]:
    """Imports of missing packages among :data:`PACKAGES` succeed inside, and fail again after it."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Empty):
                del sys.modules[name]
