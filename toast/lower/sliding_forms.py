"""The local forms of ops that move elements along a sharded dimension.

Each op gets, instead of its own shard, the elements under the windows of its results
(:mod:`toast.lower.windows`), and runs on these without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.lower.device_groups import tiles
from toast.lower.emitter import Emitter
from toast.lower.op_sharding import OpSharding
from toast.lower.windows import Window, dilated, inside_of, windowed


def slides(op: OpSharding) -> bool:
    """Whether an op has a local form along factors of which elements move."""
    return op.signature.kind in SLIDING


#: Kinds with a local form along dimensions of which elements move.
SLIDING = frozenset({
    "slice", "reverse", "concatenate", "pad", "convolution", "reduce_window",
    "dynamic_update_slice",
})  # fmt: skip


def _moving(op: OpSharding) -> Iterator[int]:
    """The dimensions of the first operand of which elements move between devices."""
    for d, factors in enumerate(op.rule.operands[0]):
        sharded = [number for number in factors if number in op.axes]
        if sharded and op.factor(sharded[0]).permutation:
            yield d


def _integers(operation: Any, name: str, count: int, default: int) -> list[int]:
    attributes = operation.attributes
    if name not in attributes:
        return [default] * count
    return [int(n) for n in ir.DenseI64ArrayAttr(attributes[name])]


def _set(operation: Any, name: str, numbers: list[int]) -> None:
    operation.attributes[name] = ir.DenseI64ArrayAttr.get(numbers)


def _window(emitter: Emitter, op: OpSharding, d: int, low: int, length: int, stride: int) -> Window:
    """The window of dimension ``d`` of the operand, for a part of this dimension of the result.

    Result ``y`` needs ``length`` elements from ``stride * y - low``.
    """
    axes = op.operands[0][d]
    local = op.signature.results[0].shape[d] // emitter.shards(op.results[0][d])
    first = np.arange(emitter.shards(axes)) * local * stride - low
    size = op.signature.operands[0].shape[d]
    return Window(d, axes, size, first, (local - 1) * stride + length)


def local_slice(emitter: Emitter, operation: Any, op: OpSharding) -> None:
    """A slice: the wanted elements, then its stride."""
    rank = operation.operands[0].type.rank
    starts = _integers(operation, "start_indices", rank, 0)
    strides = _integers(operation, "strides", rank, 1)
    limits = _integers(operation, "limit_indices", rank, 0)
    shape = op.signature.operands[0].shape
    moving = [*_moving(op)]
    for d in range(rank):
        if d in moving:
            window = _window(emitter, op, d, -starts[d], 1, strides[d])
            with emitter.before(operation):
                operation.operands[0] = windowed(emitter, operation.operands[0], window)
            starts[d], limits[d] = 0, window.length
        elif operation.operands[0].type.shape[d] != shape[d]:
            limits[d] = int(operation.operands[0].type.shape[d])
    _set(operation, "start_indices", starts)
    _set(operation, "limit_indices", limits)


def local_pad(emitter: Emitter, operation: Any, op: OpSharding) -> None:
    """A pad: positions that no device has are filled with its padding value."""
    rank = operation.operands[0].type.rank
    low, high, between = (
        _integers(operation, name, rank, 0)
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    )
    for d in _moving(op):
        window = _window(emitter, op, d, low[d], 1, 1)
        with emitter.before(operation):
            value, fill = operation.operands
            operation.operands[0] = (
                dilated(emitter, value, window, between[d] + 1, fill) if between[d]
                else windowed(emitter, value, window, fill)
            )  # fmt: skip
        low[d] = high[d] = between[d] = 0
    _set(operation, "interior_padding", between)
    _set(operation, "edge_padding_low", low)
    _set(operation, "edge_padding_high", high)


def local_reverse(emitter: Emitter, operation: Any, op: OpSharding) -> None:
    """A reverse: shards change places, and each is reversed."""
    for d in _moving(op):
        with emitter.before(operation):
            operation.operands[0] = emitter.reversed_tiles(operation.operands[0], op.operands[0][d])


def local_concatenate(emitter: Emitter, operation: Any, op: OpSharding) -> list[Any] | None:
    """A concatenate: from each operand, the elements that belong to the device's part."""
    d = ir.IntegerAttr(operation.attributes["dimension"]).value
    axes = op.results[0][d]
    if not axes:
        return None
    local = op.signature.results[0].shape[d] // emitter.shards(axes)
    tile = np.arange(emitter.shards(axes)) * local
    start, result = 0, None
    with emitter.before(operation):
        for operand, type_ in zip(operation.operands, op.signature.operands, strict=True):
            size = type_.shape[d]
            window = Window(d, axes, size, tile - start, local)
            part = windowed(emitter, operand, window)
            result = part if result is None else inside_of(emitter, part, window, 0, size, result)
            start += size
    return [result]


