"""Several searches of one decision space; the best result is kept."""

from __future__ import annotations

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
) -> SearchResult:
    """The best of ``settings.restarts`` searches, of which ``settings.processes`` run at a time.

    ``memory_bytes`` is the limit per device; ``stages`` run in this order in every round
    (:class:`toast.search.Stage`); ``start`` are trajectories to begin with.  Restarts that are
    lost, because their process died, are named in the result's notes.  An interrupt, or the end of
    the budget, ends all searches with the best that one of them has.

    Raises :class:`toast.errors.SearchError` for a stage that fails, or cannot be sent to processes.
    """
    settings = settings or Settings()
    begin = time.perf_counter()
    end = None if settings.budget is None else begin + settings.budget
    job = Job(model, memory_bytes, settings, check_stages(stages, settings.processes), tuple(start))
    with (
        noted_interrupts() as interrupt,
        Proposer(interrupt) as proposer,
        Runner(settings.processes, interrupt, progress) as runner,
    ):
        results = runner.run(restarts(with_proposals(job, proposer, end)), end)
        best = best_of(results, runner.stopped)
        return dataclasses.replace(
            best, seconds=time.perf_counter() - begin, notes=(*best.notes, *proposer.notes)
        )


def with_proposals(job: Job, proposer: Proposer, end: float | None = None) -> Job:
    """The job with proposals, if its stages use them: made beside the search, that needs them late.

    ``end`` is that of the budget, of ``time.perf_counter``.
    """
    if not job.settings.rounds or not use_proposals(job.stages):
        return job
    return job._replace(proposals=proposer.propose(job.model, end))


def restarts(job: Job) -> list[Job]:
    """``job`` with the seed of each of its restarts."""
    settings = job.settings
    # The first is the search without restarts, so that more of them never find worse.
    spawned = np.random.SeedSequence(settings.seed).spawn(settings.restarts - 1)
    seeds = [settings.seed, *(int(child.generate_state(1)[0]) for child in spawned)]
    return [job._replace(settings=dataclasses.replace(settings, seed=seed)) for seed in seeds]


def best_of(results: Sequence[SearchResult | str], stopped: str) -> SearchResult:
    """The best of several results, with the states of all; a text says why one is lost."""
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
