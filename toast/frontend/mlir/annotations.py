"""Annotations of shardings in user code: GShard's ``replicate``, ``split`` and ``shard``.

An annotation is the identity.  JAX lowers it to no op; when TOAST traces a function, it becomes a
sharding constraint with a text, which :mod:`toast.space.annotated` resolves on a mesh.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.interpreters import mlir as jax_mlir

from toast.errors import PinError

#: What an annotation says of a dimension: axes, a number of parts, or ``None`` for nothing.
_Entry = tuple[str, ...] | int | None

# The source line of an annotation is that of the user's call.
source_info_util.register_exclusion(__file__)

annotation_p = Primitive("toast_annotation")
annotation_p.def_impl(lambda x, **_: x)
annotation_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(annotation_p, lambda cotangent, _, **params: [annotation_p.bind(cotangent, **params)])
jax_mlir.register_lowering(annotation_p, lambda _context, x, **_params: [x])


def _batched(values: Any, dims: Any, *, entries: tuple[_Entry, ...], **params: Any) -> Any:
    """Annotates the whole batch; its new dimension stays open."""
    (x,), (d,) = values, dims
    return annotation_p.bind(x, entries=(*entries[:d], None, *entries[d:]), **params), d


batching.primitive_batchers[annotation_p] = _batched


def annotation_text(*, call: str, entries: tuple[_Entry, ...], devices: tuple[int, ...]) -> str:
    """The text of an annotation in a module, from the parameters of its primitive."""
    return json.dumps({"call": call, "entries": entries, "devices": devices})


def replicate(x: Any) -> Any:
    """Annotates every array of ``x`` to be whole on every device, and returns it.

    :param x: an array, or a pytree of arrays.
    """

    def whole(leaf: Any) -> Any:
        rank = np.ndim(leaf)
        return _annotated(leaf, "replicate", ((),) * rank)

    return jax.tree.map(whole, x)


def split(x: Any, dim: int, axis_or_parts: str | Sequence[str] | int) -> Any:
    """Annotates ``x`` to be split along a dimension and whole along the others, and returns it.

    :param x: an array.
    :param dim: the dimension; negative numbers count from the last one.
    :param axis_or_parts: an axis of the plan's mesh, several axes from major to minor, or a number
        of parts: that of the devices along axes of the mesh.
    :raises toast.errors.PinError: for a dimension that ``x`` does not have, and for more parts than
        elements.
    """
    shape, name = np.shape(x), f"split({dim}, {axis_or_parts!r})"
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise PinError(f"{name}: the array has shape {shape}; use a dimension below {len(shape)}")
    entry: _Entry
    if isinstance(axis_or_parts, int | np.integer) and not isinstance(axis_or_parts, bool):
        entry = int(axis_or_parts)
        _check_parts(name, shape, dim % len(shape), entry)
    else:
        listed = (axis_or_parts,) if isinstance(axis_or_parts, str) else axis_or_parts
        if not isinstance(listed, tuple | list) or not all(isinstance(a, str) for a in listed):
            raise PinError(f"{name}: use an axis, a tuple of axes, or a number of parts")
        entry = tuple(listed)
    entries: list[_Entry] = [()] * len(shape)
    entries[dim] = entry
    return _annotated(x, name, tuple(entries))


def shard(x: Any, device_assignment: Any) -> Any:
    """Annotates ``x`` to be split into tiles on certain devices, and returns it.

    :param x: an array.
    :param device_assignment: the number of the device of each tile: an array of the rank of ``x``,
        whose shape is the number of parts along each dimension.  The devices of a plan's mesh are
        numbered in its device order.
    :raises toast.errors.PinError: for an assignment that is no permutation or of another rank, and
        for more parts than elements.
    """
    shape, tiles = np.shape(x), np.asarray(device_assignment)
    name = f"shard({np.array2string(tiles, separator=', ', threshold=8).replace(chr(10), '')})"
    if tiles.ndim != len(shape):
        raise PinError(f"{name}: it has {tiles.ndim} dimensions, and the array has {len(shape)}")
    if tiles.dtype.kind not in "iu" or sorted(tiles.flat) != [*range(tiles.size)]:
        raise PinError(
            f"{name}: it is no permutation of devices; use each of 0 to {tiles.size - 1} once"
        )
    for dim, parts in enumerate(tiles.shape):
        _check_parts(name, shape, dim, parts)
    return _annotated(x, name, tiles.shape, tuple(map(int, tiles.flat)))


def _check_parts(name: str, shape: tuple[int, ...], dim: int, parts: int) -> None:
    if not 1 <= parts <= shape[dim]:
        raise PinError(
            f"{name}: {parts} parts of dimension {dim}, which has {shape[dim]} elements; use 1 to "
            f"{shape[dim]} parts"
        )


def _annotated(
    x: Any, call: str, entries: tuple[_Entry, ...], devices: tuple[int, ...] = ()
) -> Any:
    return annotation_p.bind(jax.numpy.asarray(x), call=call, entries=entries, devices=devices)
