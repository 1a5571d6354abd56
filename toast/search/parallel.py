"""Several searches, one after another or some at a time in processes of their own.

What they find does not depend on how many run at a time, if no budget ends them: each is determined
by its job alone, and of equal ones that of the first job counts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from toast.cost import CostModel
from toast.search.interrupts import heard
from toast.search.pairwise import proposing
from toast.search.search import Found, Round, Search, Settings
from toast.space import Action, States

_WORKER = pathlib.Path(__file__).with_name("worker.py")

#: Seconds beyond the budget, or an interrupt, after which processes are no longer waited for.
_GRACE = 3.0


class Job(NamedTuple):
    """One search."""

    model: CostModel
    memory_bytes: float
    settings: Settings
    #: Trajectories to begin with.
    start: tuple[tuple[Action, ...], ...] = ()
    #: Makes states to combine with the best one, within so many seconds.
    proposals: Callable[[float | None], tuple[States, ...]] = lambda _seconds: ()


def find(
    model: CostModel,
    *,
    memory_bytes: float,
    settings: Settings | None = None,
    start: Sequence[tuple[Action, ...]] = (),
    progress: Callable[[Round], None] | None = None,
) -> Found:
    """The best of ``settings.restarts`` searches, of which ``settings.processes`` run at a time.

    Restarts that are lost, because their process died, are named in the result's notes.  An
    interrupt, or the end of the budget, ends all searches with the best that one of them found.
    """
    settings = settings or Settings()
    begin = time.perf_counter()
    end = None if settings.budget is None else begin + settings.budget
    job = Job(model, memory_bytes, settings, tuple(start))
    with Team(settings.processes, progress) as team:
        results = team.run(restarts(team.proposed(job, end)), end)
    best = best_of(results, team.stopped)
    return dataclasses.replace(
        best, seconds=time.perf_counter() - begin, notes=(*best.notes, *team.notes)
    )


def restarts(job: Job) -> list[Job]:
    """``job`` with the seed of each of its restarts."""
    settings = job.settings
    # The first is the search without restarts, so that more of them never find worse.
    spawned = np.random.SeedSequence(settings.seed).spawn(settings.restarts - 1)
    seeds = [settings.seed, *(int(child.generate_state(1)[0]) for child in spawned)]
    return [job._replace(settings=dataclasses.replace(settings, seed=seed)) for seed in seeds]


def best_of(results: Sequence[Found | str], stopped: str) -> Found:
    """The best of several results, with the states of all; a text says why one is lost."""
    found = [result for result in results if isinstance(result, Found)]
    best = found[0]
    for other in found[1:]:
        if other.rank < best.rank - 1e-12:
            best = other
    return dataclasses.replace(
        best,
        states=sum(f.states for f in found),
        stopped=stopped or max(f.stopped for f in found),
        smallest_peak=min(f.smallest_peak for f in found),
        notes=tuple(
            f"search {number} of {len(results)} is lost: {result}"
            for number, result in enumerate(results, 1)
            if isinstance(result, str) and result
        ),
    )


class Team:
    """Runs searches, ``processes`` at a time; in this process where that is one."""

    def __init__(self, processes: int, progress: Callable[[Round], None] | None = None) -> None:
        self._processes = processes
        self._workers: list[_Worker] = []
        self._events: queue.SimpleQueue[tuple[_Worker, Any]] = queue.SimpleQueue()
        self._progress = progress
        self._proposing = threading.Lock()  # one at a time
        self._over = False
        #: What ended searches early: ``budget``, ``interrupt`` or nothing.
        self.stopped = ""
        self._failures: list[str] = []

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._over = True
        for worker in self._workers:
            worker.end()

    def proposed(self, job: Job, end: float | None = None) -> Job:
        """The job with proposals, which a thread makes beside the search: that needs them late.

        Within a budget, the time until ``end``, the thread also writes their program, of which
        solving may take a quarter of what is left.  Where proposals fail the search does without,
        and ``notes`` say so.
        """
        if not job.settings.rounds or not (job.settings.hottest or job.settings.widest):
            return job  # without refinements they are of no use
        if self.stopped == "interrupt" or _over(end):
            return job
        future: concurrent.futures.Future[tuple[States, ...]] = concurrent.futures.Future()
        written: Callable[[float | None], tuple[States, ...]] | None = None
        if end is None:
            # Not in the thread: they would take turns in the interpreter.
            try:
                with heard() as check:
                    written = proposing(job.model)
                    check()
            except KeyboardInterrupt:
                self.stopped = "interrupt"
                return job
            except Exception as error:
                self._without(error)
                return job

        def make() -> tuple[States, ...]:
            with self._proposing:
                if self._over:
                    return ()
                solve = written or proposing(job.model)
                return solve(None if end is None else (end - time.perf_counter()) / 4)

        def in_time() -> None:
            states: tuple[States, ...] = ()
            try:
                states = make()
            except Exception as error:
                self._without(error)
            finally:
                future.set_result(states)

        def proposals(seconds: float | None) -> tuple[States, ...]:
            try:
                return future.result(seconds)
            except TimeoutError:
                return ()

        # The threads of an executor would be waited for when the process ends.
        threading.Thread(target=in_time, daemon=True).start()
        return job._replace(proposals=proposals)

    def _without(self, error: Exception) -> None:
        self._failures.append(f"without proposals: {type(error).__name__}: {error}")

    @property
    def notes(self) -> tuple[str, ...]:
        """What went wrong, but for searches that are lost."""
        return tuple(dict.fromkeys(self._failures))

    def run(self, jobs: Sequence[Job], end: float | None = None) -> list[Found | str]:
        """What each job found, or why it is lost; at least one is found.

        Jobs share the time that is left until ``end`` (of ``time.perf_counter``) evenly, and what
        one of them does not need goes to the next.  Those that an interrupt, or the end, leaves no
        time for are lost without a reason.
        """
        together = min(self._processes, len(jobs))
        told = _Told(self._progress)
        if together < 2 or self.stopped == "interrupt":
            return self._run_here(jobs, end, told)
        results = self._run_in_processes(jobs, end, told, together)
        if not any(isinstance(result, Found) for result in results):
            # Better than nothing: the first job, without time if it was an interrupt.
            now = time.perf_counter() if self.stopped else end
            results[0] = self._run_here(jobs[:1], now, told)[0]
        return results

    def _run_here(self, jobs: Sequence[Job], end: float | None, told: _Told) -> list[Found | str]:
        results: list[Found | str] = []
        for number, job in enumerate(jobs):
            interrupted = self.stopped == "interrupt"
            if number and (interrupted or _over(end)):
                self.stopped = self.stopped or "budget"
                results.append("")
                continue
            end = time.perf_counter() if interrupted else end
            found = Search(
                job.model,
                memory_bytes=job.memory_bytes,
                settings=_within(job.settings, end, len(jobs) - number),
                start=job.start,
                proposals=job.proposals,
                progress=functools.partial(told, number),
            ).run()
            if not interrupted:
                self.stopped = found.stopped or self.stopped
            results.append(found)
        return results

    def _run_in_processes(
        self, jobs: Sequence[Job], end: float | None, told: _Told, together: int
    ) -> list[Found | str]:
        results: list[Found | str] = [""] * len(jobs)
        waiting = collections.deque(range(len(jobs)))
        busy: dict[_Worker, int] = {}
        turns = -(-len(jobs) // together)
        try:
            while waiting or busy:
                while waiting and len(busy) < together:
                    number = waiting.popleft()
                    if number and _over(end):
                        self.stopped = self.stopped or "budget"
                        continue
                    share = turns - number // together
                    job = jobs[number]
                    job = job._replace(settings=_within(job.settings, end, share))
                    worker = self._idle_worker(busy)
                    busy[worker] = number
                    worker.begin(job)
                if not busy:
                    break
                left = None if end is None else max(0.0, end + _GRACE - time.perf_counter())
                worker, message = self._events.get(timeout=left)
                if isinstance(message, Round):
                    told(busy[worker], message)
                else:
                    self._settle(worker, message, busy, results)
        except KeyboardInterrupt:
            self.stopped = "interrupt"
            self._recall(busy, results)
        except queue.Empty:
            self.stopped = "budget"
            self._recall(busy, results)
        return results

    def _idle_worker(self, busy: dict[_Worker, int]) -> _Worker:
        for worker in self._workers:
            if worker not in busy:
                return worker
        self._workers.append(_Worker(self._events))
        return self._workers[-1]

    def _settle(
        self, worker: _Worker, message: Any, busy: dict[_Worker, int], results: list[Found | str]
    ) -> None:
        """Note the result of a worker, or that it is gone."""
        number = busy.pop(worker)
        if isinstance(message, _Gone):
            self._workers.remove(worker)
            worker.end()
            # Before it could listen an interrupt ends a process.
            message = "" if self.stopped == "interrupt" else message.reason
        elif isinstance(message, Found):
            self.stopped = self.stopped or message.stopped
        results[number] = message

    def _recall(self, busy: dict[_Worker, int], results: list[Found | str]) -> None:
        """Have all busy workers answer with their best so far, and leave those that do not."""
        try:
            for worker in busy:
                worker.interrupt()
            end = time.perf_counter() + _GRACE
            while busy:
                left = max(0.0, end - time.perf_counter())
                worker, message = self._events.get(timeout=left)
                if not isinstance(message, Round):
                    self._settle(worker, message, busy, results)
        except (queue.Empty, KeyboardInterrupt):
            for worker, number in busy.items():
                results[number] = "it did not end in time"
                self._workers.remove(worker)
                worker.end()


class _Gone(NamedTuple):
    """A worker's process is no longer there, or cannot be talked to."""

    reason: str


