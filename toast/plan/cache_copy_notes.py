"""A note on caches that XLA copies in loops over layers, as in decode steps on TPUs."""

from __future__ import annotations

from toast.cost.stacked_caches import stacked_caches
from toast.cost.terms.cache_copies import CacheCopies
from toast.plan.plan import Plan
from toast.units import time_text

#: The share of a step from which copies are said.
_SAID = 0.1


def cache_copy_notes(plan: Plan) -> list[str]:
    """A line if copies of stacked caches take a tenth of the step or more.

    See :mod:`toast.cost.stacked_caches`.
    """
    program = plan.analysis.program
    copies = stacked_caches(program, tiles=plan.hardware.lanes > 1).copies
    spent = float(CacheCopies().seconds(plan.model.layout(plan.state[None])).sum())
    if not copies or spent < _SAID * plan.after.step_seconds:
        return []
    first = min(copy.op for copy in copies)
    return [
        f"copies of caches take {time_text(spent)} of the step ({program.describe(first)}): XLA "
        "updates a donated stack of caches in place if a loop over the layers carries it, with "
        "heads before keys ([layers, batch, heads, keys, size])"
    ]


__all__ = ["cache_copy_notes"]
