"""What the backward pass gathers again of an argument, and what the other choice would cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import toast


@functools.partial(toast.checkpoint, name="layer")
def layer(y: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(y @ w)


def loss(weights: Any, x: Any) -> Any:
    for one in weights:
        x = layer(x, one)
    return jnp.mean(x**2)


def scanned(weights: Any, x: Any) -> Any:
    x, _ = jax.lax.scan(lambda y, one: (layer(y, one), None), x, weights)
    return jnp.mean(x**2)


def shared(weights: Any, x: Any) -> Any:
    """Each step of the loop uses the same weight."""
    x, _ = jax.lax.scan(lambda y, _: (layer(y, weights), None), x, None, length=3)
    return jnp.mean(x**2)


def unmarked(weights: Any, x: Any) -> Any:
    """Layers that nobody marked, whose inputs have the paths of arguments."""
    for one in weights["layers"]:
        x = jnp.tanh(x / jnp.sqrt(jnp.mean(x**2)) @ one["up"]) @ one["down"] + x
    return jnp.mean(x**2)


@functools.cache
def plan(remat: str | None, of: Callable[..., Any] = loss, microbatches: int = 1) -> toast.Plan:
    """Sharded weights, which are gathered for their products."""
    weight = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    stack = jax.ShapeDtypeStruct((3, 1024, 1024), jnp.float32)
    layers = [{"up": weight, "down": weight}] * 3
    weights: Any = {
        loss: [weight] * 3, scanned: stack, shared: weight, unmarked: {"layers": layers}
    }[of]  # fmt: skip
    pins = {
        loss: {f"weights[{number}]": P("data") for number in range(3)},
        scanned: {"weights": P(None, "data")},
        shared: {"weights": P("data")},
        unmarked: {"weights*": P("data")},
    }[of]

    def gradients(weights: Any, x: Any) -> Any:
        return toast.accumulate(jax.grad(of), batch_argnums=1)(weights, x)

    return toast.plan(
        gradients, weights, jax.ShapeDtypeStruct((8192, 1024), jnp.float32), mesh="data=2",
        hardware="tpu-v5e", remat=remat, overlap="gathers", microbatches=microbatches,
        constraints=toast.Constraints(pin={"x": P("data"), **pins}),
        settings=toast.Settings(rounds=1),
    )  # fmt: skip


def test_weights_are_gathered_again() -> None:
    found = plan("layer: recompute=*").explain_argument("weights[1]").gathered
    assert found is not None
    assert (found.again, found.count, found.inputs, found.in_loop) == (True, 1, ("w",), False)
    assert found.bytes == 2 * 1024**2  # products round weights to bfloat16 before the gather
    assert found.text == (
        "the backward pass gathers it again (23.5 us before overlap); up to 2 MiB more would wait "
        "if its copies stayed: --why-not 'gathered=w'"
    )


def test_layers_that_nobody_marked_name_the_argument() -> None:
    kept = plan("*: recompute=* gathered=*", unmarked)
    found = kept.explain_argument("weights['layers'][1]['up']").gathered
    assert found is not None
    assert not found.again
    # The weight "down" has the same type, but another path.
    assert found.inputs == ("weights['layers'][*]['up']",)
    # In double quotes, as the path has single ones.
    assert found.text.endswith(""": --why-not "keep=weights['layers'][*]['up']\"""")


def test_gathered_copies_stay() -> None:
    found = plan("layer: recompute=* gathered=w").explain_argument("weights[1]").gathered
    assert found is not None
    assert (found.again, found.count) == (False, 1)
    assert found.text == (
        "the backward pass uses the copies of the forward pass (2 MiB); to gather it again would "
        "take about 23.5 us before overlap: --why-not 'keep=w'"
    )


def test_without_another_choice_the_text_names_none() -> None:
    """Everything is kept, so that no argument of a block could be gathered again."""
    found = plan("none").explain_argument("weights[1]").gathered
    assert found is not None
    assert found.text == "the backward pass uses the copies of the forward pass (2 MiB)"


@pytest.mark.parametrize("remat", ["layer: recompute=*", "layer: recompute=* gathered=w"])
def test_weights_are_gathered_once_for_all_microbatches(remat: str) -> None:
    """The gather is before the loop over microbatches, whatever the policy says."""
    found = plan(remat, microbatches=4).explain_argument("weights[1]").gathered
    assert found is not None
    assert (found.again, found.count, found.once, found.inputs) == (False, 1, True, ())
    assert found.text == (
        "it is gathered once for all microbatches (23.5 us before overlap), and the backward pass "
        "uses the same copies (2 MiB)"
    )


@pytest.mark.parametrize(
    ("of", "microbatches", "count", "spent"),
    [(scanned, 1, 3, "70.5 us"), (scanned, 4, 12, "282 us"), (shared, 1, 1, "23.5 us")],
)
def test_loops_gather_again_in_any_case(
    of: Callable[..., Any], microbatches: int, count: int, spent: str
) -> None:
    found = plan("layer: recompute=*", of, microbatches).explain_argument("weights").gathered
    assert found is not None
    assert (found.again, found.count, found.in_loop, found.once) == (True, count, True, False)
    assert found.text == (
        f"the backward pass gathers it again ({spent} before overlap), as all loops do"
    )


@pytest.mark.parametrize(("remat", "argument"), [(None, "weights[1]"), ("layer: recompute=*", "x")])
def test_what_is_not_gathered_has_no_such_line(remat: str | None, argument: str) -> None:
    assert plan(remat).explain_argument(argument).gathered is None
