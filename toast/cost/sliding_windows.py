"""The elements that devices exchange for ops that slide along a sharded dimension (GShard, A.4).

A device needs the elements of an operand that are under the windows of its results.  What it does
not have, it receives from the devices that have it: :mod:`toast.lower.windows` emits these
exchanges, and :meth:`toast.cost.CostModel.edges` counts them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from toast.program import Signature, element_bytes

if TYPE_CHECKING:
    from toast.analysis import SignatureRule

Ints = npt.NDArray[np.int64]


class ShardPart(NamedTuple):
    """Elements ``start`` to ``stop`` of the shard that is ``shift`` tiles further."""

    shift: int
    start: int
    stop: int


def shard_parts(size: int, first: Ints, length: int) -> list[ShardPart]:
    """What devices receive to have ``length`` elements each, in the order of their shifts.

    Parts of different widths are as wide as the widest (non-constant halos).  What a device wants
    is without gaps in what it receives: a part ends with its shard where a device also wants the
    begin of the next one.

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
    return [ShardPart(shift, *wanted[shift]) for shift in sorted(wanted)]


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """The elements of one dimension of an operand that each device needs."""

    operand: int
    dimension: int
    #: The number of elements of the dimension on all devices.
    size: int
    #: ``[tiles]`` the position of the first needed element in the dilated dimension; negative if it
    #: is before the first one.
    first: Ints
    #: The number of needed elements of the dilated dimension.
    length: int
    #: The distance of elements in the dilated dimension; 1 if it is not dilated.
    spread: int = 1

    @functools.cached_property
    def begin(self) -> Ints:
        """``[tiles]`` the position of the first needed element, before the dimension is dilated."""
        return np.asarray(-(-self.first // self.spread))

    @functools.cached_property
    def count(self) -> int:
        """The number of needed elements, before the dimension is dilated."""
        return int((-(-(self.first + self.length) // self.spread) - self.begin).max())

    @property
    def aligned(self) -> bool:
        """Whether all windows begin equally far before an element, in the dilated dimension."""
        offsets = self.begin * self.spread - self.first
        return bool((offsets == offsets[0]).all())

    def received(self) -> list[ShardPart]:
        """The parts of shards that a device needs, its own one included."""
        if not self.count:
            return []
        return shard_parts(self.size // len(self.first), self.begin, self.count)

    def places(self, parts: Sequence[ShardPart]) -> Ints:
        """``[tiles]`` where the first wanted element is in ``parts``, one behind the other.

        Negative if it is before the first element of the dimension.  A tile that wants no elements
        of the dimension has 0.
        """
        size, places = self.size // len(self.first), np.zeros(len(self.first), dtype=np.int64)
        before = np.cumsum([0, *(part.stop - part.start for part in parts)])
        number = {part.shift: n for n, part in enumerate(parts)}
        for tile, begin in enumerate(self.begin.tolist()):
            inside = max(begin, 0)
            if inside < min(begin + self.count, self.size):
                n = number[inside // size - tile]
                places[tile] = before[n] + inside % size - parts[n].start + begin - inside
        return places


class Exchanged(NamedTuple):
    """A collective-permute of a part of a shard of an operand."""

    #: The number of the operand, and the factor of its dimension.
    operand: int
    factor: int
    bytes: float


def sliding_windows(
    signature: Signature, rule: SignatureRule, shards: Mapping[int, int]
) -> Iterator[SlidingWindow]:
    """What devices need of the operands of an op, in the order in which they exchange it.

    :param shards: the number of shards along each sharded factor.
    """
    describe = _WINDOWS.get(signature.kind)
    if describe is not None:
        yield from describe(_Slid(signature, rule, shards))


def exchanges(
    signature: Signature, rule: SignatureRule, shards: Mapping[int, int]
) -> list[Exchanged]:
    """The collective-permutes of the local form of an op, without those of rings.

    :param shards: the number of shards along each sharded factor.
    """
    slid = _Slid(signature, rule, shards)
    shapes = [
        [size // slid.shards_of(stack) for size, stack in zip(type_.shape, dims, strict=True)]
        for type_, dims in zip(signature.operands, rule.operands, strict=True)
    ]

    def part(operand: int, d: int, elements: int) -> Exchanged:
        others = math.prod(size for e, size in enumerate(shapes[operand]) if e != d)
        width = element_bytes(signature.operands[operand].dtype)
        factor = slid.held(rule.operands[operand][d])
        return Exchanged(operand, factor, float(width * elements * others))

    if signature.kind == "reverse":
        return [part(0, d, shapes[0][d]) for d, _ in slid.moving()]
    found = []
    for window in sliding_windows(signature, rule, shards):
        operand, d = window.operand, window.dimension
        for piece in window.received():
            if piece.shift:
                found.append(part(operand, d, piece.stop - piece.start))
        undilated = signature.kind == "convolution" and window.aligned
        shapes[operand][d] = window.count if undilated else window.length
    return [each for each in found if each.bytes]


@dataclasses.dataclass(frozen=True)
class _Slid:
    """An op that slides, and the shards of its factors."""

    signature: Signature
    rule: SignatureRule
    shards: Mapping[int, int]

    def integers(self, name: str, count: int, default: int) -> tuple[int, ...]:
        """An attribute with ``count`` numbers."""
        value = self.signature.attribute(name)
        return tuple(map(int, value)) if isinstance(value, tuple) else (default,) * count

    def held(self, stack: tuple[int, ...]) -> int:
        """The first sharded factor of a dimension; -1 if it is whole."""
        return next((number for number in stack if number in self.shards), -1)

    def shards_of(self, stack: tuple[int, ...]) -> int:
        """The number of shards of a dimension."""
        return math.prod(self.shards.get(number, 1) for number in stack)

    def size(self, operand: int, d: int) -> int:
        """The number of elements of a dimension of an operand."""
        return self.signature.operands[operand].shape[d]

    def moving(self) -> Iterator[tuple[int, int]]:
        """The dimensions of operand 0 of which elements move, and the number of their shards."""
        for d, stack in enumerate(self.rule.operands[0]):
            number = self.held(stack)
            if number >= 0 and self.rule.factors[number].permutation:
                yield d, self.shards_of(stack)

    def window(
        self, operand: int, d: int, low: int, length: int, stride: int, spread: int = 1
    ) -> SlidingWindow:
        """What a part of dimension ``d`` of the result needs of this dimension of an operand.

        Result ``y`` needs ``length`` elements from ``stride * y - low``, an empty result none.
        """
        shards = self.shards_of(self.rule.operands[operand][d])
        local = self.signature.results[0].shape[d] // shards
        first = np.arange(shards) * local * stride - low
        length = (local - 1) * stride + length if local else 0
        return SlidingWindow(operand, d, self.size(operand, d), first, length, spread)


def _of_slice(op: _Slid) -> Iterator[SlidingWindow]:
    rank = len(op.rule.operands[0])
    starts, strides = op.integers("start_indices", rank, 0), op.integers("strides", rank, 1)
    for d, _ in op.moving():
        yield op.window(0, d, -starts[d], 1, strides[d])


def _of_pad(op: _Slid) -> Iterator[SlidingWindow]:
    rank = len(op.rule.operands[0])
    low, between = (op.integers(name, rank, 0) for name in ("edge_padding_low", "interior_padding"))
    for d, _ in op.moving():
        yield op.window(0, d, low[d], 1, 1, between[d] + 1)


def _of_concatenate(op: _Slid) -> Iterator[SlidingWindow]:
    for d, shards in op.moving():
        local, start = op.signature.results[0].shape[d] // shards, 0
        for operand in range(len(op.signature.operands)):
            size = op.size(operand, d)
            yield SlidingWindow(operand, d, size, np.arange(shards) * local - start, local)
            start += size


def _of_reduce_window(op: _Slid) -> Iterator[SlidingWindow]:
    rank = len(op.rule.operands[0])
    sizes = op.integers("window_dimensions", rank, 1)
    strides, gaps, spreads = (
        op.integers(name, rank, 1)
        for name in ("window_strides", "window_dilations", "base_dilations")
    )
    padding = op.integers("padding", 2 * rank, 0)
    for d, _ in op.moving():
        for operand in range(len(op.signature.results)):
            length = (sizes[d] - 1) * gaps[d] + 1
            yield op.window(operand, d, padding[2 * d], length, strides[d], spreads[d])


def _of_select_and_scatter(op: _Slid) -> Iterator[SlidingWindow]:
    """All windows that a shard has elements of: what is under them, and their scattered values."""
    rank = len(op.rule.operands[0])
    sizes = op.integers("window_dimensions", rank, 1)
    strides = op.integers("window_strides", rank, 1)
    padding = op.integers("padding", 2 * rank, 0)
    for d, shards in op.moving():
        size, stride, low = op.size(0, d), strides[d], padding[2 * d]
        begin = np.arange(shards) * (size // shards) + low
        first = -(-(begin - sizes[d] + 1) // stride)
        count = max(1, int(((begin + size // shards - 1) // stride - first).max()) + 1)
        length = (count - 1) * stride + sizes[d]
        yield SlidingWindow(0, d, size, first * stride - low, length)
        if op.held(op.rule.operands[1][d]) >= 0:
            yield SlidingWindow(1, d, op.size(1, d), first, count)


def _of_convolution(op: _Slid) -> Iterator[SlidingWindow]:
    """What is under the windows of the device's results.

    Where the kernel is sharded, it is what is under the device's part of the window, in all
    positions.
    """
    spatial, kernel_dims, places = (
        op.integers(name, 0, 0)
        for name in (
            "input_spatial_dimensions", "kernel_spatial_dimensions", "output_spatial_dimensions",
        )
    )  # fmt: skip
    count = len(spatial)
    strides, spreads, gaps = (
        op.integers(name, count, 1) for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    padding = op.integers("padding", 2 * count, 0)
    for n, d in enumerate(spatial):
        number = op.held(op.rule.operands[0][d])
        if number < 0:
            continue
        shards = op.shards_of(op.rule.operands[0][d])
        kernel, result = kernel_dims[n], places[n]
        in_kernel = op.held(op.rule.operands[1][kernel]) >= 0
        local_kernel = op.size(1, kernel) // op.shards_of(op.rule.operands[1][kernel])
        local_places = op.signature.results[0].shape[result] // op.shards_of(
            op.rule.results[0][result]
        )
        moved = local_kernel * gaps[n] if in_kernel else local_places * strides[n]
        first = np.arange(shards) * moved - padding[2 * n]
        extent = (local_places - 1) * strides[n] + (local_kernel - 1) * gaps[n] + 1
        yield SlidingWindow(0, d, op.size(0, d), first, extent, spreads[n])


_WINDOWS = {
    "slice": _of_slice, "pad": _of_pad, "concatenate": _of_concatenate,
    "reduce_window": _of_reduce_window, "select_and_scatter": _of_select_and_scatter,
    "convolution": _of_convolution,
}  # fmt: skip

#: The kinds of ops of which devices exchange parts of shards.
EXCHANGING = frozenset({*_WINDOWS, "reverse"})

__all__ = [
    "EXCHANGING", "Exchanged", "ShardPart", "SlidingWindow", "exchanges", "shard_parts",
    "sliding_windows",
]  # fmt: skip
