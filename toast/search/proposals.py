"""States of the relaxed pairwise program, computed in a thread beside the search."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from types import TracebackType

from toast.cost import CostModel
from toast.search.relaxation import proposing
from toast.space import States

#: Seconds between checks for an interrupt while waiting.
_PATIENCE = 0.05

#: Solves a program within the given seconds.
_Solve = Callable[[float | None], tuple[States, ...]]


class Proposals:
    """Proposals that a thread is computing."""

    def __init__(self, interrupt: threading.Event) -> None:
        #: Receives the states.
        self.future: concurrent.futures.Future[tuple[States, ...]] = concurrent.futures.Future()
        self._interrupt = interrupt

    def __call__(self, seconds: float | None) -> tuple[States, ...]:
        """Wait for the proposals; none after ``seconds`` or an interrupt."""
        end = None if seconds is None else time.perf_counter() + seconds
        while not self._interrupt.is_set():
            left = _PATIENCE if end is None else min(_PATIENCE, end - time.perf_counter())
            try:
                return self.future.result(max(0.0, left))
            except TimeoutError:
                if end is not None and time.perf_counter() >= end:
                    break
        return ()


class Proposer:
    """Computes proposals, one program at a time, until the block ends."""

    def __init__(self, interrupt: threading.Event) -> None:
        self._interrupt = interrupt
        self._one_at_a_time = threading.Lock()
        self._closed = False
        self._failures: list[str] = []

    def __enter__(self) -> Proposer:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._closed = True

    @property
    def notes(self) -> tuple[str, ...]:
        """Errors; searches run without the proposals that failed."""
        return tuple(dict.fromkeys(self._failures))

    def propose(self, model: CostModel, end: float | None = None) -> Proposals:
        """Start to compute proposals for searches of ``model``.

        With an ``end`` (of ``time.perf_counter``), the thread also builds the program, and solving
        it may take a quarter of the remaining time.
        """
        proposals = Proposals(self._interrupt)
        solve: _Solve | None = None
        if self._interrupt.is_set() or (end is not None and time.perf_counter() >= end):
            proposals.future.set_result(())
            return proposals
        if end is None:
            # Not in the thread, which would compete with the search for the interpreter.
            try:
                solve = proposing(model)
            except KeyboardInterrupt:
                self._interrupt.set()
                solve = _no_proposals
            except Exception as error:
                self._note(error)
                solve = _no_proposals

        def compute() -> None:
            states: tuple[States, ...] = ()
            try:
                with self._one_at_a_time:
                    if not self._closed and not self._interrupt.is_set():
                        program = solve or proposing(model)
                        states = program(None if end is None else (end - time.perf_counter()) / 4)
            except Exception as error:
                self._note(error)
            finally:
                proposals.future.set_result(states)

        # Not an executor: the process would wait for its threads at exit.
        threading.Thread(target=compute, daemon=True, name="toast-proposals").start()
        return proposals

    def _note(self, error: Exception) -> None:
        self._failures.append(f"without proposals: {type(error).__name__}: {error}")


def _no_proposals(_seconds: float | None) -> tuple[States, ...]:
    return ()
