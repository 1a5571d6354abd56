"""States of the relaxed pairwise program, made by a thread beside the search."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from types import TracebackType

from toast.cost import CostModel
from toast.search.relaxation import proposing
from toast.space import States

#: Seconds after which one who waits looks whether the search was interrupted.
_PATIENCE = 0.05

#: Solves a program within so many seconds.
_Solve = Callable[[float | None], tuple[States, ...]]


class Proposals:
    """Proposals that are on their way."""

    def __init__(self, interrupt: threading.Event) -> None:
        #: Completed with the states.
        self.future: concurrent.futures.Future[tuple[States, ...]] = concurrent.futures.Future()
        self._interrupt = interrupt

    def __call__(self, seconds: float | None) -> tuple[States, ...]:
        """The proposals, or none where they take longer than ``seconds``, or at an interrupt."""
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
    """Makes proposals, those of one program at a time, until the block ends."""

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
        """What went wrong: searches do without these proposals."""
        return tuple(dict.fromkeys(self._failures))

    def propose(self, model: CostModel, end: float | None = None) -> Proposals:
        """Proposals for searches of ``model``.

        Before ``end`` (of ``time.perf_counter``) the thread also writes their program, of which
        solving may take a quarter of the time that is left.
        """
        proposals = Proposals(self._interrupt)
        solve: _Solve | None = None
        if self._interrupt.is_set() or (end is not None and time.perf_counter() >= end):
            proposals.future.set_result(())
            return proposals
        if end is None:
            # Not in the thread: it and the search would take turns in the interpreter.
            try:
                solve = proposing(model)
            except KeyboardInterrupt:
                self._interrupt.set()
                solve = _no_proposals
            except Exception as error:
                self._note(error)
                solve = _no_proposals

        def make() -> None:
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

        # The threads of an executor would be waited for when the process ends.
        threading.Thread(target=make, daemon=True).start()
        return proposals

    def _note(self, error: Exception) -> None:
        self._failures.append(f"without proposals: {type(error).__name__}: {error}")


def _no_proposals(_seconds: float | None) -> tuple[States, ...]:
    return ()
