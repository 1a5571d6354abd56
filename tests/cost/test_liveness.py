"""Which values XLA's TPU compiler keeps in memory, as seen in programs of the corpus."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.cost import CostModel
from toast.cost.liveness import Liveness, liveness
from toast.cost.rounding import operands_rounded, rounded_stacks, stored_rounded
from toast.hardware import Mesh, load
from toast.space import Space


def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def analyzed(function: Any, *arguments: Any) -> toast.Analysis:
    return toast.analyze(function, *arguments, platform="tpu", cache=False)


def live(analysis: toast.Analysis, lanes: int) -> Liveness:
    names = analysis.names
    return liveness(analysis.program, names.use_op, names.use_value, lanes=lanes)


def stored(analysis: toast.Analysis, lanes: int) -> list[tuple[str, str]]:
    """Kinds and element types of the values in memory, without arguments."""
    program, exists = analysis.program, live(analysis, lanes).exists
    return [
        (program.kind(value.op), value.type.dtype)
        for number, value in enumerate(program.values)
        if exists[number] and program.kind(value.op) != "argument"
    ]


@pytest.mark.parametrize("channels", [64, 256, 4096])
def test_a_reshape_that_changes_tiles_is_no_copy(channels: int) -> None:
    """XLA computes a group norm without splitting the channels, if no constraint prevents it."""

    def normed(x: jax.Array) -> jax.Array:
        wide = x.reshape(16, 8, 8, 32, -1)
        return (wide - wide.mean((1, 2, 4), keepdims=True)).reshape(x.shape) * 2.0

    analysis = analyzed(normed, shape(16, 8, 8, channels, dtype="float32"))
    assert ("reshape", "f32") not in stored(analysis, 128)


@pytest.mark.parametrize("residual", [False, True])
def test_convolutions_compute_what_follows_from_a_stored_sum_again(residual: bool) -> None:
    """Without a use of the sum, they would read both of its terms again."""

    def loss(kernel: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        total = jnp.sin(x) + jnp.sin(y)
        out = jax.lax.conv_general_dilated(
            jnp.tanh(total), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (jnp.sin(out) + (total if residual else 0.0)).sum()

    images = shape(32, 16, 16, 128, dtype="float32")
    step = jax.value_and_grad(loss)
    analysis = analyzed(step, shape(3, 3, 128, 128, dtype="float32"), images, images)
    kinds = [kind for kind, _ in stored(analysis, 128)]
    assert ("tanh" in kinds) != residual


@pytest.mark.parametrize("act", [jnp.tanh, jax.nn.relu])
def test_what_the_kernel_of_a_convolution_adds_is_in_memory(act: Any) -> None:
    """The sums of a residual network: their kernel is that of the convolution."""

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + jax.lax.conv_general_dilated(
                act(x), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        return (x**2).sum()

    kernel = shape(3, 3, 128, 128, dtype="float32")
    analysis = analyzed(jax.grad(loss), kernel, shape(32, 16, 16, 128, dtype="float32"))
    found = live(analysis, 128)
    written = np.flatnonzero(found.fused_product >= 0)
    assert len(written)
    assert found.exists[written].all()


@pytest.mark.parametrize("masked", [False, True])
def test_a_tpu_stores_the_exponentials_of_scores(masked: bool) -> None:
    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        scores = jnp.einsum("bsnk,btnk->bnst", query, key).astype(jnp.float32) * 0.1
        if masked:
            scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores, -1e30)
        weights = jax.nn.softmax(scores, -1).astype(query.dtype)
        return jnp.einsum("bnst,btnk->bsnk", weights, value)

    analysis = analyzed(attention, *[shape(2, 64, 4, 32)] * 3)
    on_tpu, elsewhere = stored(analysis, 128), stored(analysis, 1)
    # A TPU fuses the last product with the transposition after it.
    products = [values.count(("dot_general", "bf16")) for values in (on_tpu, elsewhere)]
    assert products == [0, 2]
    assert ("exponential", "f32") in on_tpu
    assert ("exponential", "f32") not in elsewhere


def test_scores_that_something_else_needs_are_stored() -> None:
    def attention(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("bsnk,btnk->bnst", query, key).astype(jnp.float32)
        return jax.nn.softmax(scores, -1), scores

    assert ("convert", "f32") in stored(analyzed(attention, *[shape(2, 64, 4, 32)] * 2), 128)


def test_what_a_loop_reads_stays_until_its_last_iteration() -> None:
    def backward(x: jax.Array, stack: jax.Array) -> jax.Array:
        kept = jnp.sort(stack, -1)  # in memory
        return jax.lax.scan(lambda x, row: (jnp.tanh(x @ row), None), x, kept)[0]

    analysis = analyzed(backward, shape(64, 64), shape(8, 64, 64))
    program, found = analysis.program, live(analysis, 128)
    (kept,) = (n for n, v in enumerate(program.values) if program.kind(v.op) == "sort")
    last = max(n for n in range(len(program.ops)) if program.kind(n) == "yield")
    assert found.end[kept] >= last


@pytest.mark.parametrize("cut", [False, True])
def test_loops_over_some_layers_have_copies_of_their_weights(cut: bool) -> None:
    """Seen in the TPU compiler's memory of a train step: a loop needs complete arrays."""

    def layers(x: jax.Array, stack: jax.Array) -> jax.Array:
        some = [stack[:3], stack[3:]] if cut else [stack]
        for part in some:
            x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, part)[0]
        return x

    analysis = analyzed(layers, shape(64, 64), shape(8, 64, 64))
    assert stored(analysis, 128).count(("slice", "bf16")) == 2 * cut


