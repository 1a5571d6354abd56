"""The shardings of annotations (``toast.split`` and others) on a mesh."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from toast.errors import PinError
from toast.hardware import Mesh
from toast.program import Program

_Spec = tuple[tuple[str, ...] | None, ...]


def annotation_call(text: str) -> str:
    """The call in an annotation's text, such as ``split(0, 'data')``."""
    return str(json.loads(text)["call"])


def annotation_label(program: Program, op: int) -> str:
    """The call of an annotation and its source line: ``split(0, 'data') at model.py:12``."""
    place = program.location(op)
    where = f"{place.shown_file}:{place.line}" if place.file else str(place)
    return f"{annotation_call(program.annotations[op])} at {where}"


def annotation_labels(program: Program) -> tuple[str, ...]:
    """The labels of a program's annotations, each once."""
    return tuple(dict.fromkeys(annotation_label(program, op) for op in program.annotations))


def annotated_spec(text: str, mesh: Mesh, where: str, taken: Collection[str] = ()) -> _Spec:
    """The mesh axes of each dimension for an annotation.

    :param text: the annotation of the program.
    :param where: the beginning of errors: the annotation and its source line.
    :param taken: the axes of manual regions around it, which numbers of parts do not mean.
    :raises PinError: if the mesh cannot represent it, or if the number of parts is ambiguous.
    """
    content = json.loads(text)
    entries: list[Any] = content["entries"]
    if content["devices"]:
        return _tiles(entries, content["devices"], mesh, where)
    return tuple(
        entry if entry is None
        else _of_parts(entry, mesh, where, taken) if isinstance(entry, int)
        else tuple(entry)
        for entry in entries
    )  # fmt: skip


def _of_parts(parts: int, mesh: Mesh, where: str, taken: Collection[str]) -> tuple[str, ...]:
    if parts == 1:
        return ()
    axes = [axis for axis in mesh.real.axes if axis[0] not in taken]
    fitting = [
        tuple(name for name, _ in chosen)
        for count in range(1, len(axes) + 1)
        for chosen in itertools.combinations(axes, count)
        if math.prod(size for _, size in chosen) == parts
    ]
    if not fitting:
        raise PinError(f"{where}: no axes of mesh {mesh} have {parts} devices; change the mesh")
    if len(fitting) > 1:
        shown = " or ".join(", ".join(names) for names in fitting)
        raise PinError(f"{where}: {parts} parts may be along {shown} of mesh {mesh}; name the axes")
    return fitting[0]


def _tiles(entries: list[Any], devices: list[int], mesh: Mesh, where: str) -> _Spec:
    """The axes whose strides in the device order are those of a device assignment."""
    if len(devices) != mesh.devices:
        raise PinError(
            f"{where}: it has {len(devices)} devices, and mesh {mesh} has {mesh.devices}; use all"
        )
    sizes, strides, stride = dict(mesh.real.axes), {}, 1
    for name in reversed(mesh.real.order or mesh.real.names):
        strides[stride], stride = name, stride * sizes[name]
    shape = [entry for entry in entries if entry is not None]
    tiles = np.array(devices).reshape(shape)
    rows: list[tuple[str, ...]] = []
    for dim, parts in enumerate(shape):
        line = np.moveaxis(tiles, dim, 0).reshape(parts, -1)[:, 0]
        names: list[str] = []
        count = 1
        while count < parts:
            name = strides.get(int(line[count] - line[0]), "")
            if not name or parts % (count * sizes[name]):
                break
            names, count = [name, *names], count * sizes[name]
        rows.append(tuple(names))
    offsets = {name: at for at, name in strides.items()}
    expected = np.zeros((1,) * len(shape), dtype=int)
    for dim, row in enumerate(rows):
        line = np.zeros(1, dtype=int)
        for name in row:
            line = (line[:, None] + offsets[name] * np.arange(sizes[name])).ravel()
        expected = expected + line.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    if expected.shape != tiles.shape or (expected != tiles).any():
        raise PinError(
            f"{where}: it is no tiling by the axes of mesh {mesh}; use a mesh "
            "whose axes and device order it follows"
        )
    axes = iter(rows)
    return tuple(None if entry is None else next(axes) for entry in entries)
