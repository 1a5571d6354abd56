"""The program that a memory policy makes of a survey, without tracing it.

A survey recomputes everything, and its residuals have names.  Under a policy, the backward pass
uses values of the forward pass in place of some that it computed again; what nothing needs any more
does not run.  Such a program is written from that of the survey, with what JAX adds to it:

* what a policy keeps under a name is rounded (``reduce_precision``), and crosses the barrier before
  the recomputation of its block;
* what it offloads is moved to the host and back;
* what a loop keeps waits in a stack of all iterations;
* where a block keeps everything, there is no barrier, and everything that follows from residuals
  alone is computed in the forward pass.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from toast.cost.entities import Ints
from toast.cost.liveness import SOURCES
from toast.cost.program_loops import LoopOps, loops_of
from toast.cost.residuals import Choices, NamedResidual, Residuals
from toast.program import (
    Attribute,
    Location,
    Op,
    Program,
    RunRange,
    Signature,
    TensorType,
    Value,
    label_parts,
    residual_label,
)
from toast.space import BOUNDARY, PRODUCTS

_BARRIER = "optimization_barrier"

#: Bits of the exponent and of the mantissa of floating-point types, to which JAX rounds what it
#: keeps.
_FLOATS = {"bf16": (8, 7), "f16": (5, 10), "f32": (8, 23), "f64": (11, 52)}


@dataclasses.dataclass(frozen=True)
class PolicyProgram:
    """A program that a policy makes of a survey."""

    program: Program
    #: ``[ops]`` the op of the survey that each op is, or is a copy of; -1 for ops that JAX adds.
    origin: Ints


@dataclasses.dataclass(frozen=True)
class _Locations:
    """The source locations of a program whose ops are those of another, or stand beside them."""

    source: Program
    like: tuple[int, ...]

    def location(self, op: int) -> Location:
        """Source location of a program op."""
        return self.source.location(self.like[op])


@dataclasses.dataclass(frozen=True)
class _Added:
    """An op that is not in the survey."""

    kind: str
    attributes: tuple[tuple[str, Attribute], ...]
    operands: tuple[int, ...]
    result: int
    repeats: int
    #: The op of the survey that it is a copy of, or -1; and one at its place.
    origin: int
    like: int


#: The op of ``checkpoint_name``, and the end of its path.
_NAMED, _NAME = "sdy_sharding_constraint", "/name"


class NotWritten(Exception):
    """A policy of which no program is written: one for parts of a loop."""


class PolicyPrograms:
    """The programs that policies make of a survey."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.around = _Around(loops_of(program))
        #: The first op of each barrier, and the op after its last one.
        self.barriers = _barriers(program)
        #: ``[values]`` the uses of each value: ops, and the places among their operands.
        self.uses: list[list[tuple[int, int]]] = [[] for _ in program.values]
        for number, op in enumerate(program.ops):
            for index, value in enumerate(op.operands):
                self.uses[value].append((number, index))
        #: The blocks of which the backward pass computes something again.
        self._computed_again = _blocks_computed_again(program)
        #: The ops that its results need.
        self.needed = _needed(program, [op.operands for op in program.ops], {}, [])[0]

    def under(self, residuals: Residuals, choices: Choices) -> PolicyProgram:
        """The program under one policy.

        Raises :class:`NotWritten` if a loop would be cut, or has residuals of several loops.
        """
        if any(share < 1 for residual in residuals.named for share in residual.shares):
            raise NotWritten("a policy for some iterations of a loop")
        decided = {RunRange.parse(residual.block).block for residual in residuals.named}
        if self._computed_again - decided:
            raise NotWritten("a block of which no residual is known")
        if any(signature.kind in BOUNDARY for signature in self.program.signatures):
            raise NotWritten("regions of shard_map")
        return _Writer(self, residuals, choices).written()


def _blocks_computed_again(program: Program) -> frozenset[str]:
    """The names of the blocks of which the backward pass computes a residual again."""
    again = {
        label_parts(label)[0] for value, label in program.labels.items()
        if program.passes[program.values[value].op] == "recomputed"
    }  # fmt: skip
    blocks = program.memory.blocks if program.memory else ()
    return frozenset(
        block.name for block in blocks
        if any(residual_label(block.name, name) in again for name in block.names)
    )  # fmt: skip


