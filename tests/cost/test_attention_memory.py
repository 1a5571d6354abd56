"""What a TPU keeps of attention for the backward pass."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import action, model_of
from toast.evaluation.oracle.tpu import judge


def attention(q: jax.Array, k: jax.Array, v: jax.Array, wide: Any = None) -> jax.Array:
    """Attention of several queries to each key, with a softmax in float32."""
    product = jnp.einsum("bsgrk,btgk->bgrst", q, k, preferred_element_type=wide)
    weights = jax.nn.softmax(product.astype(jnp.float32) * 0.1, -1).astype(q.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", weights, v)


def arrays(batch: int, groups: int, queries: int) -> list[jax.ShapeDtypeStruct]:
    """Queries, keys and values of sequences of 512 tokens."""
    keys = (batch, 512, groups, 64)
    shapes = ((batch, 512, groups, queries, 64), keys, keys)
    return [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]


@pytest.mark.parametrize(
    ("sizes", "sharded", "share"),
    [
        ((8, 4, 2), {}, 1.0),
        ((8, 1, 8), {}, 0.5),
        ((8, 8, 1), {}, 0.5),
        ((1, 4, 2), {}, 0.5),
        ((8, 4, 2), {"q": 2, "k": 2, "v": 2}, 0.5),  # one group of heads on each device
        ((8, 8, 2), {"q": 2, "k": 2, "v": 2}, 1.0),
        ((4, 4, 2), {"q": 0, "k": 0, "v": 0}, 0.5),  # one sequence
        ((8, 4, 4), {"q": 3}, 0.5),  # one query of each group
    ],
)
def test_scores_of_one_group_are_kept_instead_of_their_exponentials(
    sizes: tuple[int, int, int], sharded: dict[str, int], share: float
) -> None:
    model = model_of(toast.analyze(attention, *arrays(*sizes), platform="tpu"), "d=4")
    space = model.space
    actions = (action(space, name, dim, "d") for name, dim in sharded.items())
    state = functools.reduce(space.apply, actions, space.initial)
    layout, values = model.layout(state[None]), model.tables.values
    scores = np.flatnonzero(values.scores)
    assert len(scores) == 1
    whole = 4 * 8 * 8 * 512 * 512 * np.prod(sizes) / 64 / (4 if sharded else 1)
    assert layout.written_bytes[0, scores] == pytest.approx(share * whole)
    other = np.flatnonzero(~values.scores)
    assert (layout.narrowed[0, other] == 1).all()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_products_in_float32_and_libraries_keep_exponentials(platform: str) -> None:
    """The product asks for float32, or the device has no tiles with lanes."""
    wide = jnp.float32 if platform == "tpu" else None
    function = functools.partial(attention, wide=wide)
    analysis = toast.analyze(function, *arrays(8, 1, 8), platform=platform)
    model = model_of(analysis, "d=4", hardware="tpu-v5e" if platform == "tpu" else "h100")
    assert not model.tables.values.scores.any()
    assert (model.layout(model.space.initial[None]).narrowed == 1).all()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
@pytest.mark.parametrize(("groups", "queries"), [(1, 8), (2, 4), (8, 1)])
def test_the_peak_of_attention_is_that_of_the_tpu_compiler(
    groups: int, queries: int, tmp_path: pathlib.Path
) -> None:
    """Three layers, with four sequences on each device."""

    def half(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, "bfloat16")

    def loss(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        for w in layers:
            q = jnp.einsum("bsd,dgrk->bsgrk", x, w["q"])
            k, v = (jnp.einsum("bsd,dgk->bsgk", x, w[name]) for name in "kv")
            x = x + jnp.einsum("bsgrk,grkd->bsd", attention(q, k, v), w["o"])
        return (x.astype(jnp.float32) ** 2).mean()

    keys = half(512, groups, 128)
    layer = {
        "q": half(512, groups, queries, 128), "k": keys, "v": keys,
        "o": half(groups, queries, 128, 512),
    }  # fmt: skip
    plan = toast.plan(
        jax.grad(loss), [layer] * 3, half(64, 1024, 512), mesh="data=16", hardware="tpu-v6e",
        constraints=toast.Constraints(pin={"x": P("data"), "layers*": P()}),
    )  # fmt: skip
    verdict = judge(plan.analysis.program, plan.shardings, plan.hardware, cache=tmp_path)
    assert plan.after.peak_bytes == pytest.approx(verdict.peak_bytes, rel=0.1)
