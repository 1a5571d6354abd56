"""The grid of sizes, and the search for the largest one that fits.

Sizes are rungs: the size that the question begins with is rung 0, and each rung above doubles it.
Half a rung is the size halfway between two rungs.  Numbers of devices go the other way: each rung
above has half as many.  So a higher rung always needs more memory on a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

#: The most rungs above or below the first one.
MOST_RUNGS = 16

#: The most rungs that the search goes up or down at once.
_LONGEST_STEP = 4


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The values of the rungs.

    >>> sizes = Ladder(12)
    >>> [sizes.value(rung) for rung in (-3, -2, -1, 0, 0.5, 1)]
    [None, 3, 6, 12, 18, 24]
    >>> devices = Ladder(8, falling=True)
    >>> [devices.value(rung) for rung in (-1, 0, 1)]
    [16, 8, 4]
    """

    #: The value of rung 0.
    first: int
    #: Whether higher rungs are smaller numbers.
    falling: bool = False
    least: int = 1
    most: int = 2**30

    def value(self, rung: float) -> int | None:
        """The value of a rung; ``None`` if there is none, as for half of an odd number."""
        steps, half = math.floor(rung), rung % 1 != 0
        if self.falling and half:
            return None
        power = -steps if self.falling else steps
        value = self.first * 2.0**power * (1.5 if half else 1.0)
        if value != round(value) or not self.least <= value <= self.most:
            return None
        return round(value)

    def load(self, rung: float) -> float:
        """What memory grows with: the size, or the share of one device."""
        return float(self.first) * 2.0 ** math.floor(rung) * (1.5 if rung % 1 else 1.0)


@dataclasses.dataclass(frozen=True)
class Need:
    """What a rung needs on a device."""

    fits: bool
    #: Bytes to compare with the limit, and those of them that do not grow with the rung.
    bytes: float
    fixed_bytes: float


def highest_rung(
    ladder: Ladder, need: Callable[[int], Need | None], limit: float, first: int = 0
) -> int | None:
    """The highest rung that fits, if every rung below fits as well; ``None`` if none fits.

    Memory is about linear in the size: the next rung to try is where the line through the last two
    meets the limit, so a few plans suffice.

    :param need: plans a rung; ``None`` if it is impossible, which counts as too large.
    :param limit: bytes on a device.
    :param first: the rung to begin with.
    """
    low: int | None = None  # the highest rung that is known to fit
    high: int | None = None  # the lowest rung that is known not to
    known: dict[int, Need] = {}
    rung = first
    while True:
        answer = need(rung) if ladder.value(rung) is not None else None
        if answer is not None:
            known[rung] = answer
        if answer is not None and answer.fits:
            low = rung
        else:
            high = rung
        if low is not None and (high == low + 1 or low - first >= MOST_RUNGS):
            return low
        if low is None and high is not None:
            below = ladder.value(high - 1) is None or first - high >= MOST_RUNGS
            if below:
                return None
        rung = _next_rung(ladder, known, limit, low, high)


def _next_rung(
    ladder: Ladder, known: dict[int, Need], limit: float, low: int | None, high: int | None
) -> int:
    """The rung to try, strictly between those that fit and those that do not."""
    least = low + 1 if low is not None else _lowest(ladder, high)
    most = high - 1 if high is not None else (low or 0) + _LONGEST_STEP
    guess = _crossing(ladder, known, limit, low, high)
    if guess is None:
        guess = float(least if low is not None else most)
    return int(min(max(guess, least), most))


def _lowest(ladder: Ladder, high: int | None) -> int:
    """The lowest rung below ``high`` that exists, not too far away."""
    assert high is not None
    rung = high - 1
    while ladder.value(rung - 1) is not None and rung > high - _LONGEST_STEP:
        rung -= 1
    return rung


def _crossing(
    ladder: Ladder, known: dict[int, Need], limit: float, low: int | None, high: int | None
) -> float | None:
    """The highest rung that fits, if memory is a line through the two rungs that are nearest."""
    near = sorted(known, key=lambda r: abs(known[r].bytes - limit))[:2]
    if not near:
        return None
    points = [(ladder.load(rung), known[rung].bytes) for rung in near]
    if len(points) == 1:
        points.append((0.0, min(known[near[0]].fixed_bytes, points[0][1])))
    (x, y), (other_x, other_y) = points
    slope = (y - other_y) / (x - other_x)
    if slope <= 0.0:
        return None
    load = x + (limit - y) / slope
    if load <= 0.0:
        return -math.inf
    return math.floor(math.log2(load / ladder.load(0)) + 1e-9)