class _Writer:
    """Writes the program of one policy."""

    def __init__(self, survey: PolicyPrograms, residuals: Residuals, choices: Choices) -> None:
        self.program = program = survey.program
        self._survey, self._residuals, self._choices = survey, residuals, choices
        self._around, self._barriers, self._uses = survey.around, survey.barriers, survey.uses
        #: ``[ops]`` their operands, which change; ``[values]`` their types, and the ops that define
        #: them: for ops that are added, those beside which they are.
        self._operands = [[*op.operands] for op in program.ops]
        self._types = [value.type for value in program.values]
        self.place = [value.op for value in program.values]
        self._before: dict[int, list[_Added]] = collections.defaultdict(list)
        self._after: dict[int, list[_Added]] = collections.defaultdict(list)
        #: What loops yield for stacks that were added, and the same as they carry it.
        self._ties: list[tuple[int, int]] = []
        #: Slices of stacks, by the value that is stacked and the loop that needs it.
        self._slices: dict[tuple[int, LoopOps], int] = {}
        #: Whether paths of ops tell which functions are lowered once, by loop.
        self._tells: dict[LoopOps, bool] = {}

    def written(self) -> PolicyProgram:
        """The program."""
        pairs = [
            (residual, number, before, after)
            for number, residual in enumerate(self._residuals.named)
            for before, after in zip(residual.forward, residual.again, strict=True)
        ]
        c = self._choices
        for residual, number, before, after in sorted(pairs, key=lambda pair: pair[2]):
            if c.move[0, number]:
                self._offload(before, after)
            elif c.shared[0, number] and not c.bare[0, number]:
                self._redirect(self._uses[after], after, before)
            elif c.keep[0, number] and not c.bare[0, number] and not residual.is_input:
                self._keep(before, after)
            else:
                self._read_by_name(after)
        bare = [pair for pair in pairs if c.bare[0, pair[1]]]
        if bare:
            self._without_blocks([(residual, one, two) for residual, _, one, two in bare])
        return self._assembled()

    # -- values that are kept or moved -------------------------------------------------------

    def _keep(self, before: int, after: int) -> None:
        """Keeps a value of the forward pass for the backward pass."""
        kept, later = before, self._forward_uses(before, after)
        bits = _FLOATS.get(self._types[before].dtype)
        if bits and self._is_rounded([self.place[before], *(op for op, _ in later)]):
            attributes = (("exponent_bits", bits[0]), ("mantissa_bits", bits[1]))
            kept = self._add_after(
                self.place[before], "reduce_precision", (before,), self._types[before], attributes
            )
            self._redirect(later, before, kept)
        self._redirect(self._named(after), after, self._passed(kept, after))

    def _read_by_name(self, value: int) -> None:
        """Lets uses of a value that is computed again read it by the name in the program.

        The survey has other names: a custom gradient reads what has its own name in the program.
        """
        for user, _ in self._uses[value]:
            results = self.program.ops[user].results
            named = self.program.kinds[user] == _NAMED and len(results) == 1
            if named and self.program.location(user).path.endswith(_NAME):
                later = [use for use in self._named(value) if use[0] > user]
                self._redirect(later, value, results[0])
                return

    def _is_rounded(self, ops: Sequence[int]) -> bool:
        """Whether JAX rounds a value that is kept, which ``ops`` define and use.

        It does not inside of functions that it lowers once, such as ``silu``: their ops have paths
        that do not begin with the program.  JAX 0.10 lowers the bodies of scans so, too; their
        paths tell nothing.
        """
        loop = self._around.innermost(ops[0])
        if loop is not None and loop not in self._tells:
            self._tells[loop] = any(
                self.program.kinds[op] in PRODUCTS and self._is_of_program(op)
                for op in range(loop.begin, loop.end)
            )
        tells = loop is None or self._tells[loop]
        return not tells or any(map(self._is_of_program, ops))

    def _is_of_program(self, op: int) -> bool:
        return self.program.location(op).path.startswith("jit(")

    def _offload(self, before: int, after: int) -> None:
        """Moves a value of the forward pass to the host, and back for the backward pass."""
        type_ = self._types[before]
        moved = self._add_after(
            self.place[before], "custom_call", (before,), type_, _moving("pinned_host")
        )
        arrived = self._passed(moved, after)
        back = self._add_before(
            max(self.place[after], self.place[arrived]), "custom_call", (arrived,), type_,
            _moving("device"),
        )  # fmt: skip
        self._redirect(self._named(after), after, back)

    def _passed(self, value: int, after: int) -> int:
        """A value of the forward pass where the backward pass computes ``after``."""
        user = self.place[after]
        arrived = self._in_loop_of(value, user)
        barrier = self._barrier_before(user)
        if barrier is None:
            return arrived
        return self._add_before(barrier, _BARRIER, (arrived,), self._types[value])

    def _forward_uses(self, before: int, after: int) -> list[tuple[int, int]]:
        """Uses of a value in the forward pass, by its name."""
        until = self._barrier_before(self.place[after])
        until = self.place[after] if until is None else until
        return [use for use in self._named(before) if use[0] < until]

    def _named(self, value: int) -> list[tuple[int, int]]:
        """The uses of a value by its name."""
        return [use for use in self._uses[value] if use not in self.program.result_uses]

    def _barrier_before(self, op: int) -> int | None:
        """The first op of the last barrier before an op of the backward pass, in its loop."""
        place = bisect.bisect_right(self._barriers, (op, math.inf)) - 1
        if place < 0:
            return None
        begin = int(self._barriers[place][0])
        inside = self._around.innermost(begin) == self._around.innermost(op)
        return begin if inside else None

    # -- blocks that keep everything ---------------------------------------------------------

    def _without_blocks(self, pairs: Sequence[tuple[NamedResidual, int, int]]) -> None:
        """Computes what follows from residuals in the forward pass, and removes barriers."""
        program = self.program
        forward: dict[int, int] = {}
        #: Arguments of blocks that a loop slices again instead of stacking them.
        again: set[int] = set()
        for residual, before, after in pairs:
            forward[after] = before
            stays = residual.is_input and not residual.computed and not residual.apart
            again |= {after} if stays else set()
        bare_barriers = set()
        for after in forward:
            group = self._barrier_at(self.place[after])
            if group is not None:
                bare_barriers.add(group)
        for begin, end in bare_barriers:
            for number in range(int(begin), int(end)):
                op = program.ops[number]
                forward.setdefault(op.results[0], op.operands[0])
        first = min((self.place[after] for after in forward), default=len(program.ops))
        hoist = _Hoist(self, forward, first)
        last = -1
        for number in range(first, len(program.ops)):
            op = program.ops[number]
            if program.passes[number] != "recomputed" or program.kind(number) == _BARRIER:
                continue
            if any(value in forward for value in op.operands):
                if "backward" in program.passes[last + 1 : number]:
                    hoist.cursor = -1
                last = number
                for result in op.results:
                    hoist.of(result)
        for after, before in forward.items():
            for use in self._uses[after]:
                user = use[0]
                apart = self._around.loop_between(self.place[before], user)
                if apart is not None and after in again:
                    continue
                self._operands[user][use[1]] = self._in_loop_of(before, user)

    def _barrier_at(self, op: int) -> tuple[int, float] | None:
        """The first op of the barrier that an op is a part of, and the op after its last one."""
        place = bisect.bisect_right(self._barriers, (op, math.inf)) - 1
        if place < 0 or op >= self._barriers[place][1]:
            return None
        return self._barriers[place]

    # -- loops -------------------------------------------------------------------------------

    def _in_loop_of(self, value: int, user: int) -> int:
        """A value where ``user`` is: itself, or the slice of a stack of its loop's iterations."""
        mine = self._around.loop_between(self.place[value], user)
        if mine is None:
            return value
        later = self._around.loop_between(user, self.place[value])
        if later is None or self._around.innermost(self.place[value]) != mine:
            raise NotWritten("a residual of several loops")
        if (value, later) not in self._slices:
            self._slices[value, later] = self._sliced(value, mine, later)
        return self._slices[value, later]

    def _sliced(self, value: int, loop: LoopOps, later: LoopOps) -> int:
        """The slice in one loop of a stack of the values of another."""
        program, type_ = self.program, self._types[value]
        length = int(str(program.signatures[
            program.ops[loop.begin].signature
        ].attribute("trip_count")))  # fmt: skip
        stack = TensorType((length, *type_.shape), type_.dtype)
        one = TensorType((1, *type_.shape), type_.dtype)
        scalar, whole = TensorType((), type_.dtype), range(1, 1 + len(type_.shape))
        zero = self._add_before(loop.begin, "constant", (), scalar)
        empty = self._add_before(
            loop.begin, "broadcast_in_dim", (zero,), stack, (("broadcast_dimensions", ()),)
        )
        carried = self._add_after(
            loop.last_carry, "carry", (empty,), stack,
            program.signatures[program.ops[loop.last_carry].signature].attributes,
        )  # fmt: skip
        first_yield = loop.end - (loop.last_carry - loop.begin)
        counter = program.ops[loop.begin].results[0]
        index, like = (counter,) * len(stack.shape), self.place[value]
        inside = self.program.repeats[first_yield - 1]
        entry = self._add_before(
            first_yield, "broadcast_in_dim", (value,), one, (("broadcast_dimensions", (*whole,)),),
            like=like, repeats=inside,
        )  # fmt: skip
        updated = self._add_before(
            first_yield, "dynamic_update_slice", (carried, entry, *index), stack, like=like,
            repeats=inside,
        )  # fmt: skip
        result = self._add_after(loop.end, "yield", (updated,), stack)
        self._ties.append((result, carried))
        place, position = later.last_carry, program.ops[later.begin].results[0]
        for number in range(later.last_carry + 1, later.end):
            if program.kind(number) == "dynamic_slice":
                (_, position, *_) = program.ops[number].operands
                place = max(place, self.place[position])
                break
        index = (position,) * len(stack.shape)
        inside = program.repeats[place + 1]
        part = self._add_after(
            place, "dynamic_slice", (result, *index), one, (("slice_sizes", one.shape),),
            repeats=inside,
        )  # fmt: skip
        return self._add_after(place, "reshape", (part,), type_, repeats=inside)

    # -- adding ops --------------------------------------------------------------------------

    def copied(self, op: int, place: int, operands: Sequence[int]) -> int:
        """The result of a copy of an op, with other operands, after the op ``place``."""
        of = self.program.signatures[self.program.ops[op].signature]
        (type_,) = of.results
        return self._add_after(place, of.kind, operands, type_, of.attributes, origin=op)

    def _add_after(
        self, place: int, kind: str, operands: Sequence[int], type_: TensorType,
        attributes: tuple[tuple[str, Attribute], ...] = (), *, origin: int = -1,
        repeats: int | None = None,
    ) -> int:  # fmt: skip
        place = self._around.end_of_row(max(place, len(self.program.arguments) - 1))
        if repeats is None and kind != "carry" and self.program.kind(place) == "carry":
            repeats = self.program.repeats[place + 1]  # in the body
        return self._add(
            self._after[place], place, kind, operands, type_, attributes, origin, place, repeats
        )

    def _add_before(
        self, place: int, kind: str, operands: Sequence[int], type_: TensorType,
        attributes: tuple[tuple[str, Attribute], ...] = (), *, like: int | None = None,
        repeats: int | None = None,
    ) -> int:  # fmt: skip
        near = place if like is None else like
        return self._add(
            self._before[place], place, kind, operands, type_, attributes, -1, near, repeats
        )

    def _add(
        self, ops: list[_Added], place: int, kind: str, operands: Sequence[int],
        type_: TensorType, attributes: tuple[tuple[str, Attribute], ...], origin: int, like: int,
        repeats: int | None,
    ) -> int:  # fmt: skip
        result = len(self._types)
        self._types.append(type_)
        self.place.append(place)
        runs = self.program.repeats[like] if repeats is None else repeats
        ops.append(_Added(kind, attributes, (*operands,), result, runs, origin, like))
        return result

    def _redirect(self, uses: Iterable[tuple[int, int]], value: int, other: int) -> None:
        """Uses of a value use another one instead."""
        for user, index in uses:
            if self._operands[user][index] == value:
                self._operands[user][index] = other

    # -- the whole program -------------------------------------------------------------------

    def _assembled(self) -> PolicyProgram:
        """The program of the ops that are needed, with numbers of its own."""
        program = self.program
        groups = (*self._before.values(), *self._after.values())
        added = {each.result: each for group in groups for each in group}
        needed, needed_new = _needed(program, self._operands, added, self._ties)
        # What the survey does not need itself stays.
        dropped = self._survey.needed - needed
        written = _Assembly(program, self._types)
        before, after, operands = self._before, self._after, self._operands
        for number in range(len(program.ops)):
            if number in before:
                written.add(new for new in before[number] if new.result in needed_new)
            if number not in dropped:
                written.keep(number, operands[number])
            if number in after:
                written.add(new for new in after[number] if new.result in needed_new)
        return written.finished(self._ties)


