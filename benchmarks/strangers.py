"""Predictions for programs that prices were not tuned on, against XLA's TPU compiler.

    python benchmarks/strangers.py [--seeds 0:40] [--plans 2] [--experts 99] [--limit 120]
        [--lowering local]
    python benchmarks/strangers.py --report --timed [--seeds 0:40] [--limit 120]
    python benchmarks/strangers.py --report [--price] [--page]

The grammar of ``grammar.py`` draws each program from a seed.  Even seeds are open: whoever mends
the cost model may look at them.  Odd seeds are held out: they are only reported.  Each program has
several plans (found, experts', random), and each plan a row in benchmarks/strangers.csv; programs
with rows are not compiled again.  XLA partitions the programs by annotations; with ``--lowering
local``, TOAST writes the program of one device, and the table is benchmarks/strangers_local.csv.

``error_bars.py`` learns error bars from the table.

Seeds from 20000 stand for the programs of ``engineers.py``, which nothing draws:

    python benchmarks/strangers.py --table benchmarks/engineers.csv --seeds 20000:20024 --plans 0

No program is drawn for TPU v5p; some are planned and compiled for it, too:

    python benchmarks/strangers.py --table benchmarks/strangers_v5p.csv --hardware tpu-v5p
        --seeds 0:24 --plans 0 --experts 1 --limit 60

The steps take the compiler longest: ``--timed`` adds them to plans that have none.  ``--search``
searches again, and compiles plans that are new.  ``--price`` predicts all rows again with present
prices.  ``--page`` writes the figures of all tables into
docs/fidelity.md.

This needs libtpu, but no TPU, and a minute or two for a program.  A plan that the compiler refuses
or does not finish has a row that says so.
"""

from __future__ import annotations

import argparse
import base64
import collections
import csv
import dataclasses
import gc
import pathlib
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import grammar
import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.analysis import Lowering
from toast.cli.elapsed import steps
from toast.cost import CostModel, break_down
from toast.cost.error_bars import exposed_share
from toast.cost.liveness import spreading
from toast.errors import ToastError
from toast.evaluation.baselines import manual_states
from toast.evaluation.oracle import Communication, Verdict, judge
from toast.hardware import Mesh, load
from toast.plan.prediction import Collective, Prediction
from toast.plan.shard import lowered_state, shardings_of
from toast.search import Settings, find
from toast.space import Space, States

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "fidelity.md"
TABLE = pathlib.Path(__file__).resolve().parent / "strangers.csv"
TABLES: dict[Lowering, pathlib.Path] = {
    "xla": TABLE,
    "local": TABLE.with_stem("strangers_local"),
}
#: The table of programs with many layers that are not scanned (``--table``, seeds from 10000).
DEEP = TABLE.with_stem("strangers_deep")
#: The table of programs as engineers write them (``--table``, seeds from 20000).
ENGINEERS = TABLE.with_stem("engineers")
#: The table of programs for TPU v5p, which no program of the grammar is drawn for
#: (``--hardware``).
V5P = TABLE.with_stem("strangers_v5p")
MIB, GIB = 2.0**20, 2.0**30

