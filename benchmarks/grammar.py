"""A grammar of programs as people write them: the corpus of ``strangers.py``.

The seed of a program decides everything: its blocks, sizes, element types, recomputation, loss,
optimizer, mesh and device.  The programs are plain JAX and share no code with the zoo but the
optimizers, because prices were tuned on the zoo.

    >>> draw(3).words == draw(3).words
    True
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from toast.models import Model, Strategies
from toast.models.optimizers import (
    adafactor,
    adafactor_moments,
    adam,
    adam_moments,
    adamw,
    momentum,
    momentum_shapes,
    train_step,
)

GIB = 2.0**30

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Stranger:
    """A program of the corpus, and what it is planned for."""

    seed: int
    model: Model
    strategies: Strategies
    hardware: str
    mesh: str
    #: What the program is made of.
    words: tuple[str, ...]


#: The first seed of programs with many layers that are not scanned.
DEEP = 10_000
#: The first seed of the programs of ``engineers.py``, which nothing draws.
ENGINEERS = 20_000


class Draw:
    """Choices that follow from a seed; the words of the choices that describe the program."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng((22, seed))
        self.words: list[str] = []
        #: Whether the program has many layers without a scan.
        self.deep = seed >= DEEP

    def one(self, *options: _T) -> _T:
        """One of the options; repeat an option to make it more likely."""
        return options[int(self._random.integers(len(options)))]

    def word(self, *options: str) -> str:
        """As :meth:`one`, and noted, unless it is empty."""
        chosen = self.one(*options)
        if chosen and chosen not in self.words:
            self.words.append(chosen)
        return chosen

    def between(self, low: float, high: float) -> float:
        """A number from low to high, of which the logarithm is uniform."""
        return float(np.exp(self._random.uniform(np.log(low), np.log(high))))


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter, and the dimensions that experts shard: counted from the last, 0 for none."""

    shape: tuple[int, ...]
    #: The width of the model, for FSDP.
    wide: int = 0
    #: Heads, hidden units, experts or the vocabulary, for tensor parallelism.
    split: int = 0


Weights = dict[str, Weight]
Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Block:
    """A layer's part: its weights, and a function of them, the input and what conditions it."""

    name: str
    weights: Weights
    apply: Callable[[Params, jax.Array], jax.Array]
    #: Bytes per token that the backward pass needs, roughly, in elements of the products.
    kept: float


