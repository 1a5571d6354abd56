"""The dimensions of images that are in tiles: on TPUs, convolutions decide the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from toast.cost.entities import Bools, Ints
from toast.cost.liveness import BARRIERS, dimensions_in
from toast.program import Program, Signature

#: Attributes that name the dimensions of each tensor of a convolution that are no positions.
_NO_POSITIONS = (
    ("input_batch_dimension", "input_feature_dimension"),
    ("kernel_input_feature_dimension", "kernel_output_feature_dimension"),
    ("output_batch_dimension", "output_feature_dimension"),
)

#: The place of the result among the operands and results of a convolution.
_RESULT = 2

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
    seeds: dict[int, tuple[int, ...]] = {}
    for value, dims, _ in _of_convolutions(program, kinds):
        seeds.setdefault(value, dims)
    return _spread(program, kinds, seeds)


def may_be_in_bands(program: Program, kinds: Sequence[str], constant: Bools) -> Ints:
    """The images that XLA cuts into bands if a device has few of them.

    They are those of convolutions whose images lead, and follow from no ``constant`` (``[values]``)
    alone.
    """
    arguments = frozenset(program.argument_values)
    seeds = {
        value: dims for value, dims, image in _of_convolutions(program, kinds) if image
    }  # fmt: skip
    found = []
    for value, dims in _spread(program, kinds, seeds).items():
        shape = program.values[value].type.shape
        places = [size for d, size in enumerate(shape) if d not in dims]
        if len(places) > 1 and places[-1] >= LEAST_IN_BANDS and not constant[value]:
            found += [value] * (shape[dims[0]] <= MOST_IN_BANDS * _MOST_DEVICES)
    return np.array(sorted(set(found) - arguments), dtype=np.int64)


def _of_convolutions(
    program: Program, kinds: Sequence[str]
) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    """Operands and results of convolutions along two dimensions or more, besides arguments.

    With each come its dimensions in tiles, and whether these are those of images and of features,
    in this order: kernels have two of features.
    """
    arguments = frozenset(program.argument_values)
    for number, op in enumerate(program.ops):
        if kinds[number] != "convolution":
            continue
        signature = program.signatures[op.signature]
        # The gradient of a kernel has images as features, and a window of the size of images.
        batch, feature = _dims(signature, _NO_POSITIONS[0])
        sums = batch > feature
        kernel = program.values[op.operands[1]].type.shape
        places = [d for d in range(len(kernel)) if d not in _dims(signature, _NO_POSITIONS[1])]
        wide = bool(places) and kernel[places[-1]] >= LEAST_IN_BANDS
        for place, (value, names) in enumerate(
            zip((*op.operands, *op.results), _NO_POSITIONS, strict=True)
        ):
            dims = _dims(signature, names)
            image = place < _RESULT and wide if sums else place != 1 and dims[0] < dims[1]
            if len(program.values[value].type.shape) > len(dims) + 1 and value not in arguments:
                yield value, tuple(sorted(dims)), image


def _dims(signature: Signature, names: Sequence[str]) -> tuple[int, ...]:
    return tuple(int(str(signature.attribute(name))) for name in names)


def _spread(
    program: Program, kinds: Sequence[str], seeds: Mapping[int, tuple[int, ...]]
) -> Mapping[int, tuple[int, ...]]:
    """``seeds`` and the values whose layout follows from theirs, with their dimensions in tiles."""
    tiles, arguments = dict(seeds), frozenset(program.argument_values)
    pending = [*tiles]
    while pending:
        value = pending.pop()
        for number in {program.values[value].op, *program.users[value]}:
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
