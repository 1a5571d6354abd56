"""The note on plans with hundreds of tiny collectives."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import toast
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


def test_the_note_of_a_plan_says_so() -> None:
    """A deep model whose weights are too large to be gathered: its few rows are, in each layer."""

    def deep(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]

    x, weights = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 1024), (400, 1024, 1024)))
    plan = toast.plan(
        deep, x, weights, mesh="data=4", hardware="tpu-v5e", settings=toast.Settings(rounds=1),
        constraints=toast.Constraints(pin={"x": P(None, "data"), "weights": P(None, "data")}),
    )  # fmt: skip
    assert re.search(r"tiny collectives: 400 \S+ of \S+ \S+ on average take", plan.note)


def test_sums_alone_are_not_to_be_pinned() -> None:
    """Small arrays with sums of their gradients are whole already."""
    (note,) = small_collective_notes([transfer("all_reduce", 1e3, 200)], 0.01)
    assert "stack small arrays into one (XLA may combine their sums" in note
    assert "pin" not in note