#: Seconds of a search; without a limit, the few largest programs take most of the time.
SEARCH_S = 30.0
#: Seconds of a compilation.
COMPILE_S = 240.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan of a program: what was predicted, and what the compiler says; per device."""

    seed: int
    plan: str
    #: ``compiled``, ``out of memory``, or why there is no verdict.
    verdict: str
    hardware: str
    mesh: str
    limit_gib: float
    #: Of the plan that the search found, also if it has other names.
    found: int
    arguments_gib: float
    xla_arguments_gib: float
    peak_gib: float
    xla_peak_gib: float
    xla_live_gib: float
    sent_mib: float
    xla_sent_mib: float
    step_ms: float
    #: The step as XLA's scheduler sees it: if the ends of every dimension of the torus were linked,
    #: if it took no time to move arguments into fast memory beside other kernels, and without the
    #: kernels for which XLA states no time.
    scheduled_step_ms: float
    xla_step_ms: float
    #: Kernels as XLA's scheduler sees them: products and memory traffic.
    products_ms: float
    memory_ms: float
    xla_kernels_ms: float
    #: All collectives, and the time for which nothing else runs.
    collectives_ms: float
    xla_collectives_ms: float
    exposed_ms: float
    xla_exposed_ms: float
    #: Kernels for which XLA states no time: strided slices and interior pads.
    unstated_ms: float
    #: Number, kind and MiB of collectives.
    collectives: str
    xla_collectives: str
    compile_s: float
    program: str
    #: The state of the space, compressed, as text.
    state: str
    #: The ends of the 80 % intervals, the step's as the scheduler sees it; NaN if not known.
    peak_low_gib: float = dataclasses.field(default=float("nan"), kw_only=True)
    peak_high_gib: float = dataclasses.field(default=float("nan"), kw_only=True)
    step_low_ms: float = dataclasses.field(default=float("nan"), kw_only=True)
    step_high_ms: float = dataclasses.field(default=float("nan"), kw_only=True)

    @property
    def held_out(self) -> bool:
        """Whether nobody looks at the program."""
        return self.seed % 2 == 1

    @property
    def compiled(self) -> bool:
        """Whether the compiler made a program that fits."""
        return self.verdict == "compiled"

    @property
    def known_step_ms(self) -> float:
        """The compiler's step; NaN if it is unknown.

        That of a program with ragged products is: the compiler's estimates count their kernels once
        for every group, or more often.
        """
        return float("nan") if "ragged" in self.program else self.xla_step_ms

    @property
    def stated_step_ms(self) -> float:
        """The step with the links that exist, without kernels for which XLA states no time."""
        return self.step_ms - self.unstated_ms

    @property
    def kernels_ms(self) -> float:
        """The kernels for which XLA states times."""
        return self.products_ms + self.memory_ms - self.unstated_ms

    @property
    def fits(self) -> bool:
        """Whether we predict that it fits."""
        return self.peak_gib <= self.limit_gib


#: The columns that depend on prices.
PREDICTED = (
    "arguments_gib", "peak_gib", "sent_mib", "step_ms", "scheduled_step_ms", "products_ms",
    "memory_ms", "collectives_ms", "exposed_ms", "unstated_ms", "collectives",
    "peak_low_gib", "peak_high_gib", "step_low_ms", "step_high_ms",
)  # fmt: skip

_Row = TypeVar("_Row", bound=Row)


def read(path: pathlib.Path = TABLE) -> list[Row]:
    """The rows of a table."""
    return rows_in(path, Row)


def rows_in(path: pathlib.Path, kind: type[_Row]) -> list[_Row]:
    """The rows of a table of rows of a kind."""
    if not path.exists():
        return []
    types = {field.name: {"int": int, "float": float}.get(str(field.type), str) for field in
             dataclasses.fields(kind)}  # fmt: skip
    rows: list[_Row] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rows.append(kind(**{k: types[k](v) for k, v in row.items()}))
    except (KeyError, TypeError, ValueError) as error:  # UnicodeDecodeError is one
        sys.exit(f"{path}: row {len(rows) + 1} is no {kind.__name__} of this script: {error}")
    return rows


def write(rows: Sequence[Row], path: pathlib.Path = TABLE) -> None:
    """Write the table, sorted by seeds; without columns that no row has."""
    names = [
        field.name
        for field in dataclasses.fields(type(rows[0]) if rows else Row)
        if field.default is dataclasses.MISSING or any(getattr(r, field.name) > 0 for r in rows)
    ]
    lines: list[list[object]] = [[*names]]
    for row in sorted(rows, key=lambda row: row.seed):
        values = [getattr(row, name) for name in names]
        lines.append([f"{v:.5g}" if isinstance(v, float) else v for v in values])
    with path.with_suffix(".new").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    path.with_suffix(".new").replace(path)


def moved(collectives: Sequence[Collective | Communication]) -> str:
    """Number, kind and MiB of collectives."""
    kinds: dict[str, tuple[float, float]] = {}
    for c in collectives:
        count, size = kinds.get(c.kind, (0.0, 0.0))
        kinds[c.kind] = count + c.count, size + c.bytes
    return "; ".join(
        f"{count:.0f} {kind} {size / MIB:.1f}" for kind, (count, size) in kinds.items() if count
    )


def packed(state: States) -> str:
    """A state as text."""
    return base64.b64encode(zlib.compress(state.tobytes(), 9)).decode()


def unpacked(text: str, like: States) -> States:
    """The state of a text; ``like`` is another state of its space."""
    data = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(data, dtype=like.dtype).reshape(like.shape)


def program_of(seed: int) -> grammar.Stranger:
    """The program of a seed."""
    if seed < grammar.ENGINEERS:
        return grammar.draw(seed)
    import engineers_later  # needs optax

    return engineers_later.program(seed - grammar.ENGINEERS)


def stranger_of(rows: Sequence[Row]) -> grammar.Stranger:
    """The program of rows, and their hardware."""
    return dataclasses.replace(program_of(rows[0].seed), hardware=rows[0].hardware)


class Scheduled(NamedTuple):
    """A step as XLA's scheduler sees it, its kernels, and those of them that it leaves out."""

    seconds: float
    products: float
    memory: float
    left_out: float


