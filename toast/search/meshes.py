"""The search for the best mesh: successive halving over meshes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
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

#: Of the meshes that are searched quickly, the share that is searched in full, and how many at
#: least.
_SHARE = 4
_LEAST = 3

_NO_TIME = "the budget ran out"
_INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True)
class MeshResult:
    """One mesh and the best plan on it."""

    mesh: Mesh
    #: Whether it was searched in full; if not, for a round, or as long as there was time.
    full: bool = False
    cost: float | None = None
    step_seconds: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    #: Why there is no plan for it.
    skipped: str = ""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The better, the less: what fits comes first, then what costs least.

        Not the rank of a search: more axes need more actions, and that says nothing of meshes.
        """
        return bool(self.skipped), not self.fits, self.cost or 0.0


class BestMesh(NamedTuple):
    """The best plan of all meshes."""

    model: CostModel
    result: SearchResult
    #: Every mesh, as it was given.
    meshes: tuple[MeshResult, ...]


def search_meshes(
    meshes: Sequence[Mesh],
    prepare: Callable[[Mesh, CostModel | None], Job],
    settings: Settings,
    progress: Callable[[str | Round], None] | None = None,
) -> BestMesh:
    """A quick search on every mesh, of one round; then one in full on the best quarter of them.

    ``prepare`` makes the job of a mesh, given a model of another mesh to take over what it can; a
    mesh for which it raises :class:`toast.errors.MeshError` or :class:`toast.errors.PinError` is
    skipped.  Where it does for all of them, an error that names the first of these is raised.

    The budget of ``settings`` is for all of it: at most half of it for the preparation; then half
    of what is left for the quick searches, the rest for the full ones, in even shares.
    """
    tell = progress or (lambda _event: None)
    begin = time.perf_counter()
    end = None if settings.budget is None else begin + settings.budget
    with (
        noted_interrupts() as interrupt,
        Proposer(interrupt) as proposer,
        Runner(settings.processes, interrupt, tell) as runner,
    ):
        jobs, skipped = _prepared(meshes, prepare, _half(end), tell, interrupt)
        quick = dataclasses.replace(settings, rounds=min(1, settings.rounds), restarts=1)
        best: dict[Mesh, SearchResult] = {}
        tell(f"search on {len(jobs)} meshes, one round each")
        results = runner.run([job._replace(settings=quick) for job in jobs.values()], _half(end))
        for mesh, result in zip(jobs, results, strict=True):
            if isinstance(result, SearchResult):
                best[mesh] = result
            else:
                skipped[mesh] = result or (_INTERRUPTED if interrupt.is_set() else _NO_TIME)
        rows = {mesh: _row(jobs[mesh], mesh, best[mesh]) for mesh in best}
        ranked = sorted(rows, key=lambda mesh: rows[mesh].order)
        chosen = ranked[: max(_LEAST, -(-len(ranked) // _SHARE))]
        if not interrupt.is_set():
            runner.stopped = ""
            tell(f"search on the best {len(chosen)} meshes, in full")
            each = [restarts(with_proposals(jobs[mesh], proposer, end)) for mesh in chosen]
            results = runner.run([job for several in each for job in several], end)
            for mesh in chosen:
                part, results = results[: settings.restarts], results[settings.restarts :]
                if any(isinstance(result, SearchResult) for result in part):
                    # Out of time a full search may not come as far as the quick one did.
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
                *proposer.notes,
            ),
        )
        return BestMesh(jobs[first].model, result, tuple(rows[mesh] for mesh in meshes))


def _half(end: float | None) -> float | None:
    """The moment in the middle between now and ``end``."""
    return None if end is None else (time.perf_counter() + end) / 2


def _prepared(
    meshes: Iterable[Mesh],
    prepare: Callable[[Mesh, CostModel | None], Job],
    end: float | None,
    tell: Callable[[str], None],
    interrupt: threading.Event,
) -> tuple[dict[Mesh, Job], dict[Mesh, str]]:
    """The jobs of meshes, as far as there is time, and why the others have none."""
    jobs: dict[Mesh, Job] = {}
    skipped: dict[Mesh, str] = {}
    first: MeshError | PinError | None = None
    like: CostModel | None = None
    for mesh in meshes:
        if jobs and end is not None and time.perf_counter() >= end:
            skipped[mesh] = _NO_TIME
            continue
        if jobs and interrupt.is_set():
            skipped[mesh] = _INTERRUPTED
            continue
        tell(f"decision space of mesh {mesh}")
        try:
            jobs[mesh] = prepare(mesh, like)
        except (MeshError, PinError) as error:
            first = first or error
            skipped[mesh] = str(error)
        else:
            like = jobs[mesh].model
    if not jobs and first:
        if len(skipped) > 1:
            text = f"none of {len(skipped)} meshes will do, the first as {first}"
            raise type(first)(text, shell=first.shell)
        raise first
    return jobs, skipped


def _row(job: Job, mesh: Mesh, result: SearchResult, *, full: bool = False) -> MeshResult:
    prices = job.model.price(result.state[None])
    peak = float(prices.peak_bytes[0])
    return MeshResult(
        mesh=mesh,
        full=full,
        cost=result.cost,
        step_seconds=float(prices.seconds[0]),
        peak_bytes=peak,
        fits=peak <= job.memory_bytes,
    )
