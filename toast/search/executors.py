"""Runs searches on an executor of the user, such as that of a cluster.

Any ``concurrent.futures.Executor`` will do; its processes need TOAST, but neither JAX nor the
program.  An executor that fails loses nothing: the caller runs the searches that have no result.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from toast.errors import SearchError
from toast.search.processes import search_in_process
from toast.search.proposals import Proposals
from toast.search.search import Search, SearchResult
from toast.search.settings import Settings
from toast.search.stage import Stage
from toast.search.worker import Task
from toast.space import Action, States

#: Seconds between checks for an interrupt while waiting.
_PATIENCE = 0.05


@dataclasses.dataclass(frozen=True)
class RemoteSearch:
    """A search that can be sent to another machine."""

    #: A pickled :class:`toast.cost.CostModel`: executors take bytes faster than many arrays.
    model: bytes
    memory_bytes: float
    settings: Settings
    stages: tuple[Stage, ...]
    start: tuple[tuple[Action, ...], ...]
    proposals: tuple[States, ...]

    def __dask_tokenize__(self) -> str:
        """A name for Dask, which would take longer to hash all bytes than to send them."""
        return uuid.uuid4().hex


class UpcomingSearch(NamedTuple):
    """A search to send as soon as its proposals are complete."""

    #: Makes the search from its proposals.
    task: Callable[[tuple[States, ...]], RemoteSearch]
    #: ``None`` for no proposals.
    proposals: Proposals | None


class Outcomes(NamedTuple):
    """What became of searches on an executor."""

    #: By number: the result, or why the search itself failed.
    results: dict[int, SearchResult | str]
    #: How the executor failed; empty if it did not.
    failure: str
    #: Whether time ran out, or an interrupt came, before all had ended.
    cut: bool


def check_executor(executor: Any) -> concurrent.futures.Executor | None:
    """Raises :class:`toast.errors.SearchError` unless it is an executor or ``None``."""
    if executor is None or isinstance(executor, concurrent.futures.Executor):
        return executor
    remedy = "use a concurrent.futures.Executor, such as ProcessPoolExecutor()"
    if hasattr(executor, "get_executor"):  # a client of Dask
        remedy = "use its executor, client.get_executor()"
    raise SearchError(f"executor {type(executor).__name__}: {remedy}")


def workers_of(executor: concurrent.futures.Executor, searches: int) -> int:
    """The searches that an executor runs at a time, for shares of a budget."""
    return int(getattr(executor, "_max_workers", None) or searches)


def search_remotely(task: RemoteSearch) -> SearchResult | str:
    """Run a search; an error of the search is returned as text.

    A thread that is not the main one lets a process search.
    """
    if threading.current_thread() is not threading.main_thread():
        message = Task(
            0, task.model, task.memory_bytes, task.settings, task.stages, task.start, proposed=True
        )
        with contextlib.suppress(OSError):  # no processes can be started
            if (result := search_in_process(message, task.proposals)) is not None:
                return result
    proposals = Proposals(threading.Event())
    proposals.future.set_result(task.proposals)
    try:
        return Search(
            pickle.loads(task.model), memory_bytes=task.memory_bytes, settings=task.settings,
            stages=task.stages, start=task.start, proposals=proposals,
        ).run()  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_on(
    executor: concurrent.futures.Executor,
    searches: Iterable[UpcomingSearch],
    *,
    end: float | None,
    interrupt: threading.Event,
    ended: Callable[[int, SearchResult], None],
) -> Outcomes:
    """Run searches until all have ended, or until ``end`` or an interrupt.

    :param searches: may take time to make; those before run meanwhile.
    :param end: a time of ``time.perf_counter``.
    :param ended: is called with the number and the result of each search.
    """
    upcoming = iter(searches)
    more, count = True, 0
    waiting: dict[int, UpcomingSearch] = {}
    futures: dict[concurrent.futures.Future[SearchResult | str], int] = {}
    results: dict[int, SearchResult | str] = {}
    failure = ""

    def over() -> bool:
        return interrupt.is_set() or (end is not None and time.perf_counter() >= end)

    try:
        while (more or waiting or futures) and not failure and not over():
            if more := (search := next(upcoming, None)) is not None:
                waiting[count] = search
                count += 1
            for number, (task, own) in [*waiting.items()]:
                if own is None or own.future.done():
                    del waiting[number]
                    states = () if own is None else own.future.result()
                    try:
                        futures[executor.submit(search_remotely, task(states))] = number
                    except Exception as error:  # for example after its shutdown
                        failure = _shown(error)
                        break
            patience = 0 if more or failure else _PATIENCE
            if not futures:
                time.sleep(patience if waiting else 0)
                continue
            done, _ = concurrent.futures.wait(
                futures, timeout=patience, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                number = futures.pop(future)
                try:
                    result = future.result()
                except (Exception, concurrent.futures.CancelledError) as error:
                    failure = failure or _shown(error)
                    continue
                if not isinstance(result, SearchResult | str):
                    failure = failure or f"it returned {type(result).__name__}, not a result"
                    continue
                results[number] = result
                if isinstance(result, SearchResult):
                    ended(number, result)
    finally:
        for future in futures:
            with contextlib.suppress(Exception):
                future.cancel()
    return Outcomes(results, failure, not failure and (more or len(results) < count))


def _shown(error: BaseException) -> str:
    """An error in one line."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"
