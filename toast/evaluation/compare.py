"""Comparison of methods on one program, with the same cost model for all."""

from __future__ import annotations

import dataclasses
import difflib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from toast import api, inputs
from toast.analysis import Analysis
from toast.cost import Overlap
from toast.errors import HardwareError, PinError, PlanError, SearchError, ToastError
from toast.evaluation.baselines import alpa, automap, manual, shardy
from toast.evaluation.oracle import Verdict, check, check_devices, judge, judge_here
from toast.inputs import AnyHardware, AnyMesh
from toast.models import Strategies
from toast.plan import Plan, kernel_notes, loop_notes, spec_text
from toast.search import Round, Settings, noted_interrupts
from toast.space import Constraints, broken, resolve
from toast.units import listed

#: What compiles the plans of methods: for TPUs, which need not be there, or for GPUs that are.
Compiler = Literal["tpu", "gpu"]

#: The methods, in the order of the table.
METHODS = ("toast", "manual", "automap", "alpa", "shardy")


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """The result of one method; if it failed, only ``method`` and ``error`` are set."""

    method: str
    #: Predicted values, per device.
    step_seconds: float = float("nan")
    peak_bytes: float = float("nan")
    fits: bool = False
    #: The odds that it fits.
    fit_probability: float | None = None
    #: A lower bound of the step time of every plan of the method: a roofline without collectives.
    #: (Not all methods satisfy constraints.)
    bound_seconds: float = float("nan")
    cost: float = float("nan")
    #: The number of priced states.
    states: int = 0
    #: The time of the method, without the analysis, which all methods share.
    search_seconds: float = float("nan")
    note: str = ""
    #: The arguments and named values that violate the user's constraints.
    broken: tuple[str, ...] = ()
    #: Why there is no plan.
    error: str = ""
    verdict: Verdict | None = None
    #: Why the compiler returned no verdict, if one was requested.
    verdict_error: str = ""
    plan: Plan | None = dataclasses.field(default=None, compare=False, repr=False)

    @staticmethod
    def of(method: str, plan: Plan, **options: Any) -> MethodResult:
        """The row of a plan, named ``method``; ``options`` are its other fields."""
        return MethodResult(
            method,
            step_seconds=plan.after.step_seconds,
            peak_bytes=plan.after.peak_bytes,
            fits=plan.fits,
            fit_probability=plan.after.fit_probability,
            bound_seconds=plan.bound_seconds,
            cost=plan.cost,
            states=plan.states,
            plan=plan,
            **options,
        )

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data, for JSON, with the shardings of arguments instead of the plan."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("plan", "verdict")
        }
        # JSON has no NaN.
        row = {name: None if value != value else value for name, value in fields.items()}
        row["verdict"] = dataclasses.asdict(self.verdict) if self.verdict else None
        specs = self.plan.arguments if self.plan else {}
        row["arguments"] = {name: spec_text(spec) for name, spec in specs.items()}
        return row


class Interrupted(KeyboardInterrupt):
    """An interrupt; ``rows`` has the results before it."""

    def __init__(self, rows: list[MethodResult]) -> None:
        super().__init__("interrupted")
        self.rows = rows


def chosen(text: str) -> tuple[str, ...]:
    """The methods in a text such as ``"toast,alpa"``.

    Raises :class:`toast.errors.SearchError` for an unknown method or an empty text.

    >>> chosen("toast, alpa")
    ('toast', 'alpa')
    """
    methods = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in methods:
        if name not in METHODS:
            near = difflib.get_close_matches(name.lower(), METHODS, 2)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise SearchError(f"no method named {name}; {hint}known: {', '.join(METHODS)}")
    if not methods:
        raise SearchError(f"no method given; use {', '.join(METHODS)}")
    return methods


