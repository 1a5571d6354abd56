"""The memory of a plan over its step, beside that of plans with other memory policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from toast.plan import Plan, fit_text

#: What people call the presets that keep and recompute everything.
_LABELS = {"none": "everything kept", "full": "full recomputation"}

#: Maximum number of points of a line.
_POINTS = 400


def policy_rows(plan: Plan, others: Sequence[Plan]) -> list[dict[str, Any]]:
    """The lines of the chart: of ``others``, which have other policies, and of the plan, the last.

    Empty without others.  ``seconds`` is when memory changes to ``live_bytes``: the beginning of an
    op in the schedule, in which the ops of a loop take the time of all iterations.
    """
    if not others:
        return []
    named = [(_label(other), other) for other in others]
    return [_row(label, other) for label, other in [*named, ("the plan", plan)]]


def _label(plan: Plan) -> str:
    preset = plan.policy.preset if plan.policy else ""
    label = _LABELS.get(preset, preset or "another policy")
    return f"{label}, {plan.microbatches} microbatches" if plan.microbatches > 1 else label


def _row(label: str, plan: Plan) -> dict[str, Any]:
    line, begins = plan.timeline, plan.schedule.op_begin
    last = np.flatnonzero(np.diff(line.op, append=len(begins) + 1))
    at = np.minimum(line.op[last], len(begins) - 1)  # results end after the last op
    seconds, live = begins[at], line.live_bytes[last]
    kept = thinned(seconds, live)
    step = plan.after.step_seconds
    return {
        "label": label,
        "step_seconds": step,
        "peak_bytes": line.peak_bytes,
        "argument_bytes": line.argument_bytes,
        "fits": plan.fits,
        "fit": fit_text(plan.fits, plan.after.fit_probability),
        "seconds": [float(f"{s:.4g}") for s in seconds[kept].tolist()],
        "live_bytes": np.round(live[kept]).astype(np.int64).tolist(),
    }


def thinned(
    seconds: npt.NDArray[np.float64], live: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """The points of a line to draw: in each interval of time, the largest and the last.

    ``seconds`` (``[points]``) are in order; ``live`` (``[points]``) are bytes.
    """
    if len(seconds) <= _POINTS:
        return np.arange(len(seconds))
    place = (seconds * (_POINTS // 2 / max(float(seconds[-1]), 1e-300))).astype(np.int64)
    order = np.lexsort((live, place))
    most = order[np.flatnonzero(np.diff(place[order], append=place[order[-1]] + 1))]
    last = np.flatnonzero(np.diff(place, append=place[-1] + 1))
    return np.unique(np.concatenate([most, last]))


__all__ = ["policy_rows", "thinned"]
