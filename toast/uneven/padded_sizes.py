"""The sizes to which dimensions are padded so that the axes of a mesh divide them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toast.analysis import Analysis
from toast.hardware import Mesh
from toast.program import PaddedDimension

#: Tiles of matrix units have 128 columns; padded sizes are multiples of this if it adds little.
_TILE = 128

#: The largest share of elements that whole tiles may add.
_MOST_FOR_TILES = 0.02

#: Kinds that cut or lengthen a dimension, and may move its elements.
_MOVING = frozenset({"slice", "pad"})

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class UnevenDimension:
    """The dimensions of one color and size that are padded together."""

    record: PaddedDimension
    #: ``[names]`` whether a name is one of them.
    names: npt.NDArray[np.bool_] = dataclasses.field(repr=False, compare=False)


def uneven_dimensions(
    analysis: Analysis, mesh: Mesh, most_added: float
) -> tuple[UnevenDimension, ...]:
    """The dimensions that padding changes, those of arguments first.

    ``mesh`` and ``most_added`` are as for :func:`padded_sizes`.
    """
    divisor, larger = analysis.names.divisor, padded_sizes(analysis, mesh, most_added)
    changed = np.flatnonzero(larger != divisor)
    rows = np.stack([analysis.color[changed], divisor[changed], larger[changed]])
    return _of_kinds(analysis, [
        (color, size, to) for color, size, to in np.unique(rows, axis=1).T.tolist()
    ])  # fmt: skip


def recorded_dimensions(
    analysis: Analysis, records: Sequence[PaddedDimension]
) -> tuple[UnevenDimension, ...]:
    """The dimensions of these records in a program, as far as it has them."""
    sizes = {record.elements for record in records}
    names = analysis.names
    chosen = np.flatnonzero(_whole_names(analysis) & np.isin(names.divisor, [*sizes]))
    kinds = np.unique(np.stack([analysis.color[chosen], names.divisor[chosen]]), axis=1).T
    to = {(record.dimension, record.elements): record.padded for record in records}
    found = []
    for color, size in kinds.tolist():
        (first,) = _of_kinds(analysis, [(color, size, size)])
        if larger := to.get((first.record.dimension, size)):
            record = dataclasses.replace(first.record, padded=larger)
            found.append(dataclasses.replace(first, record=record))
    return tuple(found)


def _of_kinds(
    analysis: Analysis, kinds: Sequence[tuple[int, int, int]]
) -> tuple[UnevenDimension, ...]:
    """The dimensions of each color and size, padded to a third number."""
    whole, names = _whole_names(analysis), analysis.names
    found = []
    for color, size, to in kinds:
        mask = whole & (analysis.color == color) & (names.divisor == size)
        first = int(np.argmax(mask))
        record = PaddedDimension(analysis.name_label(first), size, to)
        found.append((first, UnevenDimension(record, mask)))
    return tuple(dimension for _, dimension in sorted(found, key=lambda pair: pair[0]))


def _whole_names(analysis: Analysis) -> npt.NDArray[np.bool_]:
    """``[names]`` whether a dimension can be padded: no part of it has a size of its own."""
    divisor = analysis.names.divisor
    whole: npt.NDArray[np.bool_] = (
        analysis.names.shardable & (elements_of_names(analysis) == divisor) & (divisor > 1)
    )
    return whole


def padded_sizes(analysis: Analysis, mesh: Mesh, most_added: float) -> Ints:
    """``[names]``: the divisors, with the padded sizes where axes do not divide them.

    All axes together divide the new size or, if that adds more than a share ``most_added`` of the
    elements, as many devices as possible.
    """
    divisor, sizes = analysis.names.divisor, mesh.real.sizes
    larger = divisor.copy()
    stuck = _whole_names(analysis)
    for devices in _products(sizes):
        stuck &= divisor % devices > 0
        for multiple, most in (
            (math.lcm(_TILE, devices), min(most_added, _MOST_FOR_TILES)),
            (devices, most_added),
        ):
            size = -(-divisor // multiple) * multiple
            fits = stuck & (size - divisor <= most * divisor)
            larger[fits] = size[fits]
            stuck &= ~fits
    return larger


def moving_dimensions(analysis: Analysis, op: int) -> tuple[int, ...]:
    """The dimensions in which a slice or pad only takes or adds elements at the ends.

    With padding, ``logits[:, :-1]`` has the size of the whole, and moves nothing.  In a program
    that XLA partitions, these stay whole.
    """
    signature = analysis.program.signatures[analysis.program.ops[op].signature]
    if signature.kind not in _MOVING or analysis.lowering != "local":
        return ()
    name, plain = ("strides", 1) if signature.kind == "slice" else ("interior_padding", 0)
    steps = signature.attribute(name)
    ends = signature.operands[0].shape, signature.results[0].shape
    return tuple(
        d for d, (before, after) in enumerate(zip(*ends, strict=True))
        if before != after and isinstance(steps, tuple) and steps[d] == plain
    )  # fmt: skip


def with_moving(analysis: Analysis, larger: Ints) -> Ints:
    """``larger`` from :func:`padded_sizes`, and what divides slices and pads of these sizes."""
    names, program = analysis.names, analysis.program
    changed = np.flatnonzero(larger != names.divisor)
    to = {
        (int(analysis.color[name]), int(names.divisor[name])): int(larger[name])
        for name in changed.tolist()
    }
    moved = larger.copy()
    for op in range(len(program.ops)):
        for d in moving_dimensions(analysis, op):
            number = program.ops[op].signature
            signature = program.signatures[number]
            name = int(names.first_name[op]) + analysis.rules[number].results[0][d][0]
            ends = (signature.operands[0].shape[d], signature.results[0].shape[d])
            color = int(analysis.color[name])
            if any((color, size) in to for size in ends):
                moved[name] = math.gcd(*(to.get((color, size), size) for size in ends))
    return moved


def _products(sizes: Sequence[int]) -> list[int]:
    """The numbers of devices of each set of axes, the largest first."""
    products = {1}
    for size in sizes:
        products |= {size * product for product in products}
    return sorted(products - {1}, reverse=True)


def elements_of_names(analysis: Analysis) -> Ints:
    """``[names]``: the elements of the dimensions with each name."""
    names = analysis.names
    elements = np.zeros(names.count, dtype=np.int64)
    ranks = np.diff(names.use_dim)
    rows = np.repeat(names.value_dim[names.use_value] - names.use_dim[:-1], ranks)
    elements[names.use_name] = names.dim_size[rows + np.arange(len(rows))]
    elements[names.def_name] = names.dim_size
    return elements
