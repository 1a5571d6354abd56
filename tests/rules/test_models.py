"""Ordinary JAX programs lower to ops that all have a rule, and analyse without a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import toast
from tests.assurance.test_interchange import compare
from tests.helpers import f32, model_of
from toast import api
from toast.apply import verify
from toast.hardware import Mesh, load
from toast.plan.shard import shardings_of


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def conv(x: jax.Array, k: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def convnet(ks: list[jax.Array], w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    def loss(ks: list[jax.Array], w: jax.Array) -> jax.Array:
        h = x
        for k in ks:
            h = jax.nn.relu(conv(h, k))
            h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = h.mean((1, 2)) @ w
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))

    return jax.grad(loss, argnums=(0, 1))(ks, w)


def unet_block(down: jax.Array, up: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.silu(conv(x, down, 2))
    n = (h - h.mean((1, 2), keepdims=True)) * lax.rsqrt(h.var((1, 2), keepdims=True) + 1e-5)
    grown = jax.image.resize(n, (n.shape[0], x.shape[1], x.shape[2], n.shape[3]), "nearest")
    return jnp.concatenate([x, conv(grown, up)], axis=-1)


def cached_attention(q: jax.Array, k: jax.Array, cache: jax.Array, i: jax.Array) -> Any:
    cache = lax.dynamic_update_slice(cache, k[:, None], (0, i, 0, 0))
    scores = jnp.einsum("bhd,bshd->bhs", q, cache)
    scores = jnp.where(jnp.arange(cache.shape[1]) <= i, scores, -1e9)
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), cache), cache


def graph_network(
    nodes: jax.Array, edges: jax.Array, s: jax.Array, r: jax.Array, w: jax.Array
) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        messages = jnp.tanh(jnp.concatenate([nodes[s], nodes[r], edges], axis=1) @ w)
        return jax.ops.segment_sum(messages, r, nodes.shape[0]).sum()

    return jax.grad(loss)(w)


def mixture_of_experts(
    x: jax.Array, gate: jax.Array, w_in: jax.Array, w_out: jax.Array
) -> jax.Array:
    """Top-2 gating with a capacity, dispatched and combined by one-hot products."""
    groups, tokens, _ = x.shape
    experts, capacity = w_in.shape[0], 2 * tokens // w_in.shape[0]
    gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, gate))
    first = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
    second = jax.nn.one_hot(jnp.argmax(gates * (1 - first), -1), experts)
    combine = jnp.zeros((groups, tokens, experts, capacity))
    used = jnp.zeros((groups, 1, experts))
    for mask in (first, second):
        place = jnp.cumsum(mask, axis=1) - mask + used
        used = used + mask.sum(axis=1, keepdims=True)
        weight = (gates * mask * (place < capacity)).sum(-1, keepdims=True)
        slot = jax.nn.one_hot((place * mask).sum(-1).astype(jnp.int32), capacity)
        combine += (weight * mask)[..., None] * slot[:, :, None]
    sent = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, w_in))
    return jnp.einsum("gsec,egcm->gsm", combine, jnp.einsum("egch,ehm->egcm", hidden, w_out))


def lstm(w: jax.Array, u: jax.Array, xs: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ w + h @ u, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((xs.shape[1], u.shape[0]))
        return lax.scan(step, (zero, zero), xs)[1].sum()

    return jax.grad(loss)(w)


def patches(x: jax.Array, w: jax.Array) -> jax.Array:
    b, h, width, c = x.shape
    cut = x.reshape(b, h // 4, 4, width // 4, 4, c).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(b, (h // 4) * (width // 4), 16 * c) @ w


def fourier(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * w[None], axis=1, n=x.shape[1])


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))


def adafactor(w: jax.Array, r: jax.Array, c: jax.Array, x: jax.Array) -> Any:
    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    r = 0.9 * r + 0.1 * (g * g).mean(1)
    c = 0.9 * c + 0.1 * (g * g).mean(0)
    return w - 0.1 * g * lax.rsqrt(r[:, None] * c[None] / r.mean() + 1e-8), r, c


def shampoo(w: jax.Array, left: jax.Array, x: jax.Array) -> Any:
    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    left = left + g @ g.T
    root = jnp.linalg.cholesky(left + jnp.eye(left.shape[0]))
    return w - jax.scipy.linalg.solve_triangular(root, g, lower=True), left


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "convnet": (convnet, ([f32(3, 3, 4, 16), f32(3, 3, 16, 32)], f32(32, 10), f32(16, 16, 16, 4), i32(16))),
    "U-Net block": (unet_block, (f32(3, 3, 8, 16), f32(3, 3, 16, 8), f32(8, 16, 16, 8))),
    "cached attention": (cached_attention, (f32(8, 4, 16), f32(8, 4, 16), f32(8, 32, 4, 16), i32())),
    "graph network": (graph_network, (f32(64, 16), f32(256, 8), i32(256), i32(256), f32(40, 16))),
    "mixture of experts": (mixture_of_experts, (f32(4, 16, 32), f32(32, 8), f32(8, 32, 64), f32(8, 64, 32))),
    "LSTM": (lstm, (f32(16, 64), f32(16, 64), f32(5, 8, 16))),
    "patches": (patches, (f32(8, 16, 16, 3), f32(48, 32))),
    "Fourier layer": (fourier, (f32(8, 16, 32), jax.ShapeDtypeStruct((9, 32), jnp.complex64))),
    "dot_product_attention": (jax.nn.dot_product_attention, (f32(8, 16, 4, 8), f32(8, 16, 4, 8), f32(8, 16, 4, 8))),
    "checkpoint": (
        jax.grad(lambda w, x: jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w)))(w).sum()),
        (f32(16, 16), f32(32, 16)),
    ),
    "custom_vjp": (jax.grad(lambda w, x: clipped(x @ w).sum()), (f32(16, 16), f32(32, 16))),
    "dropout": (
        lambda x: x * jax.random.bernoulli(jax.random.PRNGKey(0), 0.9, x.shape), (f32(32, 16),),
    ),
    "Adafactor": (adafactor, (f32(16, 32), f32(16), f32(32), f32(64, 16))),
    "Shampoo": (shampoo, (f32(16, 32), f32(16, 16), f32(64, 16))),
    "top k": (lambda x: lax.top_k(x, 4), (f32(16, 32),)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_op_has_a_rule_and_the_plan_runs(name: str) -> None:
    function, shapes = PROGRAMS[name]
    program = api.program_of(function, *shapes)
    analysis = toast.analyze(program)
    assert [program.describe(op) for op in analysis.without_rule] == []
    compare(program)
    mesh = Mesh.parse("d=4,m=2")
    plan = toast.plan(
        analysis, mesh=mesh, hardware=api.small_scale(analysis, mesh, load("tpu-v5e"))
    )
    found = verify(program, plan.shardings, rtol=2e-5)
    assert found.equal, [o for o in found.outputs if not o.equal]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_state_computes_the_same(name: str, seed: int) -> None:
    """Rules are right when sharded execution equals unsharded, wherever the search may go."""
    function, shapes = PROGRAMS[name]
    program = api.program_of(function, *shapes)
    model = model_of(toast.analyze(program), "d=2,m=2,s=2", min_dimensions=0)
    state = model.space.initial
    random = np.random.default_rng(seed)
    for chosen in random.permutation(len(model.space.actions))[:8].tolist():
        state = model.space.apply(state, model.space.actions[chosen])
    found = verify(program, shardings_of(model, state), rtol=2e-5)
    assert found.equal, [o for o in found.outputs if not o.equal]
