"""The meshes of plans on devices: their devices, the names of their axes, their platforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils

from toast.errors import PlanError
from toast.hardware import Mesh
from toast.program import Shardings, Spec

#: The devices of a plan: a mesh, or devices in any order.
Devices: TypeAlias = jax.sharding.Mesh | Sequence[Any]


def jax_mesh(shardings: Shardings, devices: Devices | None = None) -> jax.sharding.Mesh:
    """The plan's mesh on real devices, with each axis along links of the hardware if possible.

    :param devices: a ``jax.sharding.Mesh``, which stays as it is, or a list of devices; by default
        ``jax.devices()``.
    :raises toast.errors.PlanError: if there are too few devices, or the mesh has other sizes.
    """
    return on_devices(shardings, devices)[0]


def on_devices(
    shardings: Shardings, devices: Devices | None = None
) -> tuple[jax.sharding.Mesh, Shardings]:
    """The mesh of :func:`jax_mesh`, and the shardings in the names of its axes.

    A ``jax.sharding.Mesh`` keeps its devices, its axis types and its names, so that results can be
    used with other arrays on it.  Its axes of several devices are those of the plan with the same
    names or, if the names differ, in the same order.
    """
    mesh = shardings.mesh
    if isinstance(devices, jax.sharding.Mesh):
        manual = [
            name for name, kind in zip(devices.axis_names, devices.axis_types, strict=True)
            if kind == jax.sharding.AxisType.Manual
        ]  # fmt: skip
        if manual:
            raise PlanError(
                f"mesh axes {', '.join(manual)} are Manual; give a mesh whose axes are Auto or "
                "Explicit, as jax.make_mesh makes them"
            )
        return devices, _renamed(shardings, devices)
    try:
        available = list(jax.devices() if devices is None else devices)
    except TypeError:
        raise PlanError(
            f"devices {devices!r}: give a jax.sharding.Mesh, or a list of devices"
        ) from None
    if isinstance(devices, str) or not all(isinstance(d, jax.Device) for d in available):
        raise PlanError(
            f"devices {devices!r}: give a jax.sharding.Mesh, or a list of devices such as "
            "jax.devices()"
        )
    if len(set(available)) < len(available):
        twice = next(device for device in available if available.count(device) > 1)
        raise PlanError(f"devices: {twice} is listed twice; list each device once")
    if len(available) < mesh.devices:
        raise PlanError(
            f"mesh {mesh} needs {mesh.devices} devices, but JAX has {len(available)}; to run on "
            "CPU devices, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.devices}"
        )
    grid = device_grid(mesh, available[: mesh.devices])
    return jax.sharding.Mesh(grid, mesh.names), shardings


def axis_names(mesh: Mesh, devices: Devices | None) -> dict[str, str]:
    """The axes of ``devices``, if they are a ``jax.sharding.Mesh``, by those of a plan's ``mesh``.

    An axis of one device that it lacks is left out.  Raises :class:`toast.errors.PlanError` if its
    sizes are not those of ``mesh``.
    """
    if not isinstance(devices, jax.sharding.Mesh):
        return {name: name for name in mesh.names}
    other = Mesh.of(devices)
    ours, theirs = ([axis for axis in m.axes if axis[1] > 1] for m in (mesh, other))
    ones = {name for name, size in other.axes if size == 1}
    if dict(ours) == dict(theirs):
        names = {name: name for name, _ in ours}
    elif [size for _, size in ours] == [size for _, size in theirs]:
        names = {name: own for (name, _), (own, _) in zip(ours, theirs, strict=True)}
    else:
        raise PlanError(
            f"the plan is for mesh {mesh}, not {other}; make a new plan, or "
            "use a mesh of the same sizes"
        )
    return names | {name: name for name, size in mesh.axes if size == 1 and name in ones}


def _renamed(shardings: Shardings, devices: jax.sharding.Mesh) -> Shardings:
    """Shardings in the axis names of a mesh; an axis of one device that it lacks is left out."""
    names, other = axis_names(shardings.mesh, devices), Mesh.of(devices)
    if other.axes == shardings.mesh.axes:
        return shardings

    def renamed(spec: Spec) -> Spec:
        return tuple(tuple(names[axis] for axis in axes if axis in names) for axes in spec)

    return Shardings(
        other,
        {value: renamed(spec) for value, spec in shardings.values.items()},
        {use: renamed(spec) for use, spec in shardings.uses.items()},
        tuple(map(renamed, shardings.results)),
        {value: renamed(spec) for value, spec in shardings.sums.items()},
        {axis: names[own] for axis, own in shardings.manual_axes.items()},
    )


def device_grid(mesh: Mesh, devices: Sequence[Any]) -> Any:
    """The devices as an array of the shape of ``mesh``, in JAX's best order for their links.

    If the mesh has its own device order, its axes are placed in that order.
    """
    sizes = [mesh.sizes[axis] for axis in mesh.placed]
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    outermost = [math.prod(sizes[:end]) for end in range(len(sizes) + 1)]
    try:
        if slices > 1 and slices in outermost:
            # The first axes go over slices, which a network joins, the others stay inside.
            end = outermost.index(slices)
            ones = [1] * end, [1] * (len(sizes) - end)
            grid = mesh_utils.create_hybrid_device_mesh(
                [*ones[0], *sizes[end:]], [*sizes[:end], *ones[1]], devices,
                allow_split_physical_axes=True,
            )  # fmt: skip
        else:
            grid = mesh_utils.create_device_mesh(
                sizes, devices, allow_split_physical_axes=True, contiguous_submeshes=False
            )
    except (AssertionError, NotImplementedError, ValueError):  # for example a part of a torus
        grid = np.array(devices, dtype=object).reshape(sizes)
    return grid.transpose(np.argsort(mesh.placed))


def platform_of(devices: Devices | None) -> str:
    """The platform that a program for these devices is lowered for, in JAX's words."""
    if devices is None or isinstance(devices, jax.sharding.Mesh):
        return mesh_platform(devices)
    try:
        first = next(iter(devices), None)
    except TypeError:
        return mesh_platform(None)  # :func:`on_devices` reports it
    return _lowering_platform(str(getattr(first, "platform", jax.default_backend())))


def mesh_platform(mesh: jax.sharding.Mesh | None) -> str:
    """The platform to compile for: that of the mesh's devices, or JAX's default without a mesh."""
    return _lowering_platform(
        jax.default_backend() if mesh is None else str(mesh.devices.flat[0].platform)
    )


def _lowering_platform(platform: str) -> str:
    """The platform of devices, in the words of ``lowering_platforms``."""
    if platform == jax.default_backend():
        return str(jax.export.default_export_platform())
    return {"gpu": "cuda"}.get(platform, platform)
