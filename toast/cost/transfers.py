"""What moves between devices under a layout: collectives, how large they are, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from toast.cost.layout import Axes, Floats, Layout, axes_of, changes_places
from toast.cost.tables import Tables

#: Kinds, as :data:`toast.hardware.COLLECTIVES` numbers them.
GATHER, REDUCE, SCATTER, ALL_TO_ALL, PERMUTE = range(5)

#: Devices up to which XLA unrolls the loop of a product that is summed in parts.
UNROLLED = 4


class Moves(NamedTuple):
    """Collectives of one kind, of X value or use classes in S states."""

    kind: int
    axes: Axes  # [S, X]
    size: Floats  # [S, X] bytes as priced
    result: Floats  # [S, X] bytes of results
    times: Floats  # [S, X] how often, if there are axes
    spared: Floats | float = 0.0  # [S, X] or [X] the share of them that XLA does not need
    rounded: Floats | float = 1.0  # [X] bytes of an element over those in the program
    edges: bool = False
    #: Whether X are use classes, and whether shards change places for the order of axes.
    of_uses: bool = False
    places: bool = False


class Timed(NamedTuple):
    """The collectives of one kind: how often each happens, and what it takes."""

    move: Moves
    kind: int
    priced: tuple[int, ...]  # kinds, of which the slowest is the price
    times: Floats  # [S, X] before any is spared
    once: Floats  # [S, X] seconds
    result: Floats  # [S, X] bytes of results


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives that are alike, as XLA leaves them; all of them add up to a state's prices."""

    kind: str
    axes: tuple[str, ...]
    #: Of the result that a device holds after each.
    bytes: float
    #: In a step: of those that stand in the program, XLA merges some, and makes constants anew.
    count: float
    #: The cheapest that the links allow, and what one takes.
    algorithm: str
    seconds: float
    #: Whether shards exchange their edges (of a window, slice or pad).
    edges: bool = False


def moves(
    t: Tables, devices: Floats, layout: Layout, settled: Floats, used: Floats
) -> Iterator[Moves]:
    """What moves between devices, of all value classes or of all use classes at a time.

    ``settled`` and ``used`` are the bytes of every value and use on a device; ``devices`` are those
    on each set of axes.
    """
    # Partial sums, where they are made.
    once_each = np.ones(settled.shape[:1] + (1,)) * t.value_count
    held, scattered = axes_of(layout.settled >= 0), layout.scattered
    reduced = layout.partial & ~held
    whole = settled * devices[scattered]
    if scattered.any():
        spared = _merged(t, scattered, True)
        yield Moves(SCATTER, scattered, whole, settled, once_each, spared)
    if reduced.any():
        spared = _merged(t, reduced, False)
        yield Moves(REDUCE, reduced, settled, settled, once_each, spared)
    if scattered.any():
        places = changes_places(layout, layout.defined, layout.settled)
        places *= layout.partial > 0
        yield Moves(PERMUTE, places, settled, settled, once_each, places=True)
    # Definitions and uses that disagree.
    before = layout.settled[:, t.use_value]
    was, now = held[:, t.use_value], axes_of(layout.used >= 0)
    gather, exchange, sliced = was & ~now, was & now & layout.differs, now & ~was
    times_used = t.use_count * ((layout.differs > 0) & ~layout.shared)
    local = settled[:, t.use_value] / devices[sliced] * t.use_share
    spared, rounded = t.use_constant, t.use_share

    def between(kind: int, axes: Axes, size: Floats, result: Floats) -> Moves:
        return Moves(kind, axes, size, result, times_used, spared, rounded, of_uses=True)

    if exchange.any():
        yield between(ALL_TO_ALL, exchange, local, used)
    yield between(GATHER, gather, local * devices[gather], used)
    places = changes_places(layout, before, layout.used)
    if places.any():
        yield between(PERMUTE, places, local, local)._replace(places=True)
    # Sharded permutation factors exchange with neighbours.
    factors = t.slot_dim.shape[1]
    flat = np.arange(len(t.halo))[:, None] * factors + layout.held
    halo = t.halo.ravel()[flat]
    if halo.any():
        part = halo[:, t.slot_class[t.value_slot]]
        here = axes_of(part > 0)
        shards = devices[here]
        furthest = part.max(axis=2)
        # A halo is never more than all other shards.
        shifted = np.where(np.isinf(furthest), 1.0, np.minimum(furthest * shards, shards))
        shifted *= settled
        yield Moves(PERMUTE, here, shifted, shifted, once_each, edges=True)


def _merged(t: Tables, where: Axes, scattered: bool) -> Floats:
    """The share of each value class whose sums over devices wait for a common one."""
    found = np.zeros(where.shape)
    for later, earlier, share in zip(
        t.merge_class.tolist(), t.merge_with.tolist(), t.merge_share.tolist(), strict=True
    ):
        alike = where[:, later] == where[:, earlier]
        if scattered and t.summed_whole[later] != t.summed_whole[earlier]:
            continue
        found[:, later] += share * alike
    return found


def sent_in_parts(t: Tables, devices: Floats, layout: Layout) -> Floats:
    """Bytes that a device sends in sums in parts, over those sent round a ring: ``[S, C]``.

    Short loops of products are unrolled, with two sums on their way: over four devices there
    are five messages instead of three.  Where an axis as large is idle, a product is computed
    in parts along that; these are summed whole, and change places.
    """
    axes = layout.scattered
    k = t.slot_class[t.value_slot]
    parts = devices[axes]
    found = np.where(t.matmul[k] & (parts == UNROLLED), 5 / 3, 1.0)
    free = (layout.held == t.slot_dim.shape[1] - 1)[:, k]
    sizes = devices[1 << np.arange(layout.held.shape[-1])]
    for axis, size in enumerate(sizes.tolist()):
        alike = np.flatnonzero(sizes == size)
        if size > UNROLLED or len(alike) < 2:
            continue
        idle = (axes == 1 << axis) & free[..., alike].any(axis=2) & t.matmul[k]
        found = np.where(idle, (2 * (size - 1) / size + 1) / max(size - 1, 1), found)
    return found
