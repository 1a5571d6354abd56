"""What a plan that does not fit lacks, and what to do."""

from __future__ import annotations

from toast.plan.plan import Plan
from toast.units import size_text


def misfit_note(plan: Plan) -> str:
    """That a plan does not fit, and what would help; empty if it fits."""
    if plan.fits:
        return ""
    missing = (
        f"does not fit: the plan needs {size_text(plan.after.peak_bytes)} per device, and the "
        f"limit of {plan.hardware.name} is {size_text(plan.memory_bytes)}"
    )
    if plan.after.peak_bytes <= plan.memory_bytes:  # but not with the odds that are asked for
        missing = plan.unsafe_text
    remedies = _remedies(plan)
    return f"{missing}; use {', '.join(remedies[:-1])} or {remedies[-1]}"


def _remedies(plan: Plan) -> list[str]:
    """What would help, the smallest changes first."""
    program = plan.analysis.program
    found = ["donation"] if plan.step_reshards else []
    if program.traced and "backward" in program.passes:
        found += ['recomputation (remat="auto")'] if plan.policy is None else []
        found += ["more microbatches (toast.accumulate)"]
    return [*found, "more devices", "a smaller batch (toast.fit finds how many, and how small)"]


__all__ = ["misfit_note"]
