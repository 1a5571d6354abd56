"""What XLA's TPU compiler does with collectives and memory, as docs/predictions.md tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action, f32, model_of
from toast.api import program_of
from toast.cost import CostModel
from toast.cost.axis_sets import SCATTER
from toast.cost.liveness import liveness
from toast.hardware import COLLECTIVES, Mesh, load
from toast.space import Space, States


def half(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def counts(model: CostModel, state: States) -> dict[str, int]:
    """Collectives as XLA leaves them."""
    found = model.price(state[None]).collective_count[0]
    return {kind: round(float(found[k])) for k, kind in enumerate(COLLECTIVES) if found[k]}


def moves(model: CostModel, state: States) -> dict[str, int]:
    """Collectives as Shardy makes them explicit."""
    found: dict[str, int] = {}
    for (kind, _, _), count in model.reshards(state).items():
        found[kind] = found.get(kind, 0) + count
    return found


def test_sums_that_are_added_up_are_summed_once() -> None:
    """all-reduce(a) + all-reduce(b) is all-reduce(a + b), where nothing else needs a or b."""

    def function(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(x @ a + x @ b)

    analysis = toast.analyze(function, half(64, 256), half(256, 64), half(256, 64))
    model = model_of(analysis, "m=4", min_dimensions=0)
    state = model.space.apply(model.space.initial, action(model.space, "x", 1, "m"))
    assert moves(model, state) == {"all_reduce": 2}
    assert counts(model, state) == {"all_reduce": 1}


@pytest.mark.parametrize(
    "total",
    [
        lambda p, q, r, s: (p + q) + r + s,
        lambda p, q, r, s: p + (q + (r + s)),
        lambda p, q, r, s: (p + q) + (r + s),
        lambda p, q, r, s: p + ((q + r) + s),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
def test_one_sum_is_left_however_they_are_added_up(total: Callable[..., Any], alike: bool) -> None:
    def function(*arrays: jax.Array) -> jax.Array:
        return jnp.tanh(total(*(x @ w for x, w in zip(arrays[:4], arrays[4:], strict=True))))

    depths = [256] * 4 if alike else [256, 512, 1024, 2048]
    shapes = [half(64, depth) for depth in depths] + [half(depth, 64) for depth in depths]
    model = model_of(toast.analyze(function, *shapes), "m=4", min_dimensions=0)
    state = model.space.initial
    for number in range(4):
        state = model.space.apply(state, action(model.space, f"arrays[{number}]", 1, "m"))
    assert counts(model, state) == {"all_reduce": 1}
    prices = model.price(state[None])
    assert prices.seconds[0] >= model.lower_bound() > 0


def test_sums_that_are_needed_apart_are_not_merged() -> None:
    def function(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        one = x @ a
        return jnp.tanh(one + x @ b), one

    analysis = toast.analyze(function, half(64, 256), half(256, 64), half(256, 64))
    model = model_of(analysis, "m=4", min_dimensions=0)
    state = model.space.apply(model.space.initial, action(model.space, "x", 1, "m"))
    assert counts(model, state) == {"all_reduce": 2}


def embedding_gradient(tokens: jax.Array, g: jax.Array, table: jax.Array) -> jax.Array:
    return jax.grad(lambda t: jnp.sum(t[tokens] * g))(table)


def sharded_table(devices: int, *axes: str) -> tuple[CostModel, States]:
    """Tokens and the table's width on one axis; tokens on further ``axes`` of two devices, too."""
    analysis = toast.analyze(
        embedding_gradient, jax.ShapeDtypeStruct((512,), jnp.int32), half(512, 64), half(1024, 64)
    )
    mesh = ",".join([f"d={devices}", *(f"{axis}=2" for axis in axes)])
    model = model_of(analysis, mesh, min_dimensions=0)
    space = model.space
    state = space.apply(space.initial, action(space, "tokens", 0, "d"))
    for axis in axes:
        state = space.apply(state, action(space, "tokens", 0, axis))
    return model, space.apply(state, action(space, "g", 1, "d"))


def test_constants_are_made_where_they_are_needed() -> None:
    """The zeros that a scatter adds to are sharded like the table, and not sent."""
    model, state = sharded_table(4)
    made, sent = moves(model, state), counts(model, state)
    assert made.get("all_gather", 0) > sent.get("all_gather", 0)


@pytest.mark.parametrize("devices", [4, 8, 16])
def test_scatters_over_many_devices_are_summed_whole(devices: int) -> None:
    """The gradient of a sharded table is a reduce-scatter that XLA makes an all-reduce."""
    model, state = sharded_table(devices)
    assert moves(model, state)["reduce_scatter"] == 1
    found = counts(model, state)
    assert found.get("reduce_scatter", 0) == (devices <= 8)
    assert found.get("all_reduce", 0) >= (devices > 8)


