"""The grid of sizes, and the search for the largest one that fits.

Sizes are rungs: the size that the question begins with is rung 0, each rung above doubles it, and
each rung below is about half of it, down to 1.  Sizes in between are fractions: half a rung is the
size halfway between two rungs.  Numbers of devices go the other way: each rung above has half as
many.  So a higher rung always needs more memory on a device.

The search first finds the highest whole rung that fits (:func:`highest_rung`), and then a size
between it and the next one (:func:`finer_rung`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

#: The most doublings of a number of devices that are tried.
MOST_DOUBLINGS = 16

#: The largest size that is tried, unless the first one is larger.
MOST = 2**30

#: The most rungs that the search goes up or down at once.
_LONGEST_STEP = 4

#: The parts between two rungs, and the most sizes between them that are planned.  So the size that
#: is found is less than one part, 6 %, below the largest one that fits, if units are that small.
PARTS, MOST_FINER = 16, 6

#: The share by which the value of a rung, which is a fraction, may miss a whole number.
_EXACT = 1e-9


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The values of the rungs.

    >>> sizes = Ladder(12)
    >>> [sizes.value(rung) for rung in (-4, -3, -2, -1, 0, 0.5, 1)]
    [None, 1, 3, 6, 12, 18, 24]
    >>> sizes.rung(21), sizes.value(0.75)
    (0.75, 21)
    >>> [Ladder(1000, parts=8).value(-rung) for rung in range(10)]
    [1000, 496, 248, 120, 56, 24, 8, 4, 2, 1]
    >>> devices = Ladder(8, falling=True)
    >>> [devices.value(rung) for rung in (-1, 0, 1)]
    [16, 8, 4]
    """

    #: The value of rung 0.
    first: int
    #: Whether higher rungs are smaller numbers.
    falling: bool = False
    least: int = 1
    most: int = MOST
    #: What the mesh and the microbatches divide: rungs below the first are multiples of it, or of
    #: its largest divisor that is not larger than they are.
    parts: int = 1

    def value(self, rung: float) -> int | None:
        """The value of a rung; ``None`` if there is none: between whole numbers, or at the ends."""
        steps, part = math.floor(rung), rung % 1
        if self.falling and part:
            return None
        value = self._exact(rung)
        if abs(value - round(value)) > _EXACT * value or not self.least <= value <= self.most:
            return None
        if not self.falling and not part and steps < 0:
            return self._whole(steps)
        return round(value)

    def rung(self, value: int) -> float:
        """The rung of a size."""
        steps = math.floor(math.log2(value / self.first) + _EXACT)
        if self._whole(steps + 1) <= value:  # a rung below the first is less than a half
            steps += 1
        low, high = self._whole(steps), self._whole(steps + 1)
        return steps + (value - low) / (high - low)

    def load(self, rung: float) -> float:
        """What memory grows with: the size, or the share of one device."""
        if self.falling:
            return float(self.first) * 2.0 ** math.floor(rung)
        return self._exact(rung)

    def highest_within(self, load: float) -> int:
        """The highest whole rung whose load is not above ``load``, a positive number."""
        rung = math.floor(math.log2(load / self.load(0)) + _EXACT)
        return rung + 1 if self.load(rung + 1) <= load else rung

    def _exact(self, rung: float) -> float:
        """The value of a rung, which may be between whole numbers."""
        steps, part = math.floor(rung), rung % 1
        if self.falling:
            return self.first * 2.0**-steps
        low = self._whole(steps)
        return low + part * (self._whole(steps + 1) - low)

    def _whole(self, steps: int) -> int:
        """The size of a whole rung; 0 below the last one."""
        if steps >= 0:
            return self.first << steps
        half = self.first >> -steps
        if half == 0:
            return 0
        divisor = max(d for d in range(1, min(half, self.parts) + 1) if self.parts % d == 0)
        return half - half % divisor


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
        if low is not None and high == low + 1:
            return low
        if low is None and high is not None:
            # Sizes go down to 1, but numbers of devices have no such end.
            ends = ladder.falling and first - high >= MOST_DOUBLINGS
            if ends or ladder.value(high - 1) is None:
                return None
        rung = _next_rung(ladder, known, limit, low, high)


def finer_rung(
    ladder: Ladder, need: Callable[[float], Need | None], limit: float, low: int, unit: int = 1
) -> float:
    """The highest rung from ``low``, which fits, up to the next whole one, which does not.

    Values between are multiples of ``unit``, about a sixteenth of that of ``low`` apart, or one
    unit if that is more.  As memory is about linear, the next one to plan is where the line through
    the needs of two sizes meets the limit, but no further from the middle than the plans that are
    left can search.

    :param need: as for :func:`highest_rung`, and asked for ``low`` and the next rung again.
    :param unit: what the mesh and the microbatches divide.
    """
    begin, end = ladder.value(low), ladder.value(low + 1)
    if ladder.falling or begin is None or end is None:
        return low
    step = unit * max(1, begin // (PARTS * unit))
    values = range(step * (begin // step + 1), end, step)
    known = {begin: need(low), end: need(low + 1)}
    # Numbers of values: the largest that fits, and the smallest that does not.
    fits, fails = -1, len(values)
    for left in reversed(range(MOST_FINER)):
        if fails - fits == 1:
            break
        middle = (fits + fails) // 2
        meeting = _meeting(known, limit)
        if meeting is not None:
            middle = int((meeting - values[0]) // step)
        most = 2**left  # the numbers of which the plans that are left find the right one
        middle = min(max(middle, fails - most, fits + 1), fits + most, fails - 1)
        answer = known[values[middle]] = need(ladder.rung(values[middle]))
        if answer is not None and answer.fits:
            fits = middle
        else:
            fails = middle
    return ladder.rung(values[fits]) if fits >= 0 else low


def _meeting(known: Mapping[int, Need | None], limit: float) -> float | None:
    """The size at which the line through the largest that fits and the next one meets the limit."""
    below = [(value, need.bytes) for value, need in known.items() if need and need.fits]
    above = [(value, need.bytes) for value, need in known.items() if need and not need.fits]
    if not below or not above:
        return None
    (x, y), (other_x, other_y) = max(below), min(above)
    if other_y <= y:
        return None
    return x + (limit - y) * (other_x - x) / (other_y - y)


def _next_rung(
    ladder: Ladder, known: dict[int, Need], limit: float, low: int | None, high: int | None
) -> int:
    """The rung to try, strictly between those that fit and those that do not."""
    least = low + 1 if low is not None else _lowest(ladder, high)
    most = high - 1 if high is not None else (low or 0) + _LONGEST_STEP
    guess = _crossing(ladder, known, limit, low, high)
    if guess is None:  # memory does not grow yet: climb on in long steps
        guess = float(most if low is None or high is None else least)
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
    return ladder.highest_within(load)
