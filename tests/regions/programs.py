"""Programs with ``jax.shard_map``, on a mesh data=4,model=2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from tests.helpers import f32

#: The mesh of the programs: devices are chosen by who runs them.
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

shard_map = functools.partial(jax.shard_map, mesh=MESH)

#: A ring of the devices along ``data``.
RING = [(i, (i + 1) % 4) for i in range(4)]


@functools.partial(
    shard_map,
    in_specs=(P("data", None), P(None, "model"), P("model", None)),
    out_specs=P("data", None),
)
def megatron(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    return lax.psum(jax.nn.relu(x @ w1) @ w2, "model")


@functools.partial(
    shard_map,
    in_specs=(P("data", None), P(), P()),
    out_specs=P("data", None),
    axis_names={"data"},
)
def over_data(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    """The axis ``model`` passes through."""
    return jax.nn.relu(x @ w1) @ w2 + lax.psum(x.sum(), "data")


@functools.partial(
    shard_map,
    in_specs=(P("data", None), P(None, "data")),
    out_specs=P("data", None),
    axis_names={"data"},
)
def ring(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each shard of ``x`` meets each shard of ``w``, as in ring attention."""

    def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, None]:
        total, part = carry
        return (
            total + jnp.tanh(x @ part).sum(1, keepdims=True),
            lax.ppermute(part, "data", RING),
        ), None

    (total, _), _ = lax.scan(step, (x * 0, w), None, length=4)
    return total * (1 + lax.axis_index("data"))


@functools.partial(
    shard_map,
    in_specs=(P("data", None), P("data", None, None)),
    out_specs=P("data", None),
    axis_names={"data"},
)
def experts(x: jax.Array, w: jax.Array) -> jax.Array:
    """Tokens go to the devices of their experts, and back."""
    tokens, width = x.shape
    sent = lax.all_to_all(x.reshape(4, tokens // 4, width), "data", 0, 0)
    hidden = jax.nn.relu(jnp.einsum("ptd,df->ptf", sent, w[0]))
    back = lax.all_to_all(jnp.einsum("ptf,df->ptd", hidden, w[0]), "data", 0, 0)
    return back.reshape(tokens, width)


@functools.partial(
    shard_map, in_specs=P("data", None), out_specs=P("data", None), axis_names={"data"}
)
def nested(x: jax.Array) -> jax.Array:
    """A region over ``model`` inside a region over ``data``, with the places of devices in both."""

    @functools.partial(
        jax.shard_map, in_specs=P(None, "model"), out_specs=P(None, "model"), axis_names={"model"}
    )
    def normalised(y: jax.Array) -> jax.Array:
        return y / lax.psum(y.sum(1, keepdims=True), "model") + lax.axis_index("model")

    return normalised(x) + lax.axis_index("data")


@functools.partial(
    shard_map, in_specs=P("data", None), out_specs=P("data", None), axis_names={"data"}
)
def every_collective(x: jax.Array) -> jax.Array:
    """One of each kind, on the rows of each device."""
    moved = lax.ppermute(x, "data", RING)
    turned = lax.all_to_all(moved, "data", 1, 0, tiled=True)
    part = lax.psum_scatter(turned, "data", scatter_dimension=0, tiled=True)
    whole = lax.all_gather(part, "data", axis=1, tiled=True)
    return whole + lax.pmax(whole, "data")


@functools.partial(
    jax.shard_map, mesh=AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,)),
    in_specs=P("data"), out_specs=P("data"),
)  # fmt: skip
def branches(x: jax.Array) -> jax.Array:
    """The place of a device is known in a branch of a loop, and on a mesh with further axes."""

    def step(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        def placed(x: jax.Array) -> jax.Array:
            return x + lax.axis_index("data")

        x = lax.cond(number % 2 == 0, placed, lambda x: 2 * x, x)
        return lax.ppermute(x, "data", RING), None

    return lax.scan(step, x, jnp.arange(3))[0]


def scanned(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return x + megatron(x, *w), None

    return lax.scan(layer, x, weights)[0]


def train_step(params: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, Any]:
    def loss(params: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (megatron(x, *params) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


def scanned_step(params: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, Any]:
    value, gradient = jax.value_and_grad(lambda p: (scanned(x, p) ** 2).mean())(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


@functools.partial(
    shard_map, in_specs=P(("model", "data")), out_specs=P(("model", "data")), check_vma=False
)
def reversed_axes(x: jax.Array) -> jax.Array:
    """Collectives over axes in another order than the mesh has."""
    whole = lax.all_gather(x, ("model", "data"), tiled=True)
    return lax.psum_scatter(jnp.sin(whole) * x.sum(), ("model", "data"), tiled=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program with example arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()


_WEIGHTS = f32(16, 64), f32(64, 16)
_LAYERS = f32(3, 16, 64), f32(3, 64, 16)

CASES = {
    "megatron": Case(megatron, (f32(32, 16), *_WEIGHTS)),
    "over_data": Case(over_data, (f32(32, 16), *_WEIGHTS)),
    "ring": Case(ring, (f32(32, 16), f32(16, 32))),
    "experts": Case(experts, (f32(64, 16), f32(4, 16, 32))),
    "nested": Case(nested, (f32(32, 16),)),
    "every_collective": Case(every_collective, (f32(64, 16),)),
    "reversed_axes": Case(reversed_axes, (f32(32, 16),)),
    "branches": Case(branches, (f32(32, 16),)),
    "scanned": Case(scanned, (f32(32, 16), _LAYERS)),
    "train_step": Case(train_step, (_WEIGHTS, f32(32, 16)), (0,)),
    "scanned_step": Case(scanned_step, (_LAYERS, f32(32, 16)), (0,)),
}