@pytest.mark.parametrize(("hardware", "whole"), [("tpu-v5e", False), ("tpu-v5p", True)])
def test_scatters_are_summed_whole_over_all_devices_of_some_slices(
    hardware: str, whole: bool
) -> None:
    """Over 2 x 2 x 2 devices, but not over 2 x 4."""
    model, state = sharded_table(8)
    found = counts(CostModel(model.space, load(hardware)), state)
    assert bool(found.get("all_reduce", 0)) == whole
    assert bool(found.get("reduce_scatter", 0)) != whole


def test_a_scatter_is_summed_over_all_axes_at_once() -> None:
    """If its sum is scattered along some of them."""
    model, state = sharded_table(4, "m")
    assert "reduce_scatter" not in counts(model, state)
    sums = {kind: axes for kind, axes, size in model.reshards(state) if size >= 1024 * 64 * 2 / 4}
    assert (sums["reduce_scatter"], sums["all_reduce"]) == (("d",), ("m",))  # those of Shardy
    moved = model.price(state[None]).collective_bytes[0]
    assert moved[COLLECTIVES.index("all_reduce")] == 1024 * 64 * 2  # the whole table, once


@pytest.mark.parametrize(
    ("rows", "columns", "whole"),
    [
        (64, 256, False),
        (64, 128, True),  # half of a pair of tiles
        (64, 320, True),
        (256, 320, False),  # the rows are in the lanes
        (4, 256, True),  # half of a tile's rows
    ],
)
def test_sums_along_lanes_are_scattered_by_pairs_of_tiles(
    rows: int, columns: int, whole: bool
) -> None:
    """Each device has ``columns``; others are all-reduced, and sliced."""
    analysis = toast.analyze(lambda x, w: x @ w, half(rows, 512), half(512, 2 * columns))
    model = model_of(analysis, "d=2", min_dimensions=0)
    space = model.space
    state = space.apply(space.initial, action(space, "x", 1, "d"))
    kinds = [space.analysis.program.kind(int(op)) for op in space.classes.representative]
    state[kinds.index("return"), 0] = 1
    assert moves(model, state) == {"reduce_scatter": 1}
    assert counts(model, state) == {"all_reduce" if whole else "reduce_scatter": 1}


@pytest.mark.parametrize(("columns", "whole"), [(4096, False), (64, True)])
@pytest.mark.parametrize("closed", [1, 16])
def test_short_products_are_summed_whole(columns: int, whole: bool, closed: int) -> None:
    """By XLA's estimate, for which it does not matter whether the ends of a torus are linked."""
    rows = 1 << 13
    analysis = toast.analyze(lambda x, g: x.T @ g, half(rows, 2048), half(rows, columns))
    space = model_of(analysis, "d=16", min_dimensions=0).space
    real = load("tpu-v5e")
    links = dataclasses.replace(real.interconnect, wraparound_from=closed)
    model = CostModel(space, dataclasses.replace(real, interconnect=links))
    state = space.apply(space.initial, action(space, "x", 0, "d"))
    kinds = [space.analysis.program.kind(int(op)) for op in space.classes.representative]
    state[kinds.index("return"), 0] = 0
    assert model.layout(state[None]).whole.any() == whole


def rounded(rows: jax.Array) -> jax.Array:
    return rows.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("read", "size"),
    [
        (lambda table, tokens: rounded(table[tokens]), 2),
        (lambda table, tokens: rounded(table[tokens]).astype(jnp.float32), 2),
        (lambda table, tokens: rounded(table[tokens].reshape(256, 128)), 2),
        (lambda table, tokens: (table[tokens], rounded(table[tokens])), 4),
        (lambda table, tokens: table[tokens] * 2, 4),
        (lambda table, tokens: (rounded(table[tokens]), table[tokens + 1] * 2), 4),
        (lambda table, tokens: (table[tokens + 1] * 2, rounded(table[tokens])), 4),
    ],
)
def test_tables_are_rounded_before_they_are_gathered(read: Callable[..., Any], size: int) -> None:
    """If all that is looked up in them is rounded."""
    tokens = jax.ShapeDtypeStruct((512,), jnp.int32)
    analysis = toast.analyze(read, f32(1024, 64), tokens)
    model = model_of(analysis, "d=4", min_dimensions=0)
    space, program = model.space, analysis.program
    state = space.apply(space.initial, action(space, "tokens", 0, "d"))
    state[space.classes.of_op[program.makers[program.argument_values[0]]], 0] = 0
    moved = model.price(state[None]).collective_bytes[0]
    assert moved[COLLECTIVES.index("all_gather")] == 1024 * 64 * size


