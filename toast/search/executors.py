"""Runs searches on an executor of the user, such as that of a cluster.

Any ``concurrent.futures.Executor`` will do; its processes need TOAST, but neither JAX nor the
program.  An executor that fails loses nothing: the caller runs the searches that have no result.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from toast.cost import CostModel
from toast.errors import SearchError
from toast.search.proposals import Proposals
from toast.search.search import Search, SearchResult
from toast.search.settings import Settings
from toast.search.stage import Stage
from toast.space import Action, States

#: Seconds between checks for an interrupt while waiting.
_PATIENCE = 0.05


class RemoteSearch(NamedTuple):
    """A search that can be sent to another machine."""

    model: CostModel
    memory_bytes: float
    settings: Settings
    stages: tuple[Stage, ...]
    start: tuple[tuple[Action, ...], ...]
    proposals: tuple[States, ...]


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
    """Run a search; an error of the search is returned as text."""
    proposals = Proposals(threading.Event())
    proposals.future.set_result(task.proposals)
    try:
        return Search(
            task.model, memory_bytes=task.memory_bytes, settings=task.settings,
            stages=task.stages, start=task.start, proposals=proposals,
        ).run()  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_on(
    executor: concurrent.futures.Executor,
    tasks: Sequence[Callable[[tuple[States, ...]], RemoteSearch]],
    proposals: Sequence[Proposals | None],
    *,
    end: float | None,
    interrupt: threading.Event,
    ended: Callable[[int, SearchResult], None],
) -> Outcomes:
    """Run searches until all have ended, or until ``end`` or an interrupt.

    :param tasks: make each search from its proposals, which must be complete when it is sent.
    :param proposals: those of each search, ``None`` for none.
    :param end: a time of ``time.perf_counter``.
    :param ended: is called with the number and the result of each search.
    """
    waiting = dict(enumerate(proposals))
    futures: dict[concurrent.futures.Future[SearchResult | str], int] = {}
    results: dict[int, SearchResult | str] = {}
    failure = ""

    def over() -> bool:
        return interrupt.is_set() or (end is not None and time.perf_counter() >= end)

    while (waiting or futures) and not failure and not over():
        for number, own in [*waiting.items()]:
            if own is None or own.future.done():
                del waiting[number]
                states = () if own is None else own.future.result()
                try:
                    futures[executor.submit(search_remotely, tasks[number](states))] = number
                except Exception as error:  # for example after its shutdown
                    failure = _shown(error)
                    break
        if not futures:
            time.sleep(_PATIENCE if waiting and not failure else 0)
            continue
        done, _ = concurrent.futures.wait(
            futures, timeout=_PATIENCE, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for future in done:
            number = futures.pop(future)
            try:
                result = future.result()
            except (Exception, concurrent.futures.CancelledError) as error:
                failure = failure or _shown(error)
                continue
            results[number] = result
            if isinstance(result, SearchResult):
                ended(number, result)
    for future in futures:
        with contextlib.suppress(Exception):
            future.cancel()
    return Outcomes(results, failure, not failure and len(results) < len(tasks))


def _shown(error: BaseException) -> str:
    """An error in one line."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"
