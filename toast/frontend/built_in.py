"""The frontends for JAX's functions and stages, for StableHLO files, and for PyTorch.

Each imports JAX, or PyTorch, only when it is used.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from toast.program import Program


class _JaxFunctions:
    """Functions, traced at example arguments.

    The registry asks this frontend last.  It accepts every target and reports those that are not
    functions.
    """

    name = "jax"
    suffixes: frozenset[str] = frozenset()
    takes_arguments = True
    takes_platform = True
    traces = True
    cacheable = False

    def accepts(self, target: Any) -> bool:
        return True

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        from toast.frontend import jax

        return jax.from_function(target, *arguments, **options)


class _JaxStages:
    """What JAX has traced, lowered or exported: ``Traced``, ``Lowered`` and ``Exported``."""

    name = "jax-stages"
    suffixes: frozenset[str] = frozenset()
    takes_arguments = False
    takes_platform = True
    cacheable = False

    def accepts(self, target: Any) -> bool:
        if "jax" not in sys.modules:
            return False
        from toast.frontend import jax_stages

        return isinstance(target, jax_stages.STAGES)

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        from toast.frontend import jax_stages

        return jax_stages.from_stage(target, **options)


class _StablehloFiles:
    """Files with StableHLO text, bytecode or a portable artifact, with any suffix."""

    name = "stablehlo"
    suffixes = frozenset({".mlir", ".mlirbc", ".bc", ".stablehlo", ".txt"})
    takes_arguments = False
    cacheable = True

    def accepts(self, target: Any) -> bool:
        return isinstance(target, str | pathlib.Path)

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        from toast.frontend import stablehlo

        return stablehlo.from_file(target)


class _TorchTargets:
    """Modules, train steps and exported programs of PyTorch."""

    name = "torch"
    suffixes: frozenset[str] = frozenset()
    takes_arguments = True
    takes_platform = True
    traces = True
    cacheable = False

    def accepts(self, target: Any) -> bool:
        # They exist only if their modules have been imported.
        kinds = (
            ("toast.frontend.torch", "TrainStep"), ("torch.nn", "Module"),
            ("torch.export", "ExportedProgram"),
        )  # fmt: skip
        return any(_is_of(target, module, name) for module, name in kinds)

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        from toast.frontend import torch_export, torch_modules

        if _is_of(target, "torch.export", "ExportedProgram"):
            return torch_export.from_exported(target, arguments, **options)
        return torch_modules.from_target(target, arguments, **options)


def _is_of(target: Any, module: str, name: str) -> bool:
    """Whether a target has the type with a name in a module, if that has been imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(target, kind)


JAX_FUNCTIONS = _JaxFunctions()
JAX_STAGES = _JaxStages()
STABLEHLO_FILES = _StablehloFiles()
TORCH_TARGETS = _TorchTargets()
