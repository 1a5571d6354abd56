"""The backend ``local``: a callable for JAX that runs the device-local program of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toast.analysis import Analysis
from toast.lower.lowering import lower
from toast.lower.op_sharding import OpFactors
from toast.program import Program, Shardings


class _Local:
    """A function whose collectives are those of the plan."""

    name = "local"

    def build(
        self, program: Program, shardings: Shardings, *, analysis: Analysis, factors: OpFactors,
        devices: Any = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """A :class:`toast.apply.Runnable`; parameters are those of :func:`lower`."""
        from toast import apply

        names = apply.axis_names(shardings.mesh, devices)

        def module_of(_program: Program, renamed: Shardings) -> Any:
            return lower(analysis, renamed, factors.renamed(names)).module

        return apply.Runnable(program, shardings, devices=devices, module_of=module_of)


LOCAL = _Local()
