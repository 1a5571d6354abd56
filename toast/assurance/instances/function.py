"""Instances of ops without operands (rules/ops/function.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.frontend import mlir
from toast.program import TensorType


@st.composite
def _iota(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw, 1), "i32")
    dimension = pieces.count(draw, 0, len(type_.shape) - 1)
    return Instance("stablehlo.iota", (), (type_,), f"iota_dimension = {dimension} : i64")


def _constant(name: str) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        type_ = TensorType(pieces.shape(draw), "f32")
        return Instance(name, (), (type_,), f"value = dense<1.5> : {mlir.type_text(type_)}")

    return strategy()


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "chlo_constant": _constant("chlo.constant"),
    "constant": _constant("stablehlo.constant"),
    "iota": _iota(),
}
