"""Instances of linear algebra and transforms (rules/ops/linalg.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.program import TensorType


@st.composite
def _fft(draw: Draw) -> Instance:
    count = pieces.count(draw, 1, 3)
    shape = (*pieces.shape(draw, 0, 2), *(pieces.size(draw) for _ in range(count)))
    kind = draw(st.sampled_from(["FFT", "IFFT", "RFFT", "IRFFT"]))
    half = (*shape[:-1], shape[-1] // 2 + 1)
    whole, cut = TensorType(shape, "f32"), TensorType(half, "c64")
    both = TensorType(shape, "c64")
    operand, result = {
        "FFT": (both, both), "IFFT": (both, both), "RFFT": (whole, cut), "IRFFT": (cut, whole),
    }[kind]  # fmt: skip
    return Instance(
        "stablehlo.fft", (operand,), (result,),
        f"fft_type = #stablehlo<fft_type {kind}>, fft_length = {pieces.array(shape[-count:])}",
    )  # fmt: skip


@st.composite
def _cholesky(draw: Draw) -> Instance:
    batch, size = pieces.shape(draw, 0, 2), pieces.size(draw)
    type_ = TensorType((*batch, size, size), pieces.dtype(draw, ("f32", "f64")))
    lower = str(pieces.flag(draw)).lower()
    return Instance("stablehlo.cholesky", (type_,), (type_,), f"lower = {lower}")


@st.composite
def _triangular_solve(draw: Draw) -> Instance:
    batch, size, other = pieces.shape(draw, 0, 2), pieces.size(draw), pieces.size(draw)
    left = pieces.flag(draw)
    dtype = pieces.dtype(draw, ("f32", "f64"))
    b = TensorType((*batch, size, other) if left else (*batch, other, size), dtype)
    transpose = draw(st.sampled_from(["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"]))
    return Instance(
        "stablehlo.triangular_solve", (TensorType((*batch, size, size), dtype), b), (b,),
        f"left_side = {str(left).lower()}, lower = {str(pieces.flag(draw)).lower()}, "
        f"unit_diagonal = {str(pieces.flag(draw)).lower()}, "
        f"transpose_a = #stablehlo<transpose {transpose}>",
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "cholesky": _cholesky(),
    "fft": _fft(),
    "triangular_solve": _triangular_solve(),
}