def local_convolution(emitter: Emitter, operation: Any, op: OpSharding) -> None:
    """A convolution: its input has the borders of its windows instead of padding (A.4.2).

    Where the kernel is sharded, the input has what is under the device's part of the window, in all
    positions.
    """
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    count = len(numbers.input_spatial_dimensions)
    strides = _integers(operation, "window_strides", count, 1)
    spreads = _integers(operation, "lhs_dilation", count, 1)
    gaps = _integers(operation, "rhs_dilation", count, 1)
    padding = _padding(operation, count)
    sharded = [
        n for n, d in enumerate(numbers.input_spatial_dimensions) if any(op.operands[0][d])
    ]  # fmt: skip
    for n in sharded:
        d = numbers.input_spatial_dimensions[n]
        axes, size = op.operands[0][d], op.signature.operands[0].shape[d]
        tile = np.arange(emitter.shards(axes))
        kernel, places = numbers.kernel_spatial_dimensions[n], numbers.output_spatial_dimensions[n]
        local_kernel, local_places = (
            type_.shape[e] // emitter.shards(spec[e])
            for e, type_, spec in (
                (kernel, op.signature.operands[1], op.operands[1]),
                (places, op.signature.results[0], op.results[0]),
            )
        )
        moved = tile * local_kernel * gaps[n] if op.operands[1][kernel] else (
            tile * local_places * strides[n]
        )  # fmt: skip
        # Positions are those of the dilated input.
        first = moved - padding[n][0]
        extent = (local_places - 1) * strides[n] + (local_kernel - 1) * gaps[n] + 1
        begin = -(-first // spreads[n])
        offsets = begin * spreads[n] - first
        offset = int(offsets[0])
        length = (extent - offset - 1) // spreads[n] + 1
        if (offsets != offset).any():  # windows begin at different places between elements
            with emitter.before(operation):
                zero = emitter.splat(0, [], operation.operands[0].type.element_type)
                window = Window(d, axes, size, first, extent)
                operation.operands[0] = dilated(
                    emitter, operation.operands[0], window, spreads[n], zero
                )
            spreads[n], padding[n] = 1, [0, 0]
            continue
        with emitter.before(operation):
            zero = emitter.splat(0, [], operation.operands[0].type.element_type)
            operation.operands[0] = windowed(
                emitter, operation.operands[0], Window(d, axes, size, begin, length), zero
            )
        padding[n] = [offset, extent - offset - (length - 1) * spreads[n] - 1]
    if sharded:
        _set(operation, "lhs_dilation", spreads)
        _set_padding(operation, padding)


def local_reduce_window(emitter: Emitter, operation: Any, op: OpSharding) -> None:
    """A window reduction: beyond the ends of the operand are initial values."""
    rank = operation.operands[0].type.rank
    sizes = _integers(operation, "window_dimensions", rank, 1)
    strides = _integers(operation, "window_strides", rank, 1)
    gaps = _integers(operation, "window_dilations", rank, 1)
    spreads = _integers(operation, "base_dilations", rank, 1)
    padding, count = _padding(operation, rank), len(operation.results)
    for d in _moving(op):
        length = (sizes[d] - 1) * gaps[d] + 1
        window = _window(emitter, op, d, padding[d][0], length, strides[d])
        with emitter.before(operation):
            for place in range(count):
                value, fill = operation.operands[place], operation.operands[count + place]
                operation.operands[place] = (
                    dilated(emitter, value, window, spreads[d], fill) if spreads[d] > 1
                    else windowed(emitter, value, window, fill)
                )  # fmt: skip
        padding[d], spreads[d] = [0, 0], 1
    _set(operation, "base_dilations", spreads)
    _set_padding(operation, padding)


def _padding(operation: Any, count: int) -> list[list[int]]:
    if "padding" not in operation.attributes:
        return [[0, 0] for _ in range(count)]
    dense = ir.DenseIntElementsAttr(operation.attributes["padding"])
    return [[int(n) for n in row] for row in np.array([*dense]).reshape(count, 2)]


def _set_padding(operation: Any, padding: list[list[int]]) -> None:
    operation.attributes["padding"] = ir.DenseIntElementsAttr.get(
        np.array(padding, dtype=np.int64).reshape(-1, 2)
    )


def local_update(emitter: Emitter, operation: Any, op: OpSharding) -> list[Any] | None:
    """A dynamic_update_slice: each device writes the part of the update that is in its shard.

    The shard gets room for the whole update before and behind it, which is cut off afterwards.
    """
    moving = [*_moving(op)]
    if not moving:
        return None
    value, update, *starts = operation.operands
    shape = op.signature.operands[0].shape
    with emitter.before(operation):
        local = list(value.type.shape)
        room = [int(update.type.shape[d]) if d in moving else 0 for d in range(len(local))]
        zero = emitter.splat(0, [], value.type.element_type)
        wide = stablehlo.pad(value, zero, room, room, [0] * len(local))
        index = emitter.index_type(starts[0].type.element_type)
        scalar = ir.RankedTensorType.get([], index)
        starts = [stablehlo.convert(scalar, start) for start in starts]
        for d in moving:
            constants = (0, shape[d] - room[d], local[d] + room[d])
            none, last, end = (emitter.splat(n, [], index) for n in constants)
            start = stablehlo.clamp(none, starts[d], last)
            first = emitter.row(tiles(emitter.mesh, op.operands[0][d]) * local[d] - room[d])
            first = stablehlo.convert(scalar, first)
            starts[d] = stablehlo.clamp(none, stablehlo.subtract(start, first), end)
        updated = stablehlo.dynamic_update_slice(wide, update, starts)
        begin = room
        end_ = [size + before for size, before in zip(local, room, strict=True)]
        return [stablehlo.slice(updated, begin, end_, [1] * len(local))]
