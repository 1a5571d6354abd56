"""Instances of reductions (rules/ops/reduce.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.program import TensorType


@st.composite
def _reduce(draw: Draw) -> Instance:
    shape = pieces.shape(draw, 1, 4)
    bits = pieces.flag(draw)
    dtype = pieces.dtype(draw, pieces.INTEGERS) if bits else pieces.dtype(draw, ("f32", "f64"))
    combiner = draw(st.sampled_from(("and", "or") if bits else pieces.COMBINERS))
    count = pieces.count(draw, 1, 2)
    dimensions = pieces.some(draw, len(shape))
    result_shape = tuple(size for d, size in enumerate(shape) if d not in dimensions)
    return Instance(
        "stablehlo.reduce",
        (*(TensorType(shape, dtype),) * count, *(TensorType((), dtype),) * count),
        (TensorType(result_shape, dtype),) * count,
        f"dimensions = {pieces.array(dimensions)}", pieces.body(dtype, combiner, count),
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "reduce": _reduce(),
}
