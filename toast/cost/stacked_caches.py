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
from collections.abc import Iterator

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.liveness import Lifetimes
from toast.cost.product_layouts import fits, layout_of, product_groups
from toast.cost.program_loops import LoopOps, loop_ties, loops_of
from toast.program import Program

_SLICE, _UPDATE, _SCATTER, _SELECT = "dynamic_slice", "dynamic_update_slice", "scatter", "select"

#: Ops between an update and the stack that leave elements where they are.
_PASSING = frozenset({"reshape", "broadcast_in_dim", "sdy_sharding_constraint"})

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


def stacked_caches(program: Program) -> StackedCaches:
    """The caches in the loops of a program."""
    loops = loops_of(program)
    copies: list[CacheCopy] = []
    moved: set[int] = set()
    for loop in loops:
        for op in range(loop.last_carry + 1, loop.end):
            if program.kinds[op] == _UPDATE and (chain := _restacked(program, op)):
                again = _copies_of_layer(program, chain)
                if again is not None:
                    copies.append(CacheCopy(op, 1, again, *_twice(program, op, chain, again)))
                    moved.update(chain)
    in_place: set[int] = set()
    carried = dict(loop_ties(program))
    of_result = len(program.ops) - len(program.results)
    for place, (value, alias) in enumerate(
        zip(program.result_values, program.aliases, strict=True)
    ):
        if (carry := carried.get(program.makers[value])) is None:
            continue
        donated = program.argument_values[alias] if alias >= 0 else -1
        initial = program.ops[carry].operands[0]
        if program.kinds[program.makers[initial]] == "argument":
            updates = _updated_in_place(program, carried, carry, program.makers[value])
            if updates is None:
                continue
            apart = any(_heads_are_behind(program, each) for each in updates)
            if apart:
                end = carry if initial == donated else len(program.ops)
                begin = carry if initial == donated else program.makers[value]
                copies.append(CacheCopy(of_result + place, 0, _THERE_AND_BACK, begin, end))
            elif initial == donated:
                in_place.add(program.ops[carry].results[0])
            else:
                copies.append(CacheCopy(carry, 0, 1.0, carry, carry))
        elif donated >= 0 and _is_sliced_in(program, donated, carry, loops):
            copies.append(CacheCopy(of_result + place, 0, 1.0, carry, carry))
    return StackedCaches(tuple(copies), frozenset(moved), frozenset(in_place))


def _before(program: Program, value: int) -> int:
    """The value that ops which move no elements turn into ``value``."""
    while program.kinds[program.makers[value]] in _PASSING:
        (source,) = program.ops[program.makers[value]].operands[:1]
        if program.elements[source] != program.elements[value]:
            break
        value = source
    return value


def _restacked(program: Program, op: int) -> list[int]:
    """The values from a slice of a stack to the update ``op`` of another one; empty for none."""
    stack, update = program.ops[op].operands[:2]
    if program.kinds[program.makers[stack]] != "carry":
        return []
    value = _before(program, update)
    maker = program.makers[value]
    if program.kinds[maker] not in {_SCATTER, _UPDATE, _SELECT}:
        return []
    operands = program.ops[maker].operands
    bases = operands[1:3] if program.kinds[maker] == _SELECT else operands[:1]
    for base in bases:
        sliced = _before(program, base)
        slicing = program.makers[sliced]
        if program.kinds[slicing] == _SLICE:
            source = program.ops[slicing].operands[0]
            if program.values[source].type.shape == program.values[stack].type.shape:
                return [
                    sliced,
                    *_between(program, sliced, base),
                    value,
                    *_between(program, value, update),
                ]
    return []


def _between(program: Program, first: int, last: int) -> list[int]:
    """The values after ``first`` up to ``last``, which follows from it by :data:`_PASSING` ops."""
    values = []
    while last != first:
        values.append(last)
        last = program.ops[program.makers[last]].operands[0]
    return values


def _updated(program: Program, chain: list[int]) -> int:
    """The updated cache among the values of a chain."""
    return next(
        v for v in chain if program.kinds[program.makers[v]] in {_SCATTER, _UPDATE, _SELECT}
    )


def _copies_of_layer(program: Program, chain: list[int]) -> float | None:
    """Copies of a cache that is sliced, updated and written; ``None`` if one kernel does all."""
    value = _updated(program, chain)
    kind = program.kinds[program.makers[value]]
    if _heads_are_behind(program, value):
        return 2.0 + _BACK
    return None if kind == _SELECT else 2.0


def _twice(program: Program, op: int, chain: list[int], copies: float) -> tuple[int, int]:
    """The ops between which a layer's cache is in memory in both layouts."""
    start = program.makers[_updated(program, chain)]
    return (start, op) if copies > _THERE_AND_BACK else (op, op)


def _heads_are_behind(program: Program, value: int) -> bool:
    """Whether a product wants an updated cache, or a slice of it, in another layout."""
    maker = program.kinds[program.makers[value]]
    if maker == _SCATTER:
        return False
    sources = {value, *(
        program.ops[user].results[0] for user in program.users[value]
        if program.kinds[user] == _SLICE
    )}  # fmt: skip
    return any(
        _turns(program, op, source, single=maker != _SELECT)
        for source in sources
        for op in _products_of(program, source)
    )


def _products_of(program: Program, value: int) -> Iterator[int]:
    """The products that read a value, or what ops that move no elements make of it."""
    for user in program.users[value]:
        if program.kinds[user] == "dot_general":
            yield user
        elif program.kinds[user] in _PASSING | {"convert", "transpose"}:
            (result,) = program.ops[user].results
            yield from _products_of(program, result)


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


def _updated_in_place(
    program: Program, carried: dict[int, int], carry: int, yielded: int
) -> list[int] | None:
    """The updates between a carry and its ``yield``; ``None`` if something else is between."""
    updates: list[int] = []
    (value,) = program.ops[yielded].operands
    while (maker := program.makers[value]) != carry:
        if program.kinds[maker] in {_UPDATE, _SCATTER}:
            updates.append(value)
            value = program.ops[maker].operands[0]
        elif maker in carried:  # of an inner loop
            inner = _updated_in_place(program, carried, carried[maker], maker)
            if inner is None:
                return None
            updates += inner
            value = program.ops[carried[maker]].operands[0]
        else:
            return None
    return updates or None


def _is_sliced_in(program: Program, argument: int, carry: int, loops: list[LoopOps]) -> bool:
    """Whether the loop of a carry reads slices of an argument."""
    loop = next(loop for loop in loops if loop.begin <= carry <= loop.last_carry)
    return any(
        program.kinds[user] == _SLICE and loop.last_carry < user < loop.end
        for user in program.users[argument]
    )


__all__ = ["CacheCopy", "StackedCaches", "stacked_caches"]
