"""GShard's Table 4: how operators scale with the number of partitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import toast
from tests.helpers import action
from toast.cost import CostModel
from toast.hardware import COLLECTIVES, Mesh, load
from toast.space import Space

#: Square tori whose ends are linked.
DEVICES = (256, 1024)
#: Elements along a dimension that does not grow, and per partition along one that does.
SIDE = 4096


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def measured(
    function: Callable[..., Any],
    arguments: tuple[jax.ShapeDtypeStruct, ...],
    sharded: list[tuple[str | int, int]],
    devices: int,
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Compute per partition; by kind of collective the bytes sent and the time."""
    machine = dataclasses.replace(load("tpu-v5e"), max_devices=10**9)
    space = Space(toast.analyze(function, *arguments), Mesh((("d", devices),)), min_dimensions=0)
    model = CostModel(space, machine, overlap="none")
    state = space.initial
    for place, d in sharded:
        if isinstance(place, str):
            state = space.apply(state, action(space, place, d, "d"))
            continue
        # One op alone: the result of the ``place``-th product, along ``d``.
        program, names = space.analysis.program, space.analysis.names
        op = [o for o in range(len(program.ops)) if program.kind(o) == "dot_general"][place]
        factor = space.analysis.rules[names.signature[op]].results[0][d][0]
        state[space.classes.of_op[op], 0] = factor
    prices = model.price(state[None])
    found = {
        kind: (float(prices.collective_bytes[0, k]), float(prices.collective_seconds[0, k]))
        for k, kind in enumerate(COLLECTIVES)
        if prices.collective_count[0, k]
    }
    return float(prices.matmul_seconds[0] + prices.memory_seconds[0]), found


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def dispatch(x: jax.Array, routes: jax.Array, w: jax.Array) -> jax.Array:
    """Tokens of groups to experts, and the experts' products."""
    sent = jnp.einsum("gsec,gsm->egcm", routes, x)
    return jnp.einsum("egcm,emh->egch", sent, w)


def window(x: jax.Array) -> jax.Array:
    """Stands for the convolution, whose spatial dimensions our rule keeps whole."""
    return lax.reduce_window(x, jnp.bfloat16(0), lax.add, (1, 3, 1, 1), (1, 1, 1, 1), "SAME")


#: By row: function, shapes for D partitions, dimensions sharded in order, the exponent of D of
#: compute per partition, and of each collective: of its bytes and of its time.
S = SIDE
ROWS: dict[str, tuple[Any, ...]] = {
    "Add(A, A -> A)": (
        lambda a, b: a + b, lambda n: (shape(S * n, 64), shape(S * n, 64)), [("a", 0)], 0, {},
    ),
    "Matmul(AB, BC -> AC), B": (
        matmul, lambda n: (shape(S, S * n), shape(S * n, S)), [("a", 1)],
        0, {"all_reduce": (0, 0)},
    ),
    "Matmul(AB, BC -> AC), A": (
        matmul, lambda n: (shape(S * n, S), shape(S, S)), [("a", 0)], 0, {},
    ),
    "Matmul(AB, BC -> AC), A and B": (
        matmul, lambda n: (shape(S * n, S * n), shape(S * n, S)), [("a", 0), ("b", 0)],
        1, {"all_gather": (1, 1)},
    ),
    "Matmul(AB, BC -> AC), A and C": (
        matmul, lambda n: (shape(S * n, S), shape(S, S * n)), [("a", 0), ("b", 1)],
        1, {"all_gather": (1, 1)},
    ),
    "Reduce(AB -> A)": (
        lambda a: a.sum(1), lambda n: (shape(S * n, S),), [("a", 0)], 0, {},
    ),
    "Reduce(AB -> B)": (
        lambda a: a.sum(0), lambda n: (shape(64 * n, S * S),), [("a", 0)],
        0, {"all_reduce": (0, 0)},
    ),
    "Einsum(GSEC, GSM -> EGCM)": (
        # C is of order 1 / D: with as many groups as partitions, and a fixed number of tokens.
        # The groups hold the dispatch and what it takes, the experts their products.
        dispatch, lambda n: (shape(n, 4096, S), shape(n, 4096, n, 4096 // n), shape(n, S, S)),
        [("x", 0), ("w", 0), (0, 0), (1, 0)], 0, {"all_to_all": (0, 0.5)},
    ),
    "Convolution(BIXY, xyIO -> BOXY)": (
        window, lambda n: (shape(8, 64 * n, 64, 256),), [("x", 1)],
        0, {"collective_permute": (0, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_table_4(row: str) -> None:
    function, shapes, sharded, compute, communication = ROWS[row]
    (less, few), (more, many) = (measured(function, shapes(n), sharded, n) for n in DEVICES)
    growth = DEVICES[1] / DEVICES[0]
    np.testing.assert_allclose(more / less, growth**compute, rtol=0.2)
    assert set(few) == set(many) == set(communication)
    for kind, (size, seconds) in communication.items():
        np.testing.assert_allclose(many[kind][0] / few[kind][0], growth**size, rtol=0.1)
        np.testing.assert_allclose(many[kind][1] / few[kind][1], growth**seconds, rtol=0.2)
