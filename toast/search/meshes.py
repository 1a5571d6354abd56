"""The search for the best mesh: successive halving over meshes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from toast.cost import CostModel
from toast.errors import MeshError, PinError
from toast.hardware import Mesh
from toast.search.interrupts import noted_interrupts
from toast.search.jobs import Job, Runner
from toast.search.proposals import Proposer
from toast.search.restarts import best_of, restarts, with_proposals
from toast.search.search import Round, SearchResult
from toast.search.settings import Settings

#: One in ``_SHARE`` meshes, and at least ``_LEAST``, is searched in full after the quick search.
_SHARE = 4
_LEAST = 3

_NO_TIME = "the budget ran out"
_INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True)
class MeshResult:
    """One mesh and the best plan on it."""

    #: The mesh.
    mesh: Mesh
    #: Whether a full search finished; otherwise, one round or as much as the budget allowed.
    full: bool = False
    #: The cost of the best plan on it; ``None`` without a plan.
    cost: float | None = None
    #: Its predicted seconds of a step.
    step_seconds: float | None = None
    #: Its predicted peak of memory per device.
    peak_bytes: float | None = None
    #: Whether it fits.
    fits: bool | None = None
    #: The odds that it fits.
    fit_probability: float | None = None
    #: Why it has no plan; empty if it has one.
    skipped: str = ""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """A sort key: meshes that fit come first, then the cheapest.

        This is not the rank of the search: more axes need more actions, which does not matter here.
        """
        return bool(self.skipped), not self.fits, self.cost or 0.0


class BestMesh(NamedTuple):
    """The best plan of all meshes."""

    model: CostModel
    result: SearchResult
    #: Every mesh, in the order of the input.
    meshes: tuple[MeshResult, ...]


def search_meshes(
    meshes: Sequence[Mesh],
    prepare: Callable[[Mesh, CostModel | None], Job],
    settings: Settings,
    progress: Callable[[str | Round], None] | None = None,
    executor: concurrent.futures.Executor | None = None,
) -> BestMesh:
    """Search every mesh for one round, then the best quarter of the meshes in full.

    ``prepare`` returns the job of a mesh; its second argument is a model of another mesh to reuse.
    A mesh for which it raises :class:`toast.errors.MeshError` or :class:`toast.errors.PinError` is
    skipped.  Raises such an error, with the first one's text, if all meshes are skipped.

    Preparation takes at most half of the budget of ``settings``, the quick searches half of the
    rest, and the full searches what remains, in even shares.  With an ``executor``, it runs the
    searches instead of own processes.
    """
    notify = progress or (lambda _event: None)
    begin = time.perf_counter()
    end = None if settings.budget is None else begin + settings.budget
    with (
        noted_interrupts() as interrupt,
        Proposer(interrupt) as proposer,
        Runner(settings.processes, interrupt, notify, executor) as runner,
    ):
        jobs: dict[Mesh, Job] = {}
        skipped: dict[Mesh, str] = {}
        quick = dataclasses.replace(settings, rounds=min(1, settings.rounds), restarts=1)
        # Searches with many axes take longest: nobody should wait for one that begins last.
        order = sorted(meshes, key=lambda mesh: -len(mesh.axes)) if end is None else meshes
        upcoming: Iterable[Job] = (
            job._replace(settings=quick)
            for job in _prepared(order, prepare, _half(end), notify, interrupt, jobs, skipped)
        )
        best: dict[Mesh, SearchResult] = {}
        if executor is None or end is not None:
            upcoming = list(upcoming)
        notify(f"search on {len(jobs) or len(meshes)} meshes, one round each")
        results = runner.run(upcoming, _half(end), count=len(meshes))
        for mesh, result in zip(jobs, results, strict=True):
            if isinstance(result, SearchResult):
                best[mesh] = result
            else:
                skipped[mesh] = result or (_INTERRUPTED if interrupt.is_set() else _NO_TIME)
        rows = {mesh: _row(jobs[mesh], mesh, best[mesh]) for mesh in meshes if mesh in best}
        ranked = sorted(rows, key=lambda mesh: rows[mesh].order)
        chosen = ranked[: max(_LEAST, -(-len(ranked) // _SHARE))]
        if not interrupt.is_set():
            runner.stopped = ""
            notify(f"search on the best {len(chosen)} meshes, in full")
            upcoming = (
                job
                for mesh in chosen
                for job in restarts(with_proposals(jobs[mesh], proposer, end))
            )
            results = runner.run(upcoming, end, count=len(chosen) * settings.restarts)
            for mesh in chosen:
                part, results = results[: settings.restarts], results[settings.restarts :]
                if any(isinstance(result, SearchResult) for result in part):
                    # A full search that runs out of time may be worse than the quick one.
                    again = best_of([*part, best[mesh]], "")
                    best[mesh] = dataclasses.replace(again, notes=best_of(part, "").notes)
                    whole = all(isinstance(r, SearchResult) and not r.stopped for r in part)
                    rows[mesh] = _row(jobs[mesh], mesh, best[mesh], full=whole)
        first = min(rows, key=lambda mesh: rows[mesh].order)
        rows |= {mesh: MeshResult(mesh, skipped=reason) for mesh, reason in skipped.items()}
        result = dataclasses.replace(
            best[first],
            states=sum(each.states for each in best.values()),
            seconds=time.perf_counter() - begin,
            smallest_peak=min(each.smallest_peak for each in best.values()),
            stopped=runner.stopped,
            notes=(
                *(f"mesh {m}: {note}" for m in rows if m in best for note in best[m].notes),
                *runner.notes,
                *proposer.notes,
            ),
        )
        return BestMesh(jobs[first].model, result, tuple(rows[mesh] for mesh in meshes))


def _half(end: float | None) -> float | None:
    """The moment halfway between now and ``end``."""
    return None if end is None else (time.perf_counter() + end) / 2


def _prepared(
    meshes: Sequence[Mesh],
    prepare: Callable[[Mesh, CostModel | None], Job],
    end: float | None,
    notify: Callable[[str], None],
    interrupt: threading.Event,
    jobs: dict[Mesh, Job],
    skipped: dict[Mesh, str],
) -> Iterator[Job]:
    """The jobs of the meshes for which there is time.

    They are also added to ``jobs``, and the reasons why other meshes have none to ``skipped``.
    """
    first: MeshError | PinError | None = None
    like: CostModel | None = None
    for number, mesh in enumerate(meshes, 1):
        if jobs and end is not None and time.perf_counter() >= end:
            skipped[mesh] = _NO_TIME
            continue
        if jobs and interrupt.is_set():
            skipped[mesh] = _INTERRUPTED
            continue
        notify(f"decision space {number} of {len(meshes)}: mesh {mesh}")
        try:
            job = jobs[mesh] = prepare(mesh, like)
        except (MeshError, PinError) as error:
            first = first or error
            skipped[mesh] = str(error)
        else:
            like = job.model
            yield job
    if not jobs and first:
        if len(skipped) > 1:
            text = f"none of {len(skipped)} meshes will do, the first as {first}"
            raise type(first)(text, shell=first.shell)
        raise first


def _row(job: Job, mesh: Mesh, result: SearchResult, *, full: bool = False) -> MeshResult:
    prices = job.model.price(result.state[None])
    peak = float(prices.peak_bytes[0])
    odds = job.model.error_bars.fit_probability(
        float(prices.argument_bytes[0]), peak, job.memory_bytes
    )
    return MeshResult(
        mesh=mesh,
        full=full,
        cost=result.cost,
        step_seconds=float(prices.seconds[0]),
        peak_bytes=peak,
        fits=bool(job.model.fits(prices, job.memory_bytes)[0]),
        fit_probability=odds,
    )
