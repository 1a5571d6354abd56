"""What a plan comes to, in one line: the step, the memory, and how good they are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from toast.plan import Plan, fit_text
from toast.report.argument_roles import argument_roles
from toast.units import size_text, time_text

if TYPE_CHECKING:
    from toast.evaluation.compare import MethodResult


@dataclasses.dataclass(frozen=True)
class PlanVerdict:
    """The figures that decide about a plan."""

    #: ``good`` fits; ``bad`` does not; ``doubtful`` may not, with the odds in ``fit``.
    grade: Literal["good", "doubtful", "bad"]
    step_seconds: float
    peak_bytes: float
    memory_bytes: float
    fit: str
    #: The share of the devices' peak FLOP/s that products use; None for a program without any.
    utilization: float | None
    #: ``MFU``; or ``HFU``, if it counts what the backward pass computes again.
    measure: Literal["MFU", "HFU"]
    #: Work per second of the whole mesh, in ``unit``; None if there are no inputs.
    rate: float | None
    unit: Literal["tokens", "rows"]
    #: The step over the lower bound; None if no bound is known.
    over_bound: float | None
    #: The other methods, each with its step over that of the plan, the best first.
    baselines: tuple[tuple[str, float], ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the line."""
        parts = [
            f"{time_text(self.step_seconds)} per step",
            f"{size_text(self.peak_bytes)} of {size_text(self.memory_bytes)}: {self.fit}",
        ]
        if self.utilization is not None:
            parts.append(f"{self.measure} {100 * self.utilization:.3g} %")
        if self.rate is not None:
            parts.append(f"{rounded(self.rate)} {self.unit}/s")
        if self.over_bound is not None:
            parts.append(f"{multiple(self.over_bound)} the bound")
        parts += [baseline_text(method, ratio) for method, ratio in self.baselines[:2]]
        return tuple(parts)

    def __str__(self) -> str:
        return ", ".join(self.parts)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, with the line as ``text``."""
        return {**dataclasses.asdict(self), "text": str(self)}


def verdict_of(plan: Plan, compared: Sequence[MethodResult] = ()) -> PlanVerdict:
    """The verdict on ``plan``, beside the results of other methods."""
    step, fit = plan.after.step_seconds, fit_text(plan.fits, plan.after.fit_probability)
    ratios = [
        (row.method, row.step_seconds / step) for row in compared
        if row.plan is not plan and not row.error and row.fits and step > 0
    ]  # fmt: skip
    work, unit = _work(plan)
    return PlanVerdict(
        grade="good" if fit.startswith("fits") else "bad" if not plan.fits else "doubtful",
        step_seconds=step,
        peak_bytes=plan.after.peak_bytes,
        memory_bytes=plan.memory_bytes,
        fit=fit,
        utilization=_utilization(plan),
        measure="HFU" if "recomputed" in plan.analysis.program.passes else "MFU",
        rate=work / step if work and step > 0 else None,
        unit=unit,
        over_bound=max(1.0, step / plan.bound_seconds) if plan.bound_seconds > 0 else None,
        baselines=tuple(sorted(ratios, key=lambda row: row[1])),
    )


def _utilization(plan: Plan) -> float | None:
    """The time of all products at the datasheet's peak, over that of the devices."""
    tables, machine = plan.model.tables, plan.hardware
    peaks = np.array([machine.peak(dtype) for dtype in tables.dtypes]) / machine.matmul_efficiency
    ops = tables.ops
    least = float((ops.flops * ops.count / peaks[ops.dtype]).sum())
    whole = plan.after.step_seconds * plan.mesh.devices
    return least / whole if least > 0 and whole > 0 else None


def _work(plan: Plan) -> tuple[int, Literal["tokens", "rows"]]:
    """What one step works on: tokens, which are elements of integer inputs, or rows of arrays."""
    program = plan.analysis.program
    inputs = [
        program.values[value].type
        for role, value in zip(argument_roles(program), program.argument_values, strict=True)
        if role == "inputs" and program.values[value].type.shape
    ]
    whole = [t for t in inputs if t.dtype[0] in "iu" and len(t.shape) < 3]
    arrays = [t for t in inputs if "f" in t.dtype and len(t.shape) > 1]
    # Beside images and other arrays, one integer per row is a label.
    if any(len(t.shape) == 2 for t in whole) or (whole and not arrays):
        return max(math.prod(t.shape) for t in whole), "tokens"
    return max((t.shape[0] for t in arrays or inputs), default=0), "rows"


def multiple(ratio: float) -> str:
    """A step time over the lower bound as text: ``1.04x``; rounding never shows less than 1."""
    ratio = max(1.0, ratio)
    return f"{ratio:,.{1 + (ratio < 10)}f}x"


def baseline_text(method: str, ratio: float) -> str:
    """How much faster a plan is than that of another method: ``1.31x faster than manual``."""
    if 0.995 < ratio < 1.005:
        return f"as fast as {method}"
    faster = ratio > 1
    factor = ratio if faster else 1 / ratio
    return f"{factor:,.2f}x {'faster' if faster else 'slower'} than {method}"


def rounded(number: float) -> str:
    """Three digits, with ``k``, ``M`` or ``G``: ``173k``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):,g}{unit}"
    return f"{number:.3g}"


__all__ = ["PlanVerdict", "baseline_text", "multiple", "rounded", "verdict_of"]
