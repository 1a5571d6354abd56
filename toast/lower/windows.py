"""Windows into a sharded dimension: a device receives the elements that it lacks (GShard, A.4).

A device wants neighbouring elements of a dimension: those under the windows of its results.  Every
device sends the edge of its shard, or the whole shard, to the devices that want it; edges of
different widths are as wide as the widest (non-constant halos).  Elements before the first and
behind the last one are filled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.lower.device_groups import tiles
from toast.lower.emitter import Emitter

Ints = npt.NDArray[np.int64]


class ShardPart(NamedTuple):
    """Elements ``start`` to ``stop`` of the shard that is ``shift`` tiles further."""

    shift: int
    start: int
    stop: int


def shard_parts(size: int, first: Ints, length: int) -> list[ShardPart]:
    """What a device receives to have ``length`` elements, in order and without gaps.

    :param size: the number of elements of a shard.
    :param first: ``[tiles]`` the position of the first wanted element, by tile of the result.
    """
    count = len(first)
    wanted: dict[int, tuple[int, int]] = {}
    for tile, position in enumerate(first.tolist()):
        for source in range(count):
            start = max(position - source * size, 0)
            stop = min(position + length - source * size, size)
            if start < stop:
                low, high = wanted.get(source - tile, (size, 0))
                wanted[source - tile] = min(low, start), max(high, stop)
    if not wanted:
        return []
    nearest, furthest = min(wanted), max(wanted)
    return [
        ShardPart(
            shift,
            wanted[shift][0] if shift == nearest else 0,
            wanted[shift][1] if shift == furthest else size,
        )
        for shift in range(nearest, furthest + 1)
    ]


class Window(NamedTuple):
    """The elements of a dimension that a device wants."""

    #: The dimension, and its axes.
    dimension: int
    axes: tuple[str, ...]
    #: The number of its elements on all devices.
    size: int
    #: ``[tiles]`` the position of the first wanted element; negative if it is before the first one.
    first: Ints
    #: The number of wanted elements.
    length: int


def windowed(emitter: Emitter, value: Any, window: Window, fill: Any = None) -> Any:
    """The elements of ``value`` in a window; beyond the ends of the dimension is ``fill``.

    ``fill`` is a scalar of the element type; without it, elements beyond the ends are arbitrary.
    """
    d, axes, size, first, length = window
    shard = int(value.type.shape[d])
    parts = []
    received = shard_parts(shard, first, length)
    for piece in received:
        part = _part(value, d, piece.start, piece.stop)
        parts.append(emitter.shifted(part, axes, piece.shift) if piece.shift else part)
    if not parts:  # nobody wants anything but fill
        received, parts = [ShardPart(0, 0, shard)], [value]
    joined = parts[0] if len(parts) == 1 else stablehlo.concatenate(parts, d)
    origin = (np.arange(len(first)) + received[0].shift) * shard + received[0].start
    begin = first - origin
    low = max(0, -int(begin.min()))
    high = max(0, int(begin.max()) + length - int(joined.type.shape[d]))
    if low or high:
        joined = _padded(emitter, joined, d, low, high)
    begin = begin + low
    if (begin == begin[0]).all():
        result = _part(joined, d, int(begin[0]), int(begin[0]) + length)
    else:
        zero = emitter.splat(0, [], ir.IntegerType.get_signless(32))
        starts = [zero] * joined.type.rank
        starts[d] = emitter.row(begin[tiles(emitter.mesh, axes)])
        sizes = list(joined.type.shape)
        sizes[d] = length
        result = stablehlo.dynamic_slice(joined, starts, sizes)
    if fill is None or (first.min() >= 0 and first.max() + length <= size):
        return result
    return inside_of(emitter, result, window, 0, size, fill)


def dilated(emitter: Emitter, value: Any, window: Window, spread: int, fill: Any) -> Any:
    """The elements in a window of ``value`` with ``spread - 1`` times ``fill`` between elements.

    ``window`` has positions in the dilated dimension, which may be at different places between
    elements on different devices; its ``size`` is that of the dimension before it is dilated.
    """
    d, axes, size, first, length = window
    begin = -(-first // spread)
    count = int((-(-(first + length) // spread) - begin).max())
    if not count:
        shape = list(value.type.shape)
        shape[d] = length
        return emitter.broadcast(fill, shape, [])
    part = windowed(emitter, value, Window(d, axes, size, begin, count), fill)
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


def inside_of(
    emitter: Emitter, value: Any, window: Window, start: int, stop: int, other: Any
) -> Any:
    """``value`` at positions ``start`` to ``stop`` of a window, and ``other`` elsewhere.

    ``other`` is a scalar, or has the shape of ``value``.
    """
    d, axes, _, first, _ = window
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


def _padded(emitter: Emitter, value: Any, d: int, low: int, high: int) -> Any:
    rank = value.type.rank
    before, behind = [0] * rank, [0] * rank
    before[d], behind[d] = low, high
    zero = emitter.splat(0, [], value.type.element_type)
    return stablehlo.pad(value, zero, before, behind, [0] * rank)
