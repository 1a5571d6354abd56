"""The search for the plans of a table of what fits.

Memory grows with a size, so a search over a grid of sizes (:mod:`toast.fitting.ladder`) finds the
largest one with few plans.  These recompute everything, which needs least; sizes that fit are then
planned with the joint decision.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping

from toast import inputs
from toast.errors import MeshError, TargetError
from toast.fitting.fit_table import Fit, FitRow, PlanRequest, better, counted_sizes, work
from toast.fitting.ladder import MOST, PARTS, Ladder, Need, finer_rung, highest_rung
from toast.fitting.requests import IMPOSSIBLE, OutOfTimeError, RequestPlanner
from toast.hardware import Mesh
from toast.inputs import AnyMesh
from toast.plan import Plan
from toast.plan.survey_policies import SurveyPolicies
from toast.program import MemoryPolicy

#: The most microbatches that are tried.
_MOST_MICROBATCHES = 64

#: The share by which more microbatches must raise the rate, so that still more are tried.
_GAIN = 0.02

#: The most sizes below the largest one that are planned.
_MOST_SMALLER = 3

#: The most meshes of a number of devices that are planned with the joint decision.
_MOST_MESHES = 2

#: The share by which all residuals may exceed the limit if a plan that keeps them is tried: those
#: of a survey are often sharded less, and those of such a plan about as they are.
_SLACK, _PLANNED_SLACK = 1.0, 0.05

#: The most plans that keep everything, for the largest size at which that is possible.
_MOST_KEPT = 3

#: The least number of units of the largest whole rung that fits, so that there are sizes between it
#: and the next one.
_FEW_UNITS = 4

#: The devices with which the search for the fewest begins.
_DEVICES = 8


def find_fit(
    planner: RequestPlanner,
    *,
    find: str,
    sizes: Mapping[str, int],
    mesh: AnyMesh | None,
    devices: int | None,
    remat: str | MemoryPolicy | None = None,
    microbatches: int | None = None,
    one_token: bool = False,
) -> Fit:
    """The implementation of :func:`toast.fit`, for any planner.

    ``one_token`` says that a step handles one token of each sequence, as in decoding.
    """
    if find == "devices":
        if mesh is not None or devices is not None:
            raise MeshError(
                "find='devices': looks for the number of devices; remove mesh and devices"
            )
        base = PlanRequest(tuple(sizes.items()), microbatches)
    else:
        if find not in sizes:
            known = ", ".join([*sizes, "devices"])
            raise TargetError(f"find={find!r}: the target has no such size; use one of {known}")
        meshes = inputs.candidate_meshes(mesh, devices, planner.hardware)
        base = PlanRequest(
            tuple(sizes.items()), microbatches, meshes[0] if devices is None else None, devices
        )
    question = _Question(planner, find, base, remat, one_token)
    begin = time.perf_counter()
    stopped = ""
    try:
        question.run()
    except OutOfTimeError as error:
        stopped = error.stopped
    except KeyboardInterrupt:
        stopped = "interrupt"

    def order(row: FitRow) -> tuple[int, float, int, str]:
        # The rates of programs that do different work, such as those of models with other numbers
        # of layers, do not compare: there, the largest size is what was asked for.
        first = row.devices if find == "devices" else 0 if question.comparable else -row.value(find)
        return first, -row.rate, row.microbatches, str(row.mesh)

    rows = sorted(question.rows.values(), key=order)
    found = Fit(
        program=question.program, find=find, hardware=planner.hardware.name,
        memory_bytes=planner.hardware.memory_limit_bytes, safety=question.safety,
        unit=question.unit, rows=tuple(row for row in rows if row.fits),
        nearest=None if any(row.fits for row in rows) else question.nearest,
        note="\n".join(question.notes), stopped=stopped, plans=planner.count,
        seconds=time.perf_counter() - begin,
    )  # fmt: skip
    return dataclasses.replace(found, next_size=question.next_size(found.largest))


@dataclasses.dataclass(frozen=True)
class _KeepingNeed:
    """What a plan that keeps all residuals needs at one load."""

    load: float
    bytes: float
    #: Those bytes that do not grow.
    fixed_bytes: float
    #: The share by which it may need less.
    slack: float

    def needed(self, load: float) -> float:
        """The least that such a plan may need at another load."""
        grown = self.fixed_bytes + (self.bytes - self.fixed_bytes) * load / self.load
        return grown / (1.0 + self.slack)


class _Question:
    """The search for the plans of a table."""

    def __init__(
        self, planner: RequestPlanner, find: str, base: PlanRequest,
        remat: str | MemoryPolicy | None, one_token: bool,
    ) -> None:  # fmt: skip
        self._planner, self._find, self._base = planner, find, base
        self._policy, self._limit = remat, planner.hardware.memory_limit_bytes
        #: Whether the policy of each plan is chosen; it is decided at the first plan.
        self._joint = remat is None or remat == "auto"
        sizes = dict(base.sizes)
        self.unit, self._counted = counted_sizes(sizes, one_token)
        #: Whether the rates of different sizes compare: they are those of the same work.
        self.comparable = find == "devices" or find in self._counted
        falling = find == "devices"
        first = min(_DEVICES, planner.hardware.max_devices) if falling else sizes[find]
        parts = (base.mesh.devices if base.mesh else base.devices or 1) * (base.microbatches or 1)
        self._ladder = (
            Ladder(1 << (first.bit_length() - 1), falling=True) if falling
            else Ladder(first, parts=parts, most=max(MOST, first))
        )  # fmt: skip
        #: By what was planned.
        self.rows: dict[PlanRequest, FitRow] = {}
        self.nearest: FitRow | None = None
        self.notes: list[str] = []
        self.program = ""
        self.safety: float | None = None
        self._tried_first = False
        #: By microbatches: what a plan needs that keeps everything.
        self._kept: dict[int | None, _KeepingNeed] = {}
        #: By rung and microbatches: what the plans need that need least.
        self._needs: dict[tuple[float, int | None], Need | None] = {}
        #: By microbatches: the sizes of which no plan fits.
        self._too_large: dict[int | None, set[int]] = {}
        #: Of these plans: the size of each dimension of each argument, and over how many devices it
        #: is sharded; and the number of microbatches.
        self._shapes: dict[tuple[float, int | None], dict[str, list[tuple[int, int]]]] = {}
        self._microbatches: dict[int | None, int] = {}
        self._mesh: Mesh | None = None  # of the last of these plans

    # -- one plan ----------------------------------------------------------------------------

    def _request(self, rung: float, count: int | None) -> PlanRequest | None:
        value = self._ladder.value(rung)
        if value is None:
            return None
        remat = "auto" if self._joint else str(self._policy or "")
        if isinstance(self._policy, MemoryPolicy):
            remat = self._policy.label
        request = dataclasses.replace(self._base, microbatches=count, remat=remat)
        return request.with_size(self._find, value)

    def next_size(self, largest: FitRow | None) -> int | None:
        """The next size above the largest one of which no plan fits; ``None`` if none was tried.

        Of devices, it is the next smaller number.
        """
        if largest is None:
            return None
        value, sign = largest.value(self._find), -1 if self._ladder.falling else 1
        counts = {largest.microbatches} | {
            count for count, own in self._microbatches.items() if own == largest.microbatches
        }
        beyond = [
            size for count in counts for size in self._too_large.get(count, ())
            if sign * size > sign * value
        ]  # fmt: skip
        return min(beyond, key=lambda size: sign * size, default=None)

    def _failed(self, rung: float, count: int | None) -> None:
        """Remembers that no plan of a rung fits."""
        value = self._ladder.value(rung)
        if value is not None:
            self._too_large.setdefault(count, set()).add(value)

    def _work(self, request: PlanRequest) -> float:
        return work(request.sizes, self._counted)

    def _noted(self, plan: Plan, request: PlanRequest, *, row: bool = True) -> FitRow:
        """The row of a plan, which is kept if ``row``."""
        self.program, self.safety = plan.analysis.program.name, plan.safety
        if request.remat == "auto" and not self._joint:
            request = dataclasses.replace(request, remat="")  # there is nothing to decide
        made = FitRow.of(plan, request, self._work(request))
        if self.nearest is None or made.peak_bytes < self.nearest.peak_bytes:
            self.nearest = dataclasses.replace(made, plan=None)
        if row and made.fits:
            self.rows[dataclasses.replace(request, mesh=plan.mesh, devices=None)] = made
        return made

    def _least(self, request: PlanRequest) -> Plan | None:
        """The plan that needs least memory; ``None`` if the size is impossible."""
        try:
            if not self._joint:
                plan = self._planner.plan(request, self._policy)
            else:
                plan = self._survey(request)
        except IMPOSSIBLE as error:
            falling = self._ladder.falling and isinstance(error, MeshError)
            if not self._tried_first and not falling:  # it is what the user began with
                raise
            if request.microbatches == self._base.microbatches:
                self._say(f"{request.label} is left out: {error}")
            return None
        self._tried_first = True
        self._noted(plan, request, row=not self._joint)
        return plan

    def _survey(self, request: PlanRequest) -> Plan:
        try:
            return self._planner.survey(request)
        except TargetError:
            if self._tried_first or self._policy == "auto":
                raise
            # Nothing is differentiated, or there are no blocks: there is nothing to decide.
            self._joint = False
            return self._planner.plan(request, None)

    def _need(self, rung: float, count: int | None) -> Need | None:
        """What a rung needs, if it is possible."""
        if (rung, count) not in self._needs:
            need = self._needs[rung, count] = self._need_of(rung, count)
            if need is None or not need.fits:
                self._failed(rung, count)
        return self._needs[rung, count]

    def _need_of(self, rung: float, count: int | None) -> Need | None:
        request = self._request(rung, count)
        plan = None if request is None else self._least(request)
        if request is None or plan is None:
            return None
        self._shapes[rung, count] = _sharded_shapes(plan)
        self._microbatches[count], self._mesh = plan.microbatches, plan.mesh
        fits = plan.fits or self._fits_offloaded(request, plan)
        # With more devices, arguments are smaller as well.
        fixed = 0.0 if self._ladder.falling else plan.after.argument_bytes
        if self._joint:
            self._kept[count] = _KeepingNeed(
                self._ladder.load(rung), _kept_bytes(plan), fixed, _SLACK
            )
        return Need(fits, plan.needed_bytes(plan.after), fixed)

    def _fits_offloaded(self, request: PlanRequest, surveyed: Plan) -> bool:
        """Whether a plan fits that keeps arguments of blocks in the memory of the host."""
        if not self._joint or not self._planner.has_host_link:
            return False
        choice = SurveyPolicies(surveyed).best()
        if not choice.fits:
            return False
        placed = dataclasses.replace(request, mesh=surveyed.mesh, devices=None)
        return self._planner.plan(placed, choice.policy).fits

    def _planned(self, request: PlanRequest, least: Plan) -> list[FitRow]:
        """The rows of a request whose plan with the least memory is known."""
        if not self._joint:
            return [self._noted(least, request)]
        rows = []
        for mesh in self._meshes(least, request):
            placed = dataclasses.replace(request, mesh=mesh, devices=None)
            rows.append(self._noted(self._planner.joint(placed), placed))
            self._planner.forget(dataclasses.replace(placed, remat=""))
        return rows

    def _kept_row(self, rung: float, count: int | None) -> FitRow | None:
        """The row that recomputes nothing, if that seems to fit and does."""
        request = self._request(rung, count)
        if request is None or not self._joint or count not in self._kept:
            return None
        needed = self._kept[count].needed(self._ladder.load(rung))
        if needed > self._limit:
            return None
        request = dataclasses.replace(request, remat="none")
        try:
            plan = self._planner.plan(request, "none")
        except IMPOSSIBLE:
            return None
        self._kept[count] = _KeepingNeed(
            self._ladder.load(rung), plan.needed_bytes(plan.after), self._kept[count].fixed_bytes,
            _PLANNED_SLACK,
        )  # fmt: skip
        row = self._noted(plan, request)
        return row if row.fits else None

    def _meshes(self, least: Plan, request: PlanRequest) -> list[Mesh]:
        """The mesh of the request, or the best meshes of its devices."""
        if request.mesh is not None:
            return [request.mesh]
        ranked = sorted((row for row in least.meshes if row.fits), key=lambda row: row.order)
        meshes = [row.mesh for row in ranked[:_MOST_MESHES]]
        return meshes or [least.mesh]

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # -- the table ---------------------------------------------------------------------------

    def run(self) -> None:
        """Plans what the table needs."""
        own = self._base.microbatches
        highest = self._highest(own, 0)
        if highest is not None:
            self._table(highest, own)
        if own is None and self._find == "batch":
            self._cut_batch()
        elif own is None:
            if highest is not None:
                self._cut_to_keep(highest)
            self._cut(highest)

    def _highest(self, count: int | None, first: int) -> int | None:
        return highest_rung(
            self._ladder, lambda rung: self._need(rung, count),
            self._limit, first,
        )  # fmt: skip

    def _finer(self, highest: int, count: int | None) -> FitRow | None:
        """The row of the largest size between the highest rung and the next one that fits.

        It may be that of the rung.
        """
        low, high = self._ladder.value(highest), self._ladder.value(highest + 1)
        if high is None or self._ladder.falling:
            return self._row(highest, count)
        self._planner.show(f"{self._find} {low} fits, {high} does not")
        rung = finer_rung(
            self._ladder, lambda rung: self._need(rung, count), self._limit, highest,
            self._unit(highest, count),
        )  # fmt: skip
        # A policy with less time for recomputation may not fit where the one with most does: then
        # the next smaller size that was tried is next.
        tried = {
            near for (near, of), need in self._needs.items()
            if of == count and highest <= near <= rung and need and need.fits
        }  # fmt: skip
        rows = (self._row(near, count) for near in sorted(tried, reverse=True))
        return next((row for row in rows if row), None)

    def _unit(self, rung: int, count: int | None) -> int:
        """What sizes near a rung are multiples of: the devices and microbatches that divide them.

        The devices are those over which the plan with the least memory shards dimensions of
        arguments that grow with the size.  If it shards none, as with the number of layers, every
        size will do; but batches and sequences are multiples of the shortest axis of the mesh, and
        so are other sizes that are large enough for steps of that kind.
        """
        grown = [
            shapes for near in (rung, rung + 1, rung - 1)
            if (shapes := self._shapes.get((near, count)))
        ]  # fmt: skip
        value = self._ladder.value(rung)
        assert value is not None
        if len(grown) < 2:
            return 1
        shapes, others = grown[:2]
        parts = [
            parts
            for name, dimensions in shapes.items()
            for (size, parts), (other, _) in zip(dimensions, others.get(name, ()), strict=False)
            if size != other
        ]
        # Microbatches cut the batch, and nothing else if that is a size of its own.
        cuts = self._find == "batch" or "batch" not in dict(self._base.sizes)
        cut = self._microbatches.get(count, 1) if cuts else 1
        # Whatever the plan shards, other sizes leave less choice.
        axes = [size for _, size in self._mesh.axes if size > 1] if self._mesh else []
        shortest = min(axes, default=1)
        rounds = self.comparable or value >= PARTS * shortest * cut
        devices = max([*parts, shortest if rounds else 1])
        unit = devices * cut
        if value >= _FEW_UNITS * unit:
            return unit
        # If the plan shards a small size over several axes, another one may shard the next size
        # over fewer.
        return math.gcd(min(devices, shortest) * cut, value)

    def _table(self, highest: int, count: int | None) -> None:
        """Plans the largest size, the rung below it, and those below while their rate grows."""
        rows = [self._finer(highest, count), self._row(highest, count)]
        best = max((row.rate for row in rows if row), default=0.0)
        begin = highest
        if (kept := self._highest_kept(highest, count)) is not None:
            row = self._row(kept, count)
            if row is not None and better(row.rate, best, 0.0):
                best, begin = row.rate, kept
        most = 1 if self._ladder.falling else _MOST_SMALLER if self.comparable else 0
        for rung in range(begin - 1, begin - 1 - most, -1):
            row = self._row(rung, count)
            if row is None or (not self._ladder.falling and not better(row.rate, best, 0.0)):
                break
            best = max(best, row.rate)
        if highest > 0:
            self._row(0, count)  # what the user began with

    def _highest_kept(self, highest: int, count: int | None) -> int | None:
        """The highest rung up to ``highest`` at which all residuals fit, by a plan that does."""
        for _ in range(_MOST_KEPT):
            if not self._joint or count not in self._kept:
                return None
            rung = highest
            while self._kept[count].needed(self._ladder.load(rung)) > self._limit:
                rung -= 1
                if self._ladder.value(rung) is None:
                    return None
            row = self._row(rung, count) if rung == highest else self._kept_row(rung, count)
            if row is not None:
                return rung if row.remat == "none" else None
        return None

    def _row(self, rung: float, count: int | None) -> FitRow | None:
        """The fastest row of a rung, which is planned if need be; ``None`` if it does not fit."""
        request = self._request(rung, count)
        if request is None:
            return None
        rows = [
            row for key, row in self.rows.items()
            if (row.value(self._find), key.microbatches) == (self._ladder.value(rung), count)
        ]  # fmt: skip
        if not rows and (kept := self._kept_row(rung, count)):
            rows = [kept]
        if not rows:
            least = self._least(request)
            if least is not None and (least.fits or self._fits_offloaded(request, least)):
                rows = self._planned(request, least)
        best = max((row for row in rows if row.fits), key=lambda row: row.rate, default=None)
        if best is None:
            self._failed(rung, count)
        return best

    def _cut_batch(self) -> None:
        """Plans larger batches of the fastest microbatch, while these do more per second."""
        best = max(self.rows.values(), key=lambda row: row.rate, default=None)
        if best is None:
            return
        batch = best.value("batch")
        self._kept = {None: self._kept[None]} if None in self._kept else {}
        for power in range(1, round(math.log2(_MOST_MICROBATCHES)) + 1):
            count = best.microbatches * 2**power
            if None in self._kept:  # as much as one microbatch
                one = self._kept[None]
                self._kept[count] = dataclasses.replace(one, load=one.load * 2**power)
            row = self._row(self._ladder.rung(batch * 2**power), count)
            if row is None or not better(row.rate, best.rate, _GAIN):
                return
            best_rate = row.rate
            best = dataclasses.replace(best, rate=best_rate)

    def _cut_to_keep(self, rung: int) -> None:
        """Plans a rung in so many microbatches that all residuals fit, which may be faster."""
        row, one = self._row(rung, None), self._kept.get(None)
        if row is None or one is None or row.remat == "none":
            return
        count = 2 * row.microbatches
        while count <= _MOST_MICROBATCHES:
            load = one.load * count / row.microbatches
            self._kept[count] = dataclasses.replace(one, load=load)
            seems = self._kept[count].needed(self._ladder.load(rung)) <= self._limit
            if seems and (self._kept_row(rung, count) or self._kept[count].slack == _SLACK):
                return  # it fits, or the batch cannot be cut
            count *= 2

    def _cut(self, highest: int | None) -> None:
        """Plans with more microbatches, while larger sizes fit with them.

        ``highest`` is the highest rung that fits without.
        """
        own = max((row.microbatches for row in self.rows.values()), default=1)
        count = 2 * own
        while count <= _MOST_MICROBATCHES:
            first = 0 if highest is None else highest + 1
            need = self._need(first, count)
            if need is None or (highest is not None and not need.fits):
                return  # the batch cannot be cut, or that does not help
            reached = self._highest(count, first)
            if reached is not None:
                self._finer(reached, count)
                self._row(reached, count)
                highest = reached
            count *= 2


def _sharded_shapes(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """The size of each dimension of each argument, and over how many devices it is sharded."""
    program, sizes = plan.analysis.program, dict(plan.mesh.axes)
    return {
        name: [
            (size, math.prod(sizes[axis] for axis in axes))
            for size, axes in zip(program.values[value].type.shape, spec, strict=True)
        ]
        for value, (name, spec) in zip(
            program.argument_values, plan.arguments.items(), strict=True
        )
    }  # fmt: skip


def _kept_bytes(surveyed: Plan) -> float:
    """About what a plan needs that keeps all residuals."""
    policies = SurveyPolicies(surveyed)
    return policies.written(policies.presets()["none"]).needed_bytes
