"""Random instances of every op kind: what rules are proven on, and compared with Shardy on.

One hypothesis strategy per op kind draws shapes and attributes that verify.  Sizes are small, with
2 and 3 as frequent divisors; ranks go to 4; dimension numbers come in any order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from toast.frontend import Program, TensorType, mlir, stablehlo

Draw = Callable[[st.SearchStrategy[Any]], Any]
Shape = tuple[int, ...]

_SIZES = (2, 3, 4, 6, 1, 8, 5)
_FLOATS = ("f32", "f64", "f16")
_INTEGERS = ("i32", "ui8", "i64")


@dataclasses.dataclass(frozen=True)
class Instance:
    """One op: everything of it but the names of its operands."""

    name: str
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    attributes: str = ""
    region: str = ""

    @property
    def text(self) -> str:
        """The op in MLIR's generic form, its operands left out."""
        attributes = f" <{{{self.attributes}}}>" if self.attributes else ""
        region = f" ({{\n{self.region}\n}})" if self.region else ""
        return f'"{self.name}"(){attributes}{region} : () -> ()'


def program_of(instances: Sequence[Instance], name: str = "instances") -> Program:
    """A program of which each op is one of ``instances``, on arguments of its own.

    Raises :class:`toast.errors.TargetError` when one does not verify.
    """
    module = mlir.module_of_ops([(i.text, i.operands, i.results) for i in instances])
    return stablehlo.from_module(module, name=name)


def draw(kind: str, count: int, start: int = 0) -> tuple[Instance, ...]:
    """``count`` different instances of an op kind; the same ``start``, the same instances.

    Fewer, where there are not that many.
    """
    found: dict[Instance, None] = {}

    def collect(instance: Instance) -> None:
        found[instance] = None

    chosen = settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for round_ in range(_ROUNDS):  # hypothesis knows its own choices, not what they make
            seed(_ROUNDS * start + round_)(chosen(given(KINDS[kind])(collect)))()
            if len(found) >= count:
                break
    return tuple(itertools.islice(found, count))


#: Rounds of drawing after which there seem to be no more.
_ROUNDS = 8


# -- pieces --------------------------------------------------------------------------------------


def _size(draw: Draw) -> int:
    return int(draw(st.sampled_from(_SIZES)))


def _shape(draw: Draw, least: int = 0, most: int = 3) -> Shape:
    return tuple(_size(draw) for _ in range(draw(st.integers(least, most))))


def _dtype(draw: Draw, dtypes: Sequence[str] = _FLOATS) -> str:
    return str(draw(st.sampled_from(dtypes)))


def _count(draw: Draw, least: int, most: int) -> int:
    return int(draw(st.integers(least, most)))


def _flag(draw: Draw) -> bool:
    return bool(draw(st.booleans()))


def _order(draw: Draw, count: int) -> tuple[int, ...]:
    return tuple(draw(st.permutations(range(count))))


def _some(draw: Draw, count: int, least: int = 0) -> tuple[int, ...]:
    """Some of the numbers below ``count``, in order."""
    chosen = draw(st.sets(st.sampled_from(range(count)), min_size=least)) if count else set()
    return tuple(sorted(chosen))


def _array(numbers: Sequence[int], type_: str = "i64") -> str:
    return f"array<{type_}: {', '.join(map(str, numbers))}>" if numbers else f"array<{type_}>"


def _bools(flags: Sequence[bool]) -> str:
    return _array([str(f).lower() for f in flags], "i1")  # type: ignore[misc]


def _list(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    rows = ", ".join(_list(pair) for pair in pairs)
    return f"dense<[{rows}]> : tensor<{len(pairs)}x2xi64>"


def _body(dtype: str, operation: str, count: int = 1) -> str:
    """A region that combines ``count`` pairs of scalars by one op each."""
    scalar = mlir.type_text(TensorType((), dtype))
    names = [f"%a{i}" for i in range(2 * count)]
    lines = [f"^bb0({', '.join(f'{n}: {scalar}' for n in names)}):"]
    for i in range(count):
        lines.append(
            f'  %c{i} = "stablehlo.{operation}"({names[i]}, {names[count + i]}) '
            f": ({scalar}, {scalar}) -> {scalar}"
        )
    made = ", ".join(f"%c{i}" for i in range(count))
    types = ", ".join([scalar] * count)
    return "\n".join([*lines, f'  "stablehlo.return"({made}) : ({types}) -> ()'])


def _columns(rows: Sequence[Sequence[Any]], count: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * count


def _windows(size: int, low: int, high: int, window: int, stride: int, hole: int = 1) -> int:
    """Windows of a given extent in a padded dimension whose elements lie ``hole`` apart."""
    padded = (size - 1) * hole + 1 + low + high
    return 0 if padded < window else (padded - window) // stride + 1


# -- elementwise ---------------------------------------------------------------------------------

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
    "float": _FLOATS, "number": (*_FLOATS, "i32"), "integer": _INTEGERS, "test": _FLOATS,
}  # fmt: skip


def _full(name: str) -> str:
    return name if "." in name else f"stablehlo.{name}"


def _elementwise(name: str, of: str, operands: int) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        type_ = TensorType(_shape(draw), _dtype(draw, _OF[of]))
        result = TensorType(type_.shape, "i1") if of == "test" else type_
        return Instance(_full(name), (type_,) * operands, (result,))

    return strategy()


def _broadcasting(name: str, of: str) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape, dtype = _shape(draw, 1), _dtype(draw, _OF[of])
        kept = shape[_count(draw, 0, len(shape)) :]
        short = TensorType(tuple(1 if _flag(draw) else size for size in kept), dtype)
        whole = TensorType(shape, dtype)
        operands = (whole, short) if _flag(draw) else (short, whole)
        return Instance(f"chlo.broadcast_{name}", operands, (whole,))

    return strategy()


@st.composite
def _compare(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw), _dtype(draw, (*_FLOATS, *_INTEGERS)))
    direction = draw(st.sampled_from(["EQ", "NE", "GE", "GT", "LE", "LT"]))
    attribute = f"comparison_direction = #stablehlo<comparison_direction {direction}>"
    return Instance(
        "stablehlo.compare", (type_, type_), (TensorType(type_.shape, "i1"),), attribute
    )


