"""Reasons: what an action gained, and which collectives it paid with."""

from __future__ import annotations

import pytest

from toast.plan import Prediction
from toast.plan.prediction import Collective, reason_of

KINDS = ("all_gather", "all_reduce", "reduce_scatter")


def step(*moved: tuple[int, float]) -> Prediction:
    """One of a second, with so many collectives of each kind that take so many seconds."""
    rows = tuple(
        Collective(kind, count, 0.0, seconds)
        for kind, (count, seconds) in zip(KINDS, moved, strict=True)
    )
    return Prediction(1.0, 1.0, 0.0, 1e9, 1e8, rows)


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (
            ((0, 0.0), (24, 0.1), (0, 0.0)), ((12, 0.05), (12, 0.03), (12, 0.02 + 1e-17)),
            "replaces 12 all_reduce by 12 all_gather, 12 reduce_scatter (same time)",
        ),
        (
            ((0, 0.0), (2, 0.0), (0, 0.0)), ((5, 1e-3), (1, 0.0), (0, 0.0)),
            "replaces 1 all_reduce by 5 all_gather (+1 ms)",
        ),
        (
            ((0, 0.0), (2, 2e-3), (0, 0.0)), ((0, 0.0), (0, 0.0), (2, 1e-3)),
            "replaces 2 all_reduce by 2 reduce_scatter (-1 ms)",
        ),
        (((0, 0.0),) * 3, ((0, 0.0), (2, 5e-6), (0, 0.0)), "adds 2 all_reduce (+5 us)"),
        (((0, 0.0),) * 3, ((0, 0.0), (2, 1e-12), (0, 0.0)), "adds 2 all_reduce (same time)"),
        (
            ((0, 0.0), (2, 1.5e-3), (0, 0.0)), ((0, 0.0), (3, 1e-3), (0, 0.0)),
            "adds 1 all_reduce (yet collectives take 500 us less)",
        ),
        (((0, 0.0), (2, 1e-3), (0, 0.0)), ((0, 0.0),) * 3, "prepares a later action"),
    ],
)  # fmt: skip
def test_reasons_name_collectives_that_went(
    was: tuple[tuple[int, float], ...], now: tuple[tuple[int, float], ...], said: str
) -> None:
    assert reason_of(step(*was), step(*now), 1e10) == said
