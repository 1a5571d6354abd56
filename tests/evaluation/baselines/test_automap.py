"""Shardy's propagation as states, and the baselines that stand on it."""

from __future__ import annotations

import io
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import toast
from tests.helpers import action, analyzed, f32, mlp, model_of
from toast import api, report
from toast.cost import CostModel
from toast.errors import PlanError
from toast.evaluation.baselines import Propagator, automap, manual_states, shardy
from toast.evaluation.baselines.automap import OUT_OF_TIME
from toast.hardware import Mesh, load
from toast.models import ZOO
from toast.plan.shard import shardings_of
from toast.program import Program, Spec
from toast.space import Space, States

MESH = Mesh.parse("data=4,model=2")
V5E = load("tpu-v5e")
STRATEGIES = ZOO["t2b"].strategies


def sharded_mlp() -> toast.Analysis:
    return toast.analyze(mlp, f32(256, 32), f32(32, 64), f32(64, 16))


def value_shardings(model: CostModel, state: States) -> list[Spec]:
    """The sharding of every value; axes of one dimension sorted, since their order is a choice."""
    program = model.space.analysis.program
    found = shardings_of(model, state)
    return [
        tuple(tuple(sorted(axes)) for axes in found.of(program, v))
        for v in range(len(program.values))
    ]


def arguments_of(program: Program, model: CostModel, state: States) -> dict[int, Spec]:
    found = shardings_of(model, state)
    return {i: found.of(program, v) for i, v in enumerate(program.argument_values)}


def propagate_equal(analysis: toast.Analysis, arguments: dict[int, Spec], state: States) -> None:
    """From ``arguments`` Shardy finds the shardings of TOAST's ``state``, at the same price."""
    ours = CostModel(Space(analysis, MESH), V5E)
    single = CostModel(Space(analysis, MESH, collapse=False), V5E)
    sharded = Propagator(single.space).run(arguments)
    assert value_shardings(single, sharded.state) == value_shardings(ours, state)
    prices = single.price(sharded.state[None]), ours.price(state[None])
    # Times of classes are nearly those of single ops.
    np.testing.assert_allclose(prices[0].seconds, prices[1].seconds, rtol=1e-4)
    np.testing.assert_allclose(prices[0].peak_bytes, prices[1].peak_bytes)


@pytest.mark.parametrize("steps", [[("x", 0, "data")], [("x", 0, "data"), ("w1", 1, "model")]])
def test_propagation_in_the_mlp_is_toasts(steps: list[tuple[str, int, str]]) -> None:
    analysis = sharded_mlp()
    space = Space(analysis, MESH)
    state, arguments = space.initial, {}
    for name, d, axis in steps:
        state = space.apply(state, action(space, name, d, axis))
        number = analysis.program.arguments.index(name)
        arguments[number] = tuple((axis,) if e == d else () for e in range(2))
    propagate_equal(analysis, arguments, state)


@pytest.mark.parametrize("name", ["t2b-tiny", "t2b-scan"])
@pytest.mark.parametrize("strategy", ["data parallel", "Megatron", "tensor parallel"])
def test_propagation_in_a_train_step_is_toasts(name: str, strategy: str) -> None:
    """Where arguments leave no doubt, also through loops, Shardy finds the experts' plans."""
    options = {} if name == "t2b-tiny" else {"layers": 2, "sequence": 64}
    analysis = analyzed(name, **options)
    model = CostModel(Space(analysis, MESH), V5E)
    state = dict(manual_states(model, STRATEGIES))[strategy]
    propagate_equal(analysis, arguments_of(analysis.program, model, state), state)


def test_propagation_goes_through_control_flow_and_barriers() -> None:
    def function(x: jax.Array, w: jax.Array, flag: jax.Array) -> jax.Array:
        y = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x)
        y, x = jax.lax.optimization_barrier((y, x))
        return jax.lax.cond(flag, lambda y: y * 2.0, lambda y: jnp.sin(y), y) + x

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    analysis = toast.analyze(function, f32(64, 32), f32(32, 32), flag)
    space = Space(analysis, MESH)
    state = space.apply(space.initial, action(space, "x", 0, "data"))
    propagate_equal(analysis, {0: (("data",), ())}, state)


