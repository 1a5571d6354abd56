"""Predictions of the cost model for a state, and the effect of an action."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from toast.cost import CostModel, Interval, Prices
from toast.cost.error_bars import SURE, exposed_share
from toast.hardware import COLLECTIVES
from toast.units import size_text, time_text


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step; bytes and seconds per device."""

    #: The name in StableHLO, such as ``all_gather``.
    kind: str
    #: The number in a step.
    count: int
    #: Bytes of the results that a device holds after them.
    bytes: float
    #: Seconds of all of them, before overlap.
    seconds: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predictions of the cost model for one state, per device."""

    #: Seconds of a step.
    step_seconds: float
    #: Seconds of matrix products.
    matmul_seconds: float
    #: Seconds of kernels that memory traffic bounds.
    memory_seconds: float
    #: Bytes at the peak of memory, arguments included.
    peak_bytes: float
    #: Bytes of the arguments.
    argument_bytes: float
    #: The collectives, by kind.
    collectives: tuple[Collective, ...]
    #: The seconds of collectives that overlap with matrix products.
    hidden_seconds: float = 0.0
    #: The bytes that a device sends in collectives.
    sent_bytes: float = 0.0
    #: The bytes of results, including those in donated arguments.
    output_bytes: float = 0.0
    #: Bytes of constants that XLA may have in memory besides, in half of all programs
    #: (:mod:`toast.cost.random_bits`).
    constant_bytes: float = 0.0
    #: The ranges of XLA's step time and of its peak, with odds of 80 %; ``None`` if unknown.
    step_interval: Interval | None = None
    #: The range of the peak of memory, in bytes, with odds of 80 %; ``None`` if unknown.
    peak_interval: Interval | None = None
    #: The odds that XLA's peak is within the memory limit; ``None`` if unknown.
    fit_probability: float | None = None

    @staticmethod
    def of(prices: Prices, index: int = 0) -> Prediction:
        """The prediction of state ``index`` of a batch of prices, without error bars."""
        return Prediction(
            step_seconds=float(prices.seconds[index]),
            matmul_seconds=float(prices.matmul_seconds[index]),
            memory_seconds=float(prices.memory_seconds[index]),
            peak_bytes=float(prices.peak_bytes[index]),
            argument_bytes=float(prices.argument_bytes[index]),
            collectives=tuple(
                Collective(
                    kind,
                    round(float(prices.collective_count[index, k])),
                    float(prices.collective_bytes[index, k]),
                    float(prices.collective_seconds[index, k]),
                )
                for k, kind in enumerate(COLLECTIVES)
            ),
            hidden_seconds=float(prices.hidden_seconds[index]),
            sent_bytes=float(prices.sent_bytes[index]),
            output_bytes=float(prices.output_bytes[index]),
            constant_bytes=float(prices.constant_bytes[index]),
        )

    def with_error_bars(self, model: CostModel, memory_bytes: float) -> Prediction:
        """The prediction with the error bars of its model; ``memory_bytes`` is the limit.

        The odds of fitting are the mean of those with and without :attr:`constant_bytes`.
        """
        bars, memory = model.error_bars, (self.argument_bytes, self.peak_bytes)
        exposed = exposed_share(self.step_seconds, self.collective_seconds, self.hidden_seconds)
        peak, fits = bars.peak_interval(*memory), bars.fit_probability(*memory, memory_bytes)
        if self.constant_bytes:
            more = (self.argument_bytes, self.peak_bytes + self.constant_bytes)
            peak = peak._replace(high=max(peak.high, more[1]))
            fits = (fits + bars.fit_probability(*more, memory_bytes)) / 2
        return dataclasses.replace(
            self,
            step_interval=bars.step_interval(self.step_seconds, exposed),
            peak_interval=peak,
            fit_probability=fits,
        )

    @property
    def collective_seconds(self) -> float:
        """The seconds of all collectives."""
        return sum(c.seconds for c in self.collectives)


def fit_text(fits: bool, odds: float | None = None) -> str:
    """Whether a plan fits, with the odds: ``fits (97 %)``, ``may not fit (62 %)``.

    ``fits`` is what the prediction says.  Only odds of 95 % confirm it; only odds of 5 % or less
    confirm that a plan does not fit.

    >>> fit_text(True, 0.97), fit_text(True, 0.62), fit_text(False, 0.03)
    ('fits (97 %)', 'may not fit (62 %)', 'does not fit (3 %)')
    """
    if odds is None:
        return "fits" if fits else "does not fit"
    if odds >= SURE and fits:
        words = "fits"
    else:
        words = "does not fit" if odds <= 1 - SURE and not fits else "may not fit"
    return f"{words} ({odds_text(odds)})"


def odds_text(odds: float) -> str:
    """A probability in percent; only certainty is 0 or 100: ``97 %``, ``> 99 %``, ``< 1 %``."""
    if 0.99 < odds < 1:
        return "> 99 %"
    return "< 1 %" if 0 < odds < 0.01 else f"{100 * odds:.0f} %"


def reason_of(
    before: Prediction, after: Prediction, memory_bytes: float, model: CostModel | None = None
) -> str:
    """The gain and the price of an action, in one line.

    ``memory_bytes`` is the limit; predicted peaks must be within it, with the odds of the
    ``model`` if it has any.
    """
    gains = {
        "matrix products": before.matmul_seconds - after.matmul_seconds,
        "memory traffic": before.memory_seconds - after.memory_seconds,
        "collectives": before.collective_seconds - after.collective_seconds,
        # Overlapped collectives cost no time.
        "waiting for collectives": (
            (before.collective_seconds - before.hidden_seconds)
            - (after.collective_seconds - after.hidden_seconds)
        ),
    }
    parts = []
    best = max(gains, key=lambda what: gains[what])
    if gains[best] > 0.002 * before.step_seconds:
        parts.append(f"saves {time_text(gains[best])} of {best}")
    was, now = before.peak_bytes, after.peak_bytes
    peak = f"peak {size_text(was)} to {size_text(now)}"
    needed = [was, now]
    if model is not None:
        needed = [model.needed_bytes(p.argument_bytes, p.peak_bytes) for p in (before, after)]
    if needed[0] > memory_bytes and now < was:
        fits = needed[1] <= memory_bytes
        parts.append(f"{peak}, {'now fits' if fits else 'still over the limit'}")
    elif now < 0.98 * was:
        parts.append(peak)
    moved = _moved(before, after)
    if moved:
        parts.append(moved)
    if not parts and after.step_seconds < before.step_seconds:
        parts.append(f"saves {time_text(before.step_seconds - after.step_seconds)}")
    return "; ".join(parts) or "prepares a later action"


#: Times with a smaller difference (in seconds, or relative) count as equal: sums are rounded.
_NOISE_S, _NOISE = 5e-9, 1e-9


def _moved(before: Prediction, after: Prediction) -> str:
    """The added and removed collectives, and the change of the time of all collectives."""
    pairs = list(zip(before.collectives, after.collectives, strict=True))
    come = [f"{new.count - old.count} {new.kind}" for old, new in pairs if new.count > old.count]
    gone = [f"{old.count - new.count} {old.kind}" for old, new in pairs if new.count < old.count]
    if not come:
        return ""  # the gain is in the text already
    what = f"replaces {', '.join(gone)} by" if gone else "adds"
    was, now = before.collective_seconds, after.collective_seconds
    time = f"{'+' if now > was else '-'}{time_text(abs(now - was))}"
    if abs(now - was) < max(_NOISE_S, _NOISE * max(was, now)):
        time = "same time"
    elif now < was and not gone:
        # Other collectives are smaller, or over fewer devices.
        time = f"yet collectives take {time_text(was - now)} less"
    return f"{what} {', '.join(come)} ({time})"


#: Predictions with a smaller relative difference are equal: the order of sums may differ.
_EQUAL = 1e-9


@dataclasses.dataclass(frozen=True)
class NumberChange:
    """A difference between two predictions."""

    #: What differs, such as ``peak memory``.
    what: str
    #: ``seconds``, ``bytes`` or ``""``.
    unit: str
    #: The number of the first prediction.
    first: float
    #: The number of the second prediction.
    second: float


def numbers(was: Prediction, now: Prediction, suffix: str = "") -> Iterator[NumberChange]:
    """The differences between two predictions; ``suffix`` is appended to their names."""
    rows = [
        ("step time", "seconds", was.step_seconds, now.step_seconds),
        ("matrix products", "seconds", was.matmul_seconds, now.matmul_seconds),
        ("memory traffic", "seconds", was.memory_seconds, now.memory_seconds),
        ("collectives", "seconds", was.collective_seconds, now.collective_seconds),
        ("overlapped with matrix products", "seconds", was.hidden_seconds, now.hidden_seconds),
        ("peak memory", "bytes", was.peak_bytes, now.peak_bytes),
        ("arguments", "bytes", was.argument_bytes, now.argument_bytes),
        ("results", "bytes", was.output_bytes, now.output_bytes),
    ]
    for what, unit, first, second in rows:
        if not close(first, second):
            yield NumberChange(what + suffix, unit, first, second)


def close(first: float, second: float) -> bool:
    """Whether two figures are equal except for rounding."""
    return math.isclose(first, second, rel_tol=_EQUAL, abs_tol=1e-15)
