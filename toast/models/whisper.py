"""Whisper, an encoder of audio and a decoder of text, as a train step (arXiv 2212.04356)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from toast.models.blocks import NAMES, block, block_shapes, norm, norm_shapes, strategies
from toast.models.forms import Form
from toast.models.layers import vocabulary_loss
from toast.models.parameters import repeated, shapes_in
from toast.models.registry import Entry, Model, entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperConfig(Form):
    """Sizes of encoder and decoder; the defaults are those of Whisper large-v3."""

    #: Layers of the encoder, and of the decoder.
    layers: int = 32
    width: int = 1280
    heads: int = 20
    vocabulary: int = 51866
    #: Bands and frames of a spectrogram; the encoder halves the frames.
    bands: int = 128
    frames: int = 3000
    sequence: int = 448
    batch: int = 256
    loss_parts: int = 4


WHISPER_LARGE = WhisperConfig()
TINY = WhisperConfig(
    layers=2, width=32, heads=4, vocabulary=64, bands=8, frames=32, sequence=16, batch=8,
    loss_parts=2, precision="f32",
)  # fmt: skip


def parameter_shapes(config: WhisperConfig) -> dict[str, Any]:
    """The pytree of parameter shapes; kernels are ``[size, before, after]``."""
    c = config
    shape = shapes_in(c.weights)

    def layers(*, cross: bool) -> Any:
        layer = block_shapes(c.weights, c.width, 4 * c.width, c.heads, cross=cross)
        return repeated(layer, c.layers, not c.unroll)

    return {
        "first": {"kernel": shape(3, c.bands, c.width), "bias": shape(c.width)},
        "second": {"kernel": shape(3, c.width, c.width), "bias": shape(c.width)},
        "encoder": layers(cross=False),
        "encoded_norm": norm_shapes(c.weights, c.width),
        "embedding": shape(c.vocabulary, c.width),
        "positions": shape(c.sequence, c.width),
        "decoder": layers(cross=True),
        "final_norm": norm_shapes(c.weights, c.width),
    }


def _convolution(params: dict[str, jax.Array], x: jax.Array, stride: int) -> jax.Array:
    """A convolution along the frames of ``x : [batch, frames, channels]``, and its activation."""
    kernel = params["kernel"].astype(x.dtype)
    convolved = jax.lax.conv_general_dilated(
        x, kernel, (stride,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jax.nn.gelu(convolved + params["bias"].astype(x.dtype))


def _sinusoids(length: int, width: int) -> jax.Array:
    """Fixed positions, ``[length, width]``."""
    half = width // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / (half - 1))
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def loss(
    config: WhisperConfig,
    params: dict[str, Any],
    audio: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """Mean next-token cross entropy.

    ``audio : [batch, frames, bands]`` is a spectrogram; ``tokens, targets : [batch, sequence]`` of
    int32.
    """
    c = config
    x = _convolution(params["first"], audio.astype(c.compute), 1)
    x = _convolution(params["second"], x, 2)
    x = x + _sinusoids(x.shape[1], c.width).astype(x.dtype)
    x = c.run(lambda x, layer: block(layer, x), x, params["encoder"], NAMES)
    encoded = norm(params["encoded_norm"], x)
    y = (params["embedding"][tokens] + params["positions"]).astype(c.compute)
    y = c.run(
        lambda y, layer: block(layer, y, encoded, causal=True), y, params["decoder"], NAMES
    )  # fmt: skip
    y = norm(params["final_norm"], y)
    return vocabulary_loss(y, params["embedding"].T, targets, c.loss_parts)


def model(config: WhisperConfig, name: str) -> Model:
    """The train step of ``config`` with abstract arguments, for :func:`toast.plan`."""
    c = config
    audio = shapes_in("float32")(c.batch, c.frames, c.bands)
    tokens = shapes_in("int32")(c.batch, c.sequence)
    return c.train(name, functools.partial(loss, c), parameter_shapes(c), audio, tokens, tokens)


ENTRIES: dict[str, Entry] = {
    "whisper-large": entry(
        model, "whisper-large", "Whisper large-v3: encoder and decoder, train step",
        (WHISPER_LARGE, TINY),
        ("layers", "batch", "sequence", "unroll", "remat", "offload", "precision", "loss_parts"),
        strategies(
            "tokens", "params['*coder']*['up']", "params['*coder']*['wq']", "params['positions']"
        ),
    ),
}  # fmt: skip