class _Assembly:
    """Ops of a survey and ops that are added, with new numbers."""

    def __init__(self, program: Program, types: Sequence[TensorType]) -> None:
        self._program, self._types = program, types
        self._signatures = {each: number for number, each in enumerate(program.signatures)}
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._repeats: list[int] = []
        self._origin: list[int] = []
        self._like: list[int] = []
        #: New numbers of values, of ops of the survey, and of ops that are added, by their results.
        self._value: dict[int, int] = {}
        self._op: dict[int, int] = {}
        self._new: dict[int, int] = {}

    def keep(self, number: int, operands: Sequence[int]) -> None:
        """Appends an op of the survey, with other operands."""
        op = self._program.ops[number]
        if self._program.kinds[number] == _BARRIER and operands[0] not in self._value:
            return  # of a part that nothing needs
        self._op[number] = len(self._ops)
        repeats = self._program.repeats[number]
        self._append(op.signature, operands, op.results, repeats, number, number)

    def add(self, ops: Iterable[_Added]) -> None:
        """Appends ops that are added."""
        for new in ops:
            types = tuple(self._types[value] for value in new.operands)
            signature = Signature(new.kind, new.attributes, types, (self._types[new.result],))
            number = self._signatures.setdefault(signature, len(self._signatures))
            self._new[new.result] = len(self._ops)
            self._append(number, new.operands, (new.result,), new.repeats, new.origin, new.like)

    def _append(
        self, signature: int, operands: Sequence[int], results: Sequence[int], repeats: int,
        origin: int, like: int,
    ) -> None:  # fmt: skip
        number, values = self._value, self._values
        try:
            used = tuple([number[value] for value in operands])
        except KeyError:
            text = "a value of the backward pass that the forward pass needs"
            raise NotWritten(text) from None
        first = len(values)
        for index, value in enumerate(results):
            number[value] = first + index
            values.append(Value(self._types[value], len(self._ops), index))
        self._ops.append(Op(signature, used, tuple(range(first, len(values)))))
        self._repeats.append(repeats)
        self._origin.append(origin)
        self._like.append(like)

    def finished(self, ties: Sequence[tuple[int, int]]) -> PolicyProgram:
        """The program; ``ties`` are the results of ops that are added."""
        program, op = self._program, self._op
        tied = [(op[a], op[b]) for a, b in program.ties if a in op and b in op]
        tied += [(self._new[a], self._new[b]) for a, b in ties if a in self._new]
        written = dataclasses.replace(
            program,
            signatures=tuple(self._signatures),
            ops=tuple(self._ops),
            values=tuple(self._values),
            ties=tuple(sorted(tied)),
            repeats=tuple(self._repeats),
            labels={},
            constraints={op[n]: of for n, of in program.constraints.items() if n in op},
            annotations={op[n]: of for n, of in program.annotations.items() if n in op},
            condition_reads=tuple(
                (self._value[value], op[carry]) for value, carry in program.condition_reads
            ),
            result_uses=frozenset(),
            memory=None,
            source=_Locations(program, tuple(self._like)),
        )
        return PolicyProgram(written, np.array(self._origin, dtype=np.int64))


