"""Where values are sharded in batches of states: on which axes, and what follows from it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from toast.cost.tables import Tables
from toast.space import NONE, States

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Dims = npt.NDArray[np.int8]
#: ``[S, K, A]`` the factor of an op class that holds an axis; F for none.
Held = npt.NDArray[np.intp]
#: Sets of mesh axes: axis ``a`` is bit ``a``, as in :meth:`toast.hardware.Collectives.seconds`.
Axes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every value is sharded, for ``S`` states: dimension per axis, or -1."""

    held: Held  # [S, K, A] factor that holds each axis; F for none
    defined: Dims  # [S, C, A] as the op computes it
    settled: Dims  # [S, C, A] after a reduce-scatter
    used: Dims  # [S, U, A] as each use demands it
    partial: Axes  # [S, C] the op's result is a partial sum over these axes
    differs: Axes  # [S, U] axes on which a use sees another sharding than the definition's
    shared: Bools  # [S, U] an earlier use class already made the same copy
    scattered: Axes  # [S, C] axes of partial sums that are kept in parts
    whole: Bools  # [S, C] ... and that XLA sums whole nevertheless
    #: ``[S, A]`` how much each axis should be the major one where several shard one dimension.
    major: npt.NDArray[np.int64]


def axes_of(condition: Bools) -> Axes:
    """``[S, X]`` sets of the axes for which ``[S, X, A]`` holds."""
    found = condition[..., 0].astype(np.uint8)
    for axis in range(1, condition.shape[-1]):
        found |= condition[..., axis].astype(np.uint8) << np.uint8(axis)
    return found


def held_by(t: Tables, states: States) -> Held:
    """The factors that hold axes in ``states`` (``[S, K, A]``), as tables are indexed."""
    return np.where(states < 0, t.slot_dim.shape[1] - 1, states).astype(np.intp)


def lay_out(
    t: Tables,
    devices: Floats,
    states: States,
    order: npt.NDArray[np.int64] | None,
    whole: Callable[[Axes, Held, Dims], Bools],
) -> Layout:
    """Shardings of all value and use classes in ``states``.

    ``devices`` are those on each set of axes, ``[2 ** A]``.  ``order`` is that of the mesh's axes,
    if it has one.  ``whole`` says which sums over ``[S, C]`` axes XLA does not take in parts.
    """
    factors = t.slot_dim.shape[1] - 1
    held = held_by(t, states)
    defined = slot_dims(t, held, t.value_slot)
    used = slot_dims(t, held, t.use_slot)
    value_class = t.slot_class[t.value_slot]
    flat = np.arange(len(t.value_slot))[:, None] * (factors + 1) + held[:, value_class]
    summed = t.reduces.ravel()[flat]
    settled = defined
    if summed.any():
        wanted = np.full(defined.shape, NONE, dtype=np.int8)
        if len(t.use_first):
            low = np.minimum.reduceat(used, t.use_first, axis=1)
            high = np.maximum.reduceat(used, t.use_first, axis=1)
            wanted[:, t.used_value] = np.where(low == high, low, NONE)
        settled = _scattered(t, devices, defined, np.where(summed, wanted, NONE))
    shared = np.zeros(used.shape[:2], dtype=bool)
    for later, earlier in t.pairs:
        shared[:, later] |= axes_of(used[:, later] != used[:, earlier]) == 0
    major = _major_axes(t, settled, used, order)
    partial, differs = axes_of(summed), axes_of(settled[:, t.use_value] != used)
    scattered = partial & axes_of(settled >= 0)
    kept_whole = whole(scattered, held, settled)
    return Layout(
        held, defined, settled, used, partial, differs, shared, scattered, kept_whole, major
    )


def _major_axes(
    t: Tables, settled: Dims, used: Dims, order: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64]:
    """How often each axis stays while another of its dimension is gathered: ``[S, A]``.

    Where several axes shard one dimension their order decides what a gather costs: shards that
    stay must be the major ones, or they have to change places first.  One order holds for the
    whole program: only then are a sum's parts in the order that its scattered shards need.
    """
    axes = used.shape[-1]
    if order is not None:
        return np.broadcast_to(order, (len(used), axes))
    kept = np.zeros((len(used), axes), dtype=np.int64)
    for axis, here in staying(settled[:, t.use_value], used):
        kept[:, axis] += here @ t.use_number
    return kept


def staying(before: Dims, used: Dims) -> Iterator[tuple[int, Bools]]:
    """Axes, and the uses ``[S, U]`` at which each stays while another one of its dimension goes."""
    for a, b in itertools.combinations(range(used.shape[-1]), 2):
        together = (before[..., a] == before[..., b]) & (before[..., a] >= 0)
        if together.any():
            stays_a, stays_b = (before[..., x] == used[..., x] for x in (a, b))
            yield a, together & stays_a & ~stays_b
            yield b, together & stays_b & ~stays_a


def changes_places(layout: Layout, before: Dims, after: Dims) -> Axes:
    """Axes that must trade places along their dimension on the way from before to after.

    ``[S, X]``: an axis that comes or goes stands major to one that stays.
    """
    found = np.zeros(after.shape[:2], dtype=np.uint8)
    for stay, move, here in meeting(before, after):
        rank = layout.major[:, move] - layout.major[:, stay]
        outside = (rank > 0 if move > stay else rank >= 0)[:, None]
        found |= (here & outside) * np.uint8(1 << stay | 1 << move)
    return found


def meeting(before: Dims, after: Dims) -> Iterator[tuple[int, int, Bools]]:
    """Pairs of axes, and where (``[S, X]``) the second comes or goes while the first stays."""
    for stay, move in itertools.permutations(range(after.shape[-1]), 2):
        dim = before[..., stay]
        stays = (dim == after[..., stay]) & (dim >= 0)
        yield stay, move, stays & ((before[..., move] == dim) != (after[..., move] == dim))


def _scattered(t: Tables, devices: Floats, defined: Dims, wanted: Dims) -> Dims:
    """``defined`` with partial sums scattered where wanted, if the dimension has room."""
    settled = np.where(wanted >= 0, wanted, defined)
    sizes, rank = t.value_sizes.ravel(), t.value_sizes.shape[1]
    row = np.arange(len(t.value_sizes)) * rank
    for axis in range(wanted.shape[-1]):
        asked = wanted[:, :, axis] >= 0
        if not asked.any():
            continue
        here = settled[:, :, axis]
        shards = devices[axes_of(settled == here[:, :, None])]
        full = asked & (sizes[row + np.maximum(here, 0)] % shards != 0)
        settled[:, :, axis] = np.where(full, defined[:, :, axis], here)
    return settled


def slot_dims(t: Tables, held: Held, slots: npt.NDArray[np.int64]) -> Dims:
    """Dimension of each slot that each axis shards, or -1: ``[S, X, A]``."""
    table = t.slot_dim
    flat = slots[:, None] * table.shape[1] + held[:, t.slot_class[slots]]
    return np.asarray(table.ravel()[flat])
