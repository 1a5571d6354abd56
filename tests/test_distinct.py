"""Distinct rows."""

from __future__ import annotations

import numpy as np
import pytest

from toast.distinct import distinct_rows


@pytest.mark.parametrize("shape", [(0, 3), (1, 2), (200, 1), (200, 3), (50, 7), (4, 0)])
@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float64])
def test_rows_are_those_of_numpy(shape: tuple[int, int], dtype: type) -> None:
    rows = np.random.default_rng(0).integers(-2, 3, shape).astype(dtype)
    found = distinct_rows(rows)
    every = np.unique(rows, axis=0, return_index=True, return_inverse=True, return_counts=True)
    for mine, other in zip(found, every, strict=True):
        assert (mine == other.reshape(mine.shape)).all()
    assert found.rows.dtype == rows.dtype
