"""Instances of reshape (rules/ops/reshape.lp)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance, Shape
from toast.program import TensorType


@st.composite
def _reshape(draw: Draw) -> Instance:
    def grouped(primes: Sequence[int]) -> Shape:
        cuts = sorted(pieces.count(draw, 0, len(primes)) for _ in range(pieces.count(draw, 0, 3)))
        edges = [0, *cuts, len(primes)]
        return tuple(math.prod(primes[a:b]) for a, b in itertools.pairwise(edges))

    primes = [draw(st.sampled_from([2, 2, 3, 5])) for _ in range(pieces.count(draw, 0, 5))]
    other = draw(st.permutations(primes)) if primes and pieces.flag(draw) else primes
    dtype = pieces.dtype(draw)
    return Instance(
        "stablehlo.reshape", (TensorType(grouped(primes), dtype),),
        (TensorType(grouped(other), dtype),),
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "reshape": _reshape(),
}
