"""Prices of many states of one program, as sums of parts that are priced once.

A price is a sum over value classes.  The part of a value class depends only on the op classes
around it: that of its definition, those of its uses, and those around values with which it shares
sums or buffers.  A search prices thousands of states, but few shardings of each such neighbourhood.
New neighbourhoods are priced in one batch; the price of a state is a sum of known parts.

Neighbourhoods are priced side by side, as one state, with tables from :mod:`toast.cost.cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from toast.cost.cut import Neighbourhoods, Piece
from toast.cost.entities import Entity, Floats, Ints
from toast.cost.layout import Layout, held_by, reordering
from toast.cost.model import CostModel
from toast.cost.prices import Worth, highest
from toast.cost.terms import OrderedTerm, StepPart, Traffic
from toast.space import States

Numbers = npt.NDArray[np.int32]

#: Maximum number of neighbourhoods in the memo; beyond it, the memo is cleared.
_MOST = 1_000_000

#: 2 ** 64 over the golden ratio: the highest bits of its multiples are spread evenly.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

#: Columns of a neighbourhood's part: seconds by part of the step, resident bytes; then how often
#: each axis stays where it should be major, the seconds of collectives, and by window those that
#: may be hidden.
_RESIDENT, _STAYING = len(StepPart), len(StepPart) + 1


class Memo:
    """Prices states of one model's space; it keeps the neighbourhoods of every batch."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        t = self._tables = model.tables
        axes = model.space.initial.shape[1]
        self._around = Neighbourhoods(t)
        random = np.random.default_rng(0)

        def drawn(*shape: int) -> Ints:
            return random.integers(-(2**63), 2**63 - 1, size=shape, endpoint=True)

        # The key of a neighbourhood is a sum of random numbers of its classes and their factors.
        reached = self._around.classes
        self._of_factor = drawn(axes, t.slots.dim.shape[1])
        self._of_class = sparse.csr_array(
            (drawn(reached.nnz) | 1, reached.indices, reached.indptr), shape=reached.shape
        )
        self._of_value = drawn(len(t.values), 1)
        self._growth = t.growth.T.tocsr()
        self._grows = np.diff(self._growth.indptr) > 0
        self._windows = {
            (entity, beside): t.windows.shares(entity, beside_op=beside).toarray().T
            for entity in (Entity.VALUE_CLASS, Entity.USE_CLASS)
            for beside in (False, True)
        }
        self._ordered = [term for term in model.terms if isinstance(term, OrderedTerm)]
        self._spending = _STAYING + axes
        self._forget()

    def _forget(self) -> None:
        spent = 1 + len(self._tables.windows.room)
        self._numbers = _Numbers()
        self._sums = GrowingArray((self._spending + spent,))
        self._grown = _SparseRows(self._growth.shape[1])
        # The price of shards that change places depends on the order of the axes.
        self._trading = GrowingArray((), np.bool_)
        self._trade_numbers = _Numbers()
        self._trades = GrowingArray((spent,))

    def price(self, states: States) -> Worth:
        """Step time and peak memory of ``states`` (``[S, classes, axes]``).

        They are those of :meth:`CostModel.price`, up to rounding, whatever was priced before.
        """
        if len(self._sums.array) > _MOST:
            self._forget()
        try:
            numbers = self._lookup(states)
            first = np.arange(len(states) + 1) * numbers.shape[1]
            chosen = rows_chosen(numbers.reshape(-1), first, len(self._sums.array))
            sums = np.asarray(chosen @ self._sums.array)
            spent = sums[:, self._spending :]
            spent += self._traded(states, numbers, sums[:, _STAYING : self._spending])
        except BaseException:
            self._forget()  # an interrupt may leave the tables incomplete
            raise
        parts = sums[:, : len(StepPart)].T
        for term, seconds in self._model.op_work(held_by(self._tables, states)):
            parts[term.part] += seconds.sum(axis=1)
        hidden = self._model.hidden(parts[StepPart.PRODUCTS], spent[:, 0], spent[:, 1:])
        busy, waiting = self._model.step_seconds(parts, spent[:, 0], hidden)
        arguments = sums[:, _RESIDENT] + self._model.captured_bytes
        return Worth(
            seconds=busy + waiting,
            peak_bytes=arguments
            + self._model.machine.in_memory(highest(self._grown.total(chosen))),
            argument_bytes=arguments,
        )

    # -- neighbourhoods ----------------------------------------------------------------------

    def _lookup(self, states: States) -> Numbers:
        """The number of each value class's neighbourhood in each state: ``[S, C]``."""
        of_op = np.zeros(states.shape[:2], dtype=np.int64)
        for axis, drawn in enumerate(self._of_factor):
            of_op += drawn[states[..., axis]]
        keys = self._of_class @ np.ascontiguousarray(of_op.T) + self._of_value
        keys = np.ascontiguousarray(keys.T)
        values = keys.shape[1]
        # Most are as in the first state: look those up once, and the others where they differ.
        differs = values + np.flatnonzero(keys[1:] != keys[:1])
        place = np.concatenate([np.arange(keys[:1].size), differs])
        known = self._numbers.known(
            keys.reshape(-1)[place], lambda new: self._learn(states, *np.divmod(place[new], values))
        )
        numbers = np.tile(known[:values], len(states))
        numbers[differs] = known[values:]
        return numbers.reshape(keys.shape)

    def _traded(self, states: States, numbers: Numbers, stays: Floats) -> Floats:
        """``[S, 1 + G]`` seconds of shards that change places in each state: total, then by window.

        ``stays`` (``[S, A]``) is how often each axis stays where it should be the major one.
        """
        row, value = np.nonzero(self._trading.array[numbers])
        major, axes = self._model.space.major, states.shape[2]
        # Of axes that stay equally often, the first is the major one.
        order = np.argsort(-stays if major is None else -major + 0 * stays, axis=1, kind="stable")
        code = order @ axes ** np.arange(axes)
        keys = numbers[row, value] + (code[row] << 32)

        def learn(place: Ints) -> None:
            self._learn_trades(states, row[place], value[place], order[row[place]])

        trades = self._trade_numbers.known(keys, learn)
        first = np.searchsorted(row, np.arange(len(states) + 1))
        return np.asarray(rows_chosen(trades, first, len(self._trades.array)) @ self._trades.array)

    def _learn(self, states: States, rows: Ints, values: Ints) -> None:
        """Price the neighbourhoods of value classes, each as it is in one of the states."""
        piece, layout = self._cut(states, rows, values)
        model, t = self._model, piece.tables
        sums = np.zeros((len(values), self._spending))
        for term, seconds in model.work(layout):
            if term.scope in piece.members:  # without terms of op classes
                sums[:, term.part] += piece.total(term.scope, seconds)
        for term in model.terms:
            if term.resident:
                sums[:, _RESIDENT] += piece.total(term.scope, term.bytes(layout))
        for axis, stays in layout.staying():
            sums[:, _STAYING + axis] += piece.total(Entity.USE_CLASS, stays * t.uses.number)
        spent = self._spent(piece, model.traffic(layout, ordered=False))
        trading = np.zeros(len(values), dtype=bool)
        for ordered in self._ordered:
            trading |= piece.total(ordered.scope, reordering(*ordered.ends(layout))) > 0
        self._sums.append(np.concatenate([sums, spent], axis=1))
        self._remember(states, rows, values, self._held(piece, layout))
        self._trading.append(trading)

    def _remember(self, states: States, rows: Ints, values: Ints, held: sparse.csr_array) -> None:
        """Keep what else a price needs of new neighbourhoods: here, the growth of memory.

        ``held`` (``[N, columns]``) are their bytes in the columns of the timeline; the others are
        those of :meth:`_learn`.
        """
        self._grown.append(held @ self._growth)

    def _held(
        self, piece: Piece, layout: Layout, scopes: frozenset[Entity] = frozenset(Entity)
    ) -> sparse.csr_array:
        """``[N, columns]`` bytes of each neighbourhood in the columns of the timeline.

        They are those of terms with these scopes.
        """
        none = np.zeros(0, dtype=np.int64)
        parts = [(np.zeros(0), none, none)]
        for term in self._model.buffers:
            if term.scope not in scopes:
                continue
            size, members = piece.own(term.scope, term.bytes(layout)), piece.members[term.scope]
            column = members.row + self._tables.columns[term.name].start
            some = np.flatnonzero((size != 0) & self._grows[column])
            parts.append((size[some], members.owner[some], column[some]))
        size, owner, column = map(np.concatenate, zip(*parts, strict=True))
        return sparse.csr_array((size, (owner, column)), (piece.number, self._growth.shape[0]))

    def _learn_trades(self, states: States, rows: Ints, values: Ints, order: Ints) -> None:
        """Price the shards that change places in neighbourhoods, each as in one of the states.

        ``order`` (``[N, A]``) lists the axes of each from the most major one on.
        """
        spent = np.zeros((len(values), self._trades.array.shape[1]))
        for each in np.unique(order, axis=0):
            here = np.flatnonzero((order == each).all(axis=1))
            major = np.empty_like(each)
            major[each] = -np.arange(len(each))
            piece, layout = self._cut(states, rows[here], values[here], major)
            spent[here] = self._spent(piece, self._model.traffic(layout, ordered=True))
        self._trades.append(spent)

    def _cut(
        self, states: States, rows: Ints, values: Ints, order: Ints | None = None
    ) -> tuple[Piece, Layout]:
        """Neighbourhoods side by side, each with the sharding of one of the states."""
        piece = self._around.cut(values)
        state = states[rows[piece.ops.owner], piece.ops.row][None]
        held = held_by(self._tables, state)
        return piece, Layout(piece.tables, self._model.machine, held, order)

    def _spent(self, piece: Piece, moved: Iterable[Traffic]) -> Floats:
        """``[N, 1 + G]`` seconds of each neighbourhood's collectives: total, then by window."""
        spent = np.zeros((piece.number, 1 + len(self._tables.windows.room)))
        for traffic in moved:
            entity, seconds = traffic.term.scope, traffic.seconds
            spent[:, 0] += piece.total(entity, seconds)
            if self._model.in_background(traffic):
                windows = self._windows[entity, traffic.term.beside_op]
                windows = windows[piece.members[entity].row]
                early = seconds * self._model.early_share(traffic)
                own = piece.own(entity, early)[:, None] * windows
                spent[:, 1:] += piece.total(entity, own[None])
        return spent


