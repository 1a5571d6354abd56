"""Instances of batch normalisation (rules/ops/batch_norm.lp)."""

from __future__ import annotations

import math

from hypothesis import assume
from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.program import TensorType


def _batch_norm(name: str) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape = pieces.shape(draw, 2, 4)
        feature = pieces.count(draw, 0, len(shape) - 1)
        # The variance of a single element is only a rounding error.
        assume(math.prod(shape) > shape[feature])
        whole, each = TensorType(shape, "f32"), TensorType((shape[feature],), "f32")
        attributes = f"epsilon = 1.0e-3 : f32, feature_index = {feature} : i64"
        if name == "inference":
            return Instance(
                "stablehlo.batch_norm_inference", (whole, *(each,) * 4), (whole,), attributes
            )
        operands = (whole, each, each) if name == "training" else (whole, *(each,) * 3, whole)
        return Instance(f"stablehlo.batch_norm_{name}", operands, (whole, each, each), attributes)

    return strategy()


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "batch_norm_grad": _batch_norm("grad"),
    "batch_norm_inference": _batch_norm("inference"),
    "batch_norm_training": _batch_norm("training"),
}
