"""The frontends for JAX functions and StableHLO files; each imports JAX only when it is used."""

from __future__ import annotations

import pathlib
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
    cacheable = False

    def accepts(self, target: Any) -> bool:
        return True

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        from toast.frontend import jax

        return jax.from_function(target, *arguments, **options)


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


JAX_FUNCTIONS = _JaxFunctions()
STABLEHLO_FILES = _StablehloFiles()