def rows_chosen(numbers: Numbers, first: Ints, rows: int) -> sparse.csr_array:
    """``[S, rows]`` the rows that each state adds up: its numbers, from ``first`` on."""
    parts = np.ones(len(numbers)), numbers, first.astype(np.int32)
    return sparse.csr_array(parts, shape=(len(first) - 1, rows))


class GrowingArray:
    """An array to which rows are added."""

    def __init__(self, row: tuple[int, ...], dtype: npt.DTypeLike = np.float64) -> None:
        self._room = np.zeros((1024, *row), dtype=dtype)
        self._count = 0

    @property
    def array(self) -> npt.NDArray[Any]:
        """The rows so far."""
        return self._room[: self._count]

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Add rows."""
        count = self._count + len(rows)
        if count > len(self._room):
            room = np.zeros((2 * count, *self._room.shape[1:]), dtype=self._room.dtype)
            room[: self._count] = self.array
            self._room = room
        self._room[self._count : count] = rows
        self._count = count


class _SparseRows:
    """A sparse array to which rows are added."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._data = GrowingArray(())
        self._column = GrowingArray((), np.int32)
        self._first = GrowingArray((), np.int32)
        self._first.append(np.zeros(1, dtype=np.int32))

    @property
    def count(self) -> int:
        """The number of entries."""
        return len(self._data.array)

    def append(self, rows: sparse.csr_array) -> None:
        self._first.append(rows.indptr[1:] + self.count)
        self._data.append(rows.data)
        self._column.append(rows.indices)

    def total(self, chosen: sparse.csr_array) -> Floats:
        """``[S, width]`` sums of the rows that ``chosen`` (``[S, rows]``) selects, dense."""
        if not self.count:
            return np.zeros((chosen.shape[0], self._width))
        parts = self._data.array, self._column.array, self._first.array
        rows = sparse.csr_array(parts, shape=(len(parts[2]) - 1, self._width))
        return np.asarray((chosen @ rows).toarray())


