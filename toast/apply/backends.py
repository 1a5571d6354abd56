"""The backends: a callable for JAX, and StableHLO with Shardy's annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toast.program import Program, Shardings


class _Jax:
    """A function that XLA compiles and runs."""

    name = "jax"

    def build(self, program: Program, shardings: Shardings, **options: Any) -> Callable[..., Any]:
        from toast.apply.execute import callable_of

        return callable_of(program, shardings, **options)


class _AnnotatedStablehlo:
    """The text of the program with all shardings."""

    name = "stablehlo"

    def build(self, program: Program, shardings: Shardings, **options: Any) -> str:
        from toast.apply.annotate import annotate

        module = annotate(program, shardings)
        return str(module.operation.get_asm(enable_debug_info=True))


JAX = _Jax()
ANNOTATED_STABLEHLO = _AnnotatedStablehlo()
