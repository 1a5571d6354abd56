"""Train steps of equal layers, as people write them: the programs of ``recomputation.py``.

They are plain JAX and share no code with the zoo but the optimizers, because prices were tuned on
the zoo.  Half of them are scanned, and half mark their layers with ``toast.checkpoint``.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import grammar
import jax
import jax.numpy as jnp
from grammar import Heads, Params, Stranger, Weight, Weights, layer_norm, product, rms, shape
from jax.ad_checkpoint import checkpoint_name

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.models.optimizers import adam, adam_moments, adamw, momentum, momentum_shapes

#: Bytes of device memory matter as soon as batches fill them: v5e has the least.
HARDWARE, MESH = "tpu-v5e", "data=4,model=4"

Layer = Callable[[Params, jax.Array, jax.Array | None], jax.Array]
Optimizer = tuple[Callable[..., Any], Callable[..., Any]]

ADAM: Optimizer = functools.partial(adam, rate=1e-3), adam_moments
ADAMW: Optimizer = functools.partial(adamw, rate=1e-3), adam_moments
MOMENTUM: Optimizer = functools.partial(momentum, rate=0.1), momentum_shapes


@dataclasses.dataclass(frozen=True)
class Stack:
    """A train step of equal layers."""

    name: str
    #: Of a layer.
    weights: Weights
    #: The layer of its weights, ``x : [batch, sequence, width]`` and a condition.
    layer: Layer
    layers: int
    scanned: bool
    #: Whether ``toast.checkpoint`` marks the layers; else TOAST finds them.
    marked: bool
    width: int
    sequence: int
    batch: int
    #: Of a language model; 0 for a model of patches.
    vocabulary: int = 0
    #: Whether the head is the table of the vocabulary.
    tied: bool = False
    #: Elements of a patch.
    patch: int = 0
    #: Classes of a classifier; without them, patches are denoised under a condition.
    classes: int = 0
    #: The largest logit.
    cap: float = 0.0
    #: Heads of a bias that all layers add to their scores: it is the condition.
    biased: int = 0
    optimizer: Optimizer = ADAMW
    loss: str = "logsumexp"

    @property
    def words(self) -> tuple[str, ...]:
        """What it is made of."""
        return (
            self.name, f"{self.layers} layers", "scanned" if self.scanned else "unrolled",
            "marked" if self.marked else "found", f"width {self.width}",
            f"{self.sequence} tokens", f"batch {self.batch}",
        )  # fmt: skip

    @property
    def form(self) -> grammar.Form:
        """Products in bfloat16, weights in float32."""
        return grammar.Form("bfloat16", "float32", "", self.scanned, self.layers)

    def outside(self) -> Weights:
        """The weights besides those of the layers."""
        weights = {"final": Weight((self.width,), -1)}
        if self.vocabulary:
            weights["table"] = Weight((self.vocabulary, self.width), -1, -2)
        else:
            weights["patches"] = Weight((self.patch, self.width), -1)
            weights["positions"] = Weight((self.sequence, self.width), -1)
        if not self.tied:
            last = self.vocabulary or self.classes or self.patch
            weights["head"] = Weight((self.width, last), -2, -1)
        if self.biased:
            weights["bias"] = Weight((2 * self.sequence - 1, self.biased), 0, -1)
        return weights

    def loss_of(
        self, params: Any, inputs: jax.Array, targets: jax.Array, *more: jax.Array
    ) -> jax.Array:
        """The mean loss of a batch."""
        condition = more[0].astype(jnp.bfloat16) if more else None
        if self.biased:
            apart = jnp.arange(self.sequence)[:, None] - jnp.arange(self.sequence)
            bias = params["bias"][apart + self.sequence - 1]
            condition = jnp.moveaxis(bias, -1, 0)
        if self.vocabulary:
            x = params["table"][inputs].astype(jnp.bfloat16)
        else:
            x = product("bsc,cd->bsd", inputs.astype(jnp.bfloat16), params["patches"])
            x = x + params["positions"].astype(x.dtype)

        def layer(p: Params, x: jax.Array) -> jax.Array:
            return self.layer(p, x, condition)

        # The default of jax.checkpoint, a barrier before what is computed again, in every program.
        body = toast.checkpoint(layer) if self.marked else layer
        x = rms(self.form.run(body, params["layers"], x), params["final"])
        if self.classes:
            x = jnp.mean(x, 1)
        if self.tied:
            logits = product("...d,vd->...v", x, params["table"])
        else:
            logits = product("...d,dv->...v", x, params["head"])
        if self.cap:
            logits = self.cap * jnp.tanh(logits / self.cap)
        if self.vocabulary or self.classes:
            return grammar.cross_entropy(logits, targets, self.loss)
        return jnp.mean((logits.astype(jnp.float32) - targets) ** 2)

    def stranger(self, seed: int) -> Stranger:
        """The train step as a program of the corpus."""
        ids = shape(self.batch, self.sequence, dtype="int32")
        arguments: tuple[Any, ...] = (ids, ids)
        if self.patch:
            image = shape(self.batch, self.sequence, self.patch)
            labels = shape(self.batch, dtype="int32")
            condition = shape(self.batch, self.width)
            arguments = (image, labels) if self.classes else (image, image, condition)
        names = ("inputs", "targets", "condition")[: len(arguments)]
        form, (update, moments) = self.form, self.optimizer
        params: dict[str, Any] = form.shapes(self.outside())
        params["layers"] = form.repeated(form.shapes(self.weights))
        model = grammar.trained(self.loss_of, names, update, params, moments(params), arguments)
        known = grammar.paths("params*", self.outside())
        known |= grammar.paths("params['layers']*", self.weights)
        return Stranger(seed, model, grammar.strategies(names, known), HARDWARE, MESH, self.words)


def heads_of(width: int, heads: int, groups: int, size: int, **more: Any) -> Heads:
    """Attention of so many heads; ``more`` are fields of :class:`Heads`."""
    form = "separate qkv" if groups == heads else "grouped einsum"
    plain = {"causal": False, "window": 0, "bias": False, "qk_norm": False, "turned": False}
    return Heads(width, heads, groups, size, **{**plain, "form": form, **more})


def projected(spec: str, x: jax.Array, weight: jax.Array, name: str) -> jax.Array:
    """A product with a name that MaxText's policies know."""
    projection: jax.Array = checkpoint_name(product(spec, x, weight), name)
    return projection


