"""The search: deterministic, anytime, and it finds what experts find (section 5.1.1)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action, analyzed, f32, mlp, model_of
from toast.cost import Memo, Worth
from toast.errors import HardwareError, MeshError, SearchError
from toast.hardware import Mesh, load
from toast.models.zoo import attention
from toast.resources import directory
from toast.search import Polishing, Round, Search, Settings, TreeSearch
from toast.search.ledger import Ledger
from toast.search.relaxation import proposing
from toast.space import Action, States


def test_mlp_gets_batch_and_megatron_when_weights_are_large() -> None:
    """Figure 2c: batch on one axis, the hidden dimension on the other."""
    plan = toast.plan(
        mlp, f32(4096, 8192), f32(8192, 65536), f32(65536, 8192),
        mesh="data=4,model=4", hardware="tpu-v5e",
    )  # fmt: skip
    specs = plan.arguments
    (batch,), _ = specs["x"]
    columns, rows = specs["w1"][1], specs["w2"][0]
    assert columns == rows
    assert len(columns) == 1
    assert columns[0] != batch
    assert {c.kind for c in plan.after.collectives if c.count} <= {"all_reduce", "reduce_scatter"}


def test_small_weights_are_not_sharded_for_compute() -> None:
    plan = toast.plan(
        mlp, f32(65536, 256), f32(256, 256), f32(256, 256), mesh="data=4", hardware="tpu-v5e"
    )
    assert plan.arguments["x"] == (("data",), ())
    assert plan.arguments["w1"] == ((), ())
    assert not any(c.count for c in plan.after.collectives)


def test_attention_gets_sequence_sharding_when_memory_demands_it() -> None:
    """Figure 5b: with S = 65536 the scores alone take 16 GiB."""
    plan = toast.plan(
        attention(sequence=65536, width=1024, key=128, value=128),
        mesh="s=16", hardware="tpu-v5e",
    )  # fmt: skip
    assert plan.before.peak_bytes > plan.memory_bytes
    assert plan.fits
    assert plan.arguments["x"][0] == ("s",)
    program = plan.analysis.program
    scores = [
        plan.shardings.of(program, v)
        for v, value in enumerate(program.values)
        if value.type.shape == (65536, 65536)
    ]
    # Every tensor with a conflict is sharded on exactly one of its sequence dimensions.
    assert scores
    assert all(sum(map(len, spec)) == 1 for spec in scores)


@pytest.fixture(scope="module")
def t2b() -> toast.Plan:
    return toast.plan(analyzed("t2b"), mesh="data=4,model=4", hardware="tpu-v5e")


def test_t2b_fits_where_unsharded_and_data_parallel_do_not(t2b: toast.Plan) -> None:
    limit = t2b.memory_bytes
    assert limit < 16 * 2**30
    assert t2b.after.peak_bytes < limit
    assert t2b.before.peak_bytes > limit
    model = model_of(analyzed("t2b"), "data=4,model=4")
    state = model.space.initial
    for axis in ("data", "model"):
        state = model.space.apply(state, action(model.space, "tokens", 0, axis))
    assert model.price(state[None]).peak_bytes[0] > limit


def test_t2b_plan_beats_the_manual_strategies(t2b: toast.Plan) -> None:
    """FSDP, Megatron and sequence parallelism, in all their combinations."""
    model = model_of(analyzed("t2b"), "data=4,model=4")
    space = model.space

    def act(argument: str, d: int, axis: str) -> object:
        return action(space, argument, d, axis)

    layer = "params['layers'][0]"
    batch = [act("tokens", 0, "data")]
    megatron = [
        act(f"{layer}['gate']", 1, "model"), act(f"{layer}['wq']", 1, "model"),
        act("params['embedding']", 0, "model"),
    ]  # fmt: skip
    fsdp = [act(f"{layer}['gate']", 0, "data")]
    sequence = [act("tokens", 1, "model")]
    costs = []
    for chosen in (
        batch, batch + megatron, batch + fsdp, batch + megatron + fsdp, batch + fsdp + sequence,
        batch + megatron + sequence, batch + megatron + fsdp + sequence,
    ):  # fmt: skip
        state = space.initial
        for a in chosen:
            state = space.apply(state, a)  # type: ignore[arg-type]
        costs.append(float(model.cost(model.price(state[None]), t2b.memory_bytes)[0]))
    assert t2b.cost <= min(costs) * 1.001


def test_donated_arguments_come_back_sharded_as_they_went_in(t2b: toast.Plan) -> None:
    program = t2b.analysis.program
    specs = list(t2b.arguments.values())
    for result, alias in enumerate(program.aliases):
        if alias >= 0:
            assert t2b.shardings.results[result] == specs[alias]


@pytest.mark.parametrize("seed", [0, 7])
def test_same_seed_same_plan(seed: int) -> None:
    analysis = analyzed("t2b-tiny")
    made = [
        toast.plan(analysis, mesh="d=2,m=2", hardware="h100", settings=Settings(seed=seed))
        for _ in range(2)
    ]
    first, second = (dataclasses.replace(p, seconds={}, rounds=()) for p in made)
    assert first.shardings == second.shardings
    assert first.steps == second.steps


def test_budget_zero_is_the_unsharded_plan() -> None:
    plan = toast.plan(
        analyzed("t2b-tiny"), mesh="d=2", hardware="tpu-v5e", settings=Settings(budget=0.0)
    )
    assert plan.steps == ()
    assert plan.shardings.values == {}


@pytest.mark.parametrize("call", [3, 8])
def test_an_interrupt_ends_the_search_with_the_best_so_far(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    whole, price, calls = model.price, Memo.price, itertools.count()

    def interrupted(memo: Memo, states: States) -> Worth:
        if next(calls) == call:
            raise KeyboardInterrupt
        return price(memo, states)

    monkeypatch.setattr(Memo, "price", interrupted)
    found = Search(model, memory_bytes=1e5, settings=Settings(rounds=2)).run()
    assert found.stopped == "interrupt"
    assert found.actions
    cost = model.cost(whole(found.state[None]), 1e5)[0]
    assert cost == found.cost < model.cost(whole(model.space.initial[None]), 1e5)[0]


def test_an_interrupt_is_not_lost_where_nobody_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callback of the garbage collector raises is printed and forgotten."""
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    price, calls = Memo.price, itertools.count()

    def interrupted(memo: Memo, states: States) -> Worth:
        if next(calls) == 3:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return price(memo, states)

    # A shell that starts tests in the background has them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(Memo, "price", interrupted)
        found = Search(model, memory_bytes=1e5).run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.stopped == "interrupt"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_trajectory_is_longer_than_told(depth: int) -> None:
    """Also of those that take over what proposals do better."""
    model = model_of(analyzed("mlp"), "a=2,b=2,c=2")
    found = Search(
        model, memory_bytes=np.inf, settings=Settings(depth=depth),
        proposals=proposing(model),
    ).run()  # fmt: skip
    assert len(found.actions) <= depth


