"""More programs as engineers write them, numbers 16 to 23 (see ``engineers.py``).

They were written when causes of errors of the first sixteen had been looked for.

    >>> len(PROGRAMS), program(16).words[0]
    (24, 'DPO')
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from engineers import (
    FIRST,
    Program,
    bf16,
    conv,
    cross_entropy,
    f32,
    fsdp,
    i32,
    in_layers,
    layer_norm,
    norm_shapes,
    rms_norm,
    rows,
    split,
    trained,
)
from grammar import ENGINEERS, Stranger, shape

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from toast.models import Model


def rope(x: jax.Array, base: float = 5e5) -> jax.Array:
    """Rotary positions of ``x : [batch, length, heads, size]``, by pairs of neighbours."""
    length, size = x.shape[1], x.shape[-1]
    rate = base ** -(jnp.arange(0, size, 2, dtype=f32) / size)
    angle = jnp.arange(length, dtype=f32)[:, None] * rate
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    pairs = x.astype(f32).reshape(*x.shape[:-1], size // 2, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return turned.reshape(x.shape).astype(x.dtype)


def updated(loss: Any, optimizer: Any, params: Any, opt_state: Any, *rest: Any) -> Any:
    """A step of the optimizer: parameters, state, loss."""
    value, grads = jax.value_and_grad(loss)(params, *rest)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


# -- open programs ---------------------------------------------------------------------------------


def preferences() -> Model:
    """DPO of low-rank adapters: policy and reference share frozen weights in bfloat16; Adam."""
    layers, pairs, length, width, heads, groups, size = 4, 16, 1024, 4096, 32, 8, 128
    hidden, vocabulary, rank = 14336, 32000, 16
    frozen = {
        "embed": shape(vocabulary, width, dtype=bf16), "norm": shape(width, dtype=bf16),
        "head": shape(width, vocabulary, dtype=bf16),
        "layers": {
            "ln1": shape(layers, width, dtype=bf16), "ln2": shape(layers, width, dtype=bf16),
            "q": shape(layers, width, heads * size, dtype=bf16),
            "k": shape(layers, width, groups * size, dtype=bf16),
            "v": shape(layers, width, groups * size, dtype=bf16),
            "o": shape(layers, heads * size, width, dtype=bf16),
            "gate": shape(layers, width, hidden, dtype=bf16),
            "up": shape(layers, width, hidden, dtype=bf16),
            "down": shape(layers, hidden, width, dtype=bf16),
        },
    }  # fmt: skip
    adapters = {
        name: {"a": shape(layers, width, rank), "b": shape(layers, rank, out)}
        for name, out in (("q", heads * size), ("v", groups * size))
    }
    optimizer = optax.adam(1e-5)

    def logps(frozen: Any, adapters: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        x = frozen["embed"][tokens]
        batch = x.shape[0]
        seen = jnp.tril(jnp.ones((length, length), bool))

        def layer(x: jax.Array, both: Any) -> tuple[jax.Array, None]:
            p, low = both

            def adapted(h: jax.Array, name: str) -> jax.Array:
                y = h @ p[name]
                if low is not None:
                    down = h @ low[name]["a"].astype(bf16)
                    y = y + 2.0 * (down @ low[name]["b"].astype(bf16))
                return y

            h = rms_norm(x, p["ln1"])
            q = rope(adapted(h, "q").reshape(batch, length, heads, size))
            k = rope((h @ p["k"]).reshape(batch, length, groups, size))
            v = adapted(h, "v").reshape(batch, length, groups, size)
            k, v = (jnp.repeat(a, heads // groups, 2) for a in (k, v))
            scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(f32) * size**-0.5
            odds = jax.nn.softmax(jnp.where(seen, scores, -1e9), -1).astype(bf16)
            y = jnp.einsum("bhts,bshd->bthd", odds, v).reshape(batch, length, heads * size)
            x = x + y @ p["o"]
            h = rms_norm(x, p["ln2"])
            return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, (frozen["layers"], adapters))
        logits = (rms_norm(x, frozen["norm"]) @ frozen["head"])[:, :-1].astype(f32)
        each = jnp.take_along_axis(
            jax.nn.log_softmax(logits), tokens[:, 1:, None], -1
        )[..., 0]  # fmt: skip
        return jnp.sum(each * mask[:, 1:], -1)

    def loss(adapters: Any, frozen: Any, batch: Any) -> jax.Array:
        tokens = jnp.concatenate([batch["chosen"], batch["rejected"]])
        mask = jnp.concatenate([batch["chosen_mask"], batch["rejected_mask"]])
        policy = logps(frozen, adapters, tokens, mask)
        reference = jax.lax.stop_gradient(logps(frozen, None, tokens, mask))
        margin = policy - reference
        return -jnp.mean(jax.nn.log_sigmoid(0.1 * (margin[:pairs] - margin[pairs:])))

    def train_step(adapters: Any, opt_state: Any, frozen: Any, batch: Any) -> Any:
        return updated(loss, optimizer, adapters, opt_state, frozen, batch)

    tokens, mask = shape(pairs, length, dtype=i32), shape(pairs, length)
    batch = {"chosen": tokens, "rejected": tokens, "chosen_mask": mask, "rejected_mask": mask}
    opt_state = jax.eval_shape(optimizer.init, adapters)
    return Model("dpo", train_step, (adapters, opt_state, frozen, batch), donate=(0, 1))


def blocks() -> Model:
    """Long sequences: attention in blocks of keys by a scan, the loss in chunks; Lion."""
    layers, batch, length, width, heads, size, hidden = 4, 4, 16384, 2048, 16, 128, 5504
    vocabulary, block, chunk = 64000, 1024, 2048
    params = {
        "embed": shape(vocabulary, width), "norm": shape(width), "head": shape(width, vocabulary),
        "layers": {
            "ln1": shape(layers, width), "ln2": shape(layers, width),
            "qkv": shape(layers, width, 3, heads, size), "o": shape(layers, heads, size, width),
            "gate_up": shape(layers, width, 2 * hidden), "down": shape(layers, hidden, width),
        },
    }  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4, weight_decay=0.1))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        number = length // block
        keys = k.reshape(batch, number, block, heads, size).swapaxes(0, 1)
        values = v.reshape(batch, number, block, heads, size).swapaxes(0, 1)
        row = jnp.arange(length)

        def step(carry: Any, part: Any) -> tuple[Any, None]:
            most, total, out = carry
            index, k, v = part
            scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=f32) * size**-0.5
            column = index * block + jnp.arange(block)
            scores = jnp.where(row[:, None] >= column[None], scores, -1e30)
            new = jnp.maximum(most, scores.max(-1))
            odds = jnp.exp(scores - new[..., None])
            rescale = jnp.exp(most - new)
            total = total * rescale + odds.sum(-1)
            out = out * rescale[..., None] + jnp.einsum(
                "bhts,bshd->bhtd", odds.astype(bf16), v, preferred_element_type=f32
            )
            return (new, total, out), None

        start = (
            jnp.full((batch, heads, length), -1e30, f32), jnp.zeros((batch, heads, length), f32),
            jnp.zeros((batch, heads, length, size), f32),
        )  # fmt: skip
        parts = jnp.arange(number), keys, values
        (_, total, out), _ = jax.lax.scan(jax.checkpoint(step), start, parts)
        return (out / total[..., None]).astype(bf16).transpose(0, 2, 1, 3)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda w: w.astype(bf16), p)
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", rms_norm(x, p["ln1"]), p["qkv"]), 2, 0)
        x = x + jnp.einsum("bthk,hkd->btd", attention(rope(q), rope(k), v), p["o"])
        gate, up = jnp.split(rms_norm(x, p["ln2"]) @ p["gate_up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ p["down"], None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"].astype(bf16)[tokens]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        x = rms_norm(x, params["norm"])
        targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))

        def part(total: jax.Array, both: Any) -> tuple[jax.Array, None]:
            h, target = both
            logits = (h @ params["head"].astype(bf16)).astype(f32)
            each = optax.softmax_cross_entropy_with_integer_labels(logits, target)
            return total + each.sum(), None

        split = (
            x.reshape(batch, length // chunk, chunk, width).swapaxes(0, 1),
            targets.reshape(batch, length // chunk, chunk).swapaxes(0, 1),
        )
        total, _ = jax.lax.scan(jax.checkpoint(part), jnp.zeros((), f32), split)
        return total / (batch * length)

    def train_step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        return updated(loss, optimizer, params, opt_state, tokens)

    opt_state = jax.eval_shape(optimizer.init, params)
    tokens = shape(batch, length, dtype=i32)
    return Model("blocks", train_step, (params, opt_state, tokens), donate=(0, 1))


def mamba2() -> Model:
    """Mamba-2: states of 128 by products in chunks, a scan over chunks; layers scanned; AdamW."""
    layers, batch, length, width, state, size, chunk = 6, 32, 2048, 1024, 128, 64, 256
    inner, vocabulary, kernel = 2 * width, 50288, 4
    heads, convolved = inner // size, inner + 2 * state
    params = {
        "embed": shape(vocabulary, width), "norm": shape(width),
        "layers": {
            "norm": shape(layers, width),
            "inside": shape(layers, width, 2 * inner + 2 * state + heads),
            "conv": shape(layers, kernel, convolved), "conv_bias": shape(layers, convolved),
            "dt_bias": shape(layers, heads), "decay": shape(layers, heads),
            "skip": shape(layers, heads),
            "gate_norm": shape(layers, inner), "outside": shape(layers, inner, width),
        },
    }  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))

    def sums(a: jax.Array) -> jax.Array:
        """Sums of ``a[..., j + 1 : i + 1]`` at ``[..., i, j]``."""
        total = jnp.cumsum(a, -1)
        apart = total[..., :, None] - total[..., None, :]
        return jnp.where(jnp.tril(jnp.ones((a.shape[-1],) * 2, bool)), apart, -jnp.inf)

    def states(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        number = length // chunk
        x = x.reshape(batch, number, chunk, heads, size)
        a = a.reshape(batch, number, chunk, heads).transpose(0, 3, 1, 2)
        b, c = (v.reshape(batch, number, chunk, state) for v in (b, c))
        total = jnp.cumsum(a, -1)
        within = jnp.exp(sums(a)).astype(bf16)
        scores = jnp.einsum("bcln,bcsn->bcls", c, b)
        y = jnp.einsum("bcls,bhcls,bcshp->bclhp", scores, within, x)
        left = jnp.exp(total[..., -1:] - total).astype(bf16)
        ends = jnp.einsum("bcln,bhcl,bclhp->bchpn", b, left, x, preferred_element_type=f32)
        decays = jnp.exp(total[..., -1])

        def step(carry: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
            end, decay = part
            return carry * decay[..., None, None] + end, carry

        start = jnp.zeros((batch, heads, size, state), f32)
        _, before = jax.lax.scan(step, start, (ends.swapaxes(0, 1), decays.transpose(2, 0, 1)))
        before = before.swapaxes(0, 1).astype(bf16)
        y = y + jnp.einsum("bcln,bchpn,bhcl->bclhp", c, before, jnp.exp(total).astype(bf16))
        return y.reshape(batch, length, heads, size)

    def layer(u: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = rms_norm(u, p["norm"]) @ p["inside"].astype(bf16)
        z, xbc, dt = jnp.split(h, [inner, inner + convolved], -1)
        padded = jnp.pad(xbc, ((0, 0), (kernel - 1, 0), (0, 0)))
        xbc = sum(
            padded[:, i : i + length] * p["conv"][i].astype(bf16) for i in range(kernel)
        ) + p["conv_bias"].astype(bf16)  # fmt: skip
        x, b, c = jnp.split(jax.nn.silu(xbc), [inner, inner + state], -1)
        dt = jax.nn.softplus(dt.astype(f32) + p["dt_bias"])
        x = x.reshape(batch, length, heads, size)
        y = states((x * dt[..., None]).astype(bf16), -jnp.exp(p["decay"]) * dt, b, c)
        y = (y + x * p["skip"][:, None].astype(bf16)).reshape(batch, length, inner)
        y = rms_norm(y * jax.nn.silu(z), p["gate_norm"])
        return u + y @ p["outside"].astype(bf16), None

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"].astype(bf16)[batch["tokens"]]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        logits = rms_norm(x, params["norm"]) @ params["embed"].astype(bf16).T
        return cross_entropy(logits, batch["targets"])

    tokens = shape(batch, length, dtype=i32)
    return trained("mamba2", loss, params, optimizer, {"tokens": tokens, "targets": tokens})


def convnext() -> Model:
    """ConvNeXt-B: depthwise convolutions of 7 by 7, stochastic depth, layer scale, an average."""
    batch, classes = 512, 1000
    depths, widths = (1, 1, 3, 1), (128, 256, 512, 1024)

    def block_shapes(width: int) -> dict[str, Any]:
        return {
            "depthwise": shape(7, 7, 1, width), "bias": shape(width),
            "norm": norm_shapes(width),
            "up": shape(width, 4 * width), "up_bias": shape(4 * width),
            "down": shape(4 * width, width), "down_bias": shape(width), "gamma": shape(width),
        }  # fmt: skip

    params: dict[str, Any] = {
        "stem": shape(4, 4, 3, widths[0]), "stem_bias": shape(widths[0]),
        "stem_norm": norm_shapes(widths[0]),
        "head_norm": norm_shapes(widths[-1]),
        "head": shape(widths[-1], classes), "head_bias": shape(classes),
        "stages": [
            [block_shapes(width) for _ in range(depth)]
            for depth, width in zip(depths, widths, strict=True)
        ],
        "down": [
            {"norm": norm_shapes(a), "kernel": shape(2, 2, a, b), "bias": shape(b)}
            for a, b in itertools.pairwise(widths)
        ],
    }  # fmt: skip
    optimizer = optax.adamw(4e-3, weight_decay=0.05)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        x = conv(batch["image"].astype(bf16), params["stem"], 4, "VALID")
        x = layer_norm(x + params["stem_bias"].astype(bf16), params["stem_norm"])
        for stage, blocks in enumerate(params["stages"]):
            if stage:
                down = params["down"][stage - 1]
                x = conv(layer_norm(x, down["norm"]), down["kernel"], 2, "VALID")
                x = x + down["bias"].astype(bf16)
            for p in blocks:
                key, drop = jax.random.split(key)
                h = conv(x, p["depthwise"], groups=x.shape[-1]) + p["bias"].astype(bf16)
                h = layer_norm(h, p["norm"])
                h = jax.nn.gelu(h @ p["up"].astype(bf16) + p["up_bias"].astype(bf16))
                h = h @ p["down"].astype(bf16) + p["down_bias"].astype(bf16)
                keep = jax.random.bernoulli(drop, 0.8, (x.shape[0], 1, 1, 1))
                x = x + jnp.where(keep, h * p["gamma"].astype(bf16) / 0.8, 0)
        x = layer_norm(x.mean((1, 2)), params["head_norm"])
        logits = x @ params["head"].astype(bf16) + params["head_bias"].astype(bf16)
        labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], classes), 0.1)
        return optax.softmax_cross_entropy(logits.astype(f32), labels).mean()

    def train_step(params: Any, average: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        params, opt_state, value = updated(loss, optimizer, params, opt_state, batch, key)
        average = optax.incremental_update(params, average, 1e-4)
        return params, average, opt_state, value

    images = {"image": shape(batch, 224, 224, 3), "label": shape(batch, dtype=i32)}
    opt_state = jax.eval_shape(optimizer.init, params)
    key = shape(2, dtype=jnp.uint32)
    return Model("convnext", train_step, (params, params, opt_state, images, key), donate=(0, 1, 2))


# -- held-out programs -----------------------------------------------------------------------------


def latent_experts() -> Model:
    """DeepSeek: latent attention, experts by sorted tokens and ragged products; AdamW."""
    layers, batch, length, width, heads = 2, 32, 1024, 2048, 16
    nope, rotated, value_size, latent = 128, 64, 128, 512
    experts, best, hidden, shared, vocabulary = 16, 4, 1408, 2816, 32000
    layer = {
        "ln1": shape(width), "ln2": shape(width), "latent_norm": shape(latent),
        "q": shape(width, heads, nope + rotated), "kv_down": shape(width, latent + rotated),
        "kv_up": shape(latent, heads, nope + value_size), "o": shape(heads, value_size, width),
        "router": shape(width, experts),
        "gate": shape(experts, width, hidden), "up": shape(experts, width, hidden),
        "down": shape(experts, hidden, width),
        "shared_gate": shape(width, shared), "shared_up": shape(width, shared),
        "shared_down": shape(shared, width),
    }  # fmt: skip
    params = {
        "embed": shape(vocabulary, width), "norm": shape(width), "head": shape(width, vocabulary),
        "layers": [layer] * layers,
    }  # fmt: skip
    optimizer = optax.adamw(2e-4, b2=0.95, weight_decay=0.1)

    def attention(p: Any, h: jax.Array) -> jax.Array:
        q = jnp.einsum("btd,dhk->bthk", h, p["q"])
        q = jnp.concatenate([q[..., :nope], rope(q[..., nope:], 1e4)], -1)
        down = h @ p["kv_down"]
        turned = rope(down[..., None, latent:], 1e4)
        kv = jnp.einsum("btl,lhk->bthk", rms_norm(down[..., :latent], p["latent_norm"]), p["kv_up"])
        k = jnp.concatenate(
            [kv[..., :nope], jnp.broadcast_to(turned, (*kv.shape[:3], rotated))], -1
        )  # fmt: skip
        y = jax.nn.dot_product_attention(
            q, k, jnp.pad(kv[..., nope:], ((0, 0),) * 3 + ((0, nope + rotated - value_size),)),
            is_causal=True, scale=(nope + rotated) ** -0.5,
        )[..., :value_size]  # fmt: skip
        return jnp.einsum("bthk,hkd->btd", y, p["o"])

    def routed(p: Any, h: jax.Array, router: jax.Array) -> jax.Array:
        tokens = h.reshape(-1, width)
        odds = jax.nn.softmax(tokens.astype(f32) @ router, -1)
        weight, chosen = jax.lax.top_k(odds, best)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts).astype(i32)
        rows = tokens[order // best]
        gate = jax.lax.ragged_dot(rows, p["gate"], sizes)
        up = jax.lax.ragged_dot(rows, p["up"], sizes)
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes)
        y = y * weight.reshape(-1)[order][:, None].astype(bf16)
        return jnp.zeros_like(tokens).at[order // best].add(y).reshape(h.shape)

    def block(p: Any, x: jax.Array) -> jax.Array:
        router = p["router"]
        p = jax.tree.map(lambda w: w.astype(bf16), p)
        x = x + attention(p, rms_norm(x, p["ln1"]))
        h = rms_norm(x, p["ln2"])
        dense = (jax.nn.silu(h @ p["shared_gate"]) * (h @ p["shared_up"])) @ p["shared_down"]
        return x + dense + routed(p, h, router)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"].astype(bf16)[batch["tokens"]]
        for p in params["layers"]:
            x = jax.checkpoint(block)(p, x)
        logits = (rms_norm(x, params["norm"]) @ params["head"].astype(bf16)).astype(f32)
        return cross_entropy(logits, batch["targets"])

    tokens = shape(batch, length, dtype=i32)
    return trained("deepseek", loss, params, optimizer, {"tokens": tokens, "targets": tokens})


def evoformer() -> Model:
    """Pairs of residues: triangle products and triangle attention, transitions; Adam."""
    blocks, batch, residues, width, heads, size = 2, 16, 256, 128, 4, 32
    norm = norm_shapes(width)
    triangle = {
        "norm": norm, "left": shape(width, width), "left_gate": shape(width, width),
        "right": shape(width, width), "right_gate": shape(width, width), "middle": norm,
        "out": shape(width, width), "gate": shape(width, width),
    }  # fmt: skip
    attention = {
        "norm": norm, "qkv": shape(width, 3, heads, size), "bias": shape(width, heads),
        "gate": shape(width, heads, size), "out": shape(heads, size, width),
    }  # fmt: skip
    block = {
        "outgoing": triangle, "incoming": triangle, "starting": attention, "ending": attention,
        "transition": {
            "norm": norm, "up": shape(width, 4 * width), "down": shape(4 * width, width)
        },
    }  # fmt: skip
    params = {"blocks": [block] * blocks, "head": shape(width, 64)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3))

    def product(p: Any, z: jax.Array, equation: str) -> jax.Array:
        h = layer_norm(z, p["norm"])
        left = jax.nn.sigmoid(h @ p["left_gate"].astype(bf16)) * (h @ p["left"].astype(bf16))
        right = jax.nn.sigmoid(h @ p["right_gate"].astype(bf16)) * (h @ p["right"].astype(bf16))
        y = layer_norm(jnp.einsum(equation, left, right), p["middle"]) @ p["out"].astype(bf16)
        return y * jax.nn.sigmoid(h @ p["gate"].astype(bf16))

    def attend(p: Any, z: jax.Array) -> jax.Array:
        h = layer_norm(z, p["norm"])
        q, k, v = jnp.moveaxis(jnp.einsum("bijd,dchk->bijchk", h, p["qkv"].astype(bf16)), 3, 0)
        bias = jnp.einsum("bjkd,dh->bhjk", h, p["bias"].astype(bf16)).astype(f32)
        scores = jnp.einsum("bijhd,bikhd->bihjk", q, k).astype(f32) * size**-0.5 + bias[:, None]
        y = jnp.einsum("bihjk,bikhd->bijhd", jax.nn.softmax(scores, -1).astype(bf16), v)
        y = y * jax.nn.sigmoid(jnp.einsum("bijd,dhk->bijhk", h, p["gate"].astype(bf16)))
        return jnp.einsum("bijhk,hkd->bijd", y, p["out"].astype(bf16))

    def apply(p: Any, z: jax.Array) -> jax.Array:
        z = z + product(p["outgoing"], z, "bikc,bjkc->bijc")
        z = z + product(p["incoming"], z, "bkic,bkjc->bijc")
        z = z + attend(p["starting"], z)
        z = z + attend(p["ending"], z.swapaxes(1, 2)).swapaxes(1, 2)
        t = p["transition"]
        h = jax.nn.relu(layer_norm(z, t["norm"]) @ t["up"].astype(bf16))
        return z + h @ t["down"].astype(bf16)

    def loss(params: Any, pairs: jax.Array, bins: jax.Array) -> jax.Array:
        z = pairs.astype(bf16)
        for p in params["blocks"]:
            z = jax.checkpoint(apply)(p, z)
        logits = ((z + z.swapaxes(1, 2)) @ params["head"].astype(bf16)).astype(f32)
        return cross_entropy(logits, bins)

    def train_step(params: Any, opt_state: Any, pairs: jax.Array, bins: jax.Array) -> Any:
        return updated(loss, optimizer, params, opt_state, pairs, bins)

    pairs = shape(batch, residues, residues, width)
    bins = shape(batch, residues, residues, dtype=i32)
    opt_state = jax.eval_shape(optimizer.init, params)
    return Model("evoformer", train_step, (params, opt_state, pairs, bins), donate=(0, 1))


def speech() -> Model:
    """Recurrent speech: bidirectional LSTMs over spectrograms, CTC; SGD with momentum."""
    layers, batch, frames, mels, width, characters, label = 3, 256, 400, 80, 1024, 64, 64

    def direction(inside: int) -> dict[str, Any]:
        return {
            "wx": shape(inside, 4 * width), "wh": shape(width, 4 * width), "b": shape(4 * width)
        }  # fmt: skip

    params = {
        "in": shape(2 * mels, 2 * width),
        "layers": [{"forward": direction(2 * width), "backward": direction(2 * width)}] * layers,
        "out": shape(2 * width, characters),
    }
    optimizer = optax.chain(optax.clip(1.0), optax.sgd(1e-2, momentum=0.9))

    def run(p: Any, x: jax.Array, reverse: bool) -> jax.Array:
        inputs = (x @ p["wx"].astype(bf16) + p["b"].astype(bf16)).swapaxes(0, 1)
        weight = p["wh"].astype(bf16)

        def cell(carry: Any, a: jax.Array) -> tuple[Any, jax.Array]:
            h, c = carry
            i, f, g, o = jnp.split((a + h @ weight).astype(f32), 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(bf16)
            return (h, c), h

        start = (jnp.zeros((batch, width), bf16), jnp.zeros((batch, width), f32))
        _, out = jax.lax.scan(cell, start, inputs, reverse=reverse)
        return out.swapaxes(0, 1)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["mels"].astype(bf16).reshape(-1, frames // 2, 2 * mels)
        x = jax.nn.relu(x @ params["in"].astype(bf16))
        for p in params["layers"]:
            x = jnp.concatenate([run(p["forward"], x, False), run(p["backward"], x, True)], -1)
        logits = (x @ params["out"].astype(bf16)).astype(f32)
        each = optax.ctc_loss(logits, batch["frame_paddings"], batch["text"], batch["paddings"])
        return each.mean()

    batch_shapes = {
        "mels": shape(batch, frames, mels), "frame_paddings": shape(batch, frames // 2),
        "text": shape(batch, label, dtype=i32), "paddings": shape(batch, label),
    }  # fmt: skip
    return trained("speech", loss, params, optimizer, batch_shapes)


def images_and_text() -> Model:
    """LLaVA: a frozen image encoder, a projector, a decoder whose sequence starts with patches."""
    batch, patches, text, vision, width, heads, groups, size = 32, 576, 448, 1024, 3072, 24, 8, 128
    seers, layers, hidden, vocabulary = 2, 2, 8192, 128256
    seer = {
        "ln1": norm_shapes(vision), "ln2": norm_shapes(vision),
        "qkv": shape(vision, 3, 16, 64, dtype=bf16), "o": shape(16, 64, vision, dtype=bf16),
        "up": shape(vision, 4 * vision, dtype=bf16), "down": shape(4 * vision, vision, dtype=bf16),
    }  # fmt: skip
    encoder = {
        "patch": shape(14 * 14 * 3, vision, dtype=bf16),
        "position": shape(patches, vision, dtype=bf16), "layers": [seer] * seers,
    }  # fmt: skip
    params = {
        "project": [shape(vision, width), shape(width, width)],
        "embed": shape(vocabulary, width), "norm": shape(width),
        "layers": {
            "ln1": shape(layers, width), "ln2": shape(layers, width),
            "q": shape(layers, width, heads, size), "k": shape(layers, width, groups, size),
            "v": shape(layers, width, groups, size), "o": shape(layers, heads, size, width),
            "gate": shape(layers, width, hidden), "up": shape(layers, width, hidden),
            "down": shape(layers, hidden, width),
        },
    }  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-5))

    def look(encoder: Any, images: jax.Array) -> jax.Array:
        side = 24
        x = images.astype(bf16).reshape(batch, side, 14, side, 14, 3).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, patches, -1) @ encoder["patch"] + encoder["position"]
        for p in encoder["layers"]:
            h = layer_norm(x, p["ln1"])
            q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", h, p["qkv"]), 2, 0)
            x = x + jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v), p["o"])
            h = layer_norm(x, p["ln2"])
            x = x + jax.nn.gelu(h @ p["up"]) @ p["down"]
        return x

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda w: w.astype(bf16), p)
        h = rms_norm(x, p["ln1"])
        q, k = (rope(jnp.einsum("btd,dhk->bthk", h, p[name])) for name in "qk")
        y = jax.nn.dot_product_attention(
            q, k, jnp.einsum("btd,dhk->bthk", h, p["v"]), is_causal=True
        )
        x = x + jnp.einsum("bthk,hkd->btd", y, p["o"])
        h = rms_norm(x, p["ln2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params: Any, encoder: Any, batch: Any) -> jax.Array:
        seen = jax.lax.stop_gradient(look(encoder, batch["images"]))
        seen = jax.nn.gelu(seen @ params["project"][0].astype(bf16))
        seen = seen @ params["project"][1].astype(bf16)
        words = params["embed"][batch["tokens"]].astype(bf16)
        x = jnp.concatenate([seen, words], 1)
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params["layers"])
        x = rms_norm(x[:, patches:], params["norm"])
        logits = (x @ params["embed"].astype(bf16).T).astype(f32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])

    def train_step(params: Any, opt_state: Any, encoder: Any, batch: Any) -> Any:
        return updated(loss, optimizer, params, opt_state, encoder, batch)

    tokens = shape(batch, text, dtype=i32)
    batch_shapes = {
        "images": shape(batch, 336, 336, 3), "tokens": tokens, "targets": tokens,
        "mask": shape(batch, text),
    }  # fmt: skip
    opt_state = jax.eval_shape(optimizer.init, params)
    return Model("llava", train_step, (params, opt_state, encoder, batch_shapes), donate=(0, 1))


_TOKENS = ("batch['tokens']", "batch['targets']")

#: All programs: open and held-out ones in turn.
PROGRAMS: tuple[Program, ...] = (
    *FIRST,
    Program(
        ("DPO", "adapters", "frozen weights", "scanned", "checkpoint", "Adam"), preferences,
        "tpu-v5e", "data=4,model=4", "Megatron",
        split(("batch*",), [
            ("frozen['layers']['q']", -1), ("frozen['layers']['k']", -1),
            ("frozen['layers']['v']", -1), ("frozen['layers']['o']", 1),
            ("frozen['layers']['gate']", -1), ("frozen['layers']['up']", -1),
            ("frozen['layers']['down']", 1), ("frozen['head']", -1),
        ]),
    ),
    Program(
        ("DeepSeek", "latent attention", "ragged experts", "checkpoint", "AdamW"), latent_experts,
        "tpu-v6e", "data=4,model=4", "FSDP", fsdp(*_TOKENS),
    ),
    Program(
        ("long sequences", "attention in blocks", "scanned", "checkpoint", "Lion"), blocks,
        "tpu-v5e", "data=4,model=4", "sequences and heads",
        split(("tokens",), in_layers(
            ("['qkv']", 3), ("['o']", 1), ("['gate_up']", -1), ("['down']", 1)
        ) + [("params['head']", -1)]),
    ),
    Program(
        ("Evoformer", "triangles", "checkpoint", "Adam"), evoformer, "tpu-v5e", "data=16",
        "data parallel", rows("pairs", "bins"),
    ),
    Program(
        ("Mamba-2", "chunks", "scanned", "checkpoint", "AdamW"), mamba2, "tpu-v6e", "data=16",
        "FSDP", fsdp(*_TOKENS),
    ),
    Program(
        ("speech", "LSTM", "CTC", "SGD"), speech, "tpu-v5e", "data=8", "data parallel",
        rows("batch*"),
    ),
    Program(
        ("ConvNeXt", "depthwise", "stochastic depth", "AdamW"), convnext, "tpu-v5e", "data=16",
        "data parallel", rows("batch*"),
    ),
    Program(
        ("LLaVA", "frozen encoder", "scanned", "checkpoint of dots", "AdamW"), images_and_text,
        "tpu-v6e", "data=2,model=4", "FSDP", fsdp("batch*"),
    ),
)  # fmt: skip


def program(number: int) -> Stranger:
    """The program of a number."""
    chosen = PROGRAMS[number]
    model = chosen.build()
    return Stranger(
        ENGINEERS + number, model, {chosen.expert: chosen.plan(model)},
        chosen.hardware, chosen.mesh, chosen.words,
    )  # fmt: skip
