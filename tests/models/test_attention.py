"""Attention as composites: its numbers, its rules, and its collectives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import f32
from toast.apply.verify import verify
from toast.assurance.interchange import annotated
from toast.cost import CostModel
from toast.evaluation.baselines import manual_states
from toast.hardware import Mesh, load
from toast.lower import attention_parts
from toast.models.attention import attention, paged_attention
from toast.plan.shard import shardings_of
from toast.space import Space


def plain(
    query: jax.Array, key: jax.Array, value: jax.Array, causal: bool, window: int
) -> jax.Array:
    """Attention with all scores."""
    scores = jnp.einsum("bsgrk,btgk->bgrst", query, key) * query.shape[-1] ** -0.5
    own, other = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    own = own + key.shape[1] - query.shape[1]
    seen = (other <= own) & (other > own - (window or key.shape[1])) if causal else True
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("bgrst,btgv->bsgrv", weights, value)


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
    ("sequence", "causal", "window"),
    [(12, True, 0), (12, True, 5), (12, False, 0), (7, True, 0), (7, False, 0)],
)
def test_attention_in_parts_is_attention(
    sequence: int, causal: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its gradients, and also with fewer queries than keys."""
    monkeypatch.setattr(attention_parts, "MOST_KEYS", 5)  # parts of 4 of 12 keys
    arguments = drawn(2, sequence, 2, 3, 8), drawn(2, 12, 2, 8, seed=1), drawn(2, 12, 2, 4, seed=2)

    def loss(function: Any, *arguments: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(*arguments)))

    ours = functools.partial(attention, causal=causal, window=window)
    whole = functools.partial(plain, causal=causal, window=window)
    actual, expected = (
        jax.tree.leaves(jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*arguments))
        for f in (functools.partial(loss, ours), functools.partial(loss, whole))
    )
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("window", [0, 3])
def test_pages_are_read_in_the_order_of_the_table(window: int) -> None:
    key, value = drawn(2, 12, 2, 8), drawn(2, 12, 2, 6, seed=1)
    query = drawn(2, 2, 3, 8, seed=2)
    table = np.array([[5, 0, 3], [1, 4, 2]])
    pages = []
    for whole in (key, value):
        stored = np.zeros((6, 4, *whole.shape[2:]), np.float32)
        stored[table] = np.asarray(whole).reshape(2, 3, 4, *whole.shape[2:])
        pages.append(jnp.asarray(stored))
    lengths = jnp.array([12, 7], jnp.int32)
    attended = paged_attention(
        query, *pages, jnp.asarray(table), lengths, window=window, value_size=4
    )
    for row, length in enumerate((12, 7)):
        one = slice(row, row + 1)
        expected = plain(
            query[one, None], key[one, :length], value[one, :length, :, :4], True, window
        )
        np.testing.assert_allclose(attended[row], expected[0, 0], rtol=1e-4, atol=1e-5)


def gradients(query: Any, key: Any, value: Any, weights: Any) -> Any:
    def loss(*arguments: jax.Array) -> jax.Array:
        return jnp.sum(attention(*arguments) * weights)

    return jax.grad(loss, (0, 1, 2))(query, key, value)


@functools.cache
def analysis() -> toast.Analysis:
    heads, keys = f32(4, 16, 4, 4, 8), f32(4, 16, 4, 8)
    return toast.analyze(gradients, heads, keys, keys, heads)


def test_attention_is_two_ops_without_conflicts() -> None:
    program = analysis().program
    assert [program.kind(op) for op in range(len(program.ops))].count("composite") == 2
    assert "dot_general" not in map(program.kind, range(len(program.ops)))
    assert analysis().counts()["conflicts"] == 0
    assert analysis().without_rule == ()


def test_shardy_takes_the_rules_of_attention() -> None:
    """It has no factors that are sums for some results only; they stay whole there."""
    text, _ = annotated(analysis().program)
    rules = [line for line in text.splitlines() if "stablehlo.composite" in line]
    assert len(rules) == 2
    assert all("sdy.sharding_rule" in line and " reduction=" not in line for line in rules)