def test_a_token_attends_to_a_cache_on_the_vector_unit() -> None:
    def decode(query: jax.Array, cache: jax.Array) -> jax.Array:
        return jnp.einsum("bsnk,btnk->bnst", query, cache)

    def seconds(queries: int) -> float:
        analysis = analyzed(decode, shape(8, queries, 16, 128), shape(8, 4096, 16, 128))
        model = CostModel(Space(analysis, Mesh.parse("data=4")), load("tpu-v5e"))
        return float(model.price(model.space.initial[None]).matmul_seconds[0])

    work = 8 * 4096 * 16 * 128
    assert seconds(1) == pytest.approx(work / load("tpu-v5e").vector_products_per_s, rel=0.1)
    assert seconds(8) < seconds(1) / 2, "the matrix unit computes several rows at once"


@pytest.mark.parametrize(
    ("heads", "size", "share"),
    [(16, 128, 1), (4, 128, 1.72), (2, 128, 3.16), (1, 128, 1), (3, 128, 1), (2, 64, 1)],
)
def test_few_heads_of_a_cache_use_parts_of_tiles(heads: int, size: int, share: float) -> None:
    """XLA transposes caches whose last dimensions would be padded; then keys are the rows."""

    def decode(query: jax.Array, cache: jax.Array) -> jax.Array:
        return jnp.einsum("bsnk,btnk->bnst", query, cache)

    analysis = analyzed(decode, shape(8, 1, heads, size), shape(8, 65536, heads, size))
    model = CostModel(Space(analysis, Mesh.parse("data=2")), load("tpu-v5e"))
    work = share * 8 * 65536 * heads * size / load("tpu-v5e").vector_products_per_s
    seconds = model.price(model.space.initial[None]).matmul_seconds[0]
    assert seconds == pytest.approx(work, rel=0.1)


def test_devices_that_share_heads_have_parts_of_tiles() -> None:
    def decode(query: jax.Array, cache: jax.Array) -> jax.Array:
        return jnp.einsum("bsnk,btnk->bnst", query, cache)

    analysis = analyzed(decode, shape(8, 1, 8, 128), shape(8, 65536, 8, 128))
    space = Space(analysis, Mesh.parse("model=4"))
    model = CostModel(space, load("tpu-v5e"))
    states = np.stack([space.initial, *space.apply_each(space.initial, range(len(space.actions)))])
    whole, *shared = model.price(states).matmul_seconds.tolist()
    # A quarter of the batch or of the keys takes a quarter of the time; two of eight heads, more.
    assert {round(4 * each / whole, 1) for each in shared} == {1.0, 3.1}