def scheduled(model: CostModel, state: States) -> Scheduled:
    """The step of a state as XLA's scheduler sees it; ``model`` has the links that it assumes.

    It leaves out strided slices and interior pads: XLA states no time for them.
    """
    prices, left_out = model.price(state[None]), 0.0
    if kernels := spreading(model.space.analysis.program):
        terms = break_down(model, state).term_seconds.values()
        left_out = sum(float(np.asarray(of_ops)[kernels].sum()) for of_ops in terms)
    return Scheduled(
        float(prices.seconds[0]) - left_out, float(prices.matmul_seconds[0]),
        float(prices.memory_seconds[0]), left_out,
    )  # fmt: skip


def predictions_of(
    models: tuple[CostModel, CostModel], state: States
) -> tuple[Prediction, Scheduled]:
    """What is predicted of a state; the interval of the step is of that which the scheduler sees.

    XLA's figure is that of its scheduler, so only this interval can be compared with it.
    """
    model, other = models
    bare, seen = Prediction.of(model.price(state[None])), scheduled(other, state)
    bare = bare.with_error_bars(model, model.hardware.memory_limit_bytes)
    exposed = exposed_share(bare.step_seconds, bare.collective_seconds, bare.hidden_seconds)
    bars = model.error_bars
    predicted = dataclasses.replace(
        bare,
        step_interval=bars.step_interval(seen.seconds, exposed),
    )
    return predicted, seen


def row_of(
    stranger: grammar.Stranger, plan: str, found: bool, limit: float, predicted: Prediction,
    seen: Scheduled, verdict: Verdict | None, error: str, state: str,
) -> Row:  # fmt: skip
    """The row of a plan."""
    nan = float("nan")
    step = kernels = collectives = arguments = peak = live = sent = seconds = nan
    if verdict is not None:
        error = "out of memory" if verdict.out_of_memory else "compiled"
        peak, seconds = verdict.peak_bytes / GIB, verdict.seconds
        if not verdict.out_of_memory:
            arguments, live = verdict.argument_bytes / GIB, verdict.live_bytes / GIB
            sent = sum(c.sent_bytes for c in verdict.collectives) / MIB
        if verdict.schedule is not None:
            step, kernels = verdict.schedule.seconds, verdict.schedule.compute_seconds
            collectives = verdict.schedule.collective_seconds
    exposed = predicted.collective_seconds - predicted.hidden_seconds
    peaks, step_range = (each or (nan, nan) for each in (
        predicted.peak_interval, predicted.step_interval
    ))  # fmt: skip
    return Row(
        stranger.seed, plan, error, stranger.hardware, stranger.mesh, limit / GIB, int(found),
        predicted.argument_bytes / GIB, arguments, predicted.peak_bytes / GIB, peak, live,
        predicted.sent_bytes / MIB, sent, 1e3 * predicted.step_seconds, 1e3 * seen.seconds,
        1e3 * step,
        1e3 * seen.products, 1e3 * seen.memory, 1e3 * kernels,
        1e3 * predicted.collective_seconds, 1e3 * collectives, 1e3 * exposed,
        1e3 * (step - kernels), 1e3 * seen.left_out, moved(predicted.collectives),
        moved(verdict.collectives) if verdict else "", seconds, ", ".join(stranger.words),
        state, peak_low_gib=peaks[0] / GIB, peak_high_gib=peaks[1] / GIB,
        step_low_ms=1e3 * step_range[0], step_high_ms=1e3 * step_range[1],
    )  # fmt: skip


