"""Searches on executors: the same plan, whatever becomes of the executor."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import toast
from tests.docs.blocks import ROOT, blocks
from tests.helpers import analyzed, model_of
from tests.search.test_jobs import result
from toast.errors import SearchError
from toast.search import Round, SearchResult, Settings, find
from toast.search import processes as executor_processes
from toast.search.worker import start_process

LIMIT = 1e5
ROUNDS = Settings(restarts=3, rounds=1)
MESHES: dict[str, Any] = {"devices": 8, "hardware": "tpu-v5e", "settings": Settings(rounds=1)}


def found_by(executor: Any, settings: Settings = ROUNDS, **options: Any) -> SearchResult:
    model = model_of(analyzed("attention"), "d=2,m=2")
    return find(model, memory_bytes=LIMIT, settings=settings, executor=executor, **options)


@functools.cache
def alone() -> SearchResult:
    return found_by(None)


@pytest.fixture
def processes() -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Fresh processes: a fork is unsafe beside the threads of JAX."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as executor:
        yield executor


def test_the_same_plan_as_without(processes: concurrent.futures.Executor) -> None:
    assert result(found_by(processes)) == result(alone())
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert result(found_by(threads)) == result(alone())


def test_the_same_mesh_as_without(processes: concurrent.futures.Executor) -> None:
    here = toast.plan(analyzed("attention"), **MESHES)
    other = toast.plan(analyzed("attention"), executor=processes, **MESHES)
    assert (other.digest, other.cost, other.meshes) == (here.digest, here.cost, here.meshes)
    assert other.note == here.note


class Dying(concurrent.futures.Executor):
    """Loses the searches after the first ones, as a cluster that goes away."""

    def __init__(self, lives: int) -> None:
        self.lives = lives

    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.lives -= 1
        if self.lives >= 0:
            future.set_result(function(*arguments, **keywords))
        else:
            future.set_exception(ConnectionError("the scheduler is gone\nafter a while"))
        return future


@pytest.mark.parametrize("lives", [0, 2])
def test_the_search_goes_on_here_if_the_executor_dies(lives: int) -> None:
    other = found_by(Dying(lives))
    assert other.notes == (
        "the executor failed (ConnectionError: the scheduler is gone); the search went on in this "
        "process",
    )
    first = alone()
    assert (other.actions, other.cost, other.states) == (first.actions, first.cost, first.states)


def test_a_process_that_is_killed(processes: concurrent.futures.ProcessPoolExecutor) -> None:
    killer = threading.Thread(target=kill_a_process_of, args=(processes,))
    killer.start()
    other = found_by(processes)
    killer.join()
    assert "the executor failed (BrokenProcessPool: A " in other.notes[0]
    assert other.cost == alone().cost


def kill_a_process_of(executor: concurrent.futures.ProcessPoolExecutor) -> None:
    while not executor._processes:
        time.sleep(0.01)
    os.kill(next(iter(executor._processes)), signal.SIGKILL)


def test_plans_say_what_became_of_the_executor() -> None:
    gone = concurrent.futures.ThreadPoolExecutor(1)
    gone.shutdown()
    plan = toast.plan(
        analyzed("attention"), **MESHES,
        executor=gone,
    )  # fmt: skip
    assert "the executor failed (RuntimeError: cannot schedule new futures after" in plan.note
    assert plan.note.count("the executor failed") == 1


def test_what_an_executor_must_return() -> None:
    class Forgetful(concurrent.futures.Executor):
        def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_result(None)
            return future

    found = found_by(Forgetful(), Settings(restarts=2, rounds=0))
    assert found.notes == (
        "the executor failed (it returned NoneType, not a result); the search went on in this "
        "process",
    )


def test_meshes_are_prepared_while_others_are_searched() -> None:
    """Of several axes first, which take longest; the result is in the order of the meshes."""
    events: list[str] = []

    class Noting(concurrent.futures.Executor):
        def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
            events.append("submitted")
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_result(function(*arguments, **keywords))
            return future

    settings = Settings(rounds=0)
    here = toast.plan(analyzed("mlp"), devices=4, hardware="tpu-v5e", settings=settings)
    other = toast.plan(
        analyzed("mlp"), devices=4, hardware="tpu-v5e", settings=settings, executor=Noting(),
        progress=lambda event: events.append(str(event)),
    )  # fmt: skip
    assert other.meshes == here.meshes
    order = [event for event in events if event == "submitted" or "decision space" in event]
    assert order[:4] == [
        "decision space 1 of 2: mesh a=2,b=2", "submitted",
        "decision space 2 of 2: mesh a=4", "submitted",
    ]  # fmt: skip


def test_threads_let_processes_search(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        started.append(code)
        return start_process(code)

    monkeypatch.setattr(executor_processes, "start_process", start)
    executor_processes._idle.end()
    settings = Settings(restarts=3, rounds=0)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert result(found_by(threads, settings)) == result(found_by(None, settings))
        assert len(started) == 1, "the process stays for the next search"
        executor_processes._idle._processes[0].kill()
        executor_processes._idle._processes[0].wait()
        found_by(threads, settings)
        assert len(started) == 2
        monkeypatch.setattr(executor_processes, "_WORKER", "import nowhere")
        executor_processes._idle.end()
        assert result(found_by(threads, settings)) == result(found_by(None, settings))


def test_the_budget_and_progress() -> None:
    events: list[Round] = []
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found_by(threads, progress=events.append)
        assert len(events) == ROUNDS.restarts
        stopped = found_by(threads, Settings(restarts=50, budget=0.5))
    assert stopped.stopped == "budget"


def test_what_is_no_executor_is_refused() -> None:
    class Client:
        def get_executor(self) -> None: ...

    for wrong, remedy in ((Client(), r"client\.get_executor\(\)"), (4, r"ProcessPoolExecutor\(\)")):
        with pytest.raises(SearchError, match=f"executor {type(wrong).__name__}: use .*{remedy}"):
            toast.plan(analyzed("attention"), devices=4, hardware="tpu-v5e", executor=wrong)
    with pytest.raises(SearchError, match="cannot be sent to other processes"):
        toast.plan(
            analyzed("attention"), devices=4, hardware="tpu-v5e", stages=[lambda ledger, budget: None],
            executor=Dying(3),
        )  # fmt: skip


# -- Dask ----------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as local,
        distributed.Client(local) as client,
    ):
        yield client


@pytest.mark.filterwarnings("ignore")  # Dask's own
def test_the_same_plan_on_dask(cluster: Any) -> None:
    here = toast.plan(analyzed("attention"), **MESHES)
    other = toast.plan(analyzed("attention"), executor=cluster.get_executor(), **MESHES)
    assert (other.digest, other.cost, other.meshes) == (here.digest, here.cost, here.meshes)
    with pytest.raises(SearchError, match=r"executor Client: use its executor, client\.get_exec"):
        toast.plan(analyzed("attention"), executor=cluster, **MESHES)


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_that_goes_away(cluster: Any) -> None:
    executor = cluster.get_executor()
    closer = threading.Timer(0.05, cluster.cluster.close)
    closer.start()
    other = found_by(executor)
    closer.join()
    assert "the executor failed" in other.notes[0]
    assert other.cost == alone().cost


# -- Ray -----------------------------------------------------------------------------------------


@pytest.fixture
def ray_executor() -> Iterator[concurrent.futures.Executor]:
    """That of docs/training.md, on two workers of this machine."""
    ray = pytest.importorskip("ray", reason="without ray: pip install 'toast-partitioner[ray]'")
    names: dict[str, Any] = {}
    page = blocks(ROOT / "docs" / "training.md")
    exec(next(block.body for block in page if block.title == "ray_executor.py"), names)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield names["RayExecutor"]()
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_the_same_plan_on_ray(ray_executor: concurrent.futures.Executor) -> None:
    here = toast.plan(analyzed("attention"), **MESHES)
    other = toast.plan(analyzed("attention"), executor=ray_executor, **MESHES)
    assert (other.digest, other.cost, other.meshes) == (here.digest, here.cost, here.meshes)
    assert other.note == here.note
    assert result(found_by(ray_executor)) == result(alone())
