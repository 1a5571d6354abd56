"""What tests/rules/test_models.py and tests/libraries leave out: more models, and parts of libraries.

Steps return gradients: in weights that they hardly change, a wrong one would go unnoticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.helpers import f32
from tests.libraries.test_libraries import Traced, abstract, check, mlp_loss
from tests.rules.test_models import i32


def squares(y: jax.Array) -> jax.Array:
    return jnp.mean(y**2)


# -- attention -----------------------------------------------------------------------------------


def rotary(x: jax.Array, position: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = position[..., None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def decode(
    p: Any, keys: jax.Array, values: jax.Array, x: jax.Array, i: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token through attention with rotary embedding, against a cache that it extends."""
    q, k, v = (jnp.einsum("bd,dhk->bhk", x, p[name])[:, None] for name in "qkv")
    at = jnp.full((x.shape[0], 1), i)
    keys = lax.dynamic_update_slice(keys, rotary(k, at), (0, i, 0, 0))
    values = lax.dynamic_update_slice(values, v, (0, i, 0, 0))
    past = (jnp.arange(keys.shape[1]) <= i)[None, None, None]
    y = jax.nn.dot_product_attention(rotary(q, at), keys, values, mask=past)
    return jnp.einsum("bhk,hkd->bd", y[:, 0], p["o"]), keys, values


def generate(w: jax.Array, cache: jax.Array, x: jax.Array) -> Any:
    """Token after token, with the cache carried; each sequence starts at a place of its own."""

    def step(carry: Any, _: None) -> Any:
        cache, x, at = carry
        update = jax.vmap(lambda c, y, a: lax.dynamic_update_slice(c, y[None], (a, 0)))
        cache = update(cache, x @ w, at)
        scores = jnp.einsum("bd,bsd->bs", x, cache)
        scores = jnp.where(jnp.arange(cache.shape[1]) <= at[:, None], scores, -1e9)
        return (cache, jnp.einsum("bs,bsd->bd", jax.nn.softmax(scores), cache), at + 1), None

    return lax.scan(step, (cache, x, jnp.arange(x.shape[0]) % 4), length=8)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return squares(jax.nn.dot_product_attention(q, k, v, is_causal=True))


def masked(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, length: jax.Array) -> Any:
    return jax.nn.dot_product_attention(
        q, k, v, bias, query_seq_lengths=length, key_value_seq_lengths=length,
        local_window_size=(3, 0),
    )  # fmt: skip


# -- mixture of experts --------------------------------------------------------------------------


def top2_gating(gates: jax.Array, random: jax.Array) -> tuple[jax.Array, jax.Array]:
    """GShard's algorithm 1 for one group: token by token, with counters, and the auxiliary loss."""
    tokens, experts = gates.shape
    capacity = 2 * tokens // experts
    (g1, g2), (e1, e2) = (x.T for x in lax.top_k(gates, 2))
    enough = 2 * g2 / (g1 + g2) > random

    def send(count: jax.Array, token: Any) -> Any:
        expert, gate, wanted = token
        combine = jnp.zeros((experts, capacity)).at[expert, count[expert]].set(gate, mode="drop")
        return count.at[expert].add(wanted), combine * wanted

    empty = jnp.zeros(experts, jnp.int32)
    count, first = lax.scan(send, empty, (e1, g1 / (g1 + g2), jnp.ones(tokens, jnp.int32)))
    auxiliary = jnp.mean(count / tokens * gates.mean(0))
    _, second = lax.scan(send, count, (e2, g2 / (g1 + g2), enough.astype(jnp.int32)))
    return first + second, auxiliary


