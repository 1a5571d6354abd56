"""Blocks of transformers with layer norms and biases, as in ViT and Whisper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from toast.models.attention import attention
from toast.models.forms import product
from toast.models.layers import layer_norm
from toast.models.parameters import shapes_in

#: The values of a block that have names for policies of recomputation.
NAMES = ("query", "key", "value", "attention", "up")


def norm_shapes(dtype: str, width: int) -> dict[str, Any]:
    """The scale and the bias of a layer norm."""
    shape = shapes_in(dtype)
    return {"norm": shape(width), "bias": shape(width)}


def dense_shapes(dtype: str, before: int, after: int) -> dict[str, Any]:
    """A linear layer."""
    shape = shapes_in(dtype)
    return {"weight": shape(before, after), "bias": shape(after)}


def attention_shapes(dtype: str, width: int, heads: int) -> dict[str, Any]:
    """The projections of attention; that of keys has no bias, which softmax would not see."""
    shape = shapes_in(dtype)
    size = width // heads
    return {
        "wq": shape(width, heads, size), "query_bias": shape(heads, size),
        "wk": shape(width, heads, size),
        "wv": shape(width, heads, size), "value_bias": shape(heads, size),
        "wo": shape(heads, size, width), "bias": shape(width),
    }  # fmt: skip


def mlp_shapes(dtype: str, width: int, hidden: int) -> dict[str, Any]:
    """A feed-forward layer."""
    shape = shapes_in(dtype)
    return {
        "up": shape(width, hidden), "up_bias": shape(hidden),
        "down": shape(hidden, width), "bias": shape(width),
    }  # fmt: skip


def block_shapes(
    dtype: str, width: int, hidden: int, heads: int, *, cross: bool = False
) -> dict[str, Any]:
    """A block; with ``cross``, it also attends to another sequence."""
    own = {
        "attention_norm": norm_shapes(dtype, width),
        "attention": attention_shapes(dtype, width, heads),
        "mlp_norm": norm_shapes(dtype, width),
        "mlp": mlp_shapes(dtype, width, hidden),
    }
    other = {
        "cross_norm": norm_shapes(dtype, width),
        "cross": attention_shapes(dtype, width, heads),
    }
    return own | other if cross else own


def norm(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Layer norm in float32."""
    wide = (x.astype(jnp.float32), *(params[n].astype(jnp.float32) for n in ("norm", "bias")))
    return layer_norm(*wide).astype(x.dtype)


def dense(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A linear layer over the last dimension."""
    return x @ params["weight"].astype(x.dtype) + params["bias"].astype(x.dtype)


def attend(
    params: dict[str, jax.Array], x: jax.Array, source: jax.Array, *, causal: bool
) -> jax.Array:
    """Attention of ``x : [batch, sequence, width]`` to ``source : [batch, keys, width]``."""
    query = product("bsd,dhk->bshk", x, params["wq"]) + params["query_bias"].astype(x.dtype)
    key = product("btd,dhk->bthk", source, params["wk"])
    value = product("btd,dhk->bthk", source, params["wv"]) + params["value_bias"].astype(x.dtype)
    query, key, value = (
        checkpoint_name(part, name)
        for part, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    attended = attention(query[:, :, :, None], key, value, causal=causal)[:, :, :, 0]
    return product("bshk,hkd->bsd", attended, params["wo"]) + params["bias"].astype(x.dtype)


def mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A feed-forward layer."""
    up = product("bsd,df->bsf", x, params["up"]) + params["up_bias"].astype(x.dtype)
    up = checkpoint_name(up, "up")
    return product("bsf,fd->bsd", jax.nn.gelu(up), params["down"]) + params["bias"].astype(x.dtype)


def block(
    params: dict[str, Any], x: jax.Array, source: jax.Array | None = None, *, causal: bool = False
) -> jax.Array:
    """Attention and an MLP beside residual connections; ``source`` is another sequence."""
    normed = norm(params["attention_norm"], x)
    x = x + attend(params["attention"], normed, normed, causal=causal)
    if source is not None:
        x = x + attend(params["cross"], norm(params["cross_norm"], x), source, causal=False)
    return x + mlp(params["mlp"], norm(params["mlp_norm"], x))


def patches(images: jax.Array, size: int) -> jax.Array:
    """Patches of ``images : [batch, height, width, channels]``, ``[batch, patches, elements]``."""
    batch, height, width, channels = images.shape
    split = images.reshape(batch, height // size, size, width // size, size, channels)
    return jnp.swapaxes(split, 2, 3).reshape(batch, -1, size * size * channels)


def strategies(
    batch: str, hidden: str, heads: str, width: str
) -> dict[str, list[tuple[str, int, str]]]:
    """Data parallelism, FSDP and tensor parallelism.

    ``batch`` is an argument with a batch as its first dimension, the others are patterns of
    parameters: ``hidden`` ends with the hidden dimension of the MLPs, ``heads`` ends with heads and
    their size, and ``width`` with the width of the model.
    """
    model = ((hidden, -1), (heads, -2))
    return {
        "data parallel": [(batch, 0, "all")],
        "FSDP": [(batch, 0, "all"), (width, -1, "all")],
        "Megatron": [(batch, 0, "first"), *((*place, "last") for place in model)],
        "FSDP + Megatron": [
            (batch, 0, "first"), *((*place, "last") for place in model), (width, -1, "first"),
        ],
        "tensor parallel": [(*place, "all") for place in model],
    }  # fmt: skip