@pytest.mark.parametrize("scanned", [True, False])
def test_gradients_of_weights_wait_for_products_of_unrolled_layers(scanned: bool) -> None:
    """Their operands stay in memory for twelve more products, or until the last one."""
    layers = 16

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            y = x
            if scanned:
                y = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), y, weights)[0]
            else:
                for number in range(layers):
                    y = jnp.tanh(y @ weights[number])
            return (y.astype(jnp.float32) ** 2).sum()

        return weights - jax.grad(loss)(weights)

    analysis = analyzed(step, shape(layers, 256, 256), shape(512, 256))
    program, names = analysis.program, analysis.names
    ends = [
        liveness(program, names.use_op, names.use_value, lanes=128, delays=delays).use_end
        for delays in (False, True)
    ]
    moved = np.flatnonzero(ends[1] > ends[0])
    if scanned:
        assert not len(moved), "each iteration ends before the next begins"
        return
    moved = np.array([u for u in moved if program.kind(names.use_op[u]) == "dot_general"])
    products = [
        op for op in range(len(program.ops))
        if program.kind(op) == "dot_general" and program.passes[op] == "backward"
    ]  # fmt: skip
    delayed = sorted({int(names.use_op[use]) for use in moved})
    assert len(delayed) >= layers - 2, "all gradients of weights but the last"
    assert {*delayed} < {*products}
    for use in moved:
        place = products.index(int(names.use_op[use]))
        assert ends[1][use] == products[min(place + 12, len(products) - 1)]


def test_what_a_waiting_operand_is_computed_from_waits() -> None:
    """Not float32 values, of which XLA keeps the rounded operand instead."""

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            y = x
            for weight in weights:
                y = jnp.maximum(y @ weight, 0)
            return (y.astype(jnp.float32) ** 2).sum()

        return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]

    waits = {}
    for dtype in ("bfloat16", "float32"):
        weights = [shape(256, 256, dtype=dtype)] * 16
        analysis = analyzed(step, weights, shape(512, 256, dtype=dtype))
        program, names = analysis.program, analysis.names
        ends = [
            liveness(program, names.use_op, names.use_value, lanes=128, delays=delays).use_end
            for delays in (False, True)
        ]
        users = names.use_op[np.flatnonzero(ends[1] > ends[0])].tolist()
        waits[dtype] = {program.kind(op) for op in users}
    assert waits["float32"] == {"dot_general"}
    assert waits["bfloat16"] > {"dot_general"}