def _moving(memory: str) -> tuple[tuple[str, Attribute], ...]:
    """The attributes of a transfer, as JAX states it."""
    return (
        ("call_target_name", "annotate_device_placement"), ("has_side_effect", 1),
        ("memory", memory),
    )  # fmt: skip


def _barriers(program: Program) -> list[tuple[int, float]]:
    """The first op of each barrier, and the op after its last one."""
    found: list[tuple[int, float]] = []
    for number in range(len(program.ops)):
        if program.kind(number) != _BARRIER:
            continue
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


class _Around:
    """The loops around ops."""

    def __init__(self, loops: Sequence[LoopOps]) -> None:
        self._loops = sorted(loops, key=lambda loop: loop.end - loop.begin)
        self._known: dict[int, tuple[LoopOps, ...]] = {}
        #: The last ``yield`` of a loop, by each of them.
        self._ends = {
            op: loop.end for loop in loops for op in range(loop.end - _yields(loop) + 1, loop.end)
        }

    def of(self, op: int) -> tuple[LoopOps, ...]:
        """The loops in whose bodies an op is, the innermost first."""
        if op not in self._known:
            # The values of ``carry`` are defined in the body.
            self._known[op] = tuple(
                loop for loop in self._loops if loop.begin <= op <= loop.end - _yields(loop)
            )
        return self._known[op]

    def end_of_row(self, op: int) -> int:
        """The last of the ops that begin or end a loop, if an op is one of these; else the op."""
        for loop in self.of(op)[:1]:
            if op <= loop.last_carry:
                return loop.last_carry
        return self._ends.get(op, op)

    def innermost(self, op: int) -> LoopOps | None:
        """The innermost loop around an op."""
        return next(iter(self.of(op)), None)

    def loop_between(self, op: int, other: int) -> LoopOps | None:
        """The outermost loop around an op that is not around another."""
        others = self.of(other)
        apart = [loop for loop in self.of(op) if loop not in others]
        return apart[-1] if apart else None


