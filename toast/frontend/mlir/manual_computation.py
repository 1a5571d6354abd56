"""Manual regions (``sdy.manual_computation``, from ``jax.shard_map``): read, and moved to a mesh.

A region names axes of the program's mesh, and its collectives name devices by their numbers on that
mesh.  A plan has a mesh of its own, with other axes or another order.  So the axes of a region are
renamed, and the numbers of devices are replaced by those on the plan's mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from toast.errors import TargetError
from toast.frontend.mlir.modules import walk
from toast.frontend.mlir.ops import call_target

#: The axes of each dimension, major to minor.
Spec = tuple[tuple[str, ...], ...]
Ints = npt.NDArray[np.int64]

REGION = "sdy.manual_computation"

#: The attributes with the devices that communicate.
_GROUPS, _PAIRS = "replica_groups", "source_target_pairs"
DEVICES = frozenset({_GROUPS, _PAIRS})

#: The target of ``jax.lax.ragged_all_to_all``, a custom call with its groups in a dictionary.
_RAGGED, _CONFIG, _CHANNEL = "ragged_all_to_all", "backend_config", "channel_id"

#: The channel of the first collective of the program's own regions in a lowered program; those
#: that the lowering adds have smaller ones.
_FIRST_CHANNEL = 1_000_000

#: Ops that may do nothing.
_MAY_IDLE = frozenset({
    "sdy.sharding_constraint", "stablehlo.all_reduce", "stablehlo.all_gather",
    "stablehlo.reduce_scatter", "stablehlo.all_to_all", "stablehlo.collective_broadcast",
    "stablehlo.collective_permute",
})  # fmt: skip

#: Ops of a body that computes nothing but the position of a device on the mesh.
_POSITION = frozenset({
    f"stablehlo.{name}"
    for name in ("partition_id", "constant", "divide", "remainder", "convert", "reshape")
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RegionMesh:
    """The mesh of a program's regions."""

    #: Names and sizes, major to minor.
    axes: tuple[tuple[str, int], ...]
    #: The devices in the order of the axes, by number; empty for 0, 1, 2 and so on.
    devices: tuple[int, ...] = ()

    def places(self, devices: Ints) -> Ints:
        """``[..., axes]`` the position of devices (by number) along each axis."""
        sizes = [size for _, size in self.axes]
        if self.devices:
            places = np.zeros(max(self.devices) + 1, dtype=np.int64)
            places[list(self.devices)] = np.arange(len(self.devices))
            devices = places[devices]
        return np.stack(np.unravel_index(devices, sizes), axis=-1)


@dataclasses.dataclass(frozen=True)
class Region:
    """A manual region; axes of one device are left out."""

    operation: Any
    mesh: RegionMesh
    #: Its axes with their sizes; none for a region that only computes the position of a device.
    axes: tuple[tuple[str, int], ...]
    #: The axes of the region that split each dimension of its operands and results.
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    #: Whether it only computes the position of a device along axes of the regions around it: JAX
    #: makes all other axes manual for that.
    position: bool


def read_region(operation: Any, mesh: RegionMesh | None) -> Region:
    """Reads an ``sdy.manual_computation``.

    :param mesh: the mesh of the region around it, if any.
    :raises toast.errors.TargetError: for parts of axes, and unreduced values.
    """
    sides = [operation.attributes[side] for side in ("in_shardings", "out_shardings")]
    shardings = [
        [*map(sdy.TensorShardingAttr, sdy.TensorShardingPerValueAttr(side).shardings)]
        for side in sides
    ]
    for sharding in itertools.chain(*shardings):
        mesh = _mesh(operation, sharding.mesh_or_ref)
        break
    if mesh is None:
        mesh = RegionMesh(())
    names = re.findall(r'"((?:[^"\\]|\\.)*)"', str(operation.attributes["manual_axes"]))
    position = _is_position(operation)
    axes = tuple(axis for axis in mesh.axes if axis[0] in names and axis[1] > 1)
    operands, results = (
        tuple(_split(sharding, dict(axes)) for sharding in side) for side in shardings
    )
    return Region(operation, mesh, () if position else axes, operands, results, position)


def _mesh(operation: Any, mesh: Any) -> RegionMesh:
    if isinstance(mesh, ir.FlatSymbolRefAttr):
        return _named_mesh(operation, mesh.value)
    return _read_mesh(sdy.MeshAttr(mesh))


