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

from toast.cost.sliding_windows import SlidingWindow, sliding_windows
from toast.lower.device_groups import tiles
from toast.lower.emitter import COMBINERS, Emitter
from toast.lower.op_sharding import OpSharding
from toast.lower.windows import dilated, inside_of, taken, windowed
from toast.program import Signature
from toast.uneven import identity


def slides(op: OpSharding) -> bool:
    """Whether an op has a local form along factors of which elements move."""
    if op.signature.kind == "select_and_scatter":
        return _selects(op.signature)
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


def _windows(op: OpSharding, emitter: Emitter) -> dict[tuple[int, int], SlidingWindow]:
    """What a device needs, by operand and dimension, in the order of the exchanges."""
    shards = {number: emitter.shards(tuple(axes)) for number, axes in op.axes.items()}
    windows = sliding_windows(op.signature, op.rule, shards)
    return {(window.operand, window.dimension): window for window in windows}


def local_slice(emitter: Emitter, operation: Any, op: OpSharding) -> None:
    """A slice: the wanted elements, then its stride."""
    rank = operation.operands[0].type.rank
    starts = _integers(operation, "start_indices", rank, 0)
    limits = _integers(operation, "limit_indices", rank, 0)
    shape = op.signature.operands[0].shape
    windows = _windows(op, emitter)
    for d in range(rank):
        if (0, d) in windows:
            window = windows[0, d]
            with emitter.before(operation):
                operation.operands[0] = windowed(
                    emitter, operation.operands[0], op.operands[0][d], window
                )
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
    for (_, d), window in _windows(op, emitter).items():
        value, fill = operation.operands
        take = dilated if between[d] else windowed
        with emitter.before(operation):
            operation.operands[0] = take(emitter, value, op.operands[0][d], window, fill)
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
    windows = _windows(op, emitter)
    result = None
    with emitter.before(operation):
        for number, operand in enumerate(operation.operands):
            window = windows[number, d]
            part = windowed(emitter, operand, axes, window)
            result = part if result is None else inside_of(
                emitter, part, axes, d, window.first, 0, window.size, result
            )  # fmt: skip
    return [result]


def local_convolution(emitter: Emitter, operation: Any, op: OpSharding) -> None:
    """A convolution: its input has the borders of its windows instead of padding (A.4.2).

    Where the kernel is sharded, the input has what is under the device's part of the window, in all
    positions.
    """
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    count = len(numbers.input_spatial_dimensions)
    spreads = _integers(operation, "lhs_dilation", count, 1)
    padding = _padding(operation, count)
    windows = _windows(op, emitter)
    for (_, d), window in windows.items():
        n, axes = list(numbers.input_spatial_dimensions).index(d), op.operands[0][d]
        with emitter.before(operation):
            value = operation.operands[0]
            zero = emitter.splat(0, [], value.type.element_type)
            if not window.aligned:  # windows begin at different places between elements
                operation.operands[0] = dilated(emitter, value, axes, window, zero)
                spreads[n], padding[n] = 1, [0, 0]
                continue
            operation.operands[0] = windowed(emitter, value, axes, window, zero)
        offset = int(window.begin[0]) * window.spread - int(window.first[0])
        inside = max((window.count - 1) * window.spread + 1, 0)
        behind = window.length - offset - inside
        padding[n] = [offset, behind]
    if windows:
        _set(operation, "lhs_dilation", spreads)
        _set_padding(operation, padding)


def local_reduce_window(emitter: Emitter, operation: Any, op: OpSharding) -> None:
    """A window reduction: beyond the ends of the operand are initial values."""
    rank = operation.operands[0].type.rank
    spreads = _integers(operation, "base_dilations", rank, 1)
    padding, count = _padding(operation, rank), len(operation.results)
    windows = _windows(op, emitter)
    for (place, d), window in windows.items():
        value, fill = operation.operands[place], operation.operands[count + place]
        take = dilated if window.spread > 1 else windowed
        with emitter.before(operation):
            operation.operands[place] = take(emitter, value, op.operands[place][d], window, fill)
        padding[d], spreads[d] = [0, 0], 1
    if windows:
        _set(operation, "base_dilations", spreads)
        _set_padding(operation, padding)


#: The comparisons of a window's selection, and the combiner whose identity they never select.
_NEVER_SELECTED = {"ge": "maximum", "gt": "maximum", "le": "minimum", "lt": "minimum"}


def _selects(signature: Signature) -> bool:
    """Whether a select_and_scatter selects a largest or smallest element, and adds up or alike."""
    return (
        signature.attribute("selects") in _NEVER_SELECTED
        and signature.attribute("combiner") in COMBINERS
    )


def local_select_and_scatter(emitter: Emitter, operation: Any, op: OpSharding) -> list[Any] | None:
    """A select_and_scatter: all windows that have elements of the shard, which is cut out then.

    Beyond the ends of the operand are elements that a window does not select, and beyond those of
    the scattered values the identity of the combiner.
    """
    windows = _windows(op, emitter)
    if not windows:
        return None
    signature, axes_of = op.signature, op.operands[0]
    rank = operation.operands[0].type.rank
    sizes = _integers(operation, "window_dimensions", rank, 1)
    strides = _integers(operation, "window_strides", rank, 1)
    padding = _padding(operation, rank)
    shape = emitter.local_shape(signature.results[0].shape, op.results[0])
    element = operation.operands[0].type.element_type
    combiners = (
        _NEVER_SELECTED[str(signature.attribute("selects"))],
        signature.attribute("combiner"),
    )
    # Elements that can be compared by size have all identities.
    fills = [identity(str(combiner), element) or 0 for combiner in combiners]
    begin = operation.operands[2]
    with emitter.before(operation):
        unselected, nothing = (emitter.splat(fill, [], element) for fill in fills)
        for (place, d), window in windows.items():
            if place:
                continue
            axes = axes_of[d]
            value, source, _ = operation.operands
            operation.operands[0] = windowed(emitter, value, axes, window, unselected)
            low = padding[d][0]
            number = (window.first + low) // strides[d]
            count = (window.length - sizes[d]) // strides[d] + 1
            scattered = windows.get((1, d))
            operation.operands[1] = (
                taken(emitter, source, axes, d, number, count, nothing) if scattered is None
                else windowed(emitter, source, axes, scattered, nothing)
            )  # fmt: skip
            padding[d] = [0, 0]
    _set_padding(operation, padding)
    result = operation.results[0]
    wide = [windows[0, d].length if (0, d) in windows else size for d, size in enumerate(shape)]
    result.set_type(ir.RankedTensorType.get(wide, element))
    with emitter.after(operation):
        for (place, d), window in windows.items():
            if not place:
                own = np.arange(len(window.first)) * shape[d] - window.first
                result = taken(emitter, result, axes_of[d], d, own, shape[d], begin)
    return [result]


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