def gshard(p: Any, x: jax.Array, random: jax.Array) -> Any:
    """GShard's algorithm 2, the layer around algorithm 1, with gradients."""

    def loss(p: Any) -> jax.Array:
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, p["gate"]))
        combine, auxiliary = jax.vmap(top2_gating)(gates, random)
        sent = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), x)
        hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, p["in"]))
        back = jnp.einsum("egch,ehm->gecm", hidden, p["out"])
        return squares(jnp.einsum("gsec,gecm->gsm", combine, back)) + auxiliary.mean()

    return jax.value_and_grad(loss)(p)


def dropless(x: jax.Array, gate: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Tokens sorted by expert, and ragged products."""
    weight, expert = lax.top_k(jax.nn.softmax(x @ gate), 2)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=w_in.shape[0])
    hidden = jax.nn.relu(lax.ragged_dot(x[order // 2], w_in, sizes))
    rows = lax.ragged_dot(hidden, w_out, sizes)
    back = jnp.zeros_like(rows).at[order].set(rows).reshape(*expert.shape, -1)
    return (back * weight[..., None]).sum(1)


# -- vision, spectra, graphs, sequences ----------------------------------------------------------


def vision_transformer(p: Any, x: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        t = lax.conv_general_dilated(x, p["patch"], (4, 4), "VALID", dimension_numbers=layout)
        t = t.reshape(t.shape[0], -1, t.shape[-1])
        first = jnp.broadcast_to(p["class"], (t.shape[0], 1, t.shape[-1]))
        t = jnp.concatenate([first, t], axis=1) + p["place"]
        q, k, v = jnp.einsum("bsd,dnhk->nbshk", t, p["qkv"])
        t += jnp.einsum("bshk,hkd->bsd", jax.nn.dot_product_attention(q, k, v), p["o"])
        return squares(t[:, 0] @ p["head"])

    return jax.value_and_grad(loss)(p)


def mixing(w: jax.Array, x: jax.Array) -> Any:
    """FNet: tokens and features mixed by a transform of both."""
    return jax.grad(lambda w: squares(jax.nn.gelu((x + jnp.fft.fft2(x).real) @ w)))(w)


def neural_operator(w: jax.Array, x: jax.Array) -> Any:
    """FNO: a product per frequency, of the lowest ones."""

    def loss(w: jax.Array) -> jax.Array:
        low = jnp.fft.rfft2(x, axes=(1, 2))[:, :4, :4]
        low = jnp.einsum("bhwi,hwio->bhwo", low, lax.complex(w, w))
        padded = jnp.zeros((x.shape[0], 8, 5, w.shape[-1]), low.dtype).at[:, :4, :4].set(low)
        return squares(jnp.fft.irfft2(padded, s=(8, 8), axes=(1, 2)))

    return jax.grad(loss)(w)


def graph_attention(p: Any, nodes: jax.Array, s: jax.Array, r: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        h, count = nodes @ p["w"], nodes.shape[0]
        score = jnp.tanh(h[s] @ p["sender"] + h[r] @ p["receiver"])
        score = jnp.exp(score - jax.ops.segment_max(score, r, count)[r])
        weight = score / jax.ops.segment_sum(score, r, count)[r]
        return squares(jax.ops.segment_sum(weight[:, None] * h[s], r, count))

    return jax.grad(loss)(p)


def state_space(a: jax.Array, x: jax.Array) -> Any:
    """A linear recurrence as an associative scan."""

    def loss(a: jax.Array) -> jax.Array:
        def join(p: Any, q: Any) -> Any:
            return p[0] * q[0], q[0] * p[1] + q[1]

        return squares(lax.associative_scan(join, (jnp.broadcast_to(a, x.shape), x), axis=1)[1])

    return jax.grad(loss)(a)


def depthwise(k: jax.Array, x: jax.Array) -> Any:
    convolve = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1],
    )  # fmt: skip
    return jax.grad(lambda k: squares(convolve(x, k)))(k)


# -- transformations -----------------------------------------------------------------------------


def remat(p: Any, x: jax.Array) -> Any:
    """Layers by scan, of which only some products are kept."""

    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    def layer(x: jax.Array, w: Any) -> Any:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jax.grad(lambda p: squares(lax.scan(layer, x, p)[0]))(p)


quantised = jax.custom_vjp(lambda x: jnp.round(x * 64) / 64)
quantised.defvjp(lambda x: (quantised(x), None), lambda _, g: (g,))


def fixed_point(w: jax.Array, x: jax.Array) -> jax.Array:
    def more(state: Any) -> Any:
        return (jnp.abs(state[0] - state[1]).max() > 1e-3) & (state[2] < 20)

    def step(state: Any) -> Any:
        return jnp.tanh(state[0] @ w + x), state[0], state[2] + 1

    return lax.while_loop(more, step, (x, x + 1, 0))[0]


def at_fixed_point(saved: Any, g: jax.Array) -> Any:
    w, x, z = saved
    return jax.vjp(lambda w, x: jnp.tanh(z @ w + x), w, x)[1](g)


equilibrium = jax.custom_vjp(fixed_point)
equilibrium.defvjp(lambda w, x: (z := fixed_point(w, x), (w, x, z)), at_fixed_point)


softplus = jax.custom_jvp(lambda x: jnp.log1p(jnp.exp(x)))
softplus.defjvps(lambda t, _, x: t * jax.nn.sigmoid(x))


def curvature(w: jax.Array, x: jax.Array, v: jax.Array) -> Any:
    """A Hessian times a vector."""
    return jax.jvp(jax.grad(lambda w: softplus(x @ w).sum()), (w,), (v,))


# -- linear algebra ------------------------------------------------------------------------------


def shampoo(w: jax.Array, left: jax.Array, right: jax.Array, x: jax.Array) -> Any:
    """A step preconditioned from both sides, by solves with Cholesky factors."""
    g = jax.grad(lambda w: squares(jnp.tanh(x @ w)))(w)
    left, right = left + g @ g.T, right + g.T @ g
    for side in (left, right):
        root = jnp.linalg.cholesky(side @ side.T + jnp.eye(len(side)))
        g = jax.scipy.linalg.cho_solve((root, True), g).T
    return w - 0.1 * g, g, left, right


def swaps(rows: jax.Array, pivots: jax.Array) -> jax.Array:
    """Rows as LU decomposition swaps them (jax.lax.linalg.lu_pivots_to_permutation does so)."""

    def swap(i: jax.Array, rows: jax.Array) -> jax.Array:
        a, b = rows[i], rows[pivots[i]]
        return rows.at[i].set(b).at[pivots[i]].set(a)

    return lax.fori_loop(0, len(pivots), swap, rows)


PLAIN: dict[str, Traced] = {
    "rotary attention with cache": (decode, (
        {"q": f32(32, 4, 8), "k": f32(32, 4, 8), "v": f32(32, 4, 8), "o": f32(4, 8, 32)},
        f32(8, 16, 4, 8), f32(8, 16, 4, 8), f32(8, 32), i32(),
    )),
    "decoding loop": (generate, (f32(16, 16), f32(8, 12, 16), f32(8, 16))),
    "grouped-query attention": (
        jax.grad(causal, argnums=(0, 1, 2)), (f32(8, 16, 8, 8), f32(8, 16, 2, 8), f32(8, 16, 2, 8)),
    ),
    "masked attention": (masked, (*3 * [f32(8, 16, 4, 8)], f32(8, 4, 16, 16), i32(8))),
    "GShard algorithms 1 and 2": (gshard, (
        {"gate": f32(32, 8), "in": f32(8, 32, 64), "out": f32(8, 64, 32)},
        f32(4, 16, 32), f32(4, 16),
    )),
    "dropless experts": (dropless, (f32(64, 32), f32(32, 8), f32(8, 32, 64), f32(8, 64, 32))),
    "vision transformer": (vision_transformer, (
        {"patch": f32(4, 4, 4, 32), "class": f32(32), "place": f32(17, 32),
         "qkv": f32(32, 3, 4, 8), "o": f32(4, 8, 32), "head": f32(32, 8)},
        f32(8, 16, 16, 4),
    )),
    "Fourier mixing": (mixing, (f32(16, 32), f32(8, 16, 16))),
    "Fourier neural operator": (neural_operator, (f32(4, 4, 8, 8), f32(8, 8, 8, 8))),
    "graph attention": (graph_attention, (
        {"w": f32(16, 32), "sender": f32(32), "receiver": f32(32)}, f32(64, 16), i32(256), i32(256),
    )),
    "state space": (state_space, (f32(16), f32(8, 16, 16))),
    "depthwise convolution": (depthwise, (f32(3, 3, 1, 15), f32(4, 8, 8, 15))),
    "checkpoint policy": (remat, ({"up": f32(3, 16, 32), "down": f32(3, 32, 16)}, f32(32, 16))),
    "quantised by custom_vjp": (
        jax.grad(lambda w, x: squares(x @ quantised(w))), (f32(16, 32), f32(64, 16)),
    ),
    "equilibrium by custom_vjp": (
        jax.grad(lambda w, x: equilibrium(w, x).sum()), (f32(16, 16), f32(32, 16)),
    ),
    "curvature by custom_jvp": (curvature, (f32(16, 32), f32(64, 16), f32(16, 32))),
    "Shampoo from both sides": (shampoo, (f32(16, 32), f32(16, 16), f32(32, 32), f32(64, 16))),
    "row swaps": (swaps, (f32(16, 4), i32(16))),
}  # fmt: skip


# -- flax.nnx ------------------------------------------------------------------------------------


def nnx_step(nnx: Any, make: Callable[[Any, Any], Any], *inputs: jax.ShapeDtypeStruct) -> Traced:
    """A step of nnx.Optimizer; whatever the model draws or counts is state."""
    sgd = pytest.importorskip("optax").sgd(0.1, momentum=0.9)

    def start() -> Any:
        model = make(nnx, nnx.Rngs(0))
        return model, nnx.Optimizer(model, sgd, wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(start))

    def step(state: Any, *inputs: jax.Array) -> Any:
        model, optimiser = nnx.merge(graph, state)
        gradients = nnx.grad(lambda model: squares(model(*inputs)))(model)
        optimiser.update(model, gradients)
        return nnx.state((model, optimiser)), gradients

    return step, (state, *inputs)


def nnx_unet(nnx: Any, rngs: Any) -> Any:
    class UNet(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.first = nnx.Conv(4, 8, (3, 3), use_bias=False, rngs=rngs)
            self.norm = nnx.GroupNorm(8, num_groups=4, rngs=rngs)
            self.down = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
            self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
            self.last = nnx.Conv(16, 4, (1, 1), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.silu(self.norm(self.first(x)))
            return self.last(jnp.concatenate([x, self.up(nnx.silu(self.down(x)))], axis=-1))

    return UNet()


def nnx_layers(nnx: Any, rngs: Any) -> Any:
    """Layers made by vmap, run by scan, and recomputed."""

    class Layers(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.layers = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs))(rngs.split(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            layer = nnx.remat(lambda x, layer: x + nnx.gelu(layer(x)))
            return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    return Layers()


def nnx_adapter(nnx: Any, rngs: Any) -> Any:
    adapted = nnx.LoRALinear(16, 32, lora_rank=4, rngs=rngs)
    heads = nnx.Einsum("bh,hkd->bkd", (32, 4, 8), (4, 8), rngs=rngs)
    return nnx.Sequential(adapted, nnx.Dropout(0.3, rngs=rngs), heads)


def nnx_recurrent(nnx: Any, rngs: Any) -> Any:
    both = (nnx.RNN(nnx.GRUCell(16, 8, rngs=rngs)) for _ in range(2))
    return nnx.Bidirectional(*both, rngs=rngs)


FLAX = {
    "U-Net": (nnx_unet, f32(8, 8, 8, 4)),
    "scanned layers": (nnx_layers, f32(32, 16)),
    "adapter": (nnx_adapter, f32(32, 16)),
    "recurrent both ways": (nnx_recurrent, f32(8, 5, 16)),
}


# -- equinox -------------------------------------------------------------------------------------


def equinox_step(model: Any, *inputs: Any, state: Any = None) -> Traced:
    """Gradients, and the state of normalisations if there is one."""
    eqx = pytest.importorskip("equinox")
    arrays, static = eqx.partition((model, state), eqx.is_array)

    def step(arrays: Any, *inputs: jax.Array) -> Any:
        model, state = eqx.combine(arrays, static)

        def loss(model: Any) -> Any:
            if state is None:
                return squares(jax.vmap(model)(*inputs)), None
            batched = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
            y, after = batched(*inputs, state)
            return squares(y), eqx.filter(after, eqx.is_array)

        return eqx.filter_grad(loss, has_aux=True)(model)

    return step, (abstract(arrays), *inputs)


def equinox_convolutions(eqx: Any, key: jax.Array) -> Traced:
    nn = eqx.nn
    return equinox_step(
        nn.Sequential([
            nn.Conv2d(4, 16, 3, padding=1, use_bias=False, key=key), nn.GroupNorm(4, 16),
            nn.Lambda(jax.nn.silu), nn.AvgPool2d(2, 2), nn.ConvTranspose2d(16, 8, 2, 2, key=key),
        ]),
        f32(8, 4, 8, 8),
    )  # fmt: skip


def equinox_attention(eqx: Any, key: jax.Array) -> Traced:
    class Block(eqx.Module):  # type: ignore[misc]
        embedding: Any
        rotary: Any
        attention: Any
        norm: Any

        def __call__(self, tokens: jax.Array) -> jax.Array:
            def rotate(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
                turn = jax.vmap(self.rotary, in_axes=1, out_axes=1)
                return turn(q), turn(k), v

            x = jax.vmap(self.embedding)(tokens)
            past = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
            return jax.vmap(self.norm)(x + self.attention(x, x, x, past, process_heads=rotate))

    nn = eqx.nn
    block = Block(
        nn.Embedding(64, 32, key=key), nn.RotaryPositionalEmbedding(8),
        nn.MultiheadAttention(4, 32, key=key), nn.RMSNorm(32),
    )  # fmt: skip
    return equinox_step(block, i32(8, 16))


def equinox_recurrent(eqx: Any, key: jax.Array) -> Traced:
    class Recurrent(eqx.Module):  # type: ignore[misc]
        cell: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            def step(state: Any, x: jax.Array) -> Any:
                state = self.cell(x, state)
                return state, state[0]

            return lax.scan(step, 2 * (jnp.zeros(16),), x)[1]

    return equinox_step(Recurrent(eqx.nn.LSTMCell(8, 16, key=key)), f32(8, 5, 8))


def equinox_stateful(eqx: Any, key: jax.Array) -> Traced:
    class Normal(eqx.Module):  # type: ignore[misc]
        first: Any
        norm: Any
        last: Any

        def __init__(self) -> None:
            self.first = eqx.nn.Linear(16, 32, use_bias=False, key=key)
            self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
            last = eqx.nn.Linear(32, 8, key=key)
            self.last = eqx.nn.SpectralNorm(last, "weight", key=key)

        def __call__(self, x: jax.Array, state: Any) -> Any:
            x, state = self.norm(self.first(x), state)
            return self.last(jax.nn.relu(x), state)

    model, state = eqx.nn.make_with_state(Normal)()
    return equinox_step(model, f32(32, 16), state=state)


def equinox_dropout(eqx: Any, key: jax.Array) -> Traced:
    class Dropped(eqx.Module):  # type: ignore[misc]
        inner: Any
        dropout: Any

        def __call__(self, x: jax.Array, seed: jax.Array) -> jax.Array:
            return self.dropout(eqx.filter_checkpoint(self.inner)(x), key=jax.random.key(seed))

    inner = eqx.nn.MLP(16, 8, 32, 1, key=key)
    return equinox_step(Dropped(inner, eqx.nn.Dropout(0.5)), f32(32, 16), i32(32))


def equinox_error(eqx: Any, _key: jax.Array) -> Traced:
    return lambda x: 2 * eqx.error_if(x, (x < 0).any(), "negative"), (f32(32, 16),)


EQUINOX = {
    "convolutions": equinox_convolutions,
    "rotary attention": equinox_attention,
    "LSTM": equinox_recurrent,
    "state": equinox_stateful,
    "dropout": equinox_dropout,
    "error_if": equinox_error,
}


# -- optax ---------------------------------------------------------------------------------------

#: Optimisers that tests/libraries does not run, or does not have.
OPTAX: dict[str, Callable[[Any], Any]] = {
    "lion": lambda optax: optax.lion(1e-4),
    "yogi": lambda optax: optax.yogi(1e-3),
    "muon": lambda optax: optax.contrib.muon(1e-3, ns_steps=2),
    "lars": lambda optax: optax.lars(1e-3),
    "sm3": lambda optax: optax.sm3(1e-1),
    "schedule-free adamw": lambda optax: optax.contrib.schedule_free_adamw(1e-3),
    "by parameter": lambda optax: optax.partition(
        {"w": optax.adamw(1e-3), "b": optax.sgd(0.1)},
        lambda ps: jax.tree.map_with_path(lambda path, _: path[-1].key, ps),
    ),
}


def optax_step(optax: Any, optimiser: Any) -> Traced:
    """In double precision: a sign that rounding turns is no fault of a sharding."""
    shapes = [{"w": (16, 32), "b": (32,)}, {"w": (32, 32), "b": (32,)}, {"w": (32, 8)}]

    def f64(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float64)

    def step(parameters: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        gradients = jax.grad(mlp_loss)(parameters, x, y)
        updates, state = optimiser.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), updates, state

    parameters = jax.tree.map(f64, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    state = jax.eval_shape(optimiser.init, parameters)
    return step, (parameters, state, f64((64, 16)), f64((64, 8)))


# -- tests ---------------------------------------------------------------------------------------

#: What is wrong, each with its cause, before which jax.
FAULTS: dict[str, tuple[str, tuple[int, ...] | None]] = {}


def each(table: Any) -> pytest.MarkDecorator:
    faults = {name: reason for name, (reason, until) in FAULTS.items()
              if until is None or jax.__version_info__ < until}  # fmt: skip
    return pytest.mark.parametrize("name", [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=faults[name]))
        if name in faults else name for name in table
    ])  # fmt: skip


@each(PLAIN)
def test_plain(name: str) -> None:
    check(*PLAIN[name])


@each(FLAX)
def test_flax(name: str) -> None:
    check(*nnx_step(pytest.importorskip("flax.nnx"), *FLAX[name]))


def test_flax_decoding() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def start() -> Any:
        attention = nnx.MultiHeadAttention(4, 32, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((8, 16, 32))
        return attention

    graph, state = nnx.split(nnx.eval_shape(start))

    def step(state: Any, x: jax.Array) -> Any:
        attention = nnx.merge(graph, state)
        return attention(x), nnx.state(attention, nnx.Cache)

    check(step, (state, f32(8, 1, 32)))


@each(EQUINOX)
def test_equinox(name: str) -> None:
    check(*EQUINOX[name](pytest.importorskip("equinox"), jax.random.key(0)))


@each(OPTAX)
def test_optax(name: str) -> None:
    optax = pytest.importorskip("optax")
    with jax.enable_x64(True):
        check(*optax_step(optax, OPTAX[name](optax)))
