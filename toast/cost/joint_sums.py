"""Partial sums that wait while ops are linear (GShard, 3.3), and are reduced where it is cheapest.

A value that needs a sum over devices may wait for it if its only use is linear.  Where it is added
to another one that needs the same sum, devices add their parts, and reduce the total: the layers of
a transformer have many such sums, as the gradients of the inputs of queries, keys and values.
Where an op makes it smaller, devices reduce the smaller result: that of a reduction, or the rows
that a slice takes.  If this op leaves a partial sum itself, one collective reduces both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from toast.cost.axis_sets import REDUCE, SCATTER
from toast.cost.layout import Layout
from toast.cost.linear_ops import LinearOp, linear_ops, values_used_once

if TYPE_CHECKING:
    from toast.cost.tables import Tables
    from toast.space import Space

#: Ops that may run whole, whatever the state.
_OPAQUE = frozenset({"composite", "custom_call"})


class PassedOp(NamedTuple):
    """An op that combines partial sums."""

    op: int
    #: The axes over which its operands are partial sums.
    axes: frozenset[str]
    #: A value whose shards, as its op computes them, have the sizes of those that this op adds;
    #: ``None`` if it has its own sharding.
    alike: int | None


class JointSum(NamedTuple):
    """Values that wait for a common sum."""

    #: The op whose result is the total.
    op: int
    #: A value whose sharding, as its op computes it, is that of the total.  It keeps its
    #: collectives, which reduce the total.
    value: int
    #: Axes over which the total is a partial sum, and this value is not by itself.
    further: frozenset[str]
    #: All values that stay partial.
    waiting: tuple[int, ...]
    #: Those that lose their collectives.
    spared: tuple[int, ...]
    #: The ops that combine partial sums; that of the total is the last.
    passed: tuple[PassedOp, ...]

    def renamed(self, names: Mapping[str, str]) -> JointSum:
        """The same with other names of axes."""

        def new(axes: frozenset[str]) -> frozenset[str]:
            return frozenset(names.get(axis, axis) for axis in axes)

        passed = tuple(each._replace(axes=new(each.axes)) for each in self.passed)
        return self._replace(further=new(self.further), passed=passed)


@dataclasses.dataclass(frozen=True)
class _WaitingSum:
    """A value as a partial sum, and what came before it."""

    value: int
    axes: int
    #: A value with its sharding as a partial sum.
    alike: int
    #: The seconds of sums before it.
    seconds: float = 0.0
    waiting: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    passed: tuple[tuple[int, int, int | None], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Options:
    """What a value may be: a partial sum, or complete."""

    partial: _WaitingSum
    #: The seconds of all sums so far if the value is complete, and the joint sums among them.
    seconds: float
    joined: tuple[_WaitingSum, ...] = ()


class PartialSums:
    """The values of a program that may wait for a common sum."""

    def __init__(self, space: Space, tables: Tables) -> None:
        self._space, self._tables = space, tables
        names = space.analysis.names
        ops = {linear.op for linear in self._linear}
        self._use_class = {
            (op, index): int(tables.use_class[use])
            for use, (op, index) in enumerate(
                zip(names.use_op.tolist(), names.use_index.tolist(), strict=True)
            )
            if op in ops
        }

    def of(self, layout: Layout) -> Iterator[JointSum]:
        """The joint sums under one state, in the order of their ops."""
        sums = _SumsOfState(layout, self._tables, self._summed)
        options: dict[int, _Options] = {}
        for linear in self._linear:
            self._pass(linear, sums, options)
        for last in options.values():
            for partial in last.joined:
                yield self._joint(partial, sums)

    def _pass(self, linear: LinearOp, sums: _SumsOfState, options: dict[int, _Options]) -> None:
        """Replaces the options of an op's operands by those of its result, if sums may pass it."""
        program = self._space.analysis.program
        (result,) = program.ops[linear.op].results
        before = {}
        for value, _ in linear.operands:
            if option := options.get(value) or sums.own(value):
                before[value] = option
        uses = {value: self._use_class[linear.op, index] for value, index in linear.operands}
        if linear.adds:
            if len(before) < len(linear.operands) or not sums.alike(before, uses, result):
                return
        else:
            carried = [
                (v, o) for v, o in before.items() if sums.carried(o.partial, uses[v], result)
            ]
            if not carried:
                return
            before = dict(carried[:1])  # a product of two sums is no sum: the first one waits
        parts = [option.partial for option in before.values()]
        own = sums.partial(result)
        alike = parts[0].alike if linear.adds else result
        step = linear.op, parts[0].axes, alike if linear.adds else None
        partial = _WaitingSum(
            value=result,
            axes=parts[0].axes | own,
            alike=alike,
            seconds=sum(part.seconds for part in parts),
            waiting=(*(v for part in parts for v in part.waiting), *before),
            sums=(
                *(v for part in parts for v in part.sums),
                *([result] if own and not linear.adds else []),
            ),
            passed=(*(each for part in parts for each in part.passed), step),
        )
        complete = sum(option.seconds for option in before.values()) + sums.seconds(result, own)
        joined = tuple(part for option in before.values() for part in option.joined)
        total = partial.seconds + sums.seconds(alike, partial.axes)
        if total < complete:
            complete, joined = total, (partial,)
        for value in before:
            options.pop(value, None)
        options[result] = _Options(partial, complete, joined)

    def _joint(self, total: _WaitingSum, sums: _SumsOfState) -> JointSum:
        names = self._axis_names
        return JointSum(
            self._space.analysis.program.values[total.value].op,
            total.alike,
            names(total.axes & ~sums.partial(total.alike)),
            total.waiting,
            tuple(value for value in total.sums if value != total.alike),
            tuple(PassedOp(op, names(axes), alike) for op, axes, alike in total.passed),
        )

    def _axis_names(self, axes: int) -> frozenset[str]:
        return frozenset(a for n, a in enumerate(self._space.mesh.names) if axes >> n & 1)

    @functools.cached_property
    def _single(self) -> frozenset[int]:
        """The values with one use."""
        analysis = self._space.analysis
        return values_used_once(analysis.program, analysis.names.use_value)

    @functools.cached_property
    def _summed(self) -> frozenset[int]:
        """The values with one use that an op may compute as a partial sum."""
        program, rules = self._space.analysis.program, self._space.analysis.rules
        gathered = self._tables.values.gathered
        return frozenset(
            value for value in self._single
            if program.kind(program.values[value].op) not in _OPAQUE
            and rules[program.ops[program.values[value].op].signature].sums
            and len(program.ops[program.values[value].op].results) == 1
            and program.values[value].type.dtype != "i1"
            and not gathered[self._tables.value_class[value]]
        )  # fmt: skip

    @functools.cached_property
    def _linear(self) -> list[LinearOp]:
        """The ops that partial sums may pass, in program order."""
        analysis = self._space.analysis
        return linear_ops(analysis.program, analysis.rules, self._single, self._summed)


