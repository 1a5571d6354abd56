"""Copies of caches in loops over layers."""

from __future__ import annotations

import pytest

import toast
from tests.cost.test_stacked_caches import analyzed, by_slice, carried, scanned


@pytest.mark.parametrize(
    ("form", "hardware", "said"),
    [
        ("scanned", "tpu-v5e", True),
        ("carried, keys before heads", "tpu-v5e", True),
        ("carried, heads before keys", "tpu-v5e", False),
        ("scanned", "h100", False),  # unknown
    ],
)
def test_what_they_take_is_said_with_a_remedy(form: str, hardware: str, said: bool) -> None:
    analysis = {
        "scanned": lambda: analyzed(scanned(by_slice)),
        "carried, keys before heads": lambda: analyzed(carried()),
        "carried, heads before keys": lambda: analyzed(carried("bgtd"), "bgtd"),
    }[form]()
    plan = toast.plan(
        analysis, mesh="data=2", hardware=hardware, settings=toast.Settings(rounds=1), cache=False
    )
    assert ("copies of caches take" in plan.note) is said
