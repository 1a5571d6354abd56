"""Requests for plans, which are computed once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from toast import api, inputs
from toast.analysis import Analysis
from toast.errors import MeshError, PinError, TargetError
from toast.fitting.fit_table import PlanRequest
from toast.hardware import Hardware, Mesh
from toast.plan import Plan, joint_plan
from toast.program import MemoryPolicy, survey
from toast.search import Round, Settings
from toast.space import Constraints

#: Errors of sizes that the program, the mesh or the constraints do not allow.
IMPOSSIBLE = (TargetError, MeshError, PinError)

#: The most analyses that are kept.
_KEPT_ANALYSES = 2


class AnalysisOf(Protocol):
    """A function that traces and analyzes the program of a request."""

    def __call__(
        self, sizes: Mapping[str, int], policy: str | MemoryPolicy | None,
        microbatches: int | None, progress: Callable[[Any], None],
    ) -> Analysis:  # fmt: skip
        """The analysis; raises :class:`toast.errors.ToastError`."""


class OutOfTimeError(Exception):
    """The budget of a question ran out, or the user interrupted it."""

    def __init__(self, stopped: str) -> None:
        super().__init__(stopped)
        self.stopped = stopped


class RequestPlanner:
    """Plans requests, each once, within a budget.

    :param analysis_of: traces the program.
    :param hardware: the hardware, with the memory limit of the user.
    :param settings: those of the searches; their ``budget`` limits all plans together.
    :param options: further options of :func:`toast.plan`, the same for all requests.
    """

    def __init__(
        self, analysis_of: AnalysisOf, hardware: Hardware, settings: Settings,
        progress: Callable[[Any], None] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._analysis_of, self._options = analysis_of, options
        self.hardware, self.settings = hardware, settings
        self._show = progress or (lambda _event: None)
        self._begin = time.perf_counter()
        self._plans: dict[tuple[PlanRequest, str], Plan] = {}
        #: The last analyses: requests on other meshes share them.
        self._analyses: dict[Any, Analysis] = {}
        self._label = ""
        #: The number of plans that were computed.
        self.count = 0
        #: The ops of all programs that were traced.
        self.traced_ops = 0

    @property
    def has_host_link(self) -> bool:
        """Whether values can be offloaded to the memory of the host."""
        return self.hardware.has_host_link

    @property
    def has_constraints(self) -> bool:
        """Whether the plans have constraints, which name axes of the mesh."""
        given = self._options.get("constraints")
        return given is not None and given != Constraints()

    def left(self) -> float | None:
        """The seconds that are left of the budget; ``None`` without one."""
        if self.settings.budget is None:
            return None
        return self.settings.budget - (time.perf_counter() - self._begin)

    def plan(
        self, request: PlanRequest, policy: str | MemoryPolicy | None, start: Plan | None = None
    ) -> Plan:
        """The plan of a request with a memory policy.

        Raises :class:`OutOfTimeError`, and the errors of :func:`toast.plan`.
        """
        surveys = isinstance(policy, MemoryPolicy) and policy.surveys
        key = (dataclasses.replace(request, remat=str(policy)), "survey" if surveys else "")
        if start is None and key in self._plans:
            return self._plans[key]
        left = self.left()
        if left is not None and left <= 0.0 and self.count:
            raise OutOfTimeError("budget")
        self._label = request.label
        analysis = self._analysis_for(request, policy)
        where: dict[str, Any] = {"mesh": request.mesh}
        if request.mesh is None:
            where = {"devices": request.devices}
            if request.devices == 1:
                where = {"mesh": Mesh((("a", 1),))}
        result = api.plan(
            analysis, **where, hardware=self.hardware, start=start,
            settings=dataclasses.replace(self.settings, budget=left and max(0.0, left)),
            progress=self.show, **self._options,
        )  # fmt: skip
        self.count += 1
        if "interrupted" in result.note:
            raise OutOfTimeError("interrupt")
        if start is None:
            self._plans[key] = result
        return result

    def survey(self, request: PlanRequest) -> Plan:
        """The plan that recomputes everything, with names for all residuals."""
        return self.plan(request, survey())

    def joint(self, request: PlanRequest) -> Plan:
        """The plan whose policy is chosen together with its shardings."""

        def planned(
            policy: str | MemoryPolicy, /, start: Plan | None = None,
            microbatches: int | None = None,
        ) -> Plan:  # fmt: skip
            return self.plan(request, policy, start)

        return joint_plan(planned, self.show)

    def forget(self, request: PlanRequest) -> None:
        """Frees the plans of a request, whatever its policy, but not that of a survey."""
        for key in [k for k in self._plans if dataclasses.replace(k[0], remat="") == request]:
            if key[1] != "survey":
                del self._plans[key]

    def show(self, event: str | Round) -> None:
        """Shows an event of a plan after what is planned, and the time since the beginning."""
        seconds = int(time.perf_counter() - self._begin)
        if not isinstance(event, str):
            event = f"search: round {event.number + 1}, {event.states} states"
        label = f"{self._label}: " if self._label else ""
        self._show(f"{seconds // 60}:{seconds % 60:02} {label}{event}")

    def adopt(
        self, request: PlanRequest, policy: str | MemoryPolicy | None, analysis: Analysis
    ) -> None:
        """Remembers the analysis of a request that was planned elsewhere."""
        self._analyses[_program_key(request, policy)] = analysis

    def _analysis_for(
        self, request: PlanRequest, policy: str | MemoryPolicy | None
    ) -> Analysis:  # fmt: skip
        key = _program_key(request, policy)
        if key not in self._analyses:
            while len(self._analyses) >= _KEPT_ANALYSES:
                del self._analyses[next(iter(self._analyses))]
            self._analyses[key] = analysis = self._analysis_of(
                dict(request.sizes), policy, request.microbatches, self.show
            )
            self.traced_ops += len(analysis.program.ops)
        return self._analyses[key]


def _program_key(request: PlanRequest, policy: str | MemoryPolicy | None) -> Any:
    surveys = isinstance(policy, MemoryPolicy) and policy.surveys
    return request.sizes, request.microbatches, str(policy), surveys


def limited(hardware: Hardware, memory_bytes: float | None) -> Hardware:
    """The hardware with the memory limit of the user."""
    limit = inputs.limit_of(memory_bytes, hardware)
    return dataclasses.replace(hardware, memory_limit_bytes=limit)
