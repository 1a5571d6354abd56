"""Vision transformers: ViT as a classifier (arXiv 2010.11929), DiT for diffusion (2212.09748)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from toast.errors import TargetError
from toast.models.blocks import (
    NAMES,
    attend,
    attention_shapes,
    block,
    block_shapes,
    dense,
    dense_shapes,
    mlp,
    mlp_shapes,
    norm,
    norm_shapes,
    patches,
    strategies,
)
from toast.models.forms import Form
from toast.models.layers import cross_entropy
from toast.models.parameters import repeated, shapes_in
from toast.models.registry import Entry, Model, entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(Form):
    """Sizes of a transformer on patches of images."""

    layers: int
    width: int
    heads: int
    #: Height and width of images, and of patches.
    image: int
    patch: int
    channels: int = 3
    classes: int = 1000
    batch: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise TargetError(
                f"image {self.image}: not a multiple of the {self.patch} pixels of a patch"
            )

    @property
    def tokens(self) -> int:
        """The number of patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def elements(self) -> int:
        """The elements of a patch."""
        return self.patch**2 * self.channels


VIT_L = ImageConfig(layers=24, width=1024, heads=16, image=224, patch=16)
VIT_H = ImageConfig(layers=32, width=1280, heads=16, image=224, patch=14)
#: DiT-XL/2 on latents of images of 256 x 256.
DIT_XL = ImageConfig(
    layers=28, width=1152, heads=16, image=32, patch=2, channels=4, batch=256, learning_rate=1e-4
)
TINY = ImageConfig(
    layers=2, width=32, heads=4, image=8, patch=2, classes=16, batch=8, precision="f32"
)
TINY_DIT = dataclasses.replace(TINY, channels=4, learning_rate=1e-3)


def classifier_shapes(config: ImageConfig) -> dict[str, Any]:
    """The parameters of ViT, which averages the patches instead of adding a class token."""
    c = config
    layer = block_shapes(c.weights, c.width, 4 * c.width, c.heads)
    return {
        "patches": dense_shapes(c.weights, c.elements, c.width),
        "positions": shapes_in(c.weights)(c.tokens, c.width),
        "layers": repeated(layer, c.layers, not c.unroll),
        "final": norm_shapes(c.weights, c.width),
        "head": dense_shapes(c.weights, c.width, c.classes),
    }


def classifier_loss(
    config: ImageConfig, params: dict[str, Any], images: jax.Array, labels: jax.Array
) -> jax.Array:
    """Mean cross entropy of the classes of ``images``; ``labels : [batch]`` of int32."""
    c = config
    x = dense(params["patches"], patches(images.astype(c.compute), c.patch))
    x = x + params["positions"].astype(x.dtype)
    x = c.run(lambda x, layer: block(layer, x), x, params["layers"], NAMES)
    x = jnp.mean(norm(params["final"], x), axis=1)
    return cross_entropy(dense(params["head"], x).astype(jnp.float32), labels)


def classifier(config: ImageConfig, name: str) -> Model:
    """ViT's train step with abstract arguments, for :func:`toast.plan`."""
    c = config
    images = shapes_in("float32")(c.batch, c.image, c.image, c.channels)
    labels = shapes_in("int32")(c.batch)
    loss = functools.partial(classifier_loss, c)
    return c.train(name, loss, classifier_shapes(c), images, labels)


#: The elements of the sinusoidal embedding of the time.
_WAVES = 256


def diffusion_shapes(config: ImageConfig) -> dict[str, Any]:
    """The parameters of DiT, without the head for variances."""
    c = config
    layer = {
        "attention": attention_shapes(c.weights, c.width, c.heads),
        "mlp": mlp_shapes(c.weights, c.width, 4 * c.width),
        "modulation": dense_shapes(c.weights, c.width, 6 * c.width),
    }
    return {
        "patches": dense_shapes(c.weights, c.elements, c.width),
        "positions": shapes_in(c.weights)(c.tokens, c.width),
        "time": {
            "first": dense_shapes(c.weights, _WAVES, c.width),
            "second": dense_shapes(c.weights, c.width, c.width),
        },
        # The last class is that of images without one.
        "classes": shapes_in(c.weights)(c.classes + 1, c.width),
        "layers": repeated(layer, c.layers, not c.unroll),
        "modulation": dense_shapes(c.weights, c.width, 2 * c.width),
        "head": dense_shapes(c.weights, c.width, c.elements),
    }


