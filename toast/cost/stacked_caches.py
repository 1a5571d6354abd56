"""Caches of decode steps whose layers are scanned: where XLA for TPUs copies them.

A scan that has a stack of caches among its inputs slices one, updates a part of it in place, and
writes the whole cache into a stack of results: two copies for each layer.  If the first stack is
donated, the second one is copied into its buffer after the scan.  A loop that carries the stack
updates it in place.

Products of each head want the keys of a head next to one another.  If the heads of a cache are
behind its keys, XLA copies it into the other layout before the update, unless a scatter updates it:
each layer's cache in a scan, or the whole stack before and after a loop that carries it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.liveness import Lifetimes
from toast.cost.product_layouts import fits, layout_of, product_groups
from toast.cost.program_loops import LoopOps, loop_ties, loops_around, loops_of
from toast.cost.update_kernels import RESHAPING
from toast.program import Program

_SLICE, _UPDATE, _SCATTER, _SELECT = "dynamic_slice", "dynamic_update_slice", "scatter", "select"

#: Ops whose results are their operands.
_UNCHANGED = frozenset({"sdy_sharding_constraint", "optimization_barrier"})

#: A copy is a read and a write.  If the layout changes, the copy back is fused with the write into
#: the stack, which then takes this share of a copy: 0.64 to 0.78 in programs compiled for v5e, v6e.
_BACK = 0.7

#: Copies of a cache in a loop that carries the stack: before the loop and after it.
_THERE_AND_BACK = 2.0


@dataclasses.dataclass(frozen=True)
class CacheCopy:
    """Copies of the operand of an op, each time that the op runs."""

    op: int
    operand: int  # its index
    copies: float
    #: The ops between which the operand is in memory once more; equal for nowhere.
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class StackedCaches:
    """The copies of a program's caches, and what no other kernels read or write for them."""

    copies: tuple[CacheCopy, ...]
    #: Values from the slice of a stack to what is written into one: the copies compute them.
    moved: frozenset[int]
    #: Carries that are in the buffers of donated arguments.
    in_place: frozenset[int]

    def of_uses(self, program: Program, use_op: Ints, use_index: Ints) -> Floats:
        """``[uses]`` the copies of a use's value in a step."""
        found = np.zeros(len(use_op))
        for copy in self.copies:
            here = (use_op == copy.op) & (use_index == copy.operand)
            found[here] += copy.copies * program.repeats[copy.op]
        return found

    def turned(self, use_op: Ints, use_index: Ints, use_value: Ints, use_class: Ints) -> Lifetimes:
        """The buffers of caches in another layout, by class of the use."""
        rows = []
        for copy in self.copies:
            if copy.start < copy.end:
                (use,) = np.flatnonzero((use_op == copy.op) & (use_index == copy.operand))
                rows.append((use_class[use], copy.start, copy.end, use_value[use]))
        return Lifetimes(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)

    def leave_out(self, program: Program, use_op: Ints, use_value: Ints) -> tuple[Bools, Bools]:
        """``[uses]`` and ``[values]`` whether the copies stand for their reads and writes."""
        values = np.zeros(len(program.values), dtype=bool)
        values[[*self.moved]] = True
        moving = np.zeros(len(program.ops), dtype=bool)
        moving[[copy.op for copy in self.copies]] = True
        moving[[program.makers[value] for value in self.moved]] = True
        return values[use_value] & moving[use_op], values


@dataclasses.dataclass(frozen=True)
class _Restacked:
    """A cache of a layer, between the slice of a stack and its update in another one."""

    updated: int
    #: All its values, from the slice to what is written.
    values: tuple[int, ...]


def stacked_caches(program: Program, *, tiles: bool) -> StackedCaches:
    """The caches in the loops of a program.

    Copies are known for devices that keep arrays in ``tiles`` (TPUs).  Others have only the
    carries in place: where kernels of libraries turn caches, products have the price of it
    (:mod:`toast.cost.product_layouts`).
    """
    carries = _Carries.of(program)
    copies, in_place = _of_carries(program, carries, tiles=tiles)
    if not tiles:
        return StackedCaches((), frozenset(), frozenset(in_place))
    moved: set[int] = set()
    for op, loop in enumerate(loops_around(program)):
        if loop is None or program.kinds[op] != _UPDATE:
            continue
        if (cache := _restacked(program, op)) is None:
            continue
        turns = _heads_are_behind(program, cache.updated)
        if not turns and program.kinds[program.makers[cache.updated]] == _SELECT:
            continue  # one kernel reads a stack and writes into the other one
        start = program.makers[cache.updated] if turns else op
        copies.append(CacheCopy(op, 1, 2.0 + turns * _BACK, start, op))
        moved.update(cache.values)
    return StackedCaches(tuple(copies), frozenset(moved), frozenset(in_place))


