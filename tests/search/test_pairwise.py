"""The pairwise program that proposes states to the search."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import toast
from tests.helpers import analyzed, model_of
from toast.cost import CostModel
from toast.evaluation.baselines.alpa import alpa, solve
from toast.hardware import Mesh, load
from toast.search import Polishing, Search, SearchResult, Settings, TreeSearch, pairwise, relaxation
from toast.search.jobs import Job, Runner
from toast.search.proposals import Proposer
from toast.search.restarts import restarts, with_proposals
from toast.space import Constraints, Space


@pytest.mark.parametrize("name", ["t2b-tiny", "attention", "mlp"])
def test_the_relaxed_program_is_as_good_as_the_integer_one(name: str) -> None:
    problem = pairwise.Problem(model_of(analyzed(name), "data=4,model=2"))
    choice = relaxation.relaxed(problem, relaxation.LinearProgram.of(problem))
    assert choice is not None
    whole = solve(problem, (), np.inf, 60.0)
    assert whole.choice is not None
    assert problem.seconds(choice) == pytest.approx(problem.seconds(whole.choice), rel=1e-3)


def test_a_problem_without_memory_counts_the_same_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(analyzed("t2b-tiny"), "data=4,model=2")
    problem, timed = pairwise.Problem(model), pairwise.Problem(model, with_memory=False)
    sizes = problem.strategies.sizes
    random = np.random.default_rng(0)
    for _ in range(20):
        choice = random.integers(sizes)
        assert timed.seconds(choice) == pytest.approx(problem.seconds(choice), rel=1e-12)
    with pytest.raises(ValueError, match="without memory"):
        timed.memory(-1)
    monkeypatch.setattr(pairwise.Problem, "_use_bytes", None)
    pairwise.Problem(model, with_memory=False)


def test_proposals_are_legal_and_hold_constraints() -> None:
    pinned = Constraints(pin={"params['layers'][*]['wq']": "P(None, 'model')"})
    space = Space(analyzed("t2b-tiny"), Mesh.parse("data=4,model=2"), constraints=pinned)
    model = CostModel(space, load("tpu-v5e"))
    states = relaxation.proposing(model)(None)
    assert states
    for state in states:
        for k, rows in enumerate(space.choices):
            assert (rows == state[k]).all(axis=1).any()


def test_nothing_is_proposed_of_large_programs_or_without_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(analyzed("mlp"), "data=4")
    assert relaxation.proposing(model)(0.0) == ()
    assert relaxation.proposing(model)(-0.1) == ()
    assert relaxation.proposing(model_of(analyzed("mlp"), "data=1"))(None) == ()
    with Proposer(threading.Event()) as proposer:
        none = Settings(rounds=0)
        for job in (
            Job(model, np.inf, none), Job(model, np.inf, Settings(), (TreeSearch(), Polishing())),
        ):  # fmt: skip
            assert with_proposals(job, proposer).proposals is None
        proposals = with_proposals(Job(model, np.inf, Settings()), proposer).proposals
        assert proposals is not None
        assert proposals(None)
    monkeypatch.setattr(relaxation, "_LARGEST", 3)
    assert relaxation.proposing(model)(None) == ()


@pytest.mark.parametrize(
    ("name", "mesh", "hardware"),
    [
        ("attention", "data=4,model=2", "tpu-v5e"), ("attention", "data=4,model=4", "tpu-v3"),
        ("itx-decode", "data=4,model=4", "a100"),
    ],
)  # fmt: skip
def test_no_worse_than_the_integer_program(name: str, mesh: str, hardware: str) -> None:
    analysis = analyzed(name, layers=1) if name == "itx-decode" else analyzed(name)
    plan = toast.plan(analysis, mesh=mesh, hardware=hardware)
    other = alpa(analysis, mesh, hardware, time_limit=60)
    assert plan.cost <= 1.001 * other.cost


def test_a_search_is_no_worse_for_proposals() -> None:
    model = model_of(analyzed("attention"), "data=4,model=2")
    alone = Search(model, memory_bytes=np.inf).run()
    helped = Search(model, memory_bytes=np.inf, proposals=relaxation.proposing(model)).run()
    assert helped.rank < alone.rank


@pytest.mark.parametrize("where", [{"mesh": "data=4"}, {"devices": 4}])
def test_an_interrupt_while_proposing_leaves_a_plan(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("toast.search.proposals.proposing", interrupt)
    plan = toast.plan(analyzed("mlp"), hardware="tpu-v5e", **where)
    assert "interrupted" in plan.note
    assert plan.cost <= 1.0


@pytest.mark.parametrize("processes", [1, 2])
def test_a_search_does_without_proposals_that_fail(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no solver")

    settings = Settings(restarts=2, processes=processes)
    notes = []
    for place in ("toast.search.proposals.proposing", "toast.search.relaxation.relaxed"):
        with monkeypatch.context() as patch:
            patch.setattr(place, failing)
            plan = toast.plan(
                analyzed("attention"), mesh="data=4", hardware="tpu-v5e", settings=settings
            )
            several = toast.plan(analyzed("attention"), devices=4, hardware="tpu-v5e")
        notes.append(plan.note)
        assert several.note == "without proposals: RuntimeError: no solver"
    assert notes == 2 * ["best of 2 searches, without proposals: RuntimeError: no solver"]


def test_a_budget_is_not_for_proposals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over = threading.Event(), threading.Event()

    def slow(_model: CostModel) -> None:
        begun.set()
        over.wait()

    monkeypatch.setattr("toast.search.proposals.proposing", slow)
    analysis = analyzed("attention")
    alone = toast.plan(analysis, mesh="data=4", hardware="tpu-v5e", settings=Settings(budget=0.0))
    assert alone.states == 1
    assert not begun.is_set()
    plan = toast.plan(analysis, mesh="data=4", hardware="tpu-v5e", settings=Settings(budget=3.0))
    over.set()
    assert begun.is_set()
    assert "stopped at its budget" in plan.note
    assert plan.cost < 1.0


@pytest.mark.parametrize("processes", [1, 2])
def test_each_search_waits_for_proposals_in_its_own_time(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr("toast.search.proposals.proposing", lambda _model: over.wait())
    settings = Settings(restarts=2 * processes, processes=processes, budget=6.0)
    end = time.perf_counter() + 6.0
    job = Job(model_of(analyzed("attention"), "data=4"), np.inf, settings)
    interrupt = threading.Event()
    with Proposer(interrupt) as proposer, Runner(processes, interrupt) as runner:
        results = runner.run(restarts(with_proposals(job, proposer, end)), end)
    over.set()
    assert all(isinstance(result, SearchResult) for result in results)