def _yields(loop: LoopOps) -> int:
    return loop.last_carry - loop.begin + 1


class _Hoist:
    """Values of the backward pass as the forward pass computes them."""

    def __init__(self, writer: _Writer, forward: dict[int, int], first: int) -> None:
        """``forward`` are values that are known; the backward pass begins at the op ``first``."""
        self._writer, self._forward, self._first = writer, forward, first
        self._twins = _Twins(writer.program, first)
        #: The op of the forward pass after which others are computed.
        self.cursor = -1
        self._constants: dict[_Key, int] = {}
        #: Values of the backward pass that are none in the forward pass.
        self._without: set[int] = set()

    def of(self, value: int) -> int | None:
        """What a value is in the forward pass; ``None`` if it is none there."""
        if value not in self._forward and value not in self._without:
            hoisted = self._hoisted(value)
            if hoisted is None:
                self._without.add(value)
            return hoisted
        return self._forward.get(value)

    def _hoisted(self, value: int) -> int | None:
        """:meth:`of` for a value that is not known."""
        program, maker = self._writer.program, self._writer.place[value]
        if maker < self._first:
            return value
        op, source = program.ops[maker], program.kind(maker) in SOURCES
        if not source and program.passes[maker] != "recomputed":
            return None
        operands = [found for operand in op.operands if (found := self.of(operand)) is not None]
        if len(operands) < len(op.operands):
            return None
        if self._twins.is_constant(maker, operands):
            if len(op.results) == 1:
                self._forward[value] = self._constant(maker, operands)
            return self._forward.get(value)
        twin = self._twins.of(op.signature, operands)
        if twin is not None:
            self._forward.update(zip(op.results, program.ops[twin].results, strict=True))
            self.cursor = max(self.cursor, twin)
        elif len(op.results) == 1:
            self.cursor = max([self.cursor, *(self._writer.place[each] for each in operands)])
            self._forward[value] = self._writer.copied(maker, self.cursor, operands)
        return self._forward.get(value)

    def _constant(self, maker: int, operands: Sequence[int]) -> int:
        """A copy of a value that depends on constants alone, before the forward pass."""
        program = self._writer.program
        key = self._twins.key(program.ops[maker].signature, operands)
        if key not in self._constants:
            place = max(
                (self._writer.place[operand] for operand in operands),
                default=max(len(program.arguments) - 1, 0),
            )
            copy = self._constants[key] = self._writer.copied(maker, place, operands)
            self._twins.know(copy, key)
        return self._constants[key]


