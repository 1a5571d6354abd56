"""A feed-forward layer of routed experts, each with a limited number of tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


class Routing(NamedTuple):
    """The experts of each token of a group, and their weights."""

    #: ``[groups, tokens, chosen]`` of int32.
    expert: jax.Array
    #: ``[groups, tokens, chosen]`` of float32; they sum to one.
    weight: jax.Array
    #: The loss that is least if all experts get equally many tokens, ``[]`` of float32.
    balance: jax.Array


def route(x: jax.Array, router: jax.Array, chosen: int) -> Routing:
    """The experts with the highest scores.

    :param x: ``[groups, tokens, width]``.
    :param router: ``[width, experts]``.
    :param chosen: the number of experts of a token.
    """
    experts = router.shape[-1]
    logits = jnp.einsum("gsd,de->gse", x.astype(jnp.float32), router.astype(jnp.float32))
    scores = jax.nn.softmax(logits, axis=-1)
    best, expert = jax.lax.top_k(scores, chosen)
    share = jnp.mean(jax.nn.one_hot(expert, experts, dtype=jnp.float32), axis=(0, 1, 2))
    balance = experts * jnp.sum(share * jnp.mean(scores, axis=(0, 1)))
    return Routing(expert, best / jnp.sum(best, axis=-1, keepdims=True), balance)


def capacity_of(tokens: int, experts: int, chosen: int, factor: float) -> int:
    """The number of tokens of a group that an expert takes, at most all."""
    return min(tokens, max(1, math.ceil(factor * tokens * chosen / experts)))


def expert_layer(
    layer: dict[str, jax.Array], x: jax.Array, routing: Routing, capacity: int
) -> jax.Array:
    """The weighted sum of gated MLPs, ``[groups, tokens, width]``.

    Tokens are in order of their position; an expert drops those beyond its capacity.

    :param layer: ``expert_gate, expert_up : [experts, width, hidden]`` and ``expert_down :
        [experts, hidden, width]``.
    :param x: ``[groups, tokens, width]``.
    :param routing: the experts of these tokens.
    :param capacity: the number of tokens of a group that an expert takes.
    """
    groups, tokens, width = x.shape
    experts, chosen = layer["expert_gate"].shape[0], routing.expert.shape[-1]
    places = experts * capacity
    expert = routing.expert.reshape(groups, tokens * chosen)
    mine = jax.nn.one_hot(expert, experts, dtype=jnp.int32)
    rank = jnp.sum((jnp.cumsum(mine, axis=1) - mine) * mine, axis=-1)
    # The place of a dropped token is one that no expert has.
    place = jnp.where(rank < capacity, expert * capacity + rank, places)
    token = jnp.broadcast_to(jnp.arange(tokens)[:, None], (tokens, chosen)).reshape(-1)

    def gathered(x: jax.Array, place: jax.Array) -> jax.Array:
        sender = jnp.full(places, tokens, jnp.int32).at[place].set(token, mode="drop")
        return x.at[sender].get(mode="fill", fill_value=0)

    sent = jax.vmap(gathered)(x, place).reshape(groups, experts, capacity, width)
    sent = checkpoint_name(sent, "sent")

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.einsum("gecd,edf->gecf", x, weights.astype(x.dtype))

    gate, up = (product(sent, layer[name]) for name in ("expert_gate", "expert_up"))
    gate, up = checkpoint_name(gate, "expert_gate"), checkpoint_name(up, "expert_up")
    returned = product(jax.nn.silu(gate) * up, layer["expert_down"]).reshape(groups, places, width)
    back = jax.vmap(lambda y, place: y.at[place].get(mode="fill", fill_value=0))(returned, place)
    weights = routing.weight.astype(x.dtype)
    return jnp.einsum("gsc,gscd->gsd", weights, back.reshape(groups, tokens, chosen, width))