@pytest.mark.parametrize("picked", [False, True])
def test_products_compute_the_gradient_of_a_softmax_again(picked: bool) -> None:
    """Unless the logits of the labels are picked from them, so that they are in memory in float32."""

    def step(head: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
        def loss(head: jax.Array, x: jax.Array) -> jax.Array:
            logits = jnp.einsum("bd,vd->bv", x, head).astype(jnp.float32)
            if picked:
                right = jnp.take_along_axis(logits, labels[:, None], -1)
                return (jax.nn.logsumexp(logits, -1) - right[:, 0]).sum()
            logs = jax.nn.log_softmax(logits)
            return -(logs * jax.nn.one_hot(labels, 4096)).sum()

        return jax.value_and_grad(loss, (0, 1))(head, x)

    labels = jax.ShapeDtypeStruct((512,), np.int32)
    analysis = analyzed(step, shape(4096, 256), shape(512, 256), labels)
    program, exists = analysis.program, live(analysis, 128).exists
    large = [
        (program.kind(value.op), value.type.dtype) for number, value in enumerate(program.values)
        if exists[number] and value.type.shape == (512, 4096)
    ]  # fmt: skip
    stored = [("convert", "f32"), ("convert", "bf16")] if picked else [("dot_general", "bf16")]
    assert large == stored


@pytest.mark.parametrize(("hardware", "waits"), [("tpu-v5e", True), ("tpu-v6e", False)])
def test_they_wait_where_all_gathers_are_hidden(hardware: str, waits: bool) -> None:
    assert ("all_gather" in load(hardware).background) == waits


def test_arrays_are_padded_in_two_dimensions() -> None:
    space = Space(analyzed(lambda x: x + 1, shape(16, 16)), Mesh.parse("data=4"))
    machine = CostModel(space, load("tpu-v5e")).machine

    def padding(*sizes: int, element: int = 4, rank: int | None = None) -> float:
        rank = len(sizes) if rank is None else rank
        args = np.array(sizes), np.arange(len(sizes)) < rank, np.array(element)
        return float(machine.lane_padding(*args, np.full((1, 1), -1))[0])

    assert padding(110, 197, 588) == pytest.approx(200 * 640 / (197 * 588))
    assert padding(6, 3072) == pytest.approx(8 / 6)
    assert padding(4, 64, 1024) == 1
    assert padding(3, 1024) == pytest.approx(4 / 3)
    assert padding(1, 1024) == 1
    assert padding(1, 1024, element=2) == 2, "two rows share a word"
    assert padding(1000) == pytest.approx(1.024)
    assert padding(1000, 1, 1, rank=1) == pytest.approx(1.024), "tables have ones at the end"
    assert padding(1100) == pytest.approx(2048 / 1100), "tiles of 8 rows"
    assert padding(300) == pytest.approx(512 / 300), "or of a power of two below"
    assert padding(100, element=2) == pytest.approx(2.56)
    assert padding(1, 1, rank=0) == 128, "a scalar takes a row"


def test_a_scatter_of_one_element_per_row_is_elementwise() -> None:
    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logits, labels[:, None], 1).sum()

    def gradient(x: jax.Array, weights: jax.Array, labels: jax.Array) -> jax.Array:
        return x.T @ jax.grad(loss)(x @ weights, labels)

    arguments = shape(256, 512), shape(512, 1024), shape(256, dtype="int32")
    analysis = analyzed(gradient, *arguments)
    kinds = {analysis.program.kind(op) for op in range(len(analysis.program.ops))}
    assert "scatter" in kinds
    assert "scatter" not in dict(stored(analysis, 128))
    assert "scatter" in dict(stored(analysis, 1)), "only seen on TPUs"


