"""What the kernels of products read and compute besides the product, and images of convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel, break_down
from toast.hardware import Mesh, load
from toast.space import Space

V5E = load("tpu-v5e")


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def terms(hardware: str, function: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Seconds of each term on one device."""
    analysis = toast.analyze(function, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    found = break_down(CostModel(space, load(hardware)), space.initial).term_seconds
    return {name: float(seconds.sum()) for name, seconds in found.items()}


def attend(queries: Any, cache: Any) -> Any:
    return jnp.einsum("bnk,btnk->bnt", queries, cache)


def test_heads_that_share_a_cache_read_it_once() -> None:
    """The kernel of a token that attends to a cache repeats its heads as it reads them."""

    def repeating(queries: Any, cache: Any) -> Any:
        return attend(queries, jnp.repeat(cache, 4, axis=2))

    queries, cache = shape(8, 16, 128), shape(8, 4096, 4, 128)
    whole = terms("tpu-v5e", attend, queries, shape(8, 4096, 16, 128))
    shared = terms("tpu-v5e", repeating, queries, cache)
    assert shared.get("reads", 0.0) == whole.get("reads", 0.0) == 0
    assert shared["products"] <= whole["products"]


def test_a_cache_that_another_op_needs_repeated_is_read_for_it() -> None:
    def both(queries: Any, cache: Any) -> Any:
        repeated = jnp.repeat(cache, 4, axis=2)
        return attend(queries, repeated), repeated

    assert terms("tpu-v5e", both, shape(8, 16, 128), shape(8, 4096, 4, 128))["reads"] > 0


@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_the_next_token_costs_no_read_of_its_logits_on_tpus(hardware: str) -> None:
    def token(x: Any, head: Any) -> Any:
        return jnp.max(x @ head, axis=-1)

    def kept(x: Any, head: Any) -> Any:
        logits = x @ head
        return jnp.max(logits, axis=-1), logits

    arguments = shape(256, 4096), shape(4096, 65536)
    assert terms(hardware, kept, *arguments)["reads"] > 0
    alone = terms(hardware, token, *arguments).get("reads", 0.0)
    assert alone == 0 if hardware.startswith("tpu") else alone > 0


# -- images of convolutions ------------------------------------------------------------------------


def convolved(images: Any, kernel: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)


def gradient(images: Any, results: Any) -> Any:
    """Of the kernel."""
    kernel = shape(3, 3, images.shape[-1], results.shape[-1])
    return jax.linear_transpose(lambda k: convolved(images, k), kernel)(results)[0]


@pytest.mark.parametrize(("few", "many"), [(9, 16), (17, 24), (8, 8)])
def test_convolutions_compute_whole_tiles_of_images(few: int, many: int) -> None:
    times = [
        terms("tpu-v5e", function, shape(images, 64, 64, 256), other)["products"]
        for images in (few, many)
        for function, other in (
            (convolved, shape(3, 3, 256, 256)), (gradient, shape(images, 64, 64, 256)),
        )
    ]  # fmt: skip
    assert times[:2] == pytest.approx(times[2:], rel=0.02)


def test_sharded_images_fill_tiles_of_their_own() -> None:
    """24 images on two devices are two tiles on each."""
    arguments = shape(24, 64, 64, 256), shape(3, 3, 256, 256)
    analysis = toast.analyze(convolved, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    model = CostModel(space, V5E)
    sharded = space.apply(space.initial, action(space, "images", 0, "a"))
    half, whole = (
        float(break_down(model, state).product_seconds.sum()) for state in (sharded, space.initial)
    )
    assert half == pytest.approx(2 / 3 * whole, rel=0.03)