class _Worker:
    """A process that searches, and the thread that talks to it."""

    def __init__(self, events: queue.SimpleQueue[tuple[_Worker, Any]]) -> None:
        self._events = events
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._model: CostModel | None = None
        path = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            # Ctrl-C at the terminal is for the parent, which passes it on.
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def begin(self, job: Job) -> None:
        """Give the process a job; what comes of it goes to the events."""
        self._jobs.put(job)

    def interrupt(self) -> None:
        """Have the process answer with its best so far."""
        if os.name == "posix":
            self._process.send_signal(signal.SIGINT)
        else:
            self._process.kill()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._jobs.put(None)
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with contextlib.suppress(OSError):  # what was not yet written has no reader
                pipe.close()

    def _talk(self) -> None:
        source = self._process.stdout
        assert source
        late: threading.Thread | None = None
        try:
            while (job := self._jobs.get()) is not None:
                if late:
                    late.join()
                new = None
                if job.model is not self._model:
                    self._model, new = job.model, job.model.for_search()
                self._send((new, job.memory_bytes, job.settings, job.start))
                late = threading.Thread(target=self._propose, args=(job,), daemon=True)
                late.start()
                while isinstance(message := pickle.load(source), Round):
                    self._events.put((self, message))
                self._events.put((self, message))
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
            code = self._process.returncode
            how = f" of signal {-code}" if code and code < 0 else ""
            self._events.put((self, _Gone(f"its process died{how}")))
        except Exception as error:
            self._events.put((self, _Gone(f"{type(error).__name__}: {error}")))

    def _propose(self, job: Job) -> None:
        """Send the proposals when they are there; without any the search has to do."""
        proposals: tuple[States, ...] = ()
        with contextlib.suppress(Exception, KeyboardInterrupt):
            proposals = job.proposals(job.settings.budget)
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            self._send(proposals)

    def _send(self, message: object) -> None:
        target = self._process.stdin
        assert target
        target.write(pickle.dumps(message))
        target.flush()


class _Told:
    """Progress of several searches as if they were one."""

    def __init__(self, progress: Callable[[Round], None] | None) -> None:
        self._progress = progress
        self._begin = time.perf_counter()
        self._states: dict[int, int] = {}
        self._count = 0
        self._cost = np.inf

    def __call__(self, number: int, event: Round) -> None:
        self._states[number] = event.states
        self._cost = min(self._cost, event.cost)
        seconds = time.perf_counter() - self._begin
        told = Round(self._count, sum(self._states.values()), self._cost, seconds)
        self._count += 1
        if self._progress:
            self._progress(told)


def _over(end: float | None) -> bool:
    return end is not None and time.perf_counter() >= end


def _within(settings: Settings, end: float | None, jobs: int) -> Settings:
    """``settings`` with the share of one of ``jobs`` in the time that is left."""
    if end is None:
        return settings
    left = max(0.0, end - time.perf_counter())
    return dataclasses.replace(settings, budget=left / jobs)
