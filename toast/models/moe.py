"""GShard's mixture-of-experts transformer as a train step with Adafactor (arXiv 2006.16668).

Every second layer has experts instead of a feed-forward layer: top-2 gating with a capacity,
groups, random routing and an auxiliary loss (Algorithm 1), written as einsums (Algorithm 2).
GShard's model has an encoder and a decoder; this one is a single stack with the same number of
layers, a causal mask, one vocabulary and no dropout.  MoE(2048E, 36L) has 619B parameters, of which
618.5B are in experts; the paper rounds this to 600B.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from toast.errors import TargetError
from toast.models.layers import attention, cross_entropy, layer_norm
from toast.models.optimizers import adafactor, adafactor_moments, train_step
from toast.models.parameters import repeated, shapes_in
from toast.models.registry import Entry, Model, Strategies, entry, training


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes of the transformer and of its training batch (GShard's appendix A.2)."""

    #: The number of layers; every second one has experts.
    layers: int = 12
    experts: int = 128
    d_model: int = 1024
    hidden: int = 8192
    heads: int = 16
    key_size: int = 128
    vocabulary: int = 64000
    sequence: int = 1024
    #: Sequences; by default two per expert: 4M tokens for 2048 experts.
    batch: int | None = None
    #: Groups of tokens for dispatching; by default one per expert.
    groups: int | None = None
    #: Weight of the auxiliary loss.
    balance: float = 0.01
    learning_rate: float = 1.0
    #: Models with more layers recompute them in the backward pass, as GShard's with 36 layers does.
    kept_layers: int = 24
    #: Pairs of layers as one ``lax.scan`` over stacked parameters, instead of unrolled.
    scanned: bool = False

    def __post_init__(self) -> None:
        if self.layers % 2:
            raise TargetError(
                f"layers {self.layers}: every second layer has experts; use an even number"
            )
        if self.tokens % self.group_count:
            raise TargetError(
                f"{self.tokens} tokens cannot form {self.group_count} equal groups; change the "
                "batch"
            )

    @property
    def sequences(self) -> int:
        """The number of sequences in a batch."""
        return self.batch or 2 * self.experts

    @property
    def tokens(self) -> int:
        """The number of tokens in a batch."""
        return self.sequences * self.sequence

    @property
    def group_count(self) -> int:
        """The number of groups of tokens."""
        return self.groups or self.experts

    @property
    def capacity(self) -> int:
        """The number of tokens of a group that an expert takes: 2N/(GE)."""
        return max(1, 2 * self.tokens // (self.group_count * self.experts))


#: MoE(128E, 12L).
MOE = MoEConfig()

#: A train step small enough to run on CPU devices in a test.
TINY = MoEConfig(
    layers=4, experts=8, d_model=16, hidden=32, heads=4, key_size=8, vocabulary=64, sequence=8
)


def parameter_shapes(config: MoEConfig) -> dict[str, Any]:
    """The pytree of parameter shapes: ``jax.ShapeDtypeStruct`` leaves, all float32."""
    c = config
    shape = shapes_in("float32")

    def norm() -> dict[str, Any]:
        return {"norm": shape(c.d_model), "bias": shape(c.d_model)}

    def layer(feed_forward: dict[str, Any]) -> dict[str, Any]:
        return {
            "attention_norm": norm(),
            "wq": shape(c.d_model, c.heads, c.key_size),
            "wk": shape(c.d_model, c.heads, c.key_size),
            "wv": shape(c.d_model, c.heads, c.key_size),
            "wo": shape(c.heads, c.key_size, c.d_model),
            "mlp_norm": norm(),
            **feed_forward,
        }

    dense = {"up": shape(c.d_model, c.hidden), "down": shape(c.hidden, c.d_model)}
    experts = {
        "gate": shape(c.d_model, c.experts),
        "up": shape(c.experts, c.d_model, c.hidden),
        "down": shape(c.experts, c.hidden, c.d_model),
    }
    pair = {"dense": layer(dense), "experts": layer(experts)}
    return {
        "embedding": shape(c.vocabulary, c.d_model),
        "pairs": repeated(pair, c.layers // 2, c.scanned),
        "final_norm": norm(),
    }


def top2_gating(logits: jax.Array, random: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """GShard's Algorithm 1 for all groups: combine weights and the auxiliary loss.

    ``logits : [groups, tokens, experts]``; ``random : [groups, tokens]``, uniform in [0, 1);
    combine weights ``[groups, tokens, experts, capacity]``.
    """
    experts = logits.shape[-1]
    gates = jax.nn.softmax(logits, axis=-1)
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts, dtype=gates.dtype)
    others = jnp.where(first > 0, -1.0, gates)
    second = jax.nn.one_hot(jnp.argmax(others, axis=-1), experts, dtype=gates.dtype)
    gate_1, gate_2 = jnp.sum(gates * first, axis=-1), jnp.sum(gates * second, axis=-1)
    total = gate_1 + gate_2
    gate_1, gate_2 = gate_1 / total, gate_2 / total

    # The number of tokens with each expert as first choice, also beyond its capacity.
    chosen = jnp.sum(first, axis=1, keepdims=True)
    auxiliary = jnp.mean(chosen[:, 0] / logits.shape[1] * jnp.mean(gates, axis=1))
    # Second choices come after all first choices, including those that are not dispatched.
    place_1 = jnp.cumsum(first, axis=1) - first
    place_2 = jnp.cumsum(second, axis=1) - second + chosen
    gate_2 = jnp.where(2.0 * gate_2 > random, gate_2, 0.0)

    def combined(gate: jax.Array, mask: jax.Array, place: jax.Array) -> jax.Array:
        # A place beyond the capacity is not a row of the one-hot: its token is dropped.
        slot = jnp.sum(place * mask, axis=-1).astype(jnp.int32)
        row = jax.nn.one_hot(slot, capacity, dtype=gate.dtype)
        return jnp.einsum("gse,gsc->gsec", gate[..., None] * mask, row)

    return combined(gate_1, first, place_1) + combined(gate_2, second, place_2), auxiliary


def expert_layer(
    config: MoEConfig, layer: dict[str, Any], x: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """GShard's Algorithm 2 on ``x : [batch, sequence, d_model]``, and its auxiliary loss."""
    grouped = x.reshape(config.group_count, -1, x.shape[-1])
    logits = jnp.einsum("gsm,me->gse", grouped, layer["gate"])
    random = jax.random.uniform(key, grouped.shape[:2])
    combine, auxiliary = top2_gating(logits, random, config.capacity)
    dispatch = (combine > 0.0).astype(x.dtype)
    sent = jnp.einsum("gsec,gsm->egcm", dispatch, grouped)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, layer["up"]))
    returned = jnp.einsum("egch,ehm->egcm", hidden, layer["down"])
    return jnp.einsum("gsec,egcm->gsm", combine, returned).reshape(x.shape), auxiliary


def positions(sequence: int, width: int) -> jax.Array:
    """Sinusoidal positions ``[sequence, width]``."""
    half = width // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(sequence, dtype=jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def loss(
    config: MoEConfig,
    params: dict[str, Any],
    key: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """Mean next-token cross entropy and the auxiliary loss.

    ``key : [2]`` of uint32 is a random key; ``tokens, targets : [batch, sequence]`` of int32.
    """
    embedding = params["embedding"]
    x = embedding[tokens] * config.d_model**0.5 + positions(config.sequence, config.d_model)

    def norm(x: jax.Array, parts: dict[str, jax.Array]) -> jax.Array:
        return layer_norm(x, parts["norm"], parts["bias"])

    def pair(x: jax.Array, numbered: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        layers, number = numbered
        dense, experts = layers["dense"], layers["experts"]
        x = x + attention(dense, norm(x, dense["attention_norm"]), causal=True)
        x = x + jax.nn.relu(norm(x, dense["mlp_norm"]) @ dense["up"]) @ dense["down"]
        x = x + attention(experts, norm(x, experts["attention_norm"]), causal=True)
        y, auxiliary = expert_layer(
            config, experts, norm(x, experts["mlp_norm"]), jax.random.fold_in(key, number)
        )
        return x + y, auxiliary

    if config.layers > config.kept_layers:
        pair = jax.checkpoint(pair)
    if config.scanned:
        numbers = jnp.arange(config.layers // 2)
        x, auxiliaries = jax.lax.scan(pair, x, (params["pairs"], numbers))
    else:
        auxiliary_losses = []
        for number, layers in enumerate(params["pairs"]):
            x, auxiliary = pair(x, (layers, number))
            auxiliary_losses.append(auxiliary)
        auxiliaries = jnp.stack(auxiliary_losses)
    logits = norm(x, params["final_norm"]) @ embedding.T
    return cross_entropy(logits, targets) + config.balance * jnp.mean(auxiliaries)


def model(config: MoEConfig, name: str) -> Model:
    """The train step of ``config`` with abstract arguments, for :func:`toast.plan`."""
    c = config
    params = parameter_shapes(c)
    scanned = ("pairs",) if c.scanned else ()
    update = functools.partial(adafactor, rate=c.learning_rate, scanned=scanned)
    tokens = jax.ShapeDtypeStruct((c.sequences, c.sequence), jnp.int32)
    return training(
        name,
        train_step(functools.partial(loss, c), update),
        params,
        adafactor_moments(params, scanned),
        jax.ShapeDtypeStruct((2,), jnp.uint32),
        tokens,
        tokens,
    )


_BATCH, _EXPERTS = ("tokens", 0), ("params['pairs']*['experts']['up']", -3)
_HIDDEN, _HEADS = ("params['pairs']*['up']", -1), ("params['pairs']*['wq']", -2)
#: Experts are sharded before the batch, which then shards tensors without experts.
STRATEGIES: Strategies = {
    "data parallel": [(*_BATCH, "all")],
    "expert parallel": [(*_EXPERTS, "all"), (*_BATCH, "all")],
    "data + expert parallel": [(*_BATCH, "first"), (*_EXPERTS, "last"), (*_BATCH, "last")],
    "data + expert parallel + Megatron": [
        (*_BATCH, "first"), (*_EXPERTS, "last"), (*_HIDDEN, "last"), (*_HEADS, "last"),
    ],
}  # fmt: skip

_entry = functools.partial(
    entry,
    model,
    sizes=(MOE, TINY),
    options=("layers", "sequence", "batch", "experts"),
    strategies=STRATEGIES,
)
ENTRIES: dict[str, Entry] = {
    "moe": _entry("moe", "GShard's MoE(128E, 12L): train step with Adafactor, layers unrolled"),
    "moe-scan": _entry(
        "moe-scan",
        "moe with its pairs of layers as one scan; 619B with --experts 2048 --layers 36",
        scanned=True,
    ),
}
