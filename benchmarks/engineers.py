"""Train and serve steps as engineers write them, which no grammar draws, for ``strangers.py``.

The programs follow public code of each kind: plain JAX with optax, dropout and running statistics,
batches that are dicts, shapes that nothing divides.  Layers are few, so that XLA's TPU compiler
ends soon; widths are those of real models.  Each program has a mesh, a device and one plan as its
authors would write it.  Programs with even numbers are open, those with odd ones held out.
``engineers_later.py`` has more, and the list of all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from grammar import shape

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from toast.models import Model

Steps = list[tuple[str, int, str]]

bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, what it is planned for, and the plan of its authors."""

    words: tuple[str, ...]
    build: Callable[[], Model]
    hardware: str
    mesh: str
    expert: str
    #: The plan, as a strategy of :func:`toast.evaluation.baselines.manual_states`.
    plan: Callable[[Model], Steps]


# -- plans -----------------------------------------------------------------------------------------


def rows(*arguments: str, over: str = "all") -> Callable[[Model], Steps]:
    """Data parallelism: the first dimension of arguments."""
    return lambda _: [(argument, 0, over) for argument in arguments]


def fsdp(*arguments: str) -> Callable[[Model], Steps]:
    """Data parallelism, with the largest dimension of each weight over the same devices."""

    def plan(model: Model) -> Steps:
        leaves = jax.tree_util.tree_leaves_with_path(model.arguments[0])
        return rows(*arguments)(model) + [
            (f"params{jax.tree_util.keystr(path)}", leaf.shape.index(max(leaf.shape)), "all")
            for path, leaf in leaves
            if leaf.ndim > 1
        ]

    return plan


def split(arguments: Sequence[str], weights: Sequence[tuple[str, int]]) -> Callable[[Model], Steps]:
    """Data parallelism over the first axis, and dimensions of weights over the last one."""
    return lambda model: (
        rows(*arguments, over="first")(model) + [(path, at, "last") for path, at in weights]
    )


# -- parts -----------------------------------------------------------------------------------------


def dense(x: jax.Array, p: Any) -> jax.Array:
    """A layer with a bias, in the element type of ``x``."""
    return x @ p["kernel"].astype(x.dtype) + p["bias"].astype(x.dtype)


def dense_shapes(inside: int, outside: int) -> dict[str, Any]:
    """The weights of :func:`dense`."""
    return {"kernel": shape(inside, outside), "bias": shape(outside)}


def layer_norm(x: jax.Array, p: Any) -> jax.Array:
    """Layer norm in float32."""
    wide = x.astype(f32)
    mean = wide.mean(-1, keepdims=True)
    wide = (wide - mean) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return (wide * p["scale"] + p["bias"]).astype(x.dtype)


def norm_shapes(width: int) -> dict[str, Any]:
    """The weights of norms with biases."""
    return {"scale": shape(width), "bias": shape(width)}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm in float32."""
    wide = x.astype(f32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """Dropout."""
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, base: float = 1e4) -> jax.Array:
    """Rotary positions; ``x : [..., heads, size]``, ``positions : [...]`` or the last of these."""
    size = x.shape[-1]
    angle = positions[..., None, None] / base ** (jnp.arange(0, size, 2, dtype=f32) / size)
    first, second = jnp.split(x.astype(f32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def causal(length: int) -> jax.Array:
    """The mask of a causal model."""
    return jnp.tril(jnp.ones((length, length), bool))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of a classifier or of a language model."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(f32), labels)
    return jnp.mean(loss)


def conv(
    x: jax.Array, kernel: jax.Array, stride: int = 1, padding: Any = "SAME", groups: int = 1
) -> jax.Array:
    """A convolution in two dimensions, channels last."""
    return jax.lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (stride, stride), padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip


def shapes_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """The shapes of a function's results."""
    return jax.eval_shape(function, *arguments)


def trained(name: str, loss: Any, params: Any, optimizer: Any, batch: dict[str, Any]) -> Model:
    """The train step of ``loss(params, batch)``, as in the examples of optax."""

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return Model(
        name, train_step, (params, shapes_of(optimizer.init, params), batch), donate=(0, 1)
    )


# -- open programs ---------------------------------------------------------------------------------


