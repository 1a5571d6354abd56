"""Tables cut up into neighbourhoods: value classes, each with all that its price depends on.

To price neighbourhoods side by side, each gets op, value and use classes of its own, and all of
them together are priced as one state.
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
    """The entities of one kind that neighbourhoods are made of; behind them may be others."""

    owner: Ints  # neighbourhood that each is in
    row: Ints  # its row in the tables of the whole program


@dataclasses.dataclass(frozen=True)
class Piece:
    """Neighbourhoods side by side, with op, value and use classes of their own.

    The first ``number`` value classes are those that they are the neighbourhoods of, with their use
    classes in front as well; behind them are others that these depend on.
    """

    tables: Tables
    number: int
    ops: Members
    members: dict[Entity, Members]
    #: ``[number, members]`` whose use classes they are.
    used: sparse.csr_array

    def total(self, entity: Entity, amount: npt.NDArray[Any]) -> Floats:
        """``[number, ...]`` sums by neighbourhood of ``[1, entities, ...]``, of values or uses."""
        if entity is Entity.VALUE_CLASS:
            return np.asarray(amount[0, : self.number])
        return np.asarray(self.used @ amount[0, : self.used.shape[1]])

    def own(self, entity: Entity, amount: Floats) -> Floats:
        """``[members]`` of ``[1, entities]``: what neighbourhoods are made of."""
        return amount[0, : len(self.members[entity].owner)]


class Neighbourhoods:
    """The neighbourhoods of a program's value classes."""

    def __init__(self, tables: Tables) -> None:
        t = self._tables = tables
        values = len(t.values)
        every = np.arange(values)
        # Rows of each value class in the tables, from the first one on.
        self._uses = _Rows.of(t.uses.value, values)
        self._sums = _Rows.of(t.joint_sums.value, values)
        self._products = _Rows.of(t.operands.value, values)
        #: Pairs of use classes by value class, instead of by distance.
        self._pair = np.argsort(t.uses.value[t.pairs.later], kind="stable")
        self._pairs = _Rows.of(t.uses.value[t.pairs.later[self._pair]], values)
        # Op classes that each depends on: around it, and around those that it shares with.
        of_op = np.concatenate([t.op_class(Entity.VALUE_CLASS), t.op_class(Entity.USE_CLASS)])
        around = _marks(np.concatenate([every, t.uses.value]), of_op, (values, len(t.ops)))
        depends = np.concatenate([every, t.joint_sums.value, t.operands.value])
        on = np.concatenate([every, t.joint_sums.other, t.operands.result])
        #: ``[C, K]`` whose sharding a value class's neighbourhood depends on.
        self.classes: sparse.csr_array = _marks(depends, on, (values, values)) @ around
        self.classes.sum_duplicates()

    def cut(self, values: Ints) -> Piece:
        """The neighbourhoods of ``values``, which may name a value class several times."""
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
        # By distance, as in the tables of the whole program.
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
