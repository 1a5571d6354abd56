"""The tiles of images, as XLA's TPU compiler chooses them for programs of the corpus."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import f32
from toast.cost import CostModel
from toast.cost.image_tiles import tiles_of_images
from toast.cost.terms.kernels import ProductWork
from toast.hardware import Mesh, load
from toast.space import Space

IMAGES = (9, 32, 32, 256)


def convolved(images: jax.Array, kernel: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC") if images.ndim == 4 else ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        images, kernel, (1,) * (images.ndim - 2), "SAME", dimension_numbers=numbers
    )


def block(images: jax.Array, kernel: jax.Array, mixing: jax.Array) -> Any:
    features = convolved(-images, kernel)
    pooled = jax.lax.reduce_window(
        features, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
    )
    return jnp.tanh(features).transpose(3, 1, 2, 0), jnp.exp(pooled), jnp.sin(features @ mixing)


def tiles(function: Any, *arguments: Any) -> dict[str, tuple[int, ...]]:
    """The dimensions in tiles of each op's result, by the kind of the op."""
    program = toast.analyze(function, *arguments, platform="tpu", cache=False).program
    return {
        program.kind(program.makers[value]): dims
        for value, dims in tiles_of_images(program, program.kinds).items()
    }


def test_images_and_features_are_in_tiles() -> None:
    dims = tiles(block, f32(*IMAGES), f32(3, 3, 256, 256), f32(256, 8))
    assert dims == {
        "negate": (0, 3), "convolution": (0, 3), "reduce_window": (0, 3), "tanh": (0, 3),
        "exponential": (0, 3), "transpose": (0, 3),
    }  # fmt: skip


def test_values_in_other_tiles_are_apart() -> None:
    """Of the same size and sharding, but before a convolution and before a product."""

    def step(x: jax.Array, y: jax.Array, kernel: jax.Array, mixing: jax.Array) -> Any:
        return convolved(jnp.tanh(x), kernel), jnp.tanh(y) @ mixing

    images = f32(9, 32, 32, 64)
    analysis = toast.analyze(step, images, images, f32(3, 3, 64, 64), f32(64, 64), platform="tpu")
    model = CostModel(Space(analysis, Mesh.parse("d=2"), min_dimensions=0), load("tpu-v5e"))
    program = analysis.program
    one, other = (v for v, op in enumerate(program.makers) if program.kind(op) == "tanh")
    tiled, classes = model.tables.values.tiled, model.tables.value_class
    assert classes[one] != classes[other]
    assert tiled[classes[one]].tolist() == [True, False, False, True]
    assert tiled[classes[other]].all()


def test_arguments_have_tiles_of_their_own() -> None:
    """What else reads them does not follow from the convolution."""

    def step(images: jax.Array, kernel: jax.Array) -> Any:
        return jnp.tanh(images), jnp.sin(convolved(images, kernel))

    dims = tiles(step, f32(*IMAGES), f32(3, 3, 256, 256))
    assert "tanh" not in dims
    assert dims["sine"] == (0, 3)