def product(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """An einsum in the element type of ``x``."""
    return jnp.einsum(spec, x, weight.astype(x.dtype))


def rms(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """RMS norm over the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return (wide if scale is None else wide * scale).astype(x.dtype)


def layer_norm(
    x: jax.Array, scale: jax.Array | None = None, bias: jax.Array | None = None
) -> jax.Array:
    """Layer norm over the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, -1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.var(wide, -1, keepdims=True) + 1e-6)
    if scale is not None:
        wide = wide * scale
    return (wide if bias is None else wide + bias).astype(x.dtype)


def rotary(x: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """Rotary positions of ``x : [batch, sequence, heads, size]``."""
    half = x.shape[-1] // 2
    position = start + jnp.arange(x.shape[1], dtype=jnp.float32)
    angle = position[:, None] * 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


# -- mixers: blocks that mix positions -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Heads:
    """The form of attention."""

    width: int
    heads: int
    groups: int
    size: int
    causal: bool
    window: int
    bias: bool
    qk_norm: bool
    turned: bool
    #: ``fused qkv`` (one weight), ``separate qkv``, ``grouped einsum``, ``repeated keys``, or
    #: ``jax.nn attention`` (``jax.nn.dot_product_attention``).
    form: str


def draw_heads(d: Draw, width: int, sequence: int, *, causal: bool) -> Heads:
    """The form of the attention of a model."""
    size = d.one(*(s for s in (64, 80, 96, 128) if width % s == 0))
    heads = max(1, width // size)
    groups = heads // d.one(*(r for r in (1, 1, 2, 4, 8) if heads % r == 0))
    single = ("fused qkv", "separate qkv", "jax.nn attention")
    form = d.word(*single if groups == heads else ("repeated keys", "grouped einsum", single[2]))
    d.words.append(f"{heads} heads of {size}" + (f" in {groups} groups" * (groups != heads)))
    window = d.one(0, 0, 0, sequence // 4) if causal else 0
    if window:
        d.words.append("sliding window")
    bias, qk_norm = bool(d.word("", "", "biases")), bool(d.word("", "", "qk-norm"))
    turned = bool(d.word("", "rotary"))
    return Heads(width, heads, groups, size, causal, window, bias, qk_norm, turned, form)


def attention_weights(h: Heads) -> Weights:
    """The weights of attention."""
    w, n, g, k = h.width, h.heads, h.groups, h.size
    if h.form == "fused qkv":
        weights = {"qkv": Weight((w, 3, n, k), -4, -2)}
    else:
        weights = {
            "query": Weight((w, n, k), -3, -2), "key": Weight((w, g, k), -3, -2),
            "value": Weight((w, g, k), -3, -2),
        }  # fmt: skip
    if h.bias:
        weights |= {"query_bias": Weight((n, k), 0, -2), "value_bias": Weight((g, k), 0, -2)}
    if h.qk_norm:
        weights |= {"query_norm": Weight((k,)), "key_norm": Weight((k,))}
    return weights | {"out": Weight((n, k, w), -1, -3)}


def queries(
    h: Heads, p: Params, x: jax.Array, start: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of ``x : [batch, sequence, width]``, with heads before sizes."""
    if h.form == "fused qkv":
        parts = product("bsd,dtnk->tbsnk", x, p["qkv"])
        query, key, value = parts[0], parts[1], parts[2]
    else:
        query, key, value = (
            product("bsd,dnk->bsnk", x, p[name]) for name in ("query", "key", "value")
        )
    if h.bias:
        query = query + p["query_bias"].astype(x.dtype)
        value = value + p["value_bias"].astype(x.dtype)
    if h.qk_norm:
        query, key = rms(query, p["query_norm"]), rms(key, p["key_norm"])
    if h.turned:
        query, key = rotary(query, start), rotary(key, start)
    return query, key, value


def visible(h: Heads, queries: int, keys: int, start: jax.Array | int = 0) -> jax.Array:
    """Whether a query sees a key: ``[queries, keys]``."""
    distance = start + jnp.arange(queries)[:, None] - jnp.arange(keys)[None]
    seen = distance >= 0
    return seen & (distance < h.window) if h.window else seen


def attended(
    h: Heads, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Attention in the form of ``h``; softmax in float32."""
    batch, length, heads, size = query.shape
    if h.form == "jax.nn attention":
        seen = None if mask is None else mask[None, None]
        return jax.nn.dot_product_attention(query, key, value, mask=seen)
    repeats = heads // key.shape[2]
    if h.form == "grouped einsum":
        split = query.reshape(batch, length, key.shape[2], repeats, size)
        scores = jnp.einsum("bsgrk,btgk->bgrst", split, key).astype(jnp.float32)
    else:
        if repeats > 1:
            key, value = jnp.repeat(key, repeats, 2), jnp.repeat(value, repeats, 2)
        scores = jnp.einsum("bsnk,btnk->bnst", query, key).astype(jnp.float32)
    scores = scores * size**-0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores, -1).astype(query.dtype)
    if h.form == "grouped einsum":
        return jnp.einsum("bgrst,btgk->bsgrk", weights, value).reshape(query.shape)
    return jnp.einsum("bnst,btnk->bsnk", weights, value)


def attention(d: Draw, width: int, sequence: int, *, causal: bool) -> Block:
    """Attention of all positions to all, or to earlier ones."""
    h = draw_heads(d, width, sequence, causal=causal)

    def apply(p: Params, x: jax.Array) -> jax.Array:
        mask = visible(h, x.shape[1], x.shape[1]) if h.causal else None
        return product("bsnk,nkd->bsd", attended(h, *queries(h, p, x), mask), p["out"])

    kept = 6 * width + 3 * h.heads * sequence
    return Block("attention", attention_weights(h), apply, kept)


def recurrence(d: Draw, width: int, sequence: int, *, causal: bool) -> Block:
    """A gated recurrence, by an associative scan or step by step; the latter may have a product."""
    form = d.word("associative_scan", "associative_scan", "recurrent scan", "recurrent product")
    hidden = width * d.one(1, 1, 2) if form == "associative_scan" else width
    weights = {name: Weight((width, hidden), -2, -1) for name in ("decay", "input", "gate")}
    weights["out"] = Weight((hidden, width), -1, -2)
    if form == "recurrent product":
        weights["again"] = Weight((hidden, hidden), -1)

    def apply(p: Params, x: jax.Array) -> jax.Array:
        decay = jax.nn.sigmoid(product("bsd,dh->bsh", x, p["decay"]).astype(jnp.float32))
        new = (1 - decay) * product("bsd,dh->bsh", x, p["input"])
        if form == "associative_scan":
            state = jax.lax.associative_scan(
                lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, new), axis=1
            )[1]
        else:

            def step(before: jax.Array, now: tuple[jax.Array, jax.Array]) -> Any:
                kept = before
                if form == "recurrent product":
                    low = before.astype(x.dtype)
                    kept = jnp.tanh(product("bh,hg->bg", low, p["again"]).astype(jnp.float32))
                after = now[0] * kept + now[1]
                return after, after

            first = jnp.zeros_like(new[:, 0])
            moved = jnp.swapaxes(decay, 0, 1), jnp.swapaxes(new, 0, 1)
            state = jnp.swapaxes(jax.lax.scan(step, first, moved)[1], 0, 1)
        gate = jax.nn.silu(product("bsd,dh->bsh", x, p["gate"]))
        return product("bsh,hd->bsd", state.astype(x.dtype) * gate, p["out"])

    return Block("recurrence", weights, apply, 2 * width + 14 * hidden)


def state_space(d: Draw, width: int, sequence: int, *, causal: bool) -> Block:
    """A state space in chunks, as Mamba-2 computes it; sequences are padded to whole chunks."""
    size, states, chunk = d.one(64, 128), d.one(16, 64, 128), d.one(64, 128)
    d.word("state space")
    heads = 2 * width // size
    weights = {
        "value": Weight((width, heads, size), -3, -2), "gate": Weight((width, heads, size), -3, -2),
        "keys": Weight((width, 2, states), -3), "step": Weight((width, heads), -2, -1),
        "rate": Weight((heads,), 0, -1), "out": Weight((heads, size, width), -1, -3),
    }  # fmt: skip

    def apply(p: Params, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        chunks = -(-length // chunk)
        padded = jnp.pad(x, ((0, 0), (0, chunks * chunk - length), (0, 0)))
        split = padded.reshape(batch, chunks, chunk, width)
        step = jax.nn.softplus(product("bcld,dn->bcln", split, p["step"]).astype(jnp.float32))
        value = product("bcld,dnp->bclnp", split, p["value"]) * step[..., None].astype(x.dtype)
        keys = product("bcld,dtm->tbclm", split, p["keys"])
        before = jnp.cumsum(-jnp.exp(p["rate"].astype(jnp.float32)) * step, 2)  # [b, c, l, n]
        lower = jnp.tril(jnp.ones((chunk, chunk), bool))[:, :, None]
        apart = before[:, :, :, None] - before[:, :, None]  # [b, c, l, m, n]
        decay = jnp.exp(jnp.where(lower, apart, -jnp.inf)).astype(x.dtype)
        scores = jnp.einsum("bclk,bcmk->bclm", keys[1], keys[0])
        inside = jnp.einsum("bclm,bclmn,bcmnp->bclnp", scores, decay, value)
        rest = jnp.exp(before[:, :, -1:] - before).astype(x.dtype)
        states_of = jnp.einsum("bcmk,bcmn,bcmnp->cbnpk", keys[0], rest, value)
        whole = jnp.moveaxis(jnp.exp(before[:, :, -1]), 1, 0)[..., None, None]

        def carried(state: jax.Array, now: tuple[jax.Array, jax.Array]) -> Any:
            return now[0] * state + now[1].astype(jnp.float32), state

        first = jnp.zeros(states_of.shape[1:], jnp.float32)
        entering = jax.lax.scan(carried, first, (whole, states_of))[1].astype(x.dtype)
        outside = jnp.einsum(
            "bclk,bcln,cbnpk->bclnp", keys[1], jnp.exp(before).astype(x.dtype), entering
        )
        mixed = (inside + outside).reshape(batch, chunks * chunk, heads, size)[:, :length]
        gate = jax.nn.silu(product("bsd,dnp->bsnp", x, p["gate"]))
        return product("bsnp,npd->bsd", mixed * gate, p["out"])

    return Block("state_space", weights, apply, 16 * width + 3 * heads * chunk)


# -- feeds: blocks that act on each position -------------------------------------------------------


def mlp(d: Draw, width: int, sequence: int) -> Block:
    """A plain or a gated MLP."""
    form = d.word("gated MLP", "plain MLP")
    hidden = width * 4 if form == "plain MLP" else d.one(width * 8 // 3 // 64 * 64, width * 7 // 2)
    activation = d.one(jax.nn.gelu, jax.nn.silu, jax.nn.relu)
    weights = {"up": Weight((width, hidden), -2, -1), "down": Weight((hidden, width), -1, -2)}
    if form == "gated MLP":
        weights["gate"] = Weight((width, hidden), -2, -1)
    elif d.one(True, False):
        weights |= {"up_bias": Weight((hidden,), 0, -1), "down_bias": Weight((width,), -1)}

    def apply(p: Params, x: jax.Array) -> jax.Array:
        up = product("bsd,dh->bsh", x, p["up"])
        if "up_bias" in p:
            up = up + p["up_bias"].astype(x.dtype)
        if "gate" in p:
            up = up * activation(product("bsd,dh->bsh", x, p["gate"]))
        else:
            up = activation(up)
        down = product("bsh,hd->bsd", up, p["down"])
        return down + p["down_bias"].astype(x.dtype) if "down_bias" in p else down

    return Block("mlp", weights, apply, 2 * width + 3 * hidden)


def experts(d: Draw, width: int, sequence: int) -> Block:
    """Experts, of which each token takes one or two: dispatched by products, or by sorting."""
    form = d.word("dense experts", "ragged experts")
    number, taken, hidden = d.one(4, 8, 16), d.one(1, 2), d.one(width, 2 * width)
    weights = {
        "router": Weight((width, number), -2),
        "up": Weight((number, width, hidden), -2, -3),
        "gate": Weight((number, width, hidden), -2, -3),
        "down": Weight((number, hidden, width), -1, -3),
    }  # fmt: skip

    def routed(p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        odds = jax.nn.softmax(product("bsd,de->bse", x, p["router"]).astype(jnp.float32))
        best: tuple[jax.Array, jax.Array] = jax.lax.top_k(odds, taken)
        return best

    def dense(p: Params, x: jax.Array) -> jax.Array:
        odds, chosen = routed(p, x)
        room = max(8, int(1.25 * taken * x.shape[1] / number) // 8 * 8)
        hit = jax.nn.one_hot(chosen, number, dtype=jnp.float32)  # [b, s, k, e]
        place = jnp.cumsum(hit.sum(2), 1)[:, :, None] * hit - hit
        slot = jax.nn.one_hot(place, room, dtype=x.dtype) * hit[..., None].astype(x.dtype)
        sent = slot.sum(2)  # [b, s, e, room]
        back = jnp.einsum("bsk,bskec->bsec", odds.astype(x.dtype), slot)
        inside = jnp.einsum("bsd,bsec->ebcd", x, sent)
        up = product("ebcd,edh->ebch", inside, p["up"])
        up = up * jax.nn.silu(product("ebcd,edh->ebch", inside, p["gate"]))
        return jnp.einsum("ebcd,bsec->bsd", product("ebch,ehd->ebcd", up, p["down"]), back)

    def ragged(p: Params, x: jax.Array) -> jax.Array:
        odds, chosen = routed(p, x)
        order = jnp.argsort(chosen.reshape(-1))
        inside = jnp.repeat(x.reshape(-1, width), taken, 0)[order]
        sizes = jnp.bincount(chosen.reshape(-1), length=number).astype(jnp.int32)
        up, gate, down = (p[name].astype(x.dtype) for name in ("up", "gate", "down"))
        hidden = jax.lax.ragged_dot(inside, up, sizes)
        hidden = hidden * jax.nn.silu(jax.lax.ragged_dot(inside, gate, sizes))
        outside = jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]
        split = outside.reshape(*x.shape[:2], taken, width)
        return jnp.einsum("bskd,bsk->bsd", split, odds.astype(x.dtype))

    # Sorted tokens are in one row, which stays whole.
    kept = 4 * width + taken * (3 * hidden + 2 * width) * (8 if form == "ragged experts" else 1)
    apply = dense if form == "dense experts" else ragged
    return Block("experts", weights, apply, kept)


# -- models ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
    """What all programs have in common."""

    #: The element types of products and of weights.
    compute: str
    weights: str
    #: The recomputation of layers: empty, ``checkpoint`` or ``checkpoint of dots``.
    remat: str
    scanned: bool
    layers: int

    def checkpointed(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """A layer with its recomputation."""
        if not self.remat:
            return layer
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        body: Callable[..., Any] = jax.checkpoint(
            layer, policy=policy if "dots" in self.remat else None
        )
        return body

    def shapes(self, weights: Weights) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of parameters."""
        return {name: shape(*w.shape, dtype=self.weights) for name, w in weights.items()}

    def repeated(self, layer: Any) -> Any:
        """The shapes of all layers: stacked for a scan, or a list."""
        if not self.scanned:
            return [layer] * self.layers
        return jax.tree.map(lambda s: shape(self.layers, *s.shape, dtype=s.dtype), layer)

    def run(self, layer: Callable[[Any, jax.Array], jax.Array], params: Any, x: jax.Array) -> Any:
        """All layers in turn."""
        body = self.checkpointed(layer)
        if self.scanned:
            return jax.lax.scan(lambda x, p: (body(p, x), None), x, params)[0]
        for p in params:
            x = body(p, x)
        return x


def shape(*sizes: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    """The type of an array."""
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def draw_form(d: Draw) -> Form:
    """Element types, recomputation and the form of the layers."""
    kind = d.word("mixed", "mixed", "bf16", "f32")
    compute = "float32" if kind == "f32" else "bfloat16"
    weights = "bfloat16" if kind == "bf16" else "float32"
    remat = d.word("", "", "checkpoint", "checkpoint of dots")
    if d.deep:
        d.words.append("unrolled")
        return Form(compute, weights, remat, scanned=False, layers=d.one(6, 8, 12))
    scanned = d.word("scanned", "unrolled") == "scanned"
    layers = d.one(2, 3, 4, 6) if scanned else d.one(1, 1, 2)
    return Form(compute, weights, remat, scanned, layers)


def cross_entropy(logits: jax.Array, targets: jax.Array, form: str) -> jax.Array:
    """The mean cross entropy: by picked logits, by all probabilities, or by one-hot targets."""
    logits = logits.astype(jnp.float32)
    if form == "log_softmax":
        scores = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], -1))
    if form == "one-hot loss":
        hit = jax.nn.one_hot(targets, logits.shape[-1])
        return -jnp.mean(jnp.sum(hit * jax.nn.log_softmax(logits), -1))
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def sgd(params: Any, moments: Any, count: jax.Array, gradients: Any) -> Any:
    """Gradient descent."""
    return (
        jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, gradients),
        moments,
        count + 1,
    )


def optimizer(d: Draw, form: Form) -> tuple[Callable[..., Any], Callable[..., Any], float]:
    """The update, the shapes of its moments, and bytes per parameter of weights and moments."""
    name = d.word("sgd", "momentum", "adam", "adam", "adamw", "adafactor")
    weight = 2.0 if form.weights == "bfloat16" else 4.0
    if name == "sgd":
        return sgd, lambda params: {}, 2 * weight
    if name == "momentum":
        return functools.partial(momentum, rate=0.1), momentum_shapes, 2 * weight + 4
    if name == "adafactor":
        scanned = ("layers",) if form.scanned else ()

        def update(params: Any, moments: Any, count: jax.Array, gradients: Any) -> Any:
            wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
            new, moments, count = adafactor(params, moments, count, wide, 0.01, scanned)
            cast = jax.tree.map(lambda n, p: n.astype(p.dtype), new, params)
            return cast, moments, count

        return update, functools.partial(adafactor_moments, scanned=scanned), 2 * weight
    rule = adam if name == "adam" else adamw
    return functools.partial(rule, rate=1e-3), adam_moments, 2 * weight + 8


#: Devices, and meshes of their slices; TPU v5e and four by four are the most common.
HARDWARE = ("tpu-v5e", "tpu-v5e", "tpu-v5e", "tpu-v6e", "tpu-v4")
MESHES = (
    "data=4,model=4", "data=4,model=4", "data=4,model=4", "data=16", "data=8,model=2",
    "data=2,model=8", "data=4,model=2", "data=2,fsdp=4,model=2",
)  # fmt: skip
#: The devices among which a batch is divided when its size is drawn.
DEVICES = 16
#: Most bytes of parameters, gradients and moments that one device would hold whole.
MOST_STATE = 10 * GIB


def batch_of(d: Draw, form: Form, kept: float, least: int = 16) -> int:
    """A batch of which ``kept`` elements each make a drawn share of a device's memory."""
    wide = 2.0 if form.compute == "bfloat16" else 4.0
    room = d.between(0.15, 4.0) * GIB * DEVICES / (kept * wide)
    return int(min(max(room // least, 1), 256)) * least


def strategies(batch: Sequence[str], weights: dict[str, Weight]) -> Strategies:
    """Experts' strategies: those of the zoo's transformers for any program."""
    wide = [(path, w.wide) for path, w in weights.items() if w.wide]
    split = [(path, w.split) for path, w in weights.items() if w.split]

    def plan(rows: str = "", width: str = "", parts: str = "") -> list[tuple[str, int, str]]:
        steps = [(path, 0, rows) for path in batch if rows]
        steps += [(*place, parts) for place in split if parts]
        return steps + [(*place, width) for place in wide if width]

    return {
        "data parallel": plan("all"),
        "FSDP": plan("all", "all"),
        "FSDP over one axis": plan("all", "last"),
        "FSDP + Megatron": plan("first", "first", "last"),
        "Megatron": plan("first", parts="last"),
        "tensor parallel": plan(parts="all"),
    }


@dataclasses.dataclass(frozen=True)
class Layer:
    """A mixer and a feed beside residual connections."""

    mixer: Block
    feed: Block
    #: ``rms norm``, ``layer norm`` or ``adaLN``.
    norm: str
    width: int

    def weights(self) -> dict[str, Weights]:
        """The weights of both blocks and of their norms."""
        scale = {"before": Weight((self.width,), -1), "between": Weight((self.width,), -1)}
        norms = scale | {f"{name}_bias": w for name, w in scale.items()}
        if self.norm == "rms norm":
            norms = scale
        elif self.norm == "adaLN":
            norms = {"modulation": Weight((self.width, 6, self.width), -3, -1)}
        return {"norms": norms, "mixer": self.mixer.weights, "feed": self.feed.weights}

    def apply(self, p: Any, x: jax.Array, condition: jax.Array | None) -> jax.Array:
        """``x : [batch, sequence, width]``; ``condition : [batch, width]`` for adaLN."""
        norms = p["norms"]
        if self.norm == "adaLN":
            assert condition is not None
            m = product("bd,dte->tbe", jax.nn.silu(condition), norms["modulation"])[:, :, None]
            x = x + m[2] * self.mixer.apply(p["mixer"], layer_norm(x) * (1 + m[0]) + m[1])
            return x + m[5] * self.feed.apply(p["feed"], layer_norm(x) * (1 + m[3]) + m[4])
        x = x + self.mixer.apply(p["mixer"], self.normed(norms, "before", x))
        return x + self.feed.apply(p["feed"], self.normed(norms, "between", x))

    def normed(self, norms: Params, name: str, x: jax.Array) -> jax.Array:
        """A norm with weights."""
        if self.norm == "rms norm":
            return rms(x, norms[name])
        return layer_norm(x, norms[name], norms[f"{name}_bias"])


def paths(prefix: str, weights: Any) -> dict[str, Weight]:
    """The weights of nested dicts by patterns of their paths."""
    found: dict[str, Weight] = {}
    for name, entry in weights.items():
        path = f"{prefix}['{name}']"
        found |= {path: entry} if isinstance(entry, Weight) else paths(path, entry)
    return found


def elements(weights: Any) -> int:
    """The number of elements of all weights."""
    return sum(math.prod(w.shape) for w in paths("", weights).values())


WIDTHS = (512, 768, 1024, 1024, 1280, 1536, 2048, 2048, 2560, 3072, 4096)
VOCABULARIES = (8192, 32000, 32128, 50257, 50257, 65536, 128256)
SEQUENCES = (128, 197, 256, 512, 577, 1000, 1024, 1024, 2048, 2048, 4096)


def sequence_model(d: Draw) -> tuple[Model, Strategies]:
    """A train step of a language model, or of a model of patches (diffusion, classification)."""
    form = draw_form(d)
    task = d.word("language model", "language model", "classifier", "diffusion")
    language = task == "language model"
    width, sequence = d.one(*WIDTHS), d.one(*SEQUENCES if language else SEQUENCES[:7])
    causal = language and d.one(True, True, True, False)
    mix = d.one(attention, attention, attention, recurrence, state_space)
    norm = d.word("adaLN") if task == "diffusion" else d.word("rms norm", "layer norm")
    mixer = mix(d, width, sequence, causal=causal)
    feed = d.one(mlp, mlp, mlp, experts)(d, width, sequence)
    layer = Layer(mixer, feed, norm, width)
    vocabulary = d.one(*VOCABULARIES) if language else 1000
    update, moments, per_parameter = optimizer(d, form)
    size = elements(layer.weights())
    while form.layers > 1 and form.layers * size * per_parameter > MOST_STATE:
        form = dataclasses.replace(form, layers=form.layers - 1)
    d.words += [f"width {width}", f"{sequence} tokens", f"{form.layers} layers"]
    if causal:
        d.words.append("causal")
    weights: dict[str, Any] = {"final": Weight((width,), -1)}
    tied = language and bool(d.word("", "tied"))
    patch = d.one(588, 768, 1024)
    if language:
        d.words.append(f"vocabulary {vocabulary}")
        weights["table"] = Weight((vocabulary, width), -1, -2)
    else:
        weights["patches"] = Weight((patch, width), -1)
        weights["positions"] = Weight((sequence, width), -1)
    if not tied:
        last = patch if task == "diffusion" else vocabulary
        weights["head"] = Weight((width, last), -2, -1)
    # The layers' weights have no leading dimension here: dimensions count from the last.
    known = paths("params*", weights) | paths("params['layers']*", layer.weights())
    loss_form = d.word("logsumexp", "log_softmax", "one-hot loss") if task != "diffusion" else "mse"
    scale = width**0.5 if d.one(True, False) else 1.0

    def loss(params: Any, inputs: jax.Array, targets: jax.Array, *more: jax.Array) -> jax.Array:
        condition = more[0].astype(form.compute) if more else None
        if language:
            x = params["table"][inputs].astype(form.compute) * scale
        else:
            x = product("bsc,cd->bsd", inputs.astype(form.compute), params["patches"])
            x = x + params["positions"].astype(x.dtype)
        x = form.run(lambda p, x: layer.apply(p, x, condition), params["layers"], x)
        x = rms(x, params["final"])
        if task == "classifier":
            x = jnp.mean(x, 1)
        if tied:
            logits = product("...d,vd->...v", x, params["table"])
        else:
            logits = product("...d,dv->...v", x, params["head"])
        if task == "diffusion":
            return jnp.mean((logits.astype(jnp.float32) - targets) ** 2)
        return cross_entropy(logits, targets, loss_form)

    kept = layer.mixer.kept + layer.feed.kept + 6 * width
    kept = kept * (form.layers if not form.remat else 1 + 0.2 * form.layers)
    kept += 3 * vocabulary if language else 2 * patch
    batch = batch_of(d, form, kept * sequence)
    d.words.append(f"batch {batch}")
    params = form.shapes({k: w for k, w in weights.items() if isinstance(w, Weight)})
    params["layers"] = form.repeated({k: form.shapes(w) for k, w in layer.weights().items()})
    ids = shape(batch, sequence, dtype="int32")
    arguments: tuple[Any, ...] = (ids, ids)
    if task == "classifier":
        arguments = shape(batch, sequence, patch), shape(batch, dtype="int32")
    elif task == "diffusion":
        image = shape(batch, sequence, patch)
        arguments = image, image, shape(batch, width)
    names = ("inputs", "targets", "condition")[: len(arguments)]
    return trained(loss, names, update, params, moments(params), arguments), strategies(
        names, known
    )


def trained(
    loss: Callable[..., Any], names: Sequence[str], update: Any, params: Any, moments: Any,
    arguments: Sequence[Any],
) -> Model:  # fmt: skip
    """A train step that donates parameters, moments and the count of steps."""
    # The arguments of the batch get the names that strategies use.
    if len(names) == 3:

        def named(params: Any, inputs: Any, targets: Any, condition: Any) -> Any:
            return loss(params, inputs, targets, condition)

        step = train_step(named, update)
    else:

        def pair(params: Any, inputs: Any, targets: Any) -> Any:
            return loss(params, inputs, targets)

        step = train_step(pair, update)
    count = shape(dtype="int32")
    return Model("stranger", step, (params, moments, count, *arguments), donate=(0, 1, 2))


def image_model(d: Draw) -> tuple[Model, Strategies]:
    """A train step of convolutions and group norms: a classifier, or a denoiser."""
    form = dataclasses.replace(draw_form(d), scanned=False)
    d.words[:] = [w for w in d.words if w not in ("scanned", "unrolled")]
    task = d.word("image classifier", "image denoiser")
    channels = d.one(64, 96, 128, 192, 256)
    size = d.one(28, 32, 56, 64, 128)
    stages = d.one(1, 2, 2, 3)
    update, moments, _ = optimizer(d, form)
    widths = [channels * 2**stage for stage in range(stages)]
    weights: dict[str, Any] = {"stem": Weight((3, 3, 4, channels), -1)}
    before = channels
    for stage, width in enumerate(widths):
        weights[f"stage{stage}"] = {
            "norm_in": Weight((before,), -1), "first": Weight((3, 3, before, width), -1),
            "norm_out": Weight((width,), -1), "second": Weight((3, 3, width, width), -1),
            "skip": Weight((1, 1, before, width), -1), "time": Weight((256, width), -1),
        }  # fmt: skip
        before = width
    last = 1000 if task == "image classifier" else 4
    weights["head"] = Weight((before, last), -2, -1)

    def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=layout
        )

    def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
        batch, height, width, _ = x.shape
        wide = x.astype(jnp.float32).reshape(batch, height, width, 32, -1)
        mean = jnp.mean(wide, (1, 2, 4), keepdims=True)
        wide = (wide - mean) * jax.lax.rsqrt(jnp.var(wide, (1, 2, 4), keepdims=True) + 1e-5)
        return jax.nn.silu(wide.reshape(x.shape) * weight).astype(x.dtype)

    def block(p: Params, x: jax.Array, time: jax.Array, stride: int) -> jax.Array:
        y = convolved(normed(x, p["norm_in"]), p["first"], stride)
        y = y + product("bt,tc->bc", time.astype(x.dtype), p["time"])[:, None, None]
        return convolved(normed(y, p["norm_out"]), p["second"]) + convolved(x, p["skip"], stride)

    def loss(params: Any, inputs: jax.Array, targets: jax.Array, time: jax.Array) -> jax.Array:
        x = convolved(inputs.astype(form.compute), params["stem"])
        for stage in range(stages):
            body = form.checkpointed(functools.partial(block, stride=2 if stage else 1))
            x = body(params[f"stage{stage}"], x, time)
        if task == "image classifier":
            logits = product("bd,dv->bv", jnp.mean(x, (1, 2)), params["head"])
            return cross_entropy(logits, targets, "log_softmax")
        x = product("bhwd,dv->bhwv", x, params["head"])
        return jnp.mean((x.astype(jnp.float32) - targets) ** 2)

    kept = sum(8.0 * w * (size / 2**stage) ** 2 for stage, w in enumerate(widths)) * 2
    batch = batch_of(d, form, kept)
    small = size
    for _ in range(stages - 1):
        small = -(-small // 2)
    d.words += [f"{size} pixels", f"channels {channels}", f"{stages} stages", f"batch {batch}"]
    target = shape(batch, dtype="int32")
    if task == "image denoiser":
        target = shape(batch, small, small, 4)
    arguments = shape(batch, size, size, 4), target, shape(batch, 256)
    params = {
        name: form.shapes(entry)
        if isinstance(entry, dict)
        else shape(*entry.shape, dtype=form.weights)
        for name, entry in weights.items()
    }
    model = trained(
        loss, ("inputs", "targets", "condition"), update, params, moments(params), arguments
    )
    return model, strategies(("inputs", "targets", "condition"), paths("params", weights))


def decoder(d: Draw) -> tuple[Model, Strategies]:
    """A decode step: one token for each sequence, with caches of keys and values."""
    d.word("decode")
    width, length, layers = d.one(*WIDTHS), d.one(1024, 2048, 4096, 8192), d.one(1, 2, 4)
    form = Form("bfloat16", d.one("bfloat16", "bfloat16", "float32"), "", False, layers)
    h = draw_heads(d, width, length, causal=True)
    feed = d.one(mlp, mlp, experts)(d, width, 1)
    norm = d.word("rms norm", "layer norm")
    vocabulary = d.one(*VOCABULARIES)
    layer = Layer(Block("attention", attention_weights(h), lambda p, x: x, 0.0), feed, norm, width)
    weights = {
        "table": Weight((vocabulary, width), -1, -2), "final": Weight((width,), -1),
        "head": Weight((width, vocabulary), -2, -1),
    }  # fmt: skip
    known = paths("params", weights) | paths("params['layers']*", layer.weights())

    def step(params: Any, caches: Any, inputs: jax.Array, position: jax.Array) -> Any:
        x = params["table"][inputs].astype(jnp.bfloat16)[:, None]
        new = []
        for p, (keys, values) in zip(params["layers"], caches, strict=True):
            query, key, value = queries(
                h, p["mixer"], layer.normed(p["norms"], "before", x), position
            )
            keys = jax.lax.dynamic_update_slice_in_dim(keys, key, position, 1)
            values = jax.lax.dynamic_update_slice_in_dim(values, value, position, 1)
            mask = visible(h, 1, length, position)
            mixed = attended(h, query, keys, values, mask)
            x = x + product("bsnk,nkd->bsd", mixed, p["mixer"]["out"])
            x = x + feed.apply(p["feed"], layer.normed(p["norms"], "between", x))
            new.append((keys, values))
        logits = product("bd,dv->bv", rms(x[:, 0], params["final"]), params["head"])
        return jnp.argmax(logits, -1).astype(jnp.int32), new

    # A cache for each device's sequences; heads divide it further.
    cache = 2.0 * layers * length * h.groups * h.size
    batch = batch_of(d, form, cache)
    d.words += [
        f"width {width}", f"cache of {length}", f"{layers} layers", f"batch {batch}",
        f"vocabulary {vocabulary}",
    ]  # fmt: skip
    params: dict[str, Any] = form.shapes(weights)
    params["layers"] = form.repeated({k: form.shapes(w) for k, w in layer.weights().items()})
    entry = shape(batch, length, h.groups, h.size, dtype="bfloat16")
    arguments = (
        params, [(entry, entry)] * layers, shape(batch, dtype="int32"), shape(dtype="int32"),
    )  # fmt: skip
    return Model("stranger", step, arguments, donate=(1,)), strategies(("inputs",), known)


def draw(seed: int) -> Stranger:
    """The program of a seed."""
    d = Draw(seed)
    hardware, mesh = d.one(*HARDWARE), d.one(*MESHES)
    kinds = (sequence_model,) * 4 + (image_model, decoder)
    model, experts_of = sequence_model(d) if d.deep else d.one(*kinds)(d)
    return Stranger(seed, model, experts_of, hardware, mesh, tuple(d.words))
