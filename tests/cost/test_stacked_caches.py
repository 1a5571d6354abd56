"""Copies of caches in loops over stacked layers, as XLA for TPUs makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel, break_down
from toast.cost.stacked_caches import stacked_caches
from toast.hardware import Mesh, load
from toast.space import Space

LAYERS, BATCH, KEYS, HEADS, SIZE = 4, 8, 2048, 8, 128

Update = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def by_slice(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(cache, new[:, None], (0, position, 0, 0))


def by_scatter(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    return cache.at[jnp.arange(BATCH), position].set(new)


def by_selection(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    here = (jnp.arange(KEYS) == position)[None, :, None, None]
    return jnp.where(here, new[:, None], cache)


def heads_first(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(cache, new[:, :, None], (0, 0, position, 0))


def attended(cache: jax.Array, queries: jax.Array, order: str) -> jax.Array:
    scores = jnp.einsum(f"bgqd,{order}->bgqt", queries, cache)
    return jnp.einsum(f"bgqt,{order}->bgqd", jax.nn.softmax(scores, -1), cache)


def scanned(update: Update, order: str = "btgd") -> Callable[..., Any]:
    """A scan over layers that has caches among its inputs and its results."""

    def step(caches: Any, queries: Any, new: Any, position: Any) -> Any:
        def layer(x: Any, cache: Any) -> Any:
            cache = update(cache, new, position)
            return x + attended(cache, x, order), cache

        return jax.lax.scan(layer, queries, caches)

    return step


def carried(order: str = "btgd", tokens: int = 1) -> Callable[..., Any]:
    """Loops over tokens and layers that carry the caches."""
    keys = order.index("t")

    def step(caches: Any, queries: Any, new: Any, position: Any) -> Any:
        def token(_: Any, state: Any) -> Any:
            def layer(number: Any, state: Any) -> Any:
                x, caches = state
                place = [number, 0, 0, 0, 0]
                place[keys + 1] = position
                update = jnp.expand_dims(new, (0, keys + 1))
                caches = jax.lax.dynamic_update_slice(caches, update, place)
                cache = jax.lax.dynamic_index_in_dim(caches, number, 0, keepdims=False)
                return x + attended(cache, x, order), caches

            return jax.lax.fori_loop(0, LAYERS, layer, state)

        return jax.lax.fori_loop(0, tokens, token, (queries, caches))

    return step


def analyzed(
    step: Callable[..., Any], order: str = "btgd", *, donate: bool = True, group: int = 4
) -> toast.Analysis:
    sizes = dict(zip("btgd", (BATCH, KEYS, HEADS, SIZE), strict=True))
    shapes = (
        (LAYERS, *(sizes[dim] for dim in order)), (BATCH, HEADS, group, SIZE), (BATCH, HEADS, SIZE)
    )  # fmt: skip
    arguments = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    position = jax.ShapeDtypeStruct((), "int32")
    donated = (0,) if donate else ()
    return toast.analyze(step, *arguments, position, donate=donated, platform="tpu", cache=False)


def copies(analysis: toast.Analysis) -> dict[str, float]:
    """The copies of a step in layers' caches, by kind of the op that needs them."""
    program, found = analysis.program, dict[str, float]()
    layer = BATCH * KEYS * HEADS * SIZE
    for copy in stacked_caches(program, tiles=True).copies:
        share = program.elements[program.ops[copy.op].operands[copy.operand]] / layer
        kind = program.kinds[copy.op]
        found[kind] = found.get(kind, 0.0) + copy.copies * program.repeats[copy.op] * share
    return found


@pytest.mark.parametrize(
    ("update", "order", "of_layer"),
    [
        pytest.param(by_scatter, "btgd", 2.0, id="scatters keep the layout"),
        pytest.param(by_slice, "btgd", 2.7, id="heads behind the keys"),
        pytest.param(heads_first, "bgtd", 2.0, id="heads before the keys"),
        pytest.param(by_selection, "btgd", 2.7, id="a selection in another layout"),
    ],
)
def test_scans_copy_the_cache_of_each_layer_and_donated_stacks_once_more(
    update: Update, order: str, of_layer: float
) -> None:
    found = copies(analyzed(scanned(update, order), order))
    assert found == {
        "dynamic_update_slice": pytest.approx(LAYERS * of_layer), "return": LAYERS
    }  # fmt: skip
    kept = copies(analyzed(scanned(update, order), order, donate=False))
    assert kept == {"dynamic_update_slice": pytest.approx(LAYERS * of_layer)}


def test_caches_of_bytes_with_scales_are_turned_as_others_are() -> None:
    def step(caches: Any, queries: Any, new: Any, position: Any) -> Any:
        def layer(x: Any, cache: Any) -> Any:
            cache = by_slice(cache, new.astype(cache.dtype), position)
            return x + attended(cache.astype(x.dtype) * x[0, 0, 0, 0], x, "btgd"), cache

        return jax.lax.scan(layer, queries, caches.astype("int8"))

    found = copies(analyzed(step, donate=False))
    assert found == {"dynamic_update_slice": pytest.approx(LAYERS * 2.7)}


def test_selections_for_single_queries_are_fused_with_the_slices_of_stacks() -> None:
    assert copies(analyzed(scanned(by_selection), group=1)) == {"return": LAYERS}


