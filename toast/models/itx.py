"""The paper's inference transformer (section 5.1, ITX): a prompt, or one token, through a KV cache.

It has rotary positions and multi-query attention as in Pope et al. (the paper's [31]).  The paper
states a hidden dimension of 4096, d_model 2048, 32 heads, 32 layers and 5B parameters.  A width of
4096, a total head width of 2048 (64 for each of 32 heads) and feed-forward layers of 4 x 4096 give
5.05B.  A width of 2048 and feed-forward layers of 4096 would give 1B.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from toast.models.layers import rms_norm, rotary
from toast.models.parameters import repeated, shapes_in
from toast.models.registry import Entry, Model, Strategies, entry


@dataclasses.dataclass(frozen=True)
class ITXConfig:
    """Sizes of the transformer, of its cache and of the input of one call."""

    layers: int = 32
    #: Width of activations.
    width: int = 4096
    #: Feed-forward width.
    hidden: int = 16384
    heads: int = 32
    key_size: int = 64
    vocabulary: int = 50257
    #: Tokens that one call reads: 1024 of a prompt, or 1 in decoding.
    prompt: int = 1024
    #: Positions of the cache: the prompt and the sequence that follows it.
    positions: int = 2048
    batch: int = 64
    dtype: str = "bfloat16"
    #: Layers as one ``lax.scan`` over stacked parameters and caches, instead of unrolled.
    scanned: bool = False


ITX = ITXConfig()

#: A call small enough to run on CPU devices in a test.
TINY = ITXConfig(
    layers=2,
    width=32,
    hidden=64,
    heads=4,
    key_size=8,
    vocabulary=65,  # odd, as 50257 is
    prompt=8,
    positions=16,
    batch=8,
    dtype="float32",
)


def parameter_shapes(config: ITXConfig) -> dict[str, Any]:
    """The pytree of parameter shapes: ``jax.ShapeDtypeStruct`` leaves."""
    c = config
    shape = shapes_in(c.dtype)
    layer = {
        "attention_norm": shape(c.width),
        "wq": shape(c.width, c.heads, c.key_size),
        "wk": shape(c.width, c.key_size),
        "wv": shape(c.width, c.key_size),
        "wo": shape(c.heads, c.key_size, c.width),
        "mlp_norm": shape(c.width),
        "up": shape(c.width, c.hidden),
        "down": shape(c.hidden, c.width),
    }
    return {
        "embedding": shape(c.vocabulary, c.width),
        "layers": repeated(layer, c.layers, c.scanned),
        "final_norm": shape(c.width),
    }


def cache_shapes(config: ITXConfig) -> Any:
    """The KV cache: ``key, value : [batch, positions, key_size]`` of each layer."""
    c = config
    one = shapes_in(c.dtype)(c.batch, c.positions, c.key_size)
    return repeated({"key": one, "value": one}, c.layers, c.scanned)


def attention(
    layer: dict[str, jax.Array], cache: dict[str, jax.Array], x: jax.Array, start: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Multi-query attention of ``x : [batch, prompt, width]`` to all cached positions.

    ``start : []`` of int32 is the position of the first token.
    """
    query = rotary(jnp.einsum("bsd,dhk->bshk", x, layer["wq"]), 10_000.0, start)
    # Keys have no heads; rotary needs that dimension.
    key = rotary((x @ layer["wk"])[:, :, None], 10_000.0, start)[:, :, 0]
    cache = {
        "key": jax.lax.dynamic_update_slice(cache["key"], key, (0, start, 0)),
        "value": jax.lax.dynamic_update_slice(cache["value"], x @ layer["wv"], (0, start, 0)),
    }
    logits = jnp.einsum("bshk,btk->bhst", query * query.shape[-1] ** -0.5, cache["key"])
    ours, theirs = jnp.arange(x.shape[1]), jnp.arange(cache["key"].shape[1])
    mask = theirs[None, :] <= start + ours[:, None]
    logits = jnp.where(mask[None, None], logits.astype(jnp.float32), -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
    attended = jnp.einsum("bhst,btk->bshk", weights, cache["value"])
    return jnp.einsum("bshk,hkd->bsd", attended, layer["wo"]), cache


def serve(
    config: ITXConfig, params: dict[str, Any], cache: Any, start: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, Any]:
    """``(logits, cache)`` after ``tokens : [batch, prompt]``; ``logits : [batch, vocabulary]``."""

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        weights, cached = layer
        attended, cached = attention(weights, cached, norm(x, weights["attention_norm"]), start)
        x = x + attended
        hidden = jax.nn.gelu(norm(x, weights["mlp_norm"]) @ weights["up"])
        return x + hidden @ weights["down"], cached

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, scale, 0.0)

    x = params["embedding"][tokens]
    if config.scanned:
        x, cache = jax.lax.scan(block, x, (params["layers"], cache))
    else:
        caches = []
        for layer in zip(params["layers"], cache, strict=True):
            x, cached = block(x, layer)
            caches.append(cached)
        cache = caches
    last = norm(x[:, -1], params["final_norm"])
    return (last @ params["embedding"].T).astype(jnp.float32), cache


def model(config: ITXConfig, name: str) -> Model:
    """One call of ``config`` with abstract arguments, for :func:`toast.plan`."""
    c = config

    def call(params: Any, cache: Any, start: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return serve(c, params, cache, start, tokens)

    return Model(
        name=name,
        function=call,
        arguments=(
            parameter_shapes(c),
            cache_shapes(c),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((c.batch, c.prompt), jnp.int32),
        ),
        donate=(1,),
    )


_BATCH = ("tokens", 0)
_HIDDEN, _HEADS = ("params['layers']*['up']", -1), ("params['layers']*['wq']", -2)
#: Section 5.1.1.
STRATEGIES: Strategies = {
    "data parallel": [(*_BATCH, "all")],
    "Megatron": [(*_HIDDEN, "all"), (*_HEADS, "all")],
    "Megatron + data parallel": [(*_BATCH, "first"), (*_HIDDEN, "last"), (*_HEADS, "last")],
    # Pope et al.: cached keys have no heads to shard, so attention is sharded by batch instead.
    "multi-query + Megatron + data parallel": [
        (*_BATCH, "first"), (*_HIDDEN, "last"), (*_BATCH, "last"),
    ],
}  # fmt: skip

_entry = functools.partial(
    entry, model, sizes=(ITX, TINY), options=("layers", "batch"), strategies=STRATEGIES
)
ENTRIES: dict[str, Entry] = {
    "itx": _entry("itx", "the paper's inference transformer: 1024 tokens into its KV cache"),
    "itx-scan": _entry("itx-scan", "itx with its layers as one scan", scanned=True),
    "itx-decode": _entry("itx-decode", "itx reading one token: a decode step", prompt=1),
}
