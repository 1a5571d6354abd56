"""Mamba-2, a state-space model, as a train step (arXiv 2405.21060).

A layer has heads with states ``[size, state]``.  A sequence is in chunks: inside a chunk, the layer
is a masked product as in attention; between chunks, a scan carries the states.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from toast.errors import TargetError
from toast.models.forms import Form, product
from toast.models.layers import rms_norm, vocabulary_loss
from toast.models.parameters import repeated, shapes_in
from toast.models.registry import Entry, Model, Strategies, entry

#: The values of a layer that have names for policies of recomputation.
NAMES = ("gate", "input", "mixed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig(Form):
    """Sizes of the model and of its batch; the defaults are those of Mamba-2 1.3B."""

    layers: int = 48
    d_model: int = 2048
    heads: int = 64
    #: The size of a head, and of its state.
    head_size: int = 64
    state: int = 128
    vocabulary: int = 50288
    #: Positions that the convolution of a layer sees.
    window: int = 4
    sequence: int = 4096
    batch: int = 64
    #: Positions of a chunk.
    chunk: int = 256
    loss_parts: int = 8
    remat: str = "gate+input"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence % self.chunk or self.sequence % self.loss_parts:
            raise TargetError(
                f"sequence {self.sequence}: not a multiple of the {self.chunk} positions of a "
                f"chunk and of the {self.loss_parts} parts of the loss"
            )


MAMBA2_1_3B = MambaConfig()
TINY = MambaConfig(
    layers=2, d_model=32, heads=8, head_size=8, state=8, vocabulary=64, sequence=16, batch=8,
    chunk=4, loss_parts=2, precision="f32",
)  # fmt: skip


def parameter_shapes(config: MambaConfig) -> dict[str, Any]:
    """The pytree of parameter shapes."""
    c = config
    shape = shapes_in(c.weights)
    inner = (c.heads, c.head_size)
    layer = {
        "norm": shape(c.d_model),
        "wz": shape(c.d_model, *inner),
        "wx": shape(c.d_model, *inner),
        "wb": shape(c.d_model, c.state),
        "wc": shape(c.d_model, c.state),
        "wt": shape(c.d_model, c.heads),
        "kernel_x": shape(c.window, *inner), "x_bias": shape(*inner),
        "kernel_b": shape(c.window, c.state), "b_bias": shape(c.state),
        "kernel_c": shape(c.window, c.state), "c_bias": shape(c.state),
        "time_bias": shape(c.heads),
        "decay": shape(c.heads),
        "skip": shape(c.heads),
        "mixed_norm": shape(*inner),
        "wo": shape(*inner, c.d_model),
    }  # fmt: skip
    return {
        "embedding": shape(c.vocabulary, c.d_model),
        "layers": repeated(layer, c.layers, not c.unroll),
        "final_norm": shape(c.d_model),
    }


def _convolved(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """A causal convolution of each channel of ``x : [batch, sequence, ...]``, and SiLU."""
    window, sequence = kernel.shape[0], x.shape[1]
    padded = jnp.pad(x, [(0, 0), (window - 1, 0), *((0, 0),) * (x.ndim - 2)])
    parts = (
        padded[:, place : place + sequence] * kernel[place].astype(x.dtype)
        for place in range(window)
    )
    return jax.nn.silu(sum(parts, start=bias.astype(x.dtype)))


def state_space(
    x: jax.Array, decay: jax.Array, b: jax.Array, c: jax.Array, chunk: int
) -> jax.Array:
    """``y`` with ``state = exp(decay) * state + b x`` and ``y = c state`` at every position.

    :param x: ``[batch, sequence, heads, size]``.
    :param decay: ``[batch, sequence, heads]`` of float32, negative.
    :param b: ``[batch, sequence, state]``; ``c`` as well.
    :param chunk: the positions of a chunk, a divisor of the sequence.
    :returns: as ``x``, in float32.
    """
    batch, sequence, heads, size = x.shape
    chunks = sequence // chunk

    def split(part: jax.Array) -> jax.Array:
        return part.reshape(batch, chunks, chunk, *part.shape[2:])

    x, decay, b, c = split(x), split(decay), split(b), split(c)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    lower = jnp.tril(jnp.ones((chunk, chunk), jnp.float32))
    # The decay from the beginning of a chunk to each position, and from position s to l.
    total = jnp.einsum("nqsh,ls->nqlh", decay, lower)
    between = total[:, :, :, None] - total[:, :, None]
    weights = jnp.exp(jnp.where(lower[:, :, None] > 0, between, -jnp.inf))
    scores = dot("nqlz,nqsz->nqls", c, b)[..., None] * weights
    inside = dot("nqlsh,nqshp->nqlhp", scores.astype(x.dtype), x)
    left = jnp.exp(total[:, :, -1:] - total).astype(x.dtype)
    added = dot("nqsz,nqshp->nqhpz", b, x * left[..., None])

    def add(state: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
        shrink, new = part
        return state * jnp.exp(shrink)[..., None, None] + new, state

    parts = jnp.moveaxis(total[:, :, -1], 1, 0), jnp.moveaxis(added, 1, 0)
    start = jnp.zeros((batch, heads, size, b.shape[-1]), jnp.float32)
    _, before = jax.lax.scan(add, start, parts)
    before = jnp.moveaxis(before, 0, 1).astype(x.dtype)
    outside = dot("nqlz,nqhpz->nqlhp", c, before) * jnp.exp(total)[..., None]
    return (inside + outside).reshape(batch, sequence, heads, size)


def _layer(config: MambaConfig, layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """One layer beside its residual connection."""
    normed = rms_norm(x, layer["norm"], 0.0)
    gate = checkpoint_name(product("bsd,dhp->bshp", normed, layer["wz"]), "gate")
    inner = checkpoint_name(product("bsd,dhp->bshp", normed, layer["wx"]), "input")
    inner = _convolved(inner, layer["kernel_x"], layer["x_bias"])
    b, c = (
        _convolved(
            product("bsd,dz->bsz", normed, layer[f"w{name}"]),
            layer[f"kernel_{name}"], layer[f"{name}_bias"],
        )
        for name in ("b", "c")
    )  # fmt: skip
    time = product("bsd,dh->bsh", normed, layer["wt"]).astype(jnp.float32)
    time = jax.nn.softplus(time + layer["time_bias"].astype(jnp.float32))
    decay = -jnp.exp(layer["decay"].astype(jnp.float32)) * time
    mixed = state_space(
        inner * time[..., None].astype(inner.dtype), decay, b, c, config.chunk
    ).astype(x.dtype)
    mixed = mixed + layer["skip"].astype(x.dtype)[:, None] * inner
    mixed = checkpoint_name(mixed, "mixed") * jax.nn.silu(gate)
    # The norm is over all heads.
    square = jnp.mean(jnp.square(mixed.astype(jnp.float32)), axis=(-2, -1), keepdims=True)
    mixed = mixed * jax.lax.rsqrt(square + 1e-5).astype(x.dtype)
    mixed = mixed * layer["mixed_norm"].astype(x.dtype)
    return x + product("bshp,hpd->bsd", mixed, layer["wo"])


def loss(
    config: MambaConfig, params: dict[str, Any], tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """Mean next-token cross entropy; ``tokens, targets : [batch, sequence]`` of int32."""
    c = config
    x = params["embedding"][tokens].astype(c.compute)
    x = c.run(lambda x, layer: _layer(c, layer, x), x, params["layers"], NAMES)
    x = rms_norm(x, params["final_norm"], 0.0)
    return vocabulary_loss(x, params["embedding"].T, targets, c.loss_parts)


def model(config: MambaConfig, name: str) -> Model:
    """The train step of ``config`` with abstract arguments, for :func:`toast.plan`."""
    c = config
    tokens = shapes_in("int32")(c.batch, c.sequence)
    return c.train(name, functools.partial(loss, c), parameter_shapes(c), tokens, tokens)


_BATCH, _WIDTH, _HEADS = ("tokens", 0), ("params['embedding']", 1), ("params['layers']*['wx']", -2)
_VOCABULARY = ("params['embedding']", 0)
STRATEGIES: Strategies = {
    "data parallel": [(*_BATCH, "all")],
    "FSDP": [(*_BATCH, "all"), (*_WIDTH, "all")],
    "Megatron": [(*_BATCH, "first"), (*_HEADS, "last"), (*_VOCABULARY, "last")],
    "FSDP + Megatron": [
        (*_BATCH, "first"), (*_HEADS, "last"), (*_VOCABULARY, "last"), (*_WIDTH, "first"),
    ],
    "tensor parallel": [(*_HEADS, "all"), (*_VOCABULARY, "all")],
}  # fmt: skip

ENTRIES: dict[str, Entry] = {
    "mamba2-1.3b": entry(
        model, "mamba2-1.3b", "Mamba-2 1.3B: a state-space model, train step",
        (MAMBA2_1_3B, TINY),
        ("layers", "batch", "sequence", "unroll", "remat", "offload", "precision", "loss_parts"),
        STRATEGIES,
    ),
}  # fmt: skip