def _named_mesh(operation: Any, name: str) -> RegionMesh:
    for op in _module_of(operation).regions[0].blocks[0].operations:
        attributes = op.operation.attributes
        if op.operation.name == "sdy.mesh" and ir.StringAttr(attributes["sym_name"]).value == name:
            return _read_mesh(sdy.MeshAttr(attributes["mesh"]))
    raise TargetError(f"the mesh @{name} of a region is not defined; add it to the module")


def _read_mesh(mesh: Any) -> RegionMesh:
    axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
    return RegionMesh(tuple((str(a.name), int(a.size)) for a in axes), tuple(mesh.device_ids))


def _split(sharding: Any, axes: Mapping[str, int]) -> Spec:
    """The axes among ``axes`` of each dimension."""
    if list(sharding.unreduced_axes):
        raise TargetError("shard_map with unreduced values is not supported; use jax.lax.psum")
    spec = []
    for dimension in sharding.dimension_shardings:
        named = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        held = [axis for axis in named if str(axis.name) in axes]
        if any(axis.sub_axis_info is not None for axis in held):
            raise TargetError("a manual region uses a part of a mesh axis; use whole axes")
        spec.append(tuple(str(axis.name) for axis in held))
    return tuple(spec)


def _is_position(operation: Any) -> bool:
    body = [op.operation for op in operation.regions[0].blocks[0].operations]
    return (
        not len(operation.operands)
        and any(op.name == "stablehlo.partition_id" for op in body)
        and all(op.name in _POSITION for op in body[:-1])
    )


def names_devices(operation: Any) -> bool:
    """Whether an op is a collective that names devices by their numbers, or by axes."""
    return bool(DEVICES & {*_communication(operation)})


def _communication(operation: Any) -> dict[str, Any]:
    """The attributes of an op, or those in the dictionary of a ``ragged_all_to_all``."""
    stated = {name: operation.attributes[name] for name in operation.attributes}
    config = stated.get(_CONFIG)
    if isinstance(config, ir.DictAttr) and call_target(operation) == _RAGGED:
        return {attribute.name: attribute.attr for attribute in config}
    return stated


def collective_axes(operation: Any, mesh: RegionMesh) -> tuple[str, ...]:
    """The axes of several devices over which a collective in a region communicates.

    Empty for other ops.  Groups that are parts of an axis count as the whole axis.
    """
    attributes = _communication(operation)
    if _GROUPS in attributes:
        if (named := _named_groups(attributes[_GROUPS])) is not None:
            return tuple(name for name, size in mesh.axes if name in named and size > 1)
        groups = _rows(attributes[_GROUPS])
        places = [mesh.places(row[row >= 0]) for row in groups]
        varies = [(place != place[:1]).any(axis=0) for place in places if len(place)]
    elif _PAIRS in attributes:
        pairs = _rows(attributes[_PAIRS])
        varies = [(mesh.places(pairs[:, 0]) != mesh.places(pairs[:, 1])).any(axis=0)]
    else:
        return ()
    moved = functools.reduce(np.logical_or, varies, np.zeros(len(mesh.axes), dtype=bool))
    return tuple(name for (name, _), here in zip(mesh.axes, moved.tolist(), strict=True) if here)


def _named_groups(attribute: Any) -> list[str] | None:
    """The axes of groups that are stated by axes; ``None`` for groups of numbers."""
    if not stablehlo.ReplicaGroupMeshAxesAttr.isinstance(attribute):
        return None
    _, _, axes = str(attribute).rpartition("axes = [")
    if "sub_axis_info" in axes:
        raise TargetError("a collective uses a part of a mesh axis; use whole axes")
    return re.findall(r'name = "((?:[^"\\]|\\.)*)"', axes)


def _members(attribute: Any, mesh: RegionMesh) -> Ints:
    """``[groups, members]`` the numbers of devices in each group; -1 for none."""
    named = _named_groups(attribute)
    if named is None:
        return _rows(attribute)
    sizes = [size for _, size in mesh.axes]
    devices = np.arange(math.prod(sizes))
    # Members of a group are in the order of the stated axes.
    position = {name: number for number, (name, _) in enumerate(mesh.axes)}
    over = [position[name] for name in named]
    rest = [number for number in range(len(sizes)) if number not in over]
    width = math.prod(sizes[number] for number in over)
    groups = devices.reshape(sizes).transpose([*rest, *over]).reshape(-1, width)
    return np.array(mesh.devices)[groups] if mesh.devices else groups


def _rows(attribute: Any) -> Ints:
    dense = ir.DenseIntElementsAttr(attribute)
    shape = list(ir.RankedTensorType(dense.type).shape)
    return np.array([*dense], dtype=np.int64).reshape(shape)


