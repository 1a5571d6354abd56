"""Lowers a sharded program to the program of one device, with every collective in the open.

The inlined module is copied.  Every value gets its local type, every op its local form, and every
difference between shardings its collectives; the result is the body of one
``sdy.manual_computation`` over all axes of the mesh, as ``jax.shard_map`` makes it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxlib.mlir import ir

from toast.analysis import Analysis
from toast.boundary.printable import shortened
from toast.errors import PlanError
from toast.frontend import mlir, stablehlo
from toast.frontend.mlir import ModuleSource
from toast.lower.emitter import Emitter
from toast.lower.local_forms import LOCAL_FORMS, unsupported
from toast.lower.op_sharding import OpSharding, op_sharding
from toast.lower.reshard_steps import ReshardStep, reshard_steps, sum_steps
from toast.program import Program, Shardings, Spec, element_bytes
from toast.space import BOUNDARY

#: Operations whose results are values of their regions.
_WITH_REGIONS = frozenset({
    "stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.optimization_barrier",
})  # fmt: skip

#: Kinds of ops that are parts of such an operation, or of the function.
_OF_REGIONS = frozenset({"carry", "yield", "join", "argument", "return", "optimization_barrier"})


@dataclasses.dataclass(frozen=True)
class LocalCollective:
    """One collective of a lowered program."""

    kind: str
    #: In the order of the mesh.
    axes: tuple[str, ...]
    #: Bytes as :data:`toast.hardware.COLLECTIVES` counts them.
    bytes: float
    #: Runs per step.
    repeats: int
    #: The value that it reshards or sums, and the op that asked for it.
    value: int
    op: int
    #: Whether it gathers an operand of an op without a local form.
    gathers: bool = False


@dataclasses.dataclass(frozen=True)
class GatheredOp:
    """An op that runs whole along factors that the plan shards."""

    op: int
    factors: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LocalProgram:
    """A program for one device of a mesh."""

    program: Program
    shardings: Shardings
    #: The MLIR module.
    module: Any = dataclasses.field(repr=False)
    collectives: tuple[LocalCollective, ...] = dataclasses.field(repr=False)
    #: Ops without a local form for factors that the plan shards.
    gathered: tuple[GatheredOp, ...] = ()

    @property
    def text(self) -> str:
        """StableHLO with locations."""
        return str(self.module.operation.get_asm(enable_debug_info=True))

    def counts(self) -> collections.Counter[tuple[str, tuple[str, ...], float]]:
        """How often each planned collective runs in a step, by kind, axes and bytes."""
        counts: collections.Counter[tuple[str, tuple[str, ...], float]] = collections.Counter()
        for collective in self.collectives:
            if not collective.gathers:
                counts[collective.kind, collective.axes, collective.bytes] += collective.repeats
        return counts


def lower(
    analysis: Analysis, shardings: Shardings, held: npt.NDArray[np.int8], axes: Sequence[str]
) -> LocalProgram:
    """The device-local program of a plan.

    :param analysis: the analysis of the program.
    :param shardings: the shardings of all values.
    :param held: ``[ops, axes]`` the factor of each op that holds each axis, or -1.
    :param axes: the names of the axes of ``held``.
    :raises toast.errors.PlanError: if the program has no module, or an op cannot be lowered.
    """
    program = analysis.program
    if not isinstance(program.source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no program to lower")
    shardings.check(program)
    return _Lowering(analysis, _without_ones(shardings), held, axes).run()


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


class _Copy(NamedTuple):
    """A resharded value, and its collectives by number."""

    value: Any
    collectives: range


class _Lowering:
    """The lowering of one program."""

    def __init__(
        self,
        analysis: Analysis,
        shardings: Shardings,
        held: npt.NDArray[np.int8],
        axes: Sequence[str],
    ) -> None:
        self._analysis, self._program = analysis, analysis.program
        self._shardings, self._held, self._axes = shardings, held, tuple(axes)
        self._module = mlir.clone(analysis.program.source.module)
        self._copy = stablehlo.from_module(self._module, name=analysis.program.name)
        self._emitter = Emitter(self._module, shardings.mesh)
        self._collectives: list[LocalCollective] = []
        self._gathered: list[GatheredOp] = []
        #: Resharded values by value, both shardings and block: alike uses share one.
        self._copies: dict[tuple[int, Spec, Spec, Any], _Copy] = {}
        self._names = analysis.program.value_names

    def run(self) -> LocalProgram:
        """Lowers the whole program."""
        program, source = self._program, self._copy.source
        if any(program.kind(op) in BOUNDARY for op in range(len(program.ops))):
            raise PlanError(
                f"{program.name} has manual regions (shard_map), which have no local form yet; "
                "run the plan with plan.jit()"
            )
        writer = mlir.ShardyWriter(self._module, self._shardings.mesh.axes)
        writer.set_function(
            [self._shardings.of(program, v) for v in program.argument_values],
            list(self._shardings.results),
        )
        with self._module.context, ir.Location.unknown():
            self._end = writer.make_manual(
                [self._shardings.of(program, v) for v in program.argument_values],
                list(self._shardings.results),
                [self._local_type(v, self._shardings.of(program, v)) for v in program.argument_values],
            )
            for operation, values in source.results:
                if operation.name in _WITH_REGIONS:
                    self._retype(operation, values)
            for op in range(len(program.ops)):
                if program.kind(op) in _OF_REGIONS:
                    self._reshard_uses_of_region(op)
                else:
                    self._lower(op)
            self._verify()
        return LocalProgram(
            program, self._shardings, self._module, tuple(self._collectives),
            tuple(self._gathered),
        )  # fmt: skip

    # -- ops ---------------------------------------------------------------------------------

    def _retype(self, operation: Any, values: Sequence[int]) -> None:
        """Local types for the results of a loop or branch, and for the arguments of its blocks."""
        for index, value in enumerate(values):
            type_ = self._local_type(value, self._shardings.of(self._program, value))
            if type_ is None:
                continue
            operation.results[index].set_type(type_)
            if operation.name == "stablehlo.while":
                for region in operation.regions:
                    region.blocks[0].arguments[index].set_type(type_)

    def _reshard_uses_of_region(self, op: int) -> None:
        """The reshards of values that enter or leave a region, and of returned values."""
        first_return = len(self._program.ops) - len(self._program.results)
        for index in range(len(self._program.ops[op].operands)):
            if op >= first_return:
                wanted = self._shardings.results[op - first_return]
            else:
                wanted = self._shardings.at(self._program, op, index)
            self._reshard_use(op, index, wanted, wanted)

    def _lower(self, op: int) -> None:
        program, operation = self._program, self._copy.source.operations[op]
        planned = self._op_sharding(op)
        whole = unsupported(planned)
        if whole:
            self._gathered.append(
                GatheredOp(op, tuple(planned.factor(number).label for number in sorted(whole)))
            )
        lowered = planned.whole_along(whole)
        for index, (wanted, needed) in enumerate(
            zip(planned.operands, lowered.operands, strict=True)
        ):
            self._reshard_use(op, index, wanted, needed)
        uses = [[(use.owner, use.operand_number) for use in r.uses] for r in operation.results]
        if operation.name in mlir.CONSTRAINTS:
            values = [operation.operands[0]]
        else:
            rewrite = LOCAL_FORMS.get(program.kind(op))
            values = rewrite(self._emitter, operation, lowered) if rewrite else None
            if values is None:
                values = list(operation.results)
                for result, value, spec in zip(
                    values, program.ops[op].results, lowered.results, strict=True
                ):
                    if (type_ := self._local_type(value, spec)) is not None:
                        result.set_type(type_)
        last = operation
        for index, value in enumerate(program.ops[op].results):
            stored = self._shardings.of(program, value)
            current = values[index]
            (combiner, partial), = lowered.partial(index).items() or (("", frozenset()),)
            steps = sum_steps(lowered.results[index], stored, partial)
            if current.owner != last and not isinstance(current.owner, ir.Block):
                last = current.owner
            with self._emitter.after(last):
                current = self._run(current, steps, value, op, combiner=combiner, gathers=bool(whole))
            for owner, place in uses[index]:
                owner.operands[place] = current
        if operation.name in mlir.CONSTRAINTS:
            operation.erase()

    def _op_sharding(self, op: int) -> OpSharding:
        axes: dict[int, frozenset[str]] = {}
        for axis, factor in zip(self._axes, self._held[op].tolist(), strict=True):
            if factor >= 0:
                axes[factor] = axes.get(factor, frozenset()) | {axis}
        rule = self._analysis.rules[self._program.ops[op].signature]
        return op_sharding(self._program, self._shardings, rule, op, axes)

    def _local_type(self, value: int, spec: Spec) -> Any:
        """The type of a value on a device; ``None`` if it is no tensor."""
        type_ = self._program.values[value].type
        if type_.dtype == "token" or not any(spec):
            return None
        return mlir.tensor_type(self._emitter.local_shape(type_.shape, spec), type_.dtype)

    # -- reshards ----------------------------------------------------------------------------

    def _reshard_use(self, op: int, index: int, wanted: Spec, needed: Spec) -> None:
        """Reshards an operand: as planned, and further for an op without a local form."""
        program = self._program
        value = program.ops[op].operands[index]
        operation, place = self._copy.source.operand_sites[op, index]
        if program.kind(op) == "return":
            operation = self._end
        stored = self._shardings.of(self._program, value)
        for before, after, gathers in ((stored, wanted, False), (wanted, needed, True)):
            if before == after:
                continue
            key = value, before, after, operation.block
            if key not in self._copies:
                first = len(self._collectives)
                with self._emitter.before(operation):
                    copied = self._run(
                        operation.operands[place], reshard_steps(before, after), value, op,
                        gathers=gathers,
                    )  # fmt: skip
                self._copies[key] = _Copy(copied, range(first, len(self._collectives)))
            operation.operands[place] = self._copies[key].value
            if not gathers:  # planned, even if an op without a local form came first
                for number in self._copies[key].collectives:
                    planned = dataclasses.replace(self._collectives[number], gathers=False)
                    self._collectives[number] = planned

    def _run(
        self,
        current: Any,
        steps: Iterable[ReshardStep],
        value: int,
        op: int,
        *,
        combiner: str = "",
        gathers: bool = False,
    ) -> Any:
        """Emits steps for a value that ``op`` uses or defines; returns the new value."""
        program, type_ = self._program, self._program.values[value].type
        for step in steps:
            if step.kind == "slice":
                current = self._emitter.step(current, step)
                continue
            axes = tuple(axis for axis in self._shardings.mesh.names if axis in step.axes)
            size = element_bytes(type_.dtype) * float(np.prod(self._emitter.local_shape(
                type_.shape, step.before if step.kind == "reduce_scatter" else step.after
            )))  # fmt: skip
            self._collectives.append(
                LocalCollective(step.kind, axes, size, program.repeats[op], value, op, gathers)
            )
            name = self._names.get(value) or f"value {value}"
            purpose = f"{step.kind} of {name} for {program.kind(op)} {op}"
            with self._emitter.named(purpose):
                current = self._emitter.step(current, step, combiner)
        return current

    # -- the module --------------------------------------------------------------------------

    def _verify(self) -> None:
        try:
            self._module.operation.verify()
        except ir.MLIRError as error:
            raise PlanError(
                f"{self._program.name}: the lowered program is not valid: "
                f"{shortened(str(error).replace(chr(10), ' '), 300)}"
            ) from None