def test_a_search_can_begin_with_what_an_earlier_one_found() -> None:
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    first = Search(model, memory_bytes=1e5).run()
    again = Search(
        model,
        memory_bytes=1e5,
        start=[first.actions],
        settings=Settings(rounds=1),
        stages=(Polishing(), TreeSearch("parts")),
    ).run()
    assert again.cost <= first.cost
    assert again.states < first.states


def test_what_is_found_costs_no_more_than_the_start() -> None:
    """However long it is: refinements, which count for several actions, are no reason to leave it."""
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    first = Search(model, memory_bytes=1e5).run()
    space, state = model.space, model.space.initial
    start: list[Action] = []
    for axis in (0, 1):  # the same state, an op class at a time
        for k in np.flatnonzero(first.state[:, axis] >= 0).tolist():
            start.append(Action(-1, (), axis, ((k, int(first.state[k, axis])),)))
            state = space.apply(state, start[-1])
    assert (state == first.state).all()
    assert len(start) > 50
    stages = Polishing(), TreeSearch("parts", hottest=1, widest=1, effort=1)
    settings = Settings(rounds=1)
    for given, limit in ((settings, 1e5), (Settings(budget=0.0), 1e5)):
        again = Search(
            model, memory_bytes=limit, start=[tuple(start)], settings=given, stages=stages
        ).run()
        assert again.cost <= first.cost
    assert again.actions == tuple(start)


def test_all_actions_at_once_are_the_actions_one_by_one() -> None:
    space = model_of(analyzed("t2b-tiny"), "d=2,m=2").space
    state = space.apply(space.initial, action(space, "tokens", 0, "d"))
    every = space.apply_each(state, range(len(space.actions)))
    few = space.apply_each(state, [5, 2])
    for number, each in enumerate(space.actions):
        one = space.apply(state, each)
        assert (every[number] == one).all()
        assert (space.apply_all(every, each)[number] == space.apply(one, each)).all()
    assert (few == every[[5, 2]]).all()


@pytest.mark.parametrize("mesh", ["d=1", "d=1,m=1"])
def test_a_mesh_of_one_device(mesh: str) -> None:
    plan = toast.plan(analyzed("t2b-tiny"), mesh=mesh, hardware="h100")
    assert plan.steps == ()
    assert plan.after == plan.before


