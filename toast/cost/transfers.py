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

    With :func:`trades` that is all that moves.
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
    # Definitions and uses that disagree.
    was, now = held[:, t.use_value], axes_of(layout.used >= 0)
    gather, exchange = was & ~now, was & now & layout.differs
    between = _between(t, devices, layout, settled)
    if exchange.any():
        yield between._replace(kind=ALL_TO_ALL, axes=exchange, result=used)
    yield between._replace(
        kind=GATHER, axes=gather, size=between.size * devices[gather], result=used
    )
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


def trades(t: Tables, devices: Floats, layout: Layout, settled: Floats) -> Iterator[Moves]:
    """What else moves, because of the order of the axes: shards that change places.

    That order, and nothing else, is one of the whole program (``layout.major``).
    """
    if layout.scattered.any():
        places = changes_places(layout, layout.defined, layout.settled) * (layout.partial > 0)
        times = np.ones(settled.shape[:1] + (1,)) * t.value_count
        yield Moves(PERMUTE, places, settled, settled, times, places=True)
    places = changes_places(layout, layout.settled[:, t.use_value], layout.used)
    if places.any():
        yield _between(t, devices, layout, settled)._replace(axes=places, places=True)


def _between(t: Tables, devices: Floats, layout: Layout, settled: Floats) -> Moves:
    """How often, and how much, moves between definitions and uses: of no axes yet."""
    held, now = axes_of(layout.settled >= 0)[:, t.use_value], axes_of(layout.used >= 0)
    local = settled[:, t.use_value] / devices[now & ~held] * t.use_share
    times = t.use_count * ((layout.differs > 0) & ~layout.shared)
    return Moves(
        PERMUTE, np.zeros_like(now), local, local, times, t.use_constant, t.use_share, of_uses=True
    )


def _merged(t: Tables, where: Axes, scattered: bool) -> Floats:
    """The share of each value class whose sums over devices wait for a common one."""
    found = np.zeros(where.shape)
    if len(t.merge_class):
        alike = where[:, t.merge_class] == where[:, t.merge_with]
        if scattered:
            alike &= t.summed_whole[t.merge_class] == t.summed_whole[t.merge_with]
        first = np.flatnonzero(np.diff(t.merge_class, prepend=-1))
        found[:, t.merge_class[first]] = np.add.reduceat(alike * t.merge_share, first, axis=1)
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
