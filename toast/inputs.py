"""Converts the arguments of users to those of the stages; errors are one line."""

from __future__ import annotations

import math
import numbers
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from toast.errors import MeshError, SearchError
from toast.hardware import Hardware, Mesh, check_size, load, meshes_of, names

if TYPE_CHECKING:
    import jax

#: A :class:`Mesh`, a mesh of JAX, or text such as ``"data=4,model=4"``.
AnyMesh: TypeAlias = Union[str, Mapping[str, int], Mesh, "jax.sharding.Mesh"]
#: A :class:`Hardware`, a name such as ``"tpu-v5e"``, or the path of a file.
AnyHardware: TypeAlias = str | pathlib.Path | Hardware


def machine_of(hardware: AnyHardware) -> Hardware:
    """``hardware`` as a :class:`Hardware`; raises :class:`toast.errors.HardwareError`."""
    return hardware if isinstance(hardware, Hardware) else load(hardware)


#: The hardware of plans for devices that no hardware file describes, such as CPUs.
DEFAULT_HARDWARE = "tpu-v5e"


def machine_for(devices: Sequence[Any]) -> tuple[Hardware, str]:
    """The hardware of JAX devices, by their ``device_kind``, and a note if it is only a default."""
    kinds = {str(getattr(device, "device_kind", "")) for device in devices}
    kind = kinds.pop() if len(kinds) == 1 else ""
    for name in names():
        if kind and (machine := load(name)).device_kind == kind:
            return machine, ""
    described = f"devices of kind {kind!r}" if kind else "devices of several kinds"
    return load(DEFAULT_HARDWARE), (
        f"no hardware file describes {described}, so the plan is for {DEFAULT_HARDWARE}; pass "
        'hardware="NAME", or a hardware file'
    )


def mesh_of(mesh: AnyMesh) -> Mesh:
    """``mesh`` as a :class:`Mesh`; raises :class:`toast.errors.MeshError`."""
    if isinstance(mesh, Mesh):
        return mesh
    return Mesh.parse(mesh) if isinstance(mesh, str) else Mesh.of(mesh)


def system_of(mesh: AnyMesh, hardware: AnyHardware) -> tuple[Mesh, Hardware]:
    """A mesh and its hardware, which has systems of that size.

    Raises :class:`toast.errors.MeshError` and :class:`toast.errors.HardwareError`.
    """
    parsed, machine = mesh_of(mesh), machine_of(hardware)
    check_size(machine, parsed)
    return parsed, machine


def candidate_meshes(
    mesh: AnyMesh | None, devices: int | None, hardware: AnyHardware
) -> tuple[Mesh, ...]:
    """``mesh``, or all meshes of ``devices`` devices.

    Raises :class:`toast.errors.MeshError` unless exactly one of the two is set and fits the system.
    """
    if (mesh is None) == (devices is None):
        raise MeshError(
            f"{'neither a mesh nor' if mesh is None else 'both a mesh and'} a number of devices "
            "given; use either mesh='data=4,model=4' or devices=16",
            shell="use either --mesh data=4,model=4 or --devices 16",
        )
    if mesh is not None:
        return (system_of(mesh, hardware)[0],)
    if not is_whole(devices):
        raise MeshError(f"devices {devices!r}: use a whole number")
    return meshes_of(int(typing.cast(int, devices)), machine_of(hardware))


def limit_of(memory_bytes: float | None, hardware: Hardware) -> float:
    """The memory limit per device in bytes; by default that of the hardware.

    Raises :class:`toast.errors.SearchError` unless it is a positive finite number.
    """
    limit = hardware.memory_limit_bytes if memory_bytes is None else memory_bytes
    if not is_number(limit):
        raise SearchError(f"memory limit {limit!r}: use a number of bytes")
    if not 0 < limit < math.inf:  # nor NaN
        raise SearchError(
            f"memory limit of {limit:g} bytes ({limit / 2**30:g} GiB): must be positive and finite"
        )
    return float(limit)


#: The largest share of elements that padding may add to a dimension by default.
_UNEVEN = 0.5


def uneven_share(share: Any) -> float:
    """The largest share of elements that padding may add to a dimension; a half for ``None``.

    Raises :class:`toast.errors.SearchError` unless it is a number from 0 to 1.
    """
    if share is None:
        return _UNEVEN
    if not is_number(share) or not 0 <= share <= 1:
        raise SearchError(
            f"uneven={share!r}: use a share of added elements from 0 to 1, such as 0.5"
        )
    return float(share)


def safety_of(safety: Any) -> float | None:
    """The odds with which a plan must fit; ``None`` for no demand.

    Raises :class:`toast.errors.SearchError` unless they are between 0 and 1.
    """
    if safety is None:
        return None
    if not is_number(safety) or not 0 < safety < 1:  # nor NaN
        raise SearchError(
            f"safety {safety!r}: use the odds with which the plan must fit, between 0 and 1, such "
            "as 0.95"
        )
    return float(safety)


def is_whole(value: Any) -> bool:
    """Whether a value is an integer of Python or numpy, but not a boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python or numpy, but not a boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
