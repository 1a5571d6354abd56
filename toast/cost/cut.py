"""Tables cut up into neighbourhoods: value classes, each with all that its price depends on."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from scipy import sparse

from toast.cost.tables import Tables

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbourhoods side by side, with op, value and use classes of their own.

    The first ``number`` value classes are those that they are the neighbourhoods of, with their use
    classes in front as well; behind them are others that these depend on.
    """

    tables: Tables
    number: int
    #: Op classes of the whole program: ``[K]``; and the neighbourhood that each is in.
    ops: Ints
    owner: Ints
    #: Value and use classes of the whole program: ``[C]`` and ``[U]``.
    values: Ints
    uses: Ints
    #: Columns of the timeline that count, which column of the whole program each is, and the
    #: neighbourhood that it is in.
    columns: Ints
    column: Ints
    column_owner: Ints
    #: ``[number, U]`` whose use classes they are.
    used: sparse.csr_array

    def of_values(self, amount: npt.NDArray[np.generic]) -> Floats:
        """``[number, ...]`` of what value classes amount to: ``[1, C, ...]``."""
        return np.asarray(amount[0, : self.number])

    def of_uses(self, amount: npt.NDArray[np.generic]) -> Floats:
        """``[number, ...]``, the sums of what use classes amount to: ``[1, U, ...]``."""
        return np.asarray(self.used @ amount[0])


class Neighbourhoods:
    """The neighbourhoods of a program's value classes."""

    def __init__(self, tables: Tables) -> None:
        t = self._tables = tables
        values, uses = len(t.value_slot), len(t.use_slot)
        every = np.arange(values)
        # Rows of each value class in the tables, from the first one on.
        self._uses = _Rows.of(t.use_value, values)
        self._merges = _Rows.of(t.merge_class, values)
        self._products = _Rows.of(t.product_operand, values)
        # Pairs of use classes: all distances in one, by value class.
        sizes = [len(later) for later, _ in t.pairs]
        empty = np.zeros((2, 0), dtype=np.int64)
        later, earlier = np.concatenate([empty, *map(np.stack, t.pairs)], axis=1)
        order = np.argsort(t.use_value[later], kind="stable")
        self._pair = np.stack([later, earlier])[:, order]
        self._distance = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._pair_column = values + uses + order
        self._pairs = _Rows.of(t.use_value[later[order]], values)
        self._after_pairs = values + uses + len(order)
        # Op classes that each depends on: around it, and around those that it shares with.
        of_op = np.concatenate([t.slot_class[t.value_slot], t.slot_class[t.use_slot]])
        around = _marks(np.concatenate([every, t.use_value]), of_op, (values, len(t.count)))
        depends = np.concatenate([every, t.merge_class, t.product_operand])
        on = np.concatenate([every, t.merge_with, t.product_result])
        #: ``[C, K]`` whose sharding a value class's neighbourhood depends on.
        self.classes: sparse.csr_array = _marks(depends, on, (values, values)) @ around
        self.classes.sum_duplicates()

    def cut(self, values: Ints) -> Piece:
        """The neighbourhoods of ``values``, which may name a value class several times."""
        t, n = self._tables, len(values)
        whole = len(t.value_slot)
        merging, merge = self._merges.among(values)
        operand, product = self._products.among(values)
        value = np.concatenate([values, t.merge_with[merge], t.product_result[product]])
        inside = np.concatenate([np.arange(n), merging, operand])
        user, use = self._uses.among(value)
        own = int(np.searchsorted(user, n))
        slot = np.concatenate([t.value_slot[value], t.use_slot[use]])
        op = t.slot_class[slot]
        first = np.flatnonzero(np.diff(user, prepend=-1))
        paired, pair = self._pairs.among(values)
        start = np.searchsorted(user, np.arange(n)) - self._uses.first[values]
        later, earlier = self._pair[:, pair] + start[paired]
        # By distance, as columns of the timeline are.
        order = np.argsort(self._distance[pair], kind="stable")
        ends = np.flatnonzero(np.diff(self._distance[pair][order])) + 1
        number, places = np.arange(n), [np.arange(len(value)), len(value) + np.arange(len(use))]
        behind = len(value) + len(use) + len(pair)
        none = np.zeros(0, dtype=np.int64)
        tables = dataclasses.replace(
            t,
            slot_class=np.arange(len(slot)), slot_dim=t.slot_dim[slot],
            count=t.count[op], flops=t.flops[op], matmul=t.matmul[op], halo=t.halo[op],
            tensor_slot=none, tensor_class=none, tensor_bytes=t.tensor_bytes[:0],
            product_class=none, product_size=t.product_size[:0],
            product_group=t.product_group[:0],
            value_slot=places[0], value_count=t.value_count[value],
            value_bytes=t.value_bytes[value], value_sizes=t.value_sizes[value],
            value_written=t.value_written[value], value_merged=t.value_merged[value],
            value_transcendentals=t.value_transcendentals[value],
            summed_whole=t.summed_whole[value], reduces=t.reduces[value],
            product_operand=operand, product_result=n + len(merge) + np.arange(len(product)),
            product_along=t.product_along[product],
            use_value=user, use_slot=places[1], use_first=first, used_value=user[first],
            use_count=t.use_count[use], use_number=t.use_number[use], use_reads=t.use_reads[use],
            use_constant=t.use_constant[use], use_share=t.use_share[use],
            merge_class=merging, merge_with=n + np.arange(len(merge)),
            merge_share=t.merge_share[merge],
            pairs=tuple(zip(np.split(later[order], ends), np.split(earlier[order], ends),
                            strict=True)) if len(pair) else (),
        )  # fmt: skip
        return Piece(
            tables=tables,
            number=n,
            ops=op,
            owner=np.concatenate([inside, inside[user]]),
            values=value,
            uses=use,
            columns=np.concatenate([
                number, len(value) + np.arange(own), len(value) + len(use) + np.arange(len(pair)),
                *(behind + i * len(value) + number for i in range(3)),
            ]),
            column=np.concatenate([
                values, whole + use[:own], self._pair_column[pair][order],
                *(self._after_pairs + i * whole + values for i in range(3)),
            ]),
            column_owner=np.concatenate([number, user[:own], paired[order], *[number] * 3]),
            used=sparse.csr_array(
                (np.ones(own), np.arange(own), np.searchsorted(user, np.arange(n + 1))),
                shape=(n, len(use)),
            ),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a table that is in the order of value classes: where those of each begin and end."""

    first: Ints
    end: Ints

    @staticmethod
    def of(owner: Ints, values: int) -> _Rows:
        """From the value class of each row."""
        end = np.cumsum(np.bincount(owner, minlength=values))
        return _Rows(np.concatenate([[0], end[:-1]]).astype(np.int64), end.astype(np.int64))

    def among(self, values: Ints) -> tuple[Ints, Ints]:
        """All rows of some value classes, one after the other: whose each is, and the row."""
        first, count = self.first[values], (self.end - self.first)[values]
        owner = np.repeat(np.arange(len(values)), count)
        start = np.cumsum(count) - count
        return owner, np.arange(len(owner)) + (first - start)[owner]


def _marks(rows: Ints, columns: Ints, shape: tuple[int, int]) -> sparse.csr_array:
    return sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
