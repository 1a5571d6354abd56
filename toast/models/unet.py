"""The paper's U-Net (section 5.1, U-Net) as a diffusion model's full Adam train step.

The paper states 9 residual down-sampling blocks, 12 up-sampling blocks, an attention with 32 heads
between them and 3.6B parameters.  These are 3 and 4 blocks at each of 3 resolutions, as in DDPM:
every up-sampling block uses one of the 12 tensors of the down-sampling half.  Widths of 960, 1920
and 3840 and a time embedding of 3840 give 3.64B.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from toast.models.layers import attention
from toast.models.optimizers import adam, adam_moments, train_step
from toast.models.parameters import shapes_in
from toast.models.registry import Entry, Model, Strategies, entry, training


@dataclasses.dataclass(frozen=True)
class UNetConfig:
    """Sizes of the network and of its training images."""

    #: Width at the first resolution.
    channels: int = 960
    #: Widths at the resolutions divided by ``channels``; each resolution is half the previous one.
    multipliers: tuple[int, ...] = (1, 2, 4)
    #: Residual blocks at each resolution in the down-sampling half; the other half has one more.
    blocks: int = 3
    heads: int = 32
    #: Groups of the group norms.
    groups: int = 32
    #: Height and width of images.
    image: int = 64
    image_channels: int = 3
    batch: int = 64
    dtype: str = "bfloat16"
    learning_rate: float = 1e-4


UNET = UNetConfig()

#: A train step small enough to run on CPU devices in a test.
TINY = UNetConfig(
    channels=8,
    multipliers=(1, 2),
    blocks=1,
    heads=4,
    groups=4,
    image=8,
    batch=8,
    dtype="float32",
    learning_rate=1e-3,
)


def parameter_shapes(config: UNetConfig) -> dict[str, Any]:
    """The pytree of parameter shapes: ``jax.ShapeDtypeStruct`` leaves; kernels are HWIO."""
    c = config
    embedding = 4 * c.channels
    widths = [c.channels * multiplier for multiplier in c.multipliers]
    shape = shapes_in(c.dtype)

    def conv(before: int, after: int) -> dict[str, Any]:
        return {"kernel": shape(3, 3, before, after), "bias": shape(after)}

    def dense(before: int, after: int) -> dict[str, Any]:
        return {"weight": shape(before, after), "bias": shape(after)}

    def norm(width: int) -> dict[str, Any]:
        return {"norm": shape(width), "bias": shape(width)}

    def block(before: int, after: int) -> dict[str, Any]:
        parts = {
            "norm": norm(before),
            "first": conv(before, after),
            "time": dense(embedding, after),
            "second_norm": norm(after),
            "second": conv(after, after),
        }
        return parts if before == after else parts | {"skip": dense(before, after)}

    down, skips, width = [], [c.channels], c.channels
    for number, after in enumerate(widths):
        blocks = []
        for _ in range(c.blocks):
            blocks.append(block(width, after))
            width = after
            skips.append(width)
        level: dict[str, Any] = {"blocks": blocks}
        if number + 1 < len(widths):
            level["resample"] = conv(width, width)
            skips.append(width)
        down.append(level)
    middle = {
        "norm": norm(width),
        **{name: shape(width, c.heads, width // c.heads) for name in ("wq", "wk", "wv")},
        "wo": shape(c.heads, width // c.heads, width),
    }
    up = []
    for number, after in reversed(list(enumerate(widths))):
        blocks = []
        for _ in range(c.blocks + 1):
            blocks.append(block(width + skips.pop(), after))
            width = after
        level = {"blocks": blocks}
        if number:
            level["resample"] = conv(width, width)
        up.append(level)
    return {
        "time": {"first": dense(c.channels, embedding), "second": dense(embedding, embedding)},
        "input": conv(c.image_channels, c.channels),
        "down": down,
        "middle": middle,
        "up": up,
        "output": {"norm": norm(width), "conv": conv(width, c.image_channels)},
    }


def convolution(params: dict[str, jax.Array], x: jax.Array, stride: int = 1) -> jax.Array:
    """A 3 x 3 convolution of ``x : [batch, height, width, channels]``."""
    convolved = jax.lax.conv_general_dilated(
        x, params["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return convolved + params["bias"]


def dense(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A linear layer over the last dimension."""
    return x @ params["weight"] + params["bias"]