def plan_found(model: CostModel, stranger: grammar.Stranger) -> States:
    """The state that the search finds."""
    settings = Settings(seed=stranger.seed, budget=SEARCH_S)
    return find(model, memory_bytes=model.hardware.memory_limit_bytes, settings=settings).state


def plans_of(
    model: CostModel, stranger: grammar.Stranger, others: int, most_experts: int
) -> Iterator[tuple[str, bool, States]]:
    """Distinct states with names, and whether the search found them; the most telling ones first.

    The random ones are changes of the plan found, and of the unsharded program: near the best
    plans, and far from them.
    """
    space = model.space
    best = plan_found(model, stranger)
    plans = [("found", best)]
    experts = [*manual_states(model, stranger.strategies)]
    if len(experts) > most_experts:  # every program has others
        order = np.random.default_rng((29, stranger.seed)).permutation(len(experts))
        experts = [experts[number] for number in sorted(order[:most_experts].tolist())]
    random = np.random.default_rng((23, stranger.seed))
    drawn: list[tuple[str, States]] = []
    for number in range(others if space.actions else 0):
        state = best if number % 2 == 0 else space.initial
        for chosen in random.permutation(len(space.actions))[: int(random.integers(1, 4))].tolist():
            state = space.apply(state, space.actions[chosen])
        drawn.append((f"random {number}", state))
    plans += [*experts[:4], *drawn, *experts[4:]]
    seen: set[bytes] = set()
    for number, (name, state) in enumerate(plans):
        if state.tobytes() not in seen:
            seen.add(state.tobytes())
            yield name, number == 0, state


def models_of(
    stranger: grammar.Stranger, lowering: Lowering, **memory: Any
) -> tuple[CostModel, CostModel]:
    """The cost model of a program, and that for XLA's scheduler (``as_scheduled_for``).

    ``memory`` are ``remat`` and ``microbatches`` of :func:`toast.analyze`.
    """
    hardware = load(stranger.hardware)
    analysis = toast.analyze(
        stranger.model, platform=hardware.platform, lowering=lowering, **memory
    )
    space = Space(analysis, Mesh.parse(stranger.mesh))
    return CostModel(space, hardware), CostModel(space, hardware.as_scheduled_for)


def rows_of(
    stranger: grammar.Stranger, others: int, most_experts: int, limit_s: float, lowering: Lowering
) -> Iterator[Row]:
    """The rows of a program; plans after ``limit_s`` seconds have no steps, which take longest."""
    begin = time.monotonic()
    models = models_of(stranger, lowering)
    for plan, found, state in plans_of(models[0], stranger, others, most_experts):
        full = time.monotonic() - begin < limit_s
        yield judged(models, stranger, plan, found, state, lowering=lowering, full=full)


def judged(
    models: tuple[CostModel, CostModel], stranger: grammar.Stranger, plan: str, found: bool,
    state: States, *, lowering: Lowering, full: bool,
) -> Row:  # fmt: skip
    """The row of a plan, which is compiled; ``full`` for the step, too."""
    model = models[0]
    hardware, program = model.hardware, model.space.analysis.program
    predicted, seen = predictions_of(models, state)
    verdict, error, shardings = None, "", shardings_of(model, state)
    try:
        local = lowered_state(model, state).module if lowering == "local" else None
        verdict = judge(program, shardings, hardware, local=local, full=full, timeout=COMPILE_S)
    except ToastError as problem:
        error = str(problem)
    return row_of(
        stranger, plan, found, hardware.memory_limit_bytes, predicted, seen, verdict, error,
        packed(state),
    )  # fmt: skip