class _Numbers:
    """Numbers of 64-bit keys, in order of arrival: a hash table with open addressing."""

    def __init__(self) -> None:
        self._keys = GrowingArray((), np.int64)
        self._table: Numbers = np.full(4096, -1, dtype=np.int32)

    def known(self, keys: Ints, learn: Callable[[Ints], None]) -> Numbers:
        """The number of each key; ``learn`` gets the places of the new ones first."""
        number = self.of(keys)
        unknown = np.flatnonzero(number < 0)
        if len(unknown):
            new, place, which = np.unique(keys[unknown], return_index=True, return_inverse=True)
            learn(unknown[place])
            number[unknown] = self.add(new)[which.reshape(-1)]
        return number

    def of(self, keys: Ints) -> Numbers:
        """The number of each key; -1 for unknown keys."""
        mask = len(self._table) - 1
        slot = self._slots(keys)
        number: Numbers = self._table[slot]
        if not len(self._keys.array):
            return number
        other = np.flatnonzero((number >= 0) & (self._keys.array[number] != keys))
        while len(other):
            slot = (slot[other] if len(slot) > len(other) else slot) + 1 & mask
            here = self._table[slot]
            number[other] = here
            still = (here >= 0) & (self._keys.array[here] != keys[other])
            other, slot = other[still], slot[still]
        return number

    def add(self, keys: Ints) -> Numbers:
        """Numbers for distinct keys that are not in the table."""
        first = len(self._keys.array)
        self._keys.append(keys)
        if 2 * len(self._keys.array) > len(self._table):
            size = 1 << (4 * len(self._keys.array) - 1).bit_length()
            self._table = np.full(size, -1, dtype=np.int32)
            self._place(0)
        else:
            self._place(first)
        return np.arange(first, len(self._keys.array)).astype(np.int32)

    def _slots(self, keys: Ints) -> Ints:
        """The first slot to try for each key; keys may share any of their bits."""
        bits = len(self._table).bit_length() - 1
        return np.asarray(((keys.view(np.uint64) * _GOLDEN) >> np.uint64(64 - bits)).view(np.int64))

    def _place(self, first: int) -> None:
        """Put the keys from ``first`` on into slots."""
        number = np.arange(first, len(self._keys.array), dtype=np.int32)
        mask = len(self._table) - 1
        slot = self._slots(self._keys.array[first:])
        while len(number):
            free = self._table[slot] < 0
            self._table[slot[free]] = number[free]  # the last of several wins
            left = self._table[slot] != number
            number, slot = number[left], (slot[left] + 1) & mask


def memo_of(model: CostModel, memory_bytes: float) -> Memo:
    """A memo of the prices of a model, for a search within ``memory_bytes``.

    A model whose prices are others, such as those with the best memory policy, has its own.
    """
    own = getattr(model, "memo", None)
    memo: Memo = Memo(model) if own is None else own(memory_bytes)
    return memo