def _modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm without parameters of its own; shift and scale are ``[batch, width]``."""
    ones, zeros = jnp.ones(x.shape[-1]), jnp.zeros(x.shape[-1])
    return norm({"norm": ones, "bias": zeros}, x) * (1 + scale[:, None]) + shift[:, None]


def _modulated_block(layer: dict[str, Any], x: jax.Array, condition: jax.Array) -> jax.Array:
    parts = jnp.split(dense(layer["modulation"], jax.nn.silu(condition)), 6, axis=-1)
    normed = _modulated(x, parts[0], parts[1])
    attended = attend(layer["attention"], normed, normed, causal=False)
    x = x + parts[2][:, None] * attended
    return x + parts[5][:, None] * mlp(layer["mlp"], _modulated(x, parts[3], parts[4]))


def diffusion_loss(
    config: ImageConfig,
    params: dict[str, Any],
    images: jax.Array,
    noise: jax.Array,
    time: jax.Array,
    labels: jax.Array,
) -> jax.Array:
    """Mean squared error of the predicted ``noise``, mixed into ``images`` by a cosine schedule.

    ``time : [batch]`` is between 0 and 1, ``labels : [batch]`` are of int32.
    """
    c = config
    angle = (jnp.pi / 2 * time)[:, None, None, None]
    noisy = jnp.cos(angle) * images + jnp.sin(angle) * noise
    x = dense(params["patches"], patches(noisy.astype(c.compute), c.patch))
    x = x + params["positions"].astype(x.dtype)
    frequency = 1000.0 * 10_000.0 ** (-jnp.arange(_WAVES // 2, dtype=jnp.float32) * 2 / _WAVES)
    waves = time[:, None] * frequency
    waves = jnp.concatenate([jnp.cos(waves), jnp.sin(waves)], axis=-1).astype(x.dtype)
    embedded = dense(params["time"]["first"], waves)
    condition = dense(params["time"]["second"], jax.nn.silu(embedded))
    condition = condition + params["classes"][labels].astype(x.dtype)
    x = c.run(
        lambda x, layer: _modulated_block(layer, x, condition), x, params["layers"], NAMES
    )  # fmt: skip
    shift, scale = jnp.split(dense(params["modulation"], jax.nn.silu(condition)), 2, axis=-1)
    predicted = dense(params["head"], _modulated(x, shift, scale)).astype(jnp.float32)
    return jnp.mean(jnp.square(predicted - patches(noise, c.patch)))


def diffusion(config: ImageConfig, name: str) -> Model:
    """DiT's train step with abstract arguments, for :func:`toast.plan`."""
    c = config
    images = shapes_in("float32")(c.batch, c.image, c.image, c.channels)
    time, labels = shapes_in("float32")(c.batch), shapes_in("int32")(c.batch)
    loss = functools.partial(diffusion_loss, c)
    return c.train(name, loss, diffusion_shapes(c), images, images, time, labels)


_STRATEGIES = strategies(
    "images", "params['layers']*['up']", "params['layers']*['wq']", "params['positions']"
)
_OPTIONS = ("layers", "batch", "image", "unroll", "remat", "offload", "precision")

ENTRIES: dict[str, Entry] = {
    "vit-l": entry(
        classifier, "vit-l", "ViT-L/16: train step of a classifier", (VIT_L, TINY), _OPTIONS,
        _STRATEGIES,
    ),
    "vit-h": entry(
        classifier, "vit-h", "ViT-H/14: train step of a classifier", (VIT_H, TINY), _OPTIONS,
        _STRATEGIES,
    ),
    "dit-xl": entry(
        diffusion, "dit-xl", "DiT-XL/2: train step of a diffusion transformer",
        (DIT_XL, TINY_DIT), _OPTIONS, _STRATEGIES,
    ),
}  # fmt: skip
