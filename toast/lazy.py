"""Imports modules at their first use.

The stages import JAX, pandas and scipy.  The command line answers ``--help`` and invalid usage
without any of them, and questions about a cached program without most of them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any


def package(name: str, modules: Mapping[str, Sequence[str]]) -> None:
    """Lets a package export names of its modules without importing the modules.

    :param name: the package.
    :param modules: the exported names of each module; modules are relative to the package.
    """
    homes = {exported: module for module, names in modules.items() for exported in names}

    class Package(types.ModuleType):
        def __getattr__(self, attribute: str) -> Any:
            if attribute not in homes:
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            value = getattr(importlib.import_module(f"{name}.{homes[attribute]}"), attribute)
            setattr(self, attribute, value)
            return value

        def __setattr__(self, attribute: str, value: Any) -> None:
            # ``toast.plan`` is the function, also after the package of that name was imported.
            if attribute not in homes or not isinstance(value, types.ModuleType):
                super().__setattr__(attribute, value)

        def __dir__(self) -> list[str]:
            return sorted({*vars(self), *homes})

    sys.modules[name].__class__ = Package


def module(name: str) -> Any:
    """A placeholder that imports the module ``name``, such as pandas, at its first use."""
    return _Module(name)


def begin(name: str) -> None:
    """Imports a module in another thread."""

    def quietly() -> None:
        # The next import reports errors; the process may also end before this one is complete.
        with contextlib.suppress(Exception):
            importlib.import_module(name)

    if name not in sys.modules:
        threading.Thread(target=quietly).start()


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value