# -- caches that a scan slices from one stack and writes into another ------------------------------


def _restacked(program: Program, op: int) -> _Restacked | None:
    """The cache that the update ``op`` writes into a stack, if it is a slice of another one."""
    stack, update = program.ops[op].operands[:2]
    if program.kinds[program.makers[stack]] != "carry":
        return None
    value = _before(program, update)
    maker = program.makers[value]
    if program.kinds[maker] not in {_SCATTER, _UPDATE, _SELECT}:
        return None
    operands = program.ops[maker].operands
    for base in operands[1:3] if program.kinds[maker] == _SELECT else operands[:1]:
        sliced = _before(program, base)
        slicing = program.makers[sliced]
        if program.kinds[slicing] == _SLICE:
            source = program.ops[slicing].operands[0]
            if program.values[source].type.shape == program.values[stack].type.shape:
                between = *_between(program, sliced, base), *_between(program, value, update)
                return _Restacked(value, (sliced, value, *between))
    return None


def _before(program: Program, value: int) -> int:
    """The value that ops which move no elements turn into ``value``."""
    while program.kinds[program.makers[value]] in RESHAPING:
        source = program.ops[program.makers[value]].operands[0]
        if program.elements[source] != program.elements[value]:
            break
        value = source
    return value


def _between(program: Program, first: int, last: int) -> list[int]:
    """The values after ``first`` up to ``last``, which follows from it by :data:`RESHAPING` ops."""
    values = []
    while last != first:
        values.append(last)
        last = program.ops[program.makers[last]].operands[0]
    return values


def _heads_are_behind(program: Program, value: int) -> bool:
    """Whether a product wants an updated cache, or a slice of it, in another layout.

    It wants the dimensions of its batch, such as sequences and heads, before those of keys.
    """
    maker = program.kinds[program.makers[value]]
    if maker == _SCATTER:
        return False
    sources = {value, *(
        program.ops[user].results[0] for user in program.users[value]
        if program.kinds[user] == _SLICE
    )}  # fmt: skip
    return any(
        _turns(program, op, read, single=maker != _SELECT)
        for source in sources
        for op, read in _products_of(program, source)
    )


def _products_of(program: Program, source: int) -> Iterator[tuple[int, int]]:
    """The products of what ops that move no elements make of a value.

    Each comes with the value from which its operand follows: scales may be multiplied before.
    """
    seen, pending = {source}, [(source, source)]
    while pending:
        value, read = pending.pop()
        for user in program.users[value]:
            kind = program.kinds[user]
            if kind == "dot_general":
                yield user, read
            elif kind in RESHAPING | {"convert", "transpose", "multiply"}:
                (result,) = program.ops[user].results
                if result not in seen:
                    seen.add(result)
                    pending.append((result, result if kind == "multiply" else read))


def _turns(program: Program, op: int, source: int, *, single: bool) -> bool:
    """Whether a product does not take the value in its layout.

    Products of a ``single`` query count, too.
    """
    signature = program.signatures[program.ops[op].signature]
    for index, operand in enumerate(program.ops[op].operands[:2]):
        of, order, transposed = layout_of(program, operand)
        if of == source and (groups := product_groups(signature, index, single=single)):
            return transposed or not fits(order, groups)
    return False


# -- stacks that a loop carries --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Carries:
    """The loops of a program, and the ``carry`` of each ``yield``."""

    loops: Sequence[LoopOps]
    of_yield: Mapping[int, int]

    @staticmethod
    def of(program: Program) -> _Carries:
        return _Carries(loops_of(program), dict(loop_ties(program)))

    def loop(self, carry: int) -> LoopOps:
        """The loop of a ``carry``."""
        return next(loop for loop in self.loops if loop.begin <= carry <= loop.last_carry)


