"""Instances of ops that move whole tensors (rules/ops/shape.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.program import TensorType


@st.composite
def _transpose(draw: Draw) -> Instance:
    shape = pieces.shape(draw, 1, 4)
    order = pieces.order(draw, len(shape))
    sizes = tuple(shape[d] for d in order)
    dtype = pieces.dtype(draw)
    return Instance(
        "stablehlo.transpose", (TensorType(shape, dtype),), (TensorType(sizes, dtype),),
        f"permutation = {pieces.array(order)}",
    )  # fmt: skip


@st.composite
def _broadcast_in_dim(draw: Draw) -> Instance:
    sizes = pieces.shape(draw, 0, 4)
    dimensions = pieces.some(draw, len(sizes))
    dimensions = tuple(draw(st.permutations(dimensions))) if dimensions else ()
    shape = tuple(1 if pieces.flag(draw) else sizes[d] for d in dimensions)
    dtype = pieces.dtype(draw)
    return Instance(
        "stablehlo.broadcast_in_dim", (TensorType(shape, dtype),), (TensorType(sizes, dtype),),
        f"broadcast_dimensions = {pieces.array(dimensions)}",
    )  # fmt: skip


@st.composite
def _broadcast(draw: Draw) -> Instance:
    new, shape, dtype = pieces.shape(draw, 0, 2), pieces.shape(draw, 0, 2), pieces.dtype(draw)
    return Instance(
        "stablehlo.broadcast", (TensorType(shape, dtype),), (TensorType(new + shape, dtype),),
        f"broadcast_sizes = {pieces.array(new)}",
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "broadcast": _broadcast(),
    "broadcast_in_dim": _broadcast_in_dim(),
    "transpose": _transpose(),
}
