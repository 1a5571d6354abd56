"""Annotations of shardings in user code: GShard's ``replicate``, ``split`` and ``shard``.

An annotation is the identity.  JAX lowers it to a composite whose decomposition returns its
operand: XLA removes it, and it stays in ``jax.stages.Lowered``, in exports and in StableHLO files.
When TOAST reads a module, or lowers a function itself, it becomes a sharding constraint with a text
(:func:`toast.frontend.mlir.marks.read_annotations`), which :mod:`toast.space.annotated` resolves
on a mesh.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from toast.errors import PinError
from toast.frontend.mlir.marks import ANNOTATION, COMPOSITE

#: What an annotation says of a dimension: axes, a number of parts, or ``None`` for nothing.
_Entry = tuple[str, ...] | int | None

# The source line of an annotation is that of the user's call.
source_info_util.register_exclusion(__file__)

annotation_p = Primitive("toast_annotation")
annotation_p.def_impl(lambda x, **_: x)
annotation_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(annotation_p, lambda cotangent, _, **params: [annotation_p.bind(cotangent, **params)])


def _composite(context: Any, value: Any, **parameters: Any) -> list[Any]:
    """The annotation in a module of JAX: a composite of the identity."""
    body = context.module_context.module.body
    function = func.FuncOp(
        "toast_annotation", ([value.type], [value.type]), visibility="private",
        ip=ir.InsertionPoint(body),
    )  # fmt: skip
    context.module_context.symbol_table.insert(function)
    block = function.add_entry_block()
    func.ReturnOp([block.arguments[0]], ip=ir.InsertionPoint(block))
    text = annotation_text(rank=ir.RankedTensorType(value.type).rank, **parameters)
    composite = stablehlo.CompositeOp(
        [value.type], [value], name=ir.StringAttr.get(COMPOSITE),
        decomposition=ir.FlatSymbolRefAttr.get(function.name.value),
        composite_attributes=ir.DictAttr.get({ANNOTATION: ir.StringAttr.get(text)}),
    )  # fmt: skip
    return list(composite.results)


jax_mlir.register_lowering(annotation_p, _composite)


def _batched(values: Any, dims: Any, *, entries: tuple[_Entry, ...], **params: Any) -> Any:
    """Annotates the whole batch; its new dimension stays open."""
    (x,), (d,) = values, dims
    return annotation_p.bind(x, entries=(*entries[:d], None, *entries[d:]), **params), d


batching.primitive_batchers[annotation_p] = _batched


def annotation_text(
    *, rank: int, call: str, entries: tuple[_Entry, ...], devices: tuple[int, ...]
) -> str:
    """The text of an annotation in a module, from the parameters of its primitive.

    ``rank`` is that of the tensor there: the words of random keys are whole.
    """
    entries += ((),) * (rank - len(entries))
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
    if not shape:
        raise PinError(f"{name}{_place()}: the array is a scalar; use toast.replicate")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise PinError(
            f"{name}{_place()}: the array has shape {shape}; use a dimension below {len(shape)}"
        )
    entry: _Entry
    if isinstance(axis_or_parts, int | np.integer) and not isinstance(axis_or_parts, bool):
        entry = int(axis_or_parts)
        _check_parts(name, shape, dim % len(shape), entry)
    else:
        listed = (axis_or_parts,) if isinstance(axis_or_parts, str) else axis_or_parts
        if not isinstance(listed, tuple | list) or not all(isinstance(a, str) for a in listed):
            raise PinError(f"{name}{_place()}: use an axis, a tuple of axes, or a number of parts")
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
    shape = np.shape(x)
    try:
        tiles = np.asarray(device_assignment)
    except ValueError:
        raise PinError(
            f"shard{_place()}: the rows of the device assignment have different lengths; use one "
            "device for each tile"
        ) from None
    name = f"shard({np.array2string(tiles, separator=', ', threshold=8).replace(chr(10), '')})"
    if tiles.ndim != len(shape):
        raise PinError(
            f"{name}{_place()}: it has {tiles.ndim} dimensions, and the array has {len(shape)}; "
            "use 1 for a dimension that stays whole"
        )
    if tiles.dtype.kind not in "iu" or sorted(tiles.flat) != [*range(tiles.size)]:
        raise PinError(
            f"{name}{_place()}: it is no permutation of devices; use each of 0 to "
            f"{tiles.size - 1} once"
        )
    for dim, parts in enumerate(tiles.shape):
        _check_parts(name, shape, dim, parts)
    return _annotated(x, name, tiles.shape, tuple(map(int, tiles.flat)))


def _check_parts(name: str, shape: tuple[int, ...], dim: int, parts: int) -> None:
    if not 1 <= parts <= shape[dim]:
        raise PinError(
            f"{name}{_place()}: {parts} parts of dimension {dim}, which has {shape[dim]} elements; "
            f"use 1 to {shape[dim]} parts"
        )


def _place() -> str:
    """``" at model.py:12"``, the user's line that is being traced; empty if there is none."""
    frame = sys._getframe()
    own = __file__, os.path.join(os.path.dirname(jax.__file__), "")
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    file = frame.f_code.co_filename.removeprefix(os.path.join(os.getcwd(), ""))
    return f" at {file}:{frame.f_lineno}"


def _annotated(
    x: Any, call: str, entries: tuple[_Entry, ...], devices: tuple[int, ...] = ()
) -> Any:
    return annotation_p.bind(jax.numpy.asarray(x), call=call, entries=entries, devices=devices)
