"""Reads, removes and writes Shardy's attributes and ops."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from toast.frontend.mlir.constants import splat
from toast.frontend.mlir.manual_computation import REGION, Regions
from toast.frontend.mlir.marks import ANNOTATION, NAME, marked
from toast.frontend.mlir.modules import clone, main_function, walk
from toast.frontend.mlir.ops import call_target
from toast.frontend.mlir.python_calls import is_callback

#: Mesh axes of each dimension, major to minor.
Spec = tuple[tuple[str, ...], ...]

#: Ops that constrain the sharding of their result.
CONSTRAINTS = frozenset({"sdy.sharding_constraint", "sdy.reshard"})


def keeping_names() -> Any:
    """JAX's lowering parameters that keep names of ``checkpoint_name``, and annotations.

    JAX lowers the former to no op, and the latter to composites.  Here they become sharding
    constraints without axes, so that users can pin the value.
    """
    from jax._src.ad_checkpoint import name_p
    from jax._src.interpreters import mlir as jax_mlir

    from toast.frontend.mlir.annotations import annotation_p, annotation_text

    def named(_context: Any, value: Any, *, name: str) -> list[Any]:
        return [marked(value, NAME, name)]

    def annotated(_context: Any, value: Any, **parameters: Any) -> list[Any]:
        rank = ir.RankedTensorType(value.type).rank
        return [marked(value, ANNOTATION, annotation_text(rank=rank, **parameters))]

    return jax_mlir.LoweringParameters(
        override_lowering_rules=((name_p, named), (annotation_p, annotated))
    )


def constraint(operation: Any) -> tuple[tuple[str, ...] | None, ...] | None:
    """The mesh axes of each dimension in a sharding constraint; ``None`` for an open dimension.

    ``None`` for other ops, for constraints with open dimensions only, and for sub-axes.
    """
    if operation.name not in CONSTRAINTS:
        return None
    return _constrained_axes(operation.attributes["sharding"])


def argument_constraint(attributes: Any) -> tuple[tuple[str, ...] | None, ...] | None:
    """As :func:`constraint`, for an argument with these attributes."""
    return _constrained_axes(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else None


def _constrained_axes(sharding: Any) -> tuple[tuple[str, ...] | None, ...] | None:
    dimensions: list[tuple[str, ...] | None] = []
    for dimension in sdy.TensorShardingAttr(sharding).dimension_shardings:
        here = sdy.DimensionShardingAttr(dimension)
        axes = [sdy.AxisRefAttr(axis) for axis in here.axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            return None
        names = tuple(str(axis.name) for axis in axes)
        dimensions.append(names if here.is_closed or names else None)
    return None if all(axes is None for axes in dimensions) else tuple(dimensions)


MESH = "toast_mesh"

#: The mesh of the first device, which runs callbacks into Python, as in JAX.
_FIRST = "toast_first_device"

#: Ops whose results are values of their regions.
_REGIONS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if", REGION})

#: Custom calls that XLA rejects with a sharding of their own.
_UNSHARDED_CALLS = frozenset({"ApproxTopK"})

#: Ops that can be recomputed for every use.
_SOURCES = frozenset({"stablehlo.constant", "stablehlo.iota", "sdy.constant"})

#: The attributes with shardings of Shardy and of GSPMD.
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")


def _forget_shardings(module: ir.Module, *, meshes: bool = True) -> list[Any]:
    """Removes ``meshes`` and shardings, also inside regions; returns the remaining constraints.

    A single ``mhlo.sharding`` would make XLA disable Shardy, and with it a plan.
    """
    constraints = []
    for operation in list(walk(module.body)):
        if operation.name in ("sdy.mesh", "sdy.sharding_group"):
            if meshes or operation.name != "sdy.mesh":
                operation.erase()
            continue
        if operation.name in CONSTRAINTS:
            constraints.append(operation)
        attributes = operation.attributes
        for name in _SHARDINGS:
            if name in attributes:
                del attributes[name]
        for key in {"arg_attrs", "res_attrs"} & set(attributes):
            attributes[key] = ir.ArrayAttr.get([
                ir.DictAttr.get({n.name: n.attr for n in entry if n.name not in _SHARDINGS})
                for entry in attributes[key]
            ])  # fmt: skip
    return constraints


def without_shardings(module: ir.Module) -> ir.Module:
    """A copy of ``module`` without shardings and constraints.

    It has no mesh either, unless it has manual regions, which keep theirs.
    """
    copy = clone(module)
    with copy.context:
        for operation in _forget_shardings(copy, meshes=not Regions(copy)):
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
    return copy


class ShardyWriter:
    """Writes shardings (mesh axes per dimension) into a module as Shardy attributes."""

    def __init__(self, module: ir.Module, axes: tuple[tuple[str, int], ...]) -> None:
        """Replaces the meshes of the module by one with ``axes``; removes all old shardings."""
        self._module, self._function = module, main_function(module, "module")
        #: The manual regions; :meth:`move_regions` moves them to the mesh.
        self._regions = Regions(module)
        self._axes = axes
        with module.context as self._context, ir.Location.unknown():
            for operation in _forget_shardings(module):
                rank = ir.RankedTensorType(operation.results[0].type).rank
                operation.attributes["sharding"] = self._sharding(((),) * rank)
            mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(name, size) for name, size in axes])
            sdy.MeshOp(MESH, mesh, ip=ir.InsertionPoint.at_block_begin(module.body))

    def set_function(self, arguments: list[Spec], results: list[Spec]) -> None:
        """Writes the shardings of the entry function's arguments and results."""
        attributes = self._function.operation.attributes
        with self._context:
            for key, specs in (("arg_attrs", arguments), ("res_attrs", results)):
                old = attributes[key] if key in attributes else [() for _ in specs]
                attributes[key] = ir.ArrayAttr.get([
                    self._with_sharding(entry, spec)
                    for entry, spec in zip(old, specs, strict=True)
                ])  # fmt: skip

    def _with_sharding(self, entry: Any, spec: Spec) -> Any:
        attributes = {named.name: named.attr for named in entry}
        return ir.DictAttr.get({**attributes, "sdy.sharding": self._sharding(spec)})

    def _sharding(self, spec: Spec) -> Any:
        dims = [
            sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(a) for a in axes], is_closed=True)
            for axes in spec
        ]
        return sdy.TensorShardingAttr.get(MESH, dims)

    def set_results(
        self, operation: Any, ways: Sequence[Sequence[Spec]], computed: list[Spec]
    ) -> None:
        """Writes the shardings of an op's results; results that are not tensors are skipped.

        For Shardy, ``computed`` is the op's attribute: the shardings in which the op computes its
        results.  For XLA, ``ways`` are constraints after the op, because XLA drops the attribute
        before its partitioner runs: the shardings on the way to the one in which each result is
        stored, the last of them.  A result with an empty way has no constraint.  Loops and branches
        have no attribute: XLA removes some of their results, and would fail on it.
        """
        if operation.name in CONSTRAINTS:
            with self._context:
                operation.attributes["sharding"] = self._sharding(ways[0][-1])
            return
        tensors = [isinstance(r.type, ir.RankedTensorType) for r in operation.results]
        with self._context, operation.location:
            plain = operation.name in _REGIONS or call_target(operation) in _UNSHARDED_CALLS
            if computed and all(tensors) and not plain:
                operation.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get(
                    [self._sharding(spec) for spec in computed]
                )
            if operation.name in _SOURCES:
                return
            after = ir.InsertionPoint.after(operation)
            for result, way, tensor in zip(operation.results, ways, tensors, strict=True):
                if tensor and way and way[-1]:
                    first = last = sdy.ShardingConstraintOp(
                        result, self._sharding(way[0]), ip=after
                    )
                    for spec in way[1:]:
                        last = sdy.ShardingConstraintOp(last.result, self._sharding(spec), ip=after)
                    result.replace_all_uses_except(last.result, first.operation)

    def move_regions(
        self,
        renamed: Mapping[str, str],
        shardings: Mapping[Any, tuple[list[Spec], list[Spec]]] | None = None,
    ) -> None:
        """Moves the manual regions to the mesh.

        :param renamed: the axis of the mesh for each axis of the regions.
        :param shardings: the shardings of operands and results of each region, by its operation; by
            default, those that the regions need, open for further axes.
        """
        given = shardings or {}
        self._regions.write(MESH, self._axes, renamed, given.get)

    def confine(self, operation: Any, operands: list[Spec], computed: Spec) -> Any:
        """Moves an op with one result into a manual computation over all axes of the mesh.

        Each device runs the op on its shards.  If they are shards of a sum, the parts are stacked
        along a new dimension, which XLA adds up.

        :param operands: the shardings of its operands.
        :param computed: the sharding of its result.
        :returns: the op whose result replaces that of ``operation``, which is erased.
        """
        kept = {axis for axes in computed for axis in axes}
        summed = tuple(
            dict.fromkeys(a for spec in operands for axes in spec for a in axes if a not in kept)
        )
        per_value, result = sdy.TensorShardingPerValueAttr.get, operation.results[0]
        stack = (summed, *computed) if summed else computed
        with self._context, operation.location:
            whole = ir.RankedTensorType(result.type)
            shape = [math.prod(dict(self._axes)[axis] for axis in summed), *whole.shape]
            stacked = ir.RankedTensorType.get(shape if summed else whole.shape, whole.element_type)
            manual = sdy.ManualComputationOp(
                [stacked], list(operation.operands),
                per_value([self._sharding(spec) for spec in operands]),
                per_value([self._sharding(stack)]),
                sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name, _ in self._axes]),
                ip=ir.InsertionPoint(operation),
            )  # fmt: skip
            block = manual.operation.regions[0].blocks.append(
                *(
                    self._local(value.type, spec)
                    for value, spec in zip(operation.operands, operands, strict=True)
                ),
                arg_locs=[operation.location] * len(operands),
            )
            with ir.InsertionPoint(block):
                local = ir.Operation.create(
                    operation.name,
                    results=[self._local(whole, computed)],
                    operands=list(block.arguments),
                    attributes={name: operation.attributes[name] for name in operation.attributes},
                ).results[0]
                if summed:
                    local = stablehlo.ReshapeOp(self._local(stacked, stack), local).result
                sdy.ReturnOp([local])
            replacement = manual.operation
            if summed:
                replacement = self._sum(replacement)
            result.replace_all_uses_with(replacement.results[0])
        operation.erase()
        return replacement

    def _local(self, type_: Any, spec: Spec) -> Any:
        """The type of a shard."""
        whole, sizes = ir.RankedTensorType(type_), dict(self._axes)
        shape = [
            size // math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(whole.shape, spec, strict=True)
        ]
        return ir.RankedTensorType.get(shape, whole.element_type)

    def _sum(self, stacked: Any) -> Any:
        """Adds up the first result of an op along its first dimension, after the op."""
        type_ = ir.RankedTensorType(stacked.results[0].type)
        element = ir.RankedTensorType.get([], type_.element_type)
        with ir.InsertionPoint.after(stacked):
            zero = splat(0, [], type_.element_type)
            reduce = stablehlo.ReduceOp(
                [ir.RankedTensorType.get(type_.shape[1:], type_.element_type)],
                [stacked.results[0]],
                [zero],
                [0],
            )
            block = reduce.regions[0].blocks.append(
                element, element, arg_locs=[ir.Location.current] * 2
            )
            with ir.InsertionPoint(block):
                stablehlo.return_([stablehlo.add(*block.arguments)])
        return reduce.operation

    def constrain(self, operation: Any, index: int, specs: Iterable[Spec]) -> Any:
        """Inserts constraints for operand ``index`` before ``operation``; returns the last result.

        ``specs`` are the shardings on the way from that of the operand to the last one.
        """
        value = operation.operands[index]
        with self._context, operation.location:
            for spec in specs:
                value = sdy.ShardingConstraintOp(
                    value, self._sharding(spec), ip=ir.InsertionPoint(operation)
                ).result
        return value

    def guard(self, operation: Any, index: int, spec: Spec) -> None:
        """Inserts an optimization barrier for operand ``index``, which is sharded by ``spec``."""
        with self._context, operation.location:
            barrier = stablehlo.OptimizationBarrierOp(
                [operation.operands[index]], ip=ir.InsertionPoint(operation)
            )
            barrier.operation.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get(
                [self._sharding(spec)]
            )
            operation.operands[index] = barrier.operation.results[0]

    def make_manual(
        self, arguments: list[Spec], results: list[Spec], local_types: list[ir.Type | None]
    ) -> Any:
        """Moves the body of the entry function into one manual computation over all axes.

        :param arguments: the shardings of its arguments.
        :param results: the shardings of its results.
        :param local_types: the types of the arguments in it; ``None`` for one that keeps its type.
        :returns: the op that returns its results.
        """
        block = self._function.operation.regions[0].blocks[0]
        *ops, end = [operation.operation for operation in block.operations]
        function = ir.TypeAttr(self._function.operation.attributes["function_type"]).value
        per_value = sdy.TensorShardingPerValueAttr.get
        with self._context, ir.Location.unknown():
            manual = sdy.ManualComputationOp(
                ir.FunctionType(function).results,
                list(block.arguments),
                per_value([self._sharding(spec) for spec in arguments]),
                per_value([self._sharding(spec) for spec in results]),
                sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name, _ in self._axes]),
                ip=ir.InsertionPoint.at_block_begin(block),
            )
            inside = manual.operation.regions[0].blocks.append(
                *(
                    local or outer.type
                    for local, outer in zip(local_types, block.arguments, strict=True)
                ),
                arg_locs=[outer.location for outer in block.arguments],
            )
            for outer, inner in zip(block.arguments, inside.arguments, strict=True):
                outer.replace_all_uses_except(inner, manual.operation)
            for operation in ops:
                inside.append(operation)
            returned = sdy.ReturnOp(list(end.operands), ip=ir.InsertionPoint(inside))
            for place, result in enumerate(manual.operation.results):
                end.operands[place] = result
            return returned.operation

    def inline_regions(self, renamed: Mapping[str, str]) -> None:
        """Replaces manual regions by their bodies, in a computation on the values of a device.

        ``renamed`` has the axis of the mesh for each axis of the regions.
        """
        self._regions.inline(self._axes, renamed)

    def run_callbacks_once(self) -> None:
        """Lets the first device run callbacks into Python, as JAX does.

        Every device runs those in a manual region, as in JAX.
        """
        callbacks = [op for op in walk(self._module.body) if is_callback(op) and not _in_region(op)]
        if not callbacks:
            return
        with self._context, ir.Location.unknown():
            mesh = sdy.MeshAttr.get([], [0])
            sdy.MeshOp(_FIRST, mesh, ip=ir.InsertionPoint.at_block_begin(self._module.body))
            first = sdy.TensorShardingAttr.get(_FIRST, [])
            for operation in callbacks:
                count = max(1, len(operation.results))
                operation.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get(
                    [first] * count
                )

    def confine_callbacks(self) -> None:
        """Makes callbacks in manual regions manual over all other axes of the mesh, as JAX does.

        XLA refuses an op with effects that it would have to partition.
        """
        per_value = sdy.TensorShardingPerValueAttr.get
        for operation in [op for op in walk(self._module.body) if is_callback(op)]:
            taken = _manual_axes(operation)
            rest = [name for name, size in self._axes if size > 1 and name not in taken]
            if not taken or not rest:
                continue
            operands, results = list(operation.operands), list(operation.results)
            with self._context, operation.location:
                whole = [
                    per_value([
                        self._sharding(((),) * ir.RankedTensorType(value.type).rank)
                        for value in values
                    ])
                    for values in (operands, results)
                ]  # fmt: skip
                manual = sdy.ManualComputationOp(
                    [result.type for result in results], operands, *whole,
                    sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name in rest]),
                    ip=ir.InsertionPoint(operation),
                )  # fmt: skip
                block = manual.operation.regions[0].blocks.append(
                    *(operand.type for operand in operands),
                    arg_locs=[operation.location] * len(operands),
                )
                for result, outer in zip(results, manual.operation.results, strict=True):
                    result.replace_all_uses_with(outer)
                for place, argument in enumerate(block.arguments):
                    operation.operands[place] = argument
                block.append(operation)
                sdy.ReturnOp(results, ip=ir.InsertionPoint(block))

    def constrain_reshards(self) -> None:
        """Replaces ``sdy.reshard`` ops, which XLA does not accept as input, by constraints."""
        for operation in list(walk(self._function.operation.regions[0].blocks[0])):
            if operation.name == "sdy.reshard":
                with self._context, operation.location:
                    constraint = sdy.ShardingConstraintOp(
                        operation.operands[0],
                        operation.attributes["sharding"],
                        ip=ir.InsertionPoint(operation),
                    )
                operation.results[0].replace_all_uses_with(constraint.result)
                operation.erase()


def _in_region(operation: Any) -> bool:
    """Whether an op is in a manual region."""
    parent = operation.parent
    while parent is not None and parent.name != "sdy.manual_computation":
        parent = parent.parent
    return parent is not None


def _manual_axes(operation: Any) -> set[str]:
    """The axes of the manual regions around an op."""
    axes: set[str] = set()
    parent = operation.parent
    while parent is not None:
        if parent.name == "sdy.manual_computation":
            attribute = sdy.ManualAxesAttr(parent.attributes["manual_axes"])
            axes |= {str(attribute[n]) for n in range(len(attribute))}
        parent = parent.parent
    return axes


def forget_shardings_of_ops(module: ir.Module) -> None:
    """Removes the shardings of ops, so that Shardy propagates those of arguments and results."""
    for op in main_function(module, "module").operation.regions[0].blocks[0].operations:
        if "sdy.sharding" in op.operation.attributes:
            del op.operation.attributes["sdy.sharding"]
