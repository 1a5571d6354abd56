"""Products that XLA computes in parts, as their sums are scattered over many devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import action, after_each
from toast.cost import DEFAULT_TERMS, CostModel, Memo, break_down
from toast.cost.terms import Term
from toast.cost.terms.buffers import (
    DelayedOperands,
    ImagesInLanes,
    LookupCopies,
    PartedOperands,
    WaitingOperands,
)
from toast.cost.terms.kernels import PartedProducts
from toast.cost.terms.traffic import GatherCopies
from toast.evaluation.optimum import random_legal
from toast.hardware import COLLECTIVES, Collectives, Mesh, load
from toast.space import Space, States

NAME = PartedProducts.name


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    """The product of its gradient sums over all rows of ``x``."""
    loss = jax.grad(lambda w: jnp.sum((x @ w).astype(jnp.float32) ** 2))
    return w - 0.1 * loss(w)


def model_of(
    mesh: str, lowering: Literal["xla", "local"] = "xla", hardware: str = "tpu-v5e"
) -> CostModel:
    shapes = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4096, 4096), (65536, 4096)))
    analysis = toast.analyze(step, *shapes, donate=(0,), platform="tpu", lowering=lowering)
    return CostModel(Space(analysis, Mesh.parse(mesh), min_dimensions=0), load(hardware))


def scattered(model: CostModel, *axes: str, along: int = 1) -> States:
    """Rows of ``x``, and ``w`` over all axes: sums of the gradient are scattered."""
    space, state = model.space, model.space.initial
    for axis in axes:
        for argument, dimension in (("x", 0), ("w", along)):
            state = space.apply(state, action(space, argument, dimension, axis))
    return state


def sharded(space: Space, *dimensions: tuple[str, int]) -> States:
    """The state that shards these dimensions of arguments along the axis ``d``."""
    actions = [action(space, argument, dimension, "d") for argument, dimension in dimensions]
    return functools.reduce(space.apply, actions, space.initial)


def parted(model: CostModel, state: States) -> float:
    seconds = break_down(model, state).term_seconds
    return float(seconds[NAME].sum()) if NAME in seconds else 0.0


@pytest.mark.parametrize(("devices", "longer"), [(2, False), (4, False), (8, True), (16, True)])
def test_a_sum_over_many_devices_takes_longer_than_the_whole_product(
    devices: int, longer: bool
) -> None:
    model = model_of(f"d={devices}")
    state = scattered(model, "d")
    assert model.layout(state[None]).scattered.any()
    assert (parted(model, state) > 0) == longer
    rest = CostModel(
        model.space, model.hardware,
        terms=[term for term in DEFAULT_TERMS if not isinstance(term, PartedProducts)],
    )  # fmt: skip
    more = model.price(state[None]).seconds - rest.price(state[None]).seconds
    assert (more[0] > 0) == longer


def test_a_sum_over_further_axes_is_not_computed_in_parts() -> None:
    """Of 37 kinds of such products in compiled programs, 33 have no permutes."""
    model = model_of("d=8,e=2")
    state = scattered(model, "d")
    assert parted(model, state) > 0
    state = model.space.apply(state, action(model.space, "x", 0, "e"))
    layout = model.layout(state[None])
    assert ((layout.scattered > 0) & (layout.partial != layout.scattered)).any()
    assert parted(model, state) == 0


def test_each_pair_of_devices_has_a_kernel_that_reads_a_whole_operand() -> None:
    """Over 16 devices, 8 kernels compute an eighth of the columns each, and read all of ``x``.

    16 more add the parts.
    """
    model = model_of("d=16")
    rows, columns, kernels, memory = 65536 / 16, 4096, 8, model.hardware.memory_bytes_per_s
    prices, peak = model.hardware.products, model.hardware.peak("bf16")

    def seconds(width: float) -> float:
        """Of the product of ``x`` with ``width`` columns of the gradient of ``x @ w``."""
        size = np.array([[columns, width, rows, 1.0]])
        computing = prices.seconds(size, np.array([2 * columns * width * rows / peak]), memory)
        # Of the operands and the whole result, what does not stay in fast memory.
        x, result = (float(prices.moved_bytes(np.array([2.0 * n]))[0]) for n in
                     (rows * columns, columns * columns))  # fmt: skip
        moved = x + (x + result) * width / columns
        stored = prices.moved_results(
            np.array([columns * width]), np.array([result / (2 * columns * columns)])
        )
        found = prices.kernel_seconds(computing, stored, np.array([moved]), np.ones(1), memory)
        return float(found[0]) + model.hardware.product_latency_s

    adding = 16 * model.hardware.kernel_latency_s + 3 * 2 * columns * columns / memory
    expected = max(kernels * seconds(columns / kernels) - seconds(columns), 0.0) + adding
    assert parted(model, scattered(model, "d")) == pytest.approx(expected)


def test_device_local_programs_have_no_such_loops() -> None:
    model = model_of("d=16", lowering="local")
    assert not any(isinstance(term, PartedProducts) for term in model.terms)
    assert parted(model, scattered(model, "d")) == 0.0


@pytest.mark.parametrize("mesh", ["d=16", "d=8,e=2", "d=4,e=4"])
def test_memo_prices_them_alike(mesh: str) -> None:
    model = model_of(mesh)
    axes = model.space.mesh.names
    near = scattered(model, *axes)
    batch = np.concatenate([
        near[None], scattered(model, axes[0])[None], after_each(model.space, near, model.space.actions),
        random_legal(model.space, 20, np.random.default_rng(0)),
    ])  # fmt: skip
    assert any(parted(model, state) > 0 for state in batch)
    whole, found = model.price(batch), Memo(model).price(batch)
    np.testing.assert_allclose(found.seconds, whole.seconds, rtol=1e-12)
    np.testing.assert_allclose(found.peak_bytes, whole.peak_bytes, rtol=1e-12)


def without(model: CostModel, term: type[Term], state: States) -> float:
    """The bytes of the peak without a term, over those with it."""
    terms = [each for each in DEFAULT_TERMS if type(each) is not term]
    rest = CostModel(model.space, model.hardware, terms=terms)
    return float(rest.price(state[None]).peak_bytes[0] / model.price(state[None]).peak_bytes[0])


@pytest.mark.parametrize(("devices", "stored"), [(1, False), (16, True)])
def test_the_operand_of_a_loop_is_in_memory(devices: int, stored: bool) -> None:
    """The product of ``up`` writes the GELU, too, if the gradient of ``down`` is a loop."""

    def step(down: jax.Array, up: jax.Array, x: jax.Array) -> jax.Array:
        def loss(down: jax.Array, up: jax.Array) -> jax.Array:
            return jnp.sum((jax.nn.gelu(x @ up) @ down).astype(jnp.float32) ** 2)

        gradient, other = jax.grad(loss, (0, 1))(down, up)
        return down - 0.1 * gradient, up - 0.1 * other

    sizes = ((1024, 256), (256, 1024), (1 << 20, 256))
    shapes = (jax.ShapeDtypeStruct(size, "bfloat16") for size in sizes)
    analysis = toast.analyze(step, *shapes, donate=(0, 1), platform="tpu")
    space = Space(analysis, Mesh.parse(f"d={devices}"), min_dimensions=0)
    state = sharded(space, ("x", 0), ("down", 1)) if devices > 1 else space.initial
    assert (without(CostModel(space, load("tpu-v5e")), PartedOperands, state) < 0.95) == stored


def test_the_operand_of_a_loop_of_convolutions_is_in_memory() -> None:
    """The kernel of a convolution computes its operands, but not in a loop."""

    def step(kernel: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
        def loss(kernel: jax.Array) -> jax.Array:
            y = jax.lax.conv_general_dilated(
                jnp.tanh(x) * scale, kernel, (1, 1), "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )  # fmt: skip
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return kernel - 0.1 * jax.grad(loss)(kernel)

    sizes = ((3, 3, 128, 128), (2048, 16, 16, 128), (128,))
    shapes = (jax.ShapeDtypeStruct(size, "bfloat16") for size in sizes)
    analysis = toast.analyze(step, *shapes, donate=(0,), platform="tpu")
    space = Space(analysis, Mesh.parse("d=8"), min_dimensions=0)
    state = sharded(space, ("x", 0), ("kernel", 3))
    assert without(CostModel(space, load("tpu-v5e")), PartedOperands, state) < 0.95


def test_operands_that_kernels_compute_for_a_loop_are_rounded() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((jnp.abs(x) @ w) ** 2))(w)

    shapes = (jax.ShapeDtypeStruct(size, "float32") for size in ((4096, 4096), (65536, 4096)))
    analysis = toast.analyze(step, *shapes, donate=(0,), platform="tpu")
    space = Space(analysis, Mesh.parse("d=16"), min_dimensions=0)
    state = sharded(space, ("x", 0), ("w", 1))
    model = CostModel(space, load("tpu-v5e"))
    layout = model.layout(state[None])
    absolute = next(
        v for v, op in enumerate(analysis.program.makers) if analysis.program.kind(op) == "abs"
    )
    here = model.tables.value_class[absolute]
    whole = layout.value_memory[0, here]
    assert PartedOperands().bytes(layout)[0, here] == pytest.approx(0.5 * whole)


@pytest.mark.parametrize(
    ("images", "features", "along", "padding"),
    [
        (80, 128, 2, 128 / 16),  # 10 images on a device, else in tiles of 16 rows
        (1024, 128, 2, None),  # they fill the lanes
        (80, 1024, 2, None),  # slices are whole rows of tiles
        (80, 128, 3, 128 / 16),  # slices of the gradient of the result
        (24, 128, 2, None),  # in bands
    ],
)
def test_images_are_in_lanes_if_a_loop_slices_their_features(
    images: int, features: int, along: int, padding: float | None
) -> None:
    """As compiled for v5e and v4: FSDP with 10 images on a device keeps 8 times as much."""

    def step(kernel: jax.Array, x: jax.Array) -> jax.Array:
        def loss(kernel: jax.Array) -> jax.Array:
            y = jax.lax.conv_general_dilated(
                jnp.tanh(x), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return kernel - 0.1 * jax.grad(loss)(kernel)

    sizes = ((3, 3, features, features), (images, 32, 32, features))
    shapes = (jax.ShapeDtypeStruct(size, "bfloat16") for size in sizes)
    analysis = toast.analyze(step, *shapes, donate=(0,), platform="tpu")
    space = Space(analysis, Mesh.parse("d=8"), min_dimensions=0)
    state = sharded(space, ("x", 0), ("kernel", along))
    model = CostModel(space, load("tpu-v5e"))
    layout = model.layout(state[None])
    added = ImagesInLanes().bytes(layout)[0]
    if padding is None:
        assert not added.any()
        return
    (value,) = np.flatnonzero(added)
    assert added[value] == pytest.approx(layout.value_memory[0, value] * (padding - 1))
    tanh = next(
        v for v, op in enumerate(analysis.program.makers) if analysis.program.kind(op) == "tanh"
    )
    assert (model.tables.value_class[tanh] == value) == (along == 2)
    assert without(model, ImagesInLanes, state) < 0.95


@pytest.mark.parametrize(("dtype", "values"), [("bfloat16", 3), ("float32", 1)])
def test_log_probabilities_wait_beside_the_gradient_of_a_loop(dtype: str, values: int) -> None:
    """One kernel writes both: a float32 array counts as two of bfloat16."""

    def loss(head: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax((x @ head).astype(jnp.float32))
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((256, 8192), (65536, 256))]
    labels = jax.ShapeDtypeStruct((65536,), "int32")
    step = jax.value_and_grad(loss, (0, 1))
    analysis = toast.analyze(step, *shapes, labels, platform="tpu")
    space = Space(analysis, Mesh.parse("d=8"), min_dimensions=0)
    tables = CostModel(space, load("tpu-v5e")).tables
    events, block = tables.events, tables.columns[PartedOperands.name]
    here = (events.column >= block.start) & (events.column < block.stop) & (events.sign > 0)
    sizes = [analysis.program.values[v].type.shape for v in events.value[here].tolist()]
    assert sizes.count((65536, 8192)) == values


@pytest.mark.parametrize(("devices", "waits"), [(4, False), (8, True)])
def test_operands_of_loops_wait_for_later_products(devices: int, waits: bool) -> None:
    """The gradients of weights of one layer, until those of the layers before it."""

    def step(layers: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(layers: list[jax.Array]) -> jax.Array:
            y = x
            for w in layers:
                y = jnp.tanh(y @ w)
            return (y.astype(jnp.float32) ** 2).sum()

        return [w - 0.1 * g for w, g in zip(layers, jax.grad(loss)(layers), strict=True)]

    x = jax.ShapeDtypeStruct((1 << 18, 512), "bfloat16")
    layers = [jax.ShapeDtypeStruct((512, 512), "bfloat16")] * 3
    analysis = toast.analyze(step, layers, x, donate=(0,), platform="tpu")
    space = Space(analysis, Mesh.parse(f"d={devices}"), min_dimensions=0)
    state = sharded(space, ("x", 0), *((f"layers[{n}]", 0) for n in range(3)))
    model = CostModel(space, load("tpu-v6e"))
    waiting = model.tables.columns[DelayedOperands.name]
    assert (model.columns(model.layout(state[None]))[0, waiting].max() > 0) == waits


@pytest.mark.parametrize(
    ("hardware", "devices", "rows", "waits"),
    [
        ("tpu-v5e", 8, 1 << 18, True),
        ("tpu-v5e", 4, 1 << 18, False),  # a short loop
        ("tpu-v6e", 8, 1 << 18, False),  # it waits for all-gathers
        ("tpu-v5e", 8, 1 << 16, False),  # 8 MiB stay in fast memory
    ],
)
def test_operands_of_loops_in_a_scan_wait_for_the_end_of_an_iteration(
    hardware: str, devices: int, rows: int, waits: bool
) -> None:
    def step(layers: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        @jax.checkpoint
        def layer(x: jax.Array, pair: list[jax.Array]) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.tanh(x @ pair[0]) @ pair[1]), None

        def loss(layers: list[jax.Array]) -> jax.Array:
            return (jax.lax.scan(layer, x, layers)[0].astype(jnp.float32) ** 2).sum()

        return [w - 0.1 * g for w, g in zip(layers, jax.grad(loss)(layers), strict=True)]

    x = jax.ShapeDtypeStruct((rows, 512), "bfloat16")
    layers = [jax.ShapeDtypeStruct((3, 512, 512), "bfloat16")] * 2
    analysis = toast.analyze(step, layers, x, donate=(0,), platform="tpu")
    space = Space(analysis, Mesh.parse(f"d={devices}"), min_dimensions=0)
    state = sharded(space, ("x", 0), ("layers[0]", 1), ("layers[1]", 1))
    model = CostModel(space, load(hardware))
    events, block = model.tables.events, model.tables.columns[DelayedOperands.name]
    size = model.columns(model.layout(state[None]))[0]
    here = (events.column >= block.start) & (events.column < block.stop)
    ends = events.op[here & (events.sign < 0) & (size[events.column] > 0)]
    last = [op for op, kind in enumerate(analysis.program.kinds) if kind == "dot_general"][-1]
    assert {*ends.tolist()} == ({last + 1} if waits else set())


@pytest.mark.parametrize(("sequence", "written"), [("model", True), (None, False)])
def test_a_short_loop_reads_slices_of_the_gradient_of_logits(
    sequence: str | None, written: bool
) -> None:
    """The gradient of the hidden values is scattered along the sequence."""

    def loss(head: jax.Array, w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax((jnp.tanh(x @ w) @ head).astype(jnp.float32))
        return -jnp.take_along_axis(scores, labels[..., None], -1).mean()

    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    pin = {"x": P("data", sequence), "head": P("data", "model"), "w": P("data")}
    plan = toast.plan(
        jax.value_and_grad(loss, (0, 1)), half((2048, 32768)), half((2048, 2048)),
        half((64, 1024, 2048)), jax.ShapeDtypeStruct((64, 1024), "int32"),
        mesh="data=4,model=4", hardware="tpu-v6e", constraints=toast.Constraints(pin=pin),
    )  # fmt: skip
    model = CostModel(Space(plan.analysis, plan.mesh), plan.hardware)
    block = model.tables.columns[PartedOperands.name]
    most = model.columns(model.layout(plan.state[None]))[0, block].max()
    logits = 2 * 64 * 1024 * 32768 / 16
    assert (most >= logits) == written


def test_arguments_do_not_wait() -> None:
    """They are in memory anyway."""

    def step(w: jax.Array, extra: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(extra: list[jax.Array]) -> jax.Array:
            y = x
            for own in extra:
                y = jnp.tanh(y @ w + x @ own)
            return (y.astype(jnp.float32) ** 2).sum()

        return [w - 0.1 * g for w, g in zip(extra, jax.grad(loss)(extra), strict=True)]

    x = jax.ShapeDtypeStruct((1 << 18, 512), "bfloat16")
    weight = jax.ShapeDtypeStruct((512, 512), "bfloat16")
    analysis = toast.analyze(step, weight, [weight] * 4, x, donate=(1,), platform="tpu")
    model = CostModel(Space(analysis, Mesh.parse("d=8"), min_dimensions=0), load("tpu-v6e"))
    events, arguments = model.tables.events, analysis.program.argument_values
    for term in (DelayedOperands, WaitingOperands):
        block = model.tables.columns[term.name]
        here = (events.column >= block.start) & (events.column < block.stop)
        assert not {*events.value[here].tolist()} & {*arguments}


@pytest.mark.parametrize(
    ("width", "along", "copied"), [(1024, 1, True), (2048, 1, False), (1024, 0, False)]
)
def test_a_table_gathered_along_its_last_dimension_is_copied(
    width: int, along: int, copied: bool
) -> None:
    """Shards of whole tiles are in their places after the gather."""

    def look(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return table[tokens]

    table = jax.ShapeDtypeStruct((32768, width), "bfloat16")
    tokens = jax.ShapeDtypeStruct((4096,), "int32")
    analysis = toast.analyze(look, table, tokens, platform="tpu")
    space = Space(analysis, Mesh.parse("d=16"), min_dimensions=0)
    state = sharded(space, ("tokens", 0), ("table", along))
    model = CostModel(space, load("tpu-v5e"))
    (columns,) = model.columns(model.layout(state[None]))
    assert columns[model.tables.columns["copies"]].max() > 0
    assert (columns[model.tables.columns[LookupCopies.name]].max() > 0) == copied


def test_products_read_gathered_tables_in_either_layout() -> None:
    """Only lookups need rows."""
    shapes = [jax.ShapeDtypeStruct(size, "bfloat16") for size in ((32768, 1024), (4096, 32768))]
    analysis = toast.analyze(lambda table, x: x @ table, *shapes, platform="tpu")
    space = Space(analysis, Mesh.parse("d=16"), min_dimensions=0)
    state = sharded(space, ("x", 0), ("table", 1))
    model = CostModel(space, load("tpu-v5e"))
    layout = model.layout(state[None])
    assert layout.copies.max() > 0
    assert not LookupCopies().bytes(layout).any()


@pytest.mark.parametrize("both", [False, True])
def test_the_time_of_a_lookup_s_copy_is_that_of_its_memory(both: bool) -> None:
    """Shards of 256 columns are whole tiles, those of 64 are not."""
    table = jax.ShapeDtypeStruct((262144, 1024), "bfloat16")
    tokens = jax.ShapeDtypeStruct((65536,), "int32")
    analysis = toast.analyze(lambda table, tokens: table[tokens], table, tokens, platform="tpu")
    space = Space(analysis, Mesh.parse("d=4,m=4"), min_dimensions=0)
    state = space.apply(space.initial, action(space, "tokens", 0, "d"))
    for axis in ("d", "m") if both else ("d",):
        state = space.apply(state, action(space, "table", 1, axis))
    model = CostModel(space, load("tpu-v5e"))
    layout = model.layout(state[None])
    assert bool(LookupCopies().bytes(layout).any()) == both
    seconds = GatherCopies().seconds(layout)
    assert seconds is not None
    assert (seconds.max() > 1e-3) == both


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("devices", "waits"), [(2, True), (4, True), (8, False)])
def test_operands_of_short_loops_wait_for_the_end_of_a_scan(
    devices: int, waits: bool, dtype: str
) -> None:
    def step(head: jax.Array, layers: jax.Array, x: jax.Array) -> jax.Array:
        def loss(head: jax.Array, layers: jax.Array) -> jax.Array:
            layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
            return jax.nn.logsumexp(jax.lax.scan(layer, x, layers)[0] @ head, -1).sum()

        gradient, other = jax.grad(loss, (0, 1))(head, layers)
        return head - 0.1 * gradient, layers - 0.1 * other

    shapes = (jax.ShapeDtypeStruct(s, dtype) for s in ((256, 2048), (4, 256, 256), (65536, 256)))
    analysis = toast.analyze(step, *shapes, donate=(0, 1), platform="tpu")
    space = Space(analysis, Mesh.parse(f"d={devices}"), min_dimensions=0)
    state = sharded(space, ("x", 0), ("head", 0))
    model = CostModel(space, load("tpu-v5e"))
    waiting = model.tables.columns["waiting operands"]
    most = model.columns(model.layout(state[None]))[0, waiting].max()
    if waits:  # the gradient of the logits, in bfloat16
        assert 1.0 <= most / (2 * 65536 * 2048 / devices) < 1.2
    else:
        assert most == 0


@pytest.mark.parametrize(
    ("hardware", "mesh", "axes", "whole"),
    [
        ("tpu-v6e", "d=64", "d", True),  # 8 x 8
        ("tpu-v6e", "a=8,b=8", "ab", True),
        ("tpu-v6e", "a=8,b=8", "a", False),
        ("tpu-v6e", "d=128", "d", False),  # 8 x 16
        ("tpu-v5e", "d=256", "d", True),
        ("tpu-v5p", "d=64", "d", True),  # 4 x 4 x 4
        ("tpu-v5p", "a=16,b=4", "a", False),
        ("h100", "d=64", "d", False),
    ],
)
def test_sums_over_all_devices_of_some_slices_are_whole(
    hardware: str, mesh: str, axes: str, whole: bool
) -> None:
    """By programs that XLA compiled for slices of 4 to 256 devices."""
    model = model_of(mesh, hardware=hardware)
    layout = model.layout(scattered(model, *axes, along=0)[None])
    here = layout.scattered > 0
    assert here.any()
    assert bool(layout.whole[here].all()) == whole


@pytest.mark.parametrize(("mesh", "axes", "whole"), [
    ("slice=2,d=64", "d", True),  # 8 x 8
    ("slice=2,d=32", "d", False),  # 4 x 8
    ("slice=2,d=32", ["slice", "d"], True),
    ("slice=2,d=64", ["slice"], False),
])  # fmt: skip
def test_slices_sum_whole_as_one_does(mesh: str, axes: Sequence[str], whole: bool) -> None:
    """By programs that XLA compiled for two slices of v6e; over all of both, it always does."""
    links = Collectives(load("tpu-v6e"), Mesh.parse(mesh))
    group = sum(1 << links.mesh.names.index(axis) for axis in axes)
    assert bool(links.scatters_by_sums[group]) == whole


def sums_of(counts: npt.NDArray[np.float64]) -> set[str]:
    """The kinds of sums over devices that occur, by the counts of all collectives."""
    kinds = {kind for kind, count in zip(COLLECTIVES, counts, strict=True) if count}
    return kinds & {"all_reduce", "reduce_scatter"}


def test_device_local_sums_over_a_whole_slice_are_all_reduces() -> None:
    """XLA for v6e scatters over 4 x 8 devices, but not over 8 x 8."""
    for devices, kind in ((32, "reduce_scatter"), (64, "all_reduce")):
        model = model_of(f"d={devices}", "local", "tpu-v6e")
        counts = model.price(scattered(model, "d")[None]).collective_count[0]
        assert sums_of(counts) == {kind}


@pytest.mark.parametrize(("hardware", "depth"), [("tpu-v5e", 32768), ("tpu-v6e", 65536)])
def test_loops_are_compared_with_the_sums_that_xla_would_run(hardware: str, depth: int) -> None:
    """Over all devices of a 4 x 4 slice, those are all-reduces, twice as long as the scatters."""
    shapes = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4096, depth), (depth, 4096)))
    analysis = toast.analyze(
        lambda x, y: x @ y, *shapes, platform="tpu", lowering="local", cache=False
    )
    space = Space(analysis, Mesh.parse("d=16"), min_dimensions=0)
    state = space.apply(space.initial, action(space, "x", 1, "d")).copy()
    state[space.classes.of_op[-1], 0] = 0  # scattered, as the caller wants it
    assert CostModel(space, load(hardware)).layout(state[None]).looped_sums.some


@pytest.mark.parametrize(("devices", "kind"), [(32, "reduce_scatter"), (64, "all_reduce")])
def test_scattered_sums_of_regions_are_all_reduces_over_a_whole_slice(
    devices: int, kind: str
) -> None:
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((devices,), ("d",), axis_types=(auto,))
    spec = jax.sharding.PartitionSpec
    region = jax.shard_map(
        lambda x: jax.lax.psum_scatter(jnp.sin(x), "d", tiled=True),
        mesh=mesh, in_specs=spec(None, "d"), out_specs=spec("d"),
    )  # fmt: skip
    shape = jax.ShapeDtypeStruct((8192, 2048 * devices), "float32")
    analysis = toast.analyze(region, shape, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse(f"d={devices}"), min_dimensions=0)
    counts = CostModel(space, load("tpu-v6e")).price(space.initial[None]).collective_count[0]
    assert sums_of(counts) == {kind}


@pytest.mark.parametrize(
    ("mesh", "axes", "summed"),
    [("d=64", "d", True), ("a=16,b=4", "a", False), ("d=16", "d", False)],
)
def test_gathers_over_a_closed_slice_with_three_dimensions_are_sums(
    mesh: str, axes: str, summed: bool
) -> None:
    """XLA for v5p puts the shards into zeros, and sums: in compiled programs for 64 devices."""
    shapes = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((65536, 4096), (4096, 16384)))
    analysis = toast.analyze(lambda x, w: x @ w, *shapes, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse(mesh), min_dimensions=0)
    state = space.initial
    for argument in ("x", "w"):
        state = space.apply(state, action(space, argument, 0, axes))
    model = CostModel(space, load("tpu-v5p"))
    counts = model.price(state[None]).collective_count[0]
    kind = "all_reduce" if summed else "all_gather"
    assert {k for k, n in zip(COLLECTIVES, counts, strict=True) if n} == {kind}
    assert {kind for kind, _, _ in model.reshards(state)} == {"all_gather"}  # in the program
    filled = break_down(model, state).term_seconds.get("copies of gathers")
    zeros = 4096 * 16384 * 4 / model.hardware.memory_bytes_per_s / model.hardware.single_op_share
    assert (0.0 if filled is None else filled.sum()) == pytest.approx(zeros if summed else 0.0)
