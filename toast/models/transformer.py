"""Decoder transformers as full Adam train steps: Gemma 1 (section 5.1, T2B and T7B), Llama 3.

The models are plain JAX code: a dict of parameters, pure functions and ``jax.value_and_grad``,
without sharding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from toast.models.layers import cross_entropy, rms_norm, rotary
from toast.models.optimizers import adam, adam_moments, train_step
from toast.models.parameters import initial, repeated, shapes_in
from toast.models.registry import Entry, Model, Strategies, entry, training


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder and of its training batch; the defaults are those of Gemma 1.

    ``hidden`` is the width of one of the two projections of a gated MLP; the paper's table gives
    the sum of both (32768 for T2B).
    """

    layers: int = 18
    d_model: int = 2048
    hidden: int = 16384
    heads: int = 8
    kv_heads: int = 1
    key_size: int = 256
    vocabulary: int = 256128
    sequence: int = 2048
    batch: int = 16
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3
    #: Layers as one ``lax.scan`` over stacked parameters, instead of unrolled.
    scanned: bool = False
    #: The activation of the gate, a function of :mod:`jax.nn`.
    activation: str = "gelu"
    #: Whether the embedding is also the output projection.
    tied: bool = True
    #: Whether embeddings are multiplied by the root of ``d_model``.
    scale_embedding: bool = True
    #: Added to the scale of RMS norms; Gemma stores the scale minus one.
    norm_offset: float = 1.0
    rope_theta: float = 10_000.0


#: Gemma 2B, the paper's T2B.
T2B = TransformerConfig()

#: Gemma 7B, the paper's T7B: gate and up together have 49152.
T7B = TransformerConfig(layers=28, d_model=3072, hidden=24576, heads=16, kv_heads=16)

#: The differences of Llama.
_LLAMA: dict[str, Any] = {
    "activation": "silu",
    "tied": False,
    "scale_embedding": False,
    "norm_offset": 0.0,
    "rope_theta": 500_000.0,
}

#: Llama 3 8B.
LLAMA3_8B = TransformerConfig(
    layers=32,
    d_model=4096,
    hidden=14336,
    heads=32,
    kv_heads=8,
    key_size=128,
    vocabulary=128256,
    sequence=8192,
    **_LLAMA,
)

#: A train step small enough to run on CPU devices in a test.
TINY = TransformerConfig(
    layers=2,
    d_model=32,
    hidden=64,
    heads=4,
    key_size=8,
    vocabulary=64,
    sequence=16,
    batch=8,
    dtype="float32",
)
TINY_T7B = dataclasses.replace(TINY, kv_heads=4)
TINY_LLAMA = dataclasses.replace(TINY, kv_heads=2, **_LLAMA)


def parameter_shapes(config: TransformerConfig) -> dict[str, Any]:
    """The pytree of parameter shapes: ``jax.ShapeDtypeStruct`` leaves."""
    c = config
    shape = shapes_in(c.dtype)
    layer = {
        "attention_norm": shape(c.d_model),
        "wq": shape(c.d_model, c.heads, c.key_size),
        "wk": shape(c.d_model, c.kv_heads, c.key_size),
        "wv": shape(c.d_model, c.kv_heads, c.key_size),
        "wo": shape(c.heads, c.key_size, c.d_model),
        "mlp_norm": shape(c.d_model),
        "gate": shape(c.d_model, c.hidden),
        "up": shape(c.d_model, c.hidden),
        "down": shape(c.hidden, c.d_model),
    }
    shapes = {
        "embedding": shape(c.vocabulary, c.d_model),
        "layers": repeated(layer, c.layers, c.scanned),
        "final_norm": shape(c.d_model),
    }
    return shapes if c.tied else shapes | {"output": shape(c.d_model, c.vocabulary)}


def init(config: TransformerConfig, seed: int) -> dict[str, Any]:
    """Random parameters."""
    params: dict[str, Any] = initial(parameter_shapes(config), seed, norm=1.0 - config.norm_offset)
    return params


