"""The models that ``toast plan NAME`` knows, in full size and in a size that tests can run."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from toast.errors import TargetError
from toast.models import transformer
from toast.models.registry import Model, Strategies


def mlp(batch: int = 256, width: int = 32, hidden: int = 64, out: int = 16) -> Model:
    """The two-layer MLP of the paper's Figure 2."""

    def function(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w1) @ w2

    shapes = ((batch, width), (width, hidden), (hidden, out))
    return Model("mlp", function, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def attention(sequence: int = 128, width: int = 32, key: int = 64, value: int = 16) -> Model:
    """The simplified self-attention of the paper's Figure 5: averaging in place of softmax."""

    def function(x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array) -> jax.Array:
        scores = (x @ wk) @ (x @ wq).T
        return (scores / jnp.sum(scores, axis=1)[:, None]) @ (x @ wv)

    shapes = ((sequence, width), (width, key), (width, key), (width, value))
    return Model("attention", function, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model by name: what it is, how to build it, and its small form for running."""

    summary: str
    build: Callable[..., Model]
    small: Callable[..., Model]
    #: Options that ``build`` takes from the command line.
    options: tuple[str, ...] = ()
    #: What experts write for it.
    strategies: Strategies = dataclasses.field(default_factory=dict)


def _transformer(config: transformer.TransformerConfig, name: str) -> Callable[..., Model]:
    def build(**options: Any) -> Model:
        return transformer.model(dataclasses.replace(config, **options), name)

    return build


def _mlp(**options: int) -> Model:
    return mlp(**options)


def _attention(**options: int) -> Model:
    return attention(**options)


_BATCH, _WIDTH = ("tokens", 0), ("params['embedding']", 1)
_HIDDEN, _HEADS = ("params['layers']*['gate']", -1), ("params['layers']*['wq']", -2)
_VOCABULARY = ("params['embedding']", 0)
_MEGATRON = tuple((*d, "last") for d in (_HIDDEN, _HEADS, _VOCABULARY))
#: Section 5.1.1.
_TRANSFORMER_STRATEGIES: Strategies = {
    "data parallel": [(*_BATCH, "all")],
    "FSDP": [(*_BATCH, "all"), (*_WIDTH, "all")],
    "Megatron": [(*_BATCH, "first"), *_MEGATRON],
    "FSDP + Megatron": [(*_BATCH, "first"), *_MEGATRON, (*_WIDTH, "first")],
    "tensor parallel": [(*d, "all") for d in (_HIDDEN, _HEADS, _VOCABULARY)],
}

_TRANSFORMER_OPTIONS = ("layers", "sequence", "batch")
_TINY = _transformer(transformer.TINY, "t2b-tiny")

ZOO: Mapping[str, Entry] = {
    "t2b": Entry(
        "Gemma 2B, the paper's T2B: train step with Adam, layers unrolled",
        _transformer(transformer.T2B, "t2b"),
        _TINY,
        _TRANSFORMER_OPTIONS,
        _TRANSFORMER_STRATEGIES,
    ),
    "t2b-scan": Entry(
        "T2B with its layers as one scan over stacked parameters",
        _transformer(dataclasses.replace(transformer.T2B, scanned=True), "t2b-scan"),
        _transformer(dataclasses.replace(transformer.TINY, scanned=True), "t2b-scan-tiny"),
        _TRANSFORMER_OPTIONS,
        _TRANSFORMER_STRATEGIES,
    ),
    "t2b-tiny": Entry(
        "T2B with 2 narrow layers in float32, to run on CPU devices",
        _TINY,
        _TINY,
        _TRANSFORMER_OPTIONS,
        _TRANSFORMER_STRATEGIES,
    ),
    "mlp": Entry(
        "the MLP of the paper's Figure 2",
        _mlp,
        _mlp,
        ("batch",),
        {
            "data parallel": [("x", 0, "all")],
            "Megatron": [("x", 0, "first"), ("w1", 1, "last")],
        },
    ),
    "attention": Entry(
        "the self-attention of the paper's Figure 5", _attention, _attention, ("sequence",)
    ),
}


def build(name: str, *, small: bool = False, **options: Any) -> Model:
    """The zoo model ``name``; ``options`` (layers, sequence, batch) change its size.

    ``small`` builds the form that runs on CPU devices.  Raises
    :class:`toast.errors.TargetError` for an option the model does not have, or an unknown name.
    """
    if name not in ZOO:
        near = difflib.get_close_matches(name, ZOO, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TargetError(f"no model called {name}; {hint}known: {', '.join(ZOO)}")
    entry = ZOO[name]
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items():
        if key not in entry.options:
            raise TargetError(f"model {name} has no option --{key}; drop it")
        if value < 1:
            raise TargetError(f"--{key} {value}: must be at least 1")
    return (entry.small if small else entry.build)(**given)
