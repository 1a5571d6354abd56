"""Learns the error bars of predictions from the corpus of ``strangers.py``.

    python benchmarks/error_bars.py [--page] [--check]

It predicts all rows of benchmarks/strangers.csv and benchmarks/engineers.csv with present prices,
learns the distribution of XLA's figure over ours from the open half of the programs (even seeds),
and writes toast/cost/error_bars.toml.  Then it prints how often XLA's figures are within the
intervals, in the open halves and in those that are held out.  ``--page`` writes this table into
docs/fidelity.md.  ``--check`` learns nothing: it prints the table for the intervals in the file.

What a program is made of (``toast.cost.error_bars.MADE_OF``) enters one by one, as long as this
makes programs of the grammar likelier that were left out of the fit.  A third of the weight of the
quantiles is that of such programs: each is left out of the fit once.  They are too narrow, because
prices have been tuned on the open half.  A third is that of first predictions, which are too wide,
because what they missed most has been mended: benchmarks/first_predictions.csv has those of the
programs drawn last, by the prices of the day on which each was drawn.  What a program is made of is
that of present prices.  The last third is that of programs as engineers write them, which the fit
has not seen: they differ more from prices than any that a grammar draws.  One more program, drawn
from a distribution with heavy tails, stands for those that the corpus does not have.

It takes a few seconds for a program, and compiles nothing.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import grammar
import jax
import numpy as np
import numpy.typing as npt
import strangers
from scipy import optimize, stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cli.elapsed import steps
from toast.cost import CostModel
from toast.cost.error_bars import (
    ARGUMENT_SHARE,
    FILE,
    MADE_OF,
    SURE,
    ErrorBars,
    Feature,
    Law,
    exposed_share,
    laws,
)
from toast.hardware import Mesh, load
from toast.plan.prediction import Prediction
from toast.space import Space

Floats = npt.NDArray[np.float64]

BEGIN, END = "<!-- error bars: begin -->\n", "<!-- error bars: end -->\n"

#: Degrees of freedom of the distribution that fits assume, which has heavy tails.
FREEDOM = 4.0
#: Weight of the squares of effects, against the likelihood of one program.
RIDGE = 1.0
#: The least gain of log-likelihood, of all programs together, that another effect must have.
GAIN = 1.0
#: The bandwidth that smooths quantiles.
SMOOTH = 0.15
#: How much wider intervals are on platforms without a corpus.
ELSEWHERE = 1.5
#: The least ratio of memory: XLA may need no temporaries at all.
LEAST = 0.1

LEVELS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99,
          0.995)  # fmt: skip


#: First predictions: by seed and plan, the peak in GiB and the step as XLA's scheduler sees it, in
#: ms, which is missing for programs that were drawn for their memory.
FIRST = pathlib.Path(__file__).with_name("first_predictions.csv")


class First(NamedTuple):
    """The first prediction for a plan; NaN for what was not predicted."""

    peak_gib: float
    scheduled_step_ms: float


def first_predictions() -> dict[tuple[int, str], First]:
    """The first predictions, by seed and name of the plan."""
    with FIRST.open(newline="", encoding="utf-8") as file:
        return {
            (int(row["seed"]), row["plan"]): First(
                float(row["peak_gib"] or "nan"), float(row["scheduled_step_ms"] or "nan")
            )
            for row in csv.DictReader(file)
        }


@dataclasses.dataclass(frozen=True)
class Sample:
    """A plan: what we predict, and what XLA says."""

    row: strangers.Row
    predicted: Prediction
    #: The step as XLA's scheduler sees it.
    scheduled_seconds: float
    #: What the program and the plan are made of.
    made: Mapping[str, float]

    @property
    def constant_bytes(self) -> float:
        """That of the prediction."""
        return self.predicted.constant_bytes

    @property
    def of_engineers(self) -> bool:
        """Whether the program is one of ``engineers.py``."""
        return self.row.seed >= grammar.ENGINEERS

    @property
    def memory(self) -> float:
        """The logarithm of XLA's memory besides arguments over ours; NaN if unknown.

        Nothing is learned where constants may be in memory, which intervals contain anyway.
        """
        return float("nan") if self.constant_bytes else self._memory(self.predicted.peak_bytes)

    @property
    def step(self) -> float:
        """The logarithm of XLA's step over ours; NaN if unknown."""
        return self._step(self.scheduled_seconds)

    def first_memory(self, first: First) -> float:
        """As :attr:`memory`, for a first prediction."""
        return self._memory(first.peak_gib * strangers.GIB)

    def first_step(self, first: First) -> float:
        """As :attr:`step`, for a first prediction."""
        return self._step(1e-3 * first.scheduled_step_ms)

    def _memory(self, ours: float) -> float:
        theirs = self.row.xla_peak_gib * strangers.GIB
        arguments = self.predicted.argument_bytes
        more = ARGUMENT_SHARE * arguments
        ratio = (theirs - arguments + more) / np.maximum(ours - arguments + more, more)
        return float(np.log(np.maximum(ratio, LEAST)))

    def _step(self, ours: float) -> float:
        theirs = 1e-3 * self.row.known_step_ms
        return float(np.log(theirs / ours)) if theirs > 0 else float("nan")


