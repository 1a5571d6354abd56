"""Comparison of predictions with the results of XLA's compilers for the same plans."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from toast import apply
from toast.analysis import Analysis, Lowering, lowering_of
from toast.apply import Verification
from toast.cost import CostModel
from toast.errors import PlanError
from toast.evaluation.baselines import manual_states
from toast.evaluation.oracle import (
    Communication,
    Verdict,
    check,
    check_devices,
    judge,
    judge_here,
)
from toast.hardware import Hardware, Mesh
from toast.models import Strategies
from toast.plan.prediction import Collective, Prediction
from toast.plan.shard import lowered_state, shardings_of
from toast.search import Settings, find
from toast.space import Space, States
from toast.text_tables import TextTable
from toast.units import size_text, time_text

#: The reference: the TPU compiler, execution on CPU devices (results, kinds of collectives), or the
#: GPUs of this machine, on which plans are timed.
Oracle = Literal["tpu", "cpu", "gpu"]

#: Step times with a smaller relative difference are ties: schedules are not more exact.
TIE = 0.15

#: Smaller peaks depend more on the compiler's padding and fixed costs than on the plan, in bytes.
SMALL_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class StateComparison:
    """One plan: the prediction, and XLA's result or error."""

    name: str
    predicted: Prediction
    verdict: Verdict | None = None
    verification: Verification | None = None
    error: str = ""

    @property
    def peak_error(self) -> float:
        """The predicted peak over XLA's, minus one."""
        assert self.verdict is not None
        return _error(self.predicted.peak_bytes, self.verdict.peak_bytes)

    @property
    def argument_error(self) -> float:
        """The predicted argument bytes over XLA's, minus one."""
        assert self.verdict is not None
        return _error(self.predicted.argument_bytes, self.verdict.argument_bytes)

    @property
    def output_error(self) -> float:
        """The predicted output bytes over XLA's, minus one; only for full compilations."""
        assert self.verdict is not None
        return _error(self.predicted.output_bytes, self.verdict.output_bytes)

    @property
    def sent_error(self) -> float:
        """The predicted sent bytes over XLA's, minus one; 0 if both are below a MiB."""
        assert self.verdict is not None
        theirs = sum(c.sent_bytes for c in self.verdict.collectives)
        if max(theirs, self.predicted.sent_bytes) < 2**20:
            return 0.0
        return _error(self.predicted.sent_bytes, theirs)

    @property
    def scheduled_seconds(self) -> float:
        """The step time of the TPU compiler's schedule; NaN without a full compilation."""
        schedule = self.verdict.schedule if self.verdict else None
        return schedule.seconds if schedule else float("nan")


def _error(ours: float, theirs: float) -> float:
    """Our bytes over theirs, minus one; 0 if both are 0, for example without arguments."""
    return ours / max(theirs, 1.0) - 1 if max(ours, theirs) >= 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Validation:
    """The comparisons of all plans of one program on one mesh."""

    rows: tuple[StateComparison, ...]
    memory_bytes: float

    @property
    def compiled(self) -> tuple[StateComparison, ...]:
        """The plans that XLA compiled and that fit."""
        return tuple(r for r in self.rows if r.verdict is not None and not r.verdict.out_of_memory)

    def peak_errors(self) -> tuple[float, float, float]:
        """Median, 95th percentile and maximum of the relative errors of peak bytes."""
        return _spread([row.peak_error for row in self.compiled])

    def time_errors(self) -> tuple[float, float, float]:
        """Median, 95th percentile and maximum of the relative errors of step times."""
        timed = [r for r in self.compiled if r.scheduled_seconds > 0]
        return _spread([r.predicted.step_seconds / r.scheduled_seconds - 1 for r in timed])

    def tau(self) -> float:
        """Kendall's tau of step times; pairs within :data:`TIE` do not count."""
        agree, pairs = self.pairs()
        return (2 * agree - pairs) / pairs if pairs else float("nan")

    def pairs(self) -> tuple[int, int]:
        """The number of pairs in the same order as the schedule, and of all pairs without ties."""
        rows = [row for row in self.compiled if row.scheduled_seconds > 0]
        agree = pairs = 0
        for a, b in itertools.combinations(rows, 2):
            theirs = a.scheduled_seconds - b.scheduled_seconds
            if abs(theirs) > TIE * max(a.scheduled_seconds, b.scheduled_seconds):
                pairs += 1
                agree += theirs * (a.predicted.step_seconds - b.predicted.step_seconds) > 0
        return agree, pairs

    def squeezed(self) -> tuple[StateComparison, ...]:
        """Plans that fit although the prediction exceeds the limit.

        XLA recomputes values instead of keeping them, which the cost model does not predict.
        """
        return tuple(r for r in self.compiled if r.predicted.peak_bytes > self.memory_bytes)

    def misjudged(self) -> tuple[StateComparison, ...]:
        """Plans that run out of memory although the prediction is 10 % below the limit."""
        return tuple(
            row for row in self.rows
            if row.verdict is not None and row.verdict.out_of_memory
            and row.predicted.peak_bytes < 0.9 * self.memory_bytes
        )  # fmt: skip