@st.composite
def _select(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw), _dtype(draw))
    predicate = TensorType(() if _flag(draw) else type_.shape, "i1")
    return Instance("stablehlo.select", (predicate, type_, type_), (type_,))


@st.composite
def _clamp(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw), _dtype(draw))
    low, high = (TensorType(() if _flag(draw) else type_.shape, type_.dtype) for _ in range(2))
    return Instance("stablehlo.clamp", (low, type_, high), (type_,))


@st.composite
def _convert(draw: Draw) -> Instance:
    shape = _shape(draw)
    every = (*_FLOATS, *_INTEGERS, "bf16", "i1")
    return Instance(
        "stablehlo.convert", (TensorType(shape, _dtype(draw, every)),),
        (TensorType(shape, _dtype(draw, every)),),
    )  # fmt: skip


@st.composite
def _complex(draw: Draw) -> Instance:
    shape = _shape(draw)
    real, made = draw(st.sampled_from([("f32", "c64"), ("f64", "c128")]))
    return Instance("stablehlo.complex", (TensorType(shape, real),) * 2, (TensorType(shape, made),))


def _part(name: str) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape = _shape(draw)
        real, whole = draw(st.sampled_from([("f32", "c64"), ("f64", "c128")]))
        return Instance(name, (TensorType(shape, whole),), (TensorType(shape, real),))

    return strategy()


@st.composite
def _conj(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw), _dtype(draw, ("c64", "c128")))
    return Instance("chlo.conj", (type_,), (type_,))


@st.composite
def _constant_like(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw), "f32")
    return Instance("chlo.constant_like", (type_,), (type_,), "value = 2.5 : f32")


@st.composite
def _reduce_precision(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw), "f32")
    bits = (
        f"exponent_bits = {_count(draw, 4, 8)} : i32, mantissa_bits = {_count(draw, 3, 20)} : i32"
    )
    return Instance("stablehlo.reduce_precision", (type_,), (type_,), bits)


@st.composite
def _map(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw, 1), _dtype(draw))
    dimensions = f"dimensions = {_array(range(len(type_.shape)))}"
    return Instance(
        "stablehlo.map", (type_, type_), (type_,), dimensions, _body(type_.dtype, "multiply")
    )


@st.composite
def _bitcast_convert(draw: Draw) -> Instance:
    shape = _shape(draw)
    one, other, pieces = draw(
        st.sampled_from([("f32", "i32", 1), ("f32", "i16", 2), ("i64", "i16", 4), ("i32", "i8", 4)])
    )
    types = (
        TensorType(shape, one), TensorType((*shape, pieces) if pieces > 1 else shape, other),
    )  # fmt: skip
    operand, result = types if _flag(draw) else types[::-1]
    return Instance("stablehlo.bitcast_convert", (operand,), (result,))


# -- shapes and parts ----------------------------------------------------------------------------


@st.composite
def _transpose(draw: Draw) -> Instance:
    shape = _shape(draw, 1, 4)
    order = _order(draw, len(shape))
    made = tuple(shape[d] for d in order)
    dtype = _dtype(draw)
    return Instance(
        "stablehlo.transpose", (TensorType(shape, dtype),), (TensorType(made, dtype),),
        f"permutation = {_array(order)}",
    )  # fmt: skip


@st.composite
def _broadcast_in_dim(draw: Draw) -> Instance:
    made = _shape(draw, 0, 4)
    kept = _some(draw, len(made))
    kept = tuple(draw(st.permutations(kept))) if kept else ()
    shape = tuple(1 if _flag(draw) else made[d] for d in kept)
    dtype = _dtype(draw)
    return Instance(
        "stablehlo.broadcast_in_dim", (TensorType(shape, dtype),), (TensorType(made, dtype),),
        f"broadcast_dimensions = {_array(kept)}",
    )  # fmt: skip


@st.composite
def _broadcast(draw: Draw) -> Instance:
    new, shape, dtype = _shape(draw, 0, 2), _shape(draw, 0, 2), _dtype(draw)
    return Instance(
        "stablehlo.broadcast", (TensorType(shape, dtype),), (TensorType(new + shape, dtype),),
        f"broadcast_sizes = {_array(new)}",
    )  # fmt: skip


