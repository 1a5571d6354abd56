"""Instances of sort and top_k (rules/ops/sort.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.frontend import mlir
from toast.program import TensorType


@st.composite
def _sort(draw: Draw) -> Instance:
    shape, count = pieces.shape(draw, 1), pieces.count(draw, 1, 3)
    dimension = pieces.count(draw, 0, len(shape) - 1)
    types = [
        TensorType(shape, "f32"),
        *(TensorType(shape, pieces.dtype(draw)) for _ in range(count - 1)),
    ]
    scalars = [mlir.type_text(TensorType((), t.dtype)) for t in types for _ in range(2)]
    region = (
        f"^bb0({', '.join(f'%a{i}: {s}' for i, s in enumerate(scalars))}):\n"
        '  %c = "stablehlo.compare"(%a0, %a1) <{comparison_direction = '
        "#stablehlo<comparison_direction LT>}> : (tensor<f32>, tensor<f32>) -> tensor<i1>\n"
        '  "stablehlo.return"(%c) : (tensor<i1>) -> ()'
    )
    return Instance(
        "stablehlo.sort", tuple(types), tuple(types),
        f"dimension = {dimension} : i64, is_stable = true", region,
    )  # fmt: skip


@st.composite
def _top_k(draw: Draw) -> Instance:
    shape = pieces.shape(draw, 1)
    best = pieces.count(draw, 1, shape[-1])
    result_shape = (*shape[:-1], best)
    return Instance(
        "chlo.top_k", (TensorType(shape, "f32"),),
        (TensorType(result_shape, "f32"), TensorType(result_shape, "i32")), f"k = {best} : i64",
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "chlo_top_k": _top_k(),
    "sort": _sort(),
}
