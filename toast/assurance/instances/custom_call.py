"""Instances of custom calls (rules/ops/custom_call.lp), as ``custom_call TARGET``."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.assurance.references import ANNOTATIONS
from toast.program import TensorType


def _call(target: str, operands: Sequence[TensorType], results: Sequence[TensorType]) -> Instance:
    return Instance(
        "stablehlo.custom_call", tuple(operands), tuple(results), f'call_target_name = "{target}"'
    )


def _pointwise_call(target: str, operands: str, results: str) -> st.SearchStrategy[Instance]:
    """A call on operands of one shape; ``operands`` and ``results`` are types, ``?`` any float."""

    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape, dtype = pieces.shape(draw), pieces.dtype(draw)
        sides = [
            [TensorType(shape, dtype if t == "?" else t) for t in side.split()]
            for side in (operands, results)
        ]
        return _call(target, *sides)

    return strategy()


def _matrix_call(target: str, operands: str, results: str) -> st.SearchStrategy[Instance]:
    """A call on square matrices (``m``) or vectors (``v``, ``i``), with batch dimensions."""

    @st.composite
    def strategy(draw: Draw) -> Instance:
        batch, size = pieces.shape(draw, 0, 2), pieces.size(draw)
        types = {
            "m": TensorType((*batch, size, size), "f32"), "v": TensorType((*batch, size), "f32"),
            "i": TensorType((*batch, size), "i32"),
        }  # fmt: skip
        return _call(target, [types[c] for c in operands], [types[c] for c in results])

    return strategy()


def _top_k_call(target: str, operands: int) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape = pieces.shape(draw, 1)
        best = pieces.count(draw, 1, shape[-1])
        result_shape = (*shape[:-1], best)
        searched = [TensorType(shape, "f32"), TensorType(shape, "i32")]
        searched += [TensorType((), "f32"), TensorType((), "i32")]
        return _call(
            target,
            searched[:operands],
            (TensorType(result_shape, "f32"), TensorType(result_shape, "i32")),
        )

    return strategy()


_THREEFRY = (
    "cu_threefry2x32", "cu_threefry2x32_ffi", "hip_threefry2x32", "hip_threefry2x32_ffi",
)  # fmt: skip


#: The strategy of each custom call with a rule, by target.
_BY_TARGET = {
    **{target: _pointwise_call(target, "?", "?") for target in ANNOTATIONS},
    **{target: _pointwise_call(target, "ui32 ui32 ui32 ui32", "ui32 ui32") for target in _THREEFRY},
    "mhlo.erf": _pointwise_call("mhlo.erf", "f32", "f32"),
    "X64Combine": _pointwise_call("X64Combine", "ui32 ui32", "ui64"),
    "X64SplitHigh": _pointwise_call("X64SplitHigh", "ui64", "ui32"),
    "X64SplitLow": _pointwise_call("X64SplitLow", "ui64", "ui32"),
    "ApproxTopK": _top_k_call("ApproxTopK", 4),
    "PartialReduce": _top_k_call("PartialReduce", 4),
    "TopK": _top_k_call("TopK", 1),
    "mhlo.topk": _top_k_call("mhlo.topk", 1),
    "Cholesky": _matrix_call("Cholesky", "m", "m"),
    "CompactWyHelper": _matrix_call("CompactWyHelper", "m", "m"),
    "Eigh": _matrix_call("Eigh", "m", "mv"),
    "InvertDiagBlocksLowerTriangular": _matrix_call("InvertDiagBlocksLowerTriangular", "m", "m"),
    "InvertDiagBlocksUpperTriangular": _matrix_call("InvertDiagBlocksUpperTriangular", "m", "m"),
    "LuDecomposition": _matrix_call("LuDecomposition", "m", "mii"),
    "ProductOfElementaryHouseholderReflectors": _matrix_call(
        "ProductOfElementaryHouseholderReflectors", "mv", "m"
    ),
    "Qr": _matrix_call("Qr", "m", "mv"),
    "QrDecompositionBlock": _matrix_call("QrDecompositionBlock", "m", "mv"),
}


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    f"custom_call {target}": strategy for target, strategy in _BY_TARGET.items()
}
