"""Tables cut into neighbourhoods: a value class with everything that its price depends on.

To price neighbourhoods side by side, each gets op, value and use classes of its own; together they
are priced as one state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from toast.cost.entities import Entity, Floats, Ints
from toast.cost.tables import CopyPairs, Tables


@dataclasses.dataclass(frozen=True)
class Members:
    """The entities of one kind in neighbourhoods; the tables may have more rows after these."""

    owner: Ints  # neighbourhood of each
    row: Ints  # its row in the tables of the whole program


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbourhoods side by side, with op, value and use classes of their own.

    The first ``number`` value classes and their use classes are those of the neighbourhoods; the
    classes after them are others that these depend on.
    """

    tables: Tables
    number: int
    ops: Members
    members: dict[Entity, Members]
    #: ``[number, members]`` the use classes of each neighbourhood.
    used: sparse.csr_array

    def total(self, entity: Entity, amount: npt.NDArray[Any]) -> Floats:
        """``[number, ...]`` sums by neighbourhood of ``amount`` (``[1, values or uses, ...]``)."""
        if entity is Entity.VALUE_CLASS:
            return np.asarray(amount[0, : self.number])
        return np.asarray(self.used @ amount[0, : self.used.shape[1]])

    def own(self, entity: Entity, amount: Floats) -> Floats:
        """``[members]`` the part of ``amount`` (``[1, entities]``) that neighbourhoods contain."""
        return amount[0, : len(self.members[entity].owner)]


class Neighbourhoods:
    """The neighbourhoods of a program's value classes."""

    def __init__(self, tables: Tables) -> None:
        t = self._tables = tables
        values = len(t.values)
        every = np.arange(values)
        # Rows of each value class in the tables.
        self._uses = _Rows.of(t.uses.value, values)
        self._sums = _Rows.of(t.joint_sums.value, values)
        self._products = _Rows.of(t.operands.value, values)
        #: Pairs of use classes, ordered by value class instead of distance.
        self._pair = np.argsort(t.uses.value[t.pairs.later], kind="stable")
        self._pairs = _Rows.of(t.uses.value[t.pairs.later[self._pair]], values)
        # Op classes at each value class, and at those that it shares sums or buffers with.
        of_op = np.concatenate([t.op_class(Entity.VALUE_CLASS), t.op_class(Entity.USE_CLASS)])
        around = _marks(np.concatenate([every, t.uses.value]), of_op, (values, len(t.ops)))
        depends = np.concatenate([every, t.joint_sums.value, t.operands.value])
        on = np.concatenate([every, t.joint_sums.other, t.operands.result])
        #: ``[C, K]`` op classes on which the neighbourhood of a value class depends.
        self.classes: sparse.csr_array = _marks(depends, on, (values, values)) @ around
        self.classes.sum_duplicates()

    def cut(self, values: Ints) -> Piece:
        """The neighbourhoods of ``values``, which may contain a value class several times."""
        t, number = self._tables, np.arange(len(values))
        summing, sums = self._sums.among(values)
        taking, products = self._products.among(values)
        value = np.concatenate([values, t.joint_sums.other[sums], t.operands.result[products]])
        inside = np.concatenate([number, summing, taking])
        user, use = self._uses.among(value)
        own = int(np.searchsorted(user, len(values)))
        slot = np.concatenate([t.values.slot[value], t.uses.slot[use]])
        slots, op = np.arange(len(slot)), t.slots.op_class[slot]
        paired, place = self._pairs.among(values)
        # Ordered by distance, as in the tables of the whole program.
        order = np.argsort(self._pair[place], kind="stable")
        paired, pair = paired[order], self._pair[place[order]]
        start = np.searchsorted(user, number) - self._uses.first[values]
        beside = len(values) + np.arange(len(sums) + len(products))
        none = np.zeros(0, dtype=np.int64)
        tables = dataclasses.replace(
            t,
            slots=dataclasses.replace(t.slots.take(slot), op_class=slots),
            ops=t.ops.take(op),
            products=t.products.take(none),
            tensors=t.tensors.take(none),
            kernels=t.kernels.take(none),
            kernel_tensors=t.kernel_tensors.take(none),
            values=dataclasses.replace(t.values.take(value), slot=slots[: len(value)]),
            uses=dataclasses.replace(t.uses.take(use), value=user, slot=slots[len(value) :]),
            pairs=CopyPairs(
                t.pairs.later[pair] + start[paired], t.pairs.earlier[pair] + start[paired],
                t.pairs.distance[pair],
            ),
            joint_sums=dataclasses.replace(
                t.joint_sums.take(sums), value=summing, other=beside[: len(sums)]
            ),
            operands=dataclasses.replace(
                t.operands.take(products), value=taking, result=beside[len(sums) :]
            ),
        )  # fmt: skip
        return Piece(
            tables=tables,
            number=len(values),
            ops=Members(np.concatenate([inside, inside[user]]), op),
            members={
                Entity.VALUE_CLASS: Members(number, values),
                Entity.USE_CLASS: Members(user[:own], use[:own]),
                Entity.COPY_PAIR: Members(paired, pair),
            },
            used=sparse.csr_array(
                (np.ones(own), np.arange(own), np.searchsorted(user, np.arange(len(values) + 1))),
                shape=(len(values), own),
            ),
        )


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of each value class, in a table ordered by value class."""

    first: Ints
    end: Ints

    @staticmethod
    def of(owner: Ints, values: int) -> _Rows:
        """From the value class of each row."""
        end = np.cumsum(np.bincount(owner, minlength=values))
        return _Rows(np.concatenate([[0], end[:-1]]).astype(np.int64), end.astype(np.int64))

    def among(self, values: Ints) -> tuple[Ints, Ints]:
        """All rows of ``values``: the index into ``values`` of each, and the number of the row."""
        first, count = self.first[values], (self.end - self.first)[values]
        owner = np.repeat(np.arange(len(values)), count)
        start = np.cumsum(count) - count
        return owner, np.arange(len(owner)) + (first - start)[owner]


def _marks(rows: Ints, columns: Ints, shape: tuple[int, int]) -> sparse.csr_array:
    return sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
