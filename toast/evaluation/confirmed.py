"""Plans whose memory XLA's TPU compiler confirms: they are planned again until they fit.

A prediction of memory may be off.  The compiler says what a plan needs, without a TPU.  If that is
more than the limit, the program is planned within less, by as much as the prediction was too low.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from toast.errors import HardwareError, SearchError
from toast.evaluation.oracle import check, judge
from toast.hardware import Hardware
from toast.plan import Plan
from toast.units import listed, size_text

#: The most plans that are compiled, and the share of the limit that another one leaves free.
_MOST_PLANS, _FREE = 4, 0.01


class _Refused(NamedTuple):
    """The bytes that a plan was predicted to need, and those that it needs."""

    predicted: float
    needed: float


def confirmed_plan(
    planned: Callable[[float | None], Plan],
    hardware: Hardware,
    memory_bytes: float | None = None,
    progress: Callable[[Any], None] | None = None,
    timeout: float = 600.0,
) -> Plan:
    """The first plan of which XLA's TPU compiler says that it fits.

    :param planned: plans the program within so many bytes per device; ``None`` for those of the
        hardware.
    :param memory_bytes: the limit; by default that of the hardware.
    :param progress: called with the name of each stage when it begins.
    :param timeout: seconds for each compilation.
    :returns: the plan, with a line in its note, and with the limit that was asked for.  A plan that
        does not fit by prediction is compiled as well: if the compiler needs too much, too, and
        no limit was asked for, it is returned with that line.
    :raises toast.errors.HardwareError: for hardware without a compiler.
    :raises toast.errors.PlanError: if ``libtpu`` is not installed, or the compiler fails.
    :raises toast.errors.SearchError: if the compiler refuses every plan.
    """
    own = hardware.memory_limit_bytes
    if memory_bytes is not None and memory_bytes > own:
        raise HardwareError(
            f"memory limit of {size_text(memory_bytes)}: {hardware.name} has {size_text(own)}, and "
            "the compiler knows no other; leave out the limit, or set a smaller one"
        )
    check(hardware)
    most, within = memory_bytes or own, memory_bytes
    refused: list[_Refused] = []
    while len(refused) < _MOST_PLANS:
        try:
            plan = planned(within)
        except SearchError:
            if not refused:
                raise
            break  # nothing fits within less
        if progress is not None:
            progress("TPU compiler")
        local = plan.lowered().module if plan.analysis.lowering == "local" else None
        verdict = judge(
            plan.analysis.program, plan.shardings, plan.hardware, local=local, timeout=timeout
        )  # fmt: skip
        fits = not verdict.out_of_memory and verdict.peak_bytes <= most
        if fits or not plan.fits:
            line = _needs(verdict.peak_bytes, most) + _before(refused, plan.memory_bytes)
            return _with_limit(plan, most, line)
        refused.append(_Refused(plan.after.peak_bytes, verdict.peak_bytes))
        share = most / max(verdict.peak_bytes, most)
        within = min(plan.after.peak_bytes, within or most) * share * (1.0 - _FREE)
    least = min(refused, key=lambda each: each.needed)
    plans = f"the best of {len(refused)} plans" if len(refused) > 1 else "the plan"
    raise SearchError(
        f"{_needs(least.needed, most)} for {plans}, predicted to need "
        f"{size_text(least.predicted)}; nothing else fits: raise the limit, or use more devices, "
        "a smaller batch, or more microbatches"
    )


def _with_limit(plan: Plan, memory_bytes: float, line: str) -> Plan:
    """A plan with another limit, and with a line at the beginning of its note."""
    before, after = (
        each.with_error_bars(plan.model, memory_bytes) for each in (plan.before, plan.after)
    )
    return dataclasses.replace(
        plan, memory_bytes=memory_bytes, before=before, after=after,
        note="\n".join(filter(None, [line, plan.note])),
    )  # fmt: skip


def _needs(needed: float, most: float) -> str:
    return f"XLA's TPU compiler needs {size_text(needed)} of {size_text(most)}"


def _before(refused: list[_Refused], within: float) -> str:
    """What the compiler said of earlier plans, and the limit of the one ``within`` it."""
    if not refused:
        return ""
    texts = [f"{size_text(of.needed)} where {size_text(of.predicted)} were predicted"
             for of in refused]  # fmt: skip
    plans = f"{len(refused)} earlier plans" if len(refused) > 1 else "an earlier plan"
    return f"; {plans} needed {listed(texts)}, so this one was planned within {size_text(within)}"


__all__ = ["confirmed_plan"]
