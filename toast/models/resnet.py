"""ResNet-50 as a train step with momentum (arXiv 1512.03385), strides as in its later versions.

Batch norms use the statistics of the batch.  Their running averages, which only inference needs,
are left out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from toast.errors import TargetError
from toast.models.forms import PRECISIONS
from toast.models.layers import cross_entropy
from toast.models.optimizers import momentum, momentum_shapes, train_step
from toast.models.parameters import shapes_in
from toast.models.registry import Entry, Model, Strategies, entry, training


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Sizes of the network and of its batch."""

    #: Blocks at each resolution.
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    #: Channels inside the first blocks; they double at each resolution, and are four times as many
    #: between blocks.
    channels: int = 64
    classes: int = 1000
    image: int = 224
    batch: int = 2048
    #: A key of :data:`toast.models.forms.PRECISIONS`.
    precision: str = "mixed"
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise TargetError(f"precision {self.precision}: use one of {', '.join(PRECISIONS)}")


RESNET50 = ResNetConfig()
TINY = ResNetConfig(
    blocks=(1, 1), channels=8, classes=16, image=16, batch=8, precision="f32", learning_rate=0.01
)


def parameter_shapes(config: ResNetConfig) -> dict[str, Any]:
    """The pytree of parameter shapes; kernels are HWIO."""
    c = config
    shape = shapes_in(PRECISIONS[c.precision][1])

    def convolution(size: int, before: int, after: int) -> dict[str, Any]:
        return {
            "kernel": shape(size, size, before, after), "norm": shape(after), "bias": shape(after),
        }  # fmt: skip

    levels, width = [], c.channels
    for number, count in enumerate(c.blocks):
        inner = c.channels * 2**number
        blocks = []
        for _ in range(count):
            block = {
                "first": convolution(1, width, inner),
                "second": convolution(3, inner, inner),
                "third": convolution(1, inner, 4 * inner),
            }
            if width != 4 * inner:
                block["skip"] = convolution(1, width, 4 * inner)
            width = 4 * inner
            blocks.append(block)
        levels.append(blocks)
    return {
        "stem": convolution(7, 3, c.channels),
        "levels": levels,
        "head": {"weight": shape(width, c.classes), "bias": shape(c.classes)},
    }


def _convolution(params: dict[str, jax.Array], x: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution and its batch norm, with statistics in float32."""
    kernel = params["kernel"].astype(x.dtype)
    convolved = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    wide = convolved.astype(jnp.float32)
    mean = jnp.mean(wide, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(wide), axis=(0, 1, 2)) - jnp.square(mean)
    scale = params["norm"] * jax.lax.rsqrt(variance + 1e-5)
    return ((wide - mean) * scale + params["bias"]).astype(x.dtype)


def _block(params: dict[str, Any], x: jax.Array, stride: int) -> jax.Array:
    """Three convolutions beside a skip connection."""
    y = jax.nn.relu(_convolution(params["first"], x))
    y = jax.nn.relu(_convolution(params["second"], y, stride))
    y = _convolution(params["third"], y)
    return jax.nn.relu(y + (_convolution(params["skip"], x, stride) if "skip" in params else x))


def loss(
    config: ResNetConfig, params: dict[str, Any], images: jax.Array, labels: jax.Array
) -> jax.Array:
    """Mean cross entropy of the classes of ``images``; ``labels : [batch]`` of int32."""
    x = images.astype(PRECISIONS[config.precision][0])
    x = jax.nn.relu(_convolution(params["stem"], x, 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for number, blocks in enumerate(params["levels"]):
        for place, block in enumerate(blocks):
            x = _block(block, x, 2 if number and not place else 1)
    x = jnp.mean(x, axis=(1, 2))
    logits = x @ params["head"]["weight"].astype(x.dtype)
    return cross_entropy(logits.astype(jnp.float32) + params["head"]["bias"], labels)


def model(config: ResNetConfig, name: str) -> Model:
    """The train step of ``config`` with abstract arguments, for :func:`toast.plan`."""
    c = config
    params = parameter_shapes(c)
    images = shapes_in("float32")(c.batch, c.image, c.image, 3)
    update = functools.partial(momentum, rate=c.learning_rate)
    step = train_step(functools.partial(loss, c), update)
    moments = momentum_shapes(params)
    return training(name, step, params, moments, images, shapes_in("int32")(c.batch))


_BATCH = ("images", 0)
STRATEGIES: Strategies = {
    "data parallel": [(*_BATCH, "all")],
    "FSDP": [(*_BATCH, "all"), ("params['levels']*['kernel']", -1, "all")],
}

ENTRIES: dict[str, Entry] = {
    "resnet50": entry(
        model, "resnet50", "ResNet-50: train step with momentum", (RESNET50, TINY),
        ("batch", "image", "precision"), STRATEGIES,
    ),
}  # fmt: skip
