"""The sizes to which dimensions are padded so that the axes of a mesh divide them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toast.analysis import Analysis
from toast.hardware import Mesh

#: Tiles of matrix units have 128 columns; padded sizes are multiples of this if it adds little.
_TILE = 128

#: The largest share of elements that whole tiles may add.
_MOST_FOR_TILES = 0.02

Ints = npt.NDArray[np.int64]


def padded_sizes(analysis: Analysis, mesh: Mesh, most_added: float) -> Ints:
    """``[names]``: the divisors, with the padded sizes where axes do not divide them.

    All axes together divide the new size or, if that adds more than a share ``most_added`` of the
    elements, as many devices as possible.
    """
    divisor, sizes = analysis.names.divisor, mesh.real.sizes
    larger = divisor.copy()
    stuck = analysis.names.shardable & (elements_of_names(analysis) == divisor) & (divisor > 1)
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