def queries(p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of ``x``."""
    query = projected("bsd,dnk->bsnk", x, p["query"], "query_proj")
    key = projected("bsd,dnk->bsnk", x, p["key"], "key_proj")
    return query, key, projected("bsd,dnk->bsnk", x, p["value"], "value_proj")


def attention(h: Heads, p: Params, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Attention; ``bias : [heads, queries, keys]`` is added to its scores."""
    query, key, value = queries(p, x)
    if h.bias:
        query = query + p["query_bias"].astype(x.dtype)
        value = value + p["value_bias"].astype(x.dtype)
    if h.qk_norm:
        query, key = rms(query, p["query_norm"]), rms(key, p["key_norm"])
    if h.turned:
        query, key = grammar.rotary(query), grammar.rotary(key)
    mask = grammar.visible(h, x.shape[1], x.shape[1]) if h.causal else None
    if bias is None:
        context = grammar.attended(h, query, key, value, mask)
    else:
        scores = jnp.einsum("bsnk,btnk->bnst", query, key).astype(jnp.float32) + bias
        weights = jax.nn.softmax(scores, -1).astype(x.dtype)
        context = jnp.einsum("bnst,btnk->bsnk", weights, value)
    return projected("bsnk,nkd->bsd", checkpoint_name(context, "context"), p["out"], "out_proj")


def norms(width: int, *names: str, biased: bool = True) -> Weights:
    """The weights of norms."""
    weights = {name: Weight((width,), -1) for name in names}
    return weights | {f"{name}_bias": w for name, w in weights.items() if biased}


def plain_mlp(width: int, hidden: int) -> Weights:
    """The weights of an MLP with biases."""
    return {
        "up": Weight((width, hidden), -2, -1), "up_bias": Weight((hidden,), 0, -1),
        "down": Weight((hidden, width), -1, -2), "down_bias": Weight((width,), -1),
    }  # fmt: skip


def mlp(p: Params, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """A plain MLP, or a gated one."""
    up = projected("bsd,dh->bsh", x, p["up"], "mlpwi_0")
    if "gate" in p:
        gate = projected("bsd,dh->bsh", x, p["gate"], "mlpwi_1")
        return projected("bsh,hd->bsd", activation(gate) * up, p["down"], "mlpwo")
    hidden = activation(up + p["up_bias"].astype(x.dtype))
    down = projected("bsh,hd->bsd", hidden, p["down"], "mlpwo")
    return down + p["down_bias"].astype(x.dtype)


def gated_mlp(width: int, hidden: int) -> Weights:
    """The weights of a gated MLP."""
    weights = {name: Weight((width, hidden), -2, -1) for name in ("up", "gate")}
    return weights | {"down": Weight((hidden, width), -1, -2)}


def bert(width: int, heads: int, hidden: int) -> tuple[Weights, Layer]:
    """BERT: norms after the sums, biases, an MLP with GELU."""
    h = heads_of(width, heads, heads, width // heads, bias=True)

    def layer(p: Params, x: jax.Array, condition: jax.Array | None) -> jax.Array:
        x = layer_norm(x + attention(h, p, x), p["first"], p["first_bias"])
        return layer_norm(x + mlp(p, x, jax.nn.gelu), p["second"], p["second_bias"])

    weights = grammar.attention_weights(h) | plain_mlp(width, hidden)
    return weights | norms(width, "first", "second"), layer


def vit(width: int, heads: int, hidden: int) -> tuple[Weights, Layer]:
    """ViT: norms before the blocks, biases."""
    h = heads_of(width, heads, heads, width // heads, bias=True)
    exact = functools.partial(jax.nn.gelu, approximate=False)

    def layer(p: Params, x: jax.Array, condition: jax.Array | None) -> jax.Array:
        x = x + attention(h, p, layer_norm(x, p["first"], p["first_bias"]))
        return x + mlp(p, layer_norm(x, p["second"], p["second_bias"]), exact)

    weights = grammar.attention_weights(h) | plain_mlp(width, hidden)
    return weights | norms(width, "first", "second"), layer


def dit(width: int, heads: int, hidden: int) -> tuple[Weights, Layer]:
    """DiT: the condition scales, shifts and gates both blocks (adaLN-zero)."""
    h = heads_of(width, heads, heads, width // heads)

    def layer(p: Params, x: jax.Array, condition: jax.Array | None) -> jax.Array:
        assert condition is not None
        modulation = product("bd,dte->tbe", jax.nn.silu(condition), p["modulation"])[:, :, None]
        shift, scale, gate, shift2, scale2, gate2 = modulation
        x = x + gate * attention(h, p, layer_norm(x) * (1 + scale) + shift)
        return x + gate2 * mlp(p, layer_norm(x) * (1 + scale2) + shift2, jax.nn.gelu)

    weights = grammar.attention_weights(h) | plain_mlp(width, hidden)
    return weights | {"modulation": Weight((width, 6, width), -3, -1)}, layer


def decoder(h: Heads, hidden: int, *, parallel: bool = False) -> tuple[Weights, Layer]:
    """A decoder as Llama's; or with attention and MLP side by side, as PaLM's."""

    def layer(p: Params, x: jax.Array, condition: jax.Array | None) -> jax.Array:
        normed = rms(x, p["first"])
        if parallel:
            return x + attention(h, p, normed) + mlp(p, normed, jax.nn.silu)
        x = x + attention(h, p, normed)
        return x + mlp(p, rms(x, p["second"]), jax.nn.silu)

    weights = grammar.attention_weights(h) | gated_mlp(h.width, hidden)
    names = ("first",) if parallel else ("first", "second")
    return weights | norms(h.width, *names, biased=False), layer


def sandwich(h: Heads, hidden: int) -> tuple[Weights, Layer]:
    """Gemma 2: norms before and after both blocks, an MLP gated by GELU."""

    def layer(p: Params, x: jax.Array, condition: jax.Array | None) -> jax.Array:
        x = x + rms(attention(h, p, rms(x, p["first"])), p["after_first"])
        return x + rms(mlp(p, rms(x, p["second"]), jax.nn.gelu), p["after_second"])

    weights = grammar.attention_weights(h) | gated_mlp(h.width, hidden)
    names = ("first", "after_first", "second", "after_second")
    return weights | norms(h.width, *names, biased=False), layer


class Stated(grammar.Draw):
    """Choices that are stated, not drawn."""

    def __init__(self, *choices: Any) -> None:
        super().__init__(0)
        self._choices = list(choices)

    def one(self, *options: Any) -> Any:
        """The next choice, whatever the options."""
        return self._choices.pop(0)


def mixture(h: Heads, sequence: int) -> tuple[Weights, Layer]:
    """A decoder of eight experts, of which every token takes two."""
    experts = grammar.experts(Stated("dense experts", 8, 2, 2 * h.width), h.width, sequence)

    def layer(p: Params, x: jax.Array, condition: jax.Array | None) -> jax.Array:
        x = x + attention(h, p, rms(x, p["first"]))
        return x + experts.apply(p, rms(x, p["second"]))

    weights = grammar.attention_weights(h) | experts.weights
    return weights | norms(h.width, "first", "second", biased=False), layer


def t5(width: int, heads: int, hidden: int) -> tuple[Weights, Layer]:
    """T5's encoder: all layers add the same bias to their scores."""
    h = heads_of(width, heads, heads, width // heads)

    def layer(p: Params, x: jax.Array, condition: jax.Array | None) -> jax.Array:
        x = x + attention(h, p, rms(x, p["first"]), condition)
        return x + mlp(p, rms(x, p["second"]), jax.nn.gelu)

    weights = grammar.attention_weights(h) | gated_mlp(width, hidden)
    return weights | norms(width, "first", "second", biased=False), layer


def stacks() -> Mapping[int, Stack]:
    """The programs by number: the odd ones are held out."""
    llama = heads_of(2048, 16, 4, 128, causal=True, turned=True)
    palm = heads_of(2048, 16, 1, 128, causal=True, turned=True)
    gemma = heads_of(2304, 8, 4, 256, causal=True, turned=True)
    mixed = heads_of(1024, 16, 4, 64, causal=True, turned=True, qk_norm=True)
    return dict(enumerate([
        Stack("bert", *bert(1024, 16, 4096), 12, True, True, 1024, 512, 256, 30592, tied=True),
        Stack("vit", *vit(1280, 16, 5120), 4, False, False, 1280, 256, 4096, patch=588,
              classes=1000, optimizer=MOMENTUM),
        Stack("dit", *dit(1152, 16, 4608), 4, False, True, 1152, 256, 4096, patch=16,
              optimizer=ADAM),
        Stack("moe", *mixture(mixed, 1024), 6, True, True, 1024, 1024, 128, 32000),
        Stack("gqa decoder", *decoder(llama, 5632), 8, True, False, 2048, 2048, 64, 32000),
        Stack("sandwich decoder", *sandwich(gemma, 9216), 6, True, True, 2304, 2048, 64, 65536,
              tied=True, cap=30.0, optimizer=ADAM),
        Stack("parallel decoder", *decoder(palm, 8192, parallel=True), 3, False, True, 2048, 1024,
              256, 32768, loss="log_softmax"),
        Stack("t5 encoder", *t5(1024, 16, 2816), 8, True, False, 1024, 512, 512, 32128,
              biased=16, loss="one-hot loss"),
    ]))  # fmt: skip