def test_arguments_that_are_none_of_those_there_are(tmp_path: pathlib.Path) -> None:
    analysis = analyzed("t2b-tiny")
    with pytest.raises(SearchError, match="overlap 'half': use none, partial, gathers"):
        toast.plan(analysis, mesh="d=2", hardware="h100", overlap="half")  # type: ignore[arg-type]
    with pytest.raises(HardwareError, match="hardware None: use a device name or the path"):
        toast.plan(analysis, mesh="d=2", hardware=None)  # type: ignore[arg-type]
    path = tmp_path / "mine.toml"
    path.write_text((directory("hardware") / "h100.toml").read_text())
    assert toast.plan(analysis, mesh="d=2", hardware=path).hardware == load("h100")
    unnamed = jax.sharding.Mesh(np.array(jax.devices()[:2]), (0,))
    with pytest.raises(MeshError, match="its axis names are not strings"):
        toast.plan(analysis, mesh=unnamed, hardware="h100")


def test_progress_is_told_of_every_round() -> None:
    told: list[object] = []
    toast.plan(analyzed("t2b-tiny"), mesh="d=2", hardware="tpu-v5e", progress=told.append)
    rounds = [event for event in told if isinstance(event, Round)]
    assert "search" in told
    assert [r.number for r in rounds] == list(range(len(rounds)))
    assert all(a.cost >= b.cost for a, b in itertools.pairwise(rounds))


def test_states_are_priced_once() -> None:
    """Transpositions: two orders of the same actions lead to one state (4.3)."""
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    space = model.space
    a, b = action(space, "tokens", 0, "d"), action(space, "params['layers'][0]['gate']", 1, "m")
    one = space.apply(space.apply(space.initial, a), b)
    other = space.apply(space.apply(space.initial, b), a)
    assert one.tobytes() == other.tobytes()


def test_what_cannot_beat_the_best_is_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan at the lower bound ends the search; what it leaves out changes nothing."""
    analysis = toast.analyze(mlp, f32(65536, 256), f32(256, 256), f32(256, 256))
    quick = toast.plan(analysis, mesh="data=4,model=4", hardware="tpu-v3")
    monkeypatch.setattr(Ledger, "beaten", lambda *_: False)
    whole = toast.plan(analysis, mesh="data=4,model=4", hardware="tpu-v3")
    assert quick.actions == whole.actions
    assert 10 * quick.states < whole.states


def test_trajectories_stop_at_the_depth_limit() -> None:
    model = model_of(analyzed("t2b-tiny"), "d=2,m=2")
    found = Search(model, memory_bytes=1.0, settings=Settings(depth=2, rounds=2)).run()
    assert len(found.actions) <= 2


def test_polished_plans_have_no_idle_action() -> None:
    plan = toast.plan(
        analyzed("t2b-tiny"),
        mesh="d=2,m=2",
        hardware=toast.api.small_scale(analyzed("t2b-tiny"), Mesh.parse("d=2,m=2"), load("h100")),
    )
    peaks = [plan.before, *(s.after for s in plan.steps)]
    assert len({(p.step_seconds, p.peak_bytes) for p in peaks}) == len(peaks)


def test_impossible_memory_limit_names_the_smallest_peak() -> None:
    with pytest.raises(SearchError, match=r"no plan on mesh d=2 fits; the smallest peak found is"):
        toast.plan(analyzed("t2b-tiny"), mesh="d=2", hardware="tpu-v5e", memory_bytes=1000.0)


def test_axis_that_divides_nothing_is_refused() -> None:
    with pytest.raises(MeshError, match=r"mesh axis d=7 divides no dimension of t2b-tiny"):
        toast.plan(analyzed("t2b-tiny"), mesh="d=7", hardware="tpu-v5e")


def test_uneven_sizes_are_used_where_they_divide() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w.T

    plan = toast.plan(f, f32(6 * 4096, 2048), f32(2048, 2048), mesh="d=6", hardware="tpu-v5e")
    assert plan.arguments["x"] == (("d",), ())
    assert plan.arguments["w"] == ((), ())


def test_plan_is_plain_data() -> None:
    import json

    plan = toast.plan(analyzed("t2b-tiny"), mesh="d=2,m=2", hardware="tpu-v5e")
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["version"] == 2
    assert set(data["arguments"]) == set(plan.analysis.program.arguments)
    assert data["after"]["step_seconds"] == plan.after.step_seconds
    frame = plan.argument_frame()
    assert list(frame.columns) == ["argument", "shape", "dtype", "spec"]
    assert len(frame) == len(plan.arguments)
    assert np.isfinite(data["cost"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: (x * 2, x * 2, x),
        lambda x: jnp.arange(64.0),
        lambda x: x[:0],
        lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=0)[0],
    ],
)  # fmt: skip
def test_odd_programs_have_plans_that_run(function: object) -> None:
    analysis = toast.analyze(function, f32(64, 64))
    mesh = Mesh.parse("d=4,m=2")
    machine = toast.api.small_scale(analysis, mesh, load("h100"))
    assert toast.plan(analysis, mesh=mesh, hardware=machine).verify().equal
