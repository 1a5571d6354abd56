"""Runs searches: one after another in this process, or several at a time in worker processes.

The result of a job depends only on the job; of equal results, the first job's is kept.  Without a
budget or an interrupt, results therefore do not depend on the number of processes.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import pickle
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from toast.cost import CostModel
from toast.search.executors import RemoteSearch, UpcomingSearch, run_on, workers_of
from toast.search.proposals import Proposals
from toast.search.search import DEFAULT_STAGES, Round, Search, SearchResult
from toast.search.settings import Settings
from toast.search.stage import Stage
from toast.search.worker import Proposed, Stop, Task, close_pipes, pickled, send, start_process
from toast.space import Action, States

#: The code that a worker process runs.
_WORKER = "from toast.search.worker import main; main()"

#: Seconds that processes have to answer after the end of the budget or an interrupt.
_GRACE = 3.0

#: Seconds between checks for an interrupt while waiting.
_PATIENCE = 0.05


class Job(NamedTuple):
    """One search."""

    model: CostModel
    memory_bytes: float
    settings: Settings
    stages: tuple[Stage, ...] = DEFAULT_STAGES
    #: Trajectories to begin with.
    start: tuple[tuple[Action, ...], ...] = ()
    #: States to combine with the best one, once they are available.
    proposals: Proposals | None = None


class Runner:
    """Runs jobs, at most ``processes`` at a time; with one, in this process."""

    def __init__(
        self,
        processes: int,
        interrupt: threading.Event,
        progress: Callable[[Round], None] | None = None,
        executor: concurrent.futures.Executor | None = None,
    ) -> None:
        """Setting ``interrupt`` ends every job with its best plan so far.

        Several jobs run on ``executor`` instead of own processes, if there is one.
        """
        self._processes = processes
        self._executor = executor
        self._interrupt = interrupt
        self._progress = progress
        self._workers: list[_Worker] = []
        self._messages: queue.SimpleQueue[tuple[_Worker, Any]] = queue.SimpleQueue()
        #: Why searches ended early: ``budget``, ``interrupt`` or empty.
        self.stopped = ""
        #: What became of the executor, if it failed.
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.end()

    def run(
        self, jobs: Iterable[Job], end: float | None = None, *, count: int | None = None
    ) -> list[SearchResult | str]:
        """The result of each job, or the reason why it has none; at least one job has a result.

        Jobs share the time until ``end`` (of ``time.perf_counter``) evenly; later jobs also get the
        time that earlier ones leave.  The reason is empty if the end or an interrupt left no time.

        Without an ``end``, an executor begins with the first of the ``jobs`` while the others are
        still being made; ``count`` says about how many there will be.
        """
        stock = _Stock(jobs)
        executor = self._executor
        if executor is None or end is not None or count is None:
            count = len(stock.all())
        progress = _Progress(self._progress, count)
        if executor is not None and count > 1 and not self._interrupt.is_set():
            results = self._run_on_executor(executor, stock, end, progress)
        elif min(self._processes, count) < 2 or self._interrupt.is_set():
            results = self._run_here(stock.all(), end, progress)
        else:
            results = self._run_in_processes(stock.all(), end, progress)
        if not any(isinstance(result, SearchResult) for result in results):
            # Without any result, run the first job here; without time if searches were stopped.
            now = time.perf_counter() if self.stopped else end
            results[0] = self._run_here(stock.all()[:1], now, progress)[0]
        if self._interrupt.is_set():
            self.stopped = "interrupt"
        return results

    def _run_here(
        self, jobs: Sequence[Job], end: float | None, progress: _Progress
    ) -> list[SearchResult | str]:
        results: list[SearchResult | str] = []
        for number, job in enumerate(jobs):
            if number and (self._interrupt.is_set() or _over(end)):
                self.stopped = self.stopped or "budget"
                results.append("")
                continue
            result = Search(
                job.model,
                memory_bytes=job.memory_bytes,
                settings=_within(job.settings, end, len(jobs) - number),
                stages=job.stages,
                start=job.start,
                proposals=job.proposals or (lambda _seconds: ()),
                progress=functools.partial(progress, number),
                interrupt=self._interrupt,
            ).run()
            self.stopped = self.stopped or result.stopped
            results.append(result)
        return results

    def _run_on_executor(
        self,
        executor: concurrent.futures.Executor,
        stock: _Stock,
        end: float | None,
        progress: _Progress,
    ) -> list[SearchResult | str]:
        """The results of an executor; jobs that it loses run here."""
        # An end is given with a list of jobs only.
        turns = 1
        if end is not None:
            turns = -(-len(stock.all()) // workers_of(executor, len(stock.all())))
        sent: tuple[CostModel, bytes] | None = None

        def task(job: Job, states: tuple[States, ...]) -> RemoteSearch:
            nonlocal sent
            if sent is None or sent[0] is not job.model:
                sent = job.model, pickled(job.model)
            settings = _within(job.settings, end, turns)
            return RemoteSearch(sent[1], job.memory_bytes, settings, job.stages, job.start, states)

        outcomes = run_on(
            executor,
            (UpcomingSearch(functools.partial(task, job), job.proposals) for job in stock),
            end=None if end is None else end + _GRACE,
            interrupt=self._interrupt,
            ended=lambda number, result: progress(number, result.rounds[-1])
            if result.rounds else None,
        )  # fmt: skip
        for result in outcomes.results.values():
            if isinstance(result, SearchResult):
                self.stopped = self.stopped or result.stopped
        if outcomes.cut:
            self.stopped = self.stopped or "budget"
        jobs = stock.all()
        results: list[SearchResult | str] = [outcomes.results.get(n, "") for n in range(len(jobs))]
        if outcomes.failure:
            self._executor = None
            self.notes = (
                f"the executor failed ({outcomes.failure}); the search went on in this process",
            )
            lost = [number for number in range(len(jobs)) if number not in outcomes.results]
            again = self._run_here([jobs[number] for number in lost], end, progress)
            for number, result in zip(lost, again, strict=True):
                results[number] = result
        return results

    def _run_in_processes(
        self, jobs: Sequence[Job], end: float | None, progress: _Progress
    ) -> list[SearchResult | str]:
        together = min(self._processes, len(jobs))
        results: list[SearchResult | str] = [""] * len(jobs)
        waiting = collections.deque(range(len(jobs)))
        busy: dict[_Worker, int] = {}
        turns = -(-len(jobs) // together)
        while waiting or busy:
            while waiting and len(busy) < together:
                number = waiting.popleft()
                if number and _over(end):
                    self.stopped = self.stopped or "budget"
                    continue
                share = turns - number // together
                settings = _within(jobs[number].settings, end, share)
                worker = self._idle_worker(busy)
                busy[worker] = number
                worker.begin(number, jobs[number]._replace(settings=settings))
            if not busy:
                break
            received = self._receive(None if end is None else end + _GRACE, self._interrupt)
            if received is None:
                self.stopped = self.stopped or "budget"
                self._recall(busy, results)
                break
            worker, message = received
            if isinstance(message, Round):
                progress(busy[worker], message)
            else:
                self._settle(worker, message, busy, results)
        return results

    def _receive(
        self, end: float | None, interrupt: threading.Event | None = None
    ) -> tuple[_Worker, Any] | None:
        """The next message of a process; ``None`` after ``end`` or an interrupt."""
        while not (interrupt and interrupt.is_set()) and not _over(end):
            with contextlib.suppress(queue.Empty):
                return self._messages.get(timeout=_PATIENCE)
        return None

    def _idle_worker(self, busy: dict[_Worker, int]) -> _Worker:
        for worker in self._workers:
            if worker not in busy:
                return worker
        self._workers.append(_Worker(self._messages))
        return self._workers[-1]

    def _settle(
        self,
        worker: _Worker,
        message: Any,
        busy: dict[_Worker, int],
        results: list[SearchResult | str],
    ) -> None:
        """Record the result of a worker, or remove a worker that is gone."""
        number = busy.pop(worker)
        if isinstance(message, _Loss):
            self._workers.remove(worker)
            worker.end()
            message = message.reason
        elif isinstance(message, SearchResult):
            self.stopped = self.stopped or message.stopped
        results[number] = message

    def _recall(self, busy: dict[_Worker, int], results: list[SearchResult | str]) -> None:
        """Ask all busy workers for their best so far, and end those that do not answer."""
        end = time.perf_counter() + _GRACE
        try:
            for worker, number in busy.items():
                worker.stop(number)
            while busy and (received := self._receive(end)):
                worker, message = received
                if not isinstance(message, Round):
                    self._settle(worker, message, busy, results)
        except KeyboardInterrupt:
            self._interrupt.set()
        for worker, number in busy.items():
            results[number] = "it did not end in time"
            self._workers.remove(worker)
            worker.end()


class _Stock:
    """Jobs that are made one by one."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._source = iter(jobs)
        self._jobs: list[Job] = []

    def __iter__(self) -> Iterator[Job]:
        yield from self._jobs
        for job in self._source:
            self._jobs.append(job)
            yield job

    def all(self) -> list[Job]:
        """Every job; makes those that are missing."""
        self._jobs.extend(self._source)
        return self._jobs


