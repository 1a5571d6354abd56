"""What XLA's TPU compiler keeps of images in memory, as seen in compiled programs of the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from toast.cost import DEFAULT_TERMS, CostModel, Memo, break_down, table_cache
from toast.cost.liveness import Liveness, liveness
from toast.cost.rounding import stored_rounded
from toast.cost.terms.buffers import HaloOperands, ImagesInLanes, PartedOperands
from toast.hardware import Mesh, load
from toast.space import Space, States


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def convolved(x: Any, kernel: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def loss(kernel: Any, x: Any) -> Any:
    return (convolved(jnp.tanh(x), kernel).astype(jnp.float32) ** 2).sum()


def analyzed(function: Any, *arguments: Any, **options: Any) -> toast.Analysis:
    return toast.analyze(function, *arguments, platform="tpu", cache=False, **options)


def live(analysis: toast.Analysis, *, recomputes_images: bool = False) -> Liveness:
    names = analysis.names
    return liveness(
        analysis.program, names.use_op, names.use_value, lanes=128,
        recomputes_images=recomputes_images,
    )  # fmt: skip


def kinds(analysis: toast.Analysis, values: Any) -> list[str]:
    return [analysis.program.kind(analysis.program.makers[v]) for v in np.flatnonzero(values)]


@pytest.mark.parametrize(
    ("dtype", "recomputes", "stored"),
    [
        ("bfloat16", True, False),  # v5e, v6e
        ("bfloat16", False, True),  # v4
        ("float32", False, False),  # each convolution rounds it
    ],
)
def test_whether_convolutions_compute_their_operand_again(
    dtype: str, recomputes: bool, stored: bool
) -> None:
    step = jax.value_and_grad(loss)
    arguments = shape(3, 3, 128, 128, dtype=dtype), shape(32, 16, 16, 128, dtype=dtype)
    analysis = analyzed(step, *arguments)
    exists = live(analysis, recomputes_images=recomputes).exists
    assert ("tanh" in kinds(analysis, exists)) == stored


def test_which_tpus_compute_operands_of_convolutions_again() -> None:
    names = ("tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e")
    again = {name for name in names if load(name).recomputes_images}
    assert again == {"tpu-v5e", "tpu-v5p", "tpu-v6e"}
    step, arguments = jax.value_and_grad(loss), (shape(3, 3, 128, 128), shape(32, 16, 16, 128))
    space = Space(analyzed(step, *arguments), Mesh.parse("d=2"), min_dimensions=0)
    peaks = {name: CostModel(space, load(name)).price(space.initial[None]) for name in names[1:3]}
    assert peaks["tpu-v5e"].peak_bytes[0] < peaks["tpu-v4"].peak_bytes[0]


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("read", ["convolution", "sum", "elementwise"])
def test_a_gradient_that_convolutions_read_is_rounded(read: str, barrier: bool) -> None:
    """Its own kernel sums it, too, but not behind a barrier; other ops need it in float32."""

    def gradients(y: Any, z: Any, kernel: Any) -> Any:
        gradient = y * z
        if barrier:
            gradient = jax.lax.optimization_barrier(gradient)
        results = convolved(gradient, kernel), convolved(gradient, kernel * 2.0)
        others = {"sum": gradient.sum((0, 1, 2)), "elementwise": jnp.cumsum(gradient, 0)}
        return results, others.get(read, 0.0)

    images = shape(32, 16, 16, 128, dtype="float32")
    analysis = analyzed(gradients, images, images, shape(3, 3, 128, 128, dtype="float32"))
    found = stored_rounded(analysis.program, live(analysis))
    rounded = kinds(analysis, found)
    halved = read == "convolution" or (read == "sum" and not barrier)
    assert ("multiply" in rounded) == halved
    assert ("optimization_barrier" in rounded) == (barrier and halved)


@pytest.mark.parametrize(
    ("form", "rounded"),
    [("product", True), ("moved", True), ("lookup", False), ("stack", False)],
)
def test_which_kernels_sum_what_they_round(form: str, rounded: bool) -> None:
    """As compiled for v5e: what is looked up or in a stack is summed by another kernel."""

    def two(x: Any, w: Any, rows: Any) -> Any:
        y = x @ w
        if form == "moved":
            y = y.reshape(8, 32, 256).transpose(1, 0, 2)
        if form == "lookup":
            y = x[rows]
        if form == "stack":
            y = jax.lax.scan(lambda c, row: (c, row @ w), 0.0, x[:, None])[1][:, 0]
        return y @ w, y @ (w + w), y.sum(0)

    matrix = shape(256, 256, dtype="float32")
    analysis = analyzed(two, matrix, matrix, shape(256, dtype="int32"))
    found = stored_rounded(analysis.program, live(analysis))
    summed = next(
        op.operands[0] for number, op in enumerate(analysis.program.ops)
        if analysis.program.kind(number) == "reduce"
    )  # fmt: skip
    source = summed
    while analysis.program.kind(analysis.program.makers[source]) in ("reshape", "transpose"):
        source = analysis.program.ops[analysis.program.makers[source]].operands[0]
    assert found[source] == rounded


def test_the_gradient_of_a_group_norm_is_stored_in_the_shape_of_images() -> None:
    """Its groups are no dimension of the array that convolutions read."""

    def gradients(y: Any, z: Any, kernel: Any) -> Any:
        grouped = (y * z - y.mean((1, 2, 4), keepdims=True)).reshape(32, 16, 16, 128)
        return convolved(grouped, kernel), convolved(grouped, kernel * 2.0)

    groups = shape(32, 16, 16, 32, 4)
    analysis = analyzed(gradients, groups, groups, shape(3, 3, 128, 128))
    stored = [
        analysis.program.values[v].type.shape
        for v in np.flatnonzero(live(analysis, recomputes_images=True).exists)
    ]
    assert (32, 16, 16, 128) in stored[3:]
    assert (32, 16, 16, 32, 4) not in stored[3:]  # but for the arguments


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_residual_network_stores_no_reshaped_images(dtype: str) -> None:
    """Neither into groups nor from them: they follow from a sum that is stored."""

    def loss(kernel: Any, x: Any) -> Any:
        for _ in range(3):
            groups = x.astype(jnp.float32).reshape(*x.shape[:-1], 8, 16)
            groups -= groups.mean((1, 2, 4), keepdims=True)
            groups *= jax.lax.rsqrt((groups**2).mean((1, 2, 4), keepdims=True) + 1e-5)
            x = x + convolved(jax.nn.silu(groups.reshape(x.shape)).astype(x.dtype), kernel)
        return (x.astype(jnp.float32) ** 2).mean()

    arguments = shape(3, 3, 128, 128, dtype=dtype), shape(64, 32, 32, 128, dtype=dtype)
    analysis = analyzed(jax.value_and_grad(loss), *arguments)
    exists = live(analysis, recomputes_images=True).exists
    assert "reshape" not in kinds(analysis, exists)


def step(kernel: Any, x: Any) -> Any:
    return kernel - 0.1 * jax.grad(loss)(kernel, x)


def model_of(dtype: str = "bfloat16", hardware: str = "tpu-v5e") -> CostModel:
    arguments = shape(3, 3, 128, 128, dtype=dtype), shape(2048, 16, 16, 128, dtype=dtype)
    analysis = analyzed(step, *arguments, donate=(0,))
    return CostModel(Space(analysis, Mesh.parse("d=8"), min_dimensions=0), load(hardware))


def sharded(model: CostModel, *dimensions: tuple[str, int]) -> States:
    state = model.space.initial
    for argument, dimension in dimensions:
        state = model.space.apply(state, action(model.space, argument, dimension, "d"))
    return state


@pytest.mark.parametrize(("dimension", "stored"), [(1, True), (0, False)])
def test_devices_send_edges_of_operands_from_memory(dimension: int, stored: bool) -> None:
    """Of rows, but not of images, which convolutions compute again for themselves."""
    model = model_of()
    state = sharded(model, ("x", dimension))
    layout = model.layout(state[None])
    added = HaloOperands().bytes(layout)[0]
    tanh = kinds(model.space.analysis, np.ones(len(model.space.analysis.program.values))).index(
        "tanh"
    )
    here = model.tables.value_class[tanh]
    assert added[here] == (layout.value_memory[0, here] if stored else 0)
    seconds = break_down(model, state).term_seconds.get(HaloOperands.name, np.zeros(1)).sum()
    moved = 2 * added[here] / model.hardware.memory_bytes_per_s
    assert seconds == pytest.approx(moved)
    terms = tuple(term for term in DEFAULT_TERMS if not isinstance(term, HaloOperands))
    without = CostModel(model.space, model.hardware, terms=terms)
    share = without.price(state[None]).peak_bytes[0] / model.price(state[None]).peak_bytes[0]
    assert (share < 0.95) == stored


def test_an_operand_with_halos_of_a_loop_counts_once() -> None:
    model = model_of()
    layout = model.layout(sharded(model, ("x", 1), ("kernel", 3))[None])
    assert layout.parted.any()
    halos, parted = HaloOperands().bytes(layout)[0], PartedOperands().bytes(layout)[0]
    assert halos.any()
    assert not (halos * parted).any()


@pytest.mark.parametrize(("other", "share"), [(True, 0.5), (False, None)])
def test_loops_slice_rounded_copies_of_images(other: bool, share: float | None) -> None:
    """Of images that another kernel reads in float32; else the image itself is rounded."""

    def gradient(kernel: Any, x: Any, y: Any) -> Any:
        def loss(kernel: Any) -> Any:
            image = convolved(x, y)
            result = convolved(image, kernel)
            return (result**2).sum() + (jnp.cumsum(image, 0).sum() if other else 0.0)

        value, gradient = jax.value_and_grad(loss)(kernel)
        return value, kernel - 0.1 * gradient

    kernel = shape(3, 3, 128, 128, dtype="float32")
    images = shape(1024, 32, 32, 128, dtype="float32")
    analysis = analyzed(gradient, kernel, images, kernel, donate=(0,))
    space = Space(analysis, Mesh.parse("d=8"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    layout = model.layout(sharded(model, ("x", 0), ("kernel", 2))[None])
    added = ImagesInLanes().bytes(layout)[0]
    image = next(
        v for v, value in enumerate(analysis.program.values)
        if value.type.shape == (1024, 32, 32, 128) and analysis.program.kind(value.op) == "convolution"
    )  # fmt: skip
    here = model.tables.value_class[image]
    assert added[here] == pytest.approx((share or 0.0) * layout.value_memory[0, here])


@pytest.mark.parametrize("halos", [False, True])
def test_neighbourhoods_have_the_same_halos(halos: bool) -> None:
    model = model_of()
    state = sharded(model, ("x", 1 if halos else 0), ("kernel", 3))
    memo = Memo(model)
    priced, found = memo.price(state[None]), model.price(state[None])
    assert priced.seconds[0] == pytest.approx(found.seconds[0])
    assert priced.peak_bytes[0] == pytest.approx(found.peak_bytes[0])


def test_kernels_of_gpus_read_operands_with_halos_from_memory_anyway() -> None:
    model = model_of(hardware="h100")
    assert not HaloOperands().bytes(model.layout(sharded(model, ("x", 1))[None])).any()


def test_a_reshaped_operand_with_halos_takes_no_time() -> None:
    """Devices send edges of the argument."""
    image = shape(2048, 16 * 16, 128)
    analysis = analyzed(
        lambda x, kernel: convolved(x.reshape(2048, 16, 16, 128), kernel),
        image, shape(3, 3, 128, 128),
    )  # fmt: skip
    space = Space(analysis, Mesh.parse("d=8"), min_dimensions=0)
    state = space.apply(space.initial, action(space, "x", 1, "d"))
    model = CostModel(space, load("tpu-v5e"))
    found = break_down(model, state).term_seconds.get(HaloOperands.name, np.zeros(1))
    assert not found.any()


def test_gaps_beside_short_lived_images_are_larger() -> None:
    model = model_of()
    events, program = model.tables.events, model.space.analysis.program
    shapes = [program.values[v].type.shape for v in events.value.tolist()]
    images = np.array([len(shape) == 4 and shape[0] == 2048 for shape in shapes])
    arguments = np.isin(events.value, program.argument_values)
    assert set(events.gaps[images & ~arguments].tolist()) == {2.5}
    assert set(events.gaps[arguments].tolist()) == {1.0}


@pytest.mark.parametrize("same", [False, True])
def test_tables_are_cached_for_each_kind_of_tpu(same: bool, tmp_path: Path) -> None:
    """Those of v4, whose convolutions share operands, are no tables of v5e."""
    arguments = shape(3, 3, 128, 128), shape(32, 16, 16, 128)
    space = Space(analyzed(jax.value_and_grad(loss), *arguments), Mesh.parse("d=2"))
    options: dict[str, Any] = {"product_operands": "bf16", "lanes": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOAST_CACHE", str(tmp_path))
        patch.setattr(table_cache, "_LEAST_OPS", 0)
        first = table_cache.tables(space, DEFAULT_TERMS, recomputes_images=same, **options)
        second = table_cache.tables(space, DEFAULT_TERMS, recomputes_images=True, **options)
    assert bool((first.values.fused == second.values.fused).all()) == same
