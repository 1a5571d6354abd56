"""The frontends for JAX's functions and stages and for StableHLO files.

Each imports JAX only when it is used.
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


JAX_FUNCTIONS = _JaxFunctions()
JAX_STAGES = _JaxStages()
STABLEHLO_FILES = _StablehloFiles()