@pytest.mark.parametrize(
    ("mesh", "sent"),
    [
        ("d=2", 1 / 2),  # a ring's (n - 1) / n of the sum
        ("d=4", 5 / 4),  # five messages of a quarter, not three
        ("d=2,m=2", 1 / 2 + 1 / 2),  # a half summed whole, which then changes places
        ("d=4,m=4", 2 * 3 / 4 / 4 + 1 / 4),
        ("d=4,m=2", 5 / 4),
        ("d=8", 7 / 8),
    ],
)
def test_what_sums_in_parts_send(mesh: str, sent: float) -> None:
    """Of products, as the compiled programs of docs/predictions.md send them."""
    analysis = toast.analyze(lambda x, g: x.T @ g, half(1 << 16, 2048), half(1 << 16, 2048))
    model = model_of(analysis, mesh, min_dimensions=0)
    space = model.space
    state = space.apply(space.initial, action(space, "x", 0, "d"))
    # The result is wanted in parts.
    kinds = [space.analysis.program.kind(int(op)) for op in space.classes.representative]
    state[kinds.index("return"), 0] = 0
    assert moves(model, state) == {"reduce_scatter": 1}
    assert model.price(state[None]).sent_bytes[0] == pytest.approx(sent * 2 * 2048 * 2048)


@pytest.mark.parametrize(
    ("mesh", "shared", "permuted"),
    [
        ("d=4", False, True),
        ("d=2", False, False),  # two parts are one reduce-scatter
        ("d=4,m=4", False, True),
        ("d=4,m=4", True, False),
        ("d=16,m=2", False, True),
        ("d=16,m=2", True, False),
    ],
)
def test_permutes_scatter_sums_along_dimensions_of_their_own(
    mesh: str, shared: bool, permuted: bool
) -> None:
    """Sums along a dimension that another axis shards are reduce-scatters, as compiled for v5e."""
    analysis = toast.analyze(lambda x, g: x.T @ g, half(1 << 16, 2048), half(1 << 16, 2048))
    model = model_of(analysis, mesh, min_dimensions=0)
    space = model.space
    state = space.apply(space.initial, action(space, "x", 0, "d"))
    kinds = [space.analysis.program.kind(int(op)) for op in space.classes.representative]
    result = kinds.index("return")
    if "m" in mesh:
        state = space.apply(state, action(space, "x" if shared else "g", 1, "m"))
    state[result, 0] = 0
    layout = model.layout(state[None])
    assert layout.permuted.any() == permuted
    (scattered,) = (
        each for each in model.traffic(layout) if each.kind == SCATTER and each.count.any()
    )
    assert model.in_background(scattered) == permuted


@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_float32_operands_are_rounded_on_tpus(hardware: str) -> None:
    analysis = toast.analyze(lambda x, w: x @ w, f32(64, 256), f32(256, 64))
    model = model_of(analysis, "d=4", hardware, min_dimensions=0)
    space = model.space
    state = space.apply(space.initial, action(space, "x", 0, "d"))
    state = space.apply(state, action(space, "w", 0, "d"))
    moved = model.price(state[None]).collective_bytes.sum()
    assert moved == 256 * 64 * (2 if hardware == "tpu-v5e" else 4)
    ((_, _, size),) = model.reshards(state)
    assert size == 256 * 64 * 4  # in the element type of the program


def kept(function: object, *arguments: jax.ShapeDtypeStruct) -> list[str]:
    """Types of the intermediate values that are in memory."""
    program = program_of(function, *arguments)
    names = toast.analyze(program).names
    live = liveness(program, names.use_op, names.use_value, lanes=128)
    return [
        f"{program.kind(value.op)} {value.type}"
        for number, value in enumerate(program.values)
        if live.exists[number] and number not in program.argument_values
    ]


def test_what_follows_cheaply_is_computed_again() -> None:
    """A residual stream is kept in bfloat16, not as the float32 that norms and products read."""

    def function(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        x = x + a  # of two large values: kept
        wide = x.astype(jnp.float32)
        scaled = (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True))).astype(x.dtype)
        return (scaled @ b) @ c + scaled @ c + x

    found = kept(function, half(512, 512), half(512, 512), half(512, 512), half(512, 512))
    assert "add bf16[512,512]" in found
    assert not any("f32[512,512]" in value for value in found)


def test_windowed_products_need_their_operands() -> None:
    """A product that is summed in parts over many devices is a loop over operands in memory."""

    def function(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ v

    shapes = half(4096, 4096), half(4096, 65536), half(65536, 4096)
    peaks = {}
    for devices in (4, 8):
        space = Space(toast.analyze(function, *shapes), Mesh((("m", devices),)), min_dimensions=0)
        model = CostModel(space, load("tpu-v5e"))
        state = space.apply(space.initial, action(space, "w", 1, "m"))
        line = model.timeline(state)
        peaks[devices] = {buffer.what for buffer in line.at_peak}
        assert np.isfinite(line.peak_bytes)
    assert peaks[4] <= {"value", "copy", "sum"}
