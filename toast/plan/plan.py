"""The plan: what the search found, why, what it costs, and how to run it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from toast import apply
from toast.analysis import Analysis
from toast.analysis.query import evaluate, prepare
from toast.analysis.vocabulary import Relations
from toast.apply import Shardings, Spec, Verification
from toast.cost import Breakdown, CostModel, Prices, Timeline, Transfer, break_down
from toast.errors import PlanError
from toast.files import write_all
from toast.frontend import Program, element_bytes
from toast.hardware import COLLECTIVES, Hardware, Mesh
from toast.plan import relations
from toast.plan.shard import shardings_of
from toast.search import Found, Round, Tried
from toast.space import Action, Space
from toast.units import size_text, time_text

#: Version of the JSON that :meth:`Plan.to_json` writes.
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step, per device."""

    kind: str
    count: int
    bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the cost model says of one state, per device."""

    step_seconds: float
    matmul_seconds: float
    memory_seconds: float
    peak_bytes: float
    argument_bytes: float
    collectives: tuple[Collective, ...]
    #: Of the collectives, what products run beside.
    hidden_seconds: float = 0.0
    #: What a device sends in collectives.
    sent_bytes: float = 0.0
    #: Of results, those in donated arguments included.
    output_bytes: float = 0.0

    @staticmethod
    def of(prices: Prices, index: int = 0) -> Prediction:
        """State ``index`` of a batch of prices."""
        return Prediction(
            step_seconds=float(prices.seconds[index]),
            matmul_seconds=float(prices.matmul_seconds[index]),
            memory_seconds=float(prices.memory_seconds[index]),
            peak_bytes=float(prices.peak_bytes[index]),
            argument_bytes=float(prices.argument_bytes[index]),
            collectives=tuple(
                Collective(
                    kind,
                    round(float(prices.collective_count[index, k])),
                    float(prices.collective_bytes[index, k]),
                    float(prices.collective_seconds[index, k]),
                )
                for k, kind in enumerate(COLLECTIVES)
            ),
            hidden_seconds=float(prices.hidden_seconds[index]),
            sent_bytes=float(prices.sent_bytes[index]),
            output_bytes=float(prices.output_bytes[index]),
        )

    @property
    def collective_seconds(self) -> float:
        """Seconds in collectives."""
        return sum(c.seconds for c in self.collectives)


@dataclasses.dataclass(frozen=True)
class Step:
    """One action of the plan with what it did."""

    #: Argument dimensions of the color, layers folded: ``params['layers'][*]['gate']:1``.
    dimensions: tuple[str, ...]
    axis: str
    #: Bit per resolution group; empty where the color has no conflicts.
    resolution: tuple[int, ...]
    after: Prediction
    reason: str
    #: Of a refinement: the op classes that it reaches, each with the factor that takes the axis.
    part: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ArgumentRow:
    """Arguments of one group (4.4) with one sharding."""

    #: Their paths, positions in lists folded: ``params['layers'][*]['gate']``.
    patterns: tuple[str, ...]
    count: int
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    #: Bytes of all of them on one device.
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A sharding of a program on a mesh: shardings, predictions, reasons; and how to run it."""

    analysis: Analysis
    mesh: Mesh
    hardware: Hardware
    memory_bytes: float
    shardings: Shardings
    steps: tuple[Step, ...]
    before: Prediction
    after: Prediction
    cost: float
    states: int
    rounds: tuple[Round, ...]
    seed: int
    #: Memory of a device in program order, with what is alive at the peak.
    timeline: Timeline = dataclasses.field(compare=False, repr=False)
    #: Seconds of a step by op.
    breakdown: Breakdown = dataclasses.field(compare=False, repr=False)
    #: Both of the unsharded program.
    timeline_before: Timeline = dataclasses.field(compare=False, repr=False)
    breakdown_before: Breakdown = dataclasses.field(compare=False, repr=False)
    #: Every collective, by what it moves, with the algorithm that it is priced with.
    transfers: tuple[Transfer, ...] = dataclasses.field(repr=False)
    #: Seconds per stage.
    seconds: dict[str, float] = dataclasses.field(compare=False)
    #: What made it: TOAST's search, or a baseline.
    method: str = "toast"
    #: What else there is to know of it, such as that its search ran out of time.
    note: str = ""
    #: How every mesh did, where a number of devices was given and no mesh.
    meshes: tuple[Tried, ...] = dataclasses.field(default=(), repr=False)
    #: Seconds that the step of every plan on this mesh and hardware takes at least.
    bound_seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory limit."""
        return self.after.peak_bytes <= self.memory_bytes

    # -- shardings ---------------------------------------------------------------------------

    @functools.cached_property
    def arguments(self) -> dict[str, Spec]:
        """The sharding of each argument: mesh axes per dimension."""
        program = self.analysis.program
        return {
            name: self.shardings.values.get(value, ((),) * len(program.values[value].type.shape))
            for name, value in zip(program.arguments, program.argument_values, strict=True)
        }

    def argument_table(self) -> tuple[ArgumentRow, ...]:
        """Arguments by group and sharding, those with most bytes on the device first."""
        program, analysis = self.analysis.program, self.analysis
        rows: dict[Any, list[str]] = {}
        for index, (name, spec) in enumerate(self.arguments.items()):
            type_ = program.values[program.argument_values[index]].type
            rows.setdefault((int(analysis.argument_group[index]), type_, spec), []).append(name)
        sizes = dict(self.mesh.axes)
        table = []
        for (_, type_, spec), names in rows.items():
            shards = int(np.prod([sizes[a] for axes in spec for a in axes], dtype=np.int64))
            size = int(np.prod(type_.shape, dtype=np.int64)) * element_bytes(type_.dtype)
            patterns = tuple(dict.fromkeys(map(folded, names))) if len(names) > 1 else (names[0],)
            table.append(
                ArgumentRow(
                    patterns, len(names), type_.shape, type_.dtype, spec,
                    size // shards * len(names),
                )
            )  # fmt: skip
        return tuple(sorted(table, key=lambda row: -row.device_bytes))

    def argument_frame(self) -> pd.DataFrame:
        """``argument, shape, dtype, spec``: one row per argument."""
        program = self.analysis.program
        types = [program.values[v].type for v in program.argument_values]
        return pd.DataFrame(
            {
                "argument": list(self.arguments),
                "shape": [t.shape for t in types],
                "dtype": [t.dtype for t in types],
                "spec": [spec_text(spec) for spec in self.arguments.values()],
            }
        )

    # -- queries -----------------------------------------------------------------------------

    @functools.cached_property
    def vocabulary(self) -> Relations:
        """What queries are given."""
        return relations.relations(self)

    def query(
        self, body: str | pathlib.Path, *, rules: Sequence[str | pathlib.Path] = ()
    ) -> pd.DataFrame:
        """:meth:`Analysis.query`, with the relations of the mesh and of the plan as well."""
        return evaluate(prepare(body, rules), self.vocabulary, self.analysis.label)

    # -- running -----------------------------------------------------------------------------

    @property
    def in_shardings(self) -> Any:
        """PartitionSpecs in the structure of the arguments, as ``jax.jit(in_shardings=...)`` takes.

        ``jax.jit`` with these alone leaves intermediate values to XLA; :meth:`jit` does not.  With
        keyword arguments it is the pair of positional and keyword shardings.
        """
        return apply.in_shardings(self.analysis.program, self.shardings)

    @property
    def out_shardings(self) -> Any:
        """PartitionSpecs in the structure of the result, for ``jax.jit(out_shardings=...)``."""
        return apply.out_shardings(self.analysis.program, self.shardings)

    def jit(self, mesh: Any = None) -> Callable[..., Any]:
        """The sharded program as a function that XLA compiles and runs.

        ``mesh`` is a ``jax.sharding.Mesh`` of the plan's shape, whose order of devices is kept, or
        a list of as many devices (default: the first of ``jax.devices()``).  The function takes and
        returns the pytrees of the one that was planned; for a program from a file, flat arguments
        and a list.  Raises :class:`toast.errors.PlanError` when there are too few devices.
        """
        runnable: Callable[..., Any] = apply.callable_of(
            self.analysis.program, self.shardings, devices=mesh
        )
        return runnable

    def annotated(self) -> str:
        """StableHLO text with the plan as Shardy annotations."""
        module = apply.annotate(self.analysis.program, self.shardings)
        return str(module.operation.get_asm(enable_debug_info=True))

    def verify(self, *, seed: int = 0) -> Verification:
        """Run the program sharded and unsharded on small random inputs and compare outputs."""
        return apply.verify(self.analysis.program, self.shardings, seed=seed)

    # -- files -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return {
            "version": VERSION,
            "program": self.analysis.program.name,
            "method": self.method,
            "note": self.note,
            "mesh": dict(self.mesh.axes),
            "device_order": list(self.mesh.order or self.mesh.names),
            "hardware": self.hardware.name,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "cost": self.cost,
            "seed": self.seed,
            "arguments": {
                name: {"sharding": [list(axes) for axes in spec], "spec": spec_text(spec)}
                for name, spec in self.arguments.items()
            },
            "results": {
                name: [list(axes) for axes in spec]
                for name, spec in zip(
                    self.analysis.program.results, self.shardings.results, strict=True
                )
            },
            "reshards": len(self.shardings.uses),
            "actions": [
                {
                    "dimensions": list(step.dimensions),
                    "axis": step.axis,
                    "resolution": list(step.resolution),
                    "part": step.part,
                    "reason": step.reason,
                    "after": dataclasses.asdict(step.after),
                }
                for step in self.steps
            ],
            "collectives": [dataclasses.asdict(transfer) for transfer in self.transfers],
            "memory": self._memory(),
            "before": dataclasses.asdict(self.before),
            "after": dataclasses.asdict(self.after),
            "bound_seconds": self.bound_seconds,
            "analysis": self.analysis.counts(),
            "search": {
                "states": self.states,
                "rounds": [dataclasses.asdict(r) for r in self.rounds],
            },
            "meshes": [
                {**dataclasses.asdict(tried), "mesh": dict(tried.mesh.axes)}
                for tried in self.meshes
            ],
            "seconds": self.seconds,
        }

    def at_peak(self) -> pd.DataFrame:
        """What is alive where a device needs most memory, the largest first.

        Columns: ``bytes`` per device, ``value`` (the op that makes it, with its source line),
        ``what`` of it (the value, a resharded copy ...), and the source lines where it begins and
        ends, or ``end of the step``.
        """
        program = self.analysis.program
        return pd.DataFrame([
            {
                "bytes": buffer.bytes,
                "value": describe_value(program, buffer.value),
                "what": buffer.what,
                "from": place_of(program, buffer.start),
                "to": place_of(program, buffer.end),
            }
            for buffer in self.timeline.at_peak
        ], columns=["bytes", "value", "what", "from", "to"])  # fmt: skip

    def _memory(self) -> dict[str, Any]:
        """The timeline as plain data: bytes after the last change before each op."""
        line, program = self.timeline, self.analysis.program
        last = np.flatnonzero(np.diff(line.op, append=len(program.ops) + 1))
        return {
            "argument_bytes": line.argument_bytes,
            "peak_bytes": line.peak_bytes,
            "peak_at": place_of(program, line.peak_op),
            "at_peak": self.at_peak().head(50).to_dict("records"),
            "op": line.op[last].tolist(),
            "live_bytes": line.live_bytes[last].tolist(),
        }

    def to_json(self, path: str | pathlib.Path) -> None:
        """Write :meth:`to_dict` to ``path``, whole or not at all."""
        write_all({path: self.json_text()}, PlanError)

    def json_text(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def describe_value(program: Program, value: int) -> str:
    """An argument by its path, another value by the op that makes it, with its source line."""
    op = program.values[value].op
    if op < len(program.arguments):
        return f"{program.arguments[op]} {program.values[value].type}"
    return program.describe(op)


def place_of(program: Program, op: int) -> str:
    """The source line of an op, or that the step is over: results are handed over then."""
    over = op >= len(program.ops) - len(program.results)
    return "end of the step" if over else str(program.location(max(op, 0)))


def make_plan(
    model: CostModel,
    found: Found,
    *,
    memory_bytes: float,
    seed: int,
    seconds: dict[str, float],
    method: str = "toast",
    note: str = "",
    meshes: tuple[Tried, ...] = (),
) -> Plan:
    """The plan for a search's result, every action replayed for its effect.

    A state that was found without actions, by a baseline, has no steps.
    """
    space = model.space
    states = [space.unsharded]
    pinned = (space.pinned != space.unsharded).any()
    if pinned:
        states.append(space.pinned)
    actions = (*space.begun, *found.actions)
    for action in actions:
        states.append(space.apply(states[-1], action))
    if (states[-1] != found.state).any():
        states.append(found.state)  # a baseline's, that no actions lead to
    prices = model.price(np.stack(states))
    predictions = [Prediction.of(prices, i) for i in range(len(states))]
    reasons = [
        reason_of(before, after, memory_bytes) for before, after in itertools.pairwise(predictions)
    ]
    own = ("the program's own shardings",) if space.constraints.keep else ()
    pins = [
        Step((*space.constraints.pin, *own), "", (), after, f"pinned: {reason}")
        for after, reason in zip(predictions[1 : 1 + pinned], reasons, strict=False)
    ]
    steps = tuple(pins) + tuple(
        Step(
            dimensions=dimension_labels(space, action),
            axis=space.mesh.names[action.axis],
            resolution=action.resolution,
            after=after,
            reason=f"fixed: {reason}" if i < len(space.begun) else reason,
            part=action.part,
        )
        for i, (action, after, reason) in enumerate(
            zip(actions, predictions[1 + pinned :], reasons[int(pinned) :], strict=False)
        )
    )
    return Plan(
        analysis=space.analysis,
        mesh=space.mesh,
        hardware=model.hardware,
        memory_bytes=memory_bytes,
        shardings=shardings_of(model, found.state),
        steps=steps,
        before=predictions[0],
        after=predictions[-1],
        cost=found.cost,
        states=found.states,
        rounds=found.rounds,
        seed=seed,
        timeline=model.timeline(found.state),
        breakdown=break_down(model, found.state),
        timeline_before=model.timeline(space.unsharded),
        breakdown_before=break_down(model, space.unsharded),
        transfers=tuple(model.transfers(found.state)),
        seconds=seconds,
        method=method,
        note=note,
        meshes=meshes,
        bound_seconds=model.lower_bound(),
    )


class Begun(NamedTuple):
    """An earlier plan in a decision space."""

    actions: tuple[Action, ...]
    #: Why they are not all of the plan's; empty if they are.
    missing: str


def actions_like(space: Space, plan: Plan | str | pathlib.Path) -> Begun:
    """The actions of ``space`` that do what those of an earlier plan, or of its JSON file, did.

    What has no counterpart is left out.  Raises :class:`toast.errors.PlanError` for a file that is
    no plan.
    """
    wanted = _steps_of(plan)
    labels = functools.cache(lambda action: dimension_labels(space, action))
    known = {
        (labels(action), space.mesh.names[action.axis], action.resolution): action
        for action in space.actions
    }
    found, missing = [], []
    for dimensions, axis, resolution, part in wanted:
        if part:
            action = _refinement(space, dimensions, axis, part)
        else:
            action = known.get((dimensions, axis, resolution))
        if action is not None:
            found.append(action)
        else:
            missing.append(f"{dimensions[0] if dimensions else 'nothing'} on {axis}")
    why = ""
    if missing:
        name = plan.analysis.program.name if isinstance(plan, Plan) else plan
        named = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        why = (
            f"start {name}: {len(missing)} of {len(wanted)} actions have no counterpart here: "
            f"{named}"
        )
    return Begun(tuple(found), why)


_Wanted = tuple[tuple[str, ...], str, tuple[int, ...], tuple[tuple[int, int], ...]]


def _steps_of(plan: Plan | str | pathlib.Path) -> list[_Wanted]:
    """Dimensions, axis, resolution and part of each step that shards something by an action."""
    if isinstance(plan, Plan):
        steps = [(s.dimensions, s.axis, s.resolution, s.part) for s in plan.steps]
        return [step for step in steps if step[1]]
    try:
        data = json.loads(pathlib.Path(plan).read_text(encoding="utf-8"))
        if data["version"] != VERSION:
            raise PlanError(
                f"{plan}: version {data['version']} of plans is not known; make it anew"
            )
        found = [
            (
                tuple(map(str, s["dimensions"])), str(s["axis"]), tuple(map(int, s["resolution"])),
                tuple((int(k), int(factor)) for k, factor in s["part"]),
            )
            for s in data["actions"]
        ]  # fmt: skip
    except OSError as error:
        raise PlanError(f"{plan}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PlanError(f"{plan} is no plan; give what --json wrote") from None
    return [step for step in found if step[1]]


def _refinement(
    space: Space, labels: tuple[str, ...], axis: str, part: tuple[tuple[int, int], ...]
) -> Action | None:
    """The same refinement here, if it reaches the same ops."""
    classes, factors = space.classes.divisor.shape
    if axis not in space.mesh.names or not all(
        0 <= k < classes and -1 <= factor < factors for k, factor in part
    ):
        return None
    action = Action(-1, (), space.mesh.names.index(axis), part)
    try:
        return action if dimension_labels(space, action) == labels else None
    except IndexError:  # a factor that the op does not have
        return None


def dimension_labels(space: Space, action: Action) -> tuple[str, ...]:
    """Argument dimensions an action's color reaches, layers folded; most elements first.

    Of a refinement, the ops that it reaches, each with the factor that takes the axis.
    """
    analysis = space.analysis
    program, names = analysis.program, analysis.names
    if action.part:
        return tuple(dict.fromkeys(_part_label(space, k, factor) for k, factor in action.part))
    members = space.names_of(action.color)
    members = members[names.name_op[members] < len(program.arguments)]
    weights: dict[str, float] = {}  # in the order of the arguments
    for name in members.tolist():
        op = int(names.name_op[name])
        type_ = program.values[program.ops[op].results[0]].type
        label = f"{folded(program.arguments[op])}:{name - int(names.first_name[op])}"
        weights[label] = weights.get(label, 0.0) + float(np.prod(type_.shape, dtype=np.float64))
    return tuple(sorted(weights, key=lambda label: -weights[label]))


def _part_label(space: Space, k: int, factor: int) -> str:
    """``dot_general:batching(0) at moe.py:169``; ``:-`` for an axis that is let go."""
    analysis, op = space.analysis, int(space.classes.representative[k])
    program = analysis.program
    rule = analysis.rules[analysis.names.signature[op]]
    label = rule.factors[factor].label if factor >= 0 else "-"
    if op < len(program.arguments):
        return f"{folded(program.arguments[op])}:{label}"
    place = program.location(op)
    at = f" at {pathlib.PurePath(place.file).name}:{place.line}" if place.file else ""
    return f"{program.kind(op)}:{label}{at}"


def spec_text(spec: Spec) -> str:
    """A sharding as JAX writes it: ``P('data', None, ('model', 'x'))``."""
    parts = [
        "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
        for axes in spec
    ]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"


def folded(name: str) -> str:
    """An argument path with its list positions folded: ``layers[3]`` is ``layers[*]``."""
    return re.sub(r"\[\d+\]", "[*]", name)


def reason_of(before: Prediction, after: Prediction, memory_bytes: float) -> str:
    """What the action gained and what it paid, in one line."""
    gains = {
        "matrix products": before.matmul_seconds - after.matmul_seconds,
        "memory traffic": before.memory_seconds - after.memory_seconds,
        "collectives": before.collective_seconds - after.collective_seconds,
    }
    parts = []
    best = max(gains, key=lambda what: gains[what])
    if gains[best] > 0.002 * before.step_seconds:
        parts.append(f"saves {time_text(gains[best])} of {best}")
    was, now = before.peak_bytes, after.peak_bytes
    peak = f"peak {size_text(was)} to {size_text(now)}"
    if was > memory_bytes and now < was:
        parts.append(f"{peak}, {'now fits' if now <= memory_bytes else 'still over the limit'}")
    elif now < 0.98 * was:
        parts.append(peak)
    paid = [
        f"{new.count - old.count} {new.kind}"
        for old, new in zip(before.collectives, after.collectives, strict=True)
        if new.count > old.count
    ]
    if paid:
        spent = after.collective_seconds - before.collective_seconds
        sign = "+" if spent >= 0 else "-"
        parts.append(f"adds {', '.join(paid)} ({sign}{time_text(abs(spent))})")
    if not parts and after.step_seconds < before.step_seconds:
        parts.append(f"saves {time_text(before.step_seconds - after.step_seconds)}")
    return "; ".join(parts) or "prepares a later action"
