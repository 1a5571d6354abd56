"""GPT-3 175B, which is no model of the zoo: blocks with layer norms, biases and plain MLPs.

The sizes are those of MaxText's gpt3-175b.yml.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from toast.models import Model, Strategies, blocks
from toast.models.forms import Form
from toast.models.layers import vocabulary_loss
from toast.models.parameters import repeated, shapes_in

LAYERS, WIDTH, HEADS, VOCABULARY = 96, 12288, 96, 50304

STRATEGIES: Strategies = {"FSDP": [("tokens", 0, "all"), ("params['embedding']", 1, "all")]}


def loss(form: Form, params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy; the embedding is also the output projection."""
    x = (params["embedding"][tokens] + params["positions"]).astype(form.compute)
    x = form.run(_layer, x, params["layers"], blocks.NAMES)
    x = blocks.norm(params["final"], x)
    return vocabulary_loss(x, params["embedding"].T, targets, 1)


def _layer(x: jax.Array, layer: Any) -> jax.Array:
    return blocks.block(layer, x, causal=True)


def build(batch: int, sequence: int) -> Model:
    """The train step."""
    form = Form(batch=batch, remat="full")
    shape = shapes_in(form.weights)
    layer = blocks.block_shapes(form.weights, WIDTH, 4 * WIDTH, HEADS)
    params = {
        "embedding": shape(VOCABULARY, WIDTH), "positions": shape(sequence, WIDTH),
        "layers": repeated(layer, LAYERS, scanned=True),
        "final": blocks.norm_shapes(form.weights, WIDTH),
    }  # fmt: skip
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return form.train("gpt3-175b", functools.partial(loss, form), params, ids, ids)
