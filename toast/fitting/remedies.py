"""What a plan that does not fit needs: changes that were planned, or that follow from prices.

A few plans of one round each are made.  Of large programs, which take long to trace, fewer are
made, and other changes are estimates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from toast.errors import AccumulationError, ToastError
from toast.fitting.fit_table import PlanRequest, Remedy, counted_sizes, work
from toast.fitting.requests import OutOfTimeError, RequestPlanner
from toast.hardware import Mesh, load, names
from toast.plan import Plan
from toast.plan.survey_policies import SurveyPolicies
from toast.program import MemoryPolicy
from toast.units import size_text

#: Ops of all programs that may be traced for the remedies of one plan: a program of a train step
#: of four unrolled layers has about 3,000.
_TRACED_OPS = 30_000

#: The most meshes, and the most sizes, that are tried.
_MOST_MESHES, _MOST_SIZES = 3, 3

#: The most microbatches that are tried.
_MOST_MICROBATCHES = 64

#: The most devices with more memory that are named.
_NAMED_DEVICES = 3


def remedies_for(
    plan: Plan,
    planner: RequestPlanner | None = None,
    request: PlanRequest | None = None,
    *,
    remat: str | MemoryPolicy | None = None,
    command: Callable[[PlanRequest], str] = lambda _request: "",
    one_token: bool = False,
) -> tuple[Remedy, ...]:
    """What makes a plan fit; empty if it fits.

    Changes that were planned for the same devices come first, those with the most work per second
    before the others.  Then come more devices, and what follows from prices.

    :param planner: plans other requests, with one round of the search; without one, only what
        follows from the plan is said.
    :param request: what the plan was made for.
    :param remat: the policy that was asked for: ``None``, ``"auto"`` or another one.
    :param command: the command line of a request.
    :param one_token: whether a step handles one token of each sequence, as in decoding.
    """
    if plan.fits:
        return ()
    request = request or PlanRequest()
    every = _Remedies(plan, planner, request, remat, command, one_token).every()
    return tuple(sorted(every, key=_order))


def _order(remedy: Remedy) -> tuple[int, float]:
    """Where a remedy belongs; those of one kind stay in the order in which they were found."""
    if remedy.rate is None:
        return 2, 0.0
    return int(remedy.change.startswith("--mesh")), -remedy.rate


class _Remedies:
    """The remedies of one plan."""

    def __init__(
        self, plan: Plan, planner: RequestPlanner | None, request: PlanRequest,
        remat: str | MemoryPolicy | None, command: Callable[[PlanRequest], str], one_token: bool,
    ) -> None:  # fmt: skip
        self._plan, self._planner, self._request = plan, planner, request
        self._policy, self._command = remat, command
        self._unit, self._counted = counted_sizes(dict(request.sizes), one_token)
        self._limit, self._needed = plan.memory_bytes, plan.needed_bytes(plan.after)
        #: The plan that recomputes everything, if the program can be traced like that.
        self._surveyed: Plan | None = None

    def every(self) -> Iterator[Remedy]:
        """All remedies."""
        for kind in (
            self._donation, self._recomputation, self._microbatches, self._smaller_sizes,
            self._devices, self._hardware, self._questions,
        ):  # fmt: skip
            try:
                yield from kind()
            except ToastError:  # the program or the mesh does not allow it
                continue
            except OutOfTimeError as error:
                if error.stopped == "interrupt":
                    return

    # -- plans -------------------------------------------------------------------------------

    def _may_trace(self) -> bool:
        ops = len(self._plan.analysis.program.ops)
        return self._planner is not None and self._planner.traced_ops + ops <= _TRACED_OPS

    def _attempt(self, **changes: object) -> Plan:
        """The plan with some changes of the request, recomputing everything if that is free."""
        assert self._planner is not None
        request = dataclasses.replace(self._request, **changes)  # type: ignore[arg-type]
        if self._recomputes:
            return self._planner.survey(request)
        return self._planner.plan(request, self._policy)

    @property
    def _recomputes(self) -> bool:
        """Whether the other remedies include recomputation, because none suffices without."""
        return self._policy == "auto" or not (self._surveyed is None or self._surveyed.fits)

    @property
    def _base(self) -> Plan:
        """The plan that the other remedies begin with."""
        return self._surveyed if self._surveyed and self._recomputes else self._plan

    def _remat(self) -> str:
        if self._recomputes:
            return "auto"
        return self._policy.label if isinstance(self._policy, MemoryPolicy) else self._policy or ""

    def _remedy(self, text: str, plan: Plan | None, change: str = "", **changes: object) -> Remedy:
        remat = self._remat() if change else "auto"
        request = dataclasses.replace(self._request, remat=remat, **changes)  # type: ignore[arg-type]
        if remat == "auto" and self._policy != "auto":
            change = f"{change} --remat auto".strip()
        if plan is None:
            return Remedy(change, text, "priced", command=self._command(request))
        seconds = plan.after.step_seconds
        return Remedy(
            change, text, "planned", plan.after.peak_bytes, seconds, self._command(request),
            rate=work(request.sizes, self._counted) / seconds, unit=self._unit,
            recomputes=remat == "auto",
        )  # fmt: skip

    # -- kinds -------------------------------------------------------------------------------

    def _donation(self) -> Iterator[Remedy]:
        for reshard in self._plan.step_reshards:
            tree = reshard.tree
            change = f"--donate {tree.position}" if tree.position >= 0 else "donation"
            yield Remedy(change, f"donate {tree.argument}, which the step returns", "priced")

    def _recomputation(self) -> Iterator[Remedy]:
        """Recompute or offload, if the policy is not chosen yet."""
        if self._planner is None and self._plan.policy is None:
            yield Remedy("--remat auto", "recompute in the backward pass, or offload", "priced")
        if self._policy == "auto" or not self._may_trace():
            return
        assert self._planner is not None
        surveyed = self._planner.survey(self._request)
        self._surveyed = surveyed
        if surveyed.fits:
            yield self._remedy("recompute in the backward pass", surveyed)
        elif self._planner.has_host_link and SurveyPolicies(surveyed).best().fits:
            yield self._remedy("recompute, and offload arguments of layers to the host", None)

    def _microbatches(self) -> Iterator[Remedy]:
        """Cut the batch, if the program accumulates gradients, or advice to do so."""
        program, free = self._plan.analysis.program, self._request.microbatches is None
        advice = Remedy(
            "toast.accumulate",
            "cut the batch: put it around the gradient, then use --microbatches N", "priced",
        )  # fmt: skip
        trains = self._planner is not None and "backward" in program.passes
        if trains and program.memory is not None and not program.memory.accumulates:
            yield advice
            return
        if not self._may_trace() or (self._policy == "auto" and free):
            return
        now = max(1, self._plan.microbatches)
        count = now * max(2, _power(self._over(self._base)))
        for _ in range(2):
            if count > _MOST_MICROBATCHES or not self._may_trace():
                return
            try:
                plan = self._attempt(microbatches=count)
            except AccumulationError:
                if trains:
                    yield advice
                return
            if plan.fits:
                yield self._remedy(
                    "cut the batch, add up gradients", plan, f"--microbatches {count}",
                    microbatches=count,
                )  # fmt: skip
                return
            count *= 2

    def _smaller_sizes(self) -> Iterator[Remedy]:
        """A smaller batch, or else a shorter sequence."""
        if self._planner is None:
            return
        for name in ("batch", "sequence"):
            size = dict(self._request.sizes).get(name)
            if size is None or size < 2:
                continue
            smaller = self._smaller(name, size)
            if smaller is not None:
                yield smaller
                return

    def _smaller(self, name: str, size: int) -> Remedy | None:
        smaller = size // max(2, _power(self._over(self._base)))
        for _ in range(_MOST_SIZES):
            if smaller < 1:
                return None
            request = self._request.with_size(name, smaller)
            change, text = f"--{name} {smaller}", f"a smaller {name}, not {size}"
            if not self._may_trace():
                return self._remedy(text, None, change, sizes=request.sizes)
            plan = self._attempt(sizes=request.sizes)
            if plan.fits:
                return self._remedy(text, plan, change, sizes=request.sizes)
            smaller //= 2
        return None

    def _devices(self) -> Iterator[Remedy]:
        """More devices of this kind: the mesh with one axis that is longer."""
        base = self._base
        now = self._plan.mesh.devices
        factor = max(2, _power(base.needed_bytes(base.after) / max(self._limit, 1.0)))
        tried: dict[int, tuple[Mesh, Plan]] = {}
        for _ in range(_MOST_MESHES):
            if now * factor > self._plan.hardware.max_devices or factor in tried:
                break
            mesh = _longer(self._plan.mesh, factor)
            if self._planner is None:
                return
            tried[factor] = mesh, self._attempt(mesh=mesh, devices=None)
            fits = tried[factor][1].fits
            if fits and (factor == 2 or factor // 2 in tried):
                break
            factor = factor // 2 if fits else factor * 2
        fitting = [factor for factor, (_, plan) in tried.items() if plan.fits]
        if fitting:
            mesh, plan = tried[min(fitting)]
            yield self._remedy(
                f"{mesh.devices} devices, not {now}", plan, f"--mesh {mesh}", mesh=mesh,
                devices=None,
            )  # fmt: skip

    def _hardware(self) -> Iterator[Remedy]:
        larger = sorted((device.memory_limit_bytes, device.name) for device in map(load, names()))
        larger = [(size, name) for size, name in larger if size >= self._needed]
        if larger:
            named = [f"{name} ({size_text(size)})" for size, name in larger[:_NAMED_DEVICES]]
            yield Remedy(f"--hardware {larger[0][1]}", f"more memory: {', '.join(named)}", "priced")

    def _questions(self) -> Iterator[Remedy]:
        """Commands that look for sizes that fit."""
        sizes = [name for name in ("batch", "sequence") if name in dict(self._request.sizes)]
        for name in sizes[:1] if self._planner else ["batch"]:
            yield self._question(name, f"finds the largest {name} that fits", self._request)
        if self._planner and self._planner.has_constraints:
            return  # they name axes, and other meshes have others
        free = dataclasses.replace(self._request, mesh=None, devices=None)
        yield self._question(
            "devices", "finds the fewest devices that fit (leave out --mesh)", free
        )  # fmt: skip

    def _question(self, name: str, text: str, request: PlanRequest) -> Remedy:
        """The question what fits; its command has the mesh if it is about that mesh."""
        policy = self._policy.label if isinstance(self._policy, MemoryPolicy) else self._policy
        command = self._command(dataclasses.replace(request, remat=policy or ""))
        return Remedy(
            f"--fit {name}", text, "priced", command=command and f"{command} --fit {name}"
        )

    def _over(self, base: Plan) -> float:
        """How many times as large as there is room what grows with the batch is."""
        fixed = base.after.argument_bytes
        room = self._limit - fixed
        if room <= 0.0:
            return math.inf
        return (base.needed_bytes(base.after) - fixed) / room


def _power(number: float) -> int:
    """The least power of two that is at least ``number``; at most a large one."""
    if not number < 2**20:
        return 2**20
    return 1 << max(0, math.ceil(math.log2(max(number, 1.0))))


def _longer(mesh: Mesh, factor: int) -> Mesh:
    """A mesh with ``factor`` times as many devices along its first axis."""
    (name, size), *others = mesh.axes
    return Mesh(((name, size * factor), *others), mesh.order)
