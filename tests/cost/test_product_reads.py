"""What the kernels of products read and compute besides the product, and images of convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from tests.helpers import term_seconds as terms
from toast.cost import CostModel, break_down
from toast.cost.liveness import liveness
from toast.evaluation.optimum import random_legal
from toast.hardware import Hardware, Mesh, load
from toast.space import Space

V5E = load("tpu-v5e")


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def attend(queries: Any, cache: Any) -> Any:
    return jnp.einsum("bnk,btnk->bnt", queries, cache)


def repeating(queries: Any, cache: Any) -> Any:
    return attend(queries, jnp.repeat(cache, queries.shape[1] // cache.shape[2], axis=2))


def test_the_only_head_of_a_device_is_repeated_as_it_is_read() -> None:
    """By the kernel of a token that attends to a cache, of which several queries share a head."""
    whole = terms("tpu-v5e", attend, shape(8, 16, 128), shape(8, 4096, 16, 128))
    shared = terms("tpu-v5e", repeating, shape(8, 16, 128), shape(8, 4096, 1, 128))
    assert shared.get("reads", 0.0) == shared.get("writes", 0.0) == whole.get("reads", 0.0) == 0
    assert shared["products"] <= whole["products"]


def test_several_heads_are_repeated_by_a_kernel_of_their_own() -> None:
    """Unless heads are sharded, so that each device has one."""
    arguments = shape(8, 16, 128), shape(8, 4096, 4, 128)
    analysis = toast.analyze(repeating, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    model = CostModel(space, V5E)
    heads = space.apply(space.initial, action(space, "cache", 2, "a"))
    for state, moves in ((space.initial, 2), (heads, 0)):  # tiles of four rows
        found = break_down(model, state).term_seconds
        elements = 8 * 4096 * 16 * 128
        seconds = moves * elements / V5E.transposed_elements_per_s
        assert found["writes"].sum() == pytest.approx(seconds, rel=1e-3)
        assert found["reads"].sum() == 0
    # What a policy keeps is in memory, whoever reads it.
    assert (model.layout(heads[None]).unrounded_memory > 0).all()
    repeated, sharded = model.price(np.stack([space.initial, heads])).peak_bytes
    assert repeated > 4 * sharded


def test_heads_of_half_a_tile_are_repeated_for_the_sum_over_keys() -> None:
    """Their keys are in the lanes, so that the other product repeats heads as it reads."""

    def values(weights: Any, cache: Any) -> Any:
        return jnp.einsum("bnt,btnk->bnk", weights, jnp.repeat(cache, 4, axis=2))

    heads = shape(8, 4096, 4, 64)
    assert terms("tpu-v5e", repeating, shape(8, 16, 64), heads).get("writes", 0.0) == 0
    found = terms("tpu-v5e", values, shape(8, 16, 4096), heads)
    seconds = 8 * 4096 * 16 * 64 / V5E.transposed_elements_per_s  # each element moves once
    assert found["writes"] == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(("heads", "copies", "moves"), [(4, 2, 4), (2, 8, 1), (2, 2, 1)])
def test_copies_of_heads_are_the_rows_of_tiles(heads: int, copies: int, moves: int) -> None:
    found = terms("tpu-v5e", repeating, shape(8, heads * copies, 128), shape(8, 4096, heads, 128))
    elements = 8 * 4096 * heads * copies * 128
    seconds = moves * elements / V5E.transposed_elements_per_s
    assert found["writes"] == pytest.approx(seconds, rel=1e-3)


def test_heads_in_parts_of_rows_are_in_another_layout() -> None:
    found = terms("tpu-v5e", repeating, shape(8, 16, 96), shape(8, 4096, 4, 96))
    assert found.get("writes", 0.0) == found.get("reads", 0.0) == 0


@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_the_next_token_costs_no_read_of_its_logits_on_tpus(hardware: str) -> None:
    def token(x: Any, head: Any) -> Any:
        return jnp.max(x @ head, axis=-1)

    def kept(x: Any, head: Any) -> Any:
        logits = x @ head
        return jnp.max(logits, axis=-1), logits

    arguments = shape(256, 4096), shape(4096, 65536)
    assert terms(hardware, kept, *arguments)["reads"] > 0
    alone = terms(hardware, token, *arguments).get("reads", 0.0)
    assert alone == 0 if hardware.startswith("tpu") else alone > 0


@pytest.mark.parametrize(("form", "kernels"), [("picked", 1), ("all", 1), ("mean", 2)])
def test_kernels_read_logits_once_for_their_logarithmic_sum(form: str, kernels: int) -> None:
    """A mean needs a kernel of its own."""

    def loss(x: Any, head: Any, labels: Any) -> Any:
        logits = (x @ head).astype(jnp.float32)
        total = jax.nn.logsumexp(logits, -1)
        if form == "all":
            return total.sum()
        picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return (total - picked).sum() + (logits.mean(-1).sum() if form == "mean" else 0.0)

    found = terms("tpu-v5e", loss, shape(8192, 64), shape(64, 65536), shape(8192, dtype="int32"))
    elements = 8192 * 65536
    assert found["reads"] == pytest.approx(kernels * elements / V5E.vector_elements_per_s, rel=0.05)


@pytest.mark.parametrize(("devices", "written"), [(2, False), (8, True)])
def test_products_compute_the_gradient_of_picked_logits_again(devices: int, written: bool) -> None:
    """As compiled for v5e, v6e and v4: only for a loop, it is written."""

    def step(head: Any, x: Any, labels: Any) -> Any:
        def loss(head: Any, x: Any) -> Any:
            logits = (x @ head).astype(jnp.float32)
            picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            return (jax.nn.logsumexp(logits, -1) - picked).mean()

        value, (gradient, carried) = jax.value_and_grad(loss, (0, 1))(head, x)
        return head - 0.1 * gradient, carried, value

    arguments = (
        shape(1024, 65536),
        shape(8192 * devices, 1024),
        shape(8192 * devices, dtype="int32"),
    )
    analysis = toast.analyze(step, *arguments, donate=(0,), platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse(f"d={devices}"), min_dimensions=0)
    state = space.initial
    for argument, dimension in (("x", 0), ("labels", 0), ("head", 1)):
        state = space.apply(state, action(space, argument, dimension, "d"))
    model = CostModel(space, V5E)
    tables, layout = model.tables, model.layout(state[None])
    (gradient,) = np.flatnonzero(tables.values.of_picked)
    assert (tables.values.written[gradient], tables.values.kernels[gradient]) == (0, 0)
    found = break_down(model, state).term_seconds
    moved = 3 * layout.value_memory[0, gradient] / V5E.memory_bytes_per_s
    seconds = found["gradients of logits"].sum() if written else 0.0
    assert seconds == pytest.approx(moved * written)


# -- images of convolutions ------------------------------------------------------------------------


def convolved(images: Any, kernel: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=layout)


def gradient(images: Any, results: Any) -> Any:
    """Of the kernel."""
    kernel = shape(3, 3, images.shape[-1], results.shape[-1])
    return jax.linear_transpose(lambda k: convolved(images, k), kernel)(results)[0]


@pytest.mark.parametrize(("few", "many"), [(9, 16), (17, 24), (8, 8)])
def test_convolutions_compute_whole_tiles_of_images(few: int, many: int) -> None:
    times = [
        terms("tpu-v5e", function, shape(images, 64, 64, 256), other)["products"]
        for images in (few, many)
        for function, other in (
            (convolved, shape(3, 3, 256, 256)), (gradient, shape(images, 64, 64, 256)),
        )
    ]  # fmt: skip
    assert times[:2] == pytest.approx(times[2:], rel=0.02)


@pytest.mark.parametrize("backward", [False, True])
def test_patches_are_no_kernel_gradient(backward: bool) -> None:
    """Although their window has more places than the result has positions."""

    def patches(images: Any, kernel: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            images, kernel, (16, 16), "VALID", dimension_numbers=layout
        )

    kernel = shape(16, 16, 3, 768)

    def gradient(images: Any, results: Any) -> Any:
        return jax.linear_transpose(lambda k: patches(images, k), kernel)(results)[0]

    images = shape(64, 224, 224, 3)
    function, other = (gradient, shape(64, 14, 14, 768)) if backward else (patches, kernel)
    analysis = toast.analyze(function, images, other, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    (counted,) = CostModel(space, V5E).tables.products.images.tolist()
    assert counted == 64


def test_sharded_images_fill_tiles_of_their_own() -> None:
    """24 images on two devices are two tiles on each."""
    arguments = shape(24, 64, 64, 256), shape(3, 3, 256, 256)
    analysis = toast.analyze(convolved, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    model = CostModel(space, V5E)
    sharded = space.apply(space.initial, action(space, "images", 0, "a"))
    half, whole = (
        float(break_down(model, state).product_seconds.sum()) for state in (sharded, space.initial)
    )
    assert half == pytest.approx(2 / 3 * whole, rel=0.03)


def softmax_attention(queries: Any, keys: Any, values: Any) -> Any:
    scores = jax.nn.softmax(attend(queries, keys).astype(jnp.float32))
    return jnp.einsum("bnt,btnk->bnk", scores.astype(jnp.bfloat16), values)


@pytest.mark.parametrize(
    ("heads", "size", "axis", "in_lanes"),
    [
        (8, 128, None, 8), (16, 128, None, 16), (32, 128, 2, 8), (8, 128, 2, 2),
        (4, 128, 2, 0), (6, 128, None, 0), (8, 64, None, 0), (8, 96, None, 0),
    ],
)  # fmt: skip
def test_scores_of_a_cache_have_heads_in_their_lanes(
    heads: int, size: int, axis: int | None, in_lanes: int
) -> None:
    """If a head is whole rows of tiles, and the heads of a device fill the rows of a tile.

    A softmax then reads and writes tiles with as many elements in 128 lanes as a device has heads,
    as compiled for v5e and v4.  ``axis`` is the sharded dimension of the cache, over four devices.
    """
    keys = 8, 4096, heads, size
    arguments = shape(8, heads, size), shape(*keys), shape(*keys)
    analysis = toast.analyze(softmax_attention, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    state = space.initial
    if axis is not None:
        state = space.apply(state, action(space, "keys", axis, "a"))
    found = break_down(CostModel(space, V5E), state).term_seconds
    elements = 8 * 4096 * heads / (4 if axis else 1)
    # The maximum, the sum, and the result, which the last kernel writes meanwhile.
    passes = 3 * elements / V5E.vector_elements_per_s * (128 / in_lanes if in_lanes else 1)
    seconds = found["reads"].sum() + found["writes"].sum()
    assert seconds == pytest.approx(passes, rel=0.05)


def test_a_softmax_of_scores_of_a_cache_stores_them_as_the_product_writes_them() -> None:
    arguments = shape(8, 8, 64), shape(8, 4096, 8, 64), shape(8, 4096, 8, 64)
    analysis = toast.analyze(softmax_attention, *arguments, platform="tpu", cache=False)
    program, names = analysis.program, analysis.names
    live = liveness(program, names.use_op, names.use_value, lanes=128)
    stored = [
        program.values[value].type.dtype for value in np.flatnonzero(live.exists)
        if math.prod(program.values[value].type.shape) == 8 * 4096 * 8
    ]  # fmt: skip
    assert stored == ["bf16", "bf16"]  # scores and probabilities


# -- what products fuse, read and round -----------------------------------------------------------


def test_a_product_writes_what_it_fuses_unless_it_is_summed_over_devices() -> None:
    """Then a kernel of its own reads the sum, and writes the result."""

    def layer(x: Any, weight: Any) -> Any:
        return jax.nn.relu(x @ weight)

    arguments = shape(4096, 8192), shape(8192, 4096)
    analysis = toast.analyze(layer, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    model = CostModel(space, V5E)
    moved = 2 * 2 * 4096 * 4096 / V5E.memory_bytes_per_s
    for dimension, spent in ((0, 0.0), (1, moved + V5E.kernel_latency_s)):
        state = space.apply(space.initial, action(space, "x", dimension, "a"))
        found = break_down(model, state).term_seconds
        assert found.get("writes", np.zeros(1)).sum() == 0
        assert found.get("kernels after sums", np.zeros(1)).sum() == pytest.approx(spent)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_fuses_the_addition_of_another_partial_sum(swapped: bool) -> None:
    """The sum over devices is that of the total; without another one, the sum is first."""

    def layer(x: Any, first: Any, z: Any, second: Any) -> Any:
        left, right = x @ first, z @ second
        return right + left if swapped else left + right

    arguments = (shape(4096, 8192), shape(8192, 4096)) * 2
    analysis = toast.analyze(layer, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    model = CostModel(space, V5E)

    def spent(*names: str) -> float:
        state = space.initial
        for name in names:
            state = space.apply(state, action(space, name, 1, "a"))
        found = break_down(model, state).term_seconds.get("kernels after sums", np.zeros(1))
        return float(found.sum())

    assert spent("x", "z") == 0
    assert spent("z") > 0  # the later product, which adds


def test_a_product_fuses_no_larger_result() -> None:
    """A broadcast of the product has a kernel of its own, which writes it."""

    def spread(x: Any, weight: Any) -> Any:
        return jnp.broadcast_to((x @ weight)[..., None], (1024, 8, 8192)) * 2

    found = terms("tpu-v5e", spread, shape(1024, 256), shape(256, 8))
    least = 2 * 1024 * 8 * 8192 / V5E.memory_bytes_per_s
    assert found["writes"] >= least


def test_products_of_vectors_fuse_nothing() -> None:
    def scaled(queries: Any, cache: Any) -> Any:
        return attend(queries, cache) * 0.5

    arguments = shape(8, 16, 128), shape(8, 4096, 16, 128)
    assert terms("tpu-v5e", attend, *arguments).get("writes", 0.0) == 0
    assert terms("tpu-v5e", scaled, *arguments)["writes"] > 0


@pytest.mark.parametrize(("form", "kernels"), [("argument", 0), ("reshaped", 0), ("computed", 1)])
def test_vectors_in_memory_are_read_where_they_are(form: str, kernels: int) -> None:
    def step(queries: Any, cache: Any) -> Any:
        if form == "computed":
            queries = queries * 2
        return attend(queries.reshape(8, 16, 128), cache)

    queries = shape(8, 16, 128) if form == "argument" else shape(8, 1, 16, 128)
    found = terms("tpu-v5e", step, queries, shape(8, 4096, 16, 128))
    assert found.get("latencies", 0.0) == pytest.approx(kernels * V5E.kernel_latency_s)


def test_products_round_arguments_as_they_read_them() -> None:
    """Unless devices gather the rounded argument: a kernel rounds the shards before."""

    def layer(x: Any, weight: Any) -> Any:
        return x @ weight.astype(jnp.bfloat16)

    rows, width = 8, 8192
    arguments = shape(rows, width), shape(width, width, dtype="float32")
    analysis = toast.analyze(layer, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    model, program = CostModel(space, V5E), space.analysis.program
    whole, gathered = space.initial, space.initial.copy()
    weight = program.argument_values[1]
    for op in (program.values[weight].op, *(
        number for number, op in enumerate(program.ops) if weight in op.operands
    )):  # fmt: skip
        gathered[space.classes.of_op[op], 0] = 0
    alone, before = (break_down(model, state).term_seconds for state in (whole, gathered))
    assert alone["rounded reads"].sum() == alone.get("reads", np.zeros(1)).sum() == 0
    rate = V5E.products.memory_share * V5E.memory_bytes_per_s
    assert alone["products"].sum() >= 4 * width * width / rate
    assert before["rounded reads"].sum() >= 4 * width * width / 4 / V5E.memory_bytes_per_s
    assert before["products"].sum() < 0.6 * alone["products"].sum()


def rounding(x: Any, weight: Any) -> Any:
    return x @ weight.astype(jnp.bfloat16)


def behind_a_barrier(x: Any, weight: Any) -> Any:
    return x @ jax.lax.optimization_barrier(weight).astype(jnp.bfloat16)


def of_a_stack(x: Any, weight: Any) -> Any:
    return x @ weight[1].astype(jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [behind_a_barrier, of_a_stack])
def test_products_read_arguments_behind_barriers_and_slices_of_them(
    form: Callable[..., Any], dtype: str
) -> None:
    width, stacks = 4096, (2,) if form is of_a_stack else ()
    weight = shape(*stacks, width, width, dtype=dtype)
    found = terms("tpu-v5e", form, shape(8, width), weight)
    assert {name for name, seconds in found.items() if seconds} == {"products"}
    other = terms("tpu-v5e", rounding, shape(8, width), shape(width, width, dtype=dtype))
    if stacks:  # which XLA does not copy to fast memory ahead
        assert found["products"] >= other["products"]
    else:
        assert found == pytest.approx(other)


@pytest.mark.parametrize("hardware", [V5E, V5E.as_scheduled_for, load("tpu-v6e").as_scheduled_for])
@pytest.mark.parametrize(
    ("cache", "product"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("int8", "bfloat16")]
)
def test_no_state_is_faster_than_the_bound_for_products_of_vectors(
    hardware: Hardware, cache: str, product: str
) -> None:
    def step(queries: Any, keys: Any) -> Any:
        return jnp.einsum("bd,bnd->bn", queries, keys.astype(product))

    arguments = shape(4096, 256, dtype=product), shape(4096, 4, 256, dtype=cache)
    analysis = toast.analyze(step, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    model = CostModel(space, hardware)
    states = random_legal(space, 100, np.random.default_rng(0))
    assert model.price(states).seconds.min() >= model.lower_bound()


def test_a_form_that_a_product_reads_as_it_is_has_a_kernel() -> None:
    """Although another product reads a slice of it."""

    def layer(x: Any, weight: Any) -> Any:
        square = weight.reshape(2048, 2048)
        return x @ square, x @ square[:1024].T

    arguments = shape(8, 2048), shape(2048, 32, 64)
    assert terms("tpu-v5e", layer, *arguments)["reads"] > 0


def test_columns_of_a_weight_are_read_by_a_kernel() -> None:
    def layer(x: Any, weight: Any) -> Any:
        return x @ weight[:, :512]

    assert terms("tpu-v5e", layer, shape(8, 2048), shape(2048, 1536))["reads"] > 0


def test_many_barriers_in_a_row_are_read_through() -> None:
    def layer(x: Any, weight: Any) -> Any:
        for _ in range(1500):
            weight = jax.lax.optimization_barrier(weight)
        return x @ weight.astype(jnp.bfloat16)

    arguments = shape(8, 256), shape(256, 256, dtype="float32")
    found = terms("tpu-v5e", layer, *arguments)
    assert found == pytest.approx(terms("tpu-v5e", rounding, *arguments))


def test_a_weight_of_several_products_is_rounded_once() -> None:
    def layers(inputs: Any, weight: Any) -> Any:
        by = weight.astype(jnp.bfloat16)
        return [x @ by for x in inputs]

    spent = []
    for count in (1, 3):
        weight = shape(8192, 8192, dtype="float32")
        analysis = toast.analyze(
            layers, [shape(8, 8192)] * count, weight, platform="tpu", cache=False
        )
        space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
        program, gathered = analysis.program, space.initial.copy()
        gathered[space.classes.of_op[program.values[program.argument_values[-1]].op], 0] = 0
        spent.append(
            break_down(CostModel(space, V5E), gathered).term_seconds["rounded reads"].sum()
        )
    assert spent[0] == pytest.approx(spent[1])


def test_what_is_exchanged_before_a_product_is_rounded_before() -> None:
    """Shards of rows become shards of columns, over as many devices."""
    arguments = shape(8, 8192), shape(8192, 8192, dtype="float32")
    analysis = toast.analyze(rounding, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    model, program = CostModel(space, V5E), analysis.program
    columns = space.apply(space.initial, action(space, "weight", 1, "a"))
    exchanged = columns.copy()
    exchanged[space.classes.of_op[program.values[program.argument_values[1]].op], 0] = 0
    aligned, apart = (
        break_down(model, state).term_seconds["rounded reads"].sum()
        for state in (columns, exchanged)
    )
    assert aligned == 0
    assert apart >= 4 * 8192 * 8192 / 4 / V5E.memory_bytes_per_s


@pytest.mark.parametrize("rows", [8, 1024, 16384])
@pytest.mark.parametrize(("dtype", "product"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_no_state_is_faster_than_the_bound_if_products_round(
    rows: int, dtype: str, product: str
) -> None:
    """Whose choices do not depend on those of the argument."""

    def layer(x: Any, weight: Any) -> Any:
        return jax.nn.relu(x @ weight.astype(product))

    arguments = shape(rows, 4096, dtype=product), shape(4096, 4097, dtype=dtype)
    analysis = toast.analyze(layer, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    model, random = CostModel(space, V5E), np.random.default_rng(0)
    states = np.stack([
        np.stack([each[random.integers(len(each))] for each in space.choices])
        for _ in range(300)
    ])  # fmt: skip
    assert model.price(states).seconds.min() >= model.lower_bound()


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_a_device_with_one_of_the_queries_of_a_head_uses_the_vector_unit(heads: int) -> None:
    """In the time of a program with one query."""

    def grouped(queries: Any, cache: Any) -> Any:
        return jnp.einsum("bgqk,btgk->bgqt", queries, cache)

    def one(queries: Any, cache: Any) -> Any:
        return jnp.einsum("bgk,btgk->bgt", queries, cache)

    cache = shape(64, 4096, heads, 128)
    analysis = toast.analyze(grouped, shape(64, heads, 4, 128), cache, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
    model = CostModel(space, V5E)
    state = space.apply(space.initial, action(space, "queries", 2, "a"))
    whole, sharded = model.price(np.stack([space.initial, state])).matmul_seconds
    assert sharded > 1.5 * whole
    written = terms("tpu-v5e", one, shape(64, heads, 128), cache)["products"]
    assert sharded == pytest.approx(written, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "devices"), [(8, 8), (1, 1), (16, 8)])
def test_one_row_is_multiplied_on_the_vector_unit(rows: int, devices: int, dtype: str) -> None:
    """Whether the program has one, or a device; two are not: as compiled for v5e."""
    analysis = toast.analyze(
        lambda rows, matrix: rows @ matrix, shape(rows, 2048, dtype=dtype),
        shape(2048, 2048, dtype=dtype), platform="tpu", cache=False,
    )  # fmt: skip
    space = Space(analysis, Mesh.parse(f"a={devices}"), min_dimensions=0)
    model = CostModel(space, V5E)
    state = space.initial
    if devices > 1:
        state = space.apply(state, action(space, "rows", 0, "a"))
    seconds = model.price(state[None]).matmul_seconds[0]
    assert (35e-6 < seconds < 60e-6) == (rows <= devices)
    assert model.lower_bound() <= seconds


@pytest.mark.parametrize("layers", [2, 4])
def test_a_small_operand_in_fast_memory_makes_no_product_of_vectors_faster(layers: int) -> None:
    """The caches are too large for fast memory; the queries are arguments, too."""

    def step(queries: Any, caches: Any) -> Any:
        return [attend(*each) for each in zip(queries, caches, strict=True)]

    cache = shape(64, 4096, 16, 128)
    one = terms("tpu-v5e", step, [shape(64, 16, 128)], [cache])["products"]
    several = terms("tpu-v5e", step, [shape(64, 16, 128)] * layers, [cache] * layers)["products"]
    assert several == pytest.approx(layers * one, rel=0.01)


@pytest.mark.parametrize(("width", "copied"), [(1280, True), (2048, False)])
@pytest.mark.parametrize("lookups", [1, 3])
def test_tables_whose_shards_are_not_whole_tiles_are_transposed_for_lookups(
    width: int, copied: bool, lookups: int
) -> None:
    """Once, if they are gathered along the dimension in lanes, as compiled for v5e."""

    def look(table: Any, tokens: Any) -> Any:
        return [table[tokens + number] for number in range(lookups)]

    rows = 65536
    arguments = shape(rows, width), shape(64, dtype="int32")
    analysis = toast.analyze(look, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=16"), min_dimensions=0)
    model, program = CostModel(space, V5E), space.analysis.program
    state = space.initial.copy()
    table = program.argument_values[0]
    sharded = space.apply(space.initial, action(space, "table", 1, "a"))
    state[space.classes.of_op[program.values[table].op]] = sharded[
        space.classes.of_op[program.values[table].op]
    ]
    found = break_down(model, state).term_seconds["copies of gathers"].sum()
    seconds = rows * width / V5E.transposed_elements_per_s
    assert found == pytest.approx(seconds if copied else 0.0)


@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_products_read_transposed_arguments_as_they_are(hardware: str) -> None:
    """XLA's schedule has 12 us for both forms on sixteen v5e."""

    def seconds(function: Callable[..., Any]) -> float:
        half = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 256), (8192, 256)))
        space = Space(toast.analyze(function, *half), Mesh.parse("data=2"))
        model = CostModel(space, load(hardware))
        return float(model.price(space.initial[None]).seconds[0])

    straight = seconds(lambda h, e: jnp.einsum("bd,vd->bv", h, e))
    assert seconds(lambda h, e: h @ e.T) == pytest.approx(straight)
    # A kernel of its own scales the argument before it is transposed.
    assert seconds(lambda h, e: h @ (2 * e).T) > straight
