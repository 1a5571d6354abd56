"""Modules that are imported when they are first used.

The stages import JAX, pandas and scipy; the command line answers ``--help`` and bad usage without
any of them, and questions about a program that was kept without most.
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
    """Let a package offer names of its modules, without importing these."""
    homes = {offered: module for module, names in modules.items() for offered in names}

    class Package(types.ModuleType):
        def __getattr__(self, asked: str) -> Any:
            if asked not in homes:
                raise AttributeError(f"module {name!r} has no attribute {asked!r}")
            found = getattr(importlib.import_module(f"{name}.{homes[asked]}"), asked)
            setattr(self, asked, found)
            return found

        def __setattr__(self, given: str, value: Any) -> None:
            # ``toast.plan`` is the function, also where the package of that name was imported.
            if given not in homes or not isinstance(value, types.ModuleType):
                super().__setattr__(given, value)

        def __dir__(self) -> list[str]:
            return sorted({*vars(self), *homes})

    sys.modules[name].__class__ = Package


def module(name: str) -> Any:
    """A stand-in for a module that is not a package's own, such as pandas."""
    return _Module(name)


def begin(name: str) -> None:
    """Import a module while this thread waits for something else."""

    def quietly() -> None:
        # Who uses the module imports it again, and sees what is wrong; the process may end first.
        with contextlib.suppress(Exception):
            importlib.import_module(name)

    if name not in sys.modules:
        threading.Thread(target=quietly).start()


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, asked: str) -> Any:
        found = getattr(importlib.import_module(self._name), asked)
        setattr(self, asked, found)
        return found
