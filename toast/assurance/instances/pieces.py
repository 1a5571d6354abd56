"""Parts of instances: random sizes, shapes, types and choices, and attributes in MLIR's notation.

Sizes are small, and 2 and 3 are frequent divisors; ranks are at most 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from toast.frontend import mlir
from toast.program import TensorType

Draw = Callable[[st.SearchStrategy[Any]], Any]


Shape = tuple[int, ...]


SIZES = (2, 3, 4, 6, 1, 8, 5)


FLOATS = ("f32", "f64", "f16")


INTEGERS = ("i32", "ui8", "i64")


COMBINERS = ("add", "maximum", "minimum", "multiply")


@dataclasses.dataclass(frozen=True)
class Instance:
    """An op without the names of its operands."""

    name: str
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    attributes: str = ""
    region: str = ""

    @property
    def text(self) -> str:
        """The op in MLIR's generic form, without operands."""
        attributes = f" <{{{self.attributes}}}>" if self.attributes else ""
        region = f" ({{\n{self.region}\n}})" if self.region else ""
        return f'"{self.name}"(){attributes}{region} : () -> ()'


def size(draw: Draw) -> int:
    """One of a few sizes."""
    return int(draw(st.sampled_from(SIZES)))


def shape(draw: Draw, least: int = 0, most: int = 3) -> Shape:
    """A shape of ``least`` to ``most`` dimensions."""
    return tuple(size(draw) for _ in range(draw(st.integers(least, most))))


def dtype(draw: Draw, dtypes: Sequence[str] = FLOATS) -> str:
    """One of some element types."""
    return str(draw(st.sampled_from(dtypes)))


def count(draw: Draw, least: int, most: int) -> int:
    """A number from ``least`` to ``most``, both included."""
    return int(draw(st.integers(least, most)))


def flag(draw: Draw) -> bool:
    """A random truth value."""
    return bool(draw(st.booleans()))


def order(draw: Draw, count: int) -> tuple[int, ...]:
    """A random permutation of the numbers below ``count``."""
    return tuple(draw(st.permutations(range(count))))


def some(draw: Draw, count: int, least: int = 0) -> tuple[int, ...]:
    """A random subset of the numbers below ``count``, sorted, with at least ``least`` numbers."""
    chosen = draw(st.sets(st.sampled_from(range(count)), min_size=least)) if count else set()
    return tuple(sorted(chosen))


def array(numbers: Sequence[int], type_: str = "i64") -> str:
    """A dense array attribute."""
    return f"array<{type_}: {', '.join(map(str, numbers))}>" if numbers else f"array<{type_}>"


def bracketed(numbers: Sequence[int]) -> str:
    """Numbers in square brackets."""
    return f"[{', '.join(map(str, numbers))}]"


def pairs(rows: Sequence[tuple[int, int]]) -> str:
    """A tensor attribute with two columns."""
    text = ", ".join(bracketed(row) for row in rows)
    return f"dense<[{text}]> : tensor<{len(rows)}x2xi64>"


def body(dtype: str, operation: str, count: int = 1) -> str:
    """A region that combines each of ``count`` pairs of scalars with one op."""
    scalar = mlir.type_text(TensorType((), dtype))
    names = [f"%a{i}" for i in range(2 * count)]
    lines = [f"^bb0({', '.join(f'{n}: {scalar}' for n in names)}):"]
    for i in range(count):
        lines.append(
            f'  %c{i} = "stablehlo.{operation}"({names[i]}, {names[count + i]}) '
            f": ({scalar}, {scalar}) -> {scalar}"
        )
    results = ", ".join(f"%c{i}" for i in range(count))
    types = ", ".join([scalar] * count)
    return "\n".join([*lines, f'  "stablehlo.return"({results}) : ({types}) -> ()'])


def columns(rows: Sequence[Sequence[Any]], count: int) -> list[list[Any]]:
    """The ``count`` columns of ``rows``; empty columns if there are no rows."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * count


def windows(size: int, low: int, high: int, window: int, stride: int, hole: int = 1) -> int:
    """The number of windows in a padded dimension whose elements have the distance ``hole``."""
    padded = (size - 1) * hole + 1 + low + high
    return 0 if padded < window else (padded - window) // stride + 1
