"""The integer linear program finds what enumeration finds, and its plans are programs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import analyzed, f32, mlp, model_of
from toast import api
from toast.analysis import Analysis
from toast.cost import CostModel
from toast.evaluation.baselines import alpa
from toast.evaluation.baselines.alpa import Solution, solve
from toast.hardware import Mesh, load
from toast.models import build
from toast.report import plan_tables
from toast.search.pairwise import Problem
from toast.space import Space


def without_latency(hardware: str = "tpu-v5e") -> toast.hardware.Hardware:
    machine = load(hardware)
    links = dataclasses.replace(machine.interconnect, latency_s=0.0, network_latency_s=0.0)
    return dataclasses.replace(machine, interconnect=links)


def problem_of(analysis: Analysis, mesh: str) -> Problem:
    space = Space(analysis, Mesh.parse(mesh), collapse=False)
    return Problem(CostModel(space, without_latency()))


def two_products(x: jax.Array, v: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.exp(x @ v)
    return hidden, (hidden * hidden.sum(axis=1)[:, None]) @ w


PROGRAMS = {
    "mlp": (mlp, (f32(256, 32), f32(32, 64), f32(64, 16))),
    "wide weights": (mlp, (f32(8, 512), f32(512, 512), f32(512, 512))),
    "two products": (two_products, (f32(64, 128), f32(128, 32), f32(32, 64))),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("share", [None, 0.8, 0.6])
def test_the_optimum_is_that_of_enumeration(name: str, share: float | None) -> None:
    function, shapes = PROGRAMS[name]
    problem = problem_of(toast.analyze(function, *shapes), "d=2")
    choices = [
        np.array(c) for c in itertools.product(*map(range, problem.strategies.sizes.tolist()))
    ]
    assert 100 < len(choices) < 20_000
    rows = [row for m in (-1, problem.worst(choices[0])) for row in problem.memory(m)]
    limit = (share or 0.0) * problem.model.initial_peak
    if share is None:
        rows, limit = [], np.inf
    allowed = [c for c in choices if all(problem.alive(row, c) <= limit for row in rows)]
    assert share is None or 0 < len(allowed) < len(choices)
    best = min(problem.seconds(c) for c in allowed)
    found = solve(problem, rows, limit, 20.0, gap=0.0)
    assert found.status == "optimal"
    assert found.choice is not None
    assert problem.seconds(found.choice) == pytest.approx(best, rel=1e-6)


def test_the_objective_is_the_cost_model_without_overlap() -> None:
    """Where no value is used twice; the model shares copies, the program does not.

    The program takes all arguments for those that products may find in fast memory.
    """
    analysis = toast.analyze(mlp, f32(256, 32), f32(32, 64), f32(64, 16))
    space = Space(analysis, Mesh.parse("d=4,m=2"), collapse=False)
    problem = Problem(CostModel(space, without_latency(), overlap="none"))
    random, sizes = np.random.default_rng(0), problem.strategies.sizes
    choices = [random.integers(sizes) for _ in range(200)]
    priced = problem.model.price(np.stack([problem.strategies.state(c) for c in choices])).seconds
    mine = np.array([problem.seconds(c) for c in choices])
    # Otherwise a sum that no use wants scattered is not, and shards may have to change places.
    assert np.isclose(priced, mine, rtol=2e-2).mean() > 0.3
    best = solve(problem, [], np.inf, 20.0)
    assert best.choice is not None
    state = problem.strategies.state(best.choice)
    assert problem.model.price(state[None]).seconds[0] == pytest.approx(
        problem.seconds(best.choice), rel=2e-2
    )


def test_states_are_legal_whatever_is_chosen() -> None:
    for name in ("t2b-tiny", "t2b-scan"):
        analysis = toast.analyze(build(name, small=True))
        problem = problem_of(analysis, "x=2,y=4")
        random = np.random.default_rng(0)
        classes = problem.model.space.classes
        for _ in range(20):
            state = problem.strategies.state(random.integers(problem.strategies.sizes))
            for factor in range(classes.divisor.shape[1]):
                shards = np.where(state == factor, [2, 4], 1).prod(axis=1)
                assert (classes.divisor[:, factor] % shards == 0).all()
            for op, other in analysis.program.ties:
                assert (state[classes.of_op[op]] == state[classes.of_op[other]]).all()


def test_the_mlp_is_planned_as_by_toast() -> None:
    analysis, mesh, machine = analyzed("mlp"), Mesh.parse("data=4,model=4"), load("tpu-v5e")
    plan = alpa(analysis, mesh, machine)
    assert (plan.method, plan.note, plan.steps) == ("alpa", "optimal", ())
    best = toast.plan(analysis, mesh=mesh, hardware=machine)
    assert plan.cost == pytest.approx(best.cost, rel=1e-3)
    assert plan.arguments["x"] == (("data", "model"), ())
    assert json.loads(plan.json_text())["note"] == "optimal"
    assert plan_tables(plan)
    assert best.method == "toast"


def test_a_memory_limit_shards_the_weights() -> None:
    def deep(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return x

    analysis = toast.analyze(deep, f32(65536, 1024), [f32(1024, 1024)] * 20)
    mesh, machine = Mesh.parse("d=4"), load("tpu-v5e")
    free = alpa(analysis, mesh, machine)
    assert free.arguments["x"] == (("d",), ())
    assert free.arguments["weights[3]"] == ((), ())
    tight = alpa(analysis, mesh, machine, memory_bytes=free.after.peak_bytes - 40 * 2**20)
    assert tight.fits
    sharded = sum(any(axes) for name, axes in tight.arguments.items() if name != "x")
    assert 13 <= sharded <= 20
    assert tight.after.collective_seconds > free.after.collective_seconds
    impossible = alpa(analysis, mesh, machine, memory_bytes=1000.0)
    assert "without the memory limit, which is infeasible" in impossible.note
    assert impossible.after.step_seconds == pytest.approx(free.after.step_seconds)


def test_a_solver_that_runs_out_of_time_says_so() -> None:
    analysis, mesh = analyzed("t2b-tiny"), Mesh.parse("data=4,model=2")
    plan = alpa(analysis, mesh, without_latency(), time_limit=0.0)
    assert plan.note.startswith("time limit")
    assert "the best state that shards one kind of dimension" in plan.note
    assert plan.after.step_seconds < plan.before.step_seconds


@pytest.mark.parametrize("status", ["optimal", "infeasible"])
def test_a_limit_between_two_programs_is_told(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["toast.evaluation.baselines.alpa"]
    late = 0.0

    def first_only(problem: Problem, _rows: object, *_: float) -> Solution:
        nonlocal late
        late = 1e6  # by the clock of which it asks next
        solved = status == "optimal"
        choice = np.zeros_like(problem.strategies.sizes) if solved else None
        return Solution(status, choice, 0.0)

    clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + late)
    monkeypatch.setattr(module, "solve", first_only)
    monkeypatch.setattr(module, "time", clock)
    plan = alpa(analyzed("mlp"), Mesh.parse("data=4"), load("tpu-v5e"), memory_bytes=1000.0)
    assert not plan.fits
    assert plan.note.startswith(status)
    assert plan.note.endswith("one kind of dimension; stopped at its time limit")


@pytest.mark.parametrize(
    ("name", "mesh", "collapse", "options"),
    [
        ("mlp", "data=4,model=2", False, {}),
        ("attention", "s=8", True, {}),
        ("t2b-tiny", "data=8", False, {"layers": 1}),
        ("t2b-scan", "data=8", False, {}),
    ],
)
def test_plans_run_with_equal_numbers(
    name: str, mesh: str, collapse: bool, options: dict[str, int]
) -> None:
    analysis, parsed = toast.analyze(build(name, small=True, **options)), Mesh.parse(mesh)
    machine = api.small_scale(analysis, parsed, load("tpu-v5e"))
    said: list[str] = []
    plan = alpa(analysis, parsed, machine, time_limit=5.0, collapse=collapse, progress=said.append)
    assert said
    assert plan.after.step_seconds < plan.before.step_seconds
    assert plan.verify().equal


def test_deep_programs_cost_about_what_toast_finds() -> None:
    analysis = analyzed("t2b", layers=2)
    mesh, machine = Mesh.parse("data=4,model=4"), load("tpu-v5e")
    plan = alpa(analysis, mesh, machine)
    assert plan.note == "optimal"
    assert plan.fits
    best = toast.plan(analysis, mesh=mesh, hardware=machine)
    assert best.cost <= plan.cost < 1.08 * best.cost


def test_one_number_per_leader_is_a_state() -> None:
    model = model_of(analyzed("t2b-tiny"), "d=4,m=2", collapse=False)
    problem = Problem(model)
    unsharded = problem.strategies.state(np.zeros_like(problem.strategies.sizes))
    assert (unsharded == model.space.initial).all()
    assert problem.seconds(np.zeros_like(problem.strategies.sizes)) == pytest.approx(
        model.initial_seconds
    )


def test_memory_is_hardly_less_than_that_of_the_model() -> None:
    """Copies that may be shared, and second buffers, always count."""
    problem = problem_of(analyzed("t2b-tiny"), "d=4,m=2")
    random, sizes = np.random.default_rng(0), problem.strategies.sizes
    unsharded = np.zeros_like(sizes)
    rows = problem.memory(problem.worst(unsharded))
    for choice in (unsharded, *(random.integers(sizes) for _ in range(5))):
        moments = problem.model.moments(problem.strategies.state(choice))
        assert moments.max() == pytest.approx(
            problem.model.timeline(problem.strategies.state(choice)).peak_bytes
        )
        alive = max(problem.alive(row, choice) for row in rows)
        share = alive / moments[problem.worst(unsharded)]
        assert 0.8 < share < 2.5
