"""Windows into a sharded dimension: a device receives the elements that it lacks (GShard, A.4).

A device wants neighbouring elements of a dimension: those under the windows of its results.  Every
device sends the edge of its shard, or the whole shard, to the devices that want it; edges of
different widths are as wide as the widest (non-constant halos).  Elements before the first and
behind the last one are filled.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.cost.sliding_windows import Ints, SlidingWindow
from toast.lower.device_groups import tiles
from toast.lower.emitter import Emitter

#: The axes that shard a dimension.
Axes = tuple[str, ...]


def windowed(
    emitter: Emitter, value: Any, axes: Axes, window: SlidingWindow, fill: Any = None
) -> Any:
    """The elements of ``value`` in a window; beyond the ends of the dimension is ``fill``.

    Of a dilated dimension, these are its own elements.  ``fill`` is a scalar of the element type;
    without it, elements beyond the ends are arbitrary.
    """
    d, first, length = window.dimension, window.begin, window.count
    if not length:
        return _part(value, d, 0, 0)
    parts = []
    received = window.received()
    for piece in received:
        part = _part(value, d, piece.start, piece.stop)
        parts.append(emitter.shifted(part, axes, piece.shift) if piece.shift else part)
    if not parts:  # nobody wants anything but fill
        parts = [value]
    joined = parts[0] if len(parts) == 1 else stablehlo.concatenate(parts, d)
    begin = window.places(received)
    low = max(0, -int(begin.min()))
    high = max(0, int(begin.max()) + length - int(joined.type.shape[d]))
    if low or high:
        zero = emitter.splat(0, [], value.type.element_type)
        joined = _padded(joined, d, low, high, zero)
    result = _own_part(emitter, joined, axes, d, begin + low, length)
    if fill is None or (first.min() >= 0 and first.max() + length <= window.size):
        return result
    return inside_of(emitter, result, axes, d, first, 0, window.size, fill)


def dilated(emitter: Emitter, value: Any, axes: Axes, window: SlidingWindow, fill: Any) -> Any:
    """The elements in a window of ``value`` with ``spread - 1`` times ``fill`` between elements.

    The window may be at different places between elements on different devices.
    """
    d, spread, first, length = window.dimension, window.spread, window.first, window.length
    begin, count = window.begin, window.count
    if not count:
        shape = list(value.type.shape)
        shape[d] = length
        return emitter.broadcast(fill, shape, [])
    part = windowed(emitter, value, axes, window, fill)
    # The first element has spread - 1 times fill before it.
    skipped = first - begin * spread + spread - 1
    rank = value.type.rank
    low, high, between = [0] * rank, [0] * rank, [0] * rank
    room = int(skipped.max()) + length - (spread - 1) - ((count - 1) * spread + 1)
    low[d], high[d], between[d] = spread - 1, max(0, room), spread - 1
    wide = stablehlo.pad(part, fill, low, high, between)
    zero = emitter.splat(0, [], ir.IntegerType.get_signless(32))
    starts = [zero] * rank
    starts[d] = emitter.row(skipped[tiles(emitter.mesh, axes)])
    sizes = list(wide.type.shape)
    sizes[d] = length
    return stablehlo.dynamic_slice(wide, starts, sizes)


def taken(
    emitter: Emitter, value: Any, axes: Axes, d: int, first: Ints, length: int, fill: Any
) -> Any:
    """``length`` elements from ``first`` of a dimension that every device has, by its tile.

    :param first: ``[tiles]`` the position, by tile of ``axes``; before the first and behind the
        last element is ``fill``, a scalar.
    """
    low = max(0, -int(first.min()))
    high = max(0, int(first.max()) + length - int(value.type.shape[d]))
    if low or high:
        value = _padded(value, d, low, high, fill)
    return _own_part(emitter, value, axes, d, first + low, length)


def _own_part(emitter: Emitter, value: Any, axes: Axes, d: int, begin: Ints, length: int) -> Any:
    """``length`` elements of a dimension, from position ``begin`` of each tile."""
    if (begin == begin[0]).all():
        return _part(value, d, int(begin[0]), int(begin[0]) + length)
    zero = emitter.splat(0, [], ir.IntegerType.get_signless(32))
    starts = [zero] * value.type.rank
    starts[d] = emitter.row(begin[tiles(emitter.mesh, axes)])
    sizes = list(value.type.shape)
    sizes[d] = length
    return stablehlo.dynamic_slice(value, starts, sizes)


def inside_of(
    emitter: Emitter, value: Any, axes: Axes, d: int, first: Ints, start: int, stop: int, other: Any
) -> Any:
    """``value`` at positions ``start`` to ``stop`` of a dimension, and ``other`` elsewhere.

    :param first: ``[tiles]`` the position of its first element, by tile of ``axes``.
    :param other: a scalar, or a value of the same shape.
    """
    shape = list(value.type.shape)
    signed = ir.IntegerType.get_signless(32)
    type_ = ir.RankedTensorType.get(shape, signed)
    position = stablehlo.add(
        stablehlo.iota(type_, d),
        emitter.broadcast(emitter.row(first[tiles(emitter.mesh, axes)]), shape, []),
    )
    direction = stablehlo.ComparisonDirectionAttr.get
    inside = stablehlo.and_(
        stablehlo.compare(position, emitter.splat(start, shape, signed), direction("GE")),
        stablehlo.compare(position, emitter.splat(stop, shape, signed), direction("LT")),
    )
    if list(other.type.shape) != shape:
        other = emitter.broadcast(other, shape, [])
    return stablehlo.select(inside, value, other)


def _part(value: Any, d: int, start: int, stop: int) -> Any:
    """Elements ``start`` to ``stop`` of a dimension."""
    shape = list(value.type.shape)
    if (start, stop) == (0, shape[d]):
        return value
    starts, stops = [0] * len(shape), shape[:]
    starts[d], stops[d] = start, stop
    return stablehlo.slice(value, starts, stops, [1] * len(shape))


def _padded(value: Any, d: int, low: int, high: int, fill: Any) -> Any:
    rank = value.type.rank
    before, behind = [0] * rank, [0] * rank
    before[d], behind[d] = low, high
    return stablehlo.pad(value, fill, before, behind, [0] * rank)
