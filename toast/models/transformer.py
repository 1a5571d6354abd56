"""The paper's Gemma-1 transformers as full Adam train steps (section 5.1, T2B).

The model is written the way a JAX user writes it: a dict of parameters, pure
functions, ``jax.value_and_grad``.  Nothing in it knows about sharding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from toast.models.registry import Model


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a Gemma-1 decoder and of the batch it is trained on.

    ``hidden`` is the width of *one* of the two gated MLP projections; the
    paper's table counts gate and up together (32768 for T2B).
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


#: Gemma 2B, the paper's T2B.
T2B = TransformerConfig()

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


def parameter_shapes(config: TransformerConfig) -> dict[str, Any]:
    """The pytree of parameter shapes: ``jax.ShapeDtypeStruct`` leaves."""
    c = config

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(c.dtype))

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
    stacked = {name: shape(c.layers, *one.shape) for name, one in layer.items()}
    return {
        "embedding": shape(c.vocabulary, c.d_model),
        "layers": stacked if c.scanned else [dict(layer) for _ in range(c.layers)],
        "final_norm": shape(c.d_model),
    }


def init(config: TransformerConfig, key: jax.Array) -> dict[str, Any]:
    """Random parameters, scaled by the inverse root of the contracted size."""
    shapes, tree = jax.tree.flatten(parameter_shapes(config))
    keys = jax.random.split(key, len(shapes))
    leaves = [
        jnp.zeros(s.shape, s.dtype)
        if len(s.shape) == 1
        else jax.random.normal(k, s.shape, s.dtype) * s.shape[0] ** -0.5
        for s, k in zip(shapes, keys, strict=True)
    ]
    params: dict[str, Any] = jax.tree.unflatten(tree, leaves)
    return params


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Gemma's RMS norm: statistics in float32, scale stored minus one."""
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + 1e-6)
    return (normed * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)


def rotary(x: jax.Array) -> jax.Array:
    """Rotary position embedding of ``x : [batch, sequence, heads, key_size]``."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position = jnp.arange(x.shape[1], dtype=jnp.float32)
    angle = (position[:, None] * frequency)[None, :, None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attention(layer: dict[str, jax.Array], x: jax.Array, mask: jax.Array) -> jax.Array:
    """Causal attention with grouped key/value heads; ``x : [batch, sequence, d_model]``."""
    query = rotary(jnp.einsum("bsd,dhk->bshk", x, layer["wq"]))
    key = rotary(jnp.einsum("bsd,dgk->bsgk", x, layer["wk"]))
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


def mlp(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Gemma's gated MLP."""
    return (jax.nn.gelu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def loss(params: dict[str, Any], tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean next-token cross entropy; ``tokens, targets : [batch, sequence]`` of int32."""
    embedding = params["embedding"]
    x = embedding[tokens] * jnp.asarray(embedding.shape[1] ** 0.5, embedding.dtype)
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), dtype=bool))[None, None]

    def block(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        x = x + attention(layer, rms_norm(x, layer["attention_norm"]), mask)
        return x + mlp(layer, rms_norm(x, layer["mlp_norm"]))

    if isinstance(params["layers"], dict):
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = block(x, layer)
    x = rms_norm(x, params["final_norm"])
    logits = (x @ embedding.T).astype(jnp.float32)
    # One-hot instead of take_along_axis: what large-vocabulary trainers do.
    hit = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    picked = jnp.sum(hit * logits, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def train_step(config: TransformerConfig) -> Any:
    """``step(params, moments, count, tokens, targets) -> (params, moments, count, loss)``."""

    def step(
        params: Any, moments: Any, count: jax.Array, tokens: jax.Array, targets: jax.Array
    ) -> tuple[Any, Any, jax.Array, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens, targets)
        count = count + 1
        time = count.astype(jnp.float32)
        first = jax.tree.map(
            lambda m, g: 0.9 * m + 0.1 * g.astype(jnp.float32), moments["first"], gradients
        )
        second = jax.tree.map(
            lambda v, g: 0.999 * v + 0.001 * jnp.square(g.astype(jnp.float32)),
            moments["second"],
            gradients,
        )

        def update(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m_hat = m / (1.0 - 0.9**time)
            v_hat = v / (1.0 - 0.999**time)
            change = config.learning_rate * m_hat / (jnp.sqrt(v_hat) + 1e-8)
            return (p.astype(jnp.float32) - change).astype(p.dtype)

        params = jax.tree.map(update, params, first, second)
        return params, {"first": first, "second": second}, count, value

    return step


def model(config: TransformerConfig, name: str) -> Model:
    """The train step of ``config`` with abstract arguments, ready for :func:`toast.plan`."""
    params = parameter_shapes(config)
    moment = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), params)
    tokens = jax.ShapeDtypeStruct((config.batch, config.sequence), jnp.int32)
    return Model(
        name=name,
        function=train_step(config),
        arguments=(
            params,
            {"first": moment, "second": moment},
            jax.ShapeDtypeStruct((), jnp.int32),
            tokens,
            tokens,
        ),
        donate=(0, 1, 2),
    )
