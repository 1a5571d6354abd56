"""Instances of matrix products (rules/ops/dot.lp)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance, Shape
from toast.program import TensorType


@st.composite
def _dot_general(draw: Draw) -> Instance:
    roles = {role: pieces.shape(draw, 0, 2) for role in "bkxy"}
    lhs, rhs = (
        draw(st.permutations([(r, i) for r in side for i in range(len(roles[r]))]))
        for side in ("bkx", "bky")
    )

    def places(side: Sequence[tuple[str, int]], role: str) -> str:
        return pieces.bracketed([side.index((role, i)) for i in range(len(roles[role]))])

    def free(side: Sequence[tuple[str, int]], role: str) -> Shape:
        return tuple(roles[r][i] for r, i in side if r == role)

    dtype = pieces.dtype(draw, ("f32", "f64"))
    shapes = [tuple(roles[r][i] for r, i in side) for side in (lhs, rhs)]
    numbers = (
        f"lhs_batching_dimensions = {places(lhs, 'b')}, "
        f"rhs_batching_dimensions = {places(rhs, 'b')}, "
        f"lhs_contracting_dimensions = {places(lhs, 'k')}, "
        f"rhs_contracting_dimensions = {places(rhs, 'k')}"
    )
    return Instance(
        "stablehlo.dot_general", tuple(TensorType(s, dtype) for s in shapes),
        (TensorType(roles["b"] + free(lhs, "x") + free(rhs, "y"), dtype),),
        f"dot_dimension_numbers = #stablehlo.dot<{numbers}>",
    )  # fmt: skip


@st.composite
def _dot(draw: Draw) -> Instance:
    left, inner, right = pieces.shape(draw, 0, 1), pieces.size(draw), pieces.shape(draw, 0, 1)
    dtype = pieces.dtype(draw, ("f32", "f64"))
    return Instance(
        "stablehlo.dot", (TensorType((*left, inner), dtype), TensorType((inner, *right), dtype)),
        (TensorType(left + right, dtype),),
    )  # fmt: skip


def _einsum(operands: int) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        sizes = {letter: pieces.size(draw) for letter in "abcde"}
        sides = [
            "".join(draw(st.permutations("abcde"))[: pieces.count(draw, 0, 3)])
            for _ in range(operands)
        ]
        letters = sorted(set("".join(sides)))
        # XLA's einsum sums over letters that both operands have.
        shared = set(sides[0]).intersection(*sides) if operands > 1 else set(letters)
        result_letters = [x for x in letters if x not in shared or pieces.flag(draw)]
        result = "".join(draw(st.permutations(result_letters))) if result_letters else ""
        types = [TensorType(tuple(sizes[x] for x in s), "f32") for s in (*sides, result)]
        name = "stablehlo.einsum" if operands > 1 else "stablehlo.unary_einsum"
        return Instance(
            name,
            tuple(types[:-1]),
            (types[-1],),
            f'einsum_config = "{",".join(sides)}->{result}"',
        )

    return strategy()


@st.composite
def _ragged_dot(draw: Draw) -> Instance:
    batch = pieces.shape(draw, 0, 1)
    rows, inner, columns, groups = (pieces.size(draw) for _ in range(4))
    b, mode = len(batch), draw(st.sampled_from(["free", "contracting", "batching"]))
    sizes = TensorType((groups,), "i32")
    if mode == "batching" and not batch:
        mode = "free"
    by_group = (groups,) if mode == "free" else ()
    lhs = (*batch, rows, inner)
    rhs = (*by_group, *batch, inner, columns)
    shape = (*((groups,) if mode == "contracting" else ()), *batch, rows, columns)
    shift = len(by_group)
    ragged = {"free": b, "contracting": b + 1, "batching": 0}[mode]
    numbers = (
        f"lhs_batching_dimensions = {pieces.bracketed(range(b))}, "
        f"rhs_batching_dimensions = {pieces.bracketed([shift + i for i in range(b)])}, "
        f"lhs_contracting_dimensions = [{b + 1}], rhs_contracting_dimensions = [{shift + b}], "
        f"lhs_ragged_dimensions = [{ragged}], "
        f"rhs_group_dimensions = {pieces.bracketed([0] * shift)}"
    )
    return Instance(
        "chlo.ragged_dot", (TensorType(lhs, "f32"), TensorType(rhs, "f32"), sizes),
        (TensorType(shape, "f32"),), f"ragged_dot_dimension_numbers = #chlo.ragged_dot<{numbers}>",
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "chlo_ragged_dot": _ragged_dot(),
    "dot": _dot(),
    "dot_general": _dot_general(),
    "einsum": _einsum(2),
    "unary_einsum": _einsum(1),
}
