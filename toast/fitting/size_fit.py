"""The largest size that fits, or the fewest devices, and a table of plans that do.

Memory grows with a size, so a search over a grid of sizes (:mod:`toast.fitting.ladder`) finds the
largest one with few plans.  These recompute everything, which needs least; sizes that fit are then
planned with the joint decision.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toast import api, inputs
from toast.analysis import Analysis, lowering_of
from toast.errors import MeshError, SearchError, TargetError
from toast.fitting.fit_table import Fit, FitRow, PlanRequest, better
from toast.fitting.ladder import Ladder, Need, highest_rung
from toast.fitting.requests import IMPOSSIBLE, OutOfTimeError, RequestPlanner, limited
from toast.frontend.shifts import with_shifts
from toast.inputs import AnyHardware, AnyMesh
from toast.plan import Plan
from toast.plan.policy_choice import best_choice
from toast.plan.residual_costs import recomputation
from toast.program import MemoryPolicy
from toast.search import Settings

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

#: The devices with which the search for the fewest begins.
_DEVICES = 8


def fit(
    target: Any,
    arguments: Any = None,
    /,
    *,
    find: str = "batch",
    sizes: Mapping[str, int] | None = None,
    mesh: AnyMesh | None = None,
    devices: int | None = None,
    hardware: AnyHardware,
    remat: str | MemoryPolicy | None = None,
    microbatches: int | None = None,
    donate: int | Sequence[int] | None = (),
    platform: Any = None,
    trip_counts: Any = None,
    rules: Sequence[str | pathlib.Path] = (),
    memory_bytes: float | None = None,
    settings: Settings | None = None,
    progress: api.Progress | None = None,
    cache: bool = True,
    lowering: str = "xla",
    **options: Any,
) -> Fit:
    """Finds the largest size that fits, or the fewest devices, and plans that do.

    Sizes are those of ``sizes``, doubled or halved, and then the size halfway between the largest
    one that fits and its double.  Numbers of devices are powers of two.

    :param target: a function, as for :func:`toast.plan`, if there are ``arguments``; otherwise a
        function of the sizes, by name, that returns a :class:`toast.models.Model`.
    :param arguments: a function of the sizes, by name, that returns the tuple of example arguments;
        or the tuple itself, for ``find="devices"``.
    :param find: the name of a size, such as ``"batch"`` or ``"sequence"``; or ``"devices"``.
    :param sizes: the sizes to begin with, by name.  By default, those of the function of sizes.
        ``batch`` and ``sequence`` count as rows and tokens.
    :param mesh: as for :func:`toast.plan`, with ``devices`` and ``hardware``; neither is given for
        ``find="devices"``, which searches meshes of each size.
    :param remat: a memory policy for all plans.  By default, and with ``"auto"``, each size is
        planned with the joint decision; a program with nothing to recompute stays as it is.
    :param microbatches: their number for all plans; by default, that of the program and more, while
        these help.
    :param memory_bytes: the memory limit per device; by default that of the hardware.
    :param settings: the settings of the searches; their ``budget`` limits the whole question, and
        what was found until then is returned.
    :param options: ``safety``, ``constraints``, ``overlap``, ``resolution``, ``uneven`` and
        ``stages`` of :func:`toast.plan`; the other parameters are those there.
    :raises toast.errors.TargetError: if the target has no such size, or cannot be traced with the
        sizes to begin with.

    >>> import jax, jax.numpy as jnp, toast
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    >>> mlp = lambda x, w: jax.nn.relu(x @ w)
    >>> found = toast.fit(
    ...     mlp, lambda batch: (f32(batch, 512), f32(512, 2048)), find="batch", sizes={"batch": 64},
    ...     mesh="data=4", hardware="tpu-v5e", memory_bytes=2**24,
    ... )
    >>> found.value, found.best.peak_bytes < 2**24
    (4096, True)
    """
    machine = inputs.machine_of(hardware)
    settings = Settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise SearchError(f"settings {settings!r}: use toast.Settings(seed=1), for example")
    lowering = lowering_of(lowering)
    for name in options:
        if name not in _OPTIONS:
            raise TargetError(f"{name}: is no option of toast.fit; use {', '.join(_OPTIONS)}")
    bound = _bound(target, arguments, sizes, find)

    def analysis_of(
        chosen: Mapping[str, int], policy: str | MemoryPolicy | None, count: int | None,
        show: Callable[[Any], None],
    ) -> Analysis:  # fmt: skip
        function, given = bound.at(chosen)
        return api.analyze(
            function, *given, donate=donate, platform=api.platform_of(platform, machine),
            trip_counts=trip_counts, rules=rules, progress=show, cache=cache, lowering=lowering,
            remat=policy, microbatches=count,
        )  # fmt: skip

    planner = RequestPlanner(
        analysis_of, limited(machine, memory_bytes), settings, progress, **options
    )
    return find_fit(
        planner, find=find, sizes=bound.sizes, mesh=mesh, devices=devices, remat=remat,
        microbatches=microbatches,
    )  # fmt: skip


#: The options of :func:`toast.plan` that are the same for all plans.
_OPTIONS = ("safety", "constraints", "overlap", "resolution", "uneven", "stages")


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A target with the sizes that it is a function of."""

    target: Any
    arguments: Any
    sizes: dict[str, int]

    def at(self, sizes: Mapping[str, int]) -> tuple[Any, tuple[Any, ...]]:
        """The target with some sizes, and its arguments."""
        if self.arguments is None:
            return self.target(**sizes), ()
        if not callable(self.arguments):
            return self.target, self.arguments
        given = self.arguments(**sizes)
        if not isinstance(given, tuple):
            raise TargetError(
                f"arguments: the function of sizes returned {type(given).__name__}; return the "
                "tuple of arguments, also if there is only one"
            )
        return self.target, given


