"""Attention in device-local programs: keys and values go around the devices of a sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32, random_states
from tests.lower.test_lowering import assert_as_predicted
from toast.cost import CostModel, Memo
from toast.evaluation.baselines import manual_states
from toast.hardware import Mesh, load
from toast.models.attention import attention, paged_attention
from toast.plan.shard import lowered_state
from toast.space import Space, States

#: Whether attention is causal, and its window.
KINDS = ((True, 0), (False, 0), (True, 6), (True, 2), (True, 40))

#: The dimensions of the queries that are batch, sequence, heads of keys, and heads of a group.
STRATEGIES = {
    letter: [("query", dimension, "all"), ("weights", dimension, "all")]
    for dimension, letter in enumerate("bsgr")
}


def gradients(
    query: Any, key: Any, value: Any, weights: Any, causal: bool = True, window: int = 0
) -> Any:
    """The gradients of attention, and its result."""

    def loss(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = attention(*arguments, causal=causal, window=window)
        return jnp.sum(result.astype(jnp.float32) * weights), result

    return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)


@functools.cache
def model_of(
    mesh: str,
    causal: bool = True,
    window: int = 0,
    dtype: str = "float32",
    queries: int = 16,
    lowering: Any = "local",
) -> CostModel:
    shapes = (2, queries, 2, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8), (2, queries, 2, 4, 8)
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    function = functools.partial(gradients, causal=causal, window=window)
    analysis = toast.analyze(function, *arguments, lowering=lowering)
    return CostModel(Space(analysis, Mesh.parse(mesh)), load("tpu-v5e"))


def split(model: CostModel, letter: str) -> States:
    """The state that shards a letter of attention."""
    (state,) = dict(manual_states(model, {letter: STRATEGIES[letter]})).values()
    return state


@pytest.mark.parametrize(("causal", "window"), KINDS)
@pytest.mark.parametrize("mesh", ["x=2", "x=4", "x=8"])
def test_keys_and_values_go_around(mesh: str, causal: bool, window: int) -> None:
    """Only as far as queries see; the numbers are those of one device."""
    model = model_of(mesh, causal, window)
    state, shards = split(model, "s"), model.space.mesh.devices
    reach = min(window, 16) - 1 if causal and window else 15
    passes = min(shards - 1, -(-reach * shards // 16))
    # Keys and values in both passes, and their gradients.
    part = 2 * 16 * 2 * 8 * 4.0 / shards
    assert model.reshards(state) == {("collective_permute", ("x",), part): 6 * passes}
    assert_as_predicted(model, state, lowered_state(model, state))


@pytest.mark.parametrize(
    ("mesh", "causal", "window"),
    [("a=2,b=2,c=2", True, 0), ("b=4,a=2", True, 6), ("b=4,a=2", False, 0)],
)
def test_random_states_run_as_priced(mesh: str, causal: bool, window: int) -> None:
    model = model_of(mesh, causal, window)
    for state in random_states(model.space, 2, seed=window + causal):
        assert_as_predicted(model, state, lowered_state(model, state))


@pytest.mark.parametrize("letter", "bsgr")
def test_bfloat16_is_passed_on_as_such(letter: str) -> None:
    model = model_of("x=2", dtype="bfloat16")
    state = split(model, letter)
    assert_as_predicted(model, state, lowered_state(model, state))


@pytest.mark.parametrize("letter", "bsgr")
@pytest.mark.parametrize("window", [0, 5])
def test_a_part_of_the_queries_needs_all_keys(letter: str, window: int) -> None:
    """With fewer queries than keys there is no ring: a device has all keys."""
    model = model_of("x=4" if letter == "s" else "x=2", True, window, queries=8)
    state = split(model, letter)
    sums = {"all_reduce": 2} if letter in "sr" else {}
    assert {kind: n for (kind, _, _), n in model.reshards(state).items()} == sums
    assert_as_predicted(model, state, lowered_state(model, state))


@pytest.mark.parametrize("letter", "bsgr")
def test_plans_for_xla_are_lowered_without_rings(letter: str) -> None:
    model = model_of("x=2", lowering="xla")
    state = split(model, letter)
    assert not any(rule.rings for rule in model.space.analysis.rules)
    assert_as_predicted(model, state, lowered_state(model, state))


def test_a_loop_of_layers_has_its_rings_inside() -> None:
    def layers(x: Any, weights: Any) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            heads = x.reshape(2, 32, 2, 1, 8)
            return x + attention(heads, heads[:, :, :, 0], heads[:, :, :, 0]).reshape(
                x.shape
            ) @ w, None

        return jax.lax.scan(layer, x, weights)[0]

    analysis = toast.analyze(
        jax.grad(lambda x, weights: jnp.sum(layers(x, weights) ** 2), 1),
        f32(2, 32, 16), f32(3, 16, 16), lowering="local",
    )  # fmt: skip
    model = CostModel(Space(analysis, Mesh.parse("x=4")), load("tpu-v5e"))
    (state,) = dict(manual_states(model, {"s": [("x", 1, "all")]})).values()
    local = lowered_state(model, state)
    permutes = [n for (kind, _, _), n in local.counts().items() if kind == "collective_permute"]
    # Three layers, three passes; keys and values in both passes, and their gradients.
    assert sum(permutes) == 3 * 3 * 6
    assert_as_predicted(model, state, local)


def test_pages_are_read_on_shards() -> None:
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    pages = f32(6, 4, 2, 8)
    plan = toast.plan(
        functools.partial(paged_attention, window=5, value_size=6), f32(4, 2, 2, 8), pages, pages,
        integers((4, 3)), integers((4,)), mesh="a=2,b=2,c=2", hardware="tpu-v5e", lowering="local",
        constraints=toast.Constraints(pin={"query": P("a", "b", "c")}),
    )  # fmt: skip
    assert_as_predicted(plan.model, plan.state, plan.lowered())


def test_a_ring_is_explained_and_takes_memory_for_two_parts() -> None:
    shapes = f32(1, 4096, 1, 4, 64), f32(1, 4096, 1, 64), f32(1, 4096, 1, 64)
    sequence = P(None, "x")
    plan = toast.plan(
        functools.partial(attention, causal=False), *shapes, mesh="x=4", hardware="tpu-v5e",
        lowering="local",
        constraints=toast.Constraints(
            pin={"query": sequence, "key": sequence, "value": sequence, "result": sequence}
        ),
    )  # fmt: skip
    collectives = plan.explain_collectives()
    assert [(c.kind, c.count, c.what) for c in collectives] == [
        ("collective_permute", 3.0, "ring")
    ] * 2
    assert "go around the devices, each of which needs those of others" in collectives[0].why
    buffers = [row for row in plan.model.timeline(plan.state).at_peak if row.what == "ring"]
    assert sorted(row.bytes for row in buffers) == [2 * 4096 * 64 * 4 / 4] * 2


def test_products_of_attention_hide_its_own_ring() -> None:
    """The next keys are under way meanwhile; other collectives wait for their op."""
    heads, keys = f32(1, 16384, 8, 4, 64), f32(1, 16384, 8, 64)
    analysis = toast.analyze(attention, heads, keys, keys, lowering="local")
    model = CostModel(Space(analysis, Mesh.parse("x=4,y=2")), load("tpu-v5e"))
    states = np.stack([*dict(manual_states(model, {"s": [("query", 1, "all")]})).values()])
    prices = model.price(states)
    ring = prices.collective_seconds.sum(axis=1)
    assert (ring > 0).all()
    np.testing.assert_allclose(prices.hidden_seconds, ring)
    worth = Memo(model).price(states)
    np.testing.assert_allclose(worth.seconds, prices.seconds)
    np.testing.assert_allclose(worth.peak_bytes, prices.peak_bytes)
    assert (prices.seconds >= model.lower_bound()).all()


def test_random_states_of_rings_have_one_price() -> None:
    model = model_of("a=2,b=2,c=2")
    states = np.stack(random_states(model.space, 12, seed=0))
    prices, worth = model.price(states), Memo(model).price(states)
    np.testing.assert_allclose(worth.seconds, prices.seconds)
    np.testing.assert_allclose(worth.peak_bytes, prices.peak_bytes)


def test_the_device_with_the_last_causal_queries_decides() -> None:
    """It sees all keys: with ``n`` devices its products are ``2 - 1 / n`` times the mean."""

    def products(shards: int, lowering: str, **options: Any) -> float:
        heads, keys = f32(1, 8192, 4, 4, 64), f32(1, 8192, 4, 64)
        analysis = toast.analyze(
            functools.partial(attention, **options), heads, keys, keys, lowering=lowering
        )
        model = CostModel(Space(analysis, Mesh.parse(f"x={shards}")), load("tpu-v5e"))
        strategy = {"s": [("query", 1, "all")]} if shards > 1 else {}
        (state,) = (
            dict(manual_states(model, strategy)).values() if strategy else (model.space.unsharded,)
        )
        return float(model.price(state[None]).matmul_seconds[0])

    for lowering in ("xla", "local"):
        whole = products(1, lowering)
        for shards in (2, 8):
            even, least = whole / shards, products(shards, lowering, window=2048)
            assert products(shards, lowering) == pytest.approx(even * (2 - 1 / shards), rel=1e-3)
            full = products(shards, lowering, causal=False)
            assert full == pytest.approx(2 * even, rel=1e-3)
            # Of a window, only the first queries see less.
            mean = products(1, lowering, window=2048) / shards
            assert least == pytest.approx(mean * 2048 / (2048 - 2048**2 / 2 / 8192), rel=1e-3)


def test_parts_have_the_numbers_of_plain_attention() -> None:
    """The ring computes what a device computes whole, also where the first keys are unseen."""
    random = np.random.default_rng(0)
    arrays = [
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((2, 16, 2, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8))
    ]
    plan = toast.plan(
        functools.partial(attention, window=3), *(f32(*a.shape) for a in arrays), mesh="x=8",
        hardware="tpu-v5e", lowering="local",
        constraints=toast.Constraints(pin=dict.fromkeys(("query", "key", "value"), P(None, "x"))),
    )  # fmt: skip
    query, key, value = arrays
    scores = jnp.einsum("bsgrk,btgk->bgrst", query, key) * 8**-0.5
    own, other = jnp.arange(16)[:, None], jnp.arange(16)
    weights = jax.nn.softmax(
        jnp.where((other <= own) & (other > own - 3), scores, -jnp.inf), axis=-1
    )
    expected = jnp.einsum("bgrst,btgv->bsgrv", weights, value)
    np.testing.assert_allclose(plan.jit()(*arrays), expected, rtol=1e-4, atol=1e-5)