def judged_again(rows: Sequence[Row], lowering: Lowering) -> Iterator[Row]:
    """The rows of one program, compiled and predicted again; those with steps in full."""
    stranger = stranger_of(rows)
    models = models_of(stranger, lowering)
    for row in rows:
        state = unpacked(row.state, models[0].space.initial)
        full = row.xla_step_ms > 0
        yield judged(
            models, stranger, row.plan, bool(row.found), state, lowering=lowering, full=full
        )


def timed(rows: Sequence[Row], lowering: Lowering, limit_s: float) -> Iterator[Row]:
    """The rows of one program; those without steps are compiled to the end until ``limit_s``."""
    stranger = stranger_of(rows)
    models = models_of(stranger, lowering)
    begin = time.monotonic()
    for row in rows:
        wanted = row.compiled and "ragged" not in row.program and not row.xla_step_ms > 0
        if wanted and time.monotonic() - begin < limit_s:
            state = unpacked(row.state, models[0].space.initial)
            new = judged(
                models, stranger, row.plan, bool(row.found), state, lowering=lowering, full=True
            )
            yield new if new.compiled else row  # perhaps the compiler was too slow
        else:
            yield row


def searched(rows: Sequence[Row], lowering: Lowering) -> list[Row]:
    """The rows of one program after a search by present prices; a new plan found is compiled.

    The plans that earlier prices found stay, as ``found earlier``.
    """
    stranger = stranger_of(rows)
    models = models_of(stranger, lowering)
    best = plan_found(models[0], stranger)
    earlier = sum(row.plan.startswith("found earlier") for row in rows)
    others: list[Row] = []
    same: Row | None = None
    for row in rows:
        if row.state and unpacked(row.state, best).tobytes() == best.tobytes():
            same = row
        elif row.plan == "found":
            earlier += 1
            others.append(dataclasses.replace(row, plan=f"found earlier {earlier}", found=0))
        else:
            others.append(dataclasses.replace(row, found=0))
    if same is None:
        same = judged(models, stranger, "found", True, best, lowering=lowering, full=True)
    name = "found" if same.plan.startswith("found earlier") else same.plan
    return [dataclasses.replace(same, plan=name, found=1), *others]


def priced(rows: Sequence[Row], lowering: Lowering) -> Iterator[Row]:
    """The rows of one program with present predictions; lost ones, without a state, stay."""
    known = [row for row in rows if row.state]
    yield from (row for row in rows if not row.state)
    if known:
        stranger = stranger_of(known)
        yield from priced_by(models_of(stranger, lowering), stranger, known)


def priced_by(
    models: tuple[CostModel, CostModel], stranger: grammar.Stranger, rows: Sequence[_Row]
) -> Iterator[_Row]:
    """The rows with the predictions of the cost models of their program."""
    for row in rows:
        state = unpacked(row.state, models[0].space.initial)
        new = row_of(
            stranger, row.plan, bool(row.found), 0.0, *predictions_of(models, state), None, "",
            row.state,
        )  # fmt: skip
        yield dataclasses.replace(row, **{name: getattr(new, name) for name in PREDICTED})


# -- the report ------------------------------------------------------------------------------------


def errors(pairs: Sequence[tuple[float, float]]) -> str:
    """Median, 90th percentile and worst of the relative errors of (predicted, compiler's)."""
    found = [ours / theirs - 1 for ours, theirs in pairs if theirs > 0]
    if not found:
        return "-"
    sizes = np.abs(found)
    worst = found[int(np.argmax(sizes))]
    return f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {worst:+.0%}"


def covered(figures: Sequence[tuple[float, float, float]]) -> str:
    """How many of the compiler's figures are in their intervals: (low, the compiler's, high)."""
    known = [each for each in figures if each[1] > 0 and each[0] > 0]
    if not known:
        return "-"
    # Arguments are exact but for padding; a peak of arguments alone is within.
    within = sum(0.999 * low <= theirs <= high for low, theirs, high in known)
    above = sum(theirs > high for _, theirs, high in known)
    return f"{within} of {len(known)} ({within / len(known):.0%}), {above} above"


