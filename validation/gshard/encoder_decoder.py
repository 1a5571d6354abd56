"""GShard's encoder and decoder as a train step (arXiv 2006.16668): half of the layers each.

Sizes, experts and optimizer are those of the zoo's moe-scan.  Sources and targets have equally many
tokens, and no padding.  There is no dropout, and the output has the weights of the embedding.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import toast
from toast.models import Model
from toast.models.layers import attention, cross_entropy, layer_norm
from toast.models.moe import MoEConfig, parameter_shapes, positions, top2_gating
from toast.models.optimizers import adafactor, adafactor_moments, train_step
from toast.models.registry import training

STACKS = ("encoder", "decoder")
#: All parameters but the experts' feed-forward layers, which the annotations of the program shard.
WHOLE = (
    "params*_embedding']", "params*_norm'][*", "params*['wq']", "params*['wk']", "params*['wv']",
    "params*['wo']", "params*['dense']['up']", "params*['dense']['down']", "params*['gate']",
)  # fmt: skip
STRATEGIES = {
    "annotated": toast.Constraints(pin=dict.fromkeys(WHOLE, jax.sharding.PartitionSpec()))
}


def shapes(config: MoEConfig) -> dict[str, Any]:
    """The pytree of parameter shapes; pairs of layers are stacked."""
    half = dataclasses.replace(config, layers=config.layers // 2, scanned=True)
    encoder, decoder = (parameter_shapes(half) for _ in STACKS)
    for layer in decoder["pairs"].values():
        layer["cross"] = {name: layer[name] for name in ("wq", "wk", "wv", "wo")}
        layer["cross_norm"] = layer["attention_norm"]
    embedding = encoder["embedding"]
    target = jax.ShapeDtypeStruct((embedding.shape[0] // 2, *embedding.shape[1:]), embedding.dtype)
    return {
        "source_embedding": embedding,
        "target_embedding": target,
        "encoder": encoder["pairs"],
        "decoder": decoder["pairs"],
        "encoded_norm": encoder["final_norm"],
        "final_norm": decoder["final_norm"],
    }


def cross_attention(params: dict[str, jax.Array], x: jax.Array, source: jax.Array) -> jax.Array:
    """Attention of ``x : [batch, positions, width]`` to ``source``, of the same shape."""
    query = jnp.einsum("bsd,dhk->bshk", x, params["wq"])
    key, value = (jnp.einsum("btd,dhk->bthk", source, params[w]) for w in ("wk", "wv"))
    weights = jnp.einsum("bshk,bthk->bhst", query * query.shape[-1] ** -0.5, key)
    attended = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(weights, axis=-1), value)
    return jnp.einsum("bshk,hkd->bsd", attended, params["wo"])


def norm(x: jax.Array, parts: dict[str, jax.Array]) -> jax.Array:
    """Layer norm."""
    return layer_norm(x, parts["norm"], parts["bias"])


def expert_layer(
    config: MoEConfig, layer: Any, x: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Algorithm 2 with its annotations, and the auxiliary loss; as many devices as experts."""

    def split(value: jax.Array) -> jax.Array:
        return toast.split(value, 0, config.experts)

    grouped = split(x.reshape(config.group_count, -1, x.shape[-1]))
    logits = jnp.einsum("gsm,me->gse", grouped, toast.replicate(layer["gate"]))
    random = jax.random.uniform(key, grouped.shape[:2])
    combine, auxiliary = top2_gating(logits, random, config.capacity)
    dispatch = (combine > 0.0).astype(x.dtype)
    sent = split(jnp.einsum("gsec,gsm->egcm", dispatch, grouped))
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, layer["up"]))
    returned = split(jnp.einsum("egch,ehm->egcm", hidden, layer["down"]))
    combined = split(jnp.einsum("gsec,egcm->gsm", combine, returned))
    return combined.reshape(x.shape), auxiliary


def stack(
    config: MoEConfig, pairs: Any, x: jax.Array, key: jax.Array, source: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Layers on ``x : [batch, sequence, d_model]``, and their auxiliary loss."""

    def attended(layer: Any, x: jax.Array) -> jax.Array:
        own = norm(x, layer["attention_norm"])
        x = x + attention(layer, own, causal=source is not None)
        if source is None:
            return x
        return x + cross_attention(layer["cross"], norm(x, layer["cross_norm"]), source)

    def pair(x: jax.Array, numbered: Any) -> tuple[jax.Array, jax.Array]:
        layers, number = numbered
        dense, experts = layers["dense"], layers["experts"]
        x = attended(dense, x)
        x = x + jax.nn.relu(norm(x, dense["mlp_norm"]) @ dense["up"]) @ dense["down"]
        x = attended(experts, x)
        own = jax.random.fold_in(key, number)
        y, auxiliary = expert_layer(config, experts, norm(x, experts["mlp_norm"]), own)
        return x + y, auxiliary

    if config.layers > config.kept_layers:
        pair = jax.checkpoint(pair)
    x, auxiliary = jax.lax.scan(pair, x, (pairs, jnp.arange(config.layers // 4)))
    return x, jnp.mean(auxiliary)


def loss(
    config: MoEConfig,
    params: dict[str, Any],
    key: jax.Array,
    source: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """Mean cross entropy of the next target token and the auxiliary loss."""
    place, scale = positions(config.sequence, config.d_model), config.d_model**0.5
    output = params["target_embedding"]
    x = params["source_embedding"][source] * scale + place
    x, first = stack(config, params["encoder"], x, key, None)
    encoded = norm(x, params["encoded_norm"])
    x, key = output[tokens] * scale + place, jax.random.fold_in(key, config.layers)
    x, second = stack(config, params["decoder"], x, key, encoded)
    logits = norm(x, params["final_norm"]) @ output.T
    return cross_entropy(logits, targets) + config.balance * (first + second) / 2


def build(batch: int, sequence: int, **options: Any) -> Model:
    """The train step."""
    config = MoEConfig(batch=batch, sequence=sequence, **options)
    params = shapes(config)
    update = functools.partial(adafactor, rate=config.learning_rate, scanned=STACKS)
    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return training(
        "gshard", train_step(functools.partial(loss, config), update), params,
        adafactor_moments(params, STACKS), jax.ShapeDtypeStruct((2,), jnp.uint32),
        tokens, tokens, tokens,
    )  # fmt: skip
