"""Few images on a device, which XLA's TPU compiler cuts into bands, and the time of convolutions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from toast.cost import DEFAULT_TERMS, CostModel, Memo, break_down
from toast.cost.image_tiles import may_be_in_bands
from toast.cost.terms import ImagesInBands
from toast.cost.terms.buffers import HaloOperands, ImagesInLanes, PartedOperands
from toast.hardware import Mesh, load
from toast.space import Space, States

DEVICES = 8


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def convolved(x: Any, kernel: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def step(kernel: Any, x: Any) -> Any:
    def loss(kernel: Any) -> Any:
        return (convolved(jnp.tanh(convolved(x, kernel)), kernel).astype(jnp.float32) ** 2).sum()

    return kernel - 0.1 * jax.grad(loss)(kernel)


def model_of(
    images: int, *, size: int = 32, features: int = 128, window: int = 3, dtype: str = "bfloat16",
    hardware: str = "tpu-v5e", terms: Any = None, function: Any = step,
) -> CostModel:  # fmt: skip
    """Of ``images`` on each device if the batch is sharded."""
    kernel = shape(window, window, features, features, dtype=dtype)
    x = shape(images * DEVICES, size, size, features, dtype=dtype)
    analysis = toast.analyze(function, kernel, x, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse(f"d={DEVICES}"), min_dimensions=0)
    return CostModel(space, load(hardware), terms=terms)


def sharded(model: CostModel, *dimensions: tuple[str, int]) -> States:
    state = model.space.initial
    for argument, dimension in dimensions:
        state = model.space.apply(state, action(model.space, argument, dimension, "d"))
    return state


def padding(model: CostModel, kind: str, state: States) -> float:
    """The bytes of the first result of a kind of op in bands, over those without; 0 for none."""
    program = model.space.analysis.program
    value = next(v for v, each in enumerate(program.values) if program.kind(each.op) == kind)
    layout = model.layout(state[None])
    return float(layout.band_padding[0, model.tables.value_class[value]])


@pytest.mark.parametrize(
    ("images", "size", "features", "padded"),
    [
        (7, 32, 128, 8 * 5 / 32),  # rows of 32 positions are eight bands of 5 with an edge
        (1, 14, 128, 8 * 2 / 14),
        (4, 56, 96, 8 * 8 / 56 * 128 / 96),  # features are in the lanes
        (4, 128, 96, 8 * 17 / 128),  # or the rows
        (8, 32, 128, 0.0),
        (7, 13, 128, 0.0),
    ],
)
def test_which_images_are_in_bands(images: int, size: int, features: int, padded: float) -> None:
    """As single chains of convolutions compiled for v4, v5e and v6e."""
    model = model_of(images, size=size, features=features)
    state = sharded(model, ("x", 0))
    assert padding(model, "tanh", state) == pytest.approx(padded)
    assert padding(model, "tanh", model.space.initial) == 0.0 or images == 1


def test_images_in_bands_are_stored_from_op_to_last_use() -> None:
    """For operands of convolutions, too, which are no operands with halos besides."""
    model = model_of(4, size=64)
    state = sharded(model, ("x", 0))
    layout = model.layout(state[None])
    tanh = next(
        v for v, each in enumerate(model.space.analysis.program.values)
        if model.space.analysis.program.kind(each.op) == "tanh"
    )  # fmt: skip
    here = int(model.tables.value_class[tanh])
    assert model.tables.values.fused[here]
    own = ImagesInBands().bytes(layout)[0, here]
    whole = layout.value_bytes[0, here] * 8 * 9 / 64 / model.hardware.allocator_efficiency
    assert 0.7 * whole < own < whole
    for term in (HaloOperands(), PartedOperands()):
        assert not term.bytes(layout)[0, here]
    timeline = model.timeline(state)
    program = model.space.analysis.program
    (buffer,) = (b for b in timeline.buffers if b.value == tanh)
    last = max(number for number, op in enumerate(program.ops) if tanh in op.operands)
    assert (buffer.start, buffer.end) == (program.values[tanh].op, last + 1)


def test_stored_images_count_once() -> None:
    model = model_of(4, size=64)
    state = sharded(model, ("x", 0))
    layout, values = model.layout(state[None]), model.tables.values
    stored = ~(values.fused | values.merged) & (layout.band_padding[0] > 0)
    assert stored.any()
    both = ImagesInBands().bytes(layout)[0] + layout.value_memory[0]
    most = np.maximum(layout.value_bytes[0] * layout.band_padding[0], layout.value_memory[0])
    assert (both[stored] <= most[stored] * 1.0001 / model.hardware.allocator_efficiency).all()


@pytest.mark.parametrize(("images", "banded"), [(4, True), (16, False)])
def test_bands_take_time_and_memory(images: int, banded: bool) -> None:
    terms = tuple(term for term in DEFAULT_TERMS if not isinstance(term, ImagesInBands))
    model, without = model_of(images, size=64), model_of(images, size=64, terms=terms)
    state = sharded(model, ("x", 0))
    with_bands, plain = model.price(state[None]), without.price(state[None])
    assert (with_bands.seconds[0] > 1.3 * plain.seconds[0]) == banded
    assert (with_bands.peak_bytes[0] > 1.2 * plain.peak_bytes[0]) == banded
    moved = break_down(model, state).term_seconds.get(ImagesInBands.name, np.zeros(1)).sum()
    assert (moved > 0) == banded


def test_neighbourhoods_have_the_same_bands() -> None:
    model = model_of(4)
    states = np.stack([sharded(model, ("x", 0)), sharded(model, ("x", 1)), model.space.initial])
    priced, alone = Memo(model).price(states), model.price(states)
    assert np.allclose(priced.seconds, alone.seconds)
    assert np.allclose(priced.peak_bytes, alone.peak_bytes)


def test_gpus_and_other_programs_have_no_bands() -> None:
    model = model_of(4, hardware="h100")
    assert not model.layout(sharded(model, ("x", 0))[None]).band_padding.any()
    assert ImagesInBands.name not in model.tables.columns.names
    assert not len(banded(lambda x: x @ x.T, shape(16, 16)))


def test_bands_have_no_gaps() -> None:
    model = model_of(4)
    columns = model.tables.columns[ImagesInBands.name]
    inside = (model.tables.events.column >= columns.start) & (
        model.tables.events.column < columns.stop
    )
    assert inside.any()
    assert not model.tables.events.gaps[inside].any()


def seconds_of(images: int, *, function: Any = convolved, **options: Any) -> float:
    """Milliseconds of the products of a program on one device."""
    model = model_of(images, function=lambda k, x: function(x, k), **options)
    return 1e3 * float(break_down(model, model.space.initial).product_seconds.sum())


@pytest.mark.parametrize(
    ("sizes", "compiled"),
    [
        # images, positions, features, window, element type; milliseconds of the compiler
        ((16, 64, 64, 1, "float32"), 0.060),
        ((16, 64, 128, 3, "bfloat16"), 0.112),
        ((128, 28, 64, 1, "float32"), 0.043),
        ((256, 14, 64, 1, "bfloat16"), 0.032),
    ],
)
def test_convolutions_take_as_long_as_compiled(
    sizes: tuple[int, int, int, int, str], compiled: float
) -> None:
    """For v5e: with little to sum, each element of the tiles of the result takes time."""
    images, size, features, window, dtype = sizes
    own = seconds_of(images // DEVICES, size=size, features=features, window=window, dtype=dtype)
    assert own == pytest.approx(compiled, rel=0.3)


def test_a_copy_turns_images_into_lanes_for_loops() -> None:
    model = model_of(12, size=64)
    state = sharded(model, ("x", 0), ("kernel", 2))
    layout = model.layout(state[None])
    moved = ImagesInLanes().seconds(layout)[0]
    copied = ImagesInLanes().bytes(layout)[0]
    assert (copied > 0).any()
    assert ((moved > 0) == (copied > 0)).all()
    few = model_of(4, size=64)  # in bands
    assert (
        not ImagesInLanes().seconds(few.layout(sharded(few, ("x", 0), ("kernel", 2))[None])).any()
    )
    assert not ImagesInLanes().least_seconds(layout).any()


@pytest.mark.parametrize(("mesh", "loop"), [("d=8", True), ("d=8,e=2", False)])
def test_loops_of_convolutions_sum_over_all_devices(mesh: str, loop: bool) -> None:
    """In neighbourhoods, too."""
    kernel, x = shape(3, 3, 128, 128), shape(2048, 32, 32, 128)
    analysis = toast.analyze(step, kernel, x, platform="tpu", cache=False)
    model = CostModel(Space(analysis, Mesh.parse(mesh), min_dimensions=0), load("tpu-v5e"))
    state = sharded(model, ("x", 0), ("kernel", 2))
    assert model.layout(state[None]).parted.any() == loop
    priced, alone = Memo(model).price(state[None]), model.price(state[None])
    assert np.allclose(priced.seconds, alone.seconds)
    assert np.allclose(priced.peak_bytes, alone.peak_bytes)


def banded(function: Any, *arguments: Any) -> list[tuple[int, ...]]:
    """The shapes of the values of a program that may be in bands."""
    program = toast.analyze(function, *arguments, platform="tpu", cache=False).program
    constant = np.zeros(len(program.values), dtype=bool)
    values = may_be_in_bands(program, program.kinds, constant)
    return [program.values[v].type.shape for v in values.tolist()]


def test_kernels_are_no_images() -> None:
    """Nor are their gradients and moments, however large their windows."""

    def patches(kernel: Any, moment: Any, x: Any) -> Any:
        def loss(kernel: Any) -> Any:
            strided = jax.lax.conv_general_dilated(
                jnp.tanh(x), jnp.tanh(kernel), (16, 16), "VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )  # fmt: skip
            return (strided**2).sum()

        moment = 0.9 * moment + jax.grad(loss)(kernel)
        return kernel - 0.1 * moment, moment

    kernel = shape(16, 16, 3, 64, dtype="float32")
    found = banded(patches, kernel, kernel, shape(32, 224, 224, 3, dtype="float32"))
    assert found
    assert {sizes[0] for sizes in found} == {32}


def test_features_that_lead_are_no_images() -> None:
    def loss(x: Any, kernel: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            jnp.tanh(x), kernel, (1, 1), "SAME", dimension_numbers=("CHWN", "HWIO", "CHWN")
        )
        return jnp.tanh(y).sum()

    assert not banded(loss, shape(4, 32, 32, 512), shape(3, 3, 4, 128))


def test_constants_are_in_no_bands() -> None:
    model = model_of(4)
    values = model.tables.values
    assert values.banded.any()
    assert not (values.banded & values.constant).any()


@pytest.mark.parametrize("sizes", [(8, 32, 32, 0), (0, 32, 32, 128)])
def test_images_without_elements_have_a_price(sizes: tuple[int, ...]) -> None:
    kernel = shape(3, 3, sizes[-1], 128)
    analysis = toast.analyze(
        lambda k, x: convolved(jnp.tanh(x), k), kernel, shape(*sizes), platform="tpu", cache=False
    )
    space = Space(analysis, Mesh.parse("d=2"), min_dimensions=0)
    price = CostModel(space, load("tpu-v5e")).price(space.initial[None])
    assert np.isfinite(price.seconds).all()
    assert np.isfinite(price.peak_bytes).all()


def test_gradients_of_kernels_read_each_element_of_the_smaller_images() -> None:
    """1 x 1 convolutions of 64 features: 31 us as compiled for v5e, and 7 by their FLOPs."""
    images = 56 // DEVICES

    def gradient(kernel: Any, x: Any) -> Any:
        return jax.grad(lambda k: (convolved(jnp.tanh(x), k).astype(jnp.float32) ** 2).sum())(
            kernel
        )

    model = model_of(images, size=32, features=64, window=1, function=gradient)
    program = model.space.analysis.program
    (op,) = (
        number for number, each in enumerate(program.ops)
        if program.kinds[number] == "convolution"
        and program.values[each.results[0]].type.shape == (1, 1, 64, 64)
    )  # fmt: skip
    seconds = break_down(model, model.space.initial).product_seconds[op]
    assert 20e-6 < seconds < 45e-6
