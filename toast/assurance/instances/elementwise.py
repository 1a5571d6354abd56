"""Instances of elementwise ops (rules/ops/elementwise.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.program import TensorType

_UNARY = {
    "float": "cbrt ceil cosine exponential exponential_minus_one floor log log_plus_one logistic "
    "round_nearest_afz round_nearest_even rsqrt sine sqrt tan tanh chlo.acos chlo.acosh chlo.asin "
    "chlo.asinh chlo.atan chlo.atanh chlo.bessel_i1e chlo.cosh chlo.digamma chlo.erf chlo.erf_inv "
    "chlo.erfc chlo.lgamma chlo.sinh chlo.square chlo.tan",
    "number": "abs negate sign",
    "integer": "count_leading_zeros popcnt not",
    "test": "is_finite chlo.is_inf chlo.is_neg_inf chlo.is_pos_inf",
}
_BINARY = {
    "float": "atan2 chlo.next_after chlo.zeta chlo.polygamma",
    "number": "add divide maximum minimum multiply power remainder subtract",
    "integer": "and or xor shift_left shift_right_arithmetic shift_right_logical chlo.mulhi",
}
_BROADCAST = {
    "float": "atan2 next_after zeta polygamma",
    "number": "add divide maximum minimum multiply power remainder subtract",
    "integer": "and or xor shift_left shift_right_arithmetic shift_right_logical",
}
_OF = {
    "float": pieces.FLOATS, "number": (*pieces.FLOATS, "i32"), "integer": pieces.INTEGERS,
    "test": pieces.FLOATS,
}  # fmt: skip


def _full(name: str) -> str:
    return name if "." in name else f"stablehlo.{name}"


def _elementwise(name: str, of: str, operands: int) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        type_ = TensorType(pieces.shape(draw), pieces.dtype(draw, _OF[of]))
        result = TensorType(type_.shape, "i1") if of == "test" else type_
        return Instance(_full(name), (type_,) * operands, (result,))

    return strategy()


def _broadcasting(name: str, of: str) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape, dtype = pieces.shape(draw, 1), pieces.dtype(draw, _OF[of])
        trailing = shape[pieces.count(draw, 0, len(shape)) :]
        short = TensorType(tuple(1 if pieces.flag(draw) else size for size in trailing), dtype)
        whole = TensorType(shape, dtype)
        operands = (whole, short) if pieces.flag(draw) else (short, whole)
        return Instance(f"chlo.broadcast_{name}", operands, (whole,))

    return strategy()


@st.composite
def _compare(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw), pieces.dtype(draw, (*pieces.FLOATS, *pieces.INTEGERS)))
    direction = draw(st.sampled_from(["EQ", "NE", "GE", "GT", "LE", "LT"]))
    attribute = f"comparison_direction = #stablehlo<comparison_direction {direction}>"
    return Instance(
        "stablehlo.compare", (type_, type_), (TensorType(type_.shape, "i1"),), attribute
    )


@st.composite
def _select(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw), pieces.dtype(draw))
    predicate = TensorType(() if pieces.flag(draw) else type_.shape, "i1")
    return Instance("stablehlo.select", (predicate, type_, type_), (type_,))


@st.composite
def _clamp(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw), pieces.dtype(draw))
    low, high = (
        TensorType(() if pieces.flag(draw) else type_.shape, type_.dtype) for _ in range(2)
    )
    return Instance("stablehlo.clamp", (low, type_, high), (type_,))


@st.composite
def _convert(draw: Draw) -> Instance:
    shape = pieces.shape(draw)
    every = (*pieces.FLOATS, *pieces.INTEGERS, "bf16", "i1")
    return Instance(
        "stablehlo.convert", (TensorType(shape, pieces.dtype(draw, every)),),
        (TensorType(shape, pieces.dtype(draw, every)),),
    )  # fmt: skip


@st.composite
def _complex(draw: Draw) -> Instance:
    shape = pieces.shape(draw)
    real, whole = draw(st.sampled_from([("f32", "c64"), ("f64", "c128")]))
    return Instance(
        "stablehlo.complex", (TensorType(shape, real),) * 2, (TensorType(shape, whole),)
    )


def _part(name: str) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape = pieces.shape(draw)
        real, whole = draw(st.sampled_from([("f32", "c64"), ("f64", "c128")]))
        return Instance(name, (TensorType(shape, whole),), (TensorType(shape, real),))

    return strategy()


@st.composite
def _conj(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw), pieces.dtype(draw, ("c64", "c128")))
    return Instance("chlo.conj", (type_,), (type_,))


@st.composite
def _constant_like(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw), "f32")
    return Instance("chlo.constant_like", (type_,), (type_,), "value = 2.5 : f32")


@st.composite
def _reduce_precision(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw), "f32")
    bits = (
        f"exponent_bits = {pieces.count(draw, 4, 8)} : i32, "
        f"mantissa_bits = {pieces.count(draw, 3, 20)} : i32"
    )
    return Instance("stablehlo.reduce_precision", (type_,), (type_,), bits)


@st.composite
def _map(draw: Draw) -> Instance:
    type_ = TensorType(pieces.shape(draw, 1), pieces.dtype(draw))
    dimensions = f"dimensions = {pieces.array(range(len(type_.shape)))}"
    return Instance(
        "stablehlo.map", (type_, type_), (type_,), dimensions, pieces.body(type_.dtype, "multiply")
    )


@st.composite
def _bitcast_convert(draw: Draw) -> Instance:
    shape = pieces.shape(draw)
    one, other, parts = draw(
        st.sampled_from([("f32", "i32", 1), ("f32", "i16", 2), ("i64", "i16", 4), ("i32", "i8", 4)])
    )
    types = (
        TensorType(shape, one), TensorType((*shape, parts) if parts > 1 else shape, other),
    )  # fmt: skip
    operand, result = types if pieces.flag(draw) else types[::-1]
    return Instance("stablehlo.bitcast_convert", (operand,), (result,))


def _kind_of(name: str) -> str:
    bare = name.removeprefix("stablehlo.")
    return "stablehlo_not" if bare == "not" else bare.replace(".", "_")


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    **{_kind_of(n): _elementwise(n, of, 1) for of, names in _UNARY.items() for n in names.split()},
    **{_kind_of(n): _elementwise(n, of, 2) for of, names in _BINARY.items() for n in names.split()},
    **{
        f"chlo_broadcast_{n}": _broadcasting(n, of)
        for of, names in _BROADCAST.items() for n in names.split()
    },
    "bitcast_convert": _bitcast_convert(),
    "chlo_conj": _conj(),
    "chlo_constant_like": _constant_like(),
    "clamp": _clamp(),
    "compare": _compare(),
    "complex": _complex(),
    "convert": _convert(),
    "imag": _part("stablehlo.imag"),
    "map": _map(),
    "real": _part("stablehlo.real"),
    "reduce_precision": _reduce_precision(),
    "select": _select(),
}  # fmt: skip