def test_a_transpose_before_a_convolution_has_its_tiles() -> None:
    def step(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolved(jnp.tanh(images).transpose(0, 2, 3, 1), kernel)

    dims = tiles(step, f32(9, 256, 32, 32), f32(3, 3, 256, 256))
    assert dims["tanh"] == (0, 1)  # images and features


def test_gradients_of_kernels_have_the_tiles_of_images() -> None:
    def gradient(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.grad(lambda k: jnp.sin(convolved(jnp.tanh(images), k)).sum())(kernel)

    dims = tiles(gradient, f32(*IMAGES), f32(3, 3, 256, 128))
    assert dims["tanh"] == dims["cosine"] == (0, 3)


def test_positions_are_in_the_tiles_of_sequences() -> None:
    assert not tiles(lambda x, k: convolved(jnp.tanh(x), k), f32(8, 512, 64), f32(4, 64, 64))


@pytest.mark.parametrize(
    ("sizes", "padding"),
    [
        ((9, 128, 128, 256), 16 / 9),
        ((53, 128, 128, 64), 2 * 56 / 53),
        ((82, 28, 28, 128), 88 / 82),
        ((36, 56, 56, 64), 2 * 40 / 36),
        ((512, 56, 56, 64), 1.0),
        ((248, 64, 64, 64), 256 / 248),
        ((6, 64, 64, 128), 1.0),  # in bands
        ((2, 128, 128, 128), 1.0),
    ],
)
def test_images_are_padded(sizes: tuple[int, ...], padding: float) -> None:
    """As compiled for v5e and v6e."""
    analysis = toast.analyze(
        lambda x, k: convolved(convolved(x, k), k), f32(*sizes), f32(3, 3, sizes[3], sizes[3]),
        platform="tpu", cache=False,
    )  # fmt: skip
    model = CostModel(Space(analysis, Mesh.parse("data=1")), load("tpu-v5e"))
    values, machine = model.tables.values, model.machine
    row = int(np.flatnonzero(values.tiled.sum(axis=1) == 2)[0])
    dims = np.full((1, 1), -1)
    share = machine.lane_padding(
        values.sizes[row], values.tiled[row], values.element[row], dims
    )  # fmt: skip
    assert float(share[0]) == pytest.approx(padding)


def work_of(function: Any, *shapes: Any) -> list[float]:
    """The work of each convolution over that of a product of its size."""
    analysis = toast.analyze(function, *shapes, platform="tpu", cache=False)
    model = CostModel(Space(analysis, Mesh.parse("data=1")), load("tpu-v5e"))
    layout = model.layout(model.space.initial[None])
    held = np.take(layout.held, model.tables.products.op_class, axis=1)
    size = ProductWork().local_size(layout, held)
    return list(ProductWork().image_share(layout, held, size)[0].tolist())


@pytest.mark.parametrize(
    ("sizes", "work"),
    [
        ((56, 32, 32, 128), 1.0),
        ((53, 32, 32, 128), 56 / 53),
        ((56, 32, 32, 64), 2 * 9 / 10),  # nine halves of the unit's depth, not four and a half
        ((256, 32, 32, 64), 0.5),  # images in lanes: 64 features of the result are not padded
        ((4, 32, 32, 128), 1.5),  # in bands
        ((53, 512, 64), 56 / 53),  # sequences
    ],
)
@pytest.mark.parametrize("channels_first", [False, True])
def test_work_of_convolutions(sizes: tuple[int, ...], work: float, channels_first: bool) -> None:
    """As compiled for v5e: in each of these layouts, the cycles of single convolutions."""
    features, slides = sizes[-1], len(sizes) - 2
    if not channels_first:
        kernel = (3,) * slides + (features, features)
        assert work_of(convolved, f32(*sizes), f32(*kernel)) == [pytest.approx(work)]
        return
    images = (sizes[0], features, *sizes[1:-1])

    def plain(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv(images, kernel, (1,) * slides, "SAME")

    kernel = (features, features) + (3,) * slides
    assert work_of(plain, f32(*images), f32(*kernel)) == [pytest.approx(work)]


def test_few_features_are_multiplied_at_several_positions() -> None:
    assert work_of(convolved, f32(56, 32, 32, 4), f32(3, 3, 4, 128)) == [1.0]


def test_work_of_gradients() -> None:
    """With images in lanes, that of images pads features, and that of kernels as products do."""
    one, *gradients = work_of(
        jax.grad(lambda x, k: jnp.sin(convolved(x, k)).sum(), (0, 1)),
        f32(256, 32, 32, 64), f32(3, 3, 64, 64),
    )  # fmt: skip
    assert one == 0.5
    assert gradients == [1.0, 1.0]


@pytest.mark.parametrize("groups", [8, 128])
def test_groups_of_features_are_no_features_of_one_product(groups: int) -> None:
    def grouped(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )  # fmt: skip

    assert work_of(grouped, f32(56, 32, 32, 128), f32(3, 3, 128 // groups, 128)) == [1.0]
