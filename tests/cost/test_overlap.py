"""What collectives cost beside products."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toast
from tests.helpers import action, analyzed, f32, mlp
from toast.analysis import Names
from toast.cost import CostModel
from toast.cost.accumulated_sums import sum_runs
from toast.cost.entities import Entity
from toast.cost.overlap import independent_products, windows
from toast.cost.reshard_runs import reshard_runs
from toast.cost.terms.buffers import EarlyCopies
from toast.cost.terms.kernels import ProductWork
from toast.errors import SearchError
from toast.evaluation.optimum import random_legal, with_ties
from toast.evaluation.validate import states_to_compare
from toast.hardware import COLLECTIVES, Mesh, load
from toast.program import Program
from toast.space import Space, States


def layers(x: jax.Array, w: list[jax.Array]) -> jax.Array:
    for each in w:
        x = jax.nn.relu(x @ each)
    return x


@functools.cache
def chain() -> tuple[Program, Names, list[int], list[int]]:
    """Four products in a chain, and of the weights the uses."""
    analysis = toast.analyze(layers, f32(64, 64), [f32(64, 64)] * 4)
    program, names = analysis.program, analysis.names
    products = [o for o in range(len(program.ops)) if program.kind(o) == "dot_general"]
    every = list(zip(names.use_op.tolist(), names.use_value.tolist(), strict=True))
    uses = [every.index((o, program.ops[o].operands[1])) for o in products]
    return program, names, products, uses


def test_independent_products() -> None:
    """Of a chain x needs all, the third weight the two before it not."""
    program, names, products, uses = chain()
    sets, of = independent_products(
        program, names.use_op, names.use_value, np.arange(len(names.use_op)), products,
        np.zeros(len(program.ops), dtype=bool),
    )  # fmt: skip
    assert not sets[of[program.argument_values[0]]].any()
    of_use = of[len(program.values) :]
    for i, use in enumerate(uses):  # those before may run while it is gathered
        np.testing.assert_array_equal(sets[of_use[use]], np.arange(4) < i)
    activations = names.use_value == program.ops[products[2]].operands[0]
    assert not sets[of_use[activations]].any()


@pytest.mark.parametrize("shared", [False, True])
def test_products_that_share_a_copy_do_not_hide_its_gather(shared: bool) -> None:
    """The two products of a gated MLP wait for one gather of their input."""
    analysis = toast.analyze(
        lambda x, gate, up: (x @ gate) * (x @ up), f32(64, 64), f32(64, 32), f32(64, 32)
    )
    program, names = analysis.program, analysis.names
    products = [o for o in range(len(program.ops)) if program.kind(o) == "dot_general"]
    inputs = names.use_value == program.argument_values[0]
    copies = np.where(inputs, 0, 1 + np.arange(len(inputs))) if shared else np.arange(len(inputs))
    sets, of = independent_products(
        program, names.use_op, names.use_value, copies, products,
        np.zeros(len(program.ops), dtype=bool),
    )  # fmt: skip
    of_use = of[len(program.values) :]
    assert sets[of_use[inputs]].sum(axis=1).tolist() == ([0, 0] if shared else [1, 1])


def test_products_hide_collectives_of_their_own_loop_only() -> None:
    """What a loop does not change is resharded before it."""

    def step(weight: Any, steps: Any, other: Any) -> Any:
        def body(state: Any, step: Any) -> tuple[Any, Any]:
            return state + step @ weight, step @ step.T

        return jax.lax.scan(body, steps[0], steps), other @ other.T

    analysis = toast.analyze(step, f32(64, 64), f32(8, 64, 64), f32(128, 64))
    program, names = analysis.program, analysis.names
    products = [o for o in range(len(program.ops)) if program.kind(o) == "dot_general"]
    inside = [op for op in products if program.repeats[op] > 1]
    (outside,) = {*products} - {*inside}
    (gathered,) = np.flatnonzero(names.use_value == program.argument_values[0])
    for runs, beside in (
        (None, {*inside} - {int(names.use_op[gathered])}),
        (np.ones(len(names.use_op), dtype=np.int64), {outside}),
    ):
        found = windows(
            program, names.use_op, names.use_value, products, np.ones(3),
            np.arange(len(program.values)), np.arange(len(names.use_op)), runs=runs,
        )  # fmt: skip
        here = np.flatnonzero(found.of_use.toarray()[:, gathered])
        bins = np.flatnonzero(found.room[here].sum(axis=0))
        assert {products[each] for each in bins.tolist()} == beside


def hiding(function: Any, *arguments: Any, use: Any = None, value: Any = None) -> set[int]:
    """How often the products run that hide the reshard of a use, or the sum of a value.

    ``use`` or ``value`` is a predicate on the program and an op that uses or computes it.
    """
    analysis = toast.analyze(function, *arguments, cache=False)
    program, names = analysis.program, analysis.names
    products = [o for o in range(len(program.ops)) if program.kind(o) == "dot_general"]
    found = windows(
        program, names.use_op, names.use_value, products, np.ones(len(products)),
        np.arange(len(program.values)), np.arange(len(names.use_op)),
        runs=reshard_runs(program, names.use_op, names.use_value, partitioned=True),
        sum_runs=sum_runs(program, analysis.rules),
    )  # fmt: skip
    if use is None:
        (op,) = [o for o in range(len(program.ops)) if value(program, o)]
        here = np.flatnonzero(found.of_value.toarray()[:, program.ops[op].results[0]])
    else:
        (number,) = [
            u for u, op in enumerate(names.use_op.tolist())
            if use(program, op) and names.use_index[u] == 1
        ]  # fmt: skip
        here = np.flatnonzero(found.of_use.toarray()[:, number])
    bins = np.flatnonzero(found.room[here].sum(axis=0))
    return {program.repeats[products[each]] for each in bins.tolist()}


def test_products_hide_the_collectives_of_a_loop_that_runs_once_or_an_unknown_number_of_times() -> (
    None
):
    def step(state: Any, weight: Any, row: Any) -> Any:
        return jnp.tanh(state @ weight) + row @ weight, row.T @ row

    def once(x: Any, weight: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda state, row: step(state, weight, row), x, rows)

    def unknown(x: Any, weight: Any, rows: Any, steps: Any) -> Any:
        def body(carry: Any) -> Any:
            return carry[0] + 1, *step(carry[1], weight, rows[0])

        return jax.lax.while_loop(lambda carry: carry[0] < steps, body, (0, x, x))

    width = 2048
    square = jax.ShapeDtypeStruct((width, width), "bfloat16")
    rows = jax.ShapeDtypeStruct((1, width, width), "bfloat16")
    for function, *more in ((once,), (unknown, jax.ShapeDtypeStruct((), "int32"))):
        analysis = toast.analyze(function, square, square, rows, *more, platform="tpu", cache=False)
        space = Space(analysis, Mesh.parse("a=4"), min_dimensions=0)
        prices = CostModel(space, load("tpu-v5e")).price(
            space.apply(space.initial, action(space, "x", 1, "a"))[None]
        )
        assert prices.hidden_seconds[0] > 0.1 * prices.collective_seconds.sum()


def test_a_weight_that_a_loop_rounds_is_gathered_before_it() -> None:
    def step(weight: Any, steps: Any, other: Any) -> Any:
        def body(state: Any, step: Any) -> tuple[Any, Any]:
            by = weight.astype(jnp.bfloat16)
            return state + (step.astype(jnp.bfloat16) @ by).astype(state.dtype), step @ step.T

        return jax.lax.scan(body, steps[0], steps), other @ other.T

    def rounded(program: Program, op: int) -> bool:
        if program.kind(op) != "dot_general":
            return False
        return program.kinds[program.makers[program.ops[op].operands[1]]] == "convert"

    assert hiding(step, f32(64, 64), f32(8, 64, 64), f32(128, 64), use=rounded) == {1}


def test_what_an_outer_loop_changes_is_gathered_in_its_body() -> None:
    """Before the inner loop, beside products of the outer one."""

    def step(first: Any, steps: Any, other: Any) -> Any:
        def outer(weight: Any, step: Any) -> tuple[Any, Any]:
            def inner(state: Any, row: Any) -> tuple[Any, None]:
                return jnp.tanh(state @ weight) + row, None

            last = jax.lax.scan(inner, step[0], step)[0]
            return weight * 0.5, (last, step[0] @ step[0].T)

        return jax.lax.scan(outer, first, steps), other @ other.T

    def inner(program: Program, op: int) -> bool:
        return program.kind(op) == "dot_general" and program.repeats[op] == 24

    assert hiding(step, f32(64, 64), f32(3, 8, 64, 64), f32(128, 64), use=inner) == {3}


def test_sums_of_gradients_are_hidden_outside_of_the_loop_of_microbatches() -> None:
    def step(batches: Any, other: Any) -> Any:
        def add(total: Any, batch: Any) -> tuple[Any, Any]:
            return total + batch.T @ batch, batch @ batch.T

        return jax.lax.scan(add, jnp.zeros((64, 64)), batches), other @ other.T

    def gradient(program: Program, op: int) -> bool:
        if program.kind(op) != "dot_general":
            return False
        return program.values[program.ops[op].results[0]].type.shape == (64, 64)

    assert hiding(step, f32(8, 32, 64), f32(128, 64), value=gradient) == {1}


@pytest.mark.parametrize(
    ("asked", "hidden"),
    [
        ([1, 1, 1, 1], 3),  # the first waits for nothing
        ([0, 9, 0, 0], 1),
        ([0, 9, 9, 0], 2),  # not 1 + 2
        ([0, 0, 9, 0], 2),
        ([9, 9, 9, 9], 3),
        ([0, 0.5, 0.5, 0.5], 1.5),
    ],
)
def test_a_second_of_products_hides_one_of_gathers(asked: list[float], hidden: float) -> None:
    """Of weights that are gathered for products of one second each."""
    program, names, products, uses = chain()
    found = windows(
        program, names.use_op, names.use_value, products, np.ones(4),
        np.arange(len(program.values)), np.arange(len(names.use_op)),
    )  # fmt: skip
    np.testing.assert_array_equal(found.bins, 0.25)
    np.testing.assert_array_equal(found.free(Entity.USE_CLASS)[uses], [0, 0.25, 0.5, 0.75])
    moved = np.zeros((1, len(names.use_op)))
    moved[0, uses] = asked
    assert found.hidden(found.asked(Entity.USE_CLASS, moved), np.array([4.0]))[0] == pytest.approx(
        hidden
    )


@pytest.fixture(scope="module")
def states() -> tuple[Space, States]:
    space = Space(analyzed("t2b-tiny"), Mesh.parse("a=2,b=2"))
    model = CostModel(space, load("tpu-v5e"))
    return space, np.stack([s for _, s in states_to_compare(model, plans=12)])


@pytest.mark.parametrize(
    ("name", "options"),
    [("t2b", {"layers": 6}), ("gns", {"small": True}), ("unet", {"small": True}), ("mlp", {})],
)
def test_more_overlap_is_never_slower(name: str, options: dict[str, int]) -> None:
    """Of any legal state, also on links so slow that products cannot hide what moves."""
    analysis = analyzed(name, **options)
    space = Space(analysis, Mesh.parse("a=2,b=2"))
    good = space.initial
    for number in (0, len(space.actions) // 2, len(space.actions) - 1):
        good = space.apply(good, space.actions[number])
    random = np.random.default_rng(0)
    drawn = random_legal(space, 64, random)
    kept = random.random((64, len(good), 1)) < random.random((64, 1, 1))
    batch = np.concatenate([drawn, with_ties(space, np.where(kept, good, drawn)), good[None]])
    for slower in (1, 100):
        hardware = load("tpu-v5e")
        link = hardware.interconnect
        link = dataclasses.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slower)
        none, partial, full = (
            CostModel(
                space, dataclasses.replace(hardware, interconnect=link), overlap=overlap
            ).price(batch)
            for overlap in ("none", "partial", "full")
        )
        assert (none.hidden_seconds == 0).all()
        assert (none.seconds >= partial.seconds).all()
        assert (partial.seconds >= full.seconds).all()
        assert (partial.seconds < none.seconds).any()
        for prices in (partial, full):  # what is hidden is hidden behind something
            assert (prices.hidden_seconds <= prices.matmul_seconds).all()
            moving = prices.collective_seconds.sum(axis=1)
            assert (prices.hidden_seconds <= moving * (1 + 1e-12)).all()


@settings(deadline=None)  # the first draw analyzes the program
@given(st.data())
def test_windows_hide_no_more_than_their_products(data: st.DataObject) -> None:
    """In sum, and of what has any narrower window; more to hide never makes less hidden."""
    program, names, products, uses = chain()
    numbers = st.floats(0, 10)
    work = np.array(data.draw(st.lists(numbers, min_size=4, max_size=4)))
    found = windows(
        program, names.use_op, names.use_value, products, work,
        np.arange(len(program.values)), np.arange(len(names.use_op)),
    )  # fmt: skip
    asked = np.array(data.draw(st.lists(numbers, min_size=4, max_size=4)))
    moved = np.zeros((2, len(names.use_op)))
    moved[0, uses] = asked
    moved[1, uses] = asked + np.array(data.draw(st.lists(numbers, min_size=4, max_size=4)))
    seconds, more = found.hidden(found.asked(Entity.USE_CLASS, moved), np.full(2, work.sum()))
    # The windows are nested, so what is hidden is known: the least over where the chain is cut.
    most = min(work[:i].sum() + asked[i + 1 :].sum() for i in range(4))
    assert seconds == pytest.approx(most, abs=1e-9)
    assert more >= seconds - 1e-9


def test_sums_of_activations_are_not_hidden() -> None:
    analysis = toast.analyze(mlp, f32(256, 512), f32(512, 1024), f32(1024, 512))
    space = Space(analysis, Mesh.parse("m=4"), min_dimensions=0)
    model = CostModel(space, load("tpu-v5e"))
    state = space.apply(space.initial, action(space, "w1", 1, "m"))
    prices = model.price(state[None])
    assert prices.collective_seconds.sum() > 0
    assert prices.hidden_seconds[0] == 0


def test_a_plan_can_be_made_for_any_overlap() -> None:
    shapes = f32(4096, 1024), f32(1024, 4096), f32(4096, 1024)
    plans = {
        overlap: toast.plan(mlp, *shapes, mesh="b=4", hardware="tpu-v5e", overlap=overlap)  # type: ignore[arg-type]
        for overlap in ("none", "partial", "full")
    }
    assert plans["none"].after.step_seconds >= plans["full"].after.step_seconds


def test_batches_on_threads_are_priced_as_one_by_one(states: tuple[Space, States]) -> None:
    space, batch = states
    model = CostModel(space, load("tpu-v5e"))
    many = np.concatenate([batch] * 8)
    assert len(many) > 64
    together, alone = model.price(many), [model.price(s[None]) for s in batch]
    np.testing.assert_array_equal(together.seconds, np.tile([p.seconds[0] for p in alone], 8))
    np.testing.assert_array_equal(together.peak_bytes, np.tile([p.peak_bytes[0] for p in alone], 8))


def test_products_are_padded_to_tiles() -> None:
    """A product of 8 columns takes the matrix unit as long as one of 128."""

    def seconds(columns: int) -> float:
        analysis = toast.analyze(lambda a, b: a @ b, *(
            jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1 << 16, 4096), (4096, columns))
        ))  # fmt: skip
        machine = load("tpu-v5e")
        products = dataclasses.replace(machine.products, results_per_s=1e30)
        hardware = dataclasses.replace(
            machine, memory_bytes_per_s=1e18, products=products, product_latency_s=0.0
        )
        model = CostModel(Space(analysis, Mesh.parse("a=2")), hardware)
        return float(ProductWork().seconds(model.layout(model.space.initial[None]))[0, 0])

    assert seconds(8) == pytest.approx(seconds(128))
    assert seconds(136) == pytest.approx(2 * seconds(128))


def test_the_timeline_is_the_price(states: tuple[Space, States]) -> None:
    space, batch = states
    model = CostModel(space, load("tpu-v5e"))
    for state in batch:
        line = model.timeline(state)
        assert line.peak_bytes == pytest.approx(model.price(state[None]).peak_bytes[0])
        alive = line.argument_bytes + sum(b.bytes for b in line.at_peak)
        alive += line.gap_bytes - line.fast_bytes
        assert alive == pytest.approx(line.peak_bytes, rel=1e-3)
        assert {b.what for b in line.at_peak} <= {"value", "copy", "sum", "second"}


def test_a_plan_tells_what_is_in_memory_and_what_moves() -> None:
    plan = toast.plan(analyzed("t2b-tiny"), mesh="a=2,b=2", hardware="tpu-v5e")
    frame = plan.at_peak()
    assert list(frame.columns) == ["bytes", "value", "what", "from", "to"]
    assert frame["bytes"].is_monotonic_decreasing
    assert frame["value"].str.contains("transformer.py").any()
    assert plan.timeline.peak_bytes == pytest.approx(plan.after.peak_bytes)
    data = plan.to_dict()
    assert data["memory"]["peak_bytes"] == plan.timeline.peak_bytes
    assert len(data["memory"]["op"]) == len(data["memory"]["live_bytes"])
    assert len(data["collectives"]) == len(plan.transfers)


def test_results_are_in_memory_during_the_whole_step() -> None:
    plan = toast.plan(lambda x: (x * 2, x @ x), f32(512, 512), mesh="a=2", hardware="tpu-v5e")
    frame = plan.at_peak()
    results = frame[frame["what"] == "value"]
    assert len(results) == 2
    assert set(results["from"]) == {"start of the step"}
    assert set(results["to"]) == {"end of the step"}
    assert not frame["from"].str.contains("unknown").any()


def test_transfers_name_their_algorithm() -> None:
    analysis = toast.analyze(mlp, f32(256, 512), f32(512, 1024), f32(1024, 512))
    space = Space(analysis, Mesh.parse("m=8"), min_dimensions=0)
    model = CostModel(space, load("h100"), overlap="none")
    state = space.apply(space.initial, action(space, "w1", 1, "m"))
    (transfer,) = model.transfers(state)
    assert (transfer.kind, transfer.axes, transfer.count) == ("all_reduce", ("m",), 1)
    assert transfer.algorithm.startswith("ring")
    assert model.price(state[None]).collective_seconds.sum() == pytest.approx(transfer.seconds)


def test_transfers_add_up_to_the_price(states: tuple[Space, States]) -> None:
    """By kind: also of sums that XLA takes whole, and without those that it merges."""
    space, batch = states
    model = CostModel(space, load("tpu-v5e"))
    prices = model.price(batch)
    whole = 0
    for i, state in enumerate(batch):
        found = np.zeros((len(COLLECTIVES), 3))
        for t in model.transfers(state):
            found[COLLECTIVES.index(t.kind)] += t.count * np.array([1, t.bytes, t.seconds])
        np.testing.assert_allclose(found[:, 0], prices.collective_count[i])
        np.testing.assert_allclose(found[:, 1], prices.collective_bytes[i])
        np.testing.assert_allclose(found[:, 2], prices.collective_seconds[i])
        scatters = sum(n for (k, *_), n in model.reshards(state).items() if k == "reduce_scatter")
        whole += scatters > found[COLLECTIVES.index("reduce_scatter"), 0] + 0.5
    assert whole


def test_shards_that_trade_places_cross_the_torus() -> None:
    """On a large torus as an all-to-all, in which all goes as far; else to a neighbour."""
    analysis = toast.analyze(layers, f32(1 << 14, 1 << 14), [f32(1 << 14, 1 << 14)] * 2)
    for mesh, far in (("a=2,b=2", False), ("a=16,b=16", True)):
        space = Space(analysis, Mesh.parse(mesh), collapse=False)
        model = CostModel(space, load("tpu-v5e"))
        drawn = random_legal(space, 400, np.random.default_rng(0))
        traded = [
            t for state in drawn for t in model.transfers(state) if t.kind == "collective_permute"
        ]
        assert traded
        assert {t.algorithm == "shortest paths" for t in traded} == {far}


def test_memory_that_no_plan_has() -> None:
    with pytest.raises(SearchError, match="no plan on mesh a=2,b=2 fits"):
        toast.plan(analyzed("t2b-tiny"), mesh="a=2,b=2", hardware="tpu-v5e", memory_bytes=1e3)


def test_products_wait_for_all_gathers_except_on_v5e() -> None:
    """XLA for v5e runs all-gathers beside products; for v6e it does with flags alone."""
    analysis = toast.analyze(layers, f32(4096, 1024), [f32(1024, 1024)] * 4)
    space = Space(analysis, Mesh.parse("d=4"), min_dimensions=0)
    batch = random_legal(space, 256, np.random.default_rng(0))
    hidden = {}
    for name in ("tpu-v5e", "tpu-v6e"):
        for overlap in ("partial", "gathers", "asynchronous"):
            prices = CostModel(space, load(name), overlap=overlap).price(batch)  # type: ignore[arg-type]
            others = np.delete(prices.collective_seconds, COLLECTIVES.index("all_gather"), axis=1)
            hidden[name, overlap] = bool(prices.hidden_seconds[others.sum(axis=1) == 0].any())
    assert hidden == {
        ("tpu-v5e", "partial"): True, ("tpu-v5e", "gathers"): True,
        ("tpu-v5e", "asynchronous"): True, ("tpu-v6e", "partial"): False,
        ("tpu-v6e", "gathers"): True, ("tpu-v6e", "asynchronous"): True,
    }  # fmt: skip


def test_xla_starts_few_gathers_early() -> None:
    """Of weights more than of activations, unless flags make it start all of them."""

    def apart(x: jax.Array, w: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return (x @ w[0]) @ w[1], x @ w[2]

    analysis = toast.analyze(apart, f32(1024, 1024), [f32(1024, 1024)] * 3)
    space = Space(analysis, Mesh.parse("a=4"), collapse=False)
    drawn = random_legal(space, 60, np.random.default_rng(0))

    def hidden(early: tuple[float, float], overlap: Any = "partial") -> Any:
        hardware = dataclasses.replace(load("tpu-v5e"), early_gathers=early)
        return CostModel(space, hardware, overlap=overlap).price(drawn).hidden_seconds

    none, some, weights, every = map(hidden, ((0, 0), (0.5, 0.5), (1, 0), (1, 1)))
    for fewer, more in ((none, some), (some, every), (none, weights), (weights, every)):
        assert (fewer <= more * (1 + 1e-9)).all()
        assert (fewer < more).any()
    assert np.array_equal(hidden((0, 0), "gathers"), hidden((1, 1), "gathers"))
    shares = load("tpu-v5e").early_gathers
    assert 1 > shares[0] > shares[1] > 0


def test_gathers_that_start_early_wait_in_memory() -> None:
    """A share of them without flags of the compiler, and all with such flags."""
    mesh, weights = Mesh.parse("a=16"), [f32(1024, 8192), f32(8192, 1024)] * 2

    def decode(x: jax.Array, w: list[jax.Array]) -> jax.Array:
        return functools.reduce(jnp.matmul, w, x)

    space = Space(toast.analyze(decode, f32(16, 1024), weights), mesh, collapse=False)
    state = space.initial
    for name in ("x", "w[0]", "w[1]", "w[2]", "w[3]"):
        state = space.apply(state, action(space, name, 0, "a"))
    copies = []
    for overlap in ("partial", "gathers"):
        model = CostModel(space, load("tpu-v5e"), overlap=overlap)  # type: ignore[arg-type]
        layout = model.layout(state[None])
        copies.append(float(EarlyCopies().bytes(layout).sum()))
    assert copies[0] == pytest.approx(load("tpu-v5e").early_gathers[0] * copies[1])
    assert copies[1] > 0


def test_flags_of_the_compiler_turn_off_loops_of_products() -> None:
    """One of those that run all collectives beside products, in recipes for TPU v6e."""

    def gradient(x: Any, y: Any) -> Any:
        return x.T @ y

    width, rows = 4096, 32768
    shapes = [jax.ShapeDtypeStruct((rows, width), "bfloat16")] * 2
    analysis = toast.analyze(gradient, *shapes, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("d=8"), min_dimensions=0)
    state = space.apply(space.initial, action(space, "x", 0, "d"))
    (result,) = analysis.program.result_values
    state[space.classes.of_op[-1], 0] = 0  # scattered as the caller wants it
    parted = {}
    for overlap in ("partial", "gathers", "asynchronous", "full"):
        model = CostModel(space, load("tpu-v6e"), overlap=overlap)  # type: ignore[arg-type]
        parted[overlap] = bool(
            model.layout(state[None]).parted[0, model.tables.value_class[result]]
        )
    assert parted == {"partial": True, "gathers": False, "asynchronous": False, "full": False}


def test_flags_hide_gathers_alone_or_sums_too() -> None:
    """As with the recipes of TPU v6e: some move sums to its SparseCores, others only gathers."""

    def sums(x: Any, y: Any) -> Any:
        return x.T @ x, y.T @ y

    analysis = toast.analyze(sums, f32(32768, 4096), f32(32768, 4096), cache=False)
    space = Space(analysis, Mesh.parse("d=4"), min_dimensions=0)
    batch = random_legal(space, 256, np.random.default_rng(0))
    hidden = {}
    for overlap in ("gathers", "asynchronous"):
        prices = CostModel(space, load("tpu-v6e"), overlap=overlap).price(batch)  # type: ignore[arg-type]
        others = np.delete(prices.collective_seconds, COLLECTIVES.index("all_reduce"), axis=1)
        hidden[overlap] = bool(prices.hidden_seconds[others.sum(axis=1) == 0].any())
    assert hidden == {"gathers": False, "asynchronous": True}


@pytest.mark.parametrize("hardware", ["h100", "tpu-v5e"])
def test_flags_hide_no_less_than_the_default(hardware: str) -> None:
    analysis = toast.analyze(layers, f32(4096, 1024), [f32(1024, 1024)] * 4, lowering="xla")
    space = Space(analysis, Mesh.parse("d=4"), min_dimensions=0)
    batch = random_legal(space, 256, np.random.default_rng(0))
    seconds = [
        CostModel(space, load(hardware), overlap=overlap).price(batch).seconds  # type: ignore[arg-type]
        for overlap in ("partial", "gathers", "asynchronous")
    ]
    assert (np.diff(seconds, axis=0) <= 1e-12).all()
