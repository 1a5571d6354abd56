"""Packages that import their modules when a name of theirs is first asked for (PEP 562).

The stages import JAX; the command line answers ``--help``, bad usage and questions without it.
"""

from __future__ import annotations

import importlib
import sys
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