class _Loss(NamedTuple):
    """A worker's process has died, or messages cannot be exchanged with it."""

    reason: str


class _Worker:
    """A process that searches, and the threads that communicate with it."""

    def __init__(self, messages: queue.SimpleQueue[tuple[_Worker, Any]]) -> None:
        self._messages = messages
        #: Functions that make the messages to send; ``None`` ends the thread.
        self._outbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._model: CostModel | None = None
        self._ended = False
        self._process = start_process(_WORKER)
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, number: int, job: Job) -> None:
        """Start a job in the process; its progress and result go to the message queue."""
        model = None if job.model is self._model else job.model
        self._model = job.model

        def task() -> Task:
            sent = None if model is None else pickled(model)
            proposed = job.proposals is not None
            return Task(
                number, sent, job.memory_bytes, job.settings, job.stages, job.start, proposed
            )

        self._outbox.put(task)
        if job.proposals:
            job.proposals.future.add_done_callback(
                lambda future: self._outbox.put(lambda: Proposed(number, future.result()))
            )

    def stop(self, number: int) -> None:
        """Ask the process to end a job with its best plan so far."""
        self._outbox.put(lambda: Stop(number))

    def end(self) -> None:
        """End the process."""
        self._ended = True
        self._process.kill()
        self._process.wait()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        close_pipes(self._process)

    def _write(self) -> None:
        target = self._process.stdin
        assert target
        try:
            while make_message := self._outbox.get():
                send(target, make_message())
        except OSError:
            pass  # the process has died; the reading thread reports it
        except Exception as error:  # the message cannot be sent
            self._messages.put((self, _Loss(f"{type(error).__name__}: {error}")))

    def _read(self) -> None:
        source = self._process.stdout
        assert source
        try:
            while True:
                self._messages.put((self, pickle.load(source)))
        except (EOFError, OSError):
            if not self._ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=1.0)
                code = self._process.returncode
                how = f" of signal {-code}" if code and code < 0 else ""
                self._messages.put((self, _Loss(f"its process died{how}")))
        except Exception as error:
            self._messages.put((self, _Loss(f"{type(error).__name__}: {error}")))


