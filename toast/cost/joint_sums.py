"""Partial sums that stay partial until they are added (GShard, 3.3): one collective for all.

A value that needs a sum over devices may wait for it where its only use is an addition to another
one that needs the same: devices add their parts, and reduce the total.  The layers of a transformer
have many, such as the gradients of the inputs of queries, keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from toast.cost.entities import Ints
from toast.cost.layout import Layout

if TYPE_CHECKING:
    from toast.cost.tables import Tables
    from toast.space import Space

#: Ops whose result is a partial sum if all their operands are.
_ADDING = frozenset({"add", "subtract", "negate"})
#: Ops whose result is a partial sum if their first operand is, and the other one is a number.
SCALING = frozenset({"multiply", "divide"})

#: Ops that may run whole, whatever the state.
_OPAQUE = frozenset({"composite", "custom_call"})


class JointSum(NamedTuple):
    """Values that wait for a common sum."""

    #: The op whose result is the total.
    op: int
    #: One of the partial sums; the others have the same collectives.
    value: int
    #: The others, and the results of ops between them and the total.
    others: tuple[int, ...]
    between: tuple[int, ...]

    @property
    def waiting(self) -> tuple[int, ...]:
        """All values that stay partial."""
        return self.value, *self.others, *self.between


class _Waiting(NamedTuple):
    """Partial sums that an op has combined."""

    parts: tuple[int, ...]
    between: tuple[int, ...]


class _Linear(NamedTuple):
    """An op that may combine partial sums."""

    op: int
    #: Its operands that must be partial sums, with their numbers.
    operands: tuple[tuple[int, int], ...]


class PartialSums:
    """The values of a program that may wait for a common sum."""

    def __init__(self, space: Space, tables: Tables) -> None:
        self._space, self._tables = space, tables
        names = space.analysis.names
        self._use_class = {
            (op, index): int(tables.use_class[use])
            for use, (op, index) in enumerate(
                zip(names.use_op.tolist(), names.use_index.tolist(), strict=True)
            )
            if op in self._ops
        }

    def of(self, layout: Layout) -> Iterator[JointSum]:
        """The joint sums under one state, in the order of their ops."""
        program = self._space.analysis.program
        waiting: dict[int, _Waiting] = {}
        for linear in self._linear:
            (result,) = program.ops[linear.op].results
            found = [waiting.get(v) or self._own(layout, v) for v, _ in linear.operands]
            parts = [part for part in found if part is not None]
            uses = [self._use_class[linear.op, index] for _, index in linear.operands]
            if len(parts) == len(found) and self._alike(layout, parts, uses, result):
                made = [v for v, _ in linear.operands if waiting.pop(v, None) is not None]
                waiting[result] = _Waiting(
                    tuple(v for part in parts for v in part.parts),
                    (*(v for part in parts for v in part.between), *made),
                )
        for result, part in waiting.items():
            if len(part.parts) > 1:
                value, *others = part.parts
                yield JointSum(program.values[result].op, value, tuple(others), part.between)

    def _own(self, layout: Layout, value: int) -> _Waiting | None:
        """A value whose own op leaves a partial sum."""
        number = int(self._tables.value_class[value])
        if value in self._summed and layout.partial[0, number]:
            return _Waiting((value,), ())
        return None

    def _alike(self, layout: Layout, parts: list[_Waiting], uses: list[int], result: int) -> bool:
        """Whether partial sums have the same collectives, and are used as these leave them."""
        classes = [int(self._tables.value_class[part.parts[0]]) for part in parts]
        first = classes[0]
        partial, defined, settled = layout.partial[0], layout.defined[0], layout.settled[0]
        looped = layout.looped_sums.axes[0] if layout.looped_sums.some else None
        if looped is not None and any(looped[c] for c in classes):
            return False
        stored = settled[int(self._tables.value_class[result])]
        return bool((stored == settled[first]).all()) and all(
            partial[c] == partial[first]
            and (defined[c] == defined[first]).all()
            and (settled[c] == settled[first]).all()
            and (layout.used[0, use] == settled[first]).all()
            for c, use in zip(classes, uses, strict=True)
        )

    @functools.cached_property
    def _ops(self) -> frozenset[int]:
        return frozenset(linear.op for linear in self._linear)

    @functools.cached_property
    def _single(self) -> Ints:
        """The values with one use."""
        program = self._space.analysis.program
        uses = np.bincount(self._space.analysis.names.use_value, minlength=len(program.values))
        uses[[value for value, _ in program.condition_reads]] += 1
        return np.flatnonzero(uses == 1)

    @functools.cached_property
    def _summed(self) -> frozenset[int]:
        """The values with one use that an op may compute as a partial sum."""
        program, rules = self._space.analysis.program, self._space.analysis.rules
        adds = [{f.combiner for f in rule.factors} - {""} == {"add"} for rule in rules]
        gathered = self._tables.values.gathered
        return frozenset(
            value for value in self._single.tolist()
            if program.kind(program.values[value].op) not in _OPAQUE
            and adds[program.ops[program.values[value].op].signature]
            and len(program.ops[program.values[value].op].results) == 1
            and program.values[value].type.dtype != "i1"
            and not gathered[self._tables.value_class[value]]
        )  # fmt: skip

    @functools.cached_property
    def _linear(self) -> tuple[_Linear, ...]:
        """The ops that may combine partial sums, in program order."""
        program, single = self._space.analysis.program, {*self._single.tolist()}
        linear, may = [], {*self._summed}
        for number, op in enumerate(program.ops):
            kind = program.kind(number)
            if kind in _ADDING:
                operands = tuple((v, index) for index, v in enumerate(op.operands))
            elif kind in SCALING and self._is_number(op.operands[1]):
                operands = ((op.operands[0], 0),)
            else:
                continue
            if all(v in may and v in single for v, _ in operands) and all(
                program.repeats[program.values[v].op] == program.repeats[number]
                for v, _ in operands
            ):
                linear.append(_Linear(number, operands))
                may.add(op.results[0])
        return tuple(linear)

    def _is_number(self, value: int) -> bool:
        """Whether all elements of a value are one scalar."""
        program = self._space.analysis.program
        maker = program.ops[program.values[value].op]
        if program.kind(program.values[value].op) != "broadcast_in_dim":
            return False
        return not program.values[maker.operands[0]].type.shape


__all__ = ["SCALING", "JointSum", "PartialSums"]
