"""Device meshes: named axes and their sizes."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toast.errors import MeshError

#: More axes of several devices than any machine has dimensions for.
MAX_AXES = 8
#: The most axes with those of one device, which cost nothing.
_MAX_NAMES = 64

#: Names of axes.
AXIS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIZE = re.compile(r"0*[1-9][0-9]{0,8}")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A logical mesh: axes from major to minor, each with its name and number of devices.

    Axes of one device are names only: they shard nothing (:attr:`real`).

    Raises :class:`toast.errors.MeshError` if there are no axes or too many, a name is invalid or
    occurs twice, a size is not positive, or ``order`` does not name every axis once.

    >>> Mesh.parse("data=4,model=2").devices
    8
    """

    #: Name and size of each axis, major to minor.
    axes: tuple[tuple[str, int], ...]
    #: The order of the devices, major to minor, if it differs from that of the axes: neighbours
    #: along the last axis are neighbours on the hardware.
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.axes, tuple | list) or not all(map(_is_axis, self.axes)):
            raise MeshError(
                f"mesh {self.axes!r}: give pairs of a name and a size, such as (('data', 4),), or "
                "Mesh.parse('data=4,model=4')"
            )
        if not self.axes:
            raise MeshError("mesh '': no axes; write axis=size, for example data=4,model=4")
        if len(self.axes) > _MAX_NAMES:
            raise MeshError(
                f"mesh of {len(self.axes)} axes, more than {_MAX_NAMES}; leave out axes of size 1"
            )
        for number, (name, size) in enumerate(self.axes):
            if not AXIS_NAME.fullmatch(name):
                raise MeshError(
                    f"mesh '{self}': '{name}' is not an axis name; use letters, digits and "
                    "underscores"
                )
            if size < 1:
                raise MeshError(
                    f"mesh '{self}': axis {name} has size '{size}'; write a positive number"
                )
            if name in self.names[:number]:
                raise MeshError(f"mesh '{self}': axis {name} occurs twice; rename one")
        if (several := sum(size > 1 for _, size in self.axes)) > MAX_AXES:
            raise MeshError(
                f"mesh '{self}': {several} axes of several devices, more than {MAX_AXES}; "
                "merge some"
            )
        if self.order and sorted(self.order) != sorted(self.names):
            raise MeshError(
                f"mesh '{self}': the device order {','.join(self.order)} does not name every "
                f"axis once; use each of {','.join(self.names)} once"
            )
        if self.order == self.names:
            object.__setattr__(self, "order", ())  # the default, so that equal meshes compare equal

    @staticmethod
    def parse(text: str) -> Mesh:
        """The mesh that a text such as ``"data=4,model=2"`` describes; blanks are ignored.

        ``"data=4,model=2@model,data"`` is the same mesh with its devices in another order: ``data``
        is the innermost axis.

        Raises :class:`toast.errors.MeshError` with one line: what is wrong and what to write.
        """
        if not isinstance(text, str):
            raise MeshError(f"mesh {text!r}: give text such as 'data=4,model=4'")
        axes: list[tuple[str, int]] = []
        sizes, at, order = text.partition("@")
        for part in sizes.split(",") if sizes.strip() else ():
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise MeshError(f"mesh '{text}': '{part}' is not axis=size; write data=4,model=4")
            if not _SIZE.fullmatch(size):
                raise MeshError(
                    f"mesh '{text}': axis {name} has size '{size}'; write a positive number "
                    "of at most 9 digits"
                )
            axes.append((name, int(size)))
        names = tuple(name.strip() for name in order.split(",")) if at else ()
        return Mesh(tuple(axes), names)

    @staticmethod
    def of(mesh: Any) -> Mesh:
        """A ``jax.sharding.Mesh`` or ``AbstractMesh`` as a :class:`Mesh`, with its device order.

        ``jax.make_mesh`` may wind an axis along a torus.  A device order that is not an order of
        axes counts as JAX's default order.

        A mapping from axis names to sizes is a mesh, too.

        Raises :class:`toast.errors.MeshError` for another object, for unnamed axes, and for a
        device that is in the mesh twice.
        """
        if isinstance(mesh, Mapping):
            return Mesh.parse(",".join(f"{name}={size}" for name, size in mesh.items()))
        if not hasattr(mesh, "axis_names"):
            raise MeshError(f"mesh {mesh!r}: use a mesh or a string such as data=4,model=4")
        if not all(isinstance(name, str) for name in mesh.axis_names):
            raise MeshError(f"mesh {mesh}: its axis names are not strings; use strings")
        axes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        if mesh.abstract_mesh is mesh or not axes:
            return Mesh(axes)
        devices = mesh.devices
        if len(set(devices.flat)) < devices.size:
            twice = next(d for d in devices.flat if [*devices.flat].count(d) > 1)
            raise MeshError(f"mesh {Mesh(axes)}: {twice} is in it twice; use each device once")
        place = {
            device: number for number, device in enumerate(sorted(devices.flat, key=_physical))
        }
        places = np.vectorize(place.__getitem__)(devices)
        strides = [
            int(places.take(1, axis).flat[0] - places.flat[0]) if size > 1 else 0
            for axis, size in enumerate(mesh.axis_sizes)
        ]
        order = sorted(range(len(axes)), key=lambda axis: -strides[axis])
        real = [axis for axis in order if strides[axis]]
        in_order = np.arange(places.size).reshape([mesh.axis_sizes[a] for a in order])
        reordered = real != sorted(real) and np.array_equal(places.transpose(order), in_order)
        return Mesh(axes, tuple(axes[a][0] for a in order) if reordered else ())

    @property
    def real(self) -> Mesh:
        """The mesh without its axes of one device; with its first axis if all have one device.

        States, prices and actions are those of this mesh.
        """
        axes = tuple(axis for axis in self.axes if axis[1] > 1) or self.axes[:1]
        if axes == self.axes:
            return self
        names = [name for name, _ in axes]
        return Mesh(axes, tuple(name for name in self.order if name in names))

    def sharding(self, spec: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        """``spec``, the axes of each dimension, without axes of one device."""
        ones = {name for name, size in self.axes if size == 1}
        return tuple(tuple(axis for axis in axes if axis not in ones) for axes in spec)

    @property
    def placed(self) -> tuple[int, ...]:
        """Axis numbers in the order of the devices, major to minor."""
        return tuple(map(self.names.index, self.order or self.names))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def devices(self) -> int:
        """Devices of the whole mesh."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.axes)
        return f"{sizes}@{','.join(self.order)}" if self.order else sizes


def _is_axis(axis: Any) -> bool:
    """Whether ``axis`` is a pair of a name and an integer."""
    if not isinstance(axis, tuple | list) or len(axis) != 2:
        return False
    name, size = axis
    return isinstance(name, str) and isinstance(size, numbers.Integral)


def _physical(device: Any) -> tuple[Any, ...]:
    """The position of a device: slice and coordinates on a TPU, else its number."""
    coordinates = getattr(device, "coords", None)
    if coordinates is None:
        return (device.id,)
    return (getattr(device, "slice_index", 0), *coordinates, getattr(device, "core_on_chip", 0))
