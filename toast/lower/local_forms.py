"""The local form of each kind of op: the op that a device runs on its shards.

Where the factors of an op are sharded evenly, the local op is the same op on local shapes.  The
functions here rewrite what attributes say in sizes, and what differs between devices.  A kind that
has no function here needs no rewriting: its attributes number dimensions, but do not state sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.cost.reshard_steps import reshard_steps
from toast.frontend.mlir import SHARDING_RULE, is_splat, resize_splat
from toast.lower.attention_forms import COMPOSITES
from toast.lower.device_groups import tiles
from toast.lower.emitter import COMBINERS, Emitter
from toast.lower.op_sharding import OpSharding
from toast.lower.sliding_forms import (
    local_concatenate,
    local_convolution,
    local_pad,
    local_reduce_window,
    local_reverse,
    local_select_and_scatter,
    local_slice,
    local_update,
    slides,
)
from toast.program import Signature
from toast.uneven import identity

#: Rewrites an operation in place.  Its operands have their local types already, its results have
#: those that the program states.  Returns values for its results if these are not its own.
LocalForm = Callable[[Emitter, Any, OpSharding], Any]

#: The identity of each combiner, for elements that are numbers.
_IDENTITY = {"add": 0.0, "multiply": 1.0, "xor": 0.0}


def unsupported(op: OpSharding) -> frozenset[int]:
    """The sharded factors without a local form: the op runs whole along them."""
    whole, kind = set(), op.signature.kind
    for number in op.sharded:
        factor = op.factor(number)
        unknown = factor.combiner and factor.combiner not in COMBINERS and kind != "reduce"
        ring = any(each.factor == number for each in op.rule.rings)
        moves = (factor.permutation or factor.halo) and not (ring or slides(op))
        if moves or factor.need_replication or unknown:
            whole.add(number)
    if kind == "custom_call" and op.rule.runs_whole:
        whole |= {*op.sharded}
    return frozenset(whole)


def is_body(signature: Signature) -> bool:
    """Whether an op is a composite whose local form is that of its decomposition."""
    return signature.kind == "composite" and signature.attribute("name") not in COMPOSITES


def _constant(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    (spec,), (type_,) = op.results, (r.type for r in operation.results)
    if not any(spec):
        return None
    local = emitter.local_shape(type_.shape, spec)
    if resize_splat(operation, local):
        return None
    with emitter.after(operation):
        return [_own_part(emitter, operation.results[0], spec)]


def _own_part(emitter: Emitter, value: Any, spec: Any) -> Any:
    """The part of a whole value that this device has under a sharding."""
    for step in reshard_steps(((),) * len(spec), spec):
        value = emitter.step(value, step)
    return value


def _iota(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    d = ir.IntegerAttr(operation.attributes["iota_dimension"]).value
    axes, result = op.results[0][d], operation.results[0]
    if not axes:
        return None
    local = emitter.local_shape(result.type.shape, op.results[0])
    with emitter.after(operation):
        # Positions are added as integers: floating-point numbers would be rounded twice.
        index = ir.IntegerType.get_signless(32)
        first = emitter.row(tiles(emitter.mesh, axes) * local[d])
        own = stablehlo.iota(ir.RankedTensorType.get(local, index), d)
        position = stablehlo.add(own, emitter.broadcast(first, local, []))
        element = result.type.element_type
        result.set_type(ir.RankedTensorType.get(local, element))
        return [stablehlo.convert(ir.RankedTensorType.get(local, element), position)]


def _broadcast(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    local = emitter.local_shape(op.signature.results[0].shape, op.results[0])
    new = len(local) - len(op.signature.operands[0].shape)
    operation.attributes["broadcast_sizes"] = ir.DenseI64ArrayAttr.get(local[:new])
    return None


def _dynamic_slice(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    """A slice of local sizes; along a sharded dimension, what is in the shard and zeros elsewhere.

    Its start indices are clamped here: before jax 0.11, XLA merges it with the slices of a reshard
    as if none of them were clamped.
    """
    (result,), (whole, *_) = op.signature.results, op.signature.operands
    local = emitter.local_shape(result.shape, op.results[0])
    operation.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get(local)
    if not op.sharded:
        return None
    value, *starts = operation.operands
    shards, sizes = (list(type_.shape) for type_ in (value.type, whole))
    taken = [
        shard < size and part < size
        for shard, size, part in zip(shards, sizes, result.shape, strict=True)
    ]
    room = [size if here else 0 for size, here in zip(local, taken, strict=True)]
    with emitter.before(operation):
        if any(taken):
            zero = emitter.splat(0, [], value.type.element_type)
            operation.operands[0] = stablehlo.pad(value, zero, room, room, [0] * len(local))
        for d, (size, part) in enumerate(zip(sizes, result.shape, strict=True)):
            start = starts[d]
            index = emitter.index_type(start.type.element_type)
            scalar = ir.RankedTensorType.get([], index)

            def number(n: int, index: Any = index) -> Any:
                return emitter.splat(n, [], index)

            start = stablehlo.convert(scalar, start)
            start = stablehlo.clamp(number(0), start, number(size - part))
            if taken[d]:
                first = emitter.row(tiles(emitter.mesh, op.operands[0][d]) * shards[d] - part)
                start = stablehlo.subtract(start, stablehlo.convert(scalar, first))
                start = stablehlo.clamp(number(0), start, number(shards[d] + part))
            operation.operands[1 + d] = start
    return None


def _convolution(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    local_convolution(emitter, operation, op)
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    image, kernel = (operand.type.shape for operand in operation.operands)
    per_group = kernel[numbers.kernel_input_feature_dimension]
    groups = image[numbers.input_feature_dimension] // per_group
    of_features = operation.attributes["feature_group_count"]
    if ir.IntegerAttr(of_features).value > 1:
        operation.attributes["feature_group_count"] = ir.IntegerAttr.get(of_features.type, groups)
    of_batch = operation.attributes["batch_group_count"]
    if (count := ir.IntegerAttr(of_batch).value) > 1:
        sizes = dict(emitter.mesh.axes)
        axes = [op.axes[n] for n in op.sharded if op.factor(n).label == "group"]
        groups = count // math.prod(sizes[axis] for of in axes for axis in of)
        operation.attributes["batch_group_count"] = ir.IntegerAttr.get(of_batch.type, groups)
    return None


def _reduce(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    """Devices begin with the combiner's identity; the first one combines the initial value.

    XLA leaves out a reduction over one element together with its initial value, also where it
    reduces the parts of an all-to-all one by one.
    """
    count = len(operation.results)
    begins: dict[int, tuple[Any, str]] = {}
    for index in range(count):
        place = count + index
        for combiner, axes in _reduced_over(operation, op, index).items():
            operand = operation.operands[place]
            number = (
                identity(combiner, operand.type.element_type) if combiner in COMBINERS else None
            )
            if number is None or _is_splat(operand, number):
                continue
            begins[index] = _first_only(emitter, operation, place, axes, combiner), combiner
            with emitter.before(operation):
                operation.operands[place] = emitter.splat(number, [], operand.type.element_type)
    if not begins:
        return None
    results = list(operation.results)
    for index, (result, spec) in enumerate(zip(operation.results, op.results, strict=True)):
        shape = emitter.local_shape(op.signature.results[index].shape, spec)
        result.set_type(ir.RankedTensorType.get(shape, result.type.element_type))
    with emitter.after(operation):
        for index, (begin, combiner) in begins.items():
            spread = emitter.broadcast(begin, list(results[index].type.shape), [])
            results[index] = COMBINERS[combiner](spread, results[index]).result
    return results


def _reduced_over(operation: Any, op: OpSharding, result: int) -> dict[str, frozenset[str]]:
    """The combiners of a result that its initial value is combined with after the reduction.

    Each has the axes over which the result is a partial sum.  There are none for most reductions
    that a device computes whole: it begins with the initial value as one device does.
    """
    sums = op.partial(result)
    source = getattr(operation.operands[result].owner, "operation", None)
    if sums or source is None or source.name != "stablehlo.all_to_all":
        return sums
    joined = ir.IntegerAttr(source.attributes["concat_dimension"]).value
    reduced = {int(d) for d in ir.DenseI64ArrayAttr(operation.attributes["dimensions"])}
    part = list(source.operands[0].type.shape)
    if joined not in reduced or math.prod(part[d] for d in reduced) > 1:
        return sums
    inside = {f for factors in op.rule.results[result] for f in factors}
    return {
        factor.combiner: frozenset()
        for number, factor in enumerate(op.rule.factors)
        if factor.combiner and number not in inside
    }


def _first_only(
    emitter: Emitter, operation: Any, place: int, axes: frozenset[str], combiner: str
) -> Any:
    """An operand on the first device along ``axes``, and the combiner's identity on others."""
    operand = operation.operands[place]
    if not axes or combiner in ("maximum", "minimum", "and", "or"):
        return operand  # idempotent: every device may begin with it
    if _is_splat(operand, _IDENTITY[combiner]):
        return operand
    shape = list(operand.type.shape)
    with emitter.before(operation):
        identity = emitter.splat(_IDENTITY[combiner], shape, operand.type.element_type)
        mine = emitter.is_first(axes)
        return stablehlo.select(emitter.broadcast(mine, shape, []), operand, identity)