def test_loops_that_carry_caches_turn_the_stack_unless_heads_are_before_keys() -> None:
    assert copies(analyzed(carried())) == {"return": 2 * LAYERS}
    assert copies(analyzed(carried("bgtd"), "bgtd")) == {}
    assert copies(analyzed(carried("bgtd"), "bgtd", donate=False)) == {"carry": LAYERS}


def in_place(step: Callable[..., Any], order: str = "bgtd", *, tiles: bool = True) -> bool:
    """Whether the donated caches of a step are carried in their buffer."""
    analysis = analyzed(step, order)
    return bool(stacked_caches(analysis.program, tiles=tiles).in_place)


def written(caches: Any, new: Any, position: Any) -> Any:
    return jax.lax.dynamic_update_slice(
        caches, jnp.expand_dims(new, (0, 3)), (0, 0, 0, position, 0)
    )


def looped(body: Callable[..., Any], *, twice: bool = False) -> Callable[..., Any]:
    """A loop over layers that carries caches with heads before keys."""

    def step(caches: Any, queries: Any, new: Any, position: Any) -> Any:
        def layer(number: Any, state: Any) -> Any:
            return body(number, *state, caches, new, position)

        x, after = jax.lax.fori_loop(0, LAYERS, layer, (queries, caches))
        return (x, after, after) if twice else (x, after)

    return step


def layer_of(caches: Any, number: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(caches, number, 0, keepdims=False)


def plain(number: Any, x: Any, caches: Any, given: Any, new: Any, position: Any) -> Any:
    caches = written(caches, new, position)
    return attended(layer_of(caches, number), x, "bgtd"), caches


def reads_old(number: Any, x: Any, caches: Any, given: Any, new: Any, position: Any) -> Any:
    old = layer_of(caches, number)
    return attended(old, x, "bgtd"), written(caches, new, position)


def reads_argument(number: Any, x: Any, caches: Any, given: Any, new: Any, position: Any) -> Any:
    return attended(layer_of(given, number), x, "bgtd"), written(caches, new, position)


def constrained(number: Any, x: Any, caches: Any, given: Any, new: Any, position: Any) -> Any:
    x, caches = plain(number, x, caches, given, new, position)
    return x, jax.lax.optimization_barrier(caches)


def needs_old(number: Any, x: Any, caches: Any, given: Any, new: Any, position: Any) -> Any:
    x = attended(layer_of(caches, number), x, "bgtd")
    return x, written(caches, new + x.sum(2), position)


def adds_rows(number: Any, x: Any, caches: Any, given: Any, new: Any, position: Any) -> Any:
    row = jax.lax.dynamic_slice(
        caches, (0, 0, 0, position, 0), (1, BATCH, HEADS, 1, SIZE)
    )[0, :, :, 0]  # fmt: skip
    return x, written(caches, new + row, position)


@pytest.mark.parametrize(
    ("body", "alone"),
    [
        (plain, True),
        (constrained, True),
        (needs_old, True),  # the update depends on what is read before it
        (reads_old, False),
        (reads_argument, False),
        (adds_rows, False),  # XLA turns the stack for slices along the keys
    ],
)
def test_caches_are_updated_in_place_unless_their_old_values_are_needed(
    body: Callable[..., Any], alone: bool
) -> None:
    """As in programs that XLA compiled for v5e."""
    assert in_place(looped(body)) is alone
    assert not in_place(looped(body, twice=True))


def test_other_devices_turn_no_stacks() -> None:
    assert not in_place(carried(), "btgd")
    assert in_place(carried(), "btgd", tiles=False)
    program = analyzed(scanned(by_slice)).program
    assert not stacked_caches(program, tiles=False).copies


def test_scans_in_loops_over_tokens_copy_each_cache_once_per_run() -> None:
    def step(caches: Any, queries: Any, new: Any, position: Any) -> Any:
        def token(state: Any, _: Any) -> Any:
            return scanned(by_slice)(state[1], state[0], new, position), None

        return jax.lax.scan(token, (queries, caches), None, length=3)[0]

    found = copies(analyzed(step))
    assert found["dynamic_update_slice"] == pytest.approx(3 * LAYERS * 2.7)


def model_of(analysis: toast.Analysis, mesh: str, device: str) -> CostModel:
    return CostModel(Space(analysis, Mesh.parse(mesh)), load(device))


@pytest.mark.parametrize("tokens", [1, 3])
def test_donated_caches_are_updated_in_their_buffers(tokens: int) -> None:
    whole = 2 * LAYERS * BATCH * KEYS * HEADS * SIZE

    def peak(*, donate: bool) -> float:
        analysis = analyzed(carried("bgtd", tokens), "bgtd", donate=donate)
        model = model_of(analysis, "data=2", "tpu-v5e")
        return float(model.price(model.space.initial[None]).peak_bytes[0])

    assert peak(donate=True) < 1.5 * whole  # with a slice of a layer
    assert peak(donate=False) > 2 * whole


def test_tiles_of_few_heads_take_almost_as_long_to_copy_as_whole_ones() -> None:
    model = model_of(analyzed(scanned(by_scatter)), "model=4", "tpu-v6e")
    heads = model.space.apply(model.space.initial, action(model.space, "caches", 3, "model"))
    whole, few = (
        float(break_down(model, state).term_seconds["cache copies"].sum())
        for state in (model.space.initial, heads)
    )
    # A quarter of the bytes, in as many tiles.
    assert 0.6 * whole < few < 0.8 * whole