def samples() -> Iterator[Sample]:
    """All plans of the corpus that the compiler has judged, with present prices."""
    tables = (strangers.TABLE, strangers.ENGINEERS)
    rows = [row for table in tables for row in strangers.read(table) if row.state]
    for seed in steps(sorted({row.seed for row in rows}), lambda seed: f"seed {seed}"):
        stranger = strangers.program_of(seed)
        hardware = load(stranger.hardware)
        analysis = toast.analyze(stranger.model, platform=hardware.platform)
        space = Space(analysis, Mesh.parse(stranger.mesh))
        model = CostModel(space, hardware)
        other = CostModel(space, hardware.as_scheduled_for)
        for row in rows:
            if row.seed == seed and (row.compiled or row.verdict == "out of memory"):
                state = strangers.unpacked(row.state, model.space.initial)
                found = Prediction.of(model.price(state[None]))
                exposed = exposed_share(
                    found.step_seconds, found.collective_seconds, found.hidden_seconds
                )
                seconds = strangers.scheduled(other, state).seconds
                yield Sample(row, found, seconds, {**model.made_of, "exposed": exposed})
        jax.clear_caches()
        gc.collect()


# -- the fit ---------------------------------------------------------------------------------------


def equal_weights(program: npt.NDArray[np.int64]) -> Floats:
    """``[N]`` weights of plans, by the seeds of their programs: every program counts the same."""
    _, which, count = np.unique(program, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / count[which])


@dataclasses.dataclass(frozen=True)
class Data:
    """Logarithms of ratios, with what plans are made of."""

    names: tuple[str, ...]
    made: Floats  # [N, names]
    ratio: Floats  # [N]
    program: npt.NDArray[np.int64]  # [N] seed

    @property
    def weight(self) -> Floats:
        """``[N]`` weights of plans."""
        return equal_weights(self.program)

    def of(self, chosen: npt.NDArray[np.bool_]) -> Data:
        """Some of the plans."""
        return Data(self.names, self.made[chosen], self.ratio[chosen], self.program[chosen])

    def only(self, names: Sequence[str]) -> Data:
        """Some of the features."""
        columns = [self.names.index(name) for name in names]
        return Data((*names,), self.made[:, columns], self.ratio, self.program)


