"""Converts programs to relations: DataFrames for Python, ``.lp`` text for clingo.

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
    """The fact base of a program; each relation is a DataFrame that is built at its first use."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @functools.cached_property
    def op(self) -> pd.DataFrame:
        """``op, kind, signature``: one row per op."""
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
        """``op, index, value``: one row per operand."""
        return _places([op.operands for op in self.program.ops])

    @functools.cached_property
    def result(self) -> pd.DataFrame:
        """``op, index, value``: one row per result."""
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
        """``value, d, size``: one row per dimension of each value."""
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
        """The fact base as text for clingo.

        Raises :class:`toast.errors.FactError` for a dimension that is too large for clingo.
        """
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
        """The first value of each representative in :meth:`signatures_to_lp`.

        ``[signatures + 1]``; the values of a representative are its operands, then its results.
        """
        counts = [len(s.operands) + len(s.results) for s in self.program.signatures]
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def signatures_to_lp(self, numbers: Iterable[int] | None = None) -> str:
        """The facts of one representative op per signature, as text for clingo.

        An op rule reads only the facts of its own op, so all ops with one signature have the
        factors of their representative.  Every operand of a representative is a different value.
        ``numbers`` are the signatures to write; by default all.

        Raises :class:`toast.errors.FactError` as :meth:`to_lp` does.
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
                    f"dimension {d} of {type_} has {size} elements; the limit of rules is "
                    f"{_LARGEST}; split the dimension"
                )
            yield f"dim({value},{d},{size})."


def constant(name: str) -> str:
    """``name`` as a constant of clingo, or as a string if it is not a valid constant."""
    return name if _CONSTANT.fullmatch(name) else quoted(name)


def written(item: int | str) -> str:
    """``item`` as a number or a string of clingo.

    Numbers beyond 32 bits, which are sentinels of StableHLO, become strings.
    """
    if isinstance(item, str):
        return quoted(item)
    return str(item) if abs(item) <= _LARGEST else quoted(str(item))


def quoted(text: str) -> str:
    """``text`` as a string of clingo.

    Untrusted text enters a logic program only through this function.  Control characters are
    escaped, because clingo's strings end at a NUL.
    """
    plain = printable(text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
