"""Products that are computed shard by shard, beside collective-permutes (GShard, 3.3.2).

Half of the shards come from either side, so that both links of a device are busy.  There is one
product per device of the axis, and no loop op: XLA can then run each permute beside any product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.lower.device_groups import tiles
from toast.lower.emitter import Emitter


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a value along an axis, on each device in the order in which they arrive."""

    #: Each shard, with the distance of the device from which it is, towards lower tiles.
    arrived: tuple[tuple[int, Any], ...]
    dimension: int
    axis: str

    @staticmethod
    def passed_on(emitter: Emitter, own: Any, dimension: int, axis: str, tensor: int) -> Shards:
        """All shards along ``axis`` of the device's ``own`` one, of an operand ``tensor``."""
        arrived = [(0, own)]
        for side in (1, -1):
            shard = own
            for step in range(1, _steps(emitter.shards((axis,)), side) + 1):
                shard = emitter.passed_on(shard, (axis,), side, tensor)
                arrived.append((side * step, shard))
        arrived.sort(key=lambda item: abs(item[0]))
        return Shards(tuple(arrived), dimension, axis)

    def gathered(self, emitter: Emitter) -> Any:
        """The whole value."""
        (_, own), *_ = self.arrived
        shape = list(own.type.shape)
        shape[self.dimension] *= len(self.arrived)
        whole = emitter.unset(shape, own.type.element_type)
        for distance, shard in self.arrived:
            whole = _placed(emitter, whole, shard, self.dimension, self.axis, -distance)
        return whole


def looped_gather(emitter: Emitter, operation: Any, operand: int, shards: Shards) -> Any:
    """The result of a product of all shards of an operand, one after the other.

    :param operation: a ``dot_general`` whose result has the sharded dimension of the operand, too.
    """
    numbers = _DotDimensions.of(operation)
    along = numbers.result_of(operand, shards.dimension)
    (_, own), *_ = shards.arrived
    operation.operands[operand] = own
    part = numbers.result_shape(operation)
    shape = [size * len(shards.arrived) if d == along else size for d, size in enumerate(part)]
    result = emitter.unset(shape, operation.results[0].type.element_type)
    for distance, shard in shards.arrived:
        product = _product(operation, {operand: shard}, part)
        result = _placed(emitter, result, product, along, shards.axis, -distance)
    return result


def looped_sum(emitter: Emitter, operation: Any, dimension: int, axis: str) -> Any:
    """The part of a product that a device has if the partial sums are scattered along ``axis``.

    :param operation: a ``dot_general`` whose result is a partial sum over ``axis``.
    :param dimension: the dimension of the result along which it is scattered.
    """
    numbers = _DotDimensions.of(operation)
    devices = emitter.shards((axis,))
    shape = numbers.result_shape(operation)
    shape[dimension] //= devices
    places = numbers.operands_of(dimension)

    def part(distance: int) -> Any:
        """What this device adds to the part of another one."""
        operands = {
            operand: _tile_of(emitter, operation.operands[operand], d, axis, distance, devices)
            for operand, d in places
        }
        return _product(operation, operands, shape)

    result = part(0)
    for side in (1, -1):
        total = None
        for distance in range(_steps(devices, side), 0, -1):
            own = part(side * distance)
            total = own if total is None else stablehlo.add(total, own)
            total = emitter.passed_on(total, (axis,), side, -1)
        if total is not None:
            result = stablehlo.add(result, total)
    return result


def _steps(devices: int, side: int) -> int:
    """How many shards come from a side."""
    return devices // 2 if side > 0 else (devices - 1) // 2


def _product(operation: Any, operands: dict[int, Any], shape: Sequence[int]) -> Any:
    """The same product of other operands."""
    new = operation.operation.clone()
    for place, value in operands.items():
        new.operands[place] = value
    (result,) = new.results
    result.set_type(ir.RankedTensorType.get(list(shape), result.type.element_type))
    return result


def _starts(
    emitter: Emitter, rank: int, dimension: int, axis: str, distance: int, size: int
) -> list[Any]:
    """The start indices of the tile that is ``distance`` tiles further than that of this device."""
    devices = emitter.shards((axis,))
    tile = (tiles(emitter.mesh, (axis,)) + distance) % devices
    zero = emitter.splat(0, [], ir.IntegerType.get_signless(32))
    return [emitter.row(tile * size) if d == dimension else zero for d in range(rank)]


def _placed(
    emitter: Emitter, whole: Any, part: Any, dimension: int, axis: str, distance: int
) -> Any:
    """``whole`` with a part in the place of another tile."""
    size, rank = part.type.shape[dimension], part.type.rank
    starts = _starts(emitter, rank, dimension, axis, distance, size)
    return stablehlo.dynamic_update_slice(whole, part, starts)


def _tile_of(
    emitter: Emitter, value: Any, dimension: int, axis: str, distance: int, devices: int
) -> Any:
    """The tile of a value that another device has."""
    shape = list(value.type.shape)
    shape[dimension] //= devices
    starts = _starts(emitter, len(shape), dimension, axis, distance, shape[dimension])
    return stablehlo.dynamic_slice(value, starts, shape)


@dataclasses.dataclass(frozen=True)
class _DotDimensions:
    """The dimensions of the operands of a product, by the dimensions of its result."""

    #: ``[rank of the result]`` the operands that have a dimension, each with its own number of it.
    of_result: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def of(operation: Any) -> _DotDimensions:
        """Those of a ``dot_general``."""
        numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
        batch = zip(
            numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True
        )  # fmt: skip
        taken = (
            {*numbers.lhs_batching_dimensions, *numbers.lhs_contracting_dimensions},
            {*numbers.rhs_batching_dimensions, *numbers.rhs_contracting_dimensions},
        )
        free = [
            ((operand, d),)
            for operand, dims in enumerate(taken)
            for d in range(operation.operands[operand].type.rank) if d not in dims
        ]  # fmt: skip
        return _DotDimensions((*(((0, left), (1, right)) for left, right in batch), *free))

    def result_of(self, operand: int, dimension: int) -> int:
        """The dimension of the result for a dimension of an operand."""
        return next(
            d for d, places in enumerate(self.of_result) if (operand, dimension) in places
        )  # fmt: skip

    def operands_of(self, dimension: int) -> tuple[tuple[int, int], ...]:
        """The operands that have a dimension of the result, each with its own number of it."""
        return self.of_result[dimension]

    def result_shape(self, operation: Any) -> list[int]:
        """The shape of the product of the operands as they are."""
        return [
            operation.operands[operand].type.shape[d] for (operand, d), *_ in self.of_result
        ]  # fmt: skip


def changed_dimension(before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]) -> int:
    """The dimension whose axes differ between two shardings."""
    (dimension,) = (d for d, axes in enumerate(before) if axes != after[d])
    return dimension
