"""The note on plans with hundreds of tiny collectives."""

from __future__ import annotations

from toast.cost import Transfer
from toast.plan.small_collectives import small_collective_notes


def transfer(kind: str, size: float, count: float, seconds: float = 1e-5) -> Transfer:
    return Transfer(kind, ("x",), size, count, "ring", seconds)


def test_many_tiny_collectives_are_named_with_their_time() -> None:
    transfers = [
        transfer("all_gather", 40 * 1024, 500), transfer("all_gather", 40 * 1024, 83),
        transfer("all_reduce", 1e9, 300, 1e-2),
    ]  # fmt: skip
    (note,) = small_collective_notes(transfers, 0.1)
    assert "583 all-gathers of 40" in note
    assert "take 5.83 ms" in note
    assert "all-reduce" not in note


def test_the_kind_that_takes_longest_is_first() -> None:
    transfers = [transfer("all_reduce", 1e3, 200), transfer("all_gather", 1e3, 400)]
    (note,) = small_collective_notes(transfers, 0.01)
    assert note.index("all-gathers") < note.index("all-reduces")


def test_few_or_cheap_or_large_ones_are_not_named() -> None:
    assert not small_collective_notes([transfer("all_gather", 1e3, 99)], 1e-3)
    assert not small_collective_notes([transfer("all_gather", 1e3, 500)], 10.0)
    assert not small_collective_notes([transfer("all_gather", 1e8, 500)], 1e-3)
    assert not small_collective_notes([], 0.0)
