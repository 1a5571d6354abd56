"""Several searches of one decision space; the best result is kept."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from toast.cost import CostModel
from toast.search.interrupts import noted_interrupts
from toast.search.jobs import Job, Runner
from toast.search.proposals import Proposer
from toast.search.search import DEFAULT_STAGES, Round, SearchResult
from toast.search.settings import Settings
from toast.search.stage import Stage, check_stages, use_proposals
from toast.space import Action


def find(
    model: CostModel,
    *,
    memory_bytes: float,
    settings: Settings | None = None,
    stages: Sequence[Stage] = DEFAULT_STAGES,
    start: Sequence[tuple[Action, ...]] = (),
    progress: Callable[[Round], None] | None = None,
    executor: concurrent.futures.Executor | None = None,
) -> SearchResult:
    """The best of ``settings.restarts`` searches; ``settings.processes`` of them run at a time.

    ``memory_bytes`` is the limit per device; ``stages`` run in this order in every round
    (:class:`toast.search.Stage`); the searches begin with the trajectories ``start``.  An interrupt
    or the end of the budget ends all searches; the best plan so far is returned.  The notes of the
    result name searches whose process died.  With an ``executor``, it runs the searches instead of
    own processes.

    Raises :class:`toast.errors.SearchError` if a stage fails or cannot be sent to processes.
    """
    settings = settings or Settings()
    begin = time.perf_counter()
    end = None if settings.budget is None else begin + settings.budget
    job = Job(
        model,
        memory_bytes,
        settings,
        check_stages(stages, 2 if executor else settings.processes),
        tuple(start),
    )
    with (
        noted_interrupts() as interrupt,
        Proposer(interrupt) as proposer,
        Runner(settings.processes, interrupt, progress, executor) as runner,
    ):
        results = runner.run(restarts(with_proposals(job, proposer, end)), end)
        best = best_of(results, runner.stopped)
        return dataclasses.replace(
            best,
            seconds=time.perf_counter() - begin,
            notes=(*best.notes, *runner.notes, *proposer.notes),
        )


def with_proposals(job: Job, proposer: Proposer, end: float | None = None) -> Job:
    """The job with proposals, if its stages use them; a thread computes them beside the search.

    ``end`` of the budget is a time of ``time.perf_counter``.
    """
    if not job.settings.rounds or not use_proposals(job.stages):
        return job
    return job._replace(proposals=proposer.propose(job.model, end))


def restarts(job: Job) -> list[Job]:
    """Copies of ``job``, one per restart, each with its own seed."""
    settings = job.settings
    # The first keeps the seed, so more restarts never give a worse plan.
    spawned = np.random.SeedSequence(settings.seed).spawn(settings.restarts - 1)
    seeds = [settings.seed, *(int(child.generate_state(1)[0]) for child in spawned)]
    return [job._replace(settings=dataclasses.replace(settings, seed=seed)) for seed in seeds]


def best_of(results: Sequence[SearchResult | str], stopped: str) -> SearchResult:
    """The best result, with the states of all searches; a text says why a search has no result."""
    ended = [result for result in results if isinstance(result, SearchResult)]
    best = ended[0]
    for other in ended[1:]:
        if other.rank < best.rank - 1e-12:
            best = other
    return dataclasses.replace(
        best,
        states=sum(result.states for result in ended),
        stopped=stopped or max(result.stopped for result in ended),
        smallest_peak=min(result.smallest_peak for result in ended),
        notes=tuple(
            f"search {number} of {len(results)} is lost: {result}"
            for number, result in enumerate(results, 1)
            if isinstance(result, str) and result
        ),
    )
