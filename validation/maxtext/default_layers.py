"""MaxText's own decoder at the end of 2023, which its tables for TPU v5e and v5p measured.

A layer has one norm; attention and a plain MLP both take its result, and their sum is added to the
residual.  MaxText's base.yml of that time gives the sizes of its smallest model, and
``global_parameter_scale`` doubles them in turn: heads and the MLP, then the width, then the layers.
The embedding is also the output projection.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from toast.models import Model, Strategies
from toast.models.attention import attention
from toast.models.forms import Form, product
from toast.models.layers import rms_norm, rotary, vocabulary_loss
from toast.models.parameters import repeated, shapes_in

WIDTH, HEADS, HEAD, HIDDEN, LAYERS, VOCABULARY = 2560, 8, 256, 8192, 16, 32768

#: The results of products, which the policy ``minimal`` keeps.
PRODUCTS = ("query", "key", "value", "attention_output", "up", "mlp_output")
NAMES = (*PRODUCTS, "attention")

#: Dimensions of the width in weights, and those that tensor parallelism shards.
_WIDTH = [("params*['w?']", -3), ("params*['wo']", -1), ("params*['up']", -2),
          ("params*['down']", -1), ("params['embedding']", -1)]  # fmt: skip
_TENSOR = [("params*['w?']", -2), ("params*['up']", -1), ("params['embedding']", -2)]
#: Slices have replicas of all weights.  MaxText shards the width of activations between products
#: for tensor parallelism; sharding the sequence instead sends and keeps as much.
STRATEGIES: Strategies = {
    "FSDP": [
        ("tokens", 0, "slice"), ("tokens", 0, "fsdp"),
        *((*place, "tensor") for place in _TENSOR), *((*place, "fsdp") for place in _WIDTH),
        ("tokens", 1, "tensor"),
    ],
}  # fmt: skip


def loss(form: Form, params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    x = params["embedding"].astype(form.compute)[tokens]
    x = form.run(_layer, x, params["layers"], NAMES)
    x = rms_norm(x, params["final"], 0.0) * x.shape[-1] ** -0.5
    return vocabulary_loss(x, params["embedding"].T, targets, 1)


def _layer(x: jax.Array, layer: Any) -> jax.Array:
    normed = rms_norm(x, layer["norm"], 0.0)
    query, key, value = (
        checkpoint_name(product("bsd,dhk->bshk", normed, layer[weights]), name)
        for weights, name in (("wq", "query"), ("wk", "key"), ("wv", "value"))
    )
    query, key = rotary(query, 1e4), rotary(key, 1e4)
    attended = attention(query[:, :, :, None], key, value)[:, :, :, 0]
    attended = product("bshk,hkd->bsd", attended, layer["wo"])
    up = checkpoint_name(product("bsd,df->bsf", normed, layer["up"]), "up")
    down = product("bsf,fd->bsd", jax.nn.relu(up), layer["down"])
    return x + checkpoint_name(attended, "attention_output") + checkpoint_name(down, "mlp_output")


def build(batch: int, sequence: int, *, scale: int, remat: str = "full") -> Model:
    """The train step; ``remat`` is ``full`` or ``minimal``."""
    thirds, rest = divmod(int(math.log2(scale)), 3)
    wider = 2 ** (thirds + (rest > 0))
    width, layers = WIDTH * 2 ** (thirds + (rest > 1)), LAYERS * 2**thirds
    heads, hidden = HEADS * wider, HIDDEN * wider
    form = Form(batch=batch, remat="+".join(PRODUCTS) if remat == "minimal" else remat)
    shape = shapes_in(form.weights)
    layer = {
        "norm": shape(width), "wq": shape(width, heads, HEAD), "wk": shape(width, heads, HEAD),
        "wv": shape(width, heads, HEAD), "wo": shape(heads, HEAD, width),
        "up": shape(width, hidden), "down": shape(hidden, width),
    }  # fmt: skip
    params = {
        "embedding": shape(VOCABULARY, width), "layers": repeated(layer, layers, scanned=True),
        "final": shape(width),
    }  # fmt: skip
    ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return form.train(f"maxtext-{scale}b", functools.partial(loss, form), params, ids, ids)
