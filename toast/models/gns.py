"""The paper's graph network simulator (section 5.1, GNS) as a full Adam train step.

Nodes, edges and the whole graph have latent vectors.  Each message-passing step updates the edges
from their ends, the nodes from their sent and received edges, and the graph from both, each with an
MLP, a layer norm and a residual.  The paper states a latent size of 2048, a hidden size of 1024, 3
linear layers, 24 steps and 875M parameters.  With separate sums of sent and received edges (as in
Godwin et al., the paper's [9]) and 3 hidden layers before the output layer, the updates have 869M.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from toast.models.layers import layer_norm
from toast.models.optimizers import adam, adam_moments, train_step
from toast.models.parameters import repeated, shapes_in
from toast.models.registry import Entry, Model, Strategies, entry, training


@dataclasses.dataclass(frozen=True)
class GNSConfig:
    """Sizes of the network and of its training graph."""

    #: Message-passing steps, each with its own parameters.
    layers: int = 24
    latent: int = 2048
    hidden: int = 1024
    #: Hidden layers of each MLP, without its output layer.
    hidden_layers: int = 3
    nodes: int = 2048
    edges: int = 8192
    node_features: int = 32
    edge_features: int = 4
    #: Outputs per node: an acceleration.
    outputs: int = 3
    dtype: str = "float32"
    learning_rate: float = 1e-4
    #: Steps as one ``lax.scan`` over stacked parameters, instead of unrolled.
    scanned: bool = False


GNS = GNSConfig()

#: A train step small enough to run on CPU devices in a test.
TINY = GNSConfig(
    layers=2, latent=16, hidden=8, nodes=16, edges=64, node_features=8, learning_rate=1e-3
)


def parameter_shapes(config: GNSConfig) -> dict[str, Any]:
    """The pytree of parameter shapes: ``jax.ShapeDtypeStruct`` leaves."""
    c = config
    shape = shapes_in(c.dtype)

    def mlp(inputs: int, outputs: int, *, norm: bool = True) -> dict[str, Any]:
        sizes = (inputs, *(c.hidden,) * c.hidden_layers, outputs)
        linear = [
            {"weight": shape(before, after), "bias": shape(after)}
            for before, after in itertools.pairwise(sizes)
        ]
        norms = {"norm": shape(outputs), "norm_bias": shape(outputs)}
        return {"linear": linear, **(norms if norm else {})}

    step = {
        "edge": mlp(4 * c.latent, c.latent),  # edge, sender, receiver, graph
        "node": mlp(4 * c.latent, c.latent),  # node, edges sent, edges received, graph
        "graph": mlp(3 * c.latent, c.latent),  # nodes, edges, graph
    }
    return {
        "encoder": {
            "edge": mlp(c.edge_features, c.latent),
            "node": mlp(c.node_features, c.latent),
        },
        "graph": shape(c.latent),
        "steps": repeated(step, c.layers, c.scanned),
        "decoder": mlp(c.latent, c.outputs, norm=False),
    }


def mlp(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Linear layers with ReLU between them, and a layer norm if it has one; ``x : [n, in]``."""
    for number, layer in enumerate(params["linear"]):
        x = (jax.nn.relu(x) if number else x) @ layer["weight"] + layer["bias"]
    if "norm" in params:
        x = layer_norm(x, params["norm"], params["norm_bias"])
    return x


def message_passing(
    params: dict[str, Any],
    state: tuple[jax.Array, jax.Array, jax.Array],
    senders: jax.Array,
    receivers: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One message-passing step on ``(nodes, edges, graph)``.

    ``nodes : [nodes, latent]``, ``edges : [edges, latent]``, ``graph : [latent]``,
    ``senders, receivers : [edges]``.
    """
    nodes, edges, graph = state

    def beside(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(graph, x.shape)

    ends = (nodes[senders], nodes[receivers])
    edges = edges + mlp(params["edge"], jnp.concatenate([edges, *ends, beside(edges)], axis=-1))
    sent = jax.ops.segment_sum(edges, senders, nodes.shape[0])
    received = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
    joined = jnp.concatenate([nodes, sent, received, beside(nodes)], axis=-1)
    nodes = nodes + mlp(params["node"], joined)
    means = (jnp.mean(nodes, axis=0), jnp.mean(edges, axis=0))
    graph = graph + mlp(params["graph"], jnp.concatenate([*means, graph])[None])[0]
    return nodes, edges, graph


def predict(
    config: GNSConfig,
    params: dict[str, Any],
    nodes: jax.Array,
    edges: jax.Array,
    senders: jax.Array,
    receivers: jax.Array,
) -> jax.Array:
    """The prediction for each node, ``[nodes, outputs]``.

    ``nodes : [nodes, node_features]``, ``edges : [edges, edge_features]``,
    ``senders, receivers : [edges]`` of int32.
    """
    state = (
        mlp(params["encoder"]["node"], nodes),
        mlp(params["encoder"]["edge"], edges),
        params["graph"],
    )
    if config.scanned:
        state, _ = jax.lax.scan(
            lambda state, step: (message_passing(step, state, senders, receivers), None),
            state,
            params["steps"],
        )
    else:
        for step in params["steps"]:
            state = message_passing(step, state, senders, receivers)
    return mlp(params["decoder"], state[0])


def loss(
    config: GNSConfig,
    params: dict[str, Any],
    nodes: jax.Array,
    edges: jax.Array,
    senders: jax.Array,
    receivers: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """Mean squared error of :func:`predict`; ``targets : [nodes, outputs]``."""
    predicted = predict(config, params, nodes, edges, senders, receivers)
    return jnp.mean(jnp.square(predicted - targets))


def model(config: GNSConfig, name: str) -> Model:
    """The train step of ``config`` with Adam and abstract arguments, for :func:`toast.plan`."""
    c = config
    params, features = parameter_shapes(c), shapes_in(c.dtype)
    ends = jax.ShapeDtypeStruct((c.edges,), jnp.int32)
    return training(
        name,
        train_step(functools.partial(loss, c), functools.partial(adam, rate=c.learning_rate)),
        params,
        adam_moments(params),
        features(c.nodes, c.node_features),
        features(c.edges, c.edge_features),
        ends,
        ends,
        features(c.nodes, c.outputs),
    )


_EDGES = ("edges", 0)
#: Megatron: the hidden dimension of every second layer of the MLPs.
_MEGATRON = tuple(
    (f"params['steps']*['{part}']['linear'][{layer}]['weight']", -1, "last")
    for part in ("edge", "node")
    for layer in (0, 2)
)
#: Section 5.1.1.
STRATEGIES: Strategies = {
    "edge sharding": [(*_EDGES, "all")],
    "Megatron": [(d, n, "all") for d, n, _ in _MEGATRON],
    "edge sharding + Megatron": [(*_EDGES, "first"), *_MEGATRON],
}

_entry = functools.partial(
    entry, model, sizes=(GNS, TINY), options=("layers", "edges"), strategies=STRATEGIES
)
ENTRIES: dict[str, Entry] = {
    "gns": _entry(
        "gns", "the paper's graph network simulator: train step with Adam, 24 steps unrolled"
    ),
    "gns-scan": _entry(
        "gns-scan", "gns with its message passing as one scan over stacked parameters", scanned=True
    ),
}
