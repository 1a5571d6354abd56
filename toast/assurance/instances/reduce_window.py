"""Instances of pooling and of its gradient (rules/ops/reduce_window.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.frontend import mlir
from toast.program import TensorType


@st.composite
def _reduce_window(draw: Draw) -> Instance:
    shape, dtype = pieces.shape(draw, 1), pieces.dtype(draw, ("f32", "f64"))
    rows = []
    for size in shape:
        moves = pieces.flag(draw)
        window, stride = (pieces.count(draw, 1, 3), pieces.count(draw, 1, 2)) if moves else (1, 1)
        hole, gap = (
            (pieces.count(draw, 1, 2), pieces.count(draw, 1, 2))
            if moves and pieces.flag(draw)
            else (1, 1)
        )
        low, high = (pieces.count(draw, 0, 2), pieces.count(draw, 0, 2)) if moves else (0, 0)
        extent = (window - 1) * gap + 1
        if not pieces.windows(size, low, high, extent, stride, hole):
            window = gap = extent = 1
        rows.append(
            (
                window,
                stride,
                hole,
                gap,
                (low, high),
                pieces.windows(size, low, high, extent, stride, hole),
            )
        )
    windows, strides, holes, gaps, pads, result_shape = pieces.columns(rows, 6)
    return Instance(
        "stablehlo.reduce_window", (TensorType(shape, dtype), TensorType((), dtype)),
        (TensorType(tuple(result_shape), dtype),),
        f"window_dimensions = {pieces.array(windows)}, window_strides = {pieces.array(strides)}, "
        f"base_dilations = {pieces.array(holes)}, window_dilations = {pieces.array(gaps)}, "
        f"padding = {pieces.pairs(pads)}",
        pieces.body(dtype, draw(st.sampled_from(pieces.COMBINERS))),
    )  # fmt: skip


@st.composite
def _select_and_scatter(draw: Draw) -> Instance:
    shape = pieces.shape(draw, 1)
    rows = []
    for size in shape:
        moves = pieces.flag(draw)
        window = pieces.count(draw, 1, min(3, size)) if moves else 1
        stride = pieces.count(draw, 1, 3) if moves else 1
        low, high = (pieces.count(draw, 0, window - 1), pieces.count(draw, 0, window - 1))
        places = pieces.windows(size, low, high, window, stride)
        rows.append((window, stride, (low, high), places))
    windows, strides, pads, result_shape = pieces.columns(rows, 4)
    direction = draw(st.sampled_from(("GE", "GE", "GT", "LE", "LT")))
    scalar = mlir.type_text(TensorType((), "f32"))
    select = (
        f"^bb0(%a0: {scalar}, %a1: {scalar}):\n"
        '  %c = "stablehlo.compare"(%a0, %a1) <{comparison_direction = '
        f"#stablehlo<comparison_direction {direction}>}}> : ({scalar}, {scalar}) -> tensor<i1>\n"
        '  "stablehlo.return"(%c) : (tensor<i1>) -> ()\n}, {\n'
    )
    whole = TensorType(shape, "f32")
    return Instance(
        "stablehlo.select_and_scatter",
        (whole, TensorType(tuple(result_shape), "f32"), TensorType((), "f32")), (whole,),
        f"window_dimensions = {pieces.array(windows)}, window_strides = {pieces.array(strides)}, "
        f"padding = {pieces.pairs(pads)}",
        select + pieces.body("f32", "add"),
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "reduce_window": _reduce_window(),
    "select_and_scatter": _select_and_scatter(),
}
