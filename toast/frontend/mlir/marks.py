"""Names and annotations of values in modules: constraints that say nothing but a text."""

from __future__ import annotations

import itertools
import json
import math
from typing import Annotated, Any

import msgspec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from toast.boundary.printable import printable, shortened
from toast.boundary.typed import Misfit, checked
from toast.errors import TargetError
from toast.frontend.mlir.modules import walk

#: The attribute with the name that ``checkpoint_name`` gives a value.
NAME = "toast_name"

#: The attribute with the text of an annotation.
ANNOTATION = "toast_annotation"

#: The name of the composite that JAX lowers an annotation to.
COMPOSITE = "toast.annotation"


def marked(value: Any, key: str, text: str) -> Any:
    """A constraint of ``value`` that says nothing but a text."""
    anything = sdy.DimensionShardingAttr.get([], is_closed=False)
    rank = ir.RankedTensorType(value.type).rank
    sharding = sdy.TensorShardingAttr.get(sdy.MeshAttr.get([]), [anything] * rank)
    constraint = sdy.ShardingConstraintOp(value, sharding)
    constraint.operation.attributes[key] = ir.StringAttr.get(text)
    return constraint.result


def read_annotations(module: ir.Module) -> None:
    """Replaces the composites of annotations by constraints, as :func:`keeping_names` writes them.

    A composite of that name that is no annotation stays.
    """
    for operation in list(walk(module.body)):
        if operation.name != "stablehlo.composite" or len(operation.operands) != 1:
            continue
        attributes = operation.attributes
        if attributes["name"].value != COMPOSITE or "composite_attributes" not in attributes:
            continue
        content = ir.DictAttr(attributes["composite_attributes"])
        (value,), (result,) = operation.operands, operation.results
        if (
            ANNOTATION not in content
            or not isinstance(content[ANNOTATION], ir.StringAttr)
            or not isinstance(value.type, ir.RankedTensorType)
            or value.type != result.type
        ):
            continue
        with module.context, operation.location, ir.InsertionPoint(operation):
            constraint = marked(value, ANNOTATION, content[ANNOTATION].value)
        result.replace_all_uses_with(constraint)
        operation.erase()


def mark(operation: Any, *, name: str = "", annotation: str = "") -> None:
    """Gives an op the name or the annotation that :func:`take_name` and others took from it."""
    for key, text in ((NAME, name), (ANNOTATION, annotation)):
        if text:
            operation.attributes[key] = ir.StringAttr.get(text)


def take_annotation(operation: Any) -> str:
    """Removes and returns the annotation of an op that :func:`keeping_names` wrote; or empty.

    Raises :class:`toast.errors.TargetError` if its text is not that of an annotation.
    """
    if ANNOTATION not in operation.attributes:
        return ""
    text = str(getattr(operation.attributes[ANNOTATION], "value", ""))
    del operation.attributes[ANNOTATION]
    rank = ir.RankedTensorType(operation.results[0].type).rank if operation.results else -1
    try:
        found = checked(json.loads(text), _Annotation)
    except (ValueError, RecursionError, Misfit):
        found = None
    if (
        found is None
        or len(found.entries) != rank
        or len({*found.devices}) != len(found.devices)
        or any(not 0 <= device < len(found.devices) for device in found.devices)
        or (found.devices and not _covers(found))
        or not all(word.isprintable() for word in _words(found))
    ):
        raise TargetError(
            f"its annotation {shortened(text, 80)!r} is none of toast.replicate, split and shard; "
            "remove it"
        )
    return text


class _Annotation(msgspec.Struct, forbid_unknown_fields=True):
    """The content of an annotation's text."""

    #: The user's call, for messages.
    call: str
    #: For each dimension: axes, a number of parts, or nothing.
    entries: list[list[str] | Annotated[int, msgspec.Meta(ge=1)] | None]
    #: The device of each tile, if the numbers of parts are those of a device assignment.
    devices: list[int]


def _words(annotation: _Annotation) -> list[str]:
    """The call and the axes of an annotation."""
    axes = [entry for entry in annotation.entries if isinstance(entry, list)]
    return [annotation.call, *itertools.chain.from_iterable(axes)]


def _covers(annotation: _Annotation) -> bool:
    """Whether a device assignment has a device for each of its tiles."""
    parts = [entry for entry in annotation.entries if entry is not None]
    return all(isinstance(entry, int) for entry in parts) and math.prod(
        entry for entry in parts if isinstance(entry, int)
    ) == len(annotation.devices)


def take_name(operation: Any) -> str:
    """Removes and returns the name that :func:`keeping_names` gave an op; empty for none."""
    if NAME not in operation.attributes:
        return ""
    name = printable(str(operation.attributes[NAME].value), breaks=False)
    del operation.attributes[NAME]
    return name