def _spread(errors: list[float]) -> tuple[float, float, float]:
    sizes = np.abs(errors) if errors else np.full(1, np.nan)
    return float(np.median(sizes)), float(np.quantile(sizes, 0.95)), float(sizes.max())


def validate(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    *,
    oracle: Oracle = "tpu",
    lowering: Lowering = "xla",
    plans: int = 8,
    strategies: Strategies | None = None,
    seed: int = 0,
    full: bool = False,
    timeout: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> Validation:
    """Compare the predictions for several plans with XLA.

    The plans are TOAST's plan, the unsharded program, ``strategies``, and ``plans`` others: single
    actions and random legal states in turn, drawn with ``seed``.  ``oracle="tpu"`` compiles for a
    TPU; with ``full``, the compilation runs to the end, which gives the time of the schedule.
    ``oracle="cpu"`` runs the program on CPU devices; JAX must have at least as many as the mesh.
    ``oracle="gpu"`` compiles for the GPUs of this machine, which must be those of ``hardware``, and
    times the plans; ``timeout`` does not apply.
    With ``lowering="local"``, both get the device-local program (:mod:`toast.lower`).
    ``timeout`` is in seconds per plan.  ``progress`` is called with messages.

    If a plan fails, only its row has an error.  Raises :class:`toast.errors.PlanError` if there is
    no TPU compiler, for a fact base, and if all plans fail.
    """
    if analysis.program.source is None:
        raise PlanError(f"{analysis.program.name} is a fact base and has no program to compile")
    if oracle == "tpu":
        check(hardware)
    if oracle == "gpu":
        check_devices(hardware, mesh)
    local = lowering_of(lowering) == "local"
    model = CostModel(Space(analysis, mesh), hardware)
    rows = []
    for name, state in states_to_compare(model, plans=plans, strategies=strategies, seed=seed):
        if progress:
            progress(f"running {name}" if oracle == "cpu" else f"compiling {name}")
        row = StateComparison(name, Prediction.of(model.price(state[None])))
        program, shardings = analysis.program, shardings_of(model, state)
        try:
            module = lowered_state(model, state).module if local else None
            if oracle == "tpu":
                verdict = judge(
                    program, shardings, hardware, local=module, full=full, timeout=timeout
                )
                row = dataclasses.replace(row, verdict=verdict)
            elif oracle == "gpu":
                verdict = judge_here(program, shardings, hardware, local=module, seed=seed)
                row = dataclasses.replace(row, verdict=verdict)
            else:
                verification = apply.verify(
                    program, shardings, seed=seed,
                    module_of=(lambda *_, module=module: module) if local else apply.annotate,
                )  # fmt: skip
                row = dataclasses.replace(row, verification=verification)
        except PlanError as error:
            row = dataclasses.replace(row, error=str(error))
        rows.append(row)
    if all(row.error for row in rows):
        raise PlanError(f"no plan could be validated: {rows[0].error}")
    return Validation(tuple(rows), hardware.memory_limit_bytes)


def states_to_compare(
    model: CostModel, *, plans: int, strategies: Strategies | None = None, seed: int = 0
) -> Iterator[tuple[str, States]]:
    """Distinct states with names: TOAST's plan, the unsharded program, ``strategies`` and others.

    The ``plans`` others are single actions and random legal states, in turn.
    """
    space = model.space
    settings = Settings(seed=seed)
    limit = model.hardware.memory_limit_bytes
    best = find(model, memory_bytes=limit, settings=settings).state
    yield "toast", best
    seen = {best.tobytes()}
    if space.initial.tobytes() not in seen:
        seen.add(space.initial.tobytes())
        yield "unsharded", space.initial
    for name, state in manual_states(model, strategies or {}):
        if state.tobytes() not in seen:
            seen.add(state.tobytes())
            yield name, state
    random = np.random.default_rng(seed)
    single = [space.apply(space.initial, action) for action in space.actions]
    yielded = 0
    for number in range(10 * plans):
        if yielded == plans:
            return
        name, state = f"random {number}", space.initial
        if number % 2 == 0 and number // 2 < len(single):
            name, state = f"action {number // 2 + 1}", single[number // 2]
        else:
            count = int(random.integers(2, 7))
            for chosen in random.permutation(len(space.actions))[:count].tolist():
                state = space.apply(state, space.actions[chosen])
        if state.tobytes() not in seen:
            seen.add(state.tobytes())
            yielded += 1
            yield name, state


def table(validation: Validation) -> RenderableType:
    """The output of ``toast validate``: memory and collectives of each plan, and a summary."""
    if any(row.verification for row in validation.rows):
        return _executed(validation)
    timed = any(row.scheduled_seconds > 0 for row in validation.rows)
    memory = TextTable(
        "plan", "peak", "XLA's", "error", "arguments", "XLA's", "outputs", "XLA's",
        "temporary, XLA's", *(("step", "XLA's") if timed else ()), "compilation",
    )  # fmt: skip
    moved = TextTable("plan", "sent", "XLA's", "collectives (MiB of results)", "XLA's")
    for column in moved.columns[3:]:
        column.overflow = "fold"
    for row in validation.rows:
        memory.add_row(*_cells(row, timed))
        moved.add_row(*_moved(row))
    return Group(memory, moved, Text(summary(validation)))


def _cells(row: StateComparison, timed: bool) -> list[str]:
    ours, verdict = row.predicted, row.verdict
    step = [time_text(ours.step_seconds)] if timed else []
    if verdict is None or verdict.out_of_memory:
        result = f"needs {size_text(verdict.peak_bytes)}" if verdict else row.error
        return [
            row.name, size_text(ours.peak_bytes), result, "-", size_text(ours.argument_bytes), "-",
            size_text(ours.output_bytes), "-", "-", *step, *("-" for _ in step), "-",
        ]  # fmt: skip
    # Only a full compilation reports outputs that overwrite no argument.
    outputs = "-" if verdict.schedule is None else size_text(verdict.output_bytes)
    return [
        row.name, size_text(ours.peak_bytes), size_text(verdict.peak_bytes),
        f"{row.peak_error:+.0%}", size_text(ours.argument_bytes),
        size_text(verdict.argument_bytes), size_text(ours.output_bytes), outputs,
        size_text(verdict.temporary_bytes), *step,
        *([time_text(row.scheduled_seconds)] if timed else []), f"{verdict.seconds:.1f} s",
    ]  # fmt: skip


def _moved(row: StateComparison) -> list[str]:
    ours, verdict = row.predicted, row.verdict
    predicted = _kinds(ours.collectives)
    if verdict is None or verdict.out_of_memory:
        why = "out of memory" if verdict else "-"
        return [row.name, size_text(ours.sent_bytes), "-", predicted, why]
    sent = sum(c.sent_bytes for c in verdict.collectives)
    theirs = _kinds(verdict.collectives)
    return [row.name, size_text(ours.sent_bytes), size_text(sent), predicted, theirs]


def _kinds(collectives: Sequence[Collective | Communication]) -> str:
    """Number, kind and MiB of collectives: ``3 all_gather 12.0, ...``."""
    every = (f"{c.count} {c.kind} {c.bytes / 2**20:.1f}" for c in collectives if c.count)
    return ", ".join(every) or "none"


def _executed(validation: Validation) -> RenderableType:
    results = TextTable(
        "plan", "outputs equal", "largest relative error", "collectives", "predicted"
    )
    equal = 0
    for row in validation.rows:
        predicted = ", ".join(f"{c.count} {c.kind}" for c in row.predicted.collectives if c.count)
        if row.verification is None:
            results.add_row(row.name, row.error, "-", "-", predicted)
            continue
        outputs = row.verification.outputs
        equal += row.verification.equal
        kinds = ", ".join(f"{n} {kind}" for kind, n in row.verification.collectives.items())
        results.add_row(
            row.name, f"{sum(o.equal for o in outputs)} of {len(outputs)}",
            f"{max((o.relative_error for o in outputs), default=0.0):.2g}",
            kinds or "none", predicted or "none",
        )  # fmt: skip
    return Group(
        results,
        Text(f"{equal} of {len(validation.rows)} plans compute the same results as one device"),
    )


def summary(validation: Validation) -> str:
    """The figures of a validation as text."""
    rows = validation.compiled
    median, high, worst = validation.peak_errors()
    exact = sum(abs(row.argument_error) < 1e-3 for row in rows)
    near = sum(abs(row.sent_error) <= 0.1 for row in rows)
    text = (
        f"peak: median error {median:.1%}, 95th percentile {high:.1%}, worst {worst:.1%} "
        f"({len(validation.squeezed())} plans squeezed by XLA); "
        f"arguments exact in {exact} of {len(rows)}; "
        f"bytes sent within 10 % in {near} of {len(rows)}; "
        f"{len(validation.misjudged())} plans out of memory that were predicted to fit"
    )
    _, pairs = validation.pairs()
    if pairs:
        middle, high, worst = validation.time_errors()
        text += (
            f". Step time: Kendall's tau {validation.tau():.2f} over {pairs} pairs, median error "
            f"{middle:.0%}, 95th percentile {high:.0%}, worst {worst:.0%}"
        )
    largest = max((row.verdict.peak_bytes for row in rows if row.verdict), default=SMALL_BYTES)
    if largest < SMALL_BYTES:
        text += (
            f". All peaks are below {size_text(SMALL_BYTES)}, where the compiler's padding and "
            "fixed costs dominate, so these figures are not meaningful; use a larger program"
        )
    return text


def plot(validation: Validation) -> str:
    """A scatter plot of predictions over XLA's values, as SVG: peaks and known step times."""
    panels = [("peak memory, GiB", [
        (r.verdict.peak_bytes / 2**30, r.predicted.peak_bytes / 2**30, r.name)
        for r in validation.compiled if r.verdict is not None
    ])]  # fmt: skip
    timed = [r for r in validation.compiled if r.scheduled_seconds > 0]
    if timed:
        panels.append(("step, ms", [
            (1e3 * r.scheduled_seconds, 1e3 * r.predicted.step_seconds, r.name) for r in timed
        ]))  # fmt: skip
    return scatter(panels)


def scatter(panels: list[tuple[str, list[tuple[float, float, str]]]]) -> str:
    """An SVG picture with one panel per (title, points); points are (XLA's, predicted, name).

    The axes are logarithmic, and a line marks equality.
    """
    side, gap = 320, 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(panels) * (side + gap) + 20}" '
        f'height="{side + 2 * gap - 40}" font-family="sans-serif" font-size="12">'
    ]
    for number, (title, points) in enumerate(panels):
        numbers = [value for x, y, _ in points for value in (x, y) if value > 0]
        low, high = min(numbers, default=1.0) / 1.3, max(numbers, default=2.0) * 1.3
        left, top = gap + number * (side + gap), 30

        def place(value: float, low: float = low, high: float = high) -> float:
            return side * float(np.log(max(value, low) / low) / np.log(high / low))

        parts.append(
            f'<text x="{left}" y="{top - 10}">{title}: predicted over XLA\'s</text>'
            f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" stroke="#888"/>'
            f'<line x1="{left}" y1="{top + side}" x2="{left + side}" y2="{top}" stroke="#bbb"/>'
        )
        for tick in _ticks(low, high):
            at = place(tick)
            parts.append(
                f'<text x="{left + at:.1f}" y="{top + side + 16}" text-anchor="middle">{tick:g}'
                f'</text><text x="{left - 6}" y="{top + side - at + 4:.1f}" text-anchor="end">'
                f"{tick:g}</text>"
            )
        for x, y, name in points:
            label = html.escape(f"{name}: {y:.3g}, XLA {x:.3g}")
            parts.append(
                f'<circle cx="{left + place(x):.1f}" cy="{top + side - place(y):.1f}" r="4" '
                f'fill="#1565c0" fill-opacity="0.6"><title>{label}</title></circle>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    every = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    return [tick for tick in every if low <= tick <= high]