def test_a_scatter_of_several_rows_is_in_memory() -> None:
    def gradient(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax.grad(lambda t: (t[tokens] ** 2).sum())(table) * 2

    analysis = analyzed(gradient, shape(1024, 256), shape(64, dtype="int32"))
    assert "scatter" in dict(stored(analysis, 128))


@pytest.mark.parametrize(("rounds", "copies"), [(True, 1), (False, 0)])
def test_stacked_parameters_are_rounded_before_their_loop(rounds: bool, copies: int) -> None:
    def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return (x @ w.astype(jnp.bfloat16) if rounds else x * w.sum(0).astype(x.dtype)), None

        return jax.lax.scan(layer, x, weights)[0]

    program = analyzed(scanned, shape(4, 256, 256, dtype="float32"), shape(64, 256)).program
    stacks = rounded_stacks(program)
    assert [value for value, _, _ in stacks] == [program.argument_values[0]] * copies


@pytest.mark.parametrize(
    ("form", "rounded"),
    [("products", True), ("moved", True), ("elementwise", False), ("returned", False)],
)
def test_what_only_products_read_is_stored_in_their_element_type(form: str, rounded: bool) -> None:
    def two(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        hidden = x @ w
        if form == "moved":
            return hidden.reshape(8, 32, -1).transpose(1, 0, 2) @ v
        others = {"elementwise": jnp.cumsum(hidden, 0), "returned": hidden}
        return hidden @ v, others.get(form, 0.0)

    analysis = analyzed(two, *(shape(256, 256, dtype="float32") for _ in range(3)))
    program = analysis.program
    ranges = live(analysis, 128)
    found = stored_rounded(program, ranges)
    assert [program.kind(program.values[v].op) for v in np.flatnonzero(found)] == (
        ["dot_general"] * rounded
    )


def test_operands_of_loops_are_rounded_and_other_uses_are_not() -> None:
    """A kernel computes an operand again for each use: the other use is of float32."""

    def two(x: jax.Array, w: jax.Array) -> Any:
        hidden = jnp.tanh(x)
        return hidden @ w, jnp.cumsum(hidden, 0), (x @ w).sum()

    analysis = analyzed(two, *(shape(256, 256, dtype="float32") for _ in range(2)))
    program, names = analysis.program, analysis.names
    found = operands_rounded(program, live(analysis, 128), names.use_op, names.use_value)
    assert [program.kind(program.makers[v]) for v in np.flatnonzero(found)] == ["tanh"]
    tables = CostModel(Space(analysis, Mesh.parse("d=2"), min_dimensions=0), load("tpu-v5e")).tables
    (tanh,) = set(tables.value_class[found].tolist())
    assert (tables.values.as_operand[tanh], tables.values.stored[tanh]) == (0.5, 1.0)
    shares = tables.uses.share[tables.uses.value == tanh]
    assert sorted(shares.tolist()) == [0.5, 1.0]


@pytest.mark.parametrize("elementwise", [False, True])
def test_stacks_that_only_products_read_are_rounded(elementwise: bool) -> None:
    """A loop keeps its inputs for the gradients of weights; squares need them again, too."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return (x**2 if elementwise else x) @ w, None

        return jax.lax.scan(layer, x, weights)[0].sum()

    weights, x = shape(4, 256, 256, dtype="float32"), shape(64, 256, dtype="float32")
    analysis = analyzed(jax.grad(loss), weights, x)
    program = analysis.program
    found = stored_rounded(program, live(analysis, 128))
    stacks = {
        program.kind(program.values[v].op) for v in np.flatnonzero(found).tolist()
        if program.values[v].type.shape == (4, 64, 256)
    }  # fmt: skip
    assert stacks == {"broadcast_in_dim", "carry", "dynamic_update_slice", "yield"}
    # The stack of squares is rounded, that of what is squared is not.
    whole = [
        number for number, value in enumerate(program.values)
        if program.kind(value.op) == "yield" and value.type.shape == (4, 64, 256)
        and not found[number]
    ]  # fmt: skip
    assert len(whole) == elementwise


def test_a_rounded_value_takes_half_of_its_bytes_unless_it_is_summed_over_devices() -> None:
    def two(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return x @ w @ v

    analysis = analyzed(two, *(shape(1024, 1024, dtype="float32") for _ in range(3)))
    space = Space(analysis, Mesh.parse("data=4"))
    model = CostModel(space, load("tpu-v5e"))
    (value,) = np.flatnonzero(model.tables.values.stored < 1)
    for action in space.actions:
        layout = model.layout(space.apply(space.initial, action)[None])
        whole = layout.value_bytes[0, value]
        share = 1.0 if layout.partial[0, value] else 0.5
        assert layout.value_memory[0, value] == pytest.approx(share * whole)
    gpu = CostModel(Space(analysis, Mesh.parse("data=4")), load("h100"))
    assert (gpu.tables.values.stored == 1).all()


def test_only_some_chips_gather_parameters_ahead() -> None:
    assert load("tpu-v5e").gathers_ahead == "all"
    assert load("tpu-v4").gathers_ahead == ""


@pytest.mark.parametrize("picked", [True, False])
def test_what_a_gather_picks_single_elements_of_is_in_memory(picked: bool) -> None:
    """The log-probabilities of labels; rows of an embedding are fused, as other consumers."""

    def chosen(logits: jax.Array, labels: jax.Array) -> jax.Array:
        scaled = logits.astype(jnp.float32) * 2.0
        if picked:
            return jnp.take_along_axis(scaled, labels[..., None], axis=-1)
        return scaled[labels]

    analysis = analyzed(chosen, shape(64, 512), shape(64, dtype="int32"))
    assert (("multiply", "f32") in stored(analysis, 128)) == picked
    assert ("multiply", "f32") not in stored(analysis, 1), "only seen on TPUs"


@pytest.mark.parametrize(
    ("form", "overwrites"), [("plain", True), ("wider", False), ("summed", False)]
)
def test_a_kernel_overwrites_an_operand_of_its_type(form: str, overwrites: bool) -> None:
    """Not if the kernels of its operands have other results, too: sums of rows."""

    def gated(a: jax.Array, w: jax.Array, v: jax.Array, u: jax.Array) -> Any:
        left, right = a @ w, a @ v
        sums = (left.sum(-1), right.sum(-1)) if form == "summed" else ()
        alone = left.mT @ u, right.mT @ u  # else the kernel of a product computes the rest, too
        if form == "wider":
            left, right, u = (x.astype(jnp.float32) for x in (left, right, u))
        both = left * right
        return both @ u, both.mT @ u, sums, alone

    analysis = analyzed(gated, *[shape(4, 256, 256)] * 4)
    program, found = analysis.program, live(analysis, 128)
    (both,) = (n for n, v in enumerate(program.values) if program.kind(v.op) == "multiply")
    assert found.exists[both]
    assert found.in_place[both] == overwrites


@pytest.mark.parametrize(
    ("form", "apart"),
    [
        ("rows", {"multiply", "slice", "add", "pad"}),
        ("lanes", {"multiply", "slice", "add", "pad"}),
        ("planes", {"add", "pad"}),
        ("without a stride", set[str]()),
    ],
)
def test_strided_slices_and_interior_pads_are_kernels_of_their_own(
    form: str, apart: set[str]
) -> None:
    """As in an associative scan; their operands are in memory, too."""
    strides = {"rows": (1, 2, 1), "lanes": (1, 1, 2), "planes": (2, 1, 1)}.get(form, (1, 1, 1))

    def interleaved(x: jax.Array) -> jax.Array:
        part = jax.lax.slice(x * 2.0, (0, 0, 0), x.shape, strides)
        inside = [(0, 0, stride - 1) for stride in strides]
        return jax.lax.pad(part + 1.0, jnp.float32(0), inside) - 3.0

    analysis = analyzed(interleaved, shape(16, 64, 256, dtype="float32"))
    found = {kind for kind, _ in stored(analysis, 128)}
    assert found & {"multiply", "slice", "add", "pad"} == apart
    assert not {"slice", "pad"} & {kind for kind, _ in stored(analysis, 1)}


@pytest.mark.parametrize("all_gathers", [False, True])
def test_gradients_of_experts_wait(all_gathers: bool) -> None:
    """Operands of a ragged product that only the optimizer needs wait for those of other layers."""

    def loss(weights: list[jax.Array], x: jax.Array, sizes: jax.Array) -> jax.Array:
        for weight in weights:
            x = jax.nn.relu(jax.lax.ragged_dot(x, weight, sizes))
        return (x**2).sum()

    layers = [shape(4, 64, 64, dtype="float32") for _ in range(3)]
    analysis = analyzed(
        jax.grad(loss), layers, shape(128, 64, dtype="float32"), shape(4, dtype="int32")
    )
    program, names = analysis.program, analysis.names
    ends = liveness(
        program, names.use_op, names.use_value, lanes=128, delays=all_gathers
    ).use_end  # fmt: skip
    ragged = [n for n, kind in enumerate(program.kinds) if "ragged" in kind]
    gradients = [n for n in ragged if program.signatures[program.ops[n].signature].results[0].shape
                 == (4, 64, 64)]  # fmt: skip
    first = int(min(gradients))
    waiting = ends[names.use_op == first]
    assert (waiting >= ragged[-1]).all(), "until the last product of the backward pass"
