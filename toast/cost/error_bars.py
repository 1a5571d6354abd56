"""Error bars: how far XLA's memory and step time may be from a prediction.

The ratio of XLA's figure to the predicted one is a random number.  Its logarithm has a location and
a scale, which depend on what the program is made of (:data:`MADE_OF`), and a distribution around
them.  ``benchmarks/error_bars.py`` learns all three from programs that prices were not tuned on,
and writes ``error_bars.toml``.

The bytes of arguments are exact, so the ratio of memory is that of the rest: temporaries, plus a
small share of the arguments, because temporaries may be almost nothing.  The ratio does not depend
on the sharding.  A limit that must hold with given odds therefore costs a search one constant
factor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import tomllib
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from toast.cost.entities import Floats, Ints
from toast.cost.prices import Prices
from toast.program import Program

#: What programs are made of.  All are shares from 0 to 1, of the unsharded program but for the last
#: one, which is of the plan.
MADE_OF: Mapping[str, str] = {
    "arguments": "bytes of arguments, of the peak",
    "traffic": "seconds of memory-bound kernels, of the step",
    "loops": "seconds of ops in loops, of the step",
    "long loops": "logarithm of the most iterations, of that of 256",
    "recomputed": "1 if the program recomputes (jax.checkpoint), otherwise 0",
    "irregular": "seconds of ragged products, sorts, gathers, scatters and slices at places that "
    "the program computes, of the step",
    "convolutions": "seconds of convolutions, of the step",
    "exposed": "seconds of collectives that products do not hide, of the plan's step",
}

_IRREGULAR = frozenset({
    "chlo_ragged_dot", "ragged_dot", "sort", "gather", "scatter", "dynamic_slice",
    "dynamic_update_slice",
})  # fmt: skip

#: The most iterations that ``long loops`` tells apart.
_LONG = 256

#: Share of the arguments that counts as temporaries: where a program has hardly any, as in
#: decoding, their ratio says nothing.
ARGUMENT_SHARE = 0.02

#: The odds of an interval.
ODDS = 0.8

#: The odds at which a plan counts as one that fits; at the opposite odds, it does not.
SURE = 0.95

#: A tail is the line through the last quantile and the one so many places before it.
_TAIL = 3

#: The most log-odds: too few programs are known to be more certain.
_CERTAIN = 25.0

FILE = pathlib.Path(__file__).with_name("error_bars.toml")

#: A figure of one state, or of ``[S]``.
Number = TypeVar("Number", float, Floats)


class Interval(NamedTuple):
    """A range that contains XLA's figure with some odds, and the prediction."""

    #: The lower end.
    low: float
    #: The upper end.
    high: float


@dataclasses.dataclass(frozen=True)
class Feature:
    """The effect of one of :data:`MADE_OF` on a law: on the location, and on the scale's logarithm.

    Beyond ``least`` and ``most``, those of the programs that it was learned from, it has the effect
    of these.
    """

    location: float
    scale: float
    least: float
    most: float


