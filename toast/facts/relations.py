"""Programs as relations: DataFrames for Python, ``.lp`` text for clingo.

The relations are those of section 1 of ``facts/schema.lp``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast import lazy
from toast.boundary.printable import printable
from toast.errors import FactError
from toast.program import Program, Signature, TensorType

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy.module("pandas")

#: clingo's numbers have 32 bits.
_LARGEST = 2**31 - 1
_CONSTANT = re.compile(r"[a-z][A-Za-z0-9_]*")


class Relations:
    """The fact base of a program; each relation is a DataFrame, built when first asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @functools.cached_property
    def op(self) -> pd.DataFrame:
        """``op(op, kind)``."""
        kinds = [signature.kind for signature in self.program.signatures]
        signature = np.array([op.signature for op in self.program.ops], dtype=np.int64)
        return pd.DataFrame(
            {
                "op": np.arange(len(signature)),
                "kind": pd.Categorical(np.array(kinds, dtype=object)[signature]),
                "signature": signature,
            }
        )

    @functools.cached_property
    def operand(self) -> pd.DataFrame:
        """``operand(op, index, value)``."""
        return _places([op.operands for op in self.program.ops])

    @functools.cached_property
    def result(self) -> pd.DataFrame:
        """``result(op, index, value)``."""
        return _places([op.results for op in self.program.ops])

    @functools.cached_property
    def value(self) -> pd.DataFrame:
        """``value, dtype, rank``: one row per value."""
        types = [value.type for value in self.program.values]
        return pd.DataFrame(
            {
                "value": np.arange(len(types)),
                "dtype": pd.Categorical([t.dtype for t in types]),
                "rank": [len(t.shape) for t in types],
            }
        )

    @functools.cached_property
    def dim(self) -> pd.DataFrame:
        """``dim(value, d, size)``."""
        rows = [
            (number, d, size)
            for number, value in enumerate(self.program.values)
            for d, size in enumerate(value.type.shape)
        ]
        return pd.DataFrame(rows, columns=["value", "d", "size"], dtype=np.int64)

    @functools.cached_property
    def argument(self) -> pd.DataFrame:
        """``argument, value, shape, dtype, donated``: one row per function argument."""
        values = self.program.argument_values
        types = [self.program.values[v].type for v in values]
        return pd.DataFrame(
            {
                "argument": list(self.program.arguments),
                "value": list(values),
                "shape": [t.shape for t in types],
                "dtype": [t.dtype for t in types],
                "donated": [i in self.program.donated for i in range(len(values))],
            }
        )

    def to_lp(self) -> str:
        """The whole fact base as text that plain clingo reads."""
        program = self.program
        lines = [f"% Fact base of {program.name}: {len(program.ops)} ops."]
        for number, op in enumerate(program.ops):
            signature = program.signatures[op.signature]
            lines += _op_lines(str(number), signature, op.operands, op.results)
            lines += _value_lines(zip(op.results, signature.results, strict=True))
            if program.repeats[number] != 1:
                lines.append(f"repeats({number},{program.repeats[number]}).")
        lines += [f"tied({op},{other})." for op, other in program.ties]
        return "\n".join(lines) + "\n"

    @functools.cached_property
    def first_values(self) -> npt.NDArray[np.int64]:
        """``[signatures + 1]`` each representative's first value: operands, then results."""
        counts = [len(s.operands) + len(s.results) for s in self.program.signatures]
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def signatures_to_lp(self, numbers: Iterable[int] | None = None) -> str:
        """One representative op per distinct signature, or per signature in ``numbers``.

        An op rule sees only its own op's facts, so the factors of a representative are those of
        every op with its signature; each operand is a value of its own here.
        """
        lines: list[str] = []
        first = self.first_values.tolist()
        signatures = self.program.signatures
        for number in range(len(signatures)) if numbers is None else numbers:
            signature = signatures[number]
            operands = range(first[number], first[number] + len(signature.operands))
            results = range(operands.stop, first[number + 1])
            lines += _op_lines(str(number), signature, operands, results)
            lines += _value_lines(zip(operands, signature.operands, strict=True))
            lines += _value_lines(zip(results, signature.results, strict=True))
        return "\n".join(lines) + "\n"


def _places(lists: list[tuple[int, ...]]) -> pd.DataFrame:
    counts = np.array([len(values) for values in lists], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    return pd.DataFrame(
        {
            "op": np.repeat(np.arange(len(lists)), counts),
            "index": np.arange(counts.sum()) - np.repeat(starts, counts),
            "value": np.array([v for values in lists for v in values], dtype=np.int64),
        }
    )


def _op_lines(
    op: str,
    signature: Signature,
    operands: range | tuple[int, ...],
    results: range | tuple[int, ...],
) -> Iterator[str]:
    yield f"op({op},{constant(signature.kind)})."
    for index, value in enumerate(operands):
        yield f"operand({op},{index},{value})."
    for index, value in enumerate(results):
        yield f"result({op},{index},{value})."
    for name, term in signature.attributes:
        if isinstance(term, tuple):
            for index, item in enumerate(term):
                yield f"attribute({op},{constant(name)},{index},{written(item)})."
        else:
            yield f"attribute({op},{constant(name)},{written(term)})."


def _value_lines(values: Iterator[tuple[int, TensorType]]) -> Iterator[str]:
    for value, type_ in values:
        yield f"dtype({value},{quoted(type_.dtype)}). rank({value},{len(type_.shape)})."
        for d, size in enumerate(type_.shape):
            if size > _LARGEST:
                raise FactError(
                    f"dimension {d} of {type_} has {size} elements, more than rules can count "
                    f"({_LARGEST}); split the dimension"
                )
            yield f"dim({value},{d},{size})."


def constant(name: str) -> str:
    """A constant of clingo, or a string where the name is none."""
    return name if _CONSTANT.fullmatch(name) else quoted(name)


def written(item: int | str) -> str:
    """A number or a string of clingo; numbers beyond 32 bits become strings.

    Those are sentinels of the dialect.
    """
    if isinstance(item, str):
        return quoted(item)
    return str(item) if abs(item) <= _LARGEST else quoted(str(item))


def quoted(text: str) -> str:
    """A string of clingo: the one way in which a stranger's text enters a logic program.

    Control characters are written out: clingo's texts end at a NUL.
    """
    plain = printable(text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