#: What an op computes: its signature, and its operands.
_Key = tuple[int, tuple[int, ...]]


class _Twins:
    """Ops of the forward pass by what they compute."""

    def __init__(self, program: Program, end: int) -> None:
        self._program = program
        #: Values that depend on constants alone: those that are computed alike have one number,
        #: whatever the constants are.
        self._number: dict[int, int] = {}
        self._first: dict[_Key, int] = {}
        self._ops: dict[_Key, list[int]] = collections.defaultdict(list)
        self._found: collections.Counter[_Key] = collections.Counter()
        for number, op in enumerate(program.ops[:end]):
            key = self.key(op.signature, op.operands)
            if op.results and self.is_constant(number, op.operands):
                self.know(op.results[0], key)
            self._ops[key].append(number)

    def key(self, signature: int, operands: Sequence[int]) -> _Key:
        """What an op with these operands computes."""
        return signature, tuple(self._number.get(value, value) for value in operands)

    def is_constant(self, op: int, operands: Sequence[int]) -> bool:
        """Whether an op with these operands depends on constants alone."""
        if not operands:
            return self._program.kind(op) in SOURCES
        return all(value in self._number for value in operands)

    def know(self, value: int, key: _Key) -> None:
        """Records a value that depends on constants alone."""
        self._number[value] = self._first.setdefault(key, value)

    def of(self, signature: int, operands: Sequence[int]) -> int | None:
        """The op with a signature and operands; several alike ones in turn."""
        key = self.key(signature, operands)
        if key not in self._ops:
            return None
        number = min(self._found[key], len(self._ops[key]) - 1)
        self._found[key] += 1
        return self._ops[key][number]


