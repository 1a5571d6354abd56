"""Tables of measured times: CSV files of collectives and of matrix products."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from toast.boundary.regular_files import read_text
from toast.errors import HardwareError
from toast.hardware.device_files import ELEMENT_TYPE

#: The columns of a table of collectives.
COLUMNS = ("collective", "devices", "bytes", "seconds")
#: The columns of a table of products; ``tflops_per_s`` may stand for ``seconds``.
PRODUCT_COLUMNS = ("m", "n", "k", "dtype", "seconds")
_RATE = "tflops_per_s"

#: The collectives that can be measured.
MEASURABLE = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

#: A time above _SLOW seconds plus the bytes at _SLOW_RATE bytes per second has a wrong unit.
_SLOW, _SLOW_RATE = 1e-2, 1e8
#: So has one of products at less than _LEAST_RATE or more than _MOST_RATE FLOP/s.
_LEAST_RATE, _MOST_RATE = 1e4, 1e18

#: The largest table that is read, in bytes, and its most rows.
_LARGEST_BYTES, _MOST_COLLECTIVES, _MOST_PRODUCTS = 2**24, 5000, 200_000


class _Row(NamedTuple):
    number: int
    line: str
    #: By column; ``None`` if the row has another number of cells.
    cells: dict[str, str] | None


def read_table(path: str | pathlib.Path) -> pd.DataFrame:
    """Reads measured times from a CSV file: columns ``collective, devices, bytes, seconds``.

    Other columns, empty lines and lines that start with ``#`` are ignored.  The result has one row
    per measured time.

    Raises :class:`toast.errors.HardwareError` with file and line of the first invalid row.
    """
    path = pathlib.Path(path)
    rows: list[tuple[str, int, float, float]] = []
    for number, line, cells in _rows(path, COLUMNS):
        try:
            cell = cells or {}
            row = (
                cell["collective"].replace("-", "_"), int(cell["devices"]),
                float(cell["bytes"]), float(cell["seconds"]),
            )  # fmt: skip
        except (KeyError, ValueError):
            raise HardwareError(
                f"{path}:{number}: '{line}' is not {','.join(COLUMNS)}; write for example "
                "all_gather,8,1048576,1.7e-05"
            ) from None
        if row[0] not in MEASURABLE:
            raise HardwareError(
                f"{path}:{number}: unknown collective {row[0]}; known: {', '.join(MEASURABLE)}"
            )
        if not (row[1] > 1 and 0 < row[2] < np.inf and 0 < row[3] < np.inf):
            raise HardwareError(
                f"{path}:{number}: '{line}': devices must be at least 2, and bytes and seconds "
                "positive"
            )
        if row[3] > _SLOW + row[2] / _SLOW_RATE:
            raise HardwareError(
                f"{path}:{number}: '{line}': {row[3]:g} s is implausibly slow; use seconds, "
                "not microseconds as in nccl-tests"
            )
        rows.append(row)
        if len(rows) > _MOST_COLLECTIVES:
            raise HardwareError(
                f"{path}:{number}: more than {_MOST_COLLECTIVES:,} times; keep one for each "
                "collective, number of devices and size"
            )
    if not rows:
        raise HardwareError(f"{path}: no measured times; write rows of {','.join(COLUMNS)}")
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read_products(path: str | pathlib.Path) -> pd.DataFrame:
    """Reads measured times of matrix products from a CSV file: ``m, n, k, dtype, seconds``.

    A product has ``m`` rows, ``n`` columns and the depth ``k``; ``dtype`` is a StableHLO element
    type, such as ``bf16``.  A column ``tflops_per_s`` may stand for ``seconds``.  Other columns,
    empty lines and lines that start with ``#`` are ignored.

    Raises :class:`toast.errors.HardwareError` with file and line of the first invalid row.
    """
    path = pathlib.Path(path)
    rows: list[tuple[int, int, int, str, float]] = []
    for number, line, cells in _rows(path, PRODUCT_COLUMNS, {"seconds": _RATE}):
        try:
            cell = cells or {}
            m, n, k = (int(cell[column]) for column in "mnk")
            flops = 2.0 * m * n * k
            seconds = (
                float(cell["seconds"])
                if "seconds" in cell
                else flops / (float(cell[_RATE]) * 1e12 or np.nan)
            )
        except (KeyError, ValueError):
            raise HardwareError(
                f"{path}:{number}: '{line}' is not {','.join(PRODUCT_COLUMNS)}; write for example "
                "8192,4096,4096,bf16,0.00036"
            ) from None
        dtype = cell["dtype"]
        if not ELEMENT_TYPE.fullmatch(dtype):
            raise HardwareError(
                f"{path}:{number}: {dtype} is not an element type; write for example bf16"
            )
        if not (min(m, n, k) > 0 and 0 < seconds < np.inf):
            raise HardwareError(f"{path}:{number}: '{line}': all figures must be positive")
        if not _LEAST_RATE < flops / seconds < _MOST_RATE:
            raise HardwareError(
                f"{path}:{number}: '{line}': {flops / seconds:.3g} FLOP/s is implausible; check "
                f"the unit: seconds, or TFLOP/s in a column {_RATE}"
            )
        rows.append((m, n, k, dtype, seconds))
        if len(rows) > _MOST_PRODUCTS:
            raise HardwareError(
                f"{path}:{number}: more than {_MOST_PRODUCTS:,} products; remove some"
            )
    if not rows:
        raise HardwareError(f"{path}: no products; write rows of {','.join(PRODUCT_COLUMNS)}")
    return pd.DataFrame(rows, columns=list(PRODUCT_COLUMNS))


def _rows(
    path: pathlib.Path, wanted: Sequence[str], instead: dict[str, str] | None = None
) -> Iterator[_Row]:
    """The rows of a table that has the ``wanted`` columns, or those that stand for them."""
    text = read_text(path, HardwareError, most=_LARGEST_BYTES, encoding="utf-8-sig")
    columns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip().strip('"') for cell in line.split(",")]
        if columns:
            cell = dict(zip(columns, cells, strict=True)) if len(cells) == len(columns) else None
            yield _Row(number, line, cell)
            continue
        columns = cells
        if repeated := [c for c in wanted if cells.count(c) > 1]:
            raise HardwareError(f"{path}:{number}: column {repeated[0]} occurs twice; remove one")
        missing = [c for c in wanted if c not in cells and (instead or {}).get(c) not in cells]
        if missing:
            raise HardwareError(
                f"{path}:{number}: column {missing[0]} is missing; the columns are "
                f"{','.join(wanted)}"
            )


def table_text(table: pd.DataFrame, note: str) -> str:
    """The text of a CSV file with a table; ``note`` goes into its first line.

    Raises :class:`toast.errors.HardwareError` if the note has several lines.
    """
    if "\n" in note or "\r" in note:
        raise HardwareError("the source of measured times must be one line")
    return f"# {note}\n{table.to_csv(index=False, float_format='%.6g')}"
