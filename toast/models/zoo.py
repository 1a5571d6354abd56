"""The models for ``toast plan NAME``, in full size and in a size that tests can run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from toast.errors import TargetError
from toast.models import (
    gns,
    itx,
    language_models,
    mamba,
    moe,
    resnet,
    transformer,
    unet,
    vision,
    whisper,
)
from toast.models.registry import Entry, Model


def mlp(batch: int = 256, width: int = 32, hidden: int = 64, out: int = 16) -> Model:
    """The two-layer MLP of the paper's Figure 2."""

    def function(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w1) @ w2

    shapes = ((batch, width), (width, hidden), (hidden, out))
    arguments = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    return Model("mlp", function, arguments, learned=(1, 2), sizes={"batch": batch})


def attention(sequence: int = 128, width: int = 32, key: int = 64, value: int = 16) -> Model:
    """The simplified self-attention of the paper's Figure 5: averaging in place of softmax."""

    def function(x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array) -> jax.Array:
        scores = (x @ wk) @ (x @ wq).T
        return (scores / jnp.sum(scores, axis=1)[:, None]) @ (x @ wv)

    shapes = ((sequence, width), (width, key), (width, key), (width, value))
    arguments = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    sizes = {"sequence": sequence}
    return Model("attention", function, arguments, learned=(1, 2, 3), sizes=sizes)


ZOO: Mapping[str, Entry] = {
    **transformer.ENTRIES,
    **gns.ENTRIES,
    **unet.ENTRIES,
    **itx.ENTRIES,
    **moe.ENTRIES,
    **language_models.ENTRIES,
    **vision.ENTRIES,
    **whisper.ENTRIES,
    **mamba.ENTRIES,
    **resnet.ENTRIES,
    "mlp": Entry(
        "the MLP of the paper's Figure 2",
        mlp,
        mlp,
        ("batch",),
        {
            "data parallel": [("x", 0, "all")],
            "Megatron": [("x", 0, "first"), ("w1", 1, "last")],
        },
    ),
    "attention": Entry(
        "the self-attention of the paper's Figure 5",
        attention,
        attention,
        ("sequence",),
        # There are no batch and no heads: strategies shard the sequence, or the widths of weights.
        {
            "sequence parallel": [("x", 0, "all")],
            "Megatron": [("x", 0, "first"), *((w, 1, "last") for w in ("wq", "wk", "wv"))],
            "tensor parallel": [(w, 1, "all") for w in ("wq", "wk", "wv")],
        },
    ),
}


def build(name: str, *, small: bool = False, **options: Any) -> Model:
    """Builds a model of the zoo.

    :param name: its name, a key of :data:`ZOO`.
    :param small: whether to build its small form, which runs on CPU devices.
    :param options: sizes of the model (``layers``, ``batch``, ``edges`` and so on), or other
        options of its entry.
    :raises toast.errors.TargetError: for an unknown name, or an option that the model does not
        have.
    """
    if name not in ZOO:
        near = difflib.get_close_matches(name.lower(), ZOO, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TargetError(f"no model named {name}; {hint}known: {', '.join(ZOO)}")
    entry = ZOO[name]
    sizes = {key: value for key, value in options.items() if value is not None}
    for key, value in sizes.items():
        if key not in entry.options:
            raise TargetError(f"model {name} has no option {key}; remove it")
        if isinstance(value, int) and value < 1:
            raise TargetError(f"{key} {value}: must be at least 1")
    return (entry.small if small else entry.build)(**sizes)