def drop_idle_ops(module: ir.Module) -> None:
    """Removes sharding constraints that constrain nothing, and collectives of single devices.

    JAX adds such constraints to the values of a ``shard_map`` that does not take all axes.  Over
    axes of one device, it inlines the body, and keeps the collectives.
    """
    for operation in reversed([*walk(module.body)]):  # those inside others first
        if _is_idle(operation):
            for result, operand in zip(operation.results, operation.operands, strict=True):
                result.replace_all_uses_with(operand)
            operation.erase()


def _is_idle(operation: Any) -> bool:
    name = operation.name
    if name not in _MAY_IDLE:
        return False
    attributes = operation.attributes
    if name == "sdy.sharding_constraint":
        sharding = sdy.TensorShardingAttr(attributes["sharding"])
        if not _mesh(operation, sharding.mesh_or_ref).axes:
            return False  # it names a value, now or when the program was first read
        dims = [sdy.DimensionShardingAttr(d) for d in sharding.dimension_shardings]
        return not any(len(d.axes) or d.is_closed for d in dims)
    # Without a channel, it is a collective of replicas.
    if "channel_handle" not in attributes or "handle = 0" in str(attributes["channel_handle"]):
        return False
    if [o.type for o in operation.operands] != [r.type for r in operation.results]:
        return False
    if _GROUPS in attributes:
        named = _named_groups(attributes[_GROUPS])
        if named is None:
            return bool(_rows(attributes[_GROUPS]).shape[-1] == 1)
        mesh = re.search(r"mesh = @([\w.$-]+)", str(attributes[_GROUPS]))
        sizes = dict(_named_mesh(operation, mesh[1]).axes) if mesh else {}
        return all(sizes.get(name, 2) == 1 for name in named)
    if _PAIRS in attributes:
        # A device that receives nothing has zeros, so all devices must have a pair.
        pairs = _rows(attributes[_PAIRS])
        return bool(_devices(operation) == len(pairs) and (pairs[:, 0] == pairs[:, 1]).all())
    return False


def _devices(operation: Any) -> int:
    """The number of devices of the first mesh in the module of an operation; 0 without a mesh."""
    for op in _module_of(operation).regions[0].blocks[0].operations:
        if op.operation.name == "sdy.mesh":
            mesh = _read_mesh(sdy.MeshAttr(op.operation.attributes["mesh"]))
            return math.prod(size for _, size in mesh.axes)
    return 0


def _module_of(operation: Any) -> Any:
    while operation.parent is not None:
        operation = operation.parent
    return operation


class Regions:
    """The manual regions of a module, read before its meshes are removed."""

    def __init__(self, module: ir.Module) -> None:
        self._module = module
        #: Outer regions come before those inside them; with the regions around each.
        self._regions: list[tuple[Region, tuple[Region, ...]]] = []
        #: Ops that name devices, with the regions around them.
        self._ops: list[tuple[Any, tuple[Region, ...]]] = []
        self._read(module.body, ())

    def __bool__(self) -> bool:
        return bool(self._regions)

    def _read(self, block: Any, around: tuple[Region, ...]) -> None:
        for op in block.operations:
            operation, inside = op.operation, around
            if operation.name == REGION:
                region = read_region(operation, around[-1].mesh if around else None)
                self._regions.append((region, around))
                inside = (*around, region)
            elif around and (
                operation.name == "stablehlo.partition_id" or names_devices(operation)
            ):
                self._ops.append((operation, around))
            for part in operation.regions:
                for inner in part.blocks:
                    self._read(inner, inside)

    def mesh(self) -> RegionMesh:
        """The mesh of the first region."""
        return self._regions[0][0].mesh

    def write(
        self,
        mesh: str,
        axes: Sequence[tuple[str, int]],
        renamed: Mapping[str, str],
        shardings: Callable[[Any], tuple[Sequence[Spec], Sequence[Spec]] | None],
    ) -> None:
        """Moves the regions to another mesh.

        :param mesh: the name of the new mesh in the module.
        :param axes: the names and sizes of its axes.
        :param renamed: its axis for each axis of the regions.
        :param shardings: the shardings of the operands and results of a region, by its operation;
            for ``None``, those that the region needs, open for further axes.
        """
        target = _Target(mesh, tuple(axes), dict(renamed))
        with self._module.context:
            for number, (operation, around) in enumerate(self._ops, 1):
                if operation.name == "stablehlo.partition_id":
                    target.replace_position(operation, around)
                else:
                    target.set_devices(operation, around[-1].mesh, number)
            for region, around in self._regions:
                target.set_region(region, around, shardings(region.operation))

    def inline(self, axes: Sequence[tuple[str, int]], renamed: Mapping[str, str]) -> None:
        """Replaces regions by their bodies, in a computation that is manual over a whole mesh.

        Ops that name devices get their numbers on this mesh.  ``axes`` has its names and sizes,
        ``renamed`` its axis for each axis of the regions.
        """
        target = _Target("", tuple(axes), dict(renamed))
        with self._module.context:
            for number, (operation, around) in enumerate(self._ops, _FIRST_CHANNEL):
                if operation.name == "stablehlo.partition_id":
                    target.replace_number(operation, around)
                else:
                    target.set_devices(operation, around[-1].mesh, number)
        for region, _ in reversed(self._regions):
            (block,) = region.operation.regions[0].blocks
            for argument, operand in zip(block.arguments, region.operation.operands, strict=True):
                argument.replace_all_uses_with(operand)
            *body, end = [op.operation for op in block.operations]
            for operation in body:
                operation.move_before(region.operation)
            for result, value in zip(region.operation.results, end.operands, strict=True):
                result.replace_all_uses_with(value)
            region.operation.erase()