def _of_carries(
    program: Program, carries: _Carries, *, tiles: bool
) -> tuple[list[CacheCopy], set[int]]:
    """The copies of whole stacks that loops return, and the carries in place."""
    copies, in_place = list[CacheCopy](), set[int]()
    first = len(program.ops) - len(program.results)
    for place, (value, alias) in enumerate(
        zip(program.result_values, program.aliases, strict=True)
    ):
        yielded = program.makers[value]
        if (carry := carries.of_yield.get(yielded)) is None:
            continue
        donated = program.argument_values[alias] if alias >= 0 else -1
        initial = program.ops[carry].operands[0]
        if program.kinds[program.makers[initial]] != "argument":
            if donated >= 0 and _is_sliced_in(program, donated, carries.loop(carry)):
                copies.append(CacheCopy(first + place, 0, 1.0, carry, carry))
            continue
        if (updates := _updates(program, carries, carry, yielded)) is None:
            continue
        if tiles and any(_heads_are_behind(program, each) for each in updates):
            ends = (carry, carry) if initial == donated else (yielded, len(program.ops))
            copies.append(CacheCopy(first + place, 0, _THERE_AND_BACK, *ends))
        elif (
            initial == donated and program.result_values.count(value) == 1
            and _alone(program, carries.loop(carry), initial)
            and _overwrites(program, carry, updates)
        ):  # fmt: skip
            in_place.add(program.ops[carry].results[0])
        elif all(copy.op != carry for copy in copies):  # once, if it is returned twice
            copies.append(CacheCopy(carry, 0, 1.0, carry, carry))
    return copies, in_place


def _updates(program: Program, carries: _Carries, carry: int, yielded: int) -> list[int] | None:
    """The updates between a carry and its ``yield``, in order; ``None`` if others are between."""
    updates: list[int] = []
    (value,) = program.ops[yielded].operands
    while (maker := program.makers[value]) != carry:
        if program.kinds[maker] in {_UPDATE, _SCATTER}:
            updates.append(value)
            value = program.ops[maker].operands[0]
        elif (inner := carries.of_yield.get(maker)) is not None:
            within = _updates(program, carries, inner, maker)
            if within is None:
                return None
            updates += reversed(within)
            value = program.ops[inner].operands[0]
        elif program.kinds[maker] in _UNCHANGED:
            value = program.ops[maker].operands[0]
        else:
            return None
    return updates[::-1] or None


def _alone(program: Program, loop: LoopOps, argument: int) -> bool:
    """Whether a loop reads an argument through its carries alone."""
    return not any(loop.last_carry < user <= loop.end for user in program.users[argument])


def _overwrites(program: Program, carry: int, updates: Sequence[int]) -> bool:
    """Whether each of the updates of a carry may overwrite what it updates.

    All that reads the stack before comes first: the update depends on it.  Slices along one
    dimension alone, such as a layer, are read in the layout of the stack.
    """
    stacks = [program.ops[carry].results[0], *updates]
    for number, stack in enumerate(stacks):
        shape = program.values[stack].type.shape
        for user in program.users[stack]:
            if program.kinds[user] == _SLICE:
                part = program.values[program.ops[user].results[0]].type.shape
                if sum(a != b for a, b in zip(shape, part, strict=True)) > 1:
                    return False
        if number == len(updates):
            continue
        update = program.makers[updates[number]]
        readers = {
            user for user in program.users[stack]
            if user != update and program.kinds[user] not in {"carry", "yield"}
        }  # fmt: skip
        if not readers <= _needed_by(program, update, min(readers, default=update)):
            return False
    return True


def _needed_by(program: Program, op: int, first: int) -> set[int]:
    """The ops from ``first`` on that an op depends on."""
    needed, pending = set[int](), [op]
    while pending:
        makers = {program.makers[value] for value in program.ops[pending.pop()].operands}
        makers = {maker for maker in makers - needed if maker >= first}
        needed |= makers
        pending += makers
    return needed


def _is_sliced_in(program: Program, argument: int, loop: LoopOps) -> bool:
    """Whether a loop reads slices of an argument."""
    return any(
        program.kinds[user] == _SLICE and loop.last_carry < user < loop.end
        for user in program.users[argument]
    )


__all__ = ["CacheCopy", "StackedCaches", "stacked_caches"]
