"""Instances of ops that take or place parts of tensors (rules/ops/window.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance, Shape
from toast.program import TensorType


@st.composite
def _slice(draw: Draw) -> Instance:
    shape, dtype = pieces.shape(draw, 1), pieces.dtype(draw)
    rows = []
    for size in shape:
        start = pieces.count(draw, 0, size - 1) if pieces.flag(draw) else 0
        limit = pieces.count(draw, start + 1, size) if pieces.flag(draw) else size
        stride = pieces.count(draw, 1, 3) if pieces.flag(draw) else 1
        rows.append((start, limit, stride, -(-(limit - start) // stride)))
    starts, limits, strides, result_shape = pieces.columns(rows, 4)
    return Instance(
        "stablehlo.slice", (TensorType(shape, dtype),), (TensorType(tuple(result_shape), dtype),),
        f"start_indices = {pieces.array(starts)}, limit_indices = {pieces.array(limits)}, "
        f"strides = {pieces.array(strides)}",
    )  # fmt: skip


@st.composite
def _pad(draw: Draw) -> Instance:
    shape, dtype = pieces.shape(draw, 1), pieces.dtype(draw)
    rows = []
    for size in shape:
        low, high = (pieces.count(draw, -1, 3) if pieces.flag(draw) else 0 for _ in range(2))
        hole = pieces.count(draw, 0, 2) if pieces.flag(draw) else 0
        extent = low + high + (size - 1) * hole + size
        if extent < 1:
            low, high, extent = 0, 0, (size - 1) * hole + size
        rows.append((low, high, hole, extent))
    lows, highs, inner, result_shape = pieces.columns(rows, 4)
    return Instance(
        "stablehlo.pad", (TensorType(shape, dtype), TensorType((), dtype)),
        (TensorType(tuple(result_shape), dtype),),
        f"edge_padding_low = {pieces.array(lows)}, edge_padding_high = {pieces.array(highs)}, "
        f"interior_padding = {pieces.array(inner)}",
    )  # fmt: skip


@st.composite
def _concatenate(draw: Draw) -> Instance:
    shape, dtype = pieces.shape(draw, 1), pieces.dtype(draw)
    dimension = pieces.count(draw, 0, len(shape) - 1)
    sizes = [pieces.size(draw) for _ in range(pieces.count(draw, 1, 3))]
    shapes = [(*shape[:dimension], size, *shape[dimension + 1 :]) for size in (*sizes, sum(sizes))]
    *operands, result = (TensorType(s, dtype) for s in shapes)
    return Instance(
        "stablehlo.concatenate", tuple(operands), (result,), f"dimension = {dimension} : i64"
    )


@st.composite
def _reverse(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw, 1), pieces.dtype(draw))
    dimensions = pieces.some(draw, len(type_.shape))
    return Instance(
        "stablehlo.reverse", (type_,), (type_,), f"dimensions = {pieces.array(dimensions)}"
    )


def _smaller(draw: Draw, shape: Shape) -> Shape:
    return tuple(pieces.count(draw, 1, size) if pieces.flag(draw) else size for size in shape)


@st.composite
def _dynamic_slice(draw: Draw) -> Instance:
    shape, dtype = pieces.shape(draw, 1), pieces.dtype(draw)
    result_shape = _smaller(draw, shape)
    places = (TensorType((), "i32"),) * len(shape)
    return Instance(
        "stablehlo.dynamic_slice", (TensorType(shape, dtype), *places),
        (TensorType(result_shape, dtype),), f"slice_sizes = {pieces.array(result_shape)}",
    )  # fmt: skip


@st.composite
def _dynamic_update_slice(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw, 1), pieces.dtype(draw))
    update = TensorType(_smaller(draw, type_.shape), type_.dtype)
    places = (TensorType((), "i32"),) * len(type_.shape)
    return Instance("stablehlo.dynamic_update_slice", (type_, update, *places), (type_,))


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "concatenate": _concatenate(),
    "dynamic_slice": _dynamic_slice(),
    "dynamic_update_slice": _dynamic_update_slice(),
    "pad": _pad(),
    "reverse": _reverse(),
    "slice": _slice(),
}