def compare(
    analysis: Analysis,
    mesh: AnyMesh,
    hardware: AnyHardware,
    methods: Sequence[str] = METHODS,
    *,
    strategies: Strategies | None = None,
    limit: float = 60.0,
    memory_bytes: float | None = None,
    safety: float | None = None,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    settings: Settings | None = None,
    oracle: Compiler | None = None,
    timeout: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> list[MethodResult]:
    """Partition a program with each of ``methods``.

    ``strategies`` are the expert strategies of the program; without them, the row of ``manual`` has
    an error.  ``limit``, in seconds, ends AutoMap and Alpa with their best plan so far; they finish
    a propagation in progress and the construction of Alpa's program.  ``memory_bytes`` is the limit
    per device (default: the hardware's), and ``safety`` the odds with which plans must fit, as for
    :func:`toast.plan`.  ``settings`` are those of TOAST's search; AutoMap uses
    their seed.  ``progress`` is called with messages.

    ``constraints`` apply to all methods.  TOAST, ``manual`` and ``alpa`` satisfy them.  ``automap``
    and ``shardy`` start from the constraints on arguments, but propagation ignores constraints.
    The row of a plan that violates constraints lists the violations (``broken``).

    With ``oracle="tpu"``, XLA's compiler compiles every plan, for at most ``timeout`` seconds each.
    ``oracle="gpu"`` compiles for the GPUs of this machine, which must be those of ``hardware``, and
    times runs.
    If a method or a compilation fails, only its row has an error.

    Raises :class:`Interrupted` for an interrupt, :class:`toast.errors.MeshError` if no dimension
    can use the mesh, :class:`toast.errors.PinError` if a constraint cannot be satisfied, and the
    errors of :func:`toast.evaluation.oracle.judge` if there is no compiler, and of
    :func:`toast.evaluation.oracle.check_devices` for other GPUs than those.
    """
    methods = chosen(",".join(methods))
    report_stage = progress or (lambda _stage: None)
    mesh, hardware = inputs.system_of(mesh, hardware)
    # A plan that does not fit also has a row, so the limit becomes that of the device.
    limit_bytes = inputs.limit_of(memory_bytes, hardware)
    hardware = dataclasses.replace(hardware, memory_limit_bytes=limit_bytes)
    safety = inputs.safety_of(safety)
    if oracle == "tpu":
        check(hardware)
    elif oracle == "gpu":
        check_devices(hardware, mesh)
    api.check_mesh(analysis, mesh, hardware)
    constraints, settings = constraints or Constraints(), settings or Settings()
    resolve(analysis, mesh, constraints)  # raises errors before the long work

    def announce(event: str | Round) -> None:
        place = f"method {methods.index(method) + 1} of {len(methods)}, "
        if isinstance(event, str):
            report_stage(f"{place}{method}: {event}")
        else:
            report_stage(
                f"{place}{method}: round {event.number + 1}, {event.states} states, "
                f"{event.cost:.4g}"
            )

    makers: dict[str, Callable[[], Plan]] = {
        "toast": lambda: api.plan(
            analysis, mesh=mesh, hardware=hardware, safety=safety, overlap=overlap,
            constraints=constraints, settings=settings, progress=announce,
            uneven=0,  # no other method pads
        ),
        "manual": lambda: manual(
            analysis, mesh, hardware, strategies or {}, safety=safety, overlap=overlap,
            constraints=constraints, progress=announce,
        ),
        "automap": lambda: automap(
            analysis, mesh, hardware, safety=safety, seed=settings.seed, budget=limit,
            overlap=overlap, constraints=constraints, progress=announce,
        ),
        "alpa": lambda: alpa(
            analysis, mesh, hardware, safety=safety, time_limit=limit, overlap=overlap,
            constraints=constraints, progress=announce,
        ),
        "shardy": lambda: shardy(
            analysis, mesh, hardware, safety=safety, overlap=overlap, constraints=constraints,
        ),
    }  # fmt: skip
    rows: list[MethodResult] = []
    try:
        with noted_interrupts(raising=True) as interrupt:
            for method in methods:
                announce("begins")
                rows.append(_row(method, makers[method], constraints))
                plan = rows[-1].plan
                # TOAST's search handles interrupts itself.
                if plan and "interrupted" in re.split(r", |\n", plan.note):
                    raise KeyboardInterrupt
                if interrupt.is_set():
                    raise KeyboardInterrupt
                if oracle and plan:
                    announce("compiling")
                    rows[-1] = _judged(rows[-1], plan, oracle, timeout)
    except KeyboardInterrupt:
        raise Interrupted(rows) from None
    return rows


def _row(method: str, make: Callable[[], Plan], constraints: Constraints) -> MethodResult:
    begin = time.perf_counter()
    try:
        plan = make()
    except PinError:  # no method can satisfy the constraint
        raise
    except ToastError as error:
        spent = time.perf_counter() - begin
        return MethodResult(method, search_seconds=spent, error=str(error))
    spent = time.perf_counter() - begin
    # Notes on the program hold for all methods; the command prints them once.
    shared = {*kernel_notes(plan.analysis), *loop_notes(plan.analysis.program)}
    note = "\n".join(line for line in plan.note.splitlines() if line not in shared)
    places = broken(plan.analysis, plan.mesh, constraints, plan.op_state)
    if places:
        violations = f"violates the constraints: {listed(places)}"
        plan = dataclasses.replace(plan, note=", ".join(filter(None, (plan.note, violations))))
        note = ", ".join(filter(None, (note, violations)))
    return MethodResult.of(method, plan, search_seconds=spent, note=note, broken=places)


def _judged(row: MethodResult, plan: Plan, oracle: Compiler, timeout: float) -> MethodResult:
    program, shardings = plan.analysis.program, plan.shardings
    try:
        if oracle == "tpu":
            verdict = judge(program, shardings, plan.hardware, timeout=timeout)
        else:
            verdict = judge_here(program, shardings, plan.hardware)
    except (PlanError, HardwareError) as error:
        return dataclasses.replace(row, verdict_error=str(error))
    return dataclasses.replace(row, verdict=verdict)
