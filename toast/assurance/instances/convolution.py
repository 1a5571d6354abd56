"""Instances of convolutions (rules/ops/convolution.lp)."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance, Shape
from toast.program import TensorType


@st.composite
def _convolution(draw: Draw) -> Instance:
    space = pieces.count(draw, 0, 2)
    groups, by_batch = (draw(st.sampled_from([1, 1, 1, 2, 3])), pieces.flag(draw))
    features = batch_groups = 1
    if by_batch:
        batch_groups = groups
    else:
        features = groups
    batch = pieces.size(draw) * batch_groups
    inputs = pieces.size(draw)
    outputs = pieces.size(draw) * groups
    rows = []
    for _ in range(space):
        size, window = pieces.count(draw, 3, 8), pieces.count(draw, 1, 3)
        stride, hole, gap = (pieces.count(draw, 1, 2) if pieces.flag(draw) else 1 for _ in range(3))
        low, high = pieces.count(draw, 0, 2), pieces.count(draw, 0, 2)
        extent = (window - 1) * gap + 1
        count = pieces.windows(size, low, high, extent, stride, hole)
        if not count:
            window = gap = 1
            count = pieces.windows(size, low, high, 1, stride, hole)
        rows.append((size, window, stride, (low, high), hole, gap, count))
    sizes, windows, strides, pads, holes, spread, counts = pieces.columns(rows, 7)

    def laid(first: tuple[str, int], second: tuple[str, int], rest: list[int]) -> tuple[Any, Shape]:
        named = [first, second, *((str(i), size) for i, size in enumerate(rest))]
        order = draw(st.permutations(named))
        return [name for name, _ in order], tuple(size for _, size in order)

    lhs, lhs_shape = laid(("b", batch), ("f", inputs * features), sizes)
    rhs, rhs_shape = laid(("i", inputs), ("o", outputs), windows)
    out, out_shape = laid(("b", batch // batch_groups), ("f", outputs), counts)
    dimensions = "x".join(f"[{', '.join(side)}]" for side in (lhs, rhs))
    padding = f"padding = {pieces.pairs(pads)}, " if space else ""
    dtype = pieces.dtype(draw, ("f32", "f64"))
    return Instance(
        "stablehlo.convolution", (TensorType(lhs_shape, dtype), TensorType(rhs_shape, dtype)),
        (TensorType(out_shape, dtype),),
        f"dimension_numbers = #stablehlo.conv<{dimensions}->[{', '.join(out)}]>, "
        f"window_strides = {pieces.array(strides)}, {padding}lhs_dilation = {pieces.array(holes)}, "
        f"rhs_dilation = {pieces.array(spread)}, "
        f"feature_group_count = {features} : i64, batch_group_count = {batch_groups} : i64",
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "convolution": _convolution(),
}
