"""Memory in program order: what is alive adds up, and nothing is freed before it is made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import action, analyzed, f32
from toast.cost import CostModel, break_down
from toast.evaluation.optimum import random_legal
from toast.hardware import Mesh, load
from toast.search import find
from toast.space import Space


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("t2b-tiny", {}),
        ("t2b-scan", {"small": True}),
        ("gns", {"small": True}),
        ("unet", {"small": True}),
    ],
)
def test_what_is_alive_adds_up(name: str, options: dict[str, int]) -> None:
    """Of states that reshard single op classes as well, with all their copies."""
    space = Space(analyzed(name, **options), Mesh.parse("a=2,b=2"))
    model = CostModel(space, load("tpu-v5e"))
    tables = model.tables
    for state in random_legal(space, 10, np.random.default_rng(0)):
        layout = model.layout(state[None])
        (columns,) = model.columns(layout)
        live = np.cumsum(columns[tables.events.column] * tables.events.sign)
        last = np.flatnonzero(np.diff(tables.events.op, append=-1))  # of each op
        assert live[last].min() > -1  # bytes, but for rounding
        line = model.timeline(state)
        assert line.peak_bytes == pytest.approx(model.price(state[None]).peak_bytes[0])
        alive = line.argument_bytes + sum(buffer.bytes for buffer in line.at_peak)
        in_memory = alive + line.gap_bytes - line.fast_bytes
        assert in_memory == pytest.approx(line.peak_bytes, rel=0.02)
        assert all(buffer.start <= buffer.end for buffer in line.at_peak)


def test_copies_for_a_kernel_that_begins_earlier() -> None:
    """A product's consumer is a part of its kernel, and what that needs is there before it."""

    def step(x: jax.Array, a: jax.Array, y: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        p = x @ a
        z = w @ w @ w
        return p * y, z

    analysis = toast.analyze(step, *[f32(1024, 1024)] * 4)
    space = Space(analysis, Mesh.parse("m=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    events, copies = model.tables.events, model.tables.columns["copies"]
    columns = np.unique(events.column)
    for column in columns[(columns >= copies.start) & (columns < copies.stop)]:
        assert (np.cumsum(events.sign[events.column == column]) >= 0).all()


@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_arrays_are_padded_to_lanes(hardware: str) -> None:
    """Along the dimension for which it is least, as XLA's TPU compiler lays out arguments."""
    bf16 = jnp.bfloat16
    shapes = [jax.ShapeDtypeStruct(s, bf16) for s in ((256, 64, 64, 64), (3, 3, 64, 256))]
    analysis = toast.analyze(lambda x, k: (x + 1, k + 1), *shapes)
    space = Space(analysis, Mesh.parse("b=16"), min_dimensions=0)
    model = CostModel(space, load(hardware))
    twice = 2 if hardware == "tpu-v5e" else 1
    image, kernel = 2 * 256 * 64**3, 2 * 9 * 64 * 256
    assert model.price(space.unsharded[None]).argument_bytes[0] == image + kernel
    batch, height, channel = (
        space.apply(space.initial, action(space, name, d, "b"))
        for name, d in (("x", 0), ("x", 1), ("k", 3))
    )
    assert model.price(batch[None]).argument_bytes[0] == twice * image / 16 + kernel
    assert model.price(height[None]).argument_bytes[0] == image / 16 + kernel
    assert model.price(channel[None]).argument_bytes[0] == image + twice * kernel / 16
    assert model.timeline(batch).argument_bytes == twice * image / 16 + kernel


def test_a_summed_product_is_overwritten_by_a_consumer_as_large() -> None:
    """XLA sums a product in place, and the elementwise op after it needs no other buffer."""

    def same(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x @ w + y)

    def smaller(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x @ w + y).astype(jnp.bfloat16)

    rows = []
    for function in (same, smaller):
        analysis = toast.analyze(function, *[f32(1024, 1024)] * 3)
        model = CostModel(Space(analysis, Mesh.parse("m=4"), min_dimensions=0), load("tpu-v5e"))
        events, merged = model.tables.events, model.tables.columns["merged sums"]
        rows.append(((events.column >= merged.start) & (events.column < merged.stop)).any())
    assert rows == [False, True]


def test_a_local_program_has_a_whole_sum_until_it_is_scattered() -> None:
    """XLA's partitioner sums the parts in a loop; a reduce-scatter has a whole operand."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    pins = {"x": P(None, "m"), "w": P("m", None), "result": P("m", None)}
    analysis = toast.analyze(step, f32(64, 64), f32(64, 64))
    mesh, constraints = Mesh.parse("m=8"), toast.Constraints(pin=pins)
    space = Space(analysis, mesh, constraints=constraints, min_dimensions=0)
    hardware = load("tpu-v5e")
    forms = CostModel(space, hardware, loops=True), CostModel(space, hardware, loops=False)
    state = find(forms[0], memory_bytes=2**30, settings=toast.Settings()).state
    names = [{term.name for term in model.buffers} for model in forms]
    assert names[0] - names[1] == {"scattered sums"}
    assert names[1] - names[0] == {
        "whole sums", "second buffers", "parted operands", "delayed operands",
        "images in lanes", "waiting operands",
    }  # fmt: skip
    assert [*forms[0].local_collectives(state)] == [("reduce_scatter", ("m",), 16384.0)]
    (buffer,) = [b for b in forms[0].timeline(state).at_peak if b.what == "sum"]
    assert buffer.bytes >= 64 * 64 * 4
    assert buffer.end == buffer.start + 1


@pytest.mark.parametrize(
    ("hardware", "columns", "moment", "copied"),
    [
        ("tpu-v5e", 2048, P(None, "m"), 2048),
        ("tpu-v5e", 768, P(None, "m"), 96),  # the slice that the program reads is no whole tiles
        ("tpu-v5e", 2048, P("m", None), 0),
        ("h100", 2048, P(None, "m"), 0),
    ],
)
def test_an_overwritten_argument_is_copied_if_it_is_gathered_along_rows(
    hardware: str, columns: int, moment: P, copied: int
) -> None:
    """XLA for TPUs gathers into a buffer of its own, and copies the argument at the beginning."""

    def step(p: jax.Array, m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + g
        return checkpoint_name(p - m * jax.lax.rsqrt(m * m + 1.0), "new"), m

    pins = {"p": P(), "m": moment, "g": moment, "result[0]": P(), "result[1]": moment}
    pins["new"] = moment
    size = f32(2048, columns)
    plan = toast.plan(
        step, size, size, size, donate=(0, 1), mesh="m=8", hardware=hardware,
        constraints=toast.Constraints(pin=pins),
    )  # fmt: skip
    found = plan.model.columns(plan.model.layout(plan.state[None]))[0]
    copies = found[plan.model.tables.columns["argument copies"]]
    assert copies.sum() == pytest.approx(4 * 2048 * copied, rel=0.4, abs=64)  # 96 lanes are padded
    # The argument is read and written, and its new value.
    seconds = break_down(plan.model, plan.state).term_seconds["argument copies"].sum()
    accesses = 2 * (copies.sum() + 4 * 2048 * columns * (copied > 0))
    expected = accesses / plan.hardware.memory_bytes_per_s
    assert seconds == pytest.approx(expected, rel=1e-4, abs=1e-10)


def test_scalars_that_are_overwritten_are_not_copied() -> None:
    plan = toast.plan(
        lambda n, x: (n + 1, x * 2), jax.ShapeDtypeStruct((), "int32"), f32(64, 64), donate=(0,),
        mesh="data=2,model=2", hardware="tpu-v5e",
    )  # fmt: skip
    columns = plan.model.columns(plan.model.layout(plan.state[None]))[0]
    assert not columns[plan.model.tables.columns["argument copies"]].any()


@pytest.mark.parametrize("stored", [False, True])
def test_a_slice_of_what_is_not_in_memory_is_not_in_memory(stored: bool) -> None:
    """The kernel of the product computes the part of ``tanh`` that it needs."""

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x)
        return y @ w, y if stored else x

    analysis = toast.analyze(step, f32(1024, 512), f32(512, 64), platform="tpu")
    space = Space(analysis, Mesh.parse("d=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    program = analysis.program
    state = space.unsharded.copy()
    contracted = 2  # the last factor of the product
    state[space.classes.of_op[program.kinds.index("dot_general")]] = contracted
    copies = [b.value for b in model.timeline(state).buffers if b.what == "copy"]
    assert ("tanh" in {program.kind(program.makers[value]) for value in copies}) == stored