class _SumsOfState:
    """The partial sums of one state."""

    def __init__(self, layout: Layout, tables: Tables, summed: frozenset[int]) -> None:
        self._layout, self._tables, self._summed = layout, tables, summed
        loops = layout.looped_sums
        self._looped = loops.axes[0] if loops.some else np.zeros(len(tables.values), dtype=np.uint8)
        self._seconds: dict[tuple[int, int], float] = {}

    def _class(self, value: int) -> int:
        return int(self._tables.value_class[value])

    def partial(self, value: int) -> int:
        """The axes over which the op of a value leaves a partial sum."""
        return int(self._layout.partial[0, self._class(value)])

    def own(self, value: int) -> _Options | None:
        """A value whose own op leaves a partial sum."""
        axes = self.partial(value)
        if value not in self._summed or not axes or self._looped[self._class(value)]:
            return None
        return _Options(_WaitingSum(value, axes, value, sums=(value,)), self.seconds(value, axes))

    def seconds(self, value: int, axes: int) -> float:
        """The seconds of the sum of a value over ``axes``."""
        key = self._class(value), axes
        if key not in self._seconds:
            self._seconds[key] = self._seconds_of_class(*key)
        return self._seconds[key]

    def _seconds_of_class(self, number: int, axes: int) -> float:
        layout, machine = self._layout, self._layout.machine
        size, scattered = layout.value_bytes[0, number], axes & int(layout.settled_axes[0, number])
        seconds = 0.0
        for kind, some, of in (
            (SCATTER, scattered, size * layout.devices[scattered]),
            (REDUCE, axes & ~scattered, size),
        ):
            if some:
                seconds += float(machine.run_seconds(kind, np.array([of]), np.array([some]))[0])
        return seconds

    def alike(self, before: dict[int, _Options], uses: dict[int, int], result: int) -> bool:
        """Whether partial sums have the same collectives, and are used as these leave them."""
        parts = [option.partial for option in before.values()]
        classes = {value: self._class(o.partial.alike) for value, o in before.items()}
        first = classes[parts[0].value]
        defined, settled = self._layout.defined[0], self._layout.settled[0]
        return bool((settled[self._class(result)] == settled[first]).all()) and all(
            option.partial.axes == parts[0].axes
            and (defined[classes[value]] == defined[first]).all()
            and (settled[classes[value]] == settled[first]).all()
            and (self._layout.used[0, uses[value]] == settled[first]).all()
            for value, option in before.items()
        )

    def carried(self, part: _WaitingSum, use: int, result: int) -> bool:
        """Whether an op with a sharding of its own may use a value as a partial sum.

        No axis of the sum shards another factor of the op, and the value would be reduced, but not
        scattered.
        """
        layout, number, end = self._layout, self._class(part.alike), self._class(result)
        defined, settled = layout.defined[0], layout.settled[0]
        held = int(layout.defined_axes[0, end] | layout.partial[0, end])
        return (
            bool((settled[number] == defined[number]).all())
            and bool((layout.used[0, use] == defined[number]).all())
            and not part.axes & held
            and not self._tables.values.gathered[end]
            and not self._looped[end]
        )


__all__ = ["JointSum", "PartialSums", "PassedOp"]