@pytest.mark.parametrize(("letter", "dimension"), [("b", 0), ("s", 1), ("g", 2), ("r", 3)])
def test_attention_runs_on_shards(letter: str, dimension: int) -> None:
    """If queries or heads of a group are sharded, gradients of keys and values are sums."""
    model = CostModel(Space(analysis(), Mesh.parse("x=4")), load("tpu-v5e"))
    strategy = {letter: [("query", dimension, "all"), ("weights", dimension, "all")]}
    (state,) = dict(manual_states(model, strategy)).values()
    sums = {("all_reduce", ("x",), 8192.0): 2} if letter in "sr" else {}
    assert dict(model.reshards(state)) == sums
    verified = verify(analysis().program, shardings_of(model, state))
    assert verified.equal
    assert set(verified.collectives) == {kind for kind, _, _ in sums}


def costs(function: Any, *arguments: Any) -> list[dict[str, float]]:
    """The flops and exponentials of each composite of a program."""
    analysed = toast.analyze(function, *arguments)
    program, totals = analysed.program, []
    for op in program.ops:
        if program.signatures[op.signature].kind == "composite":
            total: dict[str, float] = {}
            for cost in analysed.rules[op.signature].costs:
                total[cost.quantity] = total.get(cost.quantity, 0.0) + cost.amount
            totals.append(total)
    return totals


@pytest.mark.parametrize(
    ("queries", "options", "share"),
    [
        (64, {}, 0.5), (64, {"window": 16}, (2 * 16 * 64 - 16**2) / (2 * 64**2)),
        (64, {"window": 64}, 0.5), (64, {"causal": False}, 1.0), (16, {}, 0.875),
        # The first of 16 queries are at position 48.
        (16, {"window": 32}, 0.5), (32, {"window": 48}, (32 * 48 - 16**2 / 2) / (32 * 64)),
        # A window counts in causal attention only, as in the decomposition.
        (64, {"causal": False, "window": 16}, 1.0),
    ],
)  # fmt: skip
def test_scores_that_no_query_sees_cost_nothing(
    queries: int, options: dict[str, Any], share: float
) -> None:
    def loss(*arguments: jax.Array) -> jax.Array:
        return jnp.sum(attention(*arguments, **options))

    shapes = f32(2, queries, 4, 3, 8), f32(2, 64, 4, 8), f32(2, 64, 4, 6)
    pairs = 2 * queries * 64 * 4 * 3 * share
    forward, backward = costs(jax.grad(loss, (0, 1, 2)), *shapes)
    # Scores and the sum of values; the backward pass has these and the gradients of each operand.
    assert forward == {"flops": 2 * pairs * (8 + 6), "transcendentals": pairs}
    assert backward == {"flops": 2 * pairs * (3 * 8 + 2 * 6), "transcendentals": pairs}


def test_shares_of_long_sequences_have_no_overflow() -> None:
    keys, window = 2**20, 10_000
    shapes = f32(1, keys, 1, 1, 8), f32(1, keys, 1, 8), f32(1, keys, 1, 8)
    for options, share in (
        ({}, 0.5), ({"window": window}, (2 * window * keys - window**2) / (2 * keys**2)),
        ({"window": keys // 2}, 0.375),
    ):  # fmt: skip
        (cost,) = costs(functools.partial(attention, **options), *shapes)
        assert cost["transcendentals"] == pytest.approx(share * keys**2, rel=1e-4)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("arrays", [1, 2])
def test_decoding_costs_products_with_the_pages_of_each_sequence(window: int, arrays: int) -> None:
    """It reads these, not all pages; keys and values that are one array are read once."""
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pages = f32(2000, 16, 4, 8)

    def decode(query: Any, keys: Any, table: Any, lengths: Any, values: Any = None) -> Any:
        values = keys if values is None else values
        return paged_attention(query, keys, values, table, lengths, window=window)

    operands = f32(2, 4, 3, 8), pages, integers((2, 5)), integers((2,))
    (cost,) = costs(decode, *operands, *[pages] * (arrays - 1))
    positions = 2 * (window or 5 * 16)
    pairs = positions * 4 * 3
    assert cost == {
        "flops": 2 * pairs * (8 + 8), "transcendentals": pairs, "bytes": arrays * positions * 4 * 8 * 4,
    }  # fmt: skip
