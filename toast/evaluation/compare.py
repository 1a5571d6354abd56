"""One program partitioned by several methods, all priced by the same cost model."""

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
from toast.evaluation.oracle import Verdict, check, judge
from toast.inputs import AnyHardware, AnyMesh
from toast.models import Strategies
from toast.plan import Plan, spec_text
from toast.search import Round, Settings, noted_interrupts
from toast.space import Constraints, broken, resolve
from toast.units import listed

#: What there is to compare, in the order of the table.
METHODS = ("toast", "manual", "automap", "alpa", "shardy")


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """What one method made of the program; all but ``error`` may be missing if it failed."""

    method: str
    #: Predicted, per device.
    step_seconds: float = float("nan")
    peak_bytes: float = float("nan")
    fits: bool = False
    #: What the step takes at least in every plan that the method may make: a roofline without
    #: collectives.  (Constraints are not for all methods.)
    bound_seconds: float = float("nan")
    cost: float = float("nan")
    #: States priced.
    states: int = 0
    #: What the method took; the analysis, which all stand on, is not in it.
    search_seconds: float = float("nan")
    note: str = ""
    #: The arguments and named values that are not as the user's constraints say.
    broken: tuple[str, ...] = ()
    #: Why there is no plan.
    error: str = ""
    verdict: Verdict | None = None
    #: Why there is no verdict, where one was asked for.
    verdict_error: str = ""
    plan: Plan | None = dataclasses.field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data, for JSON: shardings of arguments in place of the plan."""
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
    """An interrupt, with what there was before it."""

    def __init__(self, rows: list[MethodResult]) -> None:
        super().__init__("interrupted")
        self.rows = rows


def chosen(text: str) -> tuple[str, ...]:
    """The methods that ``"toast,alpa"`` names.

    Raises :class:`toast.errors.SearchError` for one there is not.

    >>> chosen("toast, alpa")
    ('toast', 'alpa')
    """
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in found:
        if name not in METHODS:
            near = difflib.get_close_matches(name.lower(), METHODS, 2)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise SearchError(f"no method named {name}; {hint}known: {', '.join(METHODS)}")
    if not found:
        raise SearchError(f"no method; use some of {', '.join(METHODS)}")
    return found


def compare(
    analysis: Analysis,
    mesh: AnyMesh,
    hardware: AnyHardware,
    methods: Sequence[str] = METHODS,
    *,
    strategies: Strategies | None = None,
    limit: float = 60.0,
    memory_bytes: float | None = None,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    settings: Settings | None = None,
    oracle: Literal["tpu"] | None = None,
    timeout: float = 600.0,
    progress: Callable[[str], None] | None = None,
) -> list[MethodResult]:
    """Partition a program by each of ``methods``.

    ``strategies`` are what experts write for it; without them ``manual`` has a row that says so.
    ``limit`` ends AutoMap and Alpa, in seconds from their beginning, with the best that they have;
    what is under way then (a propagation, the building of Alpa's program) is finished.
    ``settings`` are those of TOAST's search; AutoMap has their seed.

    ``constraints`` go to all methods.  TOAST, ``manual`` and ``alpa`` hold them; ``automap`` and
    ``shardy`` hold what they say of arguments as far as propagation, which knows none, leaves it.
    A row whose plan does not hold them says so, and where (``broken``).

    With ``oracle="tpu"`` XLA's compiler judges every plan, for at most ``timeout`` seconds each.  A
    method, or a compile, that fails costs its row only.

    Raises :class:`Interrupted` for an interrupt, :class:`toast.errors.MeshError` when no dimension
    can use the mesh, :class:`toast.errors.PinError` when a constraint cannot hold, and what
    :func:`toast.evaluation.oracle.judge` raises where there is no compiler.
    """
    methods = chosen(",".join(methods))
    tell = progress or (lambda _stage: None)
    mesh, hardware = inputs.system_of(mesh, hardware)
    # A plan that does not fit has a row like any other: the limit is the device's here.
    limit_bytes = inputs.limit_of(memory_bytes, hardware)
    hardware = dataclasses.replace(hardware, memory_limit_bytes=limit_bytes)
    if oracle:
        check(hardware)
    api.check_mesh(analysis, mesh, hardware)
    said, settings = constraints or Constraints(), settings or Settings()
    resolve(analysis, mesh, said)  # complain before the long work

    def announce(event: str | Round) -> None:
        if isinstance(event, str):
            tell(f"{method}: {event}")
        else:
            tell(f"{method}: round {event.number + 1}, {event.states} states, {event.cost:.4g}")

    makers: dict[str, Callable[[], Plan]] = {
        "toast": lambda: api.plan(
            analysis, mesh=mesh, hardware=hardware, overlap=overlap,
            constraints=said, settings=settings, progress=announce,
        ),
        "manual": lambda: manual(
            analysis, mesh, hardware, strategies or {}, overlap=overlap, constraints=said,
            progress=announce,
        ),
        "automap": lambda: automap(
            analysis, mesh, hardware, seed=settings.seed, budget=limit, overlap=overlap,
            constraints=said, progress=announce,
        ),
        "alpa": lambda: alpa(
            analysis, mesh, hardware, time_limit=limit, overlap=overlap, constraints=said,
            progress=announce,
        ),
        "shardy": lambda: shardy(analysis, mesh, hardware, overlap=overlap, constraints=said),
    }  # fmt: skip
    rows: list[MethodResult] = []
    try:
        with noted_interrupts(raising=True) as interrupt:
            for method in methods:
                announce("begins")
                rows.append(_row(method, makers[method], said))
                plan = rows[-1].plan
                # Its search knows interrupts itself.
                if plan and "interrupted" in re.split(r", |\n", plan.note):
                    raise KeyboardInterrupt
                if interrupt.is_set():
                    raise KeyboardInterrupt
                if oracle and plan:
                    announce("compiling")
                    rows[-1] = _judged(rows[-1], plan, timeout)
    except KeyboardInterrupt:
        raise Interrupted(rows) from None
    return rows


def _row(method: str, make: Callable[[], Plan], constraints: Constraints) -> MethodResult:
    begin = time.perf_counter()
    try:
        plan = make()
    except PinError:  # of what cannot hold there is nothing to compare
        raise
    except ToastError as error:
        spent = time.perf_counter() - begin
        return MethodResult(method, search_seconds=spent, error=str(error))
    spent = time.perf_counter() - begin
    places = broken(plan.analysis, plan.mesh, constraints, plan.op_state)
    if places:
        said = f"does not hold the constraints: {listed(places)}"
        plan = dataclasses.replace(plan, note=", ".join(filter(None, (plan.note, said))))
    return MethodResult(
        method,
        step_seconds=plan.after.step_seconds,
        peak_bytes=plan.after.peak_bytes,
        fits=plan.fits,
        bound_seconds=plan.bound_seconds,
        cost=plan.cost,
        states=plan.states,
        search_seconds=spent,
        note=plan.note,
        broken=places,
        plan=plan,
    )


def _judged(row: MethodResult, plan: Plan, timeout: float) -> MethodResult:
    try:
        verdict = judge(plan.analysis.program, plan.shardings, plan.hardware, timeout=timeout)
    except (PlanError, HardwareError) as error:
        return dataclasses.replace(row, verdict_error=str(error))
    return dataclasses.replace(row, verdict=verdict)
