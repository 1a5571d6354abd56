"""Lowers a sharded program to the program of one device, with every collective in the open.

The inlined module is copied.  Every value gets its local type, every op its local form, and every
difference between shardings its collectives; the result is the body of one
``sdy.manual_computation`` over all axes of the mesh, as ``jax.shard_map`` makes it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir

from toast.analysis import Analysis, Decomposition, analyzed
from toast.boundary.printable import shortened
from toast.cost.reshard_steps import (
    ReshardStep,
    crowded_dimensions,
    exchanged_dimensions,
    reshard_steps,
    sum_steps,
)
from toast.errors import PlanError
from toast.frontend import mlir
from toast.frontend import stablehlo as frontend
from toast.frontend.mlir import ModuleSource
from toast.lower.composite_shardings import body_sharding
from toast.lower.emitter import Emitter, Exchange
from toast.lower.local_forms import LOCAL_FORMS, is_body, unsupported
from toast.lower.op_sharding import OpFactors, OpSharding, op_sharding
from toast.lower.product_loops import Shards, changed_dimension, looped_gather, looped_sum
from toast.lower.remade_constants import RemadeConstants
from toast.program import Program, Shardings, Spec, TensorType, element_bytes, has_collective
from toast.space import BOUNDARY, matched_axes, split_axes


@dataclasses.dataclass(frozen=True)
class LocalCollective:
    """One collective of a lowered program."""

    #: The name in StableHLO, such as ``all_gather``.
    kind: str
    #: In the order of the mesh.
    axes: tuple[str, ...]
    #: Bytes as :data:`toast.hardware.COLLECTIVES` counts them.
    bytes: float
    #: Runs per step.
    repeats: int
    #: The value that it reshards or sums, and the op that uses it or, for a sum, defines it.
    value: int
    #: The op that uses the value or, for a sum, defines it.
    op: int
    #: The numbers of the plan's steps that it follows from, from 1.
    steps: tuple[int, ...] = ()
    #: Whether it gathers an operand, or shards a result, of an op without a local form.
    gathers: bool = False
    #: Whether devices exchange elements at the edges of their shards for an op.
    edges: bool = False


@dataclasses.dataclass(frozen=True)
class GatheredOp:
    """An op that runs whole along factors that the plan shards."""

    #: The number of the op.
    op: int
    #: The factors of the op that the plan shards and that run whole.
    factors: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LocalProgram:
    """The program of one device of a mesh, with every collective of a plan as an op."""

    #: The program that was lowered.
    program: Program
    #: The shardings that it was lowered for.
    shardings: Shardings
    #: The MLIR module.
    module: Any = dataclasses.field(repr=False)
    #: Every collective, in program order.
    collectives: tuple[LocalCollective, ...] = dataclasses.field(repr=False)
    #: Ops without a local form for factors that the plan shards.
    gathered: tuple[GatheredOp, ...] = ()

    @property
    def text(self) -> str:
        """StableHLO with locations."""
        return str(self.module.operation.get_asm(enable_debug_info=True))

    def counts(self) -> collections.Counter[tuple[str, tuple[str, ...], float]]:
        """How often each planned collective runs in a step, by kind, axes and bytes.

        This equals :meth:`toast.cost.CostModel.local_collectives` of the plan's state.  As there,
        collectives around ops without a local form are not counted.
        """
        counts: collections.Counter[tuple[str, tuple[str, ...], float]] = collections.Counter()
        for collective in self.collectives:
            if collective.bytes and not collective.gathers:
                counts[collective.kind, collective.axes, collective.bytes] += collective.repeats
        return counts


def lower(analysis: Analysis, shardings: Shardings, factors: OpFactors) -> LocalProgram:
    """The device-local program of a plan (paper, 2.1; GShard, 3.3).

    :param analysis: the analysis of the program.
    :param shardings: the shardings of all values.
    :param factors: the factors of ops that hold the axes of the mesh.
    :raises toast.errors.PlanError: if the program has no module, or an op cannot be lowered.
    """
    program = analysis.program
    if not isinstance(program.source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no program to lower")
    shardings.check(program)
    factors.check(analysis, shardings.mesh)
    return _Lowering(analysis, _without_ones(shardings), factors).run()


def _without_ones(shardings: Shardings) -> Shardings:
    """The shardings without axes of one device."""
    ones = {name for name, size in shardings.mesh.axes if size == 1}
    if not ones:
        return shardings

    def real(spec: Spec) -> Spec:
        return tuple(tuple(axis for axis in axes if axis not in ones) for axes in spec)

    return Shardings(
        shardings.mesh,
        {value: real(spec) for value, spec in shardings.values.items()},
        {use: real(spec) for use, spec in shardings.uses.items()},
        tuple(map(real, shardings.results)),
        {value: real(spec) for value, spec in shardings.sums.items()},
        shardings.manual_axes,
    )


def _before_branches(operation: Any, operand: Any) -> Any:
    """The op that uses ``operand``, or the outermost branching op around it that does so, too.

    What several branches need is resharded once, before them.
    """
    owner = operand.owner
    defining = owner if isinstance(owner, ir.Block) else owner.operation.block
    while operation.block != defining:
        around = operation.block.owner.operation
        if around.name not in ("stablehlo.case", "stablehlo.if"):
            break
        operation = around
    return operation


class _Copy(NamedTuple):
    """A resharded value, and its collectives by number."""

    value: Any
    collectives: range


class _GatherLoop(NamedTuple):
    """A product that uses the shards of an operand one after the other."""

    operand: int
    shards: Shards


class _Body(NamedTuple):
    """The local function of a composite, ``""`` for none, and the factors that stay whole."""

    function: str
    whole: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _Purpose:
    """What a reshard or a sum is for."""

    #: The value, and the op that uses it or, for a sum, defines it.
    value: int
    op: int
    #: Whether an op without a local form requires it.
    gathers: bool = False
    #: The combiner of partial sums.
    combiner: str = ""
    #: The type of what is moved, if it is not that of the value.
    of: TensorType | None = None
    #: How often it runs in a step, if not as often as the op.
    times: int | None = None


class _Lowering:
    """The lowering of one program."""

    def __init__(
        self, analysis: Analysis, shardings: Shardings, factors: OpFactors, *,
        inside: Emitter | None = None, left: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """With ``inside``, the program is a function of the emitter's module, and is not copied.

        Sums over the axes ``left`` stay partial.
        """
        self._analysis, self._program = analysis, analysis.program
        self._shardings, self._factors, self._left = shardings, factors, left
        source = analysis.program.source
        self._source = source if inside else source.copied()
        self._module = self._source.module
        self._emitter = inside or Emitter(self._module, shardings.mesh)
        self._collectives: list[LocalCollective] = []
        self._gathered_ops: list[GatheredOp] = []
        #: Resharded values by value, both shardings and block: alike uses share one.
        self._copies: dict[tuple[int, Spec, Spec, Any], _Copy] = {}
        #: The shards of which products make loops instead of such a copy.
        self._shards: dict[tuple[int, Spec, Spec, Any], Shards] = {}
        #: The types of values on a device.
        self._types: dict[tuple[TensorType, Spec], ir.Type] = {}
        self._names = analysis.program.value_names
        self._first_return = len(self._program.ops) - len(self._program.results)
        #: The axis of the mesh for each axis of the program's manual regions.
        self._taken: dict[str, str] = {}
        #: The local functions of composites, by decomposition and shardings.
        self._bodies: dict[Any, _Body] = {}
        #: Values that stay partial sums, the ops that combine these, and those of the totals.
        self._waiting = {value for joint in factors.joint_sums for value in joint.waiting}
        self._passed = {each.op: each for joint in factors.joint_sums for each in joint.passed}
        self._totals = {joint.op: joint for joint in factors.joint_sums}
        self._constants = RemadeConstants(self._program, self._source, shardings)

    def run(self) -> LocalProgram:
        """Lowers the whole program."""
        program = self._program
        arguments = [self._shardings.of(program, v) for v in program.argument_values]
        results = list(self._shardings.results)
        writer = mlir.ShardyWriter(self._module, self._shardings.mesh.axes)
        writer.set_function(arguments, results)
        if any(signature.kind in BOUNDARY for signature in program.signatures):
            self._taken = dict(self._shardings.manual_axes) or matched_axes(
                program, self._shardings.mesh
            )
        with self._module.context, ir.Location.unknown():
            types = [
                self._local_type(value, spec)
                for value, spec in zip(program.argument_values, arguments, strict=True)
            ]
            self._end = writer.make_manual(arguments, results, types)
            self._lower_ops()
            if self._taken:
                writer.inline_regions(self._taken)
            self._verify()
        return LocalProgram(
            program, self._shardings, self._module, tuple(self._collectives),
            tuple(self._gathered_ops),
        )  # fmt: skip

    def run_inside(self, function: Any) -> bool:
        """Lowers a function of the module in place; returns whether it needs no communication."""
        program = self._program
        (block,) = function.regions[0].blocks
        for argument, value in zip(block.arguments, program.argument_values, strict=True):
            if (type_ := self._local_type(value, self._shardings.of(program, value))) is not None:
                argument.set_type(type_)
        self._end = [*block.operations][-1].operation
        self._lower_ops()
        types = [argument.type for argument in block.arguments]
        results = [operand.type for operand in self._end.operands]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, results))
        return not (self._collectives or self._gathered_ops)

    def _lower_ops(self) -> None:
        program = self._program
        for operation, values in self._source.results:
            if operation.name in mlir.WITH_REGIONS:
                self._set_types_of_region(operation, values)
                if operation.name == "stablehlo.while":
                    self._gather_for_condition(operation, values)
        for op in range(len(program.ops)):
            kind = program.kind(op)
            if kind in BOUNDARY:
                self._lower_boundary(op)
            elif kind in mlir.OF_REGIONS:
                self._reshard_uses_of_region(op)
            else:
                try:
                    self._lower(op)
                except (ir.MLIRError, ValueError, KeyError, IndexError) as error:
                    raise self._impossible(op, error) from error
        self._gather_captured()
        self._constants.erase()

    # -- ops ---------------------------------------------------------------------------------

    def _set_types_of_region(self, operation: Any, values: Sequence[int]) -> None:
        """Local types for the results of a loop or branch, and for the arguments of its blocks."""
        for index, value in enumerate(values):
            type_ = self._local_type(value, self._shardings.of(self._program, value))
            if type_ is None:
                continue
            operation.results[index].set_type(type_)
            if operation.name == "stablehlo.while":
                for region in operation.regions:
                    region.blocks[0].arguments[index].set_type(type_)

    def _gather_for_condition(self, loop: Any, values: Sequence[int]) -> None:
        """Gathers what the condition of a loop uses: devices must run equally many iterations."""
        program, ties = self._program, dict(self._program.ties)
        ends = [program.values[value].op for value in values]
        # An earlier loop may end with other values of this one.
        runs = program.condition_runs(max(ties[op] for op in ends if program.kind(op) == "yield"))
        (block,) = loop.regions[0].blocks
        for argument, value in zip(block.arguments, values, strict=True):
            spec = self._shardings.of(program, value)
            uses = [(use.owner, use.operand_number) for use in argument.uses]
            if not uses or not any(spec):
                continue
            self._gather_at_begin(block, argument, value, uses, runs)

    def _gather_captured(self) -> None:
        """Gathers what conditions use from outside of their loops; ops have their local forms."""
        for block, carry, reads in self._source.conditions():
            runs = self._program.condition_runs(carry)
            for value, of_value in reads.items():
                uses = [(read.operation, read.place) for read in of_value]
                shape = self._program.values[value].type.shape
                if 0 in shape:
                    for operation, place in uses:
                        self._use_empty(operation, place, shape)
                elif any(self._shardings.of(self._program, value)):
                    operation, place = uses[0]
                    current = operation.operands[place]
                    self._gather_at_begin(block, current, value, uses, runs)

    def _gather_at_begin(
        self, block: Any, current: Any, value: int, uses: Sequence[tuple[Any, int]], runs: int
    ) -> None:
        """Gathers a value at the begin of a condition, which runs ``runs`` times, for its uses."""
        spec, op = self._shardings.of(self._program, value), self._program.values[value].op
        try:
            with self._emitter.at_begin(block):
                whole = self._run(
                    current,
                    reshard_steps(spec, ((),) * len(spec)),
                    _Purpose(value, op, times=runs),
                )
        except (ir.MLIRError, ValueError, KeyError, IndexError) as error:
            raise self._impossible(op, error) from error
        self._replace(uses, whole)

    def _reshard_uses_of_region(self, op: int) -> None:
        """The reshards of values that enter or leave a region, and of returned values."""
        for index in range(len(self._program.ops[op].operands)):
            if op >= self._first_return:
                wanted = self._shardings.results[op - self._first_return]
            else:
                wanted = self._shardings.at(self._program, op, index)
            self._reshard_use(op, index, wanted, wanted)

    def _lower_boundary(self, op: int) -> None:
        """The reshard of a value at the boundary of a manual region, and its type inside."""
        program = self._program
        (value,) = program.ops[op].results
        if program.kind(op) == "manual_entry":
            wanted = self._region_first(op, self._shardings.at(program, op, 0))
            self._reshard_use(op, 0, wanted, wanted)
            operation, index = self._source.operand_sites[op, 0]
            (block,) = operation.regions[0].blocks
            if (type_ := self._local_type(value, self._shardings.of(program, value))) is not None:
                block.arguments[index].set_type(type_)
            return
        inside = self._shardings.at(program, op, 0)
        self._reshard_use(op, 0, inside, inside)
        end, index = self._source.operand_sites[op, 0]
        region = end.parent
        result = region.results[index]
        stored = self._shardings.of(program, value)
        computed = self._region_first(op, stored)
        if (type_ := self._local_type(value, computed)) is not None:
            result.set_type(type_)
        uses = [(use.owner, use.operand_number) for use in result.uses]
        with self._emitter.after(region):
            steps = self._reshard_steps(value, computed, stored)
            current = self._run(result, steps, _Purpose(value, op))
        self._replace(uses, current)

    def _region_first(self, op: int, spec: Spec) -> Spec:
        """``spec`` with the axes of a region first where its value is split, and only there."""
        split = split_axes(self._program.signatures[self._program.ops[op].signature])
        own = [(self._taken[axis], dimension) for axis, dimension in split]
        taken = {axis for axis, _ in own}
        return tuple(
            (*(axis for axis, at in own if at == d), *(axis for axis in axes if axis not in taken))
            for d, axes in enumerate(spec)
        )

    def _lower(self, op: int) -> None:
        program, operation = self._program, self._source.operations[op]
        rule = self._analysis.rules[program.ops[op].signature]
        planned = op_sharding(program, self._shardings, rule, op, self._factors.of(op))
        whole = unsupported(planned)
        if planned.sharded and is_body(planned.signature):
            whole |= self._lower_body(operation, planned.whole_along(whole))
        if whole:
            labels = tuple(planned.factor(number).label for number in sorted(whole))
            self._gathered_ops.append(GatheredOp(op, labels))
        lowered = planned.whole_along(whole)
        passed = self._passed.get(op)
        if passed is not None:
            lowered = dataclasses.replace(lowered, waiting=passed.axes)
            if passed.alike is not None:  # it adds shards of partial sums
                spec = self._computed(passed.alike)
                lowered = dataclasses.replace(lowered, results=(spec,))
                self._rescale(op, spec)
        specs = zip(planned.operands, lowered.operands, strict=True)
        loop = None
        for index, (wanted, needed) in enumerate(specs):
            if (op, index) in self._factors.looped_gathers:
                loop = self._begin_loop(op, index, wanted)
            if loop is None or loop.operand != index:
                self._reshard_use(op, index, wanted, needed)
        own = list(operation.results)
        # The local form may use the op's own results, so these uses are those of the program.
        uses = [[(use.owner, use.operand_number) for use in result.uses] for result in own]
        last = operation
        if loop is not None:
            with self._emitter.before(operation), self._emitter.named(self._reason_of_loop(op)):
                results = [looped_gather(self._emitter, operation, loop.operand, loop.shards)]
        elif op in self._factors.looped_sums:
            results = [self._looped_sum(operation, lowered)]
        else:
            results = self._local_results(operation, lowered)
        if gathered := self._gathered_sums(lowered):
            last, results = self._combined(operation, lowered, results)
        for index, current in enumerate(results):
            value = program.ops[op].results[index]
            stored = self._shardings.of(program, value)
            if 0 in program.values[value].type.shape:
                continue  # its uses make one of their own
            if value in self._waiting:
                if current != own[index]:
                    self._replace(uses[index], current)
                continue
            sums = {} if gathered else lowered.partial(index)
            ((combiner, partial),) = sums.items() or (("", frozenset()),)
            if combiner == "add":
                partial -= self._left
            purpose = _Purpose(value, op, bool(whole), combiner)
            if op in self._totals:
                purpose = _Purpose(self._totals[op].value, op, combiner="add")
            steps = sum_steps(lowered.results[index], stored, partial)
            if op in self._factors.looped_sums:
                steps = steps[1:]  # the loop has scattered the sum
            if steps:
                if not isinstance(current.owner, ir.Block):
                    last = current.owner
                with self._emitter.after(last):
                    current = self._run(current, steps, purpose)
            if steps or current != own[index]:
                self._replace(uses[index], current)
        replaced = all(current.owner != operation for current in results)
        if replaced and not any(use for result in operation.results for use in result.uses):
            operation.erase()

    def _rescale(self, op: int, spec: Spec) -> None:
        """Gives an op that scales a partial sum its number in the shape of the shards."""
        program, operation = self._program, self._source.operations[op]
        if not self._analysis.rules[program.ops[op].signature].linearity.scales:
            return
        maker = self._source.operations[program.values[program.ops[op].operands[1]].op]
        shape = self._emitter.local_shape(
            program.values[program.ops[op].results[0]].type.shape, spec
        )
        with self._emitter.before(operation):
            operation.operands[1] = self._emitter.broadcast(maker.operands[0], shape, [])

    def _computed(self, value: int) -> Spec:
        """The sharding of a value as its op computes it."""
        return self._shardings.sums.get(value, self._shardings.of(self._program, value))

    def _begin_loop(self, op: int, index: int, wanted: Spec) -> _GatherLoop | None:
        """The shards of an operand in place of the gather that becomes a loop of a product.

        They are passed on where the copy would be made, before branches that may share it.
        ``None`` if another op has gathered the operand.
        """
        value = self._program.ops[op].operands[index]
        operation, stored = self._source.operations[op], self._shardings.of(self._program, value)
        operand = operation.operands[index]
        user = _before_branches(operation, operand)
        key = value, stored, wanted, user.block
        if key in self._copies or key in self._shards:
            return None
        *first, gather = self._reshard_steps(value, stored, wanted)
        (axis,) = gather.axes
        with self._emitter.before(user):
            if value in self._constants:
                operand = self._constants.whole(value)
                first = [*reshard_steps(((),) * len(wanted), gather.before)]
            own = self._run(operand, first, _Purpose(value, op))
            with self._emitter.named(self._reason_of_loop(op)), self._exchanging(op):
                dimension = changed_dimension(gather.before, gather.after)
                shards = Shards.passed_on(self._emitter, own, dimension, axis, index)
        self._shards[key] = shards
        return _GatherLoop(index, shards)

    def _looped_sum(self, operation: Any, lowered: OpSharding) -> Any:
        """The scattered result of a product whose partial sums go around the devices."""
        op = lowered.op
        stored = self._shardings.of(self._program, self._program.ops[op].results[0])
        (partial,) = lowered.partial(0).values()
        scatter, *_ = sum_steps(lowered.results[0], stored, partial)
        (axis,) = scatter.axes
        dimension = changed_dimension(scatter.before, scatter.after)
        named = self._emitter.named(self._reason_of_loop(op))
        with self._emitter.before(operation), named, self._exchanging(op):
            return looped_sum(self._emitter, operation, dimension, axis)

    def _reason_of_loop(self, op: int) -> str:
        return f"loop of {self._program.kind(op)} {op}"

    def _lower_body(self, operation: Any, planned: OpSharding) -> frozenset[int]:
        """Gives a composite a local decomposition; returns the factors along which it runs whole.

        Its partial results stay so in the decomposition.
        """
        decomposition = ir.FlatSymbolRefAttr(operation.attributes["decomposition"]).value
        specs = planned.operands, planned.results, planned.axes_of_sums
        key = decomposition, planned.signature, specs
        if key not in self._bodies:
            self._bodies[key] = self._local_body(decomposition, planned)
        body = self._bodies[key]
        if body.function:
            operation.attributes["decomposition"] = ir.FlatSymbolRefAttr.get(body.function)
        return body.whole

    def _local_body(self, decomposition: str, planned: OpSharding) -> _Body:
        """A decomposition on local shapes, as a new function."""
        module = self._module
        function = mlir.copied_function(module, decomposition, f"{decomposition}.local")
        program = frontend.flattened(module, function, name=decomposition)
        body = analyzed(program, rules=self._analysis.rule_files, lowering="local")
        of_rule = Decomposition(body.program, body.rules, body.names, body.color)
        whole = of_rule.whole(planned.rule) & {*planned.sharded}
        local = planned.whole_along(whole)
        if local.sharded:
            sharding = body_sharding(of_rule, self._shardings.mesh, local)
            if sharding is not None:
                inner = _Lowering(body, *sharding, inside=self._emitter, left=local.axes_of_sums)
                inner._bodies = self._bodies
                if inner.run_inside(function.operation):
                    name = ir.StringAttr(function.attributes["sym_name"]).value
                    return _Body(str(name), whole)
        function.operation.erase()
        return _Body("", frozenset(planned.sharded))

    def _gathered_sums(self, lowered: OpSharding) -> bool:
        """Whether devices gather the partial results of an op, as no collective combines them."""
        return any(
            not has_collective(combiner, type_.dtype)
            for index, type_ in enumerate(lowered.signature.results)
            for combiner in lowered.partial(index)
        )

    def _combined(
        self, operation: Any, lowered: OpSharding, results: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Gathers the partial results of a reduction, and combines them by the same body.

        Returns the last op, and the results.
        """
        program, emitter = self._program, self._emitter
        last, inputs = operation, []
        for current in results:
            if current.owner != operation:
                last = current.owner
        with emitter.after(last):
            for index, current in enumerate(results):
                value, spec = program.ops[lowered.op].results[index], lowered.results[index]
                (partial,) = lowered.partial(index).values()
                leading = tuple(axis for axis in self._shardings.mesh.names if axis in partial)
                type_ = program.values[value].type
                stacked = TensorType((emitter.shards(leading), *type_.shape), type_.dtype)
                part = emitter.reshape(current, [1, *current.type.shape])
                steps = reshard_steps((leading, *spec), ((), *spec))
                inputs.append(self._run(part, steps, _Purpose(value, lowered.op, of=stacked)))
            new = operation.operation.clone()
            for place, operand in enumerate(inputs):
                new.operands[place] = operand
            new.attributes["dimensions"] = ir.DenseI64ArrayAttr.get([0])
            for result, current in zip(new.results, results, strict=True):
                result.set_type(current.type)
        return new, list(new.results)

    def _local_results(self, operation: Any, lowered: OpSharding) -> list[Any]:
        """The results of the local form of an op, as the op computes them."""
        if operation.name in mlir.CONSTRAINTS:
            return [operation.operands[0]]
        rewrite = LOCAL_FORMS.get(lowered.signature.kind)
        with self._exchanging(lowered.op):
            values = rewrite(self._emitter, operation, lowered) if rewrite else None
        if values is not None:
            return list(values)
        numbers = self._program.ops[lowered.op].results
        for result, value, spec in zip(operation.results, numbers, lowered.results, strict=True):
            if (type_ := self._local_type(value, spec)) is not None:
                result.set_type(type_)
        return list(operation.results)

    @contextlib.contextmanager
    def _exchanging(self, op: int) -> Iterator[None]:
        """Records the exchanges between neighbours that are emitted for an op, with reasons."""
        with self._emitter.explained(lambda each: self._reason(self._exchange(op, each))):
            yield
        self._collectives += [self._exchange(op, each) for each in self._emitter.exchanges]
        self._emitter.exchanges.clear()

    def _exchange(self, op: int, exchange: Exchange) -> LocalCollective:
        """An exchange between neighbours for an op."""
        operands, results = self._program.ops[op].operands, self._program.ops[op].results
        number = exchange.tensor or 0
        value = results[-1 - number] if number < 0 else operands[number]
        return LocalCollective(
            "collective_permute", exchange.axes, exchange.bytes, self._program.repeats[op],
            value, op, self._factors.causes((op,), frozenset(exchange.axes)),
            edges=exchange.tensor is None,
        )  # fmt: skip

    def _local_type(self, value: int, spec: Spec) -> ir.Type | None:
        """The type of a value on a device; ``None`` if it is that of the program."""
        type_ = self._program.values[value].type
        if type_.dtype == "token" or not any(spec):
            return None
        key = type_, spec
        if key not in self._types:
            local = self._emitter.local_shape(type_.shape, spec)
            self._types[key] = mlir.tensor_type(local, type_.dtype)
        return self._types[key]

    # -- reshards ----------------------------------------------------------------------------

    def _reshard_use(self, op: int, index: int, wanted: Spec, needed: Spec) -> None:
        """Reshards an operand: as planned, and further for an op without a local form."""
        value = self._program.ops[op].operands[index]
        operation, place = self._source.operand_sites[op, index]
        if self._program.kind(op) == "return":
            operation = self._end
        stored = self._shardings.of(self._program, value)
        type_ = self._program.values[value].type
        if 0 in type_.shape:
            self._use_empty(operation, place, self._emitter.local_shape(type_.shape, needed))
            return
        for before, after, gathers in ((stored, wanted, False), (wanted, needed, True)):
            if before == after:
                continue
            operand = operation.operands[place]
            user = _before_branches(operation, operand)
            key = value, before, after, user.block
            if key in self._shards and key not in self._copies:
                with self._emitter.before(user):
                    whole = self._shards[key].gathered(self._emitter)
                self._copies[key] = _Copy(whole, range(0))
            if key not in self._copies:
                first, steps = len(self._collectives), self._reshard_steps(value, before, after)
                with self._emitter.before(user):
                    if value in self._constants:
                        operand = self._constants.whole(value)
                        steps = reshard_steps(((),) * len(after), after)
                    copied = self._run(operand, steps, _Purpose(value, op, gathers))
                self._copies[key] = _Copy(copied, range(first, len(self._collectives)))
            operation.operands[place] = self._copies[key].value
            if not gathers:  # planned, even if an op without a local form came first
                for number in self._copies[key].collectives:
                    planned = dataclasses.replace(self._collectives[number], gathers=False)
                    self._collectives[number] = planned

    def _use_empty(self, operation: Any, place: int, shape: Sequence[int]) -> None:
        """Gives an operand without elements a shape."""
        operand = operation.operands[place]
        if list(operand.type.shape) != list(shape):
            with self._emitter.before(operation):
                operation.operands[place] = self._emitter.splat(0, shape, operand.type.element_type)

    def _reshard_steps(self, value: int, before: Spec, after: Spec) -> tuple[ReshardStep, ...]:
        """The steps between two shardings of a value."""
        shape, sizes = self._program.values[value].type.shape, dict(self._shardings.mesh.axes)
        crowded = crowded_dimensions(shape, before, after, sizes)
        exchanged = exchanged_dimensions(before, after, sizes)
        return reshard_steps(before, after, crowded, exchanged)

    def _run(self, current: Any, steps: Sequence[ReshardStep], purpose: _Purpose) -> Any:
        """Emits steps for a value; returns the new value."""
        for step in steps:
            if step.kind == "slice":
                current = self._emitter.step(current, step)
                continue
            collective = self._collective(step, purpose)
            self._collectives.append(collective)
            with self._emitter.named(self._reason(collective)):
                current = self._emitter.step(current, step, purpose.combiner)
        return current

    def _collective(self, step: ReshardStep, purpose: _Purpose) -> LocalCollective:
        type_ = purpose.of or self._program.values[purpose.value].type
        spec = step.before if step.kind == "reduce_scatter" else step.after
        ops = purpose.op, self._program.values[purpose.value].op
        return LocalCollective(
            step.kind,
            tuple(axis for axis in self._shardings.mesh.names if axis in step.axes),
            element_bytes(type_.dtype) * float(math.prod(
                self._emitter.local_shape(type_.shape, spec)
            )),
            self._program.repeats[purpose.op] if purpose.times is None else purpose.times,
            purpose.value,
            purpose.op,
            self._factors.causes(ops, step.axes),
            purpose.gathers,
        )  # fmt: skip

    def _reason(self, collective: LocalCollective) -> str:
        """The location of a collective: its value, the op that it is for, and the plan's steps."""
        name = self._names.get(collective.value) or f"value {collective.value}"
        use = f"{self._program.kind(collective.op)} {collective.op}"
        text = f"{collective.kind} of {name} for {use}"
        if collective.steps:
            text += f" (step {', '.join(map(str, collective.steps))})"
        return text

    @staticmethod
    def _replace(uses: Sequence[tuple[Any, int]], value: Any) -> None:
        for owner, place in uses:
            owner.operands[place] = value

    # -- the module --------------------------------------------------------------------------

    def _impossible(self, op: int, error: Exception) -> PlanError:
        """The error for an op that has no valid local form in its state."""
        program = self._program
        rule = self._analysis.rules[program.ops[op].signature]
        held = [
            f"factor {rule.factors[number].label} ({', '.join(sorted(axes))})"
            for number, axes in self._factors.of(op).items()
        ]
        reason = shortened(" ".join(str(error).split()), 200)
        return PlanError(
            f"{program.name}: {program.describe(op)} has no local form along "
            f"{', '.join(held) or 'its operands'}: {reason}; pin its operands to other shardings, "
            "or correct its rule (toast rules check)"
        )

    def _verify(self) -> None:
        try:
            self._module.operation.verify()
        except ir.MLIRError as error:
            for op, operation in enumerate(self._source.operations):
                if operation is None or self._program.kind(op) in mlir.WITH_REGIONS:
                    continue
                try:
                    operation.verify()
                except ir.MLIRError as of_op:
                    raise self._impossible(op, of_op) from None
                except Exception:  # the lowering has replaced and erased it
                    continue
            raise PlanError(
                f"{self._program.name}: the lowered program is not valid: "
                f"{shortened(str(error).replace(chr(10), ' '), 300)}"
            ) from None
