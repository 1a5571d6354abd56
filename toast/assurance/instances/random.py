"""Instances of random numbers (rules/ops/random.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.program import TensorType


@st.composite
def _rng(draw: Draw) -> Instance:
    shape = pieces.shape(draw, 1)
    scalar, extents = TensorType((), "f32"), TensorType((len(shape),), "i64")
    return Instance(
        "stablehlo.rng", (scalar, scalar, extents), (TensorType(shape, "f32"),),
        "rng_distribution = #stablehlo<rng_distribution UNIFORM>",
    )  # fmt: skip


@st.composite
def _rng_bit_generator(draw: Draw) -> Instance:
    state = TensorType((2,), "ui64")
    return Instance(
        "stablehlo.rng_bit_generator", (state,), (state, TensorType(pieces.shape(draw), "ui32")),
        "rng_algorithm = #stablehlo<rng_algorithm THREE_FRY>",
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "rng": _rng(),
    "rng_bit_generator": _rng_bit_generator(),
}