@dataclasses.dataclass(frozen=True)
class _Target:
    """The mesh to which regions are moved."""

    mesh: str
    axes: tuple[tuple[str, int], ...]
    renamed: Mapping[str, str]

    def taken(self, regions: Sequence[Region]) -> list[str]:
        """The axes that regions take, in the order of the mesh."""
        taken: set[str] = set()
        for region in regions:
            mine = {self.renamed[name] for name, _ in region.axes}
            taken |= {name for name, size in self.axes if size > 1} if region.position else mine
        return [name for name, _ in self.axes if name in taken]

    def set_region(
        self,
        region: Region,
        around: tuple[Region, ...],
        shardings: tuple[Sequence[Spec], Sequence[Spec]] | None,
    ) -> None:
        before = self.taken(around)
        mine = [name for name in self.taken([region]) if name not in before]
        attributes = region.operation.attributes
        for side, specs, given in (
            ("in_shardings", region.operands, shardings and shardings[0]),
            ("out_shardings", region.results, shardings and shardings[1]),
        ):
            renamed = [
                tuple(tuple(self.renamed[axis] for axis in axes) for axes in spec) for spec in specs
            ]
            attributes[side] = sdy.TensorShardingPerValueAttr.get(
                [self._sharding(spec, False) for spec in renamed]
                if given is None
                else [
                    self._sharding(_first(spec, own, {*before, *mine}), True)
                    for spec, own in zip(given, renamed, strict=True)
                ]
            )
        named = ", ".join(f'"{name}"' for name in mine)
        attributes["manual_axes"] = ir.Attribute.parse(f"#sdy<manual_axes{{{named}}}>")

    def _sharding(self, spec: Spec, closed: bool) -> Any:
        dims = [
            sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(a) for a in axes], is_closed=closed)
            for axes in spec
        ]
        return sdy.TensorShardingAttr.get(self.mesh, dims)

    def set_devices(self, operation: Any, mesh: RegionMesh, channel: int) -> None:
        """Replaces the numbers of devices by those on the new mesh.

        :param channel: the collective's channel.  JAX gives all the same; distinct ones tell them
            apart in XLA's text.
        """
        stated, written = _communication(operation), operation.attributes
        if _PAIRS in stated:
            pairs = self._elsewhere(_rows(stated[_PAIRS]), mesh)
            written[_PAIRS] = _dense(pairs.reshape(-1, 2))
        elif _GROUPS in written:
            written[_GROUPS] = _dense(self._elsewhere(_members(stated[_GROUPS], mesh), mesh))
        else:
            groups = _dense(self._elsewhere(_members(stated[_GROUPS], mesh), mesh))
            number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), channel)
            written[_CONFIG] = ir.DictAttr.get({**stated, _GROUPS: groups, _CHANNEL: number})
            return
        written["channel_handle"] = ir.Attribute.parse(
            f"#stablehlo.channel_handle<handle = {channel}, type = 1>"
        )

    def _elsewhere(self, rows: Ints, mesh: RegionMesh) -> Ints:
        """Rows of devices on the new mesh: those of each position along the axes of no region."""
        places = mesh.places(np.maximum(rows, 0))
        free = [n for n, (name, _) in enumerate(mesh.axes) if name not in self.renamed]
        first = (places[..., free] == 0).all(axis=-1) | (rows < 0)
        rows, places = rows[first.all(axis=-1)], places[first.all(axis=-1)]
        strides = self._strides()
        numbers = np.zeros(rows.shape, dtype=np.int64)
        for n, (name, _) in enumerate(mesh.axes):
            if name in self.renamed:
                numbers += places[..., n] * strides[self.renamed[name]]
        others = [axis for axis in self.axes if axis[0] not in self.renamed.values()]
        offsets = np.zeros(1, dtype=np.int64)
        for name, size in others:
            offsets = (offsets[:, None] + np.arange(size) * strides[name]).reshape(-1)
        moved = numbers + offsets[:, None, None]
        return np.where(rows < 0, rows, moved).reshape(-1, rows.shape[-1])

    def _strides(self) -> dict[str, int]:
        """The distance of neighbouring devices along each axis."""
        sizes = [size for _, size in self.axes]
        return {name: math.prod(sizes[n + 1 :]) for n, (name, _) in enumerate(self.axes)}

    def _places(self, mesh: RegionMesh) -> Ints:
        """The number on ``mesh`` of each device of the new mesh; 0 along axes of no region."""
        sizes = [size for _, size in self.axes]
        coordinates = np.unravel_index(np.arange(math.prod(sizes)), sizes)
        along = {name: coordinates[n] for n, (name, _) in enumerate(self.axes)}
        number = np.zeros(math.prod(sizes), dtype=np.int64)
        for name, size in mesh.axes:
            own = along[self.renamed[name]] if name in self.renamed else 0
            number = number * size + own
        return np.array(mesh.devices, dtype=np.int64)[number] if mesh.devices else number

    def replace_number(self, operation: Any, around: tuple[Region, ...]) -> None:
        """Replaces the number of a device by that on the program's mesh, where all are manual."""
        places = self._places(around[-1].mesh)
        if (places == np.arange(len(places))).all():
            return
        with operation.location:
            position = stablehlo.PartitionIdOp(ip=ir.InsertionPoint(operation))
            number = _looked_up(position.result, places, ir.InsertionPoint(operation))
        operation.results[0].replace_all_uses_with(number)
        operation.erase()

    def replace_position(self, operation: Any, around: tuple[Region, ...]) -> None:
        """Replaces the number of a device by that on the program's mesh."""
        places = self._places(around[-1].mesh)
        taken = self.taken(around)
        rest = [name for name, size in self.axes if size > 1 and name not in taken]
        if not rest and (places == np.arange(len(places))).all():
            return
        type_ = operation.results[0].type
        with operation.location:
            if not rest:
                position = stablehlo.PartitionIdOp(ip=ir.InsertionPoint(operation))
                found = _looked_up(position.result, places, ir.InsertionPoint(operation))
            else:
                # Only where all axes are manual does a device know its number.
                named = ", ".join(f'"{name}"' for name in rest)
                region = sdy.ManualComputationOp(
                    [type_], [], sdy.TensorShardingPerValueAttr.get([]),
                    sdy.TensorShardingPerValueAttr.get([self._sharding((), True)]),
                    ir.Attribute.parse(f"#sdy<manual_axes{{{named}}}>"),
                    ip=ir.InsertionPoint(operation),
                )  # fmt: skip
                block = region.operation.regions[0].blocks.append()
                inside = ir.InsertionPoint(block)
                position = stablehlo.PartitionIdOp(ip=inside)
                sdy.ReturnOp([_looked_up(position.result, places, inside)], ip=inside)
                found = region.results[0]
        operation.results[0].replace_all_uses_with(found)
        operation.erase()


def _first(spec: Spec, own: Spec, taken: set[str]) -> Spec:
    """``spec`` with the axes of a region first, where they split a dimension, and only there."""
    return tuple(
        (*mine, *(axis for axis in axes if axis not in taken))
        for axes, mine in zip(spec, own, strict=True)
    )


def _dense(rows: Ints) -> Any:
    return ir.DenseIntElementsAttr.get(
        np.ascontiguousarray(rows), type=ir.IntegerType.get_signless(64)
    )


def _looked_up(index: Any, table: Ints, place: Any) -> Any:
    """Element ``index`` of a table, an unsigned number."""
    element = ir.RankedTensorType(index.type).element_type
    values = ir.DenseElementsAttr.get(
        table.astype(np.uint32), type=ir.RankedTensorType.get([len(table)], element)
    )
    constant = stablehlo.ConstantOp(values, ip=place)
    slice_ = stablehlo.DynamicSliceOp(
        constant.result, [index], ir.DenseI64ArrayAttr.get([1]), ip=place
    )
    return stablehlo.ReshapeOp(index.type, slice_.result, ip=place).result
