"""Overlap of collectives with independent products, which they neither wait for nor feed.

A second of a product hides at most one second of collectives, however many could run beside it.
The products are put into a few **bins** in program order.  Collectives that are independent of the
same products share a **window**: the independent part of each bin.  They use up the bins of their
windows; the narrowest windows come first, because they have the fewest alternatives.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy import sparse

from toast import lazy
from toast.cost.entities import Entity, Floats, Ints
from toast.cost.program_loops import LoopOps, loop_with_runs, loops_around
from toast.distinct import distinct_rows
from toast.program import Program

if TYPE_CHECKING:
    from scipy.cluster import hierarchy
else:
    hierarchy = lazy.module("scipy.cluster.hierarchy")

#: Maximum numbers of bins of products and of windows.
_BINS = 24
_WINDOWS = 24

#: If there are many windows, they are rounded to this many parts of a bin.
_PARTS = 4


@dataclasses.dataclass(frozen=True)
class Windows:
    """Where collectives may run, as shares of all products' work.

    ``G`` windows in order of width, ``B`` bins, ``C`` value classes and ``U`` use classes.
    """

    bins: Floats  # [B] share of all work
    room: Floats  # [G, B] share of all work in each window
    of_value: sparse.csr_array  # [G, C] share of a class whose sums have this window
    of_use: sparse.csr_array  # [G, U] the same of moves between definition and use
    #: The same for collectives that run beside the op that makes a value, or uses it.
    beside_maker: sparse.csr_array  # [G, C]
    beside_user: sparse.csr_array  # [G, U]

    def shares(self, entity: Entity, *, beside_op: bool = False) -> sparse.csr_array:
        """``[G, classes]`` the share of each value or use class with each window.

        :param beside_op: whether the products of the op itself do not wait for its collectives.
        """
        if beside_op:
            return self.beside_user if entity is Entity.USE_CLASS else self.beside_maker
        return self.of_use if entity is Entity.USE_CLASS else self.of_value

    def free(self, entity: Entity) -> Floats:
        """``[classes]`` the mean width of the windows of each value or use class."""
        return np.asarray(self.shares(entity).T @ self.room.sum(axis=1))

    def asked(self, entity: Entity, seconds: Floats, *, beside_op: bool = False) -> Floats:
        """``[S, G]`` seconds in each window, from the collectives of classes (``[S, classes]``)."""
        return np.asarray(self.shares(entity, beside_op=beside_op) @ seconds.T).T

    def hidden(self, asked: Floats, products: Floats, share: Floats | float = 1.0) -> Floats:
        """``[S]`` seconds of ``asked`` (``[S, G]``) that products hide, at most ``products``.

        ``products`` (``[S]``) are the seconds of all products; only a ``share`` of the work of each
        bin is done (``[S, B]``).
        """
        covered = np.zeros((len(products), 1))
        for _, taken in self.taken(asked, products, share):
            covered += taken
        return np.minimum(covered[:, 0], products)

    def taken(
        self, asked: Floats, products: Floats, share: Floats | float = 1.0
    ) -> Iterator[tuple[int, Floats]]:
        """The windows that are asked for, each with what products hide of it: ``[S, 1]`` seconds.

        Parameters are those of :meth:`hidden`.
        """
        left = self.bins * products[:, None] * share  # [S, B]
        for window, (room, seconds) in enumerate(zip(self.room, asked.T[:, :, None], strict=True)):
            if not seconds.any():
                continue
            near = np.minimum(left, room * products[:, None] * share)
            total = near.sum(axis=1, keepdims=True)
            taken = np.minimum(seconds, total)
            left -= near * np.divide(taken, total, out=np.zeros_like(total), where=total > 0)
            yield window, taken


def windows(
    program: Program,
    use_op: Ints,
    use_value: Ints,
    products: Sequence[int],
    work: Floats,
    value_class: Ints,
    use_class: Ints,
    around: npt.NDArray[np.bool_] | None = None,
    runs: Ints | None = None,
    sum_runs: Sequence[int] | None = None,
) -> Windows:
    """The windows of a program whose ``products`` (ops) take ``work`` each.

    ``value_class`` and ``use_class`` are the classes of values and of uses.  ``around`` (``[ops]``)
    are the ops of which shards go around the devices while they compute.  ``runs`` (``[uses]``) are
    those of :func:`toast.cost.reshard_runs.reshard_runs`; by default, values are resharded as often
    as they are used.  ``sum_runs`` (``[values]``) are those of
    :func:`toast.cost.accumulated_sums.sum_runs`; by default, values are summed as often as they are
    computed.
    """
    share, bin_of = _bins_of(work)
    bins: Floats = np.bincount(bin_of, weights=share).astype(np.float64)
    in_bin = np.zeros((len(work), len(bins)))
    in_bin[np.arange(len(work)), bin_of] = share
    if around is None:
        around = np.zeros(len(program.ops), dtype=bool)
    free, set_of = independent_products(
        program, use_op, use_value, use_class, products, around, runs, sum_runs
    )
    room, window_of_set = _merged(free @ in_bin, bins, np.bincount(set_of, minlength=len(free)))
    window = window_of_set[set_of]
    values, uses = len(program.values), len(use_op)
    # Uses of one value in one class share a copy, which is made for the first of them.
    first = distinct_rows(np.stack([use_value, use_class], axis=1)).first

    def of_values(window: Ints) -> sparse.csr_array:
        return _shares(window, value_class, len(room))

    def of_uses(window: Ints) -> sparse.csr_array:
        return _shares(window[first], use_class[first], len(room))

    of_value, of_use = window[:values], window[values : values + uses]
    makers = around[[*program.makers]]
    beside = of_value.copy(), of_use.copy()
    beside[0][makers] = window[values + uses :][: makers.sum()]
    beside[1][around[use_op]] = window[values + uses + makers.sum() :]
    return Windows(
        bins, room, of_values(of_value), of_uses(of_use), of_values(beside[0]), of_uses(beside[1])
    )


def bin_shares(work: Floats, left: Floats) -> Floats:
    """``[P, B]`` the share of the work of each bin that is left.

    ``work`` is that of each product; ``left`` (``[P, products]``) is the share that runs.
    """
    share, bin_of = _bins_of(work)
    some = np.zeros((len(left), int(bin_of.max(initial=-1)) + 1))
    np.add.at(some.T, bin_of, (left * share).T)
    return np.asarray(some / np.maximum(np.bincount(bin_of, weights=share), 1e-300))


def _bins_of(work: Floats) -> tuple[Floats, Ints]:
    """``[products]`` the share of each product in the work of all, and its bin."""
    total = float(work.sum())
    share = work / total if total else np.zeros(len(work))
    middle = np.cumsum(share) - share / 2
    if len(work) <= _BINS:
        return share, np.arange(len(work))
    return share, np.unique((middle * _BINS).astype(np.int64), return_inverse=True)[1].ravel()


def independent_products(
    program: Program,
    use_op: Ints,
    use_value: Ints,
    use_class: Ints,
    products: Sequence[int],
    around: npt.NDArray[np.bool_],
    runs: Ints | None = None,
    sum_runs: Sequence[int] | None = None,
) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Sets of ``products`` (ops), and the set that is independent of each value and each use.

    A product is independent of what happens to a value between its definition and a use if it is no
    ancestor of the value and no descendant of the use (for the value itself: of any use).  Uses of
    one value in one class wait for the same copy, so it must be no descendant of any of them.
    Nothing runs beside a loop, so that the product and the collective must be in the body of the
    same loop, or of none.  Collectives that run less often than their ops were moved out of loops:
    ``runs`` and ``sum_runs`` are those of :func:`windows`.

    Returns ``[sets, products]``, and the set of every value and then of every use.  The sets of
    values that ops in ``around`` make, and of their uses, follow; these have the products of the op
    itself.
    """
    bit = {op: 1 << number for number, op in enumerate(products)}
    above = [0] * len(program.values)  # products that a value needs
    for number, op in enumerate(program.ops):
        reach = bit.get(number, 0)
        for value in op.operands:
            reach |= above[value]
        for value in op.results:
            above[value] = reach
    # Products that depend on the results of an op, the op included.
    below = [0] * len(program.ops)
    reached = [0] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        reach = bit.get(number, 0)
        for value in op.results:
            reach |= reached[value]
        below[number] = reach
        for value in op.operands:
            reached[value] |= reach
    loops = loops_around(program)
    has_loops = any(loop is not None for loop in loops)
    in_around = around.tolist()
    inside: dict[LoopOps | None, int] = defaultdict(int)  # products of the body of each loop
    for number, one in bit.items():
        inside[loops[number]] |= one
    every = (1 << len(products)) - 1
    outside = {loop: every & ~of for loop, of in inside.items()}

    def elsewhere(op: int, runs: int) -> int:
        """Products that run in other loops than a collective of an op, which has so many runs."""
        return outside.get(loop_with_runs(program, loops, op, runs), every)

    if runs is None:
        runs = np.array(program.repeats, dtype=np.int64)[use_op]
    if sum_runs is None:
        sum_runs = [program.repeats[op] for op in program.makers]
    of_value = [one | other for one, other in zip(above, reached, strict=True)]
    copies = use_value * (int(use_class.max(initial=0)) + 1) + use_class
    uses = [*zip(use_op.tolist(), use_value.tolist(), copies.tolist(), strict=True)]
    waiting: dict[int, int] = defaultdict(int)
    for op, _, copy in uses:
        waiting[copy] |= below[op]
    of_use = [above[value] | waiting[copy] for _, value, copy in uses]
    if has_loops:
        of_value = [
            of | elsewhere(op, times)
            for of, op, times in zip(of_value, program.makers, sum_runs, strict=True)
        ]
        of_use = [
            of | elsewhere(op, times)
            for of, (op, _, _), times in zip(of_use, uses, runs.tolist(), strict=True)
        ]
    beside = [
        of_value[v] & ~bit.get(op, 0) for v, op in enumerate(program.makers) if in_around[op]
    ]  # fmt: skip
    beside += [
        of & ~bit.get(op, 0) for of, (op, _, _) in zip(of_use, uses, strict=True) if in_around[op]
    ]  # fmt: skip
    distinct: dict[int, int] = {}
    set_of = [distinct.setdefault(s, len(distinct)) for s in (*of_value, *of_use, *beside)]
    width = max(1, (len(products) + 7) // 8)
    packed = b"".join(s.to_bytes(width, "little") for s in distinct)
    bits = np.unpackbits(
        np.frombuffer(packed, dtype=np.uint8).reshape(-1, width), axis=1, bitorder="little"
    )[:, : len(products)]
    return bits == 0, np.array(set_of, dtype=np.int64)


def _merged(room: Floats, bins: Floats, number: Ints) -> tuple[Floats, Ints]:
    """At most ``_WINDOWS`` windows for sets with these rooms, and the window of each set.

    The room of a window is the mean of its sets' rooms, weighted by ``number``.  Windows are in
    order of width; sets without room are in none (-1).
    """
    window = np.full(len(room), -1, dtype=np.int64)
    some = np.flatnonzero(room.sum(axis=1) > 0)
    if not len(some):
        return np.zeros((0, len(bins))), window
    apart, _, label, _ = distinct_rows(room[some])
    if len(apart) > _WINDOWS:
        parts = np.rint(_PARTS * room[some] / np.maximum(bins, np.finfo(np.float64).tiny))
        apart, _, label, _ = distinct_rows(parts)
    if len(apart) > _WINDOWS:
        tree = hierarchy.linkage(apart, method="ward")
        label = hierarchy.fcluster(tree, _WINDOWS, criterion="maxclust").astype(np.int64)[label] - 1
    rows = np.zeros((int(label.max()) + 1, len(bins)))
    np.add.at(rows, label, room[some] * number[some, None])
    rows /= np.bincount(label, weights=number[some])[:, None]
    order = np.argsort(rows.sum(axis=1), kind="stable")
    window[some] = np.argsort(order)[label]
    return rows[order], window


def _shares(window: Ints, of: Ints, windows: int) -> sparse.csr_array:
    """``[windows, classes]`` the share of each class's members in each window."""
    members = np.bincount(of)
    here = np.flatnonzero(window >= 0)
    shape = windows, len(members)
    return sparse.coo_array((1 / members[of[here]], (window[here], of[here])), shape=shape).tocsr()