def regrets(rows: Sequence[Row]) -> dict[int, float]:
    """By seed: the compiler's step of the plan that we rank first, over the best of the set.

    Only plans with steps count, and programs with two of them.  Plans that fit come first, as in
    the search.  Infinite if the plan ranked first does not fit for the compiler.
    """
    found: dict[int, float] = {}
    programs: dict[int, list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row.compiled or row.verdict == "out of memory":
            programs[row.seed].append(row)
    for seed, plans in programs.items():
        plans = [row for row in plans if not row.compiled or row.known_step_ms > 0]
        steps = [row.known_step_ms for row in plans if row.compiled]
        if len(steps) > 1:
            first = min(plans, key=lambda row: (not row.fits, row.stated_step_ms))
            found[seed] = first.xla_step_ms / min(steps) if first.compiled else float("inf")
    return found


#: The shares of a device's memory above and below which plans have errors of their own.
_MUCH, _LITTLE = 0.125, 0.01


def report(rows: Sequence[Row]) -> str:
    """The figures of both halves, as a table in Markdown, and what was lost."""
    halves = {
        "open": [row for row in rows if not row.held_out],
        "held out": [row for row in rows if row.held_out],
    }
    columns: list[list[str]] = []
    for half in halves.values():
        done = [row for row in half if row.compiled]
        timed = [row for row in done if row.known_step_ms > 0]
        judged = [row for row in half if row.compiled or row.verdict == "out of memory"]
        said = [row for row in judged if row.fits]
        wrongly = sum(not row.compiled for row in said)
        timid = sum(row.compiled and not row.fits for row in judged)
        exact = [abs(row.arguments_gib / row.xla_arguments_gib - 1) < 1e-3 for row in done]
        ranks = np.array([*regrets(half).values()])
        finite = ranks[np.isfinite(ranks)]
        columns.append([
            f"{len({row.seed for row in half})} ({len(half)})",
            f"{len(done)}",
            f"{np.mean(exact):.1%}" if done else "-",
            errors([(row.peak_gib, row.xla_peak_gib) for row in done]),
            *(
                f"{errors([(row.peak_gib, row.xla_peak_gib) for row in part])} ({len(part)} plans)"
                for part in (
                    [row for row in done if row.xla_peak_gib >= _MUCH * row.limit_gib],
                    [row for row in done if row.xla_peak_gib < _LITTLE * row.limit_gib],
                )
            ),
            errors([(row.scheduled_step_ms, row.xla_step_ms) for row in timed]),
            errors([(row.stated_step_ms, row.xla_step_ms) for row in timed]),
            errors([(row.kernels_ms, row.xla_kernels_ms) for row in timed]),
            errors([(row.sent_mib, row.xla_sent_mib) for row in done if row.xla_sent_mib > 1]),
            covered([(row.peak_low_gib, row.xla_peak_gib, row.peak_high_gib) for row in judged]),
            covered([(row.step_low_ms, row.known_step_ms, row.step_high_ms) for row in timed]),
            f"{wrongly} of {len(said)}",
            f"{timid} of {len(judged)}",
            f"{finite.mean():.3f} | {np.quantile(finite, 0.95):.2f} | {finite.max():.2f}"
            if finite.size else "-",
            f"{len(ranks) - finite.size} of {len(ranks)}",
            f"{sum(row.verdict not in ('compiled', 'out of memory') for row in half)}",
        ])  # fmt: skip
    names = (
        "programs (plans)", "plans compiled", "arguments exact",
        "peak: median, 90th percentile, worst error",
        f"of plans that need at least {_MUCH:.1%} of the device's memory",
        f"of plans that need less than {_LITTLE:.0%}",
        "step, with the collectives of XLA's schedule: the same",
        "step, with those that exist: the same", "kernels: the same",
        "bytes sent: the same", "peak within the 80 % interval", "step within the 80 % interval",
        "said to fit, and do not", "said not to fit, and do",
        "regret: mean, 95th percentile, worst", "plan ranked first does not fit", "plans lost",
    )  # fmt: skip
    lines = ["| | " + " | ".join(halves) + " |", "| --- |" + " --- |" * len(halves)]
    for number, name in enumerate(names):
        cells = [column[number].replace(" | ", ", ") for column in columns]
        if "interval" in name and {*cells} == {"-"}:  # a table without intervals
            continue
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    reasons = collections.Counter(
        row.verdict[:100] for row in rows if row.verdict not in ("compiled", "out of memory")
    )
    if reasons:
        lines += ["", "Plans lost:", *(f"* {n}: {reason}" for reason, n in reasons.most_common())]
    return "\n".join(lines)


def pages(annotated: Sequence[Row], local: Sequence[Row]) -> str:
    """The reports of both ways to run plans, and the steps of one over those of the other."""
    steps = [
        {row.seed: row.known_step_ms for row in rows if row.found and row.known_step_ms > 0}
        for rows in (annotated, local)
    ]
    ratios = np.array([steps[1][seed] / steps[0][seed] for seed in steps[0].keys() & steps[1]])
    text = [
        "Annotations, partitioned by XLA:", "", report(annotated), "",
        "Device-local programs, whose collectives TOAST writes:", "", report(local),
    ]  # fmt: skip
    if ratios.size:
        text += [
            "",
            f"The compiler's step of the plan found for the device-local program, over that of the "
            f"plan found for XLA: {np.median(ratios):.3f} in the median, {ratios.min():.2f} to "
            f"{ratios.max():.2f}, on {ratios.size} programs.",
        ]
    return "\n".join(text)


def known_lines(rows: Sequence[Row]) -> str:
    """The lines of the report in which one of the halves has figures."""
    lines = report(rows).splitlines()
    unknown = "| - | - |", "0 of 0 | 0 of 0 |", "- (0 plans) | - (0 plans) |"
    return "\n".join(line for line in lines if not line.endswith(unknown))


def write_block(page: pathlib.Path, name: str, text: str) -> None:
    """Write a text between the marks of a name on a page."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(head + begin + text + "\n" + end + rest.split(end)[1], encoding="utf-8")


def seeds_in(text: str) -> list[int]:
    """The seeds of a text such as ``0:40``, ``0:40:2`` for the even ones, or ``3,8,20:24``."""
    parts = [[int(number) for number in part.split(":")] for part in text.split(",")]
    seeds = [seed for part in parts for seed in (range(*part) if len(part) > 1 else part)]
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} has no seeds; write for example 0:40")
    return seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seeds", type=seeds_in,
        help="programs to compile, such as 0:40 (the default) or 3,8,20:24:2",
    )  # fmt: skip
    parser.add_argument("--plans", type=int, default=2, help="random plans of each program")
    parser.add_argument(
        "--experts", type=int, default=99,
        help="the most experts' plans of each program; its seed draws them",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=120.0,
        help="seconds of a program, after which its plans are compiled without steps",
    )  # fmt: skip
    parser.add_argument(
        "--lowering", choices=[*TABLES], default="xla",
        help="who partitions: XLA, by annotations, or TOAST, which writes device-local programs",
    )  # fmt: skip
    parser.add_argument("--hardware", help="plan for this device, not for that of the seed")
    parser.add_argument(
        "--table", type=pathlib.Path,
        help="the table to read and to write, by default strangers.csv or strangers_local.csv",
    )  # fmt: skip
    parser.add_argument(
        "--again", action="store_true", help="compile the rows of --seeds again, in the table"
    )
    parser.add_argument(
        "--timed", action="store_true",
        help="compile rows of --seeds without steps to the end, in the table",
    )  # fmt: skip
    parser.add_argument(
        "--search", action="store_true",
        help="search again for the plans of --seeds with steps; compile and add those that are new",
    )  # fmt: skip
    parser.add_argument("--report", action="store_true", help="compile no further programs")
    parser.add_argument("--page", action="store_true", help="write the figures into the docs")
    parser.add_argument("--price", action="store_true", help="predict all rows again, in the table")
    options = parser.parse_args()
    changing = options.again or options.timed or options.search
    if changing and not options.seeds:
        parser.error("--again, --timed and --search change rows: name them, such as --seeds 0:40")
    if options.report and not changing and options.seeds:
        parser.error("--report has all rows of the table: leave out --seeds")
    if options.plans < 0 or options.experts < 0:
        parser.error("--plans and --experts are numbers of plans, from 0")
    lowering: Lowering = options.lowering
    table = options.table or TABLES[lowering]
    if options.report and not table.exists():
        sys.exit(f"{table}: no such table")
    rows = read(table)
    done = {row.seed for row in rows}
    seeds: list[int] = options.seeds or [*range(40)]
    left = [seed for seed in seeds if seed not in done and not options.report]
    for seed in steps(left, lambda seed: f"seed {seed}"):
        stranger = program_of(seed)
        if options.hardware:
            stranger = dataclasses.replace(stranger, hardware=options.hardware)
        print(f"{seed}: {stranger.hardware}, {stranger.mesh}: {', '.join(stranger.words)}")
        new: list[Row] = []
        try:
            for row in rows_of(stranger, options.plans, options.experts, options.limit, lowering):
                new.append(row)
                print(
                    f"  {row.plan}: {row.verdict}; peak {row.peak_gib:.2f} and "
                    f"{row.xla_peak_gib:.2f} GiB, step {row.step_ms:.1f} and "
                    f"{row.xla_step_ms:.1f} ms, {row.compile_s:.0f} s", flush=True,
                )  # fmt: skip
        except Exception as problem:  # a program that TOAST does not take is a finding, too
            nan = float("nan")
            empty, unknown = Prediction(nan, nan, nan, nan, nan, ()), Scheduled(nan, nan, nan, nan)
            print(f"  lost: {type(problem).__name__}: {problem}", flush=True)
            new.append(
                row_of(stranger, "none", False, nan, empty, unknown, None, f"lost: {problem}", "")
            )
        rows += new
        write(rows, table)
        jax.clear_caches()
        gc.collect()
    if options.again:
        for seed in sorted(done & {*seeds}):
            old = [row for row in rows if row.seed == seed and row.state]
            new = [*judged_again(old, lowering)] if old else []
            changed = sum(
                abs(after.xla_peak_gib / before.xla_peak_gib - 1) > 1e-3
                for before, after in zip(old, new, strict=True)
            )
            print(f"{seed}: {len(new)} plans, {changed} with other peaks", flush=True)
            rows = [row for row in rows if row.seed != seed or not row.state] + new
            write(rows, table)
            jax.clear_caches()
            gc.collect()
    if options.timed:
        for seed in steps(sorted(done & {*seeds}), lambda seed: f"seed {seed}"):
            old = [row for row in rows if row.seed == seed]
            if not any(row.compiled and not row.xla_step_ms > 0 for row in old):
                continue
            new = [*timed(old, lowering, options.limit)]
            rows = [row for row in rows if row.seed != seed] + new
            write(rows, table)
            print(f"{seed}: {sum(row.xla_step_ms > 0 for row in new)} plans have steps", flush=True)
            jax.clear_caches()
            gc.collect()
    if options.search:
        for seed in steps(sorted(done & {*seeds}), lambda seed: f"seed {seed}"):
            old = [row for row in rows if row.seed == seed]
            if sum(row.known_step_ms > 0 for row in old) < 2:
                continue
            new = searched(old, lowering)
            rows = [row for row in rows if row.seed != seed] + new
            write(rows, table)
            print(f"{seed}: {new[0].plan}", "" if len(new) == len(old) else "(new)", flush=True)
            jax.clear_caches()
            gc.collect()
    if options.price:
        rows = [
            row
            for seed in sorted({row.seed for row in rows})
            for row in priced([row for row in rows if row.seed == seed], lowering)
        ]
        write(rows, table)
    text = report(rows)
    print(text)
    if options.page:
        text = pages(read(TABLES["xla"]), read(TABLES["local"]))
        write_block(PAGE, "strangers", text)
        write_block(PAGE, "deep strangers", known_lines(read(DEEP)))
        write_block(PAGE, "engineers", known_lines(read(ENGINEERS)))
        write_block(PAGE, "v5p strangers", known_lines(read(V5P)))


if __name__ == "__main__":
    main()
