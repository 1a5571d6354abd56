"""What collectives cost beside products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action, analyzed, f32, mlp
from toast.cost import CostModel
from toast.cost.overlap import independent_work
from toast.errors import SearchError
from toast.hardware import Mesh, load
from toast.space import Space, States
from toast.validate import states_to_compare


def layers(x: jax.Array, w: list[jax.Array]) -> jax.Array:
    for each in w:
        x = jax.nn.relu(x @ each)
    return x


def test_independent_work() -> None:
    """Of four equal products in a chain; x needs all, the third weight the two before it not."""
    analysis = toast.analyze(layers, f32(64, 64), [f32(64, 64)] * 4)
    program, names = analysis.program, analysis.names
    products = [o for o in range(len(program.ops)) if program.kind(o) == "dot_general"]
    values, uses = independent_work(
        program, names.use_op, names.use_value, products, np.ones(len(products))
    )
    by_argument = dict(zip(program.arguments, program.argument_values, strict=True))
    assert values[by_argument["x"]] == 0
    at = {
        (int(o), int(v)): share
        for o, v, share in zip(names.use_op, names.use_value, uses, strict=True)
    }
    shares = [at[products[i], by_argument[f"w[{i}]"]] for i in range(4)]
    assert shares == [0, 0.25, 0.5, 0.75]  # those before may run while it is gathered
    activation = program.ops[products[2]].operands[0]
    assert at[products[2], activation] == 0


@pytest.fixture(scope="module")
def states() -> tuple[Space, States]:
    space = Space(analyzed("t2b-tiny"), Mesh.parse("a=2,b=2"))
    model = CostModel(space, load("tpu-v5e"))
    return space, np.stack([s for _, s in states_to_compare(model, plans=12)])


def test_more_overlap_is_never_slower(states: tuple[Space, States]) -> None:
    space, batch = states
    none, partial, full = (
        CostModel(space, load("tpu-v5e"), overlap=overlap).price(batch)
        for overlap in ("none", "partial", "full")
    )
    assert (none.hidden_seconds == 0).all()
    assert (none.seconds >= partial.seconds).all()
    assert (partial.seconds >= full.seconds).all()
    assert (full.seconds < none.seconds).any()
    # What is hidden is hidden behind something.
    assert (full.hidden_seconds <= full.matmul_seconds + 1e-12).all()
    assert (full.hidden_seconds <= full.collective_seconds.sum(axis=1) + 1e-12).all()


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
        model = CostModel(Space(analysis, Mesh.parse("a=2")), load("tpu-v5e"))
        return float(model._padding(model.layout(model.space.initial[None]))[0, 0]) * columns

    assert seconds(8) == seconds(128) == 128
    assert seconds(136) == 256


def test_the_timeline_is_the_price(states: tuple[Space, States]) -> None:
    space, batch = states
    model = CostModel(space, load("tpu-v5e"))
    for state in batch:
        line = model.timeline(state)
        assert line.peak_bytes == pytest.approx(model.price(state[None]).peak_bytes[0])
        alive = line.argument_bytes + sum(b.bytes for b in line.at_peak)
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


def test_transfers_name_their_algorithm() -> None:
    analysis = toast.analyze(mlp, f32(256, 512), f32(512, 1024), f32(1024, 512))
    space = Space(analysis, Mesh.parse("m=8"), min_dimensions=0)
    model = CostModel(space, load("h100"), overlap="none")
    state = space.apply(space.initial, action(space, "w1", 1, "m"))
    (transfer,) = model.transfers(state)
    assert (transfer.kind, transfer.axes, transfer.count) == ("all_reduce", ("m",), 1)
    assert transfer.algorithm.startswith("ring")
    assert model.price(state[None]).collective_seconds.sum() == pytest.approx(transfer.seconds)


def test_memory_that_no_plan_has() -> None:
    with pytest.raises(SearchError, match="no plan on mesh a=2,b=2 fits"):
        toast.plan(analyzed("t2b-tiny"), mesh="a=2,b=2", hardware="tpu-v5e", memory_bytes=1e3)