def group_norm(params: dict[str, jax.Array], x: jax.Array, groups: int) -> jax.Array:
    """Group norm of ``x : [batch, height, width, channels]``, statistics in float32."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    wide = wide - jnp.mean(wide, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(jnp.square(wide), axis=(1, 2, 4), keepdims=True)
    normed = (wide * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape).astype(x.dtype)
    return normed * params["norm"] + params["bias"]


def residual(params: dict[str, Any], x: jax.Array, time: jax.Array, groups: int) -> jax.Array:
    """Two convolutions beside a skip connection; ``time : [batch, 4 * channels]``."""
    h = convolution(params["first"], jax.nn.silu(group_norm(params["norm"], x, groups)))
    h = h + dense(params["time"], jax.nn.silu(time))[:, None, None]
    h = convolution(params["second"], jax.nn.silu(group_norm(params["second_norm"], h, groups)))
    return h + (dense(params["skip"], x) if "skip" in params else x)


def middle(params: dict[str, Any], x: jax.Array, groups: int) -> jax.Array:
    """Self attention over the positions of ``x : [batch, height, width, channels]``."""
    h = group_norm(params["norm"], x, groups).reshape(x.shape[0], -1, x.shape[-1])
    return x + attention(params, h).reshape(x.shape)


def time_embedding(params: dict[str, Any], time: jax.Array, channels: int) -> jax.Array:
    """``[batch, 4 * channels]`` of ``time : [batch]``, between 0 and 1, in float32."""
    half = channels // 2
    frequency = 1000.0 * 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = time[:, None] * frequency
    waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    waves = waves.astype(params["first"]["weight"].dtype)
    return dense(params["second"], jax.nn.silu(dense(params["first"], waves)))


def predict(
    config: UNetConfig, params: dict[str, Any], images: jax.Array, time: jax.Array
) -> jax.Array:
    """The noise in ``images : [batch, height, width, image_channels]`` at ``time : [batch]``."""
    c = config
    embedded = time_embedding(params["time"], time, c.channels)
    x = convolution(params["input"], images)
    skips = [x]
    for level in params["down"]:
        for block in level["blocks"]:
            x = residual(block, x, embedded, c.groups)
            skips.append(x)
        if "resample" in level:
            x = convolution(level["resample"], x, stride=2)
            skips.append(x)
    x = middle(params["middle"], x, c.groups)
    for level in params["up"]:
        for block in level["blocks"]:
            x = residual(block, jnp.concatenate([x, skips.pop()], axis=-1), embedded, c.groups)
        if "resample" in level:
            x = convolution(level["resample"], x.repeat(2, axis=1).repeat(2, axis=2))
    x = jax.nn.silu(group_norm(params["output"]["norm"], x, c.groups))
    return convolution(params["output"]["conv"], x)


def loss(
    config: UNetConfig, params: dict[str, Any], images: jax.Array, noise: jax.Array, time: jax.Array
) -> jax.Array:
    """Mean squared error of the predicted ``noise``, mixed into ``images`` by a cosine schedule."""
    angle = (jnp.pi / 2 * time)[:, None, None, None]
    noisy = jnp.cos(angle) * images + jnp.sin(angle) * noise
    predicted = predict(config, params, noisy.astype(config.dtype), time)
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - noise))


def model(config: UNetConfig, name: str) -> Model:
    """The train step of ``config`` with Adam and abstract arguments, for :func:`toast.plan`."""
    c = config
    params = parameter_shapes(c)
    images = jax.ShapeDtypeStruct((c.batch, c.image, c.image, c.image_channels), jnp.float32)
    return training(
        name,
        train_step(functools.partial(loss, c), functools.partial(adam, rate=c.learning_rate)),
        params,
        adam_moments(params),
        images,
        images,
        jax.ShapeDtypeStruct((c.batch,), jnp.float32),
    )


_BATCH = ("images", 0)
#: The channels between the two convolutions of a block, and heads.
_MODEL = (("params[*['first']['kernel']", -1), ("params['middle']['wq']", -2))
#: The input channels of blocks: the other dimension of every weight.
_WIDTH = ("params[*['first']['kernel']", -2)
_MEGATRON = tuple((*d, "last") for d in _MODEL)
#: Section 5.1.1.
STRATEGIES: Strategies = {
    "data parallel": [(*_BATCH, "all")],
    "FSDP": [(*_BATCH, "all"), (*_WIDTH, "all")],
    "Megatron": [(*_BATCH, "first"), *_MEGATRON],
    "FSDP + Megatron": [(*_BATCH, "first"), *_MEGATRON, (*_WIDTH, "first")],
}

ENTRIES: dict[str, Entry] = {
    "unet": entry(
        model,
        "unet",
        "the paper's U-Net: train step with Adam of a diffusion model",
        (UNET, TINY),
        ("batch", "blocks", "channels", "heads", "image"),
        STRATEGIES,
    ),
}
