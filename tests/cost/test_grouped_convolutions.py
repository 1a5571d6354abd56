"""Convolutions whose features are in groups, against kernels that XLA's TPU compiler estimated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.cost import CostModel, break_down
from toast.hardware import Mesh, load
from toast.space import Space

bf16 = jnp.bfloat16


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, bf16)


def convolved(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution with ``kernel : [window, ..., features of a group, features]``."""
    names = ("NHWC", "HWIO", "NHWC") if images.ndim == 4 else ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        images, kernel, (1,) * (images.ndim - 2), "SAME", dimension_numbers=names,
        feature_group_count=images.shape[-1] // kernel.shape[-2],
    )  # fmt: skip


def gradients(images: jax.Array, kernel: jax.Array, result: jax.Array) -> tuple[jax.Array, ...]:
    return jax.vjp(convolved, images, kernel)[1](result)


def milliseconds(function: object, hardware: str, *shapes: jax.ShapeDtypeStruct) -> list[float]:
    """Of each convolution, unsharded."""
    device = load(hardware)
    analysis = toast.analyze(function, *shapes, platform="tpu", cache=False)  # type: ignore[arg-type]
    space = Space(analysis, Mesh.parse("data=4"))
    broken = break_down(CostModel(space, device.as_scheduled_for), space.initial)
    seconds = broken.product_seconds + broken.memory_seconds
    return [
        1e3 * float(seconds[number])
        for number in range(len(analysis.program.ops))
        if analysis.program.kinds[number] == "convolution"
    ]


@pytest.mark.parametrize(
    ("hardware", "images", "window", "compiled"),
    [
        ("tpu-v5e", (32, 28, 28, 256), (7, 7), 0.415),
        ("tpu-v5e", (64, 28, 28, 192), (3, 3), 0.159),
        ("tpu-v5e", (8, 56, 56, 96), (7, 7), 0.219),  # a part of the lanes
        ("tpu-v5e", (64, 512, 768), (31,), 1.05),
        ("tpu-v6e", (128, 14, 14, 384), (5, 5), 0.274),
        ("tpu-v4", (32, 14, 14, 512), (7, 7), 0.156),
        ("tpu-v5p", (32, 28, 28, 256), (7, 7), 0.182),
    ],
)
def test_depthwise_convolutions_multiply_one_place_of_the_window_at_once(
    hardware: str, images: tuple[int, ...], window: tuple[int, ...], compiled: float
) -> None:
    kernel = shape(*window, 1, images[-1])
    (forward,) = milliseconds(convolved, hardware, shape(*images), kernel)
    assert forward == pytest.approx(compiled, rel=0.15)


@pytest.mark.parametrize(
    ("hardware", "images", "window", "compiled"),
    [
        ("tpu-v5e", (32, 28, 28, 256), (7, 7), 0.117),
        ("tpu-v5e", (64, 512, 768), (31,), 0.298),
        ("tpu-v6e", (128, 14, 14, 384), (5, 5), 0.0647),
        ("tpu-v4", (128, 14, 14, 384), (5, 5), 0.182),
        ("tpu-v5p", (32, 28, 28, 256), (7, 7), 0.0548),
    ],
)
def test_gradients_of_depthwise_kernels_are_added_as_they_are_multiplied(
    hardware: str, images: tuple[int, ...], window: tuple[int, ...], compiled: float
) -> None:
    kernel = shape(*window, 1, images[-1])
    found = milliseconds(gradients, hardware, shape(*images), kernel, shape(*images))
    assert min(found) == pytest.approx(compiled, rel=0.5)


def test_groups_are_padded_to_rows_of_tiles_or_the_images_are() -> None:
    """32 features of a group, or 32 images, in 128 lanes: the results take four times as long."""
    images, device = shape(32, 28, 28, 256), load("tpu-v5e")
    (whole,) = milliseconds(convolved, "tpu-v5e", images, shape(3, 3, 256, 256))
    (of_32,) = milliseconds(convolved, "tpu-v5e", images, shape(3, 3, 32, 256))
    stored = 1e3 * 4 * np.prod(images.shape) / device.products.results_per_s
    assert stored < of_32 < 1.3 * stored
    assert of_32 == pytest.approx(0.3135, rel=0.15)
    assert whole == pytest.approx(0.1577, rel=0.05)
    (many,) = milliseconds(convolved, "tpu-v5e", shape(128, 28, 28, 256), shape(3, 3, 32, 256))
    assert many < 2 * of_32  # images fill the lanes


def test_other_hardware_has_products_for_each_feature() -> None:
    (found,) = milliseconds(convolved, "h100", shape(8, 28, 28, 64), shape(3, 3, 1, 64))
    assert np.isfinite(found)
