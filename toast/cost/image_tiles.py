"""The dimensions of images that are in tiles: on TPUs, convolutions decide the layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from toast.cost.entities import Ints
from toast.cost.liveness import BARRIERS, dimensions_in
from toast.program import Program

#: Attributes that name the dimensions of each tensor of a convolution that are no positions.
_NO_POSITIONS = (
    ("input_batch_dimension", "input_feature_dimension"),
    ("kernel_input_feature_dimension", "kernel_output_feature_dimension"),
    ("output_batch_dimension", "output_feature_dimension"),
)

#: Ops with fewer or more elements along the same dimensions.
_RESIZING = frozenset({
    "concatenate", "pad", "slice", "reverse", "reduce_window", "select_and_scatter",
})  # fmt: skip

#: Ops whose results and operands have layouts of their own.  The only one of ``_RESIZING`` that
#: fusion stops at, ``select_and_scatter``, has not.
_OWN_LAYOUTS = (BARRIERS | {"gather", "dynamic_slice", "dynamic_update_slice"}) - _RESIZING


#: The most images on a device that XLA for TPUs cuts into bands, and the fewest positions along a
#: row of one, as seen with 3 x 3 windows.  A row makes eight bands.
MOST_IN_BANDS, LEAST_IN_BANDS = 7, 14

#: Devices for which bands are considered.
_MOST_DEVICES = 256


def tiles_of_images(program: Program, kinds: Sequence[str]) -> Mapping[int, tuple[int, ...]]:
    """Values whose layout follows from that of a convolution, and their dimensions in tiles.

    Convolutions along two dimensions or more have images and features in tiles, never positions,
    and so have the values before and after, up to the next product.  Arguments have layouts of
    their own.  Few images are cut into bands, which have other tiles
    (:meth:`toast.cost.machine.Machine.lane_padding`).
    """
    tiles: dict[int, tuple[int, ...]] = {}
    arguments = frozenset(program.argument_values)
    users: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(program.ops):
        for value in op.operands:
            users[value].append(number)
        if kinds[number] == "convolution":
            signature = program.signatures[op.signature]
            for value, names in zip((*op.operands, *op.results), _NO_POSITIONS, strict=True):
                dims = tuple(sorted(int(str(signature.attribute(name))) for name in names))
                is_image = len(program.values[value].type.shape) > len(dims) + 1
                if is_image and value not in arguments:
                    tiles.setdefault(value, dims)
    pending = [*tiles]
    while pending:
        value = pending.pop()
        for number in {program.values[value].op, *users[value]}:
            op = program.ops[number]
            if kinds[number] in _OWN_LAYOUTS or len(op.results) != 1:
                continue
            for other in (*op.operands, *op.results):
                if other in tiles or other in arguments:
                    continue
                alike = _alike(program, number, value, other, tiles[value])
                if alike is not None:
                    tiles[other] = alike
                    pending.append(other)
    return tiles


def may_be_in_bands(program: Program, tiles: Mapping[int, tuple[int, ...]]) -> Ints:
    """The images of ``tiles`` that XLA cuts into bands if a device has few of them."""
    found = []
    for value, dims in tiles.items():
        shape = program.values[value].type.shape
        places = [size for d, size in enumerate(shape) if d not in dims]
        if len(places) > 1 and places[-1] >= LEAST_IN_BANDS:
            found += [value] * (shape[dims[0]] <= MOST_IN_BANDS * _MOST_DEVICES)
    return np.array(sorted(found), dtype=np.int64)


def _alike(
    program: Program, number: int, value: int, other: int, dims: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The dimensions of another value of an op that are the ``dims`` of one; ``None`` if unlike."""
    op, kind = program.ops[number], program.kinds[number]
    before, after = (program.values[v].type.shape for v in (value, other))
    if len(before) != len(after):
        return None
    if kind == "transpose":
        permutation = dimensions_in(program.signatures[op.signature], "permutation")
        if value in op.results:
            return tuple(sorted(permutation[d] for d in dims))
        return tuple(sorted(permutation.index(d) for d in dims))
    return dims if before == after or kind in _RESIZING else None


__all__ = ["LEAST_IN_BANDS", "MOST_IN_BANDS", "may_be_in_bands", "tiles_of_images"]
