"""Predictions against what XLA's TPU compiler says of the same plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from rich.table import Table

from toast.analysis import Analysis
from toast.baselines import manual_states
from toast.cost import CostModel
from toast.errors import PlanError
from toast.hardware import Hardware, Mesh
from toast.models import Strategies
from toast.oracle import Verdict, judge
from toast.plan.plan import Prediction
from toast.plan.shard import shardings_of
from toast.search import Search, Settings
from toast.space import Space, States
from toast.units import size_text


@dataclasses.dataclass(frozen=True)
class Compared:
    """One plan: what we predict and what XLA says, or why it says nothing."""

    name: str
    predicted: Prediction
    verdict: Verdict | None
    error: str = ""

    @property
    def peak_error(self) -> float:
        """Predicted over XLA's peak bytes, less one."""
        assert self.verdict is not None
        return self.predicted.peak_bytes / self.verdict.peak_bytes - 1

    @property
    def argument_error(self) -> float:
        """Predicted over XLA's argument bytes, less one."""
        assert self.verdict is not None
        return self.predicted.argument_bytes / self.verdict.argument_bytes - 1


@dataclasses.dataclass(frozen=True)
class Validation:
    """All plans of one program on one mesh."""

    rows: tuple[Compared, ...]
    memory_bytes: float

    @property
    def compiled(self) -> tuple[Compared, ...]:
        """The plans whose memory XLA has told in full."""
        return tuple(r for r in self.rows if r.verdict is not None and not r.verdict.out_of_memory)

    def peak_errors(self) -> tuple[float, float]:
        """Median and 95th percentile of the relative errors of peak bytes."""
        errors = np.abs([row.peak_error for row in self.compiled])
        return (float(np.median(errors)), float(np.quantile(errors, 0.95))) if len(errors) else (
            np.nan, np.nan,
        )  # fmt: skip

    def misjudged(self) -> tuple[Compared, ...]:
        """Plans that XLA calls out of memory and we call fitting with more than 10 % to spare."""
        return tuple(
            row for row in self.rows
            if row.verdict is not None and row.verdict.out_of_memory
            and row.predicted.peak_bytes < 0.9 * self.memory_bytes
        )  # fmt: skip


def validate(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    *,
    plans: int = 8,
    strategies: Strategies | None = None,
    seed: int = 0,
    full: bool = False,
    timeout: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> Validation:
    """Compile the found plan, the unsharded program and ``plans`` others with XLA.

    The others are single actions and random legal states, by turns.  A compile that fails costs
    its row.  Raises :class:`toast.errors.PlanError` when there is no TPU compiler.
    """
    model = CostModel(Space(analysis, mesh), hardware)
    rows = []
    for name, state in states_to_compare(model, plans=plans, strategies=strategies, seed=seed):
        if progress:
            progress(f"compiling {name}")
        predicted = Prediction.of(model.price(state[None]))
        try:
            verdict = judge(
                analysis.program, shardings_of(model, state), hardware, full=full, timeout=timeout
            )
            rows.append(Compared(name, predicted, verdict))
        except PlanError as error:
            if "not installed" in str(error):
                raise
            rows.append(Compared(name, predicted, None, str(error)))
    return Validation(tuple(rows), hardware.memory_limit_bytes)


def states_to_compare(
    model: CostModel, *, plans: int, strategies: Strategies | None = None, seed: int = 0
) -> Iterator[tuple[str, States]]:
    """States with names, all different.

    The found plan, the unsharded program, ``strategies``, and ``plans`` others: single actions and
    random legal states, by turns.
    """
    space = model.space
    settings = Settings(seed=seed)
    search = Search(model, memory_bytes=model.hardware.memory_limit_bytes, settings=settings)
    found = search.run().state
    yield "found", found
    seen = {found.tobytes()}
    if space.initial.tobytes() not in seen:
        seen.add(space.initial.tobytes())
        yield "unsharded", space.initial
    for name, state in manual_states(model, strategies or {}):
        if state.tobytes() not in seen:
            seen.add(state.tobytes())
            yield name, state
    random = np.random.default_rng(seed)
    single = [space.apply(space.initial, action) for action in space.actions]
    made = 0
    for number in range(10 * plans):
        if made == plans:
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
            made += 1
            yield name, state


def table(found: Validation) -> Table:
    """A row per plan: memory, verdict and collectives, predicted / XLA's."""
    made = Table(
        "plan", "peak", "XLA's", "error", "arguments", "XLA's", "collectives, MiB", "XLA's", "s",
        caption=_summary(found),
    )  # fmt: skip
    for row in found.rows:
        ours = {c.kind: c.bytes for c in row.predicted.collectives if c.count}
        peak, arguments = (
            size_text(b) for b in (row.predicted.peak_bytes, row.predicted.argument_bytes)
        )
        if row.verdict is None:
            made.add_row(row.name, peak, "-", "-", arguments, "-", _moved(ours), row.error)
            continue
        verdict = row.verdict
        theirs = {c.kind: c.bytes for c in verdict.collectives}
        oom = verdict.out_of_memory
        made.add_row(
            row.name, peak,
            f"needs {size_text(verdict.peak_bytes)}" if oom else size_text(verdict.peak_bytes),
            "-" if oom else f"{row.peak_error:+.0%}",
            arguments, "-" if oom else size_text(verdict.argument_bytes),
            _moved(ours), "out of memory" if oom else _moved(theirs), f"{verdict.seconds:.1f}",
        )  # fmt: skip
    return made


def _moved(collectives: dict[str, float]) -> str:
    return ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in sorted(collectives.items()))


def _summary(found: Validation) -> str:
    median, high = found.peak_errors()
    exact = sum(abs(row.argument_error) < 1e-3 for row in found.compiled)
    return (
        f"peak: median error {median:.1%}, 95th percentile {high:.1%}; arguments exact in {exact} "
        f"of {len(found.compiled)}; {len(found.misjudged())} plans out of memory that seemed to fit"
    )
