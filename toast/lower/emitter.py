"""Writes the steps of reshards as StableHLO on local shapes."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.cost.reshard_steps import RESTORED, ReshardStep
from toast.frontend.mlir import UNSET, TypeReader, splat
from toast.hardware import Mesh
from toast.lower.device_groups import groups, moves, tiles
from toast.lower.jax_functions import JaxFunctions
from toast.program import Spec, element_bytes

#: The ops that combine two partial results.
COMBINERS = {
    "add": stablehlo.AddOp, "multiply": stablehlo.MulOp, "maximum": stablehlo.MaxOp,
    "minimum": stablehlo.MinOp, "and": stablehlo.AndOp, "or": stablehlo.OrOp,
    "xor": stablehlo.XorOp,
}  # fmt: skip


class Exchange(NamedTuple):
    """A collective-permute that the local form of an op has emitted."""

    axes: tuple[str, ...]
    bytes: float
    #: The operand of which shards go around, or the result: -1, -2 and so on; ``None`` for edges.
    tensor: int | None = None


class Emitter:
    """Emits ops at a point of a module, on a mesh.

    Values are those of a device: the shape of each is its global shape over the shards of a
    sharding.
    """

    def __init__(self, module: ir.Module, mesh: Mesh) -> None:
        self.mesh = mesh
        self._sizes = dict(mesh.axes)
        self._context = module.context
        self._channel = itertools.count(1)
        self._read_type = TypeReader()
        #: The exchanges between neighbours (:meth:`shifted`, :meth:`passed_on`) of one op.
        self.exchanges: list[Exchange] = []
        self._reason_of: Callable[[Exchange], str] | None = None
        self._functions = JaxFunctions(module)

    @contextlib.contextmanager
    def before(self, operation: Any) -> Iterator[None]:
        """Emits ops before ``operation``, with its location."""
        with self._context, operation.location, ir.InsertionPoint(operation):
            yield

    @contextlib.contextmanager
    def after(self, operation: Any) -> Iterator[None]:
        """Emits ops after ``operation``, with its location."""
        with self._context, operation.location, ir.InsertionPoint.after(operation):
            yield

    @contextlib.contextmanager
    def at_begin(self, block: Any) -> Iterator[None]:
        """Emits ops at the beginning of a block."""
        with (
            self._context, block.owner.operation.location, ir.InsertionPoint.at_block_begin(block),
        ):  # fmt: skip
            yield

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Emits ops with a name in front of their location."""
        with ir.Location.name(name, ir.Location.current):
            yield

    @contextlib.contextmanager
    def explained(self, reason_of: Callable[[Exchange], str]) -> Iterator[None]:
        """Emits ops whose exchanges have these reasons as locations."""
        before, self._reason_of = self._reason_of, reason_of
        try:
            yield
        finally:
            self._reason_of = before

    # -- shapes ------------------------------------------------------------------------------

    def shards(self, axes: Sequence[str]) -> int:
        """The number of shards along ``axes``."""
        return math.prod(self._sizes[axis] for axis in axes if not axis.startswith(RESTORED))

    def local_shape(self, shape: Sequence[int], spec: Spec) -> list[int]:
        """The shape on a device of a value of a global shape."""
        return [size // self.shards(axes) for size, axes in zip(shape, spec, strict=True)]

    @staticmethod
    def index_type(element: Any) -> Any:
        """The signed integer type for indices that a program has in an integer type."""
        wide = element.width > 32 or (element.width == 32 and element.is_unsigned)
        return ir.IntegerType.get_signless(64 if wide else 32)

    # -- small ops ---------------------------------------------------------------------------

    def constant(self, array: np.ndarray[Any, Any], type_: Any = None) -> Any:
        """A constant; ``type_`` is its element type if numpy has none."""
        attribute = ir.DenseElementsAttr.get(np.ascontiguousarray(array), type=type_)
        return stablehlo.ConstantOp(attribute).result

    def splat(self, number: float, shape: Sequence[int], element: Any) -> Any:
        """A constant of equal elements of an element type."""
        return splat(number, shape, element)

    def unset(self, shape: Sequence[int], element: Any) -> Any:
        """A value whose elements are all set later: zeros, unless a platform can do without."""
        value = self.splat(0, shape, element)
        value.owner.attributes[UNSET] = ir.UnitAttr.get()
        return value

    def reshape(self, value: Any, shape: Sequence[int]) -> Any:
        """``value`` with another shape; ``value`` itself if it has this shape."""
        if list(value.type.shape) == list(shape):
            return value
        type_ = ir.RankedTensorType.get(list(shape), value.type.element_type)
        return stablehlo.ReshapeOp(type_, value).result

    def transpose(self, value: Any, order: Sequence[int]) -> Any:
        """``value`` with its dimensions in another order."""
        return value if list(order) == sorted(order) else stablehlo.transpose(value, list(order))

    def row(self, table: np.ndarray[Any, Any]) -> Any:
        """The row of this device in a table ``[devices, ...]`` of integers."""
        numbers = np.asarray(table, dtype=np.int32)
        rest = list(numbers.shape[1:])
        unsigned = ir.IntegerType.get_unsigned(32)
        zero = self.splat(0, [], unsigned)
        device = stablehlo.partition_id()
        starts = [device, *[zero] * len(rest)]
        part = stablehlo.dynamic_slice(self.constant(numbers), starts, [1, *rest])
        return self.reshape(part, rest)

    def tile(self, axes: Sequence[str]) -> Any:
        """The tile of this device along ``axes``: an ``i32`` scalar."""
        return self.row(tiles(self.mesh, tuple(axes)))

    def is_first(self, axes: frozenset[str]) -> Any:
        """Whether this device is the first one along ``axes``: an ``i1`` scalar."""
        tile = self.tile(self._ordered(axes))
        return stablehlo.compare(
            tile, self.splat(0, [], tile.type.element_type),
            stablehlo.ComparisonDirectionAttr.get("EQ"),
        )  # fmt: skip

    def broadcast(self, value: Any, shape: Sequence[int], dimensions: Sequence[int]) -> Any:
        """``value`` with its dimensions at ``dimensions`` of a shape."""
        type_ = ir.RankedTensorType.get(list(shape), value.type.element_type)
        return stablehlo.broadcast_in_dim(type_, value, list(dimensions))

    # -- steps -------------------------------------------------------------------------------

    def step(self, value: Any, step: ReshardStep, combiner: str = "") -> Any:
        """The value after a step; ``combiner`` is that of partial sums."""
        if step.kind == "slice":
            return self._slice(value, step)
        if step.kind == "collective_permute":
            return self._permute(value, step)
        if step.kind == "all_to_all":
            return self._all_to_all(value, step)
        if step.kind == "all_gather":
            return self._all_gather(value, step)
        if step.kind == "reduce_scatter":
            return self._reduce_scatter(value, step, combiner)
        return self._all_reduce(value, step, combiner)

    def _ordered(self, axes: frozenset[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.names if axis in axes)

    def _groups(self, axes: Sequence[str]) -> Any:
        return ir.DenseElementsAttr.get(groups(self.mesh, tuple(axes)))

    def _between(self) -> dict[str, Any]:
        """The attributes of a collective between partitions."""
        return {"channel_handle": stablehlo.ChannelHandle.get(next(self._channel), 1)}

    def _slice(self, value: Any, step: ReshardStep) -> Any:
        if any(axis.startswith(RESTORED) for axes in step.after for axis in axes):
            return self._slice_parts(value, step)
        shape, starts = list(value.type.shape), []
        zero = None
        for d, axes in enumerate(step.after):
            if new := axes[len(step.before[d]) :]:
                shape[d] //= self.shards(new)
                starts.append(self.row(tiles(self.mesh, new) * shape[d]))
            else:
                zero = self.splat(0, [], ir.IntegerType.get_signless(32)) if zero is None else zero
                starts.append(zero)
        return stablehlo.dynamic_slice(value, starts, shape)

    def _slice_parts(self, value: Any, step: ReshardStep) -> Any:
        """Slices parts of dimensions that an all-to-all is to shard along the restored axes."""
        signed = ir.IntegerType.get_signless(32)
        split: list[int] = []
        sizes: list[int] = []
        starts: list[Any] = []
        merged: list[int] = []
        for d, size in enumerate(value.type.shape):
            merged.append(size)
            for axis in step.after[d][len(step.before[d]) :]:
                parts = self._sizes[axis.removeprefix(RESTORED)]
                split.append(parts)
                size //= parts
                if axis.startswith(RESTORED):
                    sizes.append(parts)
                    starts.append(self.splat(0, [], signed))
                else:
                    sizes.append(1)
                    starts.append(self.tile((axis,)))
                    merged[-1] //= parts
            split.append(size)
            sizes.append(size)
            starts.append(self.splat(0, [], signed))
        part = stablehlo.dynamic_slice(self.reshape(value, split), starts, sizes)
        return self.reshape(part, merged)

    def _permute(self, value: Any, step: ReshardStep) -> Any:
        pairs = moves(self.mesh, step.before, step.after)
        return stablehlo.collective_permute(
            value, ir.DenseElementsAttr.get(pairs), **self._between()
        )

    def shifted(self, value: Any, axes: Sequence[str], shift: int) -> Any:
        """The value of the device that is ``shift`` tiles further along ``axes``; zeros if none."""
        return self._from_tiles(value, axes, np.arange(self.shards(axes)) + shift)

    def reversed_tiles(self, value: Any, axes: Sequence[str]) -> Any:
        """The value of the device that has the same tile from the end."""
        return self._from_tiles(value, axes, np.arange(self.shards(axes))[::-1])

    def passed_on(self, value: Any, axes: Sequence[str], distance: int, tensor: int) -> Any:
        """The value of the device that is ``distance`` tiles before this one; the last come first.

        :param distance: negative for a device after this one.
        :param tensor: the tensor of the op whose shards go around, as in :class:`Exchange`.
        """
        shards = self.shards(axes)
        return self._from_tiles(value, axes, (np.arange(shards) - distance) % shards, tensor)

    def call(
        self, function: Callable[..., Any], operands: Sequence[Any], **static: Any
    ) -> list[Any]:
        """The flat results of a JAX function of values; it becomes a function of the module."""
        return self._functions.call(function, operands, static)

    def _from_tiles(
        self,
        value: Any,
        axes: Sequence[str],
        sources: npt.NDArray[np.int64],
        tensor: int | None = None,
    ) -> Any:
        """The value of the device with tile ``sources[tile]`` along ``axes``, else as this one."""
        rows = groups(self.mesh, tuple(axes))
        pairs = [
            (row[source], row[tile])
            for row in rows.tolist()
            for tile, source in enumerate(sources.tolist()) if 0 <= source < len(row)
        ]  # fmt: skip
        type_ = self._read_type(value.type)
        size = math.prod(type_.shape) * element_bytes(type_.dtype)
        ordered = tuple(axis for axis in self.mesh.names if axis in axes)
        exchange = Exchange(ordered, float(size), tensor)
        self.exchanges.append(exchange)
        reason = self._reason_of(exchange) if self._reason_of else "collective_permute"
        with self.named("edges" if tensor is None else "ring"), self.named(reason):
            return stablehlo.collective_permute(
                value,
                ir.DenseElementsAttr.get(np.array(sorted(pairs), dtype=np.int64)),
                **self._between(),
            )

    def _all_gather(self, value: Any, step: ReshardStep) -> Any:
        gone = {
            d: axes[len(step.after[d]) :]
            for d, axes in enumerate(step.before) if axes != step.after[d]
        }  # fmt: skip
        axes = tuple(axis for some in gone.values() for axis in some if axis in step.axes)
        local, element = list(value.type.shape), value.type.element_type
        if any(axis.startswith(RESTORED) for some in gone.values() for axis in some):
            sizes = [self._sizes[axis] for axis in axes]
            stacked = self._gathered(
                self.reshape(value, [1, *local]), 0, [math.prod(sizes), *local], element, axes
            )
            return self._interleaved(self.reshape(stacked, [*sizes, *local]), axes, gone)
        if len(gone) == 1:
            (d,) = gone
            shape = [size * self.shards(axes) if e == d else size for e, size in enumerate(local)]
            return self._gathered(value, d, shape, element, axes)
        parts = [self.shards(some) for some in gone.values()]
        stacked = self._gathered(
            self.reshape(value, [1, *local]), 0, [math.prod(parts), *local], element, axes
        )
        return self._merged(self.reshape(stacked, [*parts, *local]), list(gone), len(local))

    def _gathered(
        self, value: Any, d: int, shape: Sequence[int], element: Any, axes: Sequence[str]
    ) -> Any:
        type_ = ir.RankedTensorType.get(list(shape), element)
        operation = stablehlo.AllGatherOp(
            [type_], [value], d, self._groups(axes), use_global_device_ids=True, **self._between()
        )
        return operation.results[0]

    def _interleaved(
        self, value: Any, axes: Sequence[str], gone: Mapping[int, Sequence[str]]
    ) -> Any:
        """Puts leading dimensions, of gathered ``axes``, between parts of dimensions ``gone``."""
        local = list(value.type.shape)[len(axes) :]
        shape: list[int] = [self._sizes[axis] for axis in axes]
        order: list[int] = []
        merged: list[int] = []
        for d, size in enumerate(local):
            whole = size
            for axis in gone.get(d, ()):
                if axis.startswith(RESTORED):
                    order.append(len(shape))
                    shape.append(self._sizes[axis.removeprefix(RESTORED)])
                    size //= shape[-1]
                else:
                    order.append(axes.index(axis))
                    whole *= self._sizes[axis]
            order.append(len(shape))
            shape.append(size)
            merged.append(whole)
        return self.reshape(self.transpose(self.reshape(value, shape), order), merged)

    def _merged(self, value: Any, dims: Sequence[int], rank: int) -> Any:
        """Merges leading dimensions into dimensions ``dims``, each as the major part."""
        count = len(dims)
        order: list[int] = []
        shape = [1] * rank
        for d in range(rank):
            here = [number for number, into in enumerate(dims) if into == d] + [count + d]
            order += here
            shape[d] = math.prod(value.type.shape[number] for number in here)
        return self.reshape(self.transpose(value, order), shape)

    def _split(self, value: Any, parts: Sequence[tuple[int, int]]) -> Any:
        """Splits dimensions; the parts become leading dimensions.

        ``parts`` has pairs of a dimension and a number of parts; of pairs of one dimension, the
        first is the major one.
        """
        local = list(value.type.shape)
        shape: list[int] = []
        place: dict[int, int] = {}
        rest: list[int] = []
        for d, size in enumerate(local):
            here = [number for number, (of, _) in enumerate(parts) if of == d]
            for number in here:
                place[number] = len(shape)
                shape.append(parts[number][1])
                size //= parts[number][1]
            rest.append(len(shape))
            shape.append(size)
        order = [place[number] for number in range(len(parts))] + rest
        return self.transpose(self.reshape(value, shape), order)

    def _all_to_all(self, value: Any, step: ReshardStep) -> Any:
        to = {axis: d for d, axes in enumerate(step.after) for axis in axes}
        at = {axis: d for d, axes in enumerate(step.before) for axis in axes}
        # In the order of the source, so that dimensions are merged major to minor.
        leaving = [axis for axes in step.before for axis in axes if axis in step.axes]
        if len({(at[axis], to[axis]) for axis in leaving}) == 1 and self._same_order(step, leaving):
            source, target = at[leaving[0]], to[leaving[0]]
            return stablehlo.all_to_all(
                [value], target, source, self.shards(leaving), self._groups(leaving),
                **self._between(),
            )  # fmt: skip
        arriving = [axis for axes in step.after for axis in axes if axis in step.axes]
        parts = [(to[axis], self.shards((axis,))) for axis in arriving]
        split = self._split(value, parts)
        split = self.transpose(split, [
            *(arriving.index(axis) for axis in leaving), *range(len(leaving), split.type.rank)
        ])  # fmt: skip
        local = list(split.type.shape)[len(leaving) :]
        sizes = [self.shards((axis,)) for axis in leaving]
        stacked = self.reshape(split, [math.prod(sizes), *local])
        exchanged = stablehlo.all_to_all(
            [stacked], 0, 0, math.prod(sizes), self._groups(leaving), **self._between()
        )
        parted = self.reshape(exchanged, [*sizes, *local])
        return self._merged(parted, [at[axis] for axis in leaving], len(local))

    def _same_order(self, step: ReshardStep, leaving: Sequence[str]) -> bool:
        return [a for axes in step.after for a in axes if a in step.axes] == [*leaving]

    def _combining(self, operation: Any, element: Any, combiner: str) -> Any:
        scalar = ir.RankedTensorType.get([], element)
        block = operation.regions[0].blocks.append(
            scalar, scalar, arg_locs=[ir.Location.current] * 2
        )
        with ir.InsertionPoint(block):
            stablehlo.return_([COMBINERS[combiner](*block.arguments).result])
        return operation.results[0]

    def _reduce_scatter(self, value: Any, step: ReshardStep, combiner: str) -> Any:
        new = {
            d: axes[len(step.before[d]) :]
            for d, axes in enumerate(step.after) if axes != step.before[d]
        }  # fmt: skip
        axes = tuple(axis for some in new.values() for axis in some)
        element, where = value.type.element_type, 0
        if len(new) == 1:
            (where,) = new
        else:
            value = self._split(value, [(d, self.shards(some)) for d, some in new.items()])
            value = self.reshape(value, [self.shards(axes), *value.type.shape[len(new) :]])
        shape = list(value.type.shape)
        shape[where] //= self.shards(axes)
        operation = stablehlo.ReduceScatterOp(
            ir.RankedTensorType.get(shape, element), value, where, self._groups(axes),
            use_global_device_ids=True, **self._between(),
        )  # fmt: skip
        result = self._combining(operation, element, combiner)
        return result if len(new) == 1 else self.reshape(result, shape[1:])

    def _all_reduce(self, value: Any, step: ReshardStep, combiner: str) -> Any:
        operation = stablehlo.AllReduceOp(
            [value.type], [value], self._groups(self._ordered(step.axes)),
            use_global_device_ids=True, **self._between(),
        )  # fmt: skip
        return self._combining(operation, value.type.element_type, combiner)