def _needed(
    program: Program,
    operands: Sequence[Sequence[int]],
    added: dict[int, _Added],
    ties: Sequence[tuple[int, int]],
) -> tuple[set[int], set[int]]:
    """The ops that the results need, and the results of ops that were added which they need.

    A loop needs what it yields for what it carries, and the other way round.
    """
    tied: dict[int, list[int]] = collections.defaultdict(list)
    for one, other in program.ties:
        if program.kind(one) == "yield":
            tied[one].append(other)
            tied[other].append(one)
    tied_values: dict[int, list[int]] = collections.defaultdict(list)
    for one, other in ties:
        tied_values[one].append(other)
        tied_values[other].append(one)
    makers = program.makers
    ops: set[int] = set()
    new: set[int] = set()
    stack = [*range(len(program.arguments)), *(carry for _, carry in program.condition_reads)]
    stack += [number for number, op in enumerate(program.ops) if not op.results]
    waiting: list[int] = [value for value, _ in program.condition_reads]
    while stack or waiting:
        if stack:
            op = stack.pop()
            if op in ops:
                continue
            ops.add(op)
            stack += tied.get(op, ())
            waiting += operands[op]
            continue
        value = waiting.pop()
        if value < len(makers):
            stack.append(makers[value])
        elif value not in new:
            new.add(value)
            waiting += added[value].operands
            waiting += tied_values.get(value, ())
    return ops, new


__all__ = ["NotWritten", "PolicyProgram", "PolicyPrograms"]
