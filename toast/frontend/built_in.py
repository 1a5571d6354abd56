"""The frontends for JAX functions and StableHLO files; neither imports JAX before it is used."""

from __future__ import annotations

import pathlib
from typing import Any

from toast.program import Program


class _JaxFunctions:
    """Functions, traced at example arguments; the last one asked, which says what is no target."""

    name = "jax"
    suffixes: frozenset[str] = frozenset()
    takes_arguments = True
    cacheable = False

    def accepts(self, target: Any) -> bool:
        return True

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        from toast.frontend import jax

        return jax.from_function(target, *arguments, **options)


class _StablehloFiles:
    """Text, bytecode and portable artifacts, whatever the ending of their names."""

    name = "stablehlo"
    suffixes = frozenset({".mlir", ".mlirbc", ".bc", ".stablehlo", ".txt"})
    takes_arguments = False
    cacheable = True

    def accepts(self, target: Any) -> bool:
        return isinstance(target, str | pathlib.Path)

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        from toast.frontend import stablehlo

        return stablehlo.from_file(target)


JAX_FUNCTIONS = _JaxFunctions()
STABLEHLO_FILES = _StablehloFiles()