def attention(
    layer: dict[str, jax.Array], x: jax.Array, mask: jax.Array, theta: float
) -> jax.Array:
    """Causal attention with grouped key/value heads; ``x : [batch, sequence, d_model]``."""
    query = rotary(jnp.einsum("bsd,dhk->bshk", x, layer["wq"]), theta)
    key = rotary(jnp.einsum("bsd,dgk->bsgk", x, layer["wk"]), theta)
    value = jnp.einsum("bsd,dgk->bsgk", x, layer["wv"])
    heads, groups, size = query.shape[2], key.shape[2], query.shape[3]
    if groups == 1:
        key, value = key[:, :, 0], value[:, :, 0]
        logits = jnp.einsum("bshk,btk->bhst", query * size**-0.5, key)
    else:
        key = jnp.repeat(key, heads // groups, axis=2)
        value = jnp.repeat(value, heads // groups, axis=2)
        logits = jnp.einsum("bshk,bthk->bhst", query * size**-0.5, key)
    logits = jnp.where(mask, logits.astype(jnp.float32), -1e30)
    weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
    spec = "bhst,btk->bshk" if groups == 1 else "bhst,bthk->bshk"
    return jnp.einsum("bshk,hkd->bsd", jnp.einsum(spec, weights, value), layer["wo"])


def mlp(
    layer: dict[str, jax.Array], x: jax.Array, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """A gated MLP."""
    return (activation(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def loss(
    config: TransformerConfig, params: dict[str, Any], tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """Mean next-token cross entropy; ``tokens, targets : [batch, sequence]`` of int32."""
    c = config
    embedding = params["embedding"]
    activation = getattr(jax.nn, c.activation)
    x = embedding[tokens]
    if c.scale_embedding:
        x = x * jnp.asarray(c.d_model**0.5, embedding.dtype)
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), dtype=bool))[None, None]

    def block(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        normed = rms_norm(x, layer["attention_norm"], c.norm_offset)
        x = x + attention(layer, normed, mask, c.rope_theta)
        return x + mlp(layer, rms_norm(x, layer["mlp_norm"], c.norm_offset), activation)

    if c.scanned:
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = block(x, layer)
    x = rms_norm(x, params["final_norm"], c.norm_offset)
    logits = (x @ (embedding.T if c.tied else params["output"])).astype(jnp.float32)
    return cross_entropy(logits, targets)


def model(config: TransformerConfig, name: str) -> Model:
    """The train step of ``config`` with Adam and abstract arguments, for :func:`toast.plan`."""
    c = config
    params = parameter_shapes(c)
    tokens = jax.ShapeDtypeStruct((c.batch, c.sequence), jnp.int32)
    step = train_step(functools.partial(loss, c), functools.partial(adam, rate=c.learning_rate))
    return training(name, step, params, adam_moments(params), tokens, tokens)


_BATCH, _SEQUENCE, _WIDTH = ("tokens", 0), ("tokens", 1), ("params['embedding']", 1)
_HIDDEN, _HEADS = ("params['layers']*['gate']", -1), ("params['layers']*['wq']", -2)
#: The second exists only if the embedding is not tied.
_VOCABULARY = (("params['embedding']", 0), ("params['output']", 1))
_MODEL = (_HIDDEN, _HEADS, *_VOCABULARY)
_MEGATRON = tuple((*d, "last") for d in _MODEL)
#: Section 5.1.1.
STRATEGIES: Strategies = {
    "data parallel": [(*_BATCH, "all")],
    "FSDP": [(*_BATCH, "all"), (*_WIDTH, "all")],
    "Megatron": [(*_BATCH, "first"), *_MEGATRON],
    "FSDP + Megatron": [(*_BATCH, "first"), *_MEGATRON, (*_WIDTH, "first")],
    "sequence parallel": [(*_BATCH, "first"), (*_SEQUENCE, "last")],
    "Megatron + sequence": [(*_BATCH, "first"), *_MEGATRON, (*_SEQUENCE, "last")],
    "FSDP + Megatron + sequence": [
        (*_BATCH, "first"), *_MEGATRON, (*_WIDTH, "first"), (*_SEQUENCE, "last"),
    ],
    "tensor parallel": [(*d, "all") for d in _MODEL],
}  # fmt: skip


def _entries(
    name: str, summary: str, config: TransformerConfig, tiny: TransformerConfig
) -> dict[str, Entry]:
    """The entries of a transformer with unrolled layers and with a scan over layers."""
    return {
        full_name: entry(
            model,
            full_name,
            about,
            (config, tiny),
            ("layers", "sequence", "batch"),
            STRATEGIES,
            scanned=scanned,
        )
        for full_name, about, scanned in (
            (name, f"{summary}: train step with Adam, layers unrolled", False),
            (f"{name}-scan", f"{name} with its layers as one scan over stacked parameters", True),
        )
    }


_T2B = _entries("t2b", "Gemma 2B, the paper's T2B", T2B, TINY)
ENTRIES: dict[str, Entry] = {
    **_T2B,
    "t2b-tiny": dataclasses.replace(
        _T2B["t2b"],
        summary="t2b with 2 narrow layers in float32, to run on CPU devices",
        build=_T2B["t2b"].small,
    ),
    **_entries("t7b", "Gemma 7B, the paper's T7B", T7B, TINY_T7B),
    **_entries("llama3-8b", "Llama 3 8B", LLAMA3_8B, TINY_LLAMA),
}
