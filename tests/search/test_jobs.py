"""Restarts: the same plan on any number of processes, whatever becomes of one of them."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import toast
from tests.helpers import analyzed, model_of
from toast.cost import CostModel, Memo
from toast.errors import SearchError
from toast.hardware import Mesh, load
from toast.search import Round, Search, SearchResult, Settings, find, jobs
from toast.search.relaxation import proposing
from toast.search.restarts import restarts
from toast.space import Space

LIMIT = 1e5


@pytest.fixture(scope="module")
def model() -> CostModel:
    analysis, mesh = analyzed("t2b-tiny"), Mesh.parse("d=2,m=2")
    machine = toast.api.small_scale(analysis, mesh, load("tpu-v5e"))
    return CostModel(Space(analysis, mesh), machine)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Every process that a test starts; none may be left behind."""
    started: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen.__init__

    def noted(self: subprocess.Popen[bytes], *arguments: object, **keywords: object) -> None:
        begin(self, *arguments, **keywords)  # type: ignore[call-overload]
        started.append(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    yield started
    assert all(process.poll() is not None for process in started)


def found_by(model: CostModel, **settings: int | float) -> SearchResult:
    return find(model, memory_bytes=LIMIT, settings=Settings(**settings))  # type: ignore[arg-type]


def result(found: SearchResult) -> tuple[object, ...]:
    """What must not depend on processes: all but times."""
    rounds = tuple((r.number, r.states, r.cost) for r in found.rounds)
    return (
        found.actions, found.state.tobytes(), found.cost, found.rank, found.states,
        found.smallest_peak, rounds, found.stopped, found.notes,
    )  # fmt: skip


def test_the_same_on_any_number_of_processes(
    model: CostModel, processes: list[subprocess.Popen[bytes]]
) -> None:
    one, two, three = (
        result(found_by(model, restarts=3, processes=number, rounds=2)) for number in (1, 2, 3)
    )
    assert one == two == three
    assert len(processes) == 2 + 3


def test_the_first_restart_is_the_search_itself(model: CostModel) -> None:
    alone = Search(
        model, memory_bytes=LIMIT, settings=Settings(seed=5, rounds=2),
        proposals=proposing(model),
    ).run()  # fmt: skip
    single = found_by(model, seed=5, rounds=2)
    several = found_by(model, seed=5, rounds=2, restarts=3)
    assert result(single) == result(alone)
    assert several.rank <= alone.rank
    assert several.states > alone.states
    seeds = [
        [job.settings.seed for job in restarts(
            jobs.Job(model, LIMIT, Settings(seed=seed, restarts=4)))]
        for seed in (5, 5, 6)
    ]  # fmt: skip
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 4


def test_what_is_sent_has_no_program_and_prices_alike(model: CostModel) -> None:
    sent = pickle.loads(pickle.dumps(model.for_search()))
    assert not hasattr(sent.space, "analysis")
    random = np.random.default_rng(0)
    states = [model.space.initial]
    for _ in range(99):
        number = int(random.integers(len(model.space.actions)))
        before = states[int(random.integers(len(states)))]
        states.append(model.space.apply(before, model.space.actions[number]))
    mine, other = model.price(np.stack(states)), sent.price(np.stack(states))
    for field in dataclasses.fields(mine):
        assert (getattr(mine, field.name) == getattr(other, field.name)).all(), field.name
    assert (
        Memo(sent).price(np.stack(states)).seconds == Memo(model).price(np.stack(states)).seconds
    ).all()


def test_workers_import_neither_jax_nor_clingo() -> None:
    """Nor pandas: a worker starts in half a second."""
    code = (
        "import sys, toast.search.worker\n"
        "print(sorted({'jax', 'clingo', 'pandas', 'toast.analysis'} & set(sys.modules)))"
    )
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.check_output(command, text=True).strip() == "[]"


def test_a_worker_that_dies_costs_its_restart(
    model: CostModel, processes: list[subprocess.Popen[bytes]]
) -> None:
    killed: list[int] = []

    def kill(_event: Round) -> None:
        if not killed:
            processes[0].kill()
            killed.append(processes[0].wait())

    settings = Settings(restarts=3, processes=2, rounds=3)
    found = find(model, memory_bytes=LIMIT, settings=settings, progress=kill)
    assert killed == [-signal.SIGKILL]
    assert found.notes == ("search 1 of 3 is lost: its process died of signal 9",)
    assert found.actions


def test_the_search_goes_on_here_if_all_workers_die(
    model: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_WORKER", "import nowhere")
    found = found_by(model, restarts=2, processes=2, rounds=2)
    alone = found_by(model, rounds=2)
    assert found.actions == alone.actions
    assert found.notes == ("search 2 of 2 is lost: its process died",)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_returns_the_best_so_far(
    model: CostModel,
    processes: list[subprocess.Popen[bytes]],
    number: int,
    request: pytest.FixtureRequest,
) -> None:
    # A shell that starts tests in the background has them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    told = threading.Event()
    threading.Thread(
        target=lambda: told.wait() and os.kill(os.getpid(), signal.SIGINT), daemon=True
    ).start()
    settings = Settings(restarts=4, processes=number, rounds=10_000, patience=10_000)
    begin = time.perf_counter()
    found = find(model, memory_bytes=LIMIT, settings=settings, progress=lambda _event: told.set())
    assert found.stopped == "interrupt"
    assert time.perf_counter() - begin < 20
    unsharded = model.price(model.space.initial[None])
    assert found.cost < model.cost(unsharded, LIMIT)[0]


@pytest.mark.parametrize("number", [1, 2])
def test_the_budget_holds(model: CostModel, number: int) -> None:
    begin = time.perf_counter()
    found = found_by(
        model, restarts=4, processes=number, rounds=10_000, patience=10_000, budget=3.0
    )
    assert found.stopped == "budget"
    assert found.actions
    assert time.perf_counter() - begin < 20  # with much to spare on a busy machine


def test_progress_is_of_all_searches(model: CostModel) -> None:
    told: list[Round] = []
    settings = Settings(restarts=3, processes=2, rounds=2)
    found = find(model, memory_bytes=LIMIT, settings=settings, progress=told.append)
    assert [event.number for event in told] == list(range(len(told)))
    assert told[-1].states == found.states
    assert told[-1].cost <= found.cost * (1 + 1e-12)  # the memo rounds otherwise


def test_plans_say_what_became_of_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_WORKER", "import nowhere")
    settings = Settings(restarts=2, processes=2, rounds=1)
    plan = toast.plan(analyzed("mlp"), mesh="d=2", hardware="tpu-v5e", settings=settings)
    assert plan.note == "best of 2 searches, search 2 of 2 is lost: its process died"


def test_numbers_below_one_are_refused() -> None:
    model = model_of(analyzed("mlp"), "d=2")
    with pytest.raises(SearchError, match=r"restarts 0: must be at least 1"):
        found_by(model, restarts=0)
    with pytest.raises(SearchError, match=r"processes 0: must be at least 1"):
        found_by(model, processes=0)