@dataclasses.dataclass(frozen=True)
class Law:
    """The distribution of the logarithm of a ratio, for any program."""

    location: float
    #: Its logarithm.
    scale: float
    features: Mapping[str, Feature]
    #: Quantiles of the logarithm, less the location, over the scale.
    levels: tuple[float, ...]
    quantiles: tuple[float, ...]

    def of(self, made: Mapping[str, float], *, wider: float = 1.0) -> Spread:
        """The law for a program (by :data:`MADE_OF`), with the scale ``wider`` times as large."""
        location, scale = self.location, self.scale
        for name, feature in self.features.items():
            value = min(max(made[name], feature.least), feature.most)
            location += feature.location * value
            scale += feature.scale * value
        levels = np.array(self.levels)
        return Spread(
            location, wider * math.exp(scale), np.log(levels / (1 - levels)),
            np.array(self.quantiles),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Spread:
    """The distribution of a ratio; its tails are those of a logistic distribution."""

    location: float
    scale: float
    logits: Floats  # [Q] log-odds of the quantiles
    quantiles: Floats  # [Q] increasing

    def ratio(self, odds: float) -> float:
        """The ratio that XLA's figure stays below with these odds."""
        place = _line(math.log(odds / (1 - odds)), self.logits, self.quantiles)
        return math.exp(self.location + self.scale * place)

    def odds(self, ratio: float) -> float:
        """The odds that XLA's ratio stays below ``ratio``."""
        if ratio <= 0:
            return 0.0
        place = (math.log(ratio) - self.location) / self.scale
        logit = _line(place, self.quantiles, self.logits)
        return 1 / (1 + math.exp(-min(max(logit, -_CERTAIN), _CERTAIN)))


def _line(x: float, xs: Floats, ys: Floats) -> float:
    """The piecewise linear function through points, which goes on as through the last few.

    The last two of many measured quantiles are those of a few programs.
    """
    last = len(xs) - 1
    if x < xs[0]:
        i, j = 0, min(_TAIL, last)
    elif x > xs[last]:
        i, j = last, max(last - _TAIL, 0)
    else:
        j = min(max(int(np.searchsorted(xs, x)), 1), last)
        i = j - 1
    return float(ys[i] + (ys[j] - ys[i]) / (xs[j] - xs[i]) * (x - xs[i]))


@dataclasses.dataclass(frozen=True)
class Laws:
    """The contents of ``error_bars.toml``."""

    memory: Law
    step: Law
    #: Number of programs, and the platform that they were compiled for.
    programs: int
    platform: str
    #: How much wider intervals are on other platforms.
    elsewhere: float


@functools.cache
def laws(path: pathlib.Path = FILE) -> Laws:
    """The laws of a file."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))

    def law(name: str) -> Law:
        table = data[name]
        return Law(
            table["location"], table["scale"],
            {key: Feature(**value) for key, value in table.get("features", {}).items()},
            tuple(table["levels"]), tuple(table["quantiles"]),
        )  # fmt: skip

    return Laws(
        law("memory"), law("step"), data["programs"], data["platform"], data["elsewhere"]
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ErrorBars:
    """The error bars of the predictions for one program on one kind of device."""

    #: What the unsharded program is made of: shares by name.
    made: Mapping[str, float]
    #: The distribution of XLA's temporaries over the predicted ones.
    memory: Spread
    _step: Law
    _wider: float
    #: What they stand on, in words.
    basis: str
    #: Whether they were learned on devices of another platform.
    borrowed: bool

    @staticmethod
    def of(made: Mapping[str, float], platform: str) -> ErrorBars:
        """The error bars of a program on a platform (``tpu``, ``cuda`` ...)."""
        known = laws()
        borrowed = platform != known.platform
        wider = known.elsewhere if borrowed else 1.0
        basis = f"{known.programs} programs compiled for {known.platform.upper()}s"
        if borrowed:
            basis += f", {wider:g} times as wide for another platform"
        return ErrorBars(
            made, known.memory.of(made, wider=wider), known.step, wider, basis, borrowed
        )

    def step_interval(self, seconds: float, exposed: float = 0.0, odds: float = ODDS) -> Interval:
        """The interval of a step; ``exposed`` is the share of it for which only collectives run."""
        spread = self._step.of({**self.made, "exposed": exposed}, wider=self._wider)
        low, high = (seconds * spread.ratio(level) for level in _ends(odds))
        return Interval(min(low, seconds), max(high, seconds))

    def peak_interval(
        self, argument_bytes: float, peak_bytes: float, odds: float = ODDS
    ) -> Interval:
        """The interval of peak memory in bytes; it never ends below the arguments."""
        low, high = (
            at_ratio(argument_bytes, peak_bytes, self.memory.ratio(level)) for level in _ends(odds)
        )
        return Interval(min(max(low, argument_bytes), peak_bytes), max(high, peak_bytes))

    def fit_probability(
        self, argument_bytes: float, peak_bytes: float, memory_bytes: float
    ) -> float:
        """The odds that XLA needs at most ``memory_bytes``."""
        if argument_bytes > memory_bytes:
            return 0.0
        more = ARGUMENT_SHARE * argument_bytes
        uncertain = peak_bytes - argument_bytes + more
        return self.memory.odds((memory_bytes - argument_bytes + more) / uncertain) if (
            uncertain > 0
        ) else 1.0  # fmt: skip

    def factor(self, safety: float | None) -> float:
        """The ratio of memory to plan with, so that a plan fits with the odds ``safety``.

        At least 1: predictions must fit, too.
        """
        return 1.0 if safety is None else max(1.0, self.memory.ratio(safety))


def at_ratio(argument_bytes: Number, peak_bytes: Number, ratio: float) -> Number:
    """The peak if XLA's memory besides arguments is ``ratio`` times the predicted one."""
    share = 1.0 + ARGUMENT_SHARE * (ratio - 1.0)
    return argument_bytes * share + (peak_bytes - argument_bytes) * ratio


def _ends(odds: float) -> tuple[float, float]:
    return (1 - odds) / 2, (1 + odds) / 2


def made_of(
    program: Program, representative: Ints, class_seconds: Floats, unsharded: Prices
) -> dict[str, float]:
    """What a program is made of, without the part of the plan.

    ``representative`` and ``class_seconds`` are ``[K]``: an op of each class, and the seconds of
    the class in a step; ``unsharded`` is the price of the unsharded program.
    """
    repeats = np.array([program.repeats[op] for op in representative.tolist()])
    kinds = [program.kind(op) for op in representative.tolist()]
    irregular: npt.NDArray[np.bool_] = np.array([kind in _IRREGULAR for kind in kinds], dtype=bool)
    convolves: npt.NDArray[np.bool_] = np.array(
        [kind == "convolution" for kind in kinds], dtype=bool
    )
    seconds = max(float(class_seconds.sum()), 1e-30)
    longest = max(program.repeats, default=1)
    recomputed = any(signature.kind == "optimization_barrier" for signature in program.signatures)
    return {
        "arguments": float(unsharded.argument_bytes[0] / max(unsharded.peak_bytes[0], 1.0)),
        "traffic": float(unsharded.memory_seconds[0] / max(unsharded.seconds[0], 1e-30)),
        "loops": float(class_seconds[repeats > 1].sum() / seconds),
        "long loops": min(1.0, math.log(max(longest, 1)) / math.log(_LONG)),
        "recomputed": float(recomputed),
        "irregular": float(class_seconds[irregular].sum() / seconds),
        "convolutions": float(class_seconds[convolves].sum() / seconds),
    }


def exposed_share(seconds: float, collective_seconds: float, hidden_seconds: float) -> float:
    """The share of a step for which only collectives run."""
    return min(1.0, max(0.0, collective_seconds - hidden_seconds) / max(seconds, 1e-30))
