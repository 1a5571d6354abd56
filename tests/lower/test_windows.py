"""Halo exchange (GShard, 3.3.4 and A.4): ops that slide along a sharded dimension."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import toast
from tests.helpers import f32, random_states
from tests.lower.test_lowering import assert_as_predicted
from toast.cost import CostModel
from toast.cost.sliding_windows import ShardPart, shard_parts
from toast.hardware import Mesh, load
from toast.plan.shard import lowered_state
from toast.space import Space


class Case(NamedTuple):
    """A function of arrays of these shapes, and what it is planned for."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    lowering: Any = "xla"


def conv(x: Any, w: Any, stride: int = 1, padding: Any = "SAME", gap: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, rhs_dilation=(gap, gap),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def gradients(x: Any, w: Any, stride: int) -> Any:
    return jax.grad(lambda x, w: (conv(x, w, stride) ** 2).sum(), argnums=(0, 1))(x, w)


def pool(x: Any, window: int, stride: int, padding: Any, largest: bool = True) -> Any:
    start, combine = (-jnp.inf, lax.max) if largest else (jnp.inf, lax.min)
    window_, strides = (1, window, window, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, start, combine, window_, strides, padding)


def selected(x: Any, window: int, stride: int, padding: Any, largest: bool = True) -> Any:
    """The gradient of pooling: a select_and_scatter."""
    return jax.grad(lambda x: (pool(x, window, stride, padding, largest) ** 2).sum())(x)


IMAGE, KERNEL = f32(2, 16, 16, 3), f32(3, 3, 3, 4)

INDEX = jax.ShapeDtypeStruct((), jnp.int32)

#: Where only device-local programs have shards.  No axis divides the pieces of the rolls.
LOCAL = {
    "3_3_4_roll_local": Case(lambda x: jnp.roll(x, 5, 0), (f32(16, 4),), "local"),
    "3_3_4_roll_backwards": Case(lambda x: jnp.roll(x, -1, 0), (f32(16, 4),), "local"),
    "3_3_4_roll_gradient": Case(
        jax.grad(lambda x: (jnp.roll(x, -2, 0) * x).sum()), (f32(16, 4),), "local"
    ),
    "3_3_4_shift": Case(
        lambda x: jnp.concatenate([jnp.full((1, x.shape[1]), 3.0), x[:-1]]), (f32(16, 4),), "local"
    ),
    "3_3_4_concatenate": Case(
        lambda x, y: jnp.concatenate([x, y]), (f32(8, 4), f32(24, 4)), "local"
    ),
    "3_3_4_small_slice": Case(lambda x: x[:8] * 2, (f32(32, 4),), "local"),
}  # fmt: skip

#: By section of the paper.
CASES = {
    "3_3_4_slice": Case(lambda x: x[2:14] * 2, (f32(24, 4),)),
    "3_3_4_slice_with_stride": Case(lambda x: x[1:17:2] * 2, (f32(24, 4),)),
    "3_3_4_pad": Case(lambda x: jnp.pad(x, ((3, 5), (0, 0)), constant_values=7.0), (f32(16, 4),)),
    "3_3_4_pad_that_cuts": Case(lambda x: lax.pad(x, 2.0, ((-4, 12, 0), (0, 0, 0))), (f32(16, 4),)),
    "3_3_4_reverse": Case(lambda x: x[::-1] + 1, (f32(16, 4),)),
    "3_3_4_roll": Case(lambda x: jnp.roll(x, 5, 0), (f32(16, 4),)),
    **LOCAL,
    "3_3_4_update": Case(
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        (f32(16, 4), f32(5, 4), jax.ShapeDtypeStruct((), jnp.int32)),
    ),
    "a_4_2_pooling": Case(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
        (IMAGE,),
    ),
    "a_4_2_cumulative_sum": Case(lambda x: jnp.cumsum(x, 0), (f32(16, 4),)),
    "a_4_2_convolution": Case(conv, (IMAGE, KERNEL)),
    "a_4_2_strides": Case(lambda x, w: conv(x, w, 2), (IMAGE, KERNEL)),
    "a_4_2_window_dilation": Case(
        lambda x, w: conv(x, w, 1, "SAME", 2), (IMAGE, f32(5, 5, 3, 4))
    ),
    "a_4_2_uneven_padding": Case(
        lambda x, w: conv(x, w, 1, [(4, 4), (0, 0)]), (IMAGE, f32(5, 1, 3, 4))
    ),
    "a_4_2_gradients": Case(lambda x, w: gradients(x, w, 1), (IMAGE, KERNEL)),
    "a_4_2_base_dilation": Case(lambda x, w: gradients(x, w, 2), (IMAGE, KERNEL)),
    **{
        f"a_4_2_selected_{name}{'' if lowering == 'xla' else '_local'}": Case(
            functools.partial(selected, **options), (IMAGE,), lowering
        )
        for lowering in ("xla", "local")
        for name, options in {
            "tiles": {"window": 2, "stride": 2, "padding": "VALID"},
            "with_overlaps": {"window": 3, "stride": 2, "padding": "SAME"},
            "at_every_place": {"window": 3, "stride": 1, "padding": "SAME", "largest": False},
            "between_gaps": {"window": 2, "stride": 4, "padding": "VALID"},
            "inside": {"window": 5, "stride": 1, "padding": "VALID"},
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=4"])
@pytest.mark.parametrize("name", CASES)
def test_gshard(name: str, mesh: str) -> None:
    case = CASES[name]
    analysis = toast.analyze(case.function, *case.shapes, lowering=case.lowering)
    model = CostModel(Space(analysis, Mesh.parse(mesh)), load("tpu-v5e"))
    for state in random_states(model.space, 2, seed=3):
        assert_as_predicted(model, state, lowered_state(model, state))


@pytest.mark.parametrize("name", LOCAL)
def test_gshard_3_3_4_neighbours_exchange_what_moves(name: str) -> None:
    """Nothing is gathered: a device receives less than the whole result."""
    case = LOCAL[name]
    shapes = [f32(rows * 64, columns * 64) for rows, columns in (s.shape for s in case.shapes)]
    rows = jax.sharding.PartitionSpec("a")
    plan = toast.plan(
        case.function, *shapes, mesh="a=4", hardware="tpu-v5e", lowering="local",
        constraints=toast.Constraints(pin={"*": rows, "result": rows}),
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    local = plan.lowered()
    assert {c.kind for c in local.collectives} == {"collective_permute"}
    (result,) = jax.eval_shape(lambda *x: [case.function(*x)], *shapes)
    assert sum(c.bytes for c in local.collectives) < 4 * result.size
    assert local.counts() == plan.model.local_collectives(plan.state)


@pytest.mark.parametrize("length", [1, 5, 16])
def test_gshard_3_3_4_dynamic_slice(length: int) -> None:
    """A device takes what is in its shard; a sum completes the part.  Starts are clamped."""

    def function(x: Any, i: Any) -> Any:
        return lax.dynamic_slice_in_dim(x, i, length) * 2

    analysis = toast.analyze(function, f32(16, 4), INDEX, lowering="local")
    model = CostModel(Space(analysis, Mesh.parse("a=4")), load("tpu-v5e"))
    for state in random_states(model.space, 2, seed=3):
        assert_as_predicted(model, state, lowered_state(model, state))
    plan = toast.plan(
        analysis, mesh="a=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": jax.sharding.PartitionSpec("a")}),
    )  # fmt: skip
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    run = plan.jit()
    for start in (-3, 0, 3, 7, 13, 40):
        np.testing.assert_array_equal(run(x, np.int32(start)), function(x, np.int32(start)))


#: Ops whose results are empty, so that devices exchange nothing.
EMPTY = {
    "slice": Case(lambda x: (x[16:], x[5:5], x[3:3:2]), (f32(16, 8),)),
    "pad": Case(lambda x: lax.pad(x, 1.0, ((-8, -8, 0), (0, 0, 0))), (f32(16, 8),)),
    "reduce_window": Case(lambda x: pool(x, 17, 2, "VALID"), (IMAGE,)),
    "scan": Case(lambda x: lax.associative_scan(jnp.add, x), (f32(16, 8),)),
    "convolution": Case(lambda x, w: conv(x, w, 1, "VALID"), (f32(4, 4, 16, 4), f32(5, 3, 4, 8))),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nobody_exchanges_edges_of_nothing(name: str) -> None:
    case = EMPTY[name]
    analysis = toast.analyze(case.function, *case.shapes, lowering="local")
    model = CostModel(Space(analysis, Mesh.parse("a=2,b=4")), load("tpu-v5e"))
    states = [model.space.apply(model.space.initial, action) for action in model.space.actions]
    for state in states[:4]:
        assert_as_predicted(model, state, lowered_state(model, state))


def test_gshard_a_4_2_edges_are_as_wide_as_the_widest() -> None:
    """A window of three elements with stride 1 needs one element of each neighbour."""
    tile = np.arange(4) * 8
    assert shard_parts(8, tile - 1, 10) == [
        ShardPart(-1, 7, 8),
        ShardPart(0, 0, 8),
        ShardPart(1, 0, 1),
    ]
    # With stride 2 and padding at the end, none of the neighbour before.
    assert shard_parts(8, tile, 9) == [ShardPart(0, 0, 8), ShardPart(1, 0, 1)]
    # Shards of a slice begin at different places of shards of its operand (non-constant halos).
    assert shard_parts(6, np.arange(4) * 3 + 2, 3) == [
        ShardPart(-2, 5, 6), ShardPart(-1, 0, 6), ShardPart(0, 0, 5),
    ]  # fmt: skip


def test_exchanges_of_edges_are_collectives_of_the_program() -> None:
    analysis = toast.analyze(conv, IMAGE, KERNEL)
    plan = toast.plan(
        analysis, mesh="a=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": jax.sharding.PartitionSpec(None, "a")}),
    )  # fmt: skip
    edges = [c for c in plan.lowered().collectives if c.edges]
    assert [(c.kind, c.axes, c.bytes) for c in edges] == [
        ("collective_permute", ("a",), 2 * 16 * 3 * 4.0)
    ] * 2