@dataclasses.dataclass(frozen=True)
class SharedRound(Round):
    """Progress of several searches after a round of one of them."""

    #: How many of the searches have begun, and how many there are.
    search: int
    searches: int


class _Progress:
    """Combines the progress of several searches."""

    def __init__(self, progress: Callable[[Round], None] | None, jobs: int) -> None:
        self._progress, self._jobs = progress, jobs
        self._begin = time.perf_counter()
        self._states: dict[int, int] = {}
        self._count = 0
        self._cost = np.inf

    def __call__(self, number: int, event: Round) -> None:
        self._states[number] = event.states
        self._cost = min(self._cost, event.cost)
        seconds = time.perf_counter() - self._begin
        states = sum(self._states.values())
        every = SharedRound(
            self._count, states, self._cost, seconds, len(self._states), self._jobs
        )  # fmt: skip
        self._count += 1
        if self._progress:
            self._progress(every)


def _over(end: float | None) -> bool:
    return end is not None and time.perf_counter() >= end


def _within(settings: Settings, end: float | None, jobs: int) -> Settings:
    """``settings`` with an even share of the remaining time as budget, for one of ``jobs``."""
    if end is None:
        return settings
    left = max(0.0, end - time.perf_counter())
    return dataclasses.replace(settings, budget=left / jobs)