@st.composite
def _reshape(draw: Draw) -> Instance:
    def grouped(primes: Sequence[int]) -> Shape:
        cuts = sorted(_count(draw, 0, len(primes)) for _ in range(_count(draw, 0, 3)))
        edges = [0, *cuts, len(primes)]
        return tuple(math.prod(primes[a:b]) for a, b in itertools.pairwise(edges))

    primes = [draw(st.sampled_from([2, 2, 3, 5])) for _ in range(_count(draw, 0, 5))]
    other = draw(st.permutations(primes)) if primes and _flag(draw) else primes
    dtype = _dtype(draw)
    return Instance(
        "stablehlo.reshape", (TensorType(grouped(primes), dtype),),
        (TensorType(grouped(other), dtype),),
    )  # fmt: skip


@st.composite
def _slice(draw: Draw) -> Instance:
    shape, dtype = _shape(draw, 1), _dtype(draw)
    rows = []
    for size in shape:
        start = _count(draw, 0, size - 1) if _flag(draw) else 0
        limit = _count(draw, start + 1, size) if _flag(draw) else size
        stride = _count(draw, 1, 3) if _flag(draw) else 1
        rows.append((start, limit, stride, -(-(limit - start) // stride)))
    starts, limits, strides, made = _columns(rows, 4)
    return Instance(
        "stablehlo.slice", (TensorType(shape, dtype),), (TensorType(tuple(made), dtype),),
        f"start_indices = {_array(starts)}, limit_indices = {_array(limits)}, "
        f"strides = {_array(strides)}",
    )  # fmt: skip


@st.composite
def _pad(draw: Draw) -> Instance:
    shape, dtype = _shape(draw, 1), _dtype(draw)
    rows = []
    for size in shape:
        low, high = (_count(draw, -1, 3) if _flag(draw) else 0 for _ in range(2))
        hole = _count(draw, 0, 2) if _flag(draw) else 0
        extent = low + high + (size - 1) * hole + size
        if extent < 1:
            low, high, extent = 0, 0, (size - 1) * hole + size
        rows.append((low, high, hole, extent))
    lows, highs, inner, made = _columns(rows, 4)
    return Instance(
        "stablehlo.pad", (TensorType(shape, dtype), TensorType((), dtype)),
        (TensorType(tuple(made), dtype),),
        f"edge_padding_low = {_array(lows)}, edge_padding_high = {_array(highs)}, "
        f"interior_padding = {_array(inner)}",
    )  # fmt: skip


@st.composite
def _concatenate(draw: Draw) -> Instance:
    shape, dtype = _shape(draw, 1), _dtype(draw)
    dimension = _count(draw, 0, len(shape) - 1)
    sizes = [_size(draw) for _ in range(_count(draw, 1, 3))]
    shapes = [(*shape[:dimension], size, *shape[dimension + 1 :]) for size in (*sizes, sum(sizes))]
    *operands, result = (TensorType(s, dtype) for s in shapes)
    return Instance(
        "stablehlo.concatenate", tuple(operands), (result,), f"dimension = {dimension} : i64"
    )


@st.composite
def _reverse(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw, 1), _dtype(draw))
    dimensions = _some(draw, len(type_.shape))
    return Instance("stablehlo.reverse", (type_,), (type_,), f"dimensions = {_array(dimensions)}")


def _smaller(draw: Draw, shape: Shape) -> Shape:
    return tuple(_count(draw, 1, size) if _flag(draw) else size for size in shape)


@st.composite
def _dynamic_slice(draw: Draw) -> Instance:
    shape, dtype = _shape(draw, 1), _dtype(draw)
    made = _smaller(draw, shape)
    places = (TensorType((), "i32"),) * len(shape)
    return Instance(
        "stablehlo.dynamic_slice", (TensorType(shape, dtype), *places),
        (TensorType(made, dtype),), f"slice_sizes = {_array(made)}",
    )  # fmt: skip


@st.composite
def _dynamic_update_slice(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw, 1), _dtype(draw))
    update = TensorType(_smaller(draw, type_.shape), type_.dtype)
    places = (TensorType((), "i32"),) * len(type_.shape)
    return Instance("stablehlo.dynamic_update_slice", (type_, update, *places), (type_,))


@st.composite
def _iota(draw: Draw) -> Instance:
    type_ = TensorType(_shape(draw, 1), "i32")
    dimension = _count(draw, 0, len(type_.shape) - 1)
    return Instance("stablehlo.iota", (), (type_,), f"iota_dimension = {dimension} : i64")


def _constant(name: str) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        type_ = TensorType(_shape(draw), "f32")
        return Instance(name, (), (type_,), f"value = dense<1.5> : {mlir.type_text(type_)}")

    return strategy()


# -- products ------------------------------------------------------------------------------------


@st.composite
def _dot_general(draw: Draw) -> Instance:
    roles = {role: _shape(draw, 0, 2) for role in "bkxy"}
    lhs, rhs = (
        draw(st.permutations([(r, i) for r in side for i in range(len(roles[r]))]))
        for side in ("bkx", "bky")
    )

    def places(side: Sequence[tuple[str, int]], role: str) -> str:
        return _list([side.index((role, i)) for i in range(len(roles[role]))])

    def free(side: Sequence[tuple[str, int]], role: str) -> Shape:
        return tuple(roles[r][i] for r, i in side if r == role)

    dtype = _dtype(draw, ("f32", "f64"))
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
    left, inner, right = _shape(draw, 0, 1), _size(draw), _shape(draw, 0, 1)
    dtype = _dtype(draw, ("f32", "f64"))
    return Instance(
        "stablehlo.dot", (TensorType((*left, inner), dtype), TensorType((inner, *right), dtype)),
        (TensorType(left + right, dtype),),
    )  # fmt: skip


def _einsum(operands: int) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        sizes = {letter: _size(draw) for letter in "abcde"}
        sides = [
            "".join(draw(st.permutations("abcde"))[: _count(draw, 0, 3)]) for _ in range(operands)
        ]
        letters = sorted(set("".join(sides)))
        # XLA's own einsum sums over letters that both sides have.
        shared = set(sides[0]).intersection(*sides) if operands > 1 else set(letters)
        kept = [x for x in letters if x not in shared or _flag(draw)]
        made = "".join(draw(st.permutations(kept))) if kept else ""
        types = [TensorType(tuple(sizes[x] for x in s), "f32") for s in (*sides, made)]
        name = "stablehlo.einsum" if operands > 1 else "stablehlo.unary_einsum"
        return Instance(
            name, tuple(types[:-1]), (types[-1],), f'einsum_config = "{",".join(sides)}->{made}"'
        )

    return strategy()


@st.composite
def _ragged_dot(draw: Draw) -> Instance:
    batch = _shape(draw, 0, 1)
    rows, inner, columns, groups = (_size(draw) for _ in range(4))
    b, mode = len(batch), draw(st.sampled_from(["free", "contracting", "batching"]))
    sizes = TensorType((groups,), "i32")
    if mode == "batching" and not batch:
        mode = "free"
    by_group = (groups,) if mode == "free" else ()
    lhs = (*batch, rows, inner)
    rhs = (*by_group, *batch, inner, columns)
    made = (*((groups,) if mode == "contracting" else ()), *batch, rows, columns)
    shift = len(by_group)
    ragged = {"free": b, "contracting": b + 1, "batching": 0}[mode]
    numbers = (
        f"lhs_batching_dimensions = {_list(range(b))}, "
        f"rhs_batching_dimensions = {_list([shift + i for i in range(b)])}, "
        f"lhs_contracting_dimensions = [{b + 1}], rhs_contracting_dimensions = [{shift + b}], "
        f"lhs_ragged_dimensions = [{ragged}], rhs_group_dimensions = {_list([0] * shift)}"
    )
    return Instance(
        "chlo.ragged_dot", (TensorType(lhs, "f32"), TensorType(rhs, "f32"), sizes),
        (TensorType(made, "f32"),), f"ragged_dot_dimension_numbers = #chlo.ragged_dot<{numbers}>",
    )  # fmt: skip


@st.composite
def _convolution(draw: Draw) -> Instance:
    space = _count(draw, 0, 2)
    groups, by_batch = (draw(st.sampled_from([1, 1, 1, 2, 3])), _flag(draw))
    features = batch_groups = 1
    if by_batch:
        batch_groups = groups
    else:
        features = groups
    batch = _size(draw) * batch_groups
    inputs = _size(draw)
    outputs = _size(draw) * groups
    rows = []
    for _ in range(space):
        size, window = _count(draw, 3, 8), _count(draw, 1, 3)
        stride, hole, gap = (_count(draw, 1, 2) if _flag(draw) else 1 for _ in range(3))
        low, high = _count(draw, 0, 2), _count(draw, 0, 2)
        extent = (window - 1) * gap + 1
        count = _windows(size, low, high, extent, stride, hole)
        if not count:
            window = gap = 1
            count = _windows(size, low, high, 1, stride, hole)
        rows.append((size, window, stride, (low, high), hole, gap, count))
    sizes, windows, strides, pads, holes, spread, made = _columns(rows, 7)

    def laid(first: tuple[str, int], second: tuple[str, int], rest: list[int]) -> tuple[Any, Shape]:
        named = [first, second, *((str(i), size) for i, size in enumerate(rest))]
        order = draw(st.permutations(named))
        return [name for name, _ in order], tuple(size for _, size in order)

    lhs, lhs_shape = laid(("b", batch), ("f", inputs * features), sizes)
    rhs, rhs_shape = laid(("i", inputs), ("o", outputs), windows)
    out, out_shape = laid(("b", batch // batch_groups), ("f", outputs), made)
    dimensions = "x".join(f"[{', '.join(side)}]" for side in (lhs, rhs))
    padding = f"padding = {_pairs(pads)}, " if space else ""
    dtype = _dtype(draw, ("f32", "f64"))
    return Instance(
        "stablehlo.convolution", (TensorType(lhs_shape, dtype), TensorType(rhs_shape, dtype)),
        (TensorType(out_shape, dtype),),
        f"dimension_numbers = #stablehlo.conv<{dimensions}->[{', '.join(out)}]>, "
        f"window_strides = {_array(strides)}, {padding}lhs_dilation = {_array(holes)}, "
        f"rhs_dilation = {_array(spread)}, "
        f"feature_group_count = {features} : i64, batch_group_count = {batch_groups} : i64",
    )  # fmt: skip


# -- reductions and windows ----------------------------------------------------------------------

_COMBINERS = ("add", "maximum", "minimum", "multiply")


@st.composite
def _reduce(draw: Draw) -> Instance:
    shape = _shape(draw, 1, 4)
    bits = _flag(draw)
    dtype = _dtype(draw, _INTEGERS) if bits else _dtype(draw, ("f32", "f64"))
    combiner = draw(st.sampled_from(("and", "or") if bits else _COMBINERS))
    count = _count(draw, 1, 2)
    dimensions = _some(draw, len(shape))
    made = tuple(size for d, size in enumerate(shape) if d not in dimensions)
    return Instance(
        "stablehlo.reduce",
        (*(TensorType(shape, dtype),) * count, *(TensorType((), dtype),) * count),
        (TensorType(made, dtype),) * count,
        f"dimensions = {_array(dimensions)}", _body(dtype, combiner, count),
    )  # fmt: skip


@st.composite
def _reduce_window(draw: Draw) -> Instance:
    shape, dtype = _shape(draw, 1), _dtype(draw, ("f32", "f64"))
    rows = []
    for size in shape:
        moves = _flag(draw)
        window, stride = (_count(draw, 1, 3), _count(draw, 1, 2)) if moves else (1, 1)
        hole, gap = (_count(draw, 1, 2), _count(draw, 1, 2)) if moves and _flag(draw) else (1, 1)
        low, high = (_count(draw, 0, 2), _count(draw, 0, 2)) if moves else (0, 0)
        extent = (window - 1) * gap + 1
        if not _windows(size, low, high, extent, stride, hole):
            window = gap = extent = 1
        rows.append(
            (
                window,
                stride,
                hole,
                gap,
                (low, high),
                _windows(size, low, high, extent, stride, hole),
            )
        )
    windows, strides, holes, gaps, pads, made = _columns(rows, 6)
    return Instance(
        "stablehlo.reduce_window", (TensorType(shape, dtype), TensorType((), dtype)),
        (TensorType(tuple(made), dtype),),
        f"window_dimensions = {_array(windows)}, window_strides = {_array(strides)}, "
        f"base_dilations = {_array(holes)}, window_dilations = {_array(gaps)}, "
        f"padding = {_pairs(pads)}",
        _body(dtype, draw(st.sampled_from(_COMBINERS))),
    )  # fmt: skip


@st.composite
def _select_and_scatter(draw: Draw) -> Instance:
    shape = _shape(draw, 1)
    rows = []
    for size in shape:
        moves = _flag(draw)
        window = _count(draw, 1, min(3, size)) if moves else 1
        stride = _count(draw, 1, 3) if moves else 1
        rows.append((window, stride, _windows(size, 0, 0, window, stride)))
    windows, strides, made = _columns(rows, 3)
    scalar = mlir.type_text(TensorType((), "f32"))
    select = (
        f"^bb0(%a0: {scalar}, %a1: {scalar}):\n"
        '  %c = "stablehlo.compare"(%a0, %a1) <{comparison_direction = '
        f"#stablehlo<comparison_direction GE>}}> : ({scalar}, {scalar}) -> tensor<i1>\n"
        '  "stablehlo.return"(%c) : (tensor<i1>) -> ()\n}, {\n'
    )
    whole = TensorType(shape, "f32")
    return Instance(
        "stablehlo.select_and_scatter",
        (whole, TensorType(tuple(made), "f32"), TensorType((), "f32")), (whole,),
        f"window_dimensions = {_array(windows)}, window_strides = {_array(strides)}",
        select + _body("f32", "add"),
    )  # fmt: skip


def _batch_norm(name: str) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape = _shape(draw, 2, 4)
        feature = _count(draw, 0, len(shape) - 1)
        # The variance of a single element is rounding alone.
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


# -- gather and scatter --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Indexed:
    """What a gather reads and a scatter writes: dimension numbers and shapes."""

    target: Shape
    indices: Shape
    moved: Shape
    window_dims: Shape
    collapsed: Shape
    batching: Shape
    index_batching: Shape
    index_map: Shape
    vector_dim: int
    sizes: Shape


def _indexed(draw: Draw) -> _Indexed:
    target = _shape(draw, 1, 4)
    roles = [draw(st.sampled_from(["window", "window", "collapsed", "batching"])) for _ in target]
    batching = [d for d, role in enumerate(roles) if role == "batching"]
    collapsed = [d for d, role in enumerate(roles) if role == "collapsed"]
    windows = [d for d, role in enumerate(roles) if role == "window"]
    batching_order = draw(st.permutations(batching)) if batching else []
    # The batch: dimensions that go with the target's, and others, in any order.
    batch = [("with", d) for d in batching_order]
    batch += [("free", _size(draw)) for _ in range(_count(draw, 0, 2))]
    batch = list(draw(st.permutations(batch))) if batch else []
    batch_sizes = [target[n] if role == "with" else n for role, n in batch]
    mapped = [d for d in (*collapsed, *windows) if d in collapsed or _flag(draw)]
    index_map = tuple(draw(st.permutations(mapped))) if mapped else ()
    vector = _count(draw, 0, len(batch))
    indices = list(batch_sizes)
    if len(index_map) == 1 and _flag(draw):
        vector = len(batch)  # implied: each index is a scalar
    else:
        indices.insert(vector, len(index_map))
    places = [i + (i >= vector and len(indices) > len(batch)) for i in range(len(batch))]
    where = {d: places[batch.index(("with", d))] for d in batching_order}
    # A window must cover dimensions that no index moves along.
    sizes = tuple(
        1 if d not in windows else _count(draw, 1, size) if _flag(draw) else size
        for d, size in enumerate(target)
    )
    rank = len(batch) + len(windows)
    window_dims = tuple(sorted(_order(draw, rank)[: len(windows)]))
    moved, left, right = [], iter(batch_sizes), iter(windows)
    for place in range(rank):
        moved.append(sizes[next(right)] if place in window_dims else next(left))
    return _Indexed(
        target, tuple(indices), tuple(moved), window_dims, tuple(collapsed), tuple(batching_order),
        tuple(where[d] for d in batching_order), index_map, vector, sizes,
    )  # fmt: skip


def _by_target(batching: Shape, index_batching: Shape) -> tuple[Shape, Shape]:
    pairs = sorted(zip(batching, index_batching, strict=True))
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


@st.composite
def _gather(draw: Draw) -> Instance:
    i, dtype = _indexed(draw), _dtype(draw)
    batching, index_batching = _by_target(i.batching, i.index_batching)
    numbers = (
        f"offset_dims = {_list(i.window_dims)}, collapsed_slice_dims = {_list(i.collapsed)}, "
        f"operand_batching_dims = {_list(batching)}, "
        f"start_indices_batching_dims = {_list(index_batching)}, "
        f"start_index_map = {_list(i.index_map)}, index_vector_dim = {i.vector_dim}"
    )
    return Instance(
        "stablehlo.gather", (TensorType(i.target, dtype), TensorType(i.indices, "i32")),
        (TensorType(i.moved, dtype),),
        f"dimension_numbers = #stablehlo.gather<{numbers}>, slice_sizes = {_array(i.sizes)}, "
        "indices_are_sorted = false",
    )  # fmt: skip


@st.composite
def _scatter(draw: Draw) -> Instance:
    i, dtype = _indexed(draw), _dtype(draw, ("f32", "f64"))
    # Without an index vector, XLA (jaxlib 0.10.2, CPU) keeps the last update of a single element.
    assume(i.index_map)
    batching, index_batching = _by_target(i.batching, i.index_batching)
    count = _count(draw, 1, 2)
    numbers = (
        f"update_window_dims = {_list(i.window_dims)}, "
        f"inserted_window_dims = {_list(i.collapsed)}, "
        f"input_batching_dims = {_list(batching)}, "
        f"scatter_indices_batching_dims = {_list(index_batching)}, "
        f"scatter_dims_to_operand_dims = {_list(i.index_map)}, index_vector_dim = {i.vector_dim}"
    )
    target, moved = TensorType(i.target, dtype), TensorType(i.moved, dtype)
    combiner = draw(st.sampled_from(_COMBINERS))
    return Instance(
        "stablehlo.scatter",
        (*(target,) * count, TensorType(i.indices, "i32"), *(moved,) * count), (target,) * count,
        f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, "
        "indices_are_sorted = false, unique_indices = false",
        _body(dtype, combiner, count),
    )  # fmt: skip


@st.composite
def _torch_index_select(draw: Draw) -> Instance:
    shape, dtype = _shape(draw, 1), _dtype(draw)
    dim = _count(draw, 0, len(shape) - 1)
    batch = _count(draw, 0, dim)
    index = (*shape[:batch], *_shape(draw, 0, 2))
    made = (*shape[:dim], *index[batch:], *shape[dim + 1 :])
    return Instance(
        "stablehlo.torch_index_select", (TensorType(shape, dtype), TensorType(index, "i32")),
        (TensorType(made, dtype),), f"dim = {dim} : i64, batch_dims = {batch} : i64",
    )  # fmt: skip


# -- the rest ------------------------------------------------------------------------------------


@st.composite
def _sort(draw: Draw) -> Instance:
    shape, count = _shape(draw, 1), _count(draw, 1, 3)
    dimension = _count(draw, 0, len(shape) - 1)
    types = [TensorType(shape, "f32"), *(TensorType(shape, _dtype(draw)) for _ in range(count - 1))]
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
    shape = _shape(draw, 1)
    best = _count(draw, 1, shape[-1])
    made = (*shape[:-1], best)
    return Instance(
        "chlo.top_k", (TensorType(shape, "f32"),),
        (TensorType(made, "f32"), TensorType(made, "i32")), f"k = {best} : i64",
    )  # fmt: skip


@st.composite
def _fft(draw: Draw) -> Instance:
    count = _count(draw, 1, 3)
    shape = (*_shape(draw, 0, 2), *(_size(draw) for _ in range(count)))
    kind = draw(st.sampled_from(["FFT", "IFFT", "RFFT", "IRFFT"]))
    half = (*shape[:-1], shape[-1] // 2 + 1)
    whole, cut = TensorType(shape, "f32"), TensorType(half, "c64")
    both = TensorType(shape, "c64")
    operand, result = {
        "FFT": (both, both), "IFFT": (both, both), "RFFT": (whole, cut), "IRFFT": (cut, whole),
    }[kind]  # fmt: skip
    return Instance(
        "stablehlo.fft", (operand,), (result,),
        f"fft_type = #stablehlo<fft_type {kind}>, fft_length = {_array(shape[-count:])}",
    )  # fmt: skip


@st.composite
def _cholesky(draw: Draw) -> Instance:
    batch, size = _shape(draw, 0, 2), _size(draw)
    type_ = TensorType((*batch, size, size), _dtype(draw, ("f32", "f64")))
    return Instance("stablehlo.cholesky", (type_,), (type_,), f"lower = {str(_flag(draw)).lower()}")


@st.composite
def _triangular_solve(draw: Draw) -> Instance:
    batch, size, other = _shape(draw, 0, 2), _size(draw), _size(draw)
    left = _flag(draw)
    dtype = _dtype(draw, ("f32", "f64"))
    b = TensorType((*batch, size, other) if left else (*batch, other, size), dtype)
    transpose = draw(st.sampled_from(["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"]))
    return Instance(
        "stablehlo.triangular_solve", (TensorType((*batch, size, size), dtype), b), (b,),
        f"left_side = {str(left).lower()}, lower = {str(_flag(draw)).lower()}, "
        f"unit_diagonal = {str(_flag(draw)).lower()}, "
        f"transpose_a = #stablehlo<transpose {transpose}>",
    )  # fmt: skip


@st.composite
def _rng(draw: Draw) -> Instance:
    shape = _shape(draw, 1)
    scalar, extents = TensorType((), "f32"), TensorType((len(shape),), "i64")
    return Instance(
        "stablehlo.rng", (scalar, scalar, extents), (TensorType(shape, "f32"),),
        "rng_distribution = #stablehlo<rng_distribution UNIFORM>",
    )  # fmt: skip


@st.composite
def _rng_bit_generator(draw: Draw) -> Instance:
    state = TensorType((2,), "ui64")
    return Instance(
        "stablehlo.rng_bit_generator", (state,), (state, TensorType(_shape(draw), "ui32")),
        "rng_algorithm = #stablehlo<rng_algorithm THREE_FRY>",
    )  # fmt: skip


def _groups(draw: Draw) -> tuple[int, str]:
    """Replicas in a group, and the attribute that says so; more than one cannot run here."""
    count = _count(draw, 1, 2)
    members = ", ".join(map(str, range(count)))
    return count, f"replica_groups = dense<[[{members}]]> : tensor<1x{count}xi64>"


def _replicated(name: str) -> st.SearchStrategy[Instance]:
    """Collectives that keep the shape."""

    @st.composite
    def strategy(draw: Draw) -> Instance:
        type_ = TensorType(_shape(draw), _dtype(draw, ("f32", "f64")))
        _, groups = _groups(draw)
        if name == "collective_permute":
            groups = "source_target_pairs = dense<[[0, 0]]> : tensor<1x2xi64>"
        region = _body(type_.dtype, "add") if name == "all_reduce" else ""
        return Instance(f"stablehlo.{name}", (type_,), (type_,), groups, region)

    return strategy()


def _resizing(name: str) -> st.SearchStrategy[Instance]:
    """Collectives that gather or scatter along dimensions."""

    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape, dtype = _shape(draw, 1), _dtype(draw, ("f32", "f64"))
        count, groups = _groups(draw)
        one, other = (_count(draw, 0, len(shape) - 1) for _ in range(2))
        large = [size * (count if d == one else 1) for d, size in enumerate(shape)]
        moved = [size * (count if d == other else 1) for d, size in enumerate(shape)]
        small, big, turned = (TensorType(tuple(s), dtype) for s in (shape, large, moved))
        if name == "all_gather":
            return Instance(
                "stablehlo.all_gather", (small,), (big,), f"all_gather_dim = {one} : i64, {groups}"
            )
        if name == "reduce_scatter":
            return Instance(
                "stablehlo.reduce_scatter", (big,), (small,),
                f"scatter_dimension = {one} : i64, {groups}", _body(dtype, "add"),
            )  # fmt: skip
        return Instance(
            "stablehlo.all_to_all", (big,), (turned,),
            f"split_dimension = {one} : i64, concat_dimension = {other} : i64, "
            f"split_count = {count} : i64, {groups}",
        )  # fmt: skip

    return strategy()


# -- custom calls --------------------------------------------------------------------------------


def _call(target: str, operands: Sequence[TensorType], results: Sequence[TensorType]) -> Instance:
    return Instance(
        "stablehlo.custom_call", tuple(operands), tuple(results), f'call_target_name = "{target}"'
    )


def _pointwise_call(target: str, operands: str, results: str) -> st.SearchStrategy[Instance]:
    """A call on operands of one shape; element types are given, ``?`` for any float."""

    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape, dtype = _shape(draw), _dtype(draw)
        sides = [
            [TensorType(shape, dtype if t == "?" else t) for t in side.split()]
            for side in (operands, results)
        ]
        return _call(target, *sides)

    return strategy()


def _matrix_call(target: str, operands: str, results: str) -> st.SearchStrategy[Instance]:
    """A call on square matrices (``m``), or vectors (``v``, ``i``), behind a batch."""

    @st.composite
    def strategy(draw: Draw) -> Instance:
        batch, size = _shape(draw, 0, 2), _size(draw)
        types = {
            "m": TensorType((*batch, size, size), "f32"), "v": TensorType((*batch, size), "f32"),
            "i": TensorType((*batch, size), "i32"),
        }  # fmt: skip
        return _call(target, [types[c] for c in operands], [types[c] for c in results])

    return strategy()


def _top_k_call(target: str, operands: int) -> st.SearchStrategy[Instance]:
    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape = _shape(draw, 1)
        best = _count(draw, 1, shape[-1])
        made = (*shape[:-1], best)
        searched = [TensorType(shape, "f32"), TensorType(shape, "i32")]
        searched += [TensorType((), "f32"), TensorType((), "i32")]
        return _call(
            target, searched[:operands], (TensorType(made, "f32"), TensorType(made, "i32"))
        )

    return strategy()


#: Custom calls that only say something about their operand.
ANNOTATIONS = (
    "Sharding", "annotate_device_placement", "InspectSharding", "LayoutConstraint", "MoveToHost",
    "MoveToDevice", "xla.megascale.provide_metadata",
)  # fmt: skip
_THREEFRY = (
    "cu_threefry2x32", "cu_threefry2x32_ffi", "hip_threefry2x32", "hip_threefry2x32_ffi",
)  # fmt: skip

#: A strategy for each custom call that a rule knows, by target.
_CALLS = {
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


def _kind(name: str) -> str:
    bare = name.removeprefix("stablehlo.")
    return "stablehlo_not" if bare == "not" else bare.replace(".", "_")


#: A strategy for each op kind whose rule claims that something can be sharded, and for each custom
#: call, as ``custom_call TARGET``.
KINDS: dict[str, st.SearchStrategy[Instance]] = {
    **{_kind(n): _elementwise(n, of, 1) for of, names in _UNARY.items() for n in names.split()},
    **{_kind(n): _elementwise(n, of, 2) for of, names in _BINARY.items() for n in names.split()},
    **{
        f"chlo_broadcast_{n}": _broadcasting(n, of)
        for of, names in _BROADCAST.items() for n in names.split()
    },
    "all_gather": _resizing("all_gather"),
    "all_reduce": _replicated("all_reduce"),
    "all_to_all": _resizing("all_to_all"),
    "batch_norm_grad": _batch_norm("grad"),
    "batch_norm_inference": _batch_norm("inference"),
    "batch_norm_training": _batch_norm("training"),
    "bitcast_convert": _bitcast_convert(),
    "broadcast": _broadcast(),
    "broadcast_in_dim": _broadcast_in_dim(),
    "chlo_conj": _conj(),
    "chlo_constant": _constant("chlo.constant"),
    "chlo_constant_like": _constant_like(),
    "chlo_ragged_dot": _ragged_dot(),
    "chlo_top_k": _top_k(),
    "cholesky": _cholesky(),
    "clamp": _clamp(),
    "collective_broadcast": _replicated("collective_broadcast"),
    "collective_permute": _replicated("collective_permute"),
    "compare": _compare(),
    "complex": _complex(),
    "concatenate": _concatenate(),
    "constant": _constant("stablehlo.constant"),
    "convert": _convert(),
    "convolution": _convolution(),
    "cross_replica_sum": _replicated("cross-replica-sum"),
    "dot": _dot(),
    "dot_general": _dot_general(),
    "dynamic_slice": _dynamic_slice(),
    "dynamic_update_slice": _dynamic_update_slice(),
    "einsum": _einsum(2),
    "fft": _fft(),
    "gather": _gather(),
    "imag": _part("stablehlo.imag"),
    "iota": _iota(),
    "map": _map(),
    "pad": _pad(),
    "real": _part("stablehlo.real"),
    "reduce": _reduce(),
    "reduce_precision": _reduce_precision(),
    "reduce_scatter": _resizing("reduce_scatter"),
    "reduce_window": _reduce_window(),
    "reshape": _reshape(),
    "reverse": _reverse(),
    "rng": _rng(),
    "rng_bit_generator": _rng_bit_generator(),
    "scatter": _scatter(),
    "select": _select(),
    "select_and_scatter": _select_and_scatter(),
    "slice": _slice(),
    "sort": _sort(),
    "torch_index_select": _torch_index_select(),
    "transpose": _transpose(),
    "triangular_solve": _triangular_solve(),
    "unary_einsum": _einsum(1),
    **{f"custom_call {target}": strategy for target, strategy in _CALLS.items()},
}  # fmt: skip
