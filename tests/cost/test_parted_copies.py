"""Copies of the parts of sums that loops of products send, for TPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from toast.cost.terms import PartedProducts
from toast.hardware import load


def layout_of(*sizes: int, image: bool = False) -> Any:
    """Of one sum that is scattered along its first dimension over eight devices."""
    tiled = [not image or d in (0, len(sizes) - 1) for d in range(len(sizes))]
    values = SimpleNamespace(
        sizes=np.array([sizes]), rank=np.array([len(sizes)]), tiled=np.array([tiled])
    )
    return SimpleNamespace(
        tables=SimpleNamespace(values=values), settled=np.array([[[0]]], dtype=np.int8),
        devices=np.array([1.0, 8.0]), machine=SimpleNamespace(hardware=load("tpu-v5e")),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "rate"),
    [
        ((8, 577, 4096), 8.5e9),  # one sequence on a device
        ((16, 577, 4096), 11e9),
        ((32, 577, 4096), 17.6e9),
        ((64, 577, 4096), 110e9),
        ((8, 576, 4096), np.inf),  # whole tiles
        ((24, 577, 4096), np.inf),  # three sequences are no whole tiles either
        ((577, 4096), np.inf),
    ],
)
def test_parts_whose_rows_are_padded_are_copied(sizes: tuple[int, ...], rate: float) -> None:
    """Into a layout with the batch in the rows: elements per second as compiled for v5e."""
    zero = np.zeros(1, dtype=np.int64)
    seconds = PartedProducts._copying(layout_of(*sizes), zero, zero)[0]
    part = np.prod(sizes) / 8
    assert seconds == pytest.approx(part / rate, rel=0.1)


def test_rows_of_images_are_in_no_tiles() -> None:
    zero = np.zeros(1, dtype=np.int64)
    assert PartedProducts._copying(layout_of(8, 28, 28, 128, image=True), zero, zero)[0] == 0