def _is_splat(value: Any, number: float) -> bool:
    """Whether a value is a constant of elements that equal a number."""
    owner = value.owner
    operation = getattr(owner, "operation", None)
    while operation is not None and operation.name == "stablehlo.broadcast_in_dim":
        operation = getattr(operation.operands[0].owner, "operation", None)
    if operation is None or operation.name != "stablehlo.constant":
        return False
    return is_splat(operation, number)


def _gather(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    shape, local = op.signature.operands[0].shape, list(operation.operands[0].type.shape)
    windows = [int(n) for n in ir.DenseI64ArrayAttr(operation.attributes["slice_sizes"])]
    operation.attributes["slice_sizes"] = ir.DenseI64ArrayAttr.get([
        own if window == size else window
        for window, size, own in zip(windows, shape, local, strict=True)
    ])  # fmt: skip
    cut = [d for d in range(len(shape)) if local[d] != shape[d] and windows[d] == 1]
    cut = [d for d in cut if d not in numbers.operand_batching_dims]
    picked = [d for d in cut if d in numbers.start_index_map]
    # Without an index of its own, a dimension has index 0, which the first devices have.
    axes = frozenset(a for d in cut if d not in picked for a in op.operands[0][d])
    if not cut:
        return None
    here = None
    if picked:
        with emitter.before(operation):
            operation.operands[1], here = _local_indices(
                emitter, operation.operands[1], numbers.start_index_map, numbers.index_vector_dim,
                picked, shape, local, op.operands[0], clamped=True,
            )  # fmt: skip
    result = operation.results[0]
    result_shape = emitter.local_shape(op.signature.results[0].shape, op.results[0])
    result.set_type(ir.RankedTensorType.get(result_shape, result.type.element_type))
    batch = [d for d in range(len(result_shape)) if d not in numbers.offset_dims]
    with emitter.after(operation):
        current = result
        zero = emitter.splat(0, result_shape, result.type.element_type)
        if here is not None:
            inside = emitter.broadcast(here, result_shape, batch)
            current = stablehlo.select(inside, current, zero)
        if axes:
            inside = emitter.broadcast(emitter.is_first(axes), result_shape, [])
            current = stablehlo.select(inside, current, zero)
        return [current]


def _torch_index_select(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    """Rows of other devices are masked, as those of a gather."""
    (d,), (batch,) = (
        (ir.IntegerAttr(operation.attributes[name]).value,) for name in ("dim", "batch_dims")
    )
    shape, local = op.signature.operands[0].shape, list(operation.operands[0].type.shape)
    if local[d] == shape[d]:
        return None
    indices = operation.operands[1]
    rank = len(indices.type.shape)
    with emitter.before(operation):
        shifted, here = _local_indices(
            emitter, indices, [d], rank, [d], shape, local, op.operands[0], clamped=True
        )
    operation.operands[1] = shifted
    result = operation.results[0]
    result_shape = emitter.local_shape(op.signature.results[0].shape, op.results[0])
    result.set_type(ir.RankedTensorType.get(result_shape, result.type.element_type))
    with emitter.after(operation):
        inside = emitter.broadcast(here, result_shape, [*range(batch), *range(d, d + rank - batch)])
        zero = emitter.splat(0, result_shape, result.type.element_type)
        return [stablehlo.select(inside, result, zero)]


def _scatter(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    count = len(operation.results)
    shape, local = op.signature.operands[0].shape, list(operation.operands[0].type.shape)
    picked = [
        d for d in numbers.scattered_dims_to_operand_dims
        if local[d] != shape[d] and d in numbers.inserted_window_dims
    ]  # fmt: skip
    if picked:
        with emitter.before(operation):
            operation.operands[count], _ = _local_indices(
                emitter, operation.operands[count], numbers.scattered_dims_to_operand_dims,
                numbers.index_vector_dim, picked, shape, local, op.operands[0], clamped=False,
            )  # fmt: skip
            for index in range(count):
                operation.operands[index] = _apart(operation.operands[index])
    for index in range(count):
        for combiner, axes in op.partial(index).items():
            operation.operands[index] = _first_only(emitter, operation, index, axes, combiner)
    return None


def _apart(operand: Any) -> Any:
    """An operand behind a barrier, if it is a slice.

    XLA writes a scatter of one element as a dynamic slice and an update, and before jax 0.11 it
    merges two dynamic slices as if none of their indices were clamped.  Ours are: an index outside
    of the shard is how a scatter leaves the shard as it is.
    """
    owner = getattr(operand.owner, "operation", None)
    if owner is None or owner.name != "stablehlo.dynamic_slice":
        return operand
    return stablehlo.optimization_barrier([operand])


def _local_indices(
    emitter: Emitter,
    indices: Any,
    index_map: Any,
    vector: int,
    picked: Sequence[int],
    shape: Any,
    local: Any,
    spec: Any,
    *,
    clamped: bool,
) -> tuple[Any, Any]:
    """Start indices within the shard of this device, and whether each position is in it.

    Indices along the dimensions ``picked`` outside of the shard are negative, or not less than its
    size.  ``clamped`` indices are within the whole dimension first, as those of a gather.
    """
    index_shape = list(indices.type.shape)
    signed = emitter.index_type(indices.type.element_type)
    numbers = np.int64 if signed.width == 64 else np.int32
    least, largest = np.iinfo(numbers).min, np.iinfo(numbers).max
    wide = stablehlo.convert(ir.RankedTensorType.get(index_shape, signed), indices)
    dims = [vector] if vector < len(index_shape) else []
    rest = [size for d, size in enumerate(index_shape) if d != vector]

    def spread(row: Any) -> Any:
        row = row if dims else emitter.reshape(row, [])
        return emitter.broadcast(row, index_shape, dims)

    sharded = [d in picked for d in index_map]
    firsts = np.stack([
        tiles(emitter.mesh, spec[d]) * local[d] if here else np.zeros(emitter.mesh.devices)
        for d, here in zip(index_map, sharded, strict=True)
    ], axis=1)  # fmt: skip
    first = emitter.row(firsts)
    first = spread(stablehlo.convert(ir.RankedTensorType.get(first.type.shape, signed), first))
    most = np.array([shape[d] - 1 for d in index_map], dtype=numbers)
    if clamped:
        # Other dimensions are not: the op itself clamps them, with its own windows.
        ends = np.where(sharded, most, largest)
        lows = np.where(sharded, 0, least)
        wide = stablehlo.clamp(
            spread(emitter.constant(lows.astype(numbers))), wide,
            spread(emitter.constant(ends.astype(numbers))),
        )  # fmt: skip
    shifted = stablehlo.subtract(wide, first)
    if not clamped:
        return shifted, None
    sizes = np.array([
        local[d] if here else largest
        for d, here in zip(index_map, sharded, strict=True)
    ], dtype=numbers)  # fmt: skip
    lows = np.where(sharded, 0, least).astype(numbers)
    low, high = spread(emitter.constant(lows)), spread(emitter.constant(sizes))
    direction = stablehlo.ComparisonDirectionAttr.get
    inside = stablehlo.and_(
        stablehlo.compare(shifted, low, direction("GE")),
        stablehlo.compare(shifted, high, direction("LT")),
    )
    if dims:
        inside = _all_along(emitter, inside, vector, rest)
    return shifted, inside


def _all_along(emitter: Emitter, value: Any, d: int, rest: list[int]) -> Any:
    """The logical and along a dimension."""
    boolean = value.type.element_type
    operation = stablehlo.ReduceOp(
        [ir.RankedTensorType.get(rest, boolean)], [value], [emitter.splat(1, [], boolean)], [d]
    )
    scalar = ir.RankedTensorType.get([], boolean)
    block = operation.regions[0].blocks.append(scalar, scalar, arg_locs=[ir.Location.current] * 2)
    with ir.InsertionPoint(block):
        stablehlo.return_([stablehlo.and_(*block.arguments)])
    return operation.results[0]


def _custom_call(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    """The same call, without a rule for Shardy: it states the sizes of whole operands."""
    if op.sharded and SHARDING_RULE in operation.attributes:
        del operation.attributes[SHARDING_RULE]
    return None


def _composite(emitter: Emitter, operation: Any, op: OpSharding) -> Any:
    local = COMPOSITES.get(str(op.signature.attribute("name")))
    return local(emitter, operation, op) if local and op.sharded else None


#: Kinds whose local form differs from the op on local shapes.
LOCAL_FORMS: dict[str, LocalForm] = {
    "broadcast": _broadcast,
    "chlo_constant": _constant,
    "composite": _composite,
    "concatenate": local_concatenate,
    "constant": _constant,
    "convolution": _convolution,
    "custom_call": _custom_call,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": local_update,
    "gather": _gather,
    "iota": _iota,
    "pad": local_pad,
    "reduce": _reduce,
    "reduce_window": local_reduce_window,
    "reverse": local_reverse,
    "scatter": _scatter,
    "select_and_scatter": local_select_and_scatter,
    "slice": local_slice,
    "torch_index_select": _torch_index_select,
}

__all__ = ["LOCAL_FORMS", "LocalForm", "unsupported"]