def test_earlier_actions_have_priority() -> None:
    """FSDP: batch first, then parameters on the same axis, where the batch is not."""
    analysis = analyzed("t2b-tiny")
    program = analysis.program
    model = CostModel(Space(analysis, MESH), V5E)
    state = dict(manual_states(model, STRATEGIES))["FSDP + Megatron"]
    wanted = arguments_of(program, model, state)
    batch = program.arguments.index("tokens")
    megatron = {
        i: tuple(tuple(a for a in axes if a == "model") for axes in spec)
        for i, spec in wanted.items() if "params" in program.arguments[i]
    }  # fmt: skip
    single = CostModel(Space(analysis, MESH, collapse=False), V5E)
    propagator = Propagator(single.space)
    sharded = propagator.run({batch: wanted[batch]})
    sharded = propagator.run(megatron, sharded)
    sharded = propagator.run({i: wanted[i] for i in megatron}, sharded)
    assert sharded.arguments == tuple(wanted.values())
    assert value_shardings(single, sharded.state) == value_shardings(model, state)
    seconds = single.price(sharded.state[None]).seconds, model.price(state[None]).seconds
    # A gradient that is scattered in one is exchanged in the other.
    np.testing.assert_allclose(*seconds, rtol=0.02)


def test_shardy_alone_is_data_parallelism() -> None:
    analysis = analyzed("t2b-tiny")
    model = model_of(analysis, str(MESH))
    state = dict(manual_states(model, STRATEGIES))["data parallel"]
    expected = arguments_of(analysis.program, model, state)
    batch = {pattern: d for pattern, d, _ in STRATEGIES["data parallel"]}
    plan = shardy(analysis, MESH, V5E, batch=batch)
    assert plan.method == "shardy"
    assert tuple(plan.arguments.values()) == tuple(expected.values())
    assert plan.after.step_seconds == pytest.approx(model.price(state[None]).seconds[0], rel=0.01)
    # Without a word, the batch is that of arguments that are not donated.
    assert shardy(analysis, MESH, V5E).arguments == plan.arguments


def test_the_batch_must_be_there() -> None:
    with pytest.raises(PlanError, match="batch images:0: mlp has no such argument dimension"):
        shardy(analyzed("mlp"), MESH, V5E, batch={"images": 0})


def test_fact_bases_have_nothing_to_propagate_in() -> None:
    facts = pathlib.Path(__file__).parents[3] / "facts" / "attention.lp"
    with pytest.raises(PlanError, match="attention is a fact base"):
        automap(toast.analyze(facts), MESH, V5E)


def test_automap_is_no_worse_than_data_parallelism_and_deterministic() -> None:
    analysis = toast.analyze(mlp, f32(8192, 1024), f32(1024, 4096), f32(4096, 1024))
    plans = [automap(analysis, MESH, V5E, seed=3) for _ in range(2)]
    assert plans[0].cost <= shardy(analysis, MESH, V5E).cost
    assert plans[0].steps
    assert plans[0].note == ""
    assert plans[0].seed == 3
    first, second = (plan.to_dict() for plan in plans)
    for plan in (first, second):
        del plan["seconds"]
        for number in plan["search"]["rounds"]:
            del number["seconds"]
    assert first == second


def test_a_budget_stops_the_search() -> None:
    plan = automap(analyzed("t2b-tiny"), MESH, V5E, budget=0.5)
    assert plan.note == OUT_OF_TIME
    assert plan.seconds["search"] < 5
    written = json.loads(plan.json_text())
    assert (written["method"], written["note"]) == ("automap", OUT_OF_TIME)


def test_plans_run_with_equal_numbers() -> None:
    analysis = analyzed("attention")
    machine = api.small_scale(analysis, MESH, V5E)
    plan = automap(analysis, MESH, machine, trajectories=8)
    assert plan.steps
    assert plan.after.step_seconds == pytest.approx(plan.steps[-1].after.step_seconds)
    for output in plan.verify().outputs:
        assert output.relative_error <= 1e-5, output
    shown = io.StringIO()
    Console(file=shown, width=200).print(report.plan_tables(plan))
    assert plan.steps[0].dimensions[0] in shown.getvalue()


def test_random_actions_run_with_equal_numbers() -> None:
    """Whatever propagation makes of arguments is a program that computes the same."""
    analysis = analyzed("t2b-tiny", layers=1)
    program = analysis.program
    model = CostModel(Space(analysis, MESH, collapse=False), V5E)
    propagator = Propagator(model.space)
    random = np.random.default_rng(0)
    sharded = propagator.run({})
    for argument in random.permutation(len(program.arguments))[:6].tolist():
        spec = sharded.arguments[argument]
        shape = program.values[program.argument_values[argument]].type.shape
        if any(spec) or not shape:
            continue
        d = int(random.integers(len(shape)))
        if shape[d] % 8 == 0:
            axes = ("data", "model")
            changed = {argument: tuple(axes if e == d else () for e in range(len(shape)))}
            sharded = propagator.run(changed, sharded)
    assert (sharded.state >= 0).any()
    assert toast.apply.verify(program, shardings_of(model, sharded.state)).equal