def _bound(target: Any, arguments: Any, sizes: Mapping[str, int] | None, find: str) -> _Bound:
    """The target with the sizes to begin with; raises :class:`toast.errors.TargetError`."""
    from toast.models import Model

    if isinstance(arguments, list):
        arguments = tuple(arguments)
    of_sizes = target if arguments is None else arguments
    fixed = isinstance(arguments, tuple) or isinstance(target, Model)
    if fixed and find != "devices":
        raise TargetError(
            f"find={find!r}: the arguments have one size; pass a function of it, such as lambda "
            f"{find}: (params, f32({find}, 1024))"
        )
    if isinstance(target, Model) and arguments is None:
        return _Bound(lambda **_sizes: target, None, {})
    if not callable(target) or not (fixed or callable(of_sizes)):
        raise TargetError(
            "toast.fit needs a function with a function of sizes that returns its arguments, or a "
            "function of sizes that returns a toast.models.Model"
        )
    if fixed:
        return _Bound(target, arguments, {})
    known = {
        name: p.default if inputs.is_whole(p.default) else None
        for name, p in inspect.signature(of_sizes).parameters.items()
    }
    chosen = {**known, **dict(sizes or {})}
    for name, size in chosen.items():
        if name not in known:
            raise TargetError(f"sizes: the function has no size {name}; it has {', '.join(known)}")
        if not inputs.is_whole(size) or int(size) < 1:  # type: ignore[call-overload]
            missing = "has no value" if size is None else f"is {size!r}"
            raise TargetError(
                f"size {name} {missing}; give a whole number to begin with: sizes={{{name!r}: 8}}"
            )
    if not known:
        raise TargetError("the function of sizes has no parameters; name them, such as batch")
    return _Bound(target, arguments, {name: int(size) for name, size in chosen.items()})  # type: ignore[call-overload]


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
    """The implementation of :func:`fit`, for any planner.

    ``one_token`` says that a step handles one token of each sequence, as in decoding.
    """
    if find == "devices":
        if mesh is not None or devices is not None:
            raise SearchError(
                "find='devices': the number of devices is looked for; remove the mesh",
                shell="remove --mesh and --devices, which --fit devices looks for",
            )
        base = PlanRequest(tuple(sizes.items()), microbatches)
    else:
        if find not in sizes:
            known = ", ".join([*sizes, "devices"])
            raise TargetError(
                f"find={find!r}: the target has no such size; use one of {known}",
                shell=f"--fit {find}: TARGET has no such size, use one of {known}",
            )
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
    rows = sorted(
        question.rows.values(),
        key=lambda row: (-row.rate, row.devices, row.microbatches, str(row.mesh)),
    )
    return Fit(
        program=question.program, find=find, hardware=planner.hardware.name,
        memory_bytes=planner.hardware.memory_limit_bytes, safety=question.safety,
        unit=question.unit, rows=tuple(row for row in rows if row.fits),
        nearest=None if any(row.fits for row in rows) else question.nearest,
        note="\n".join(question.notes), stopped=stopped, plans=planner.count,
        seconds=time.perf_counter() - begin,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Kept:
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
        self._policy = remat
        #: Whether the policy of each plan is chosen; it is decided at the first plan.
        self._joint = remat is None or remat == "auto"
        sizes = dict(base.sizes)
        self.unit = "steps"
        self._counted: tuple[str, ...] = ()
        if "sequence" in sizes and not one_token:
            self.unit, self._counted = "tokens", ("batch", "sequence")
        elif "batch" in sizes:
            self.unit, self._counted = ("tokens" if one_token else "rows"), ("batch",)
        falling = find == "devices"
        first = min(_DEVICES, planner.hardware.max_devices) if falling else sizes[find]
        self._ladder = Ladder(1 << (first.bit_length() - 1) if falling else first, falling)
        #: By what was planned.
        self.rows: dict[PlanRequest, FitRow] = {}
        self.nearest: FitRow | None = None
        self.notes: list[str] = []
        self.program = ""
        self.safety: float | None = None
        self._tried_first = False
        #: By microbatches: what a plan needs that keeps everything.
        self._kept: dict[int | None, _Kept] = {}

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

    def _work(self, request: PlanRequest) -> float:
        sizes = dict(request.sizes)
        return float(math.prod(sizes.get(name, 1) for name in self._counted))

    def _noted(self, plan: Plan, request: PlanRequest, *, row: bool = True) -> FitRow:
        """The row of a plan, which is kept if ``row``."""
        self.program, self.safety = plan.analysis.program.name, plan.safety
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
        request = self._request(rung, count)
        plan = None if request is None else self._least(request)
        if request is None or plan is None:
            return None
        fits = plan.fits or self._fits_offloaded(request, plan)
        # With more devices, arguments are smaller as well.
        fixed = 0.0 if self._ladder.falling else plan.after.argument_bytes
        if self._joint:
            self._kept[count] = _Kept(self._ladder.load(rung), _kept_bytes(plan), fixed, _SLACK)
        return Need(fits, plan.needed_bytes(plan.after), fixed)

    def _fits_offloaded(self, request: PlanRequest, surveyed: Plan) -> bool:
        """Whether a plan fits that keeps arguments of blocks in the memory of the host."""
        if not self._joint or not self._planner.has_host_link:
            return False
        room = surveyed.memory_bytes - surveyed.needed_bytes(surveyed.after)
        choice = best_choice(recomputation(surveyed), room)
        if choice is None:
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
            # A plan that keeps everything has been tried (:meth:`_kept_row`).
            rows.append(self._noted(self._planner.joint(placed, keeps=False), placed))
            self._planner.forget(dataclasses.replace(placed, remat=""))
        return rows

    def _kept_row(self, rung: float, count: int | None) -> FitRow | None:
        """The row that recomputes nothing, if that seems to fit and does."""
        request = self._request(rung, count)
        if request is None or not self._joint or count not in self._kept:
            return None
        needed = self._kept[count].needed(self._ladder.load(rung))
        if needed > self._planner.hardware.memory_limit_bytes:
            return None
        request = dataclasses.replace(request, remat="none")
        try:
            plan = self._planner.plan(request, "none")
        except IMPOSSIBLE:
            return None
        self._kept[count] = _Kept(
            self._ladder.load(rung), plan.needed_bytes(plan.after), self._kept[count].fixed_bytes,
            _PLANNED_SLACK,
        )  # fmt: skip
        row = self._noted(plan, request)
        return row if row.fits else None

    def _meshes(self, least: Plan, request: PlanRequest) -> list[Any]:
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
            self._cut(highest)

    def _highest(self, count: int | None, first: int) -> int | None:
        return highest_rung(
            self._ladder, lambda rung: self._need(rung, count),
            self._planner.hardware.memory_limit_bytes, first,
        )  # fmt: skip

    def _table(self, highest: int, count: int | None) -> None:
        """Plans the highest rung, the half above it, and those below while their rate grows."""
        rows = [self._row(highest + 0.5, count), self._row(highest, count)]
        best = max((row.rate for row in rows if row), default=0.0)
        most = 1 if self._ladder.falling else _MOST_SMALLER
        for rung in range(highest - 1, highest - 1 - most, -1):
            row = self._row(rung, count)
            if row is None or (not self._ladder.falling and not better(row.rate, best, 0.0)):
                break
            best = max(best, row.rate)
        if highest > 0:
            self._row(0, count)  # what the user began with

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
        return max((row for row in rows if row.fits), key=lambda row: row.rate, default=None)

    def _cut_batch(self) -> None:
        """Plans larger batches of the fastest microbatch, while these do more per second."""
        best = max(self.rows.values(), key=lambda row: row.rate, default=None)
        if best is None:
            return
        rung = math.log2(best.value("batch") / self._ladder.first)
        rung = math.floor(rung) + (0.5 if rung % 1 else 0.0)
        self._kept = {None: self._kept[None]} if None in self._kept else {}
        for power in range(1, round(math.log2(_MOST_MICROBATCHES)) + 1):
            count = best.microbatches * 2**power
            if None in self._kept:  # as much as one microbatch
                one = self._kept[None]
                self._kept[count] = dataclasses.replace(one, load=one.load * 2**power)
            row = self._row(rung + power, count)
            if row is None or not better(row.rate, best.rate, _GAIN):
                return
            best_rate = row.rate
            best = dataclasses.replace(best, rate=best_rate)

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
                self._row(reached + 0.5, count)
                self._row(reached, count)
                highest = reached
            count *= 2


def _kept_bytes(surveyed: Plan) -> float:
    """About what a plan needs that keeps all residuals."""
    residuals = recomputation(surveyed).residuals
    return surveyed.needed_bytes(surveyed.after) + math.fsum(
        residual.bytes for residual in residuals if not residual.is_input
    )


__all__ = ["find_fit", "fit"]