def data_of(
    plans: Sequence[Sample], figure: Callable[[Sample], float], names: Sequence[str]
) -> Data:
    """The data of plans whose figure is known."""
    known = [plan for plan in plans if np.isfinite(figure(plan))]
    made = [[plan.made[name] for name in names] for plan in known]
    return Data(
        (*names,), np.array(made).reshape(len(known), len(names)),
        np.array([figure(plan) for plan in known]), np.array([plan.row.seed for plan in known]),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Line:
    """A location, and the logarithm of a scale, that are linear in what plans are made of."""

    location: Floats  # [1 + names]
    scale: Floats  # [1 + names]

    def of(self, made: Floats) -> tuple[Floats, Floats]:
        """``[N]`` location and scale of plans (``[N, names]``)."""
        one = np.concatenate([np.ones((len(made), 1)), made], axis=1)
        return one @ self.location, np.exp(one @ self.scale)

    @staticmethod
    def fitted(data: Data) -> Line:
        """The likeliest line; large effects count as unlikely."""
        weight, count = data.weight, len(data.names)
        middle = np.average(data.made, axis=0, weights=weight) if count else np.zeros(0)
        one = np.concatenate([np.ones((len(data.made), 1)), data.made - middle], axis=1)

        def loss(parameters: Floats) -> tuple[float, Floats]:
            location, scale = np.split(parameters, 2)
            log_scale = one @ scale
            z = (data.ratio - one @ location) * np.exp(-log_scale)
            fit = log_scale + (FREEDOM + 1) / 2 * np.log1p(z * z / FREEDOM)
            pull = (FREEDOM + 1) * z / (FREEDOM + z * z)
            gradient = np.concatenate([
                -(weight * pull * np.exp(-log_scale)) @ one, (weight * (1 - pull * z)) @ one
            ])  # fmt: skip
            effects = parameters.copy()
            effects[[0, count + 1]] = 0.0
            return (
                float(weight @ fit + RIDGE * effects @ effects), gradient + 2 * RIDGE * effects
            )  # fmt: skip

        start = np.zeros(2 * (count + 1))
        start[0] = np.average(data.ratio, weights=weight)
        start[count + 1] = np.log(0.7 * data.ratio.std() + 1e-3)
        best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B").x
        location, scale = np.split(best, 2)
        location[0] -= location[1:] @ middle
        scale[0] -= scale[1:] @ middle
        return Line(location, scale)


def left_out(data: Data) -> tuple[Floats, float]:
    """Of programs that the fit has not seen: places of ratios, and their mean log-likelihood.

    The places are ``[N]``: ratios less the location, over the scale.
    """
    place, likely = np.zeros(len(data.ratio)), np.zeros(len(data.ratio))
    for seed in np.unique(data.program):
        out = data.program == seed
        location, scale = Line.fitted(data.of(~out)).of(data.made[out])
        place[out] = (data.ratio[out] - location) / scale
        likely[out] = stats.t.logpdf(place[out], FREEDOM) - np.log(scale)
    return place, float(np.average(likely, weights=data.weight))


def learned(data: Data, *others: Data) -> Law:
    """The law of the data; the ``others`` are in the quantiles alone, with as much weight each.

    Such are first predictions, by prices that were not tuned yet, and programs of another kind.
    """
    chosen: list[str] = []
    place, best = left_out(data.only(chosen))
    while len(chosen) < len(data.names):
        tried = {
            name: left_out(data.only([*chosen, name])) for name in data.names if name not in chosen
        }
        name = max(tried, key=lambda name: tried[name][1])
        if tried[name][1] < best + GAIN / len(np.unique(data.program)):
            break
        chosen.append(name)
        place, best = tried[name]
    fewer = data.only(chosen)
    line = Line.fitted(fewer)
    programs = len(np.unique(data.program))
    places = [(place, data.weight)]
    for other in others:
        if len(other.ratio):
            location, scale = line.of(other.only(chosen).made)
            places.append(((other.ratio - location) / scale, other.weight))

    def below(z: float) -> float:
        seen = np.mean([
            np.average(stats.norm.cdf((z - each) / SMOOTH), weights=weight)
            for each, weight in places
        ])  # fmt: skip
        return float((programs * seen + stats.t.cdf(z, FREEDOM - 1)) / (programs + 1))

    quantiles = [
        optimize.brentq(lambda z, level=level: below(z) - level, -1e3, 1e3) for level in LEVELS
    ]
    features = {
        name: Feature(
            float(line.location[1 + i]), float(line.scale[1 + i]),
            float(fewer.made[:, i].min()), float(fewer.made[:, i].max()),
        )
        for i, name in enumerate(chosen)
    }  # fmt: skip
    return Law(float(line.location[0]), float(line.scale[0]), features, LEVELS, (*quantiles,))


def law_text(name: str, law: Law) -> str:
    """A law as a table of TOML."""
    lines = [
        f"[{name}]", f"location = {law.location:.4f}", f"scale = {law.scale:.4f}",
        f"levels = [{', '.join(f'{level:g}' for level in law.levels)}]",
        f"quantiles = [{', '.join(f'{z:.4f}' for z in law.quantiles)}]",
    ]  # fmt: skip
    for key, feature in law.features.items():
        lines += ["", f'[{name}.features."{key}"]  # {MADE_OF[key]}']
        lines += [f"{key} = {value:.4f}" for key, value in dataclasses.asdict(feature).items()]
    return "\n".join(lines) + "\n"


def fit(plans: Sequence[Sample]) -> None:
    """Write the laws of the open plans into the data file."""
    known = [plan for plan in plans if not plan.row.held_out]
    programs = len({plan.row.seed for plan in known})
    seen = [plan for plan in known if not plan.of_engineers]
    written = [plan for plan in known if plan.of_engineers]
    ours = [name for name in MADE_OF if name != "exposed"]
    first = first_predictions()

    def law(
        now: Callable[[Sample], float], then: Callable[[Sample, First], float], names: Sequence[str]
    ) -> Law:
        unseen = [plan for plan in seen if (plan.row.seed, plan.row.plan) in first]
        return learned(
            data_of(seen, now, names),
            data_of(unseen, lambda plan: then(plan, first[plan.row.seed, plan.row.plan]), names),
            data_of(written, now, names),
        )

    memory = law(lambda plan: plan.memory, Sample.first_memory, ours)
    step = law(lambda plan: plan.step, Sample.first_step, [*MADE_OF])
    FILE.write_text(
        "# Written by benchmarks/error_bars.py: do not edit.  The laws of XLA's memory besides\n"
        "# arguments, and of XLA's step, over ours; toast/cost/error_bars.py says what they mean.\n"
        f'programs = {programs}\nplatform = "tpu"\n'
        "# How much wider intervals are on other platforms, which have no corpus.\n"
        f"elsewhere = {ELSEWHERE}\n\n" + law_text("memory", memory) + "\n" + law_text("step", step),
        encoding="utf-8",
    )
    laws.cache_clear()


# -- the report ------------------------------------------------------------------------------------


def bars_of(plan: Sample) -> ErrorBars:
    """The error bars of a plan's program."""
    return ErrorBars.of(plan.made, load(plan.row.hardware).platform)


def coverage(plans: Sequence[Sample]) -> list[str]:
    """The cells of a half: coverage and width of intervals, and how plans that surely fit do.

    Coverage is that of a plan of a new program: every program counts the same.
    """
    cells = [f"{len({plan.row.seed for plan in plans})} ({len(plans)})"]
    for what in ("memory", "step"):
        for odds in (0.5, 0.8, 0.95):
            within, above, width, seeds = [], [], [], []
            for plan in plans:
                bars, ours = bars_of(plan), plan.predicted
                if what == "memory":
                    theirs = plan.row.xla_peak_gib * strangers.GIB
                    low, high = bars.peak_interval(ours.argument_bytes, ours.peak_bytes, odds)
                    if plan.constant_bytes:
                        high = max(high, ours.peak_bytes + plan.constant_bytes)
                    # Arguments are exact but for padding; a peak of arguments alone is within.
                    low *= 0.999
                    width.append((high - low) / ours.peak_bytes)
                else:
                    theirs = 1e-3 * plan.row.known_step_ms
                    if not theirs > 0:
                        continue
                    step = plan.scheduled_seconds
                    low, high = bars.step_interval(step, plan.made["exposed"], odds)
                    width.append((high - low) / step)
                seeds.append(plan.row.seed)
                within.append(low <= theirs <= high)
                above.append(theirs > high)
            if not within:
                cells.append("-")
                continue
            weight = equal_weights(np.array(seeds))
            inside, over = (np.average(part, weights=weight) for part in (within, above))
            cells.append(f"{inside:.0%}, {over:.0%} above, width {np.median(width):.0%}")
    said, wrong, brier = 0, 0, []
    for plan in plans:
        limit = plan.row.limit_gib * strangers.GIB
        ours, fits = plan.predicted, plan.row.compiled
        both = (ours.peak_bytes, ours.peak_bytes + plan.constant_bytes)
        odds = float(np.mean([
            bars_of(plan).fit_probability(ours.argument_bytes, peak, limit) for peak in both
        ]))  # fmt: skip
        brier.append((odds - fits) ** 2)
        if odds >= SURE and ours.peak_bytes <= limit:
            said, wrong = said + 1, wrong + (not fits)
    return [*cells, f"{wrong} of {said}", f"{np.mean(brier):.3f}"]


def report(plans: Sequence[Sample]) -> str:
    """Coverage of the halves of both corpora, as a table in Markdown."""
    halves = {
        f"{of_engineers * 'engineers: '}{'held out' if held_out else 'open'}": [
            plan for plan in plans
            if plan.row.held_out == held_out and plan.of_engineers == of_engineers
        ]
        for of_engineers in (False, True) for held_out in (False, True)
    }  # fmt: skip
    names = ["programs (plans)"]
    names += [f"{what} within the {odds} % interval" for what in ("peak", "step")
              for odds in (50, 80, 95)]  # fmt: skip
    names += [f"said to fit with odds of {SURE:.0%}, and do not", "odds of fitting: Brier score"]
    columns = [coverage(half) for half in halves.values()]
    lines = ["| | " + " | ".join(halves) + " |", "| --- |" + " --- |" * len(halves)]
    lines += [f"| {' | '.join(row)} |" for row in zip(names, *columns, strict=True)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the figures into the docs")
    parser.add_argument("--check", action="store_true", help="learn nothing")
    options = parser.parse_args()
    plans = [*samples()]
    if not options.check:
        fit(plans)
        print(FILE.read_text(encoding="utf-8"))
    text = report(plans)
    print(text)
    if options.page:
        head, rest = strangers.PAGE.read_text(encoding="utf-8").split(BEGIN)
        page = head + BEGIN + text + "\n" + END + rest.split(END)[1]
        strangers.PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