def gpt2() -> Model:
    """GPT-2 with dropout, layers recomputed, AdamW with clipping and a schedule."""
    layers, batch, length, width, heads, vocabulary = 2, 128, 1024, 768, 12, 50304
    layer = {
        "ln_1": norm_shapes(width), "ln_2": norm_shapes(width),
        "qkv": dense_shapes(width, 3 * width), "out": dense_shapes(width, width),
        "up": dense_shapes(width, 4 * width), "down": dense_shapes(4 * width, width),
    }  # fmt: skip
    params = {
        "wte": shape(vocabulary, width), "wpe": shape(length, width), "h": [layer] * layers,
        "ln_f": norm_shapes(width),
    }  # fmt: skip
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-4, 2000, 600_000)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1)
    )

    def block(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 3)
        q, k, v = jnp.split(dense(layer_norm(x, p["ln_1"]), p["qkv"]), 3, -1)
        q, k, v = (
            a.reshape(*a.shape[:2], heads, width // heads).transpose(0, 2, 1, 3) for a in (q, k, v)
        )
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
        scores = jnp.where(causal(length), scores.astype(f32), -1e9)
        attention = dropout(keys[0], jax.nn.softmax(scores, -1).astype(bf16), 0.1)
        y = (attention @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + dropout(keys[1], dense(y, p["out"]), 0.1)
        y = dense(jax.nn.gelu(dense(layer_norm(x, p["ln_2"]), p["up"])), p["down"])
        return x + dropout(keys[2], y, 0.1)

    def loss(params: Any, tokens: jax.Array, targets: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, layers + 1)
        x = params["wte"].astype(bf16)[tokens] + params["wpe"].astype(bf16)
        x = dropout(keys[layers], x, 0.1)
        for number, p in enumerate(params["h"]):
            x = jax.checkpoint(block)(p, x, keys[number])
        x = layer_norm(x, params["ln_f"])
        return cross_entropy(x @ params["wte"].astype(bf16).T, targets)

    def train_step(params: Any, opt_state: Any, tokens: Any, targets: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, targets, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    tokens = shape(batch, length, dtype=i32)
    return Model(
        "gpt2", train_step,
        (params, shapes_of(optimizer.init, params), tokens, tokens, shape(2, dtype=jnp.uint32)),
        donate=(0, 1),
    )  # fmt: skip


def llama() -> Model:
    """A decoder with grouped queries: scanned layers, of which products are kept; AdamW."""
    layers, batch, length, width, heads, groups = 8, 32, 2048, 2048, 16, 4
    hidden, vocabulary, size = 5632, 32000, 128
    params = {
        "embed": shape(vocabulary, width), "head": shape(width, vocabulary), "norm": shape(width),
        "layers": {
            "attention_norm": shape(layers, width), "mlp_norm": shape(layers, width),
            "wq": shape(layers, width, heads, size), "wk": shape(layers, width, groups, size),
            "wv": shape(layers, width, groups, size), "wo": shape(layers, heads, size, width),
            "gate": shape(layers, width, hidden), "up": shape(layers, width, hidden),
            "down": shape(layers, hidden, width),
        },
    }  # fmt: skip

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        p, positions = jax.tree.map(lambda w: w.astype(bf16), p), jnp.arange(length)
        h = rms_norm(x, p["attention_norm"])
        q = rotate(jnp.einsum("btd,dhk->bthk", h, p["wq"]), positions)
        k = rotate(jnp.einsum("btd,dhk->bthk", h, p["wk"]), positions)
        v = jnp.einsum("btd,dhk->bthk", h, p["wv"])
        q = q.reshape(*q.shape[:2], groups, heads // groups, size)
        scores = jnp.einsum("btgqk,bsgk->bgqts", q, k, preferred_element_type=f32) * size**-0.5
        scores = jnp.where(causal(length), scores, jnp.finfo(f32).min)
        odds = jax.nn.softmax(scores, -1).astype(bf16)
        y = jnp.einsum("bgqts,bsgk->btgqk", odds, v).reshape(*x.shape[:2], heads, size)
        x = x + jnp.einsum("bthk,hkd->btd", y, p["wo"])
        h = rms_norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        x = params["embed"].astype(bf16)[batch["tokens"]]
        x, _ = jax.lax.scan(body, x, params["layers"])
        x = rms_norm(x, params["norm"])
        return cross_entropy(x @ params["head"].astype(bf16), batch["targets"])

    tokens = shape(batch, length, dtype=i32)
    return trained("llama", loss, params, optax.adamw(1e-4), {"tokens": tokens, "targets": tokens})


def vit() -> Model:
    """ViT-B/16 on 224 by 224: 197 tokens, smoothed labels, SGD with Nesterov's momentum."""
    layers, batch, width, heads, hidden, classes, patch = 2, 1024, 768, 12, 3072, 1000, 16
    size, tokens = width // heads, (224 // patch) ** 2 + 1
    layer = {
        "ln_1": norm_shapes(width), "ln_2": norm_shapes(width),
        "qkv": shape(width, 3, heads, size), "out": shape(heads, size, width),
        "up": dense_shapes(width, hidden), "down": dense_shapes(hidden, width),
    }  # fmt: skip
    params = {
        "patch": shape(patch, patch, 3, width), "class": shape(1, 1, width),
        "position": shape(1, tokens, width), "layers": [layer] * layers,
        "norm": norm_shapes(width), "head": dense_shapes(width, classes),
    }  # fmt: skip

    def loss(params: Any, batch: Any) -> jax.Array:
        x = conv(batch["images"].astype(bf16), params["patch"], patch, "VALID")
        x = x.reshape(x.shape[0], -1, width)
        first = jnp.broadcast_to(params["class"].astype(bf16), (x.shape[0], 1, width))
        x = jnp.concatenate([first, x], 1) + params["position"].astype(bf16)
        for p in params["layers"]:
            h = layer_norm(x, p["ln_1"])
            qkv = jnp.einsum("btd,dchk->btchk", h, p["qkv"].astype(bf16))
            q, k, v = jnp.moveaxis(qkv, 2, 0)
            y = jax.nn.dot_product_attention(q, k, v)
            x = x + jnp.einsum("bthk,hkd->btd", y, p["out"].astype(bf16))
            h = layer_norm(x, p["ln_2"])
            x = x + dense(jax.nn.gelu(dense(h, p["up"])), p["down"])
        logits = dense(layer_norm(x[:, 0], params["norm"]), params["head"])
        labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], classes), 0.1)
        return optax.softmax_cross_entropy(logits.astype(f32), labels).mean()

    images = {"images": shape(batch, 224, 224, 3), "labels": shape(batch, dtype=i32)}
    return trained("vit", loss, params, optax.sgd(0.1, momentum=0.9, nesterov=True), images)


def experts() -> Model:
    """Experts with a capacity, the best two of each token, by einsums as in GShard; AdamW."""
    layers, batch, length, width, heads, hidden, number = 2, 64, 512, 1024, 16, 4096, 8
    vocabulary, size, room = 32000, 64, int(1.25 * 2 * 512 / 8)
    params = {
        "embed": shape(vocabulary, width), "norm": shape(width),
        "layers": {
            "attention_norm": shape(layers, width), "mlp_norm": shape(layers, width),
            "qkv": shape(layers, width, 3 * width), "out": shape(layers, width, width),
            "router": shape(layers, width, number),
            "up": shape(layers, number, width, hidden),
            "down": shape(layers, number, hidden, width),
        },
    }  # fmt: skip

    def layer(carry: Any, p: Any) -> Any:
        x, auxiliary = carry
        h = rms_norm(x, p["attention_norm"])
        q, k, v = (
            a.reshape(*a.shape[:2], heads, size)
            for a in jnp.split(h @ p["qkv"].astype(bf16), 3, -1)
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + y @ p["out"].astype(bf16)
        h = rms_norm(x, p["mlp_norm"])
        odds = jax.nn.softmax(h.astype(f32) @ p["router"], -1)
        best, chosen = jax.lax.top_k(odds, 2)
        best = best / best.sum(-1, keepdims=True)
        hit = jax.nn.one_hot(chosen, number, dtype=f32)  # [b, t, 2, e]
        in_turn = hit.transpose(0, 2, 1, 3).reshape(batch, 2 * length, number)
        place = (jnp.cumsum(in_turn, 1) - 1).reshape(batch, 2, length, number)
        place = place.transpose(0, 2, 1, 3)
        keep = (place < room) * hit
        slot = jax.nn.one_hot(place.astype(i32), room, dtype=f32)
        dispatch = jnp.einsum("btke,btkec->btec", keep, slot)
        combine = jnp.einsum("btk,btke,btkec->btec", best, keep, slot)
        inside = jnp.einsum("btec,btd->becd", dispatch.astype(bf16), h)
        y = jax.nn.gelu(jnp.einsum("becd,edf->becf", inside, p["up"].astype(bf16)))
        y = jnp.einsum("becf,efd->becd", y, p["down"].astype(bf16))
        x = x + jnp.einsum("btec,becd->btd", combine.astype(bf16), y)
        balance = number * jnp.mean(hit[:, :, 0].mean(1) * odds.mean(1))
        return (x, auxiliary + balance), None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"].astype(bf16)[batch["tokens"]]
        start = (x, jnp.zeros(()))
        (x, auxiliary), _ = jax.lax.scan(jax.checkpoint(layer), start, params["layers"])
        x = rms_norm(x, params["norm"])
        logits = x @ params["embed"].astype(bf16).T
        return cross_entropy(logits, batch["targets"]) + 0.01 * auxiliary

    tokens = shape(batch, length, dtype=i32)
    return trained(
        "experts", loss, params, optax.adamw(1e-4), {"tokens": tokens, "targets": tokens}
    )


def mamba() -> Model:
    """A selective state space with states of 16, by an associative scan; layers recomputed."""
    layers, batch, length, width, states, vocabulary = 1, 32, 1024, 1024, 16, 32000
    inner, rank = 2 * width, width // 16
    layer_shapes = {
        "norm": shape(width), "in": shape(width, 2 * inner), "conv": shape(4, inner),
        "x": shape(inner, rank + 2 * states), "dt": dense_shapes(rank, inner),
        "a_log": shape(inner, states), "skip": shape(inner), "out": shape(inner, width),
    }  # fmt: skip
    params = {
        "embed": shape(vocabulary, width), "layers": [layer_shapes] * layers, "norm": shape(width)
    }  # fmt: skip

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def layer(x: jax.Array, p: Any) -> jax.Array:
        a, gate = jnp.split(rms_norm(x, p["norm"]) @ p["in"].astype(bf16), 2, -1)
        padded = jnp.pad(a, ((0, 0), (3, 0), (0, 0)))
        a = sum(padded[:, i : i + length] * p["conv"][i].astype(bf16) for i in range(4))
        a = jax.nn.silu(a)
        parts = (a @ p["x"].astype(bf16)).astype(f32)
        dt, b, c = jnp.split(parts, [rank, rank + states], -1)
        dt = jax.nn.softplus(dense(dt, p["dt"]))
        decay = jnp.exp(dt[..., None] * -jnp.exp(p["a_log"]))
        inputs = (dt * a.astype(f32))[..., None] * b[:, :, None]
        _, hidden = jax.lax.associative_scan(combine, (decay, inputs), axis=1)
        y = jnp.einsum("bten,btn->bte", hidden, c) + a.astype(f32) * p["skip"]
        return x + (y.astype(bf16) * jax.nn.silu(gate)) @ p["out"].astype(bf16)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"].astype(bf16)[batch["tokens"]]
        for p in params["layers"]:
            x = jax.checkpoint(layer)(x, p)
        x = rms_norm(x, params["norm"])
        return cross_entropy(x @ params["embed"].astype(bf16).T, batch["targets"])

    tokens = shape(batch, length, dtype=i32)
    return trained("mamba", loss, params, optax.adamw(1e-4), {"tokens": tokens, "targets": tokens})


def two_towers() -> Model:
    """A text encoder and a tower of items with a large table; contrastive loss of the batch."""
    batch, length, width, heads, layers, vocabulary, items = 8192, 64, 512, 8, 1, 49408, 2_000_000
    layer = {
        "ln_1": norm_shapes(width), "ln_2": norm_shapes(width), "qkv": shape(width, 3 * width),
        "out": shape(width, width), "up": shape(width, 4 * width), "down": shape(4 * width, width),
    }  # fmt: skip
    params = {
        "embed": shape(vocabulary, width), "position": shape(length, width),
        "layers": [layer] * layers, "projection": shape(width, 256), "items": shape(items, 128),
        "mlp": [dense_shapes(128 + 64, 1024), dense_shapes(1024, 256)], "temperature": shape(),
    }  # fmt: skip

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"].astype(bf16)[batch["tokens"]] + params["position"].astype(bf16)
        for p in params["layers"]:
            h = layer_norm(x, p["ln_1"])
            q, k, v = (
                a.reshape(*a.shape[:2], heads, width // heads)
                for a in jnp.split(h @ p["qkv"].astype(bf16), 3, -1)
            )
            y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
            x = x + y @ p["out"].astype(bf16)
            h = layer_norm(x, p["ln_2"])
            x = x + jax.nn.gelu(h @ p["up"].astype(bf16)) @ p["down"].astype(bf16)
        query = (x.mean(1) @ params["projection"].astype(bf16)).astype(f32)
        item = jnp.take(params["items"], batch["items"], axis=0)
        item = jnp.concatenate([item, batch["features"]], -1)
        item = dense(jax.nn.relu(dense(item, params["mlp"][0])), params["mlp"][1])
        query = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
        item = item / jnp.linalg.norm(item, axis=-1, keepdims=True)
        logits = query @ item.T * jnp.exp(params["temperature"])
        labels = jnp.arange(logits.shape[0])
        return 0.5 * (cross_entropy(logits, labels) + cross_entropy(logits.T, labels))

    pairs = {
        "tokens": shape(batch, length, dtype=i32), "items": shape(batch, dtype=i32),
        "features": shape(batch, 64),
    }  # fmt: skip
    return trained("two towers", loss, params, optax.adamw(1e-3), pairs)


def unet() -> Model:
    """A denoiser of 64 by 64 images: group norms, skips, Adam, and an average of the weights."""
    batch, size, channels = 512, 64, (128, 256)

    def block_shapes(inside: int, outside: int) -> dict[str, Any]:
        return {
            "norm_1": norm_shapes(inside), "conv_1": shape(3, 3, inside, outside),
            "time": dense_shapes(512, outside), "norm_2": norm_shapes(outside),
            "conv_2": shape(3, 3, outside, outside), "skip": shape(1, 1, inside, outside),
        }  # fmt: skip

    down, up, inside = [], [], channels[0]
    for outside in channels:
        down.append({"block": block_shapes(inside, outside), "down": shape(3, 3, outside, outside)})
        inside = outside
    for outside in reversed(channels):
        up.append({
            "up": shape(3, 3, inside, outside), "block": block_shapes(2 * outside, outside)
        })  # fmt: skip
        inside = outside
    params = {
        "in": shape(3, 3, 3, channels[0]),
        "time": [dense_shapes(128, 512), dense_shapes(512, 512)],
        "down": down, "middle": block_shapes(channels[-1], channels[-1]), "up": up,
        "norm": norm_shapes(channels[0]), "out": shape(3, 3, channels[0], 3),
    }  # fmt: skip
    optimizer = optax.adam(1e-4)

    def group_norm(x: jax.Array, p: Any) -> jax.Array:
        wide = x.astype(f32).reshape(*x.shape[:3], 32, -1)
        mean = wide.mean((1, 2, 4), keepdims=True)
        variance = wide.var((1, 2, 4), keepdims=True)
        wide = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
        return (wide.reshape(x.shape) * p["scale"] + p["bias"]).astype(x.dtype)

    def block(p: Any, x: jax.Array, time: jax.Array) -> jax.Array:
        h = conv(jax.nn.silu(group_norm(x, p["norm_1"])), p["conv_1"])
        h = h + dense(time, p["time"])[:, None, None]
        return conv(jax.nn.silu(group_norm(h, p["norm_2"])), p["conv_2"]) + conv(x, p["skip"])

    def network(params: Any, x: jax.Array, time: jax.Array) -> jax.Array:
        angle = time[:, None] * jnp.exp(-jnp.arange(64) / 64 * jnp.log(1e4))
        t = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(bf16)
        t = jax.nn.silu(dense(jax.nn.silu(dense(t, params["time"][0])), params["time"][1]))
        x, skips = conv(x.astype(bf16), params["in"]), []
        for p in params["down"]:
            x = block(p["block"], x, t)
            skips.append(x)
            x = conv(x, p["down"], 2)
        x = block(params["middle"], x, t)
        for p in params["up"]:
            n, h, w, c = x.shape
            x = conv(jax.image.resize(x, (n, 2 * h, 2 * w, c), "nearest"), p["up"])
            x = block(p["block"], jnp.concatenate([x, skips.pop()], -1), t)
        return conv(jax.nn.silu(group_norm(x, params["norm"])), params["out"]).astype(f32)

    def train_step(
        params: Any, ema: Any, opt_state: Any, images: Any, time: Any, noise: Any
    ) -> Any:
        def loss(params: Any) -> jax.Array:
            kept = jnp.cos(time / 1000 * jnp.pi / 2)[:, None, None, None]
            mixed = kept * images + jnp.sqrt(1 - kept**2) * noise
            return jnp.mean((network(params, mixed, time) - noise) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        ema = optax.incremental_update(params, ema, 1e-4)
        return params, ema, opt_state, value

    images = shape(batch, size, size, 3)
    arguments = (
        params, params, shapes_of(optimizer.init, params), images, shape(batch), images
    )  # fmt: skip
    return Model("unet", train_step, arguments, donate=(0, 1, 2))


def decode() -> Model:
    """A decode step: a scan over layers reads and writes the caches; each row has its place."""
    layers, batch, length, width, heads, groups = 16, 64, 4096, 4096, 32, 8
    hidden, vocabulary, size = 14336, 128256, 128

    def weight(*sizes: int) -> Any:
        return shape(*sizes, dtype=bf16)

    params = {
        "embed": weight(vocabulary, width), "head": weight(width, vocabulary),
        "norm": weight(width),
        "layers": {
            "attention_norm": weight(layers, width), "mlp_norm": weight(layers, width),
            "wq": weight(layers, width, heads * size), "wk": weight(layers, width, groups * size),
            "wv": weight(layers, width, groups * size), "wo": weight(layers, heads * size, width),
            "gate": weight(layers, width, hidden), "up": weight(layers, width, hidden),
            "down": weight(layers, hidden, width),
        },
    }  # fmt: skip
    cache = {name: weight(layers, batch, length, groups, size) for name in ("k", "v")}

    def decode_step(params: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        each = jnp.arange(batch)
        seen = jnp.arange(length) <= positions[:, None]

        def layer(x: jax.Array, scanned: Any) -> Any:
            p, keys, values = scanned
            h = rms_norm(x, p["attention_norm"])
            q = rotate((h @ p["wq"]).reshape(batch, heads, size), positions, 5e5)
            k = rotate((h @ p["wk"]).reshape(batch, groups, size), positions, 5e5)
            keys = keys.at[each, positions].set(k)
            values = values.at[each, positions].set((h @ p["wv"]).reshape(batch, groups, size))
            q = q.reshape(batch, groups, heads // groups, size)
            scores = jnp.einsum("bgqd,btgd->bgqt", q, keys, preferred_element_type=f32)
            scores = jnp.where(seen[:, None, None], scores * size**-0.5, -1e30)
            odds = jax.nn.softmax(scores, -1).astype(bf16)
            y = jnp.einsum("bgqt,btgd->bgqd", odds, values).reshape(batch, heads * size)
            x = x + y @ p["wo"]
            h = rms_norm(x, p["mlp_norm"])
            return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], (keys, values)

        x = params["embed"][tokens]
        x, (keys, values) = jax.lax.scan(layer, x, (params["layers"], cache["k"], cache["v"]))
        logits = (rms_norm(x, params["norm"]) @ params["head"]).astype(f32)
        new = jnp.argmax(logits, -1).astype(i32)
        return new, {"k": keys, "v": values}, positions + 1

    one = shape(batch, dtype=i32)
    return Model("decode", decode_step, (params, cache, one, one), donate=(1, 3))


# -- held-out programs -----------------------------------------------------------------------------


def resnet() -> Model:
    """Bottlenecks of ResNet-50 with batch norms and their running statistics; SGD, momentum."""
    batch, classes, blocks = 2048, 1000, (1, 1, 2, 1)

    def unit_shapes(size: int, inside: int, outside: int) -> Any:
        return shape(size, size, inside, outside), norm_shapes(outside), {
            "mean": shape(outside), "var": shape(outside)
        }  # fmt: skip

    units = {"stem": unit_shapes(7, 3, 64)}
    inside = 64
    for stage, count in enumerate(blocks):
        narrow = 64 * 2**stage
        for number in range(count):
            name = f"stage{stage + 1}_block{number + 1}"
            units[f"{name}_conv1"] = unit_shapes(1, inside, narrow)
            units[f"{name}_conv2"] = unit_shapes(3, narrow, narrow)
            units[f"{name}_conv3"] = unit_shapes(1, narrow, 4 * narrow)
            if number == 0:
                units[f"{name}_project"] = unit_shapes(1, inside, 4 * narrow)
            inside = 4 * narrow
    params = {name: {"conv": unit[0], "norm": unit[1]} for name, unit in units.items()}
    params["head"] = dense_shapes(inside, classes)
    statistics = {name: unit[2] for name, unit in units.items()}
    optimizer = optax.chain(
        optax.add_decayed_weights(5e-5, mask=lambda params: jax.tree.map(
            lambda w: w.ndim > 1, params
        )),
        optax.sgd(optax.cosine_decay_schedule(0.8, 112_000), momentum=0.9, nesterov=True),
    )  # fmt: skip

    def loss(params: Any, statistics: Any, images: jax.Array, labels: jax.Array) -> Any:
        new = {}

        def unit(name: str, x: jax.Array, stride: int = 1) -> jax.Array:
            x = conv(x, params[name]["conv"], stride)
            wide = x.astype(f32)
            mean, square = wide.mean((0, 1, 2)), jnp.square(wide).mean((0, 1, 2))
            variance, old, p = square - mean**2, statistics[name], params[name]["norm"]
            new[name] = {
                "mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * variance
            }  # fmt: skip
            wide = (wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * p["scale"]) + p["bias"]
            return wide.astype(x.dtype)

        x = jax.nn.relu(unit("stem", images, 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, count in enumerate(blocks):
            for number in range(count):
                name = f"stage{stage + 1}_block{number + 1}"
                stride = 2 if stage > 0 and number == 0 else 1
                y = jax.nn.relu(unit(f"{name}_conv1", x))
                y = jax.nn.relu(unit(f"{name}_conv2", y, stride))
                y = unit(f"{name}_conv3", y)
                x = jax.nn.relu(y + (unit(f"{name}_project", x, stride) if number == 0 else x))
        logits = dense(x.mean((1, 2)).astype(f32), params["head"])
        labels = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
        return optax.softmax_cross_entropy(logits, labels).mean(), (new, logits)

    def train_step(params: Any, statistics: Any, opt_state: Any, batch: Any) -> Any:
        (value, (statistics, logits)), grads = jax.value_and_grad(loss, has_aux=True)(
            params, statistics, batch["image"], batch["label"]
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        metrics = {"loss": value, "accuracy": accuracy}
        return optax.apply_updates(params, updates), statistics, opt_state, metrics

    images = {"image": shape(batch, 224, 224, 3, dtype=bf16), "label": shape(batch, dtype=i32)}
    arguments = (params, statistics, shapes_of(optimizer.init, params), images)
    return Model("resnet", train_step, arguments, donate=(0, 1, 2))


def bert() -> Model:
    """BERT: logits of masked positions alone, and of the next sentence; LAMB."""
    layers, batch, length, width, heads, hidden = 2, 256, 512, 1024, 16, 4096
    vocabulary, masked = 30522, 76
    layer = {
        "query": dense_shapes(width, width), "key": dense_shapes(width, width),
        "value": dense_shapes(width, width), "output": dense_shapes(width, width),
        "attention_norm": norm_shapes(width), "up": dense_shapes(width, hidden),
        "down": dense_shapes(hidden, width), "output_norm": norm_shapes(width),
    }  # fmt: skip
    params = {
        "embeddings": {
            "word": shape(vocabulary, width), "position": shape(512, width),
            "type": shape(2, width), "norm": norm_shapes(width),
        },
        "encoder": [layer] * layers, "pooler": dense_shapes(width, width),
        "transform": dense_shapes(width, width), "transform_norm": norm_shapes(width),
        "word_bias": shape(vocabulary), "next_sentence": dense_shapes(width, 2),
    }  # fmt: skip

    def loss(params: Any, batch: Any) -> jax.Array:
        table = params["embeddings"]
        x = jnp.take(table["word"], batch["input_ids"], axis=0) + table["position"]
        x = x + jnp.take(table["type"], batch["token_type_ids"], axis=0)
        x = layer_norm(x, table["norm"]).astype(bf16)
        bias = jnp.where(batch["attention_mask"][:, None, None] > 0, 0.0, -1e9).astype(f32)
        for p in params["encoder"]:
            q, k, v = (
                dense(x, p[name]).reshape(*x.shape[:2], heads, -1)
                for name in ("query", "key", "value")
            )
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // heads)
            odds = jax.nn.softmax(scores.astype(f32) + bias, -1).astype(bf16)
            y = jnp.einsum("bhqk,bkhd->bqhd", odds, v).reshape(x.shape)
            x = layer_norm(x + dense(y, p["output"]), p["attention_norm"])
            y = dense(jax.nn.gelu(dense(x, p["up"]), approximate=False), p["down"])
            x = layer_norm(x + y, p["output_norm"])
        picked = jnp.take_along_axis(x, batch["masked_positions"][..., None], axis=1)
        h = jax.nn.gelu(dense(picked, params["transform"]), approximate=False)
        h = layer_norm(h, params["transform_norm"])
        logits = (h @ table["word"].astype(bf16).T).astype(f32) + params["word_bias"]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["masked_ids"])
        weight = batch["masked_weights"]
        word_loss = jnp.sum(each * weight) / (jnp.sum(weight) + 1e-5)
        pooled = jnp.tanh(dense(x[:, 0], params["pooler"]))
        return word_loss + cross_entropy(dense(pooled, params["next_sentence"]), batch["next"])

    tokens, few = shape(batch, length, dtype=i32), shape(batch, masked, dtype=i32)
    pairs = {
        "input_ids": tokens, "token_type_ids": tokens, "attention_mask": tokens,
        "masked_positions": few, "masked_ids": few, "masked_weights": shape(batch, masked),
        "next": shape(batch, dtype=i32),
    }  # fmt: skip
    return trained("bert", loss, params, optax.lamb(1e-3, weight_decay=0.01), pairs)


def whisper() -> Model:
    """Speech to text: convolutions of a spectrogram, an encoder, a decoder with cross-attention."""
    layers, batch, frames, length, width, heads, vocabulary = 1, 128, 3000, 448, 768, 12, 51865

    def attention_shapes() -> dict[str, Any]:
        return {
            "norm": norm_shapes(width), "query": dense_shapes(width, width),
            "key": shape(width, width), "value": dense_shapes(width, width),
            "out": dense_shapes(width, width),
        }  # fmt: skip

    mlp_shapes = {
        "norm": norm_shapes(width), "up": dense_shapes(width, 4 * width),
        "down": dense_shapes(4 * width, width),
    }  # fmt: skip
    encoder = {"attention": attention_shapes(), "mlp": mlp_shapes}
    decoder = encoder | {"cross": attention_shapes()}
    params = {
        "conv_1": {"kernel": shape(3, 80, width), "bias": shape(width)},
        "conv_2": {"kernel": shape(3, width, width), "bias": shape(width)},
        "encoder": [encoder] * layers, "encoder_norm": norm_shapes(width),
        "tokens": shape(vocabulary, width), "positions": shape(length, width),
        "decoder": [decoder] * layers, "decoder_norm": norm_shapes(width),
    }  # fmt: skip
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(1e-3, 0.0, 1_000_000), b2=0.98, eps=1e-6),
    )

    def conv_1d(p: Any, x: jax.Array, stride: int) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, p["kernel"].astype(x.dtype), (stride,), ((1, 1),),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )  # fmt: skip
        return jax.nn.gelu(y + p["bias"].astype(x.dtype))

    def attend(p: Any, x: jax.Array, source: jax.Array | None, mask: Any = None) -> jax.Array:
        h = layer_norm(x, p["norm"])
        source = h if source is None else source
        q = dense(h, p["query"]).reshape(*h.shape[:2], heads, -1)
        k = (source @ p["key"].astype(bf16)).reshape(*source.shape[:2], heads, -1)
        v = dense(source, p["value"]).reshape(*source.shape[:2], heads, -1)
        y = jax.nn.dot_product_attention(q, k, v, mask=mask)
        return x + dense(y.reshape(x.shape), p["out"])

    def mlp(p: Any, x: jax.Array) -> jax.Array:
        return x + dense(jax.nn.gelu(dense(layer_norm(x, p["norm"]), p["up"])), p["down"])

    def loss(params: Any, batch: Any) -> jax.Array:
        x = conv_1d(params["conv_1"], batch["features"].astype(bf16), 1)
        x = conv_1d(params["conv_2"], x, 2)
        speed = jnp.exp(-math.log(1e4) / (width // 2 - 1) * jnp.arange(width // 2))
        angle = jnp.arange(frames // 2)[:, None] * speed
        x = x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], 1).astype(bf16)
        for p in params["encoder"]:
            x = mlp(p["mlp"], attend(p["attention"], x, None))
        sound = layer_norm(x, params["encoder_norm"])
        y = (params["tokens"][batch["tokens"]] + params["positions"]).astype(bf16)
        for p in params["decoder"]:
            y = attend(p["attention"], y, None, causal(length)[None, None])
            y = mlp(p["mlp"], attend(p["cross"], y, sound))
        y = layer_norm(y, params["decoder_norm"])
        logits = jnp.einsum("btd,vd->btv", y, params["tokens"].astype(bf16)).astype(f32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        counts = batch["targets"] != 50257
        return jnp.sum(each * counts) / jnp.maximum(jnp.sum(counts), 1)

    tokens = shape(batch, length, dtype=i32)
    speech = {"features": shape(batch, frames, 80), "tokens": tokens, "targets": tokens}
    return trained("whisper", loss, params, optimizer, speech)


def dlrm() -> Model:
    """A recommender: tables of very different sizes, bags of ids, products of features; Adagrad."""
    batch, width, bag, numbers = 65536, 128, 8, 13
    sizes = (8_000_000, 4_000_000, 2_000_000, 400_000, 100_000, 20_480, 4_096, 1_024)
    features = 1 + len(sizes)
    bottom = (numbers, 512, 256, width)
    top = (width + features * (features - 1) // 2, 1024, 1024, 512, 256, 1)
    params = {
        "tables": [shape(size, width) for size in sizes],
        "bottom": [dense_shapes(*pair) for pair in itertools.pairwise(bottom)],
        "top": [dense_shapes(*pair) for pair in itertools.pairwise(top)],
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        x = jnp.log1p(batch["dense"])
        for p in params["bottom"]:
            x = jax.nn.relu(dense(x, p))
        pooled = [
            jnp.take(table, batch["sparse"][:, number], axis=0).mean(1)
            for number, table in enumerate(params["tables"])
        ]
        stacked = jnp.stack([x, *pooled], 1)
        products = jnp.einsum("bfd,bgd->bfg", stacked, stacked)
        first, second = jnp.tril_indices(features, -1)
        y = jnp.concatenate([x, products[:, first, second]], 1)
        for p in params["top"][:-1]:
            y = jax.nn.relu(dense(y, p))
        logits = dense(y, params["top"][-1])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

    clicks = {
        "dense": shape(batch, numbers), "sparse": shape(batch, len(sizes), bag, dtype=i32),
        "clicked": shape(batch),
    }  # fmt: skip
    return trained("dlrm", loss, params, optax.adagrad(0.01), clicks)


def palm() -> Model:
    """Attention and MLP side by side, one head of keys, a loss of the partition; Adafactor."""
    layers, batch, length, width, heads, size = 4, 16, 1024, 2048, 16, 128
    hidden, vocabulary = 8192, 256_000
    fused = heads * size + 2 * size + 2 * hidden
    params = {
        "embed": shape(vocabulary, width), "norm": shape(width),
        "layers": {
            "norm": shape(layers, width), "fused": shape(layers, width, fused),
            "attention_out": shape(layers, heads * size, width),
            "mlp_out": shape(layers, hidden, width),
        },
    }  # fmt: skip

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = rms_norm(x, p["norm"]) @ p["fused"].astype(bf16)
        ends = (heads * size, (heads + 1) * size, (heads + 2) * size, (heads + 2) * size + hidden)
        q, k, v, up, gate = jnp.split(h, ends, -1)
        positions = jnp.arange(length)
        q = rotate(q.reshape(*q.shape[:2], heads, size), positions)
        k = rotate(k[:, :, None], positions)[:, :, 0]
        scores = jnp.einsum("bihd,bjd->bhij", q * size**-0.5, k).astype(f32)
        scores = jnp.where(causal(length), scores, -jnp.inf)
        odds = jax.nn.softmax(scores, -1).astype(bf16)
        y = jnp.einsum("bhij,bjd->bihd", odds, v).reshape(*x.shape[:2], heads * size)
        mixed = y @ p["attention_out"].astype(bf16)
        return x + mixed + (jax.nn.silu(gate) * up) @ p["mlp_out"].astype(bf16), None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"].astype(bf16)[batch["tokens"]]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        x = rms_norm(x, params["norm"])
        logits = jnp.einsum("btd,vd->btv", x, params["embed"].astype(bf16)).astype(f32)
        total = jax.nn.logsumexp(logits, -1)
        label = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return jnp.mean(total - label + 1e-4 * total**2)

    tokens = shape(batch, length, dtype=i32)
    return trained(
        "palm", loss, params, optax.adafactor(1e-2), {"tokens": tokens, "targets": tokens}
    )


def ppo() -> Model:
    """An actor and a critic on frames of games: advantages, then four minibatches in a scan."""
    steps, games, parts, actions = 128, 1024, 4, 18
    params = {
        "conv_1": shape(8, 8, 4, 32), "conv_2": shape(4, 4, 32, 64), "conv_3": shape(3, 3, 64, 64),
        "hidden": dense_shapes(3136, 512), "actor": dense_shapes(512, actions),
        "critic": dense_shapes(512, 1),
    }  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))

    def network(params: Any, frames: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = frames.astype(f32) / 255.0
        x = jax.nn.relu(conv(x, params["conv_1"], 4, "VALID"))
        x = jax.nn.relu(conv(x, params["conv_2"], 2, "VALID"))
        x = jax.nn.relu(conv(x, params["conv_3"], 1, "VALID"))
        x = jax.nn.relu(dense(x.reshape(x.shape[0], -1), params["hidden"]))
        return dense(x, params["actor"]), dense(x, params["critic"])[:, 0]

    def loss(params: Any, batch: Any) -> jax.Array:
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch)
        logits, value = network(params, flat["frames"])
        log_odds = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(log_odds, flat["actions"][:, None], 1)[:, 0]
        ratio = jnp.exp(taken - flat["log_odds"])
        gain = (flat["gains"] - flat["gains"].mean()) / (flat["gains"].std() + 1e-8)
        actor = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.9, 1.1) * gain).mean()
        near = flat["values"] + jnp.clip(value - flat["values"], -0.1, 0.1)
        critic = jnp.maximum((value - flat["returns"]) ** 2, (near - flat["returns"]) ** 2)
        entropy = -jnp.sum(jnp.exp(log_odds) * log_odds, -1).mean()
        return actor + 0.25 * critic.mean() - 0.01 * entropy

    def update(params: Any, opt_state: Any, rollout: Any, last: jax.Array, key: jax.Array) -> Any:
        def advantage(carry: Any, at: Any) -> Any:
            gain, following = carry
            alive = 1.0 - at["done"]
            delta = at["rewards"] + 0.99 * following * alive - at["values"]
            gain = delta + 0.99 * 0.95 * alive * gain
            return (gain, at["values"]), gain

        numbers = {name: rollout[name] for name in ("done", "rewards", "values")}
        _, gains = jax.lax.scan(advantage, (jnp.zeros_like(last), last), numbers, reverse=True)
        batch = rollout | {"gains": gains, "returns": gains + rollout["values"]}

        def minibatch(carry: Any, chosen: jax.Array) -> Any:
            params, opt_state = carry
            part = jax.tree.map(lambda a: jnp.take(a, chosen, axis=1), batch)
            value, grads = jax.value_and_grad(loss)(params, part)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        order = jax.random.permutation(key, games).reshape(parts, -1)
        (params, opt_state), values = jax.lax.scan(minibatch, (params, opt_state), order)
        return params, opt_state, values.mean()

    number = shape(steps, games)
    rollout = {
        "frames": shape(steps, games, 84, 84, 4, dtype=jnp.uint8),
        "actions": shape(steps, games, dtype=i32), "log_odds": number, "values": number,
        "rewards": number, "done": number,
    }  # fmt: skip
    return Model(
        "ppo", update,
        (params, shapes_of(optimizer.init, params), rollout, shape(games),
         shape(2, dtype=jnp.uint32)),
        donate=(0, 1),
    )  # fmt: skip


def prefill() -> Model:
    """A chunk of prompts with int8 weights; keys and values go into caches from a place on."""
    layers, batch, chunk, length, width, heads, groups = 2, 16, 1024, 8192, 4096, 32, 8
    hidden, vocabulary, size = 14336, 128256, 128

    def quantized(inside: int, outside: int) -> dict[str, Any]:
        return {
            "int8": shape(inside, outside, dtype=jnp.int8), "scale": shape(outside, dtype=bf16)
        }  # fmt: skip

    layer_shapes = {
        "attention_norm": shape(width, dtype=bf16), "mlp_norm": shape(width, dtype=bf16),
        "wq": quantized(width, heads * size), "wk": quantized(width, groups * size),
        "wv": quantized(width, groups * size), "wo": quantized(heads * size, width),
        "gate": quantized(width, hidden), "up": quantized(width, hidden),
        "down": quantized(hidden, width),
    }  # fmt: skip
    params = {
        "embed": shape(vocabulary, width, dtype=bf16), "layers": [layer_shapes] * layers,
        "norm": shape(width, dtype=bf16), "head": quantized(width, vocabulary),
    }  # fmt: skip
    cache = [
        {name: shape(batch, length, groups, size, dtype=bf16) for name in ("k", "v")}
    ] * layers  # fmt: skip

    def product(x: jax.Array, weight: Any) -> jax.Array:
        return (x @ weight["int8"].astype(x.dtype)) * weight["scale"]

    def prefill_step(
        params: Any, cache: Any, tokens: jax.Array, start: jax.Array, lengths: jax.Array
    ) -> Any:
        positions = start + jnp.arange(chunk)
        seen = jnp.arange(length) <= positions[:, None]
        x, new = params["embed"][tokens], []
        for p, old in zip(params["layers"], cache, strict=True):
            h = rms_norm(x, p["attention_norm"])
            q = rotate(product(h, p["wq"]).reshape(batch, chunk, heads, size), positions, 5e5)
            k = rotate(product(h, p["wk"]).reshape(batch, chunk, groups, size), positions, 5e5)
            v = product(h, p["wv"]).reshape(batch, chunk, groups, size)
            keys = jax.lax.dynamic_update_slice(old["k"], k, (0, start, 0, 0))
            values = jax.lax.dynamic_update_slice(old["v"], v, (0, start, 0, 0))
            new.append({"k": keys, "v": values})
            q = q.reshape(batch, chunk, groups, heads // groups, size)
            scores = jnp.einsum("btgqd,bsgd->bgqts", q, keys, preferred_element_type=f32)
            scores = jnp.where(seen, scores * size**-0.5, -1e30)
            odds = jax.nn.softmax(scores, -1).astype(bf16)
            y = jnp.einsum("bgqts,bsgd->btgqd", odds, values).reshape(batch, chunk, heads * size)
            x = x + product(y, p["wo"])
            h = rms_norm(x, p["mlp_norm"])
            up = jax.nn.silu(product(h, p["gate"])) * product(h, p["up"])
            x = x + product(up, p["down"])
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        logits = product(rms_norm(last, params["norm"]), params["head"])
        return jnp.argmax(logits, -1).astype(i32), new

    arguments = (
        params, cache, shape(batch, chunk, dtype=i32), shape(dtype=i32), shape(batch, dtype=i32)
    )  # fmt: skip
    return Model("prefill", prefill_step, arguments, donate=(1,))


def gemma2() -> Model:
    """Layers in pairs, one with a window and one without; caps of scores and logits; AdamW."""
    pairs, batch, length, width, heads, groups, size = 2, 16, 2048, 2304, 8, 4, 256
    hidden, vocabulary, window = 9216, 256_000, 1024
    layer_shapes = {
        **{name: shape(pairs, width) for name in (
            "before_attention", "after_attention", "before_mlp", "after_mlp"
        )},
        "wq": shape(pairs, width, heads, size), "wkv": shape(pairs, 2, width, groups, size),
        "wo": shape(pairs, heads, size, width), "gate_up": shape(pairs, 2, width, hidden),
        "down": shape(pairs, hidden, width),
    }  # fmt: skip
    params = {
        "embed": shape(vocabulary, width), "norm": shape(width),
        "pairs": {"local": layer_shapes, "global": layer_shapes},
    }  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

    def capped(x: jax.Array, cap: float) -> jax.Array:
        return cap * jnp.tanh(x / cap)

    def layer(p: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        p, positions = jax.tree.map(lambda w: w.astype(bf16), p), jnp.arange(length)
        h = rms_norm(x, 1 + p["before_attention"])
        q = rotate(jnp.einsum("btd,dnh->btnh", h, p["wq"]), positions) * size**-0.5
        k, v = jnp.einsum("bsd,cdkh->cbskh", h, p["wkv"])
        k = rotate(k, positions)
        q = q.reshape(*q.shape[:2], groups, heads // groups, size)
        scores = capped(jnp.einsum("btkgh,bskh->bkgts", q, k).astype(f32), 50.0)
        odds = jax.nn.softmax(jnp.where(mask, scores, -2.3819763e38), -1).astype(bf16)
        y = jnp.einsum("bkgts,bskh->btkgh", odds, v).reshape(*x.shape[:2], heads, size)
        y = jnp.einsum("btnh,nhd->btd", y, p["wo"])
        x = x + rms_norm(y, 1 + p["after_attention"])
        gate, up = jnp.einsum("btd,cdf->cbtf", rms_norm(x, 1 + p["before_mlp"]), p["gate_up"])
        y = (jax.nn.gelu(gate) * up) @ p["down"]
        return x + rms_norm(y, 1 + p["after_mlp"])

    def pair(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        whole = causal(length)
        near = whole & ~jnp.tril(jnp.ones((length, length), bool), -window)
        return layer(p["global"], layer(p["local"], x, near), whole), None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"]].astype(bf16) * math.sqrt(width)
        policy = jax.checkpoint_policies.nothing_saveable
        x, _ = jax.lax.scan(jax.checkpoint(pair, policy=policy), x, params["pairs"])
        x = rms_norm(x, 1 + params["norm"])
        logits = capped((x @ params["embed"].astype(bf16).T).astype(f32), 30.0)
        each = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], batch["tokens"][:, 1:]
        )
        return jnp.sum(each * batch["mask"][:, 1:]) / jnp.sum(batch["mask"][:, 1:])

    tokens = {"tokens": shape(batch, length, dtype=i32), "mask": shape(batch, length)}
    return trained("gemma2", loss, params, optimizer, tokens)


def in_layers(*places: tuple[str, int]) -> list[tuple[str, int]]:
    """Dimensions of the weights of stacked layers."""
    return [(f"params['layers']*{name}", at) for name, at in places]


_TOKENS = ("batch['tokens']", "batch['targets']")

#: The first programs: open and held-out ones in turn.
FIRST: tuple[Program, ...] = (
    Program(
        ("GPT-2", "dropout", "checkpoint", "AdamW"), gpt2, "tpu-v5e", "data=4,model=4", "Megatron",
        split(("tokens", "targets"), [
            ("params['h']*['qkv']*", -1), ("params['h']*['up']*", -1),
            ("params['h']*['out']['kernel']", 0), ("params['h']*['down']['kernel']", 0),
            ("params['wte']", 0),
        ]),
    ),
    Program(
        ("ResNet", "batch norm", "SGD"), resnet, "tpu-v5e", "data=16", "data parallel",
        rows("batch['image']", "batch['label']"),
    ),
    Program(
        ("Llama", "grouped queries", "scanned", "checkpoint of dots", "AdamW"), llama, "tpu-v5e",
        "data=4,model=4", "FSDP", fsdp(*_TOKENS),
    ),
    Program(
        ("BERT", "masked positions", "LAMB"), bert, "tpu-v6e", "data=8", "data parallel",
        rows("batch*"),
    ),
    Program(
        ("ViT-B", "197 tokens", "SGD"), vit, "tpu-v5e", "data=4,model=4", "FSDP",
        fsdp("batch['images']", "batch['labels']"),
    ),
    Program(
        ("Whisper", "cross-attention", "AdamW"), whisper, "tpu-v4", "data=4,model=4", "Megatron",
        split(("batch*",), [
            ("params*['query']*", -1), ("params*['key']", -1), ("params*['value']*", -1),
            ("params*['out']['kernel']", 0), ("params*['up']*", -1),
            ("params*['down']['kernel']", 0),
        ]),
    ),
    Program(
        ("experts", "capacity", "scanned", "checkpoint", "AdamW"), experts, "tpu-v6e",
        "data=2,model=4", "expert parallel",
        split(_TOKENS, in_layers(("['up']", 1), ("['down']", 1))),
    ),
    Program(
        ("DLRM", "tables", "Adagrad"), dlrm, "tpu-v5e", "data=16", "tables by rows",
        lambda model: rows("batch*")(model) + [
            (f"params['tables'][{number}]", 0, "all") for number in range(5)
        ],
    ),
    Program(
        ("Mamba", "associative scan", "checkpoint", "AdamW"), mamba, "tpu-v6e", "data=4,model=4",
        "data parallel", rows(*_TOKENS),
    ),
    Program(
        ("PaLM", "parallel block", "multi-query", "scanned", "checkpoint", "Adafactor"), palm,
        "tpu-v6e", "data=2,model=4", "FSDP", fsdp(*_TOKENS),
    ),
    Program(
        ("two towers", "table", "contrastive", "AdamW"), two_towers, "tpu-v5e", "data=4,model=4",
        "table by rows", lambda model: [*rows("batch*")(model), ("params['items']", 0, "all")],
    ),
    Program(
        ("PPO", "frames", "minibatches", "Adam"), ppo, "tpu-v5e", "data=8", "data parallel",
        rows("rollout*"),
    ),
    Program(
        ("U-Net", "group norm", "average of weights", "Adam"), unet, "tpu-v6e", "data=2,model=4",
        "data parallel", rows("images", "time", "noise"),
    ),
    Program(
        ("prefill", "int8", "caches"), prefill, "tpu-v6e", "data=2,model=4", "tensor parallel",
        split(("tokens", "lengths", "cache*"), [
            *in_layers(
                ("['wq']*", -1), ("['wk']*", -1), ("['wv']*", -1), ("['wo']['int8']", 0),
                ("['gate']*", -1), ("['up']*", -1), ("['down']['int8']", 0),
            ),
            ("params['head']*", -1),
        ]),
    ),
    Program(
        ("decode", "scanned", "caches"), decode, "tpu-v6e", "data=4,model=4", "tensor parallel",
        split(("tokens", "positions"), in_layers(
            ("['wq']", -1), ("['wk']", -1), ("['wv']", -1), ("['wo']", 1), ("['gate']", -1),
            ("['up']", -1), ("['down']", 1),
        ) + [("params['head']", -1)]),
    ),
    Program(
        ("Gemma 2", "sliding window", "caps", "scanned", "checkpoint", "AdamW"), gemma2, "tpu-v4",
        "data=16", "FSDP", fsdp("batch*"),
    ),
)  # fmt: skip
