"""Apply a plan to a changed program: what still matches, and the new price.

First, the plan's actions are matched by the dimensions that they shard; they also shard new ops.
Then the ops and arguments that the plan contains get their shardings from it.  On the program and
mesh of the plan, the result is the same plan with the same predictions.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from toast.analysis import analyzed
from toast.cost import CostModel
from toast.errors import PinError, PlanError
from toast.frontend.shifts import with_shifts
from toast.hardware import Hardware, Mesh
from toast.paths import folded
from toast.plan.files import (
    Held,
    OpKey,
    Run,
    Saved,
    SavedAction,
    hardware_digest,
    keyed_ops,
    read,
)
from toast.plan.labels import action_labels, shown_labels
from toast.plan.make_plan import make_plan
from toast.plan.matching import Offered
from toast.plan.plan import Plan, Step
from toast.plan.prediction import Prediction
from toast.program import Program, Spec
from toast.records import Record
from toast.search import SearchResult
from toast.space import NONE, Action, Constraints, Space, States
from toast.uneven import padded_program
from toast.units import listed, size_text, time_text

if TYPE_CHECKING:
    from toast.analysis import Analysis

#: Number of characters of a program's hash in messages.
_HASH = 8

#: Ops that carry values through loops, and into what runs again.
_PASSING = frozenset({
    "carry", "yield", "dynamic_slice", "dynamic_update_slice", "optimization_barrier",
})  # fmt: skip

#: What the path of an op has in blocks, and if the op runs again.
_BLOCK, _AGAIN = "/checkpoint/", "/rematted_computation/"
_GRADIENT = re.compile(r"(transpose)\((?:jvp\()+([^()]*)\)+")

OpState = npt.NDArray[np.int8]


@dataclasses.dataclass(frozen=True)
class ArgumentChange:
    """An argument whose sharding differs from that in the plan."""

    #: The path of the argument.
    argument: str
    #: The sharding in the plan.
    saved: Spec
    #: The sharding in the program.
    applied: Spec
    #: Why the sharding is another.
    why: str


@dataclasses.dataclass(frozen=True)
class Applied(Record):
    """The result of applying a plan to a program, and what did not match."""

    #: The plan for the program.
    plan: Plan
    #: The contents of the file, with its old prediction (``saved.after``).
    saved: Saved
    #: Whether the program is that of the plan.
    same_program: bool
    #: Arguments of the plan that the program does not have.
    gone: tuple[str, ...]
    #: Arguments of the program that the plan does not have, with the shardings of the actions.
    new: tuple[tuple[str, Spec], ...]
    #: Arguments that share a path, or a pattern of paths, with the plan.
    matched: tuple[str, ...]
    #: Arguments with another sharding than in the plan.
    changed: tuple[ArgumentChange, ...]
    #: Actions without a match, as text.
    actions_gone: tuple[str, ...]
    #: The number of ops with the plan's shardings, and of all ops, without arguments and results.
    ops_matched: int
    #: The number of all ops, without arguments and results.
    ops: int
    #: Notes, one line each.
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return (
            f"<Applied {self.saved.name}: {len(self.matched):,} of "
            f"{len(self.plan.analysis.program.arguments):,} arguments matched, "
            f"{len(self.changed):,} changed, {len(self.gone):,} gone; {self.plan!r}>"
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes and the actions without a match, one line each."""
        return (*self.notes, *(f"no match: {text}" for text in self.actions_gone))

    def to_dict(self) -> dict[str, Any]:
        """The matches and differences as plain data, for JSON."""
        return {
            "plan": self.saved.name,
            "same_program": self.same_program,
            "gone": list(self.gone),
            "new": {path: [list(axes) for axes in spec] for path, spec in self.new},
            "matched": list(self.matched),
            "changed": [dataclasses.asdict(change) for change in self.changed],
            "actions_gone": list(self.actions_gone),
            "ops_matched": self.ops_matched,
            "ops": self.ops,
            "notes": list(self.notes),
            "saved": dataclasses.asdict(self.saved.after),
        }


def apply_saved(
    saved: Saved,
    analysis: Analysis,
    *,
    mesh: Mesh,
    hardware: Hardware,
    memory_bytes: float,
    safety: float | None = None,
    progress: Callable[[str], None] | None = None,
    cache: bool = True,
) -> Applied:
    """Apply a saved plan to a program.

    ``memory_bytes`` is the limit per device, ``safety`` the odds with which the plan must fit, if
    any.  ``progress`` is called with the name of each stage.
    ``cache`` enables the cache of cost tables.  Raises :class:`toast.errors.PlanError` if no
    argument matches, or if the mesh has none of the plan's axes.
    """
    begin = time.perf_counter()
    report_stage = progress or (lambda _stage: None)
    program, padding_notes = analysis.program, []
    if saved.lowering == "local":
        program = with_shifts(program)
    if saved.padding and not program.padding:
        if program is not analysis.program:
            analysis = analyzed(program, rules=analysis.rule_files, lowering=saved.lowering)
        larger = padded_program(analysis, mesh, 1.0, only=saved.padding)
        program = larger.program if larger else program
        lost_padding = [str(d) for d in saved.padding if d not in program.padding]
        if lost_padding:
            padding_notes.append(f"not padded, as in the plan: {listed(lost_padding, 3)}")
    if analysis.lowering != saved.lowering or program is not analysis.program:
        analysis = analyzed(
            program, rules=analysis.rule_files, progress=report_stage, lowering=saved.lowering
        )
    report_stage("decision space")
    same = saved.is_of(program)
    check_axes(saved, mesh)
    space, notes = _space(saved, analysis, mesh)
    exact = same and mesh.real.axes == saved.mesh.real.axes and not notes
    offered = Offered(space)
    wanted = [(n, action) for n, action in enumerate(saved.actions, 1) if action.axis]
    matches: list[tuple[Action, bool]] = []
    lost = []
    state = space.pinned
    for number, step in wanted if saved.replayed else []:
        action = offered.exactly(step)
        if action is None and (action := offered.nearest(step)) is not None:
            notes.append(_nearly(space, step, action))
        if action is None:
            lost.append(_action_text(step))
            continue
        after = space.apply(state, action)
        if not exact and (after == state).all():
            notes.append(f"step {number}, {_action_text(step)}: has no effect on this program")
            continue
        state = after
        matches.append((action, step.fixed))
    actions = tuple(action for action, _ in matches)
    initial = space.of_ops(state)
    work = Work(saved, space, initial.copy(), exact)
    known = work.ops()
    work.arguments()
    if not same and not work.matched:
        _check_match(saved, program, bool(matches or work.sharded))
    notes = [*padding_notes, *_setting_notes(saved, program, mesh, hardware), *notes]
    report_stage("prices")
    price = _Pricing(saved, actions, hardware, memory_bytes, safety, cache)
    best = price(space, work.state)
    if matches and not exact:
        anew = Work(saved, space, initial.copy(), exact)
        anew.arguments()
        other = price(space, anew.state, best.model)
        if other.rank < best.rank:
            best = other
            notes.append("values have the shardings of the actions; those of the plan cost more")
    fixed = next((i for i, (_, fix) in enumerate(matches) if not fix), len(matches))
    best.model.space.begin_with(best.actions[:fixed])
    spent = time.perf_counter() - begin
    search = SearchResult(
        best.actions[fixed:], best.state, best.rank[1], saved.states, spent, saved.rounds
    )
    result = make_plan(
        best.model, search,
        memory_bytes=memory_bytes, seed=saved.seed,
        seconds={**analysis.seconds, "plan applied": spent},
        method=saved.method, note=saved.note, resolution=resolution_of(saved),
    )  # fmt: skip
    if same and not saved.replayed and mesh.real == saved.mesh.real:
        result = dataclasses.replace(result, steps=tuple(map(_step, saved.actions)))
    if same and mesh.real == saved.mesh.real and hardware_digest(hardware) == saved.hardware_digest:
        notes += _price_notes(saved.after, result.after)
        if memory_bytes == saved.memory_bytes:
            bound = saved.policies_bound_seconds
            result = dataclasses.replace(result, policies_bound_seconds=bound)
    applied = result.arguments
    changes = tuple(
        ArgumentChange(path, spec, applied[path], why or "the axis is used elsewhere")
        for path, (spec, why) in work.specs.items()
        if space.full_mesh.sharding(applied[path]) != space.full_mesh.sharding(spec)
    )
    return Applied(
        plan=result,
        saved=saved,
        same_program=same,
        gone=tuple(path for path in saved.arguments if path not in applied),
        new=tuple((path, spec) for path, spec in applied.items() if path not in work.specs),
        matched=tuple(work.matched),
        changed=changes,
        actions_gone=tuple(lost),
        ops_matched=int((known & (result.op_state == work.wanted).all(axis=1)).sum()),
        ops=len(program.ops) - len(program.arguments) - len(program.results),
        notes=tuple(notes),
    )


def here(plan: Plan) -> Plan:
    """:meth:`toast.Plan.here`."""
    program = getattr(plan.analysis.program.source, "here", None)
    if program is None:
        return plan
    if plan.lowering == "local":
        program = with_shifts(program)
    analysis = analyzed(program, lowering=plan.lowering)
    limit = plan.memory_bytes
    applied = apply_saved(
        read(plan), analysis, mesh=plan.mesh, hardware=plan.hardware, memory_bytes=limit,
        safety=plan.safety,
    )  # fmt: skip
    return applied.plan


def _check_match(saved: Saved, program: Program, sharded: bool) -> None:
    """Raise :class:`toast.errors.PlanError` for a program without the arguments of the plan.

    A few actions and ops are alike in any two programs.  Where one of them has no arguments, these
    must do: ``sharded`` is whether there are any.
    """
    if saved.arguments and program.arguments:
        missing = f"it has no argument of the plan, such as {listed([*saved.arguments], 2)}"
    elif not sharded:
        missing = "no action or sharded op is the same"
    else:
        return
    raise PlanError(
        f"{saved.name} is a plan of {saved.program} and does not match {program.name}: {missing}; "
        "use the program of the plan"
    )


def check_axes(saved: Saved, mesh: Mesh) -> None:
    """Raise :class:`toast.errors.PlanError` if a mesh has none of the axes of a plan."""
    used = {axis for entry in saved.arguments.values() for axes in entry.spec for axis in axes}
    used |= {action.axis for action in saved.actions} - {""}
    if used and not used & set(mesh.names):
        raise PlanError(
            f"{saved.name}: mesh {mesh} lacks the plan's axes {', '.join(sorted(used))}; "
            f"name its axes as in {saved.mesh}"
        )


class _Priced(NamedTuple):
    model: CostModel
    state: States
    actions: tuple[Action, ...]
    #: Whether it does not fit, then its cost; smaller is better.
    rank: tuple[bool, float]


class _Pricing:
    """Prices states that are given by op."""

    def __init__(
        self,
        saved: Saved,
        actions: tuple[Action, ...],
        hardware: Hardware,
        memory_bytes: float,
        safety: float | None,
        cache: bool,
    ) -> None:
        self._saved, self._actions, self._cache = saved, actions, cache
        self._hardware, self._memory, self._safety = hardware, memory_bytes, safety

    def __call__(self, space: Space, op_state: OpState, like: CostModel | None = None) -> _Priced:
        space, state, actions = _classed(op_state, space, self._actions, resolution_of(self._saved))
        overlap: Any = self._saved.overlap
        model = CostModel(
            space, self._hardware, overlap=overlap, like=like, keep=self._cache,
            safety=self._safety,
        )  # fmt: skip
        prices = model.price(state[None])
        cost = float(model.cost(prices, self._memory)[0])
        over = not model.fits(prices, self._memory)[0]
        return _Priced(model, state, actions, (over, cost))


def resolution_of(saved: Saved) -> Any:
    """The ``resolution`` of a saved plan, as for :class:`toast.space.Space`.

    Raises :class:`toast.errors.PlanError` for an unknown value.
    """
    if saved.resolution not in ("compatible", "independent"):
        raise PlanError(f"{saved.name}: unknown resolution {saved.resolution!r}")
    return saved.resolution


def _step(action: SavedAction) -> Step:
    return Step(action.dimensions, action.axis, action.resolution, action.after, action.reason)


def _action_text(action: SavedAction) -> str:
    shown = shown_labels(action.dimensions, 2) or "intermediate values"
    return f"{shown} along {action.axis}"


def _nearly(space: Space, wanted: SavedAction, action: Action) -> str:
    labels = action_labels(space, action)
    come = [label for label in labels if label not in wanted.labels]
    gone = [label for label in wanted.labels if label not in labels]
    parts = [f"now also shards {listed(come)}"] if come else []
    parts += [f"no longer shards {listed(gone)}"] if gone else []
    if action.resolution != wanted.resolution:
        here = "".join(map(str, action.resolution)) or "none"
        before = "".join(map(str, wanted.resolution)) or "none"
        parts.append(f"now has resolution order {here} instead of {before}")
    return f"action {_action_text(wanted)}: {', '.join(parts)}"


#: Prices with a smaller relative difference count as equal.
_SAME = 1e-3


def _setting_notes(saved: Saved, program: Program, mesh: Mesh, hardware: Hardware) -> Iterator[str]:
    """Notes on the differences between the settings of the plan and the current ones."""
    if not saved.digest:
        yield "the file does not state the program of the plan (version 1 of plan files)"
    elif saved.digest != program.origin_digest:
        yield (
            f"the plan is for another program (hash {saved.digest[:_HASH]}): {program.name} (hash "
            f"{program.origin_digest[:_HASH]}) has other ops, types or arguments"
        )
    if program.arguments and not saved.arguments:
        yield f"{saved.name} has no arguments: they get the shardings of the actions"
    if mesh.real != saved.mesh.real:
        yield f"the plan is for mesh {saved.mesh}"
    if hardware.name != saved.hardware:
        yield f"the plan is for {saved.hardware}"
    elif saved.hardware_digest and saved.hardware_digest != hardware_digest(hardware):
        yield f"the plan is for other figures of {saved.hardware}"


def _price_notes(was: Prediction, now: Prediction) -> Iterator[str]:
    """A note if the price of the same plan on the same hardware differs from the file."""
    changed = [
        f"{what} {text(new)}, was {text(old)}"
        for what, old, new, text in (
            ("step", was.step_seconds, now.step_seconds, time_text),
            ("peak", was.peak_bytes, now.peak_bytes, size_text),
        )
        if abs(new - old) > _SAME * max(old, new)
    ]
    if changed:
        yield (
            f"the prices of the plan have changed: {'; '.join(changed)}; possible reasons: other "
            "rules, another version of TOAST, or an edited file"
        )


def _space(saved: Saved, analysis: Analysis, mesh: Mesh) -> tuple[Space, list[str]]:
    """The space of the plan, without constraints that cannot hold, and notes on these."""

    def make(constraints: Constraints) -> Space:
        return Space(
            analysis, mesh, constraints=constraints, resolution=resolution_of(saved),
            collapse=not saved.single,
        )  # fmt: skip

    notes: list[str] = []
    constraints = saved.constraints
    if not constraints:
        return make(constraints), notes
    try:
        return make(constraints), notes
    except PinError:
        pass
    valid = Constraints(keep=constraints.keep)
    space = make(Constraints())
    for option in ("pin", "forbid", "fix"):
        for pattern, value in getattr(constraints, option).items():
            more: dict[str, Any] = {option: {**getattr(valid, option), pattern: value}}
            tried = dataclasses.replace(valid, **more)
            try:
                space, valid = make(tried), tried
            except PinError as error:
                notes.append(f"no longer holds: {error}")
    return space, notes


class Work:
    """The state of every op, while the plan's shardings are applied."""

    def __init__(
        self, saved: Saved, space: Space, state: OpState, exact: bool, *, recomputed: bool = False
    ) -> None:
        """With ``recomputed``, the programs differ only in what they recompute."""
        self.saved, self.space, self._exact, self._recomputed = saved, space, exact, recomputed
        self.state = state  # [ops, axes]
        #: ``[ops, axes]`` the plan's state of each op that it contains.
        self.wanted = np.full_like(state, NONE)
        #: ``[ops]`` the arguments and results with shardings in the plan.
        self.placed = np.zeros(len(state), dtype=bool)
        self._program = space.analysis.program
        self._pinned = space.of_ops(space.pinned) != NONE
        self._any_pinned = self._pinned.any(axis=1).tolist()
        self._op_class = space.classes.of_op.tolist()
        self._signature = space.analysis.names.signature.tolist()
        #: Rows of factors by signature and held axes, and by op class and wanted row; each with
        #: whether it is all of what is wanted.
        self._rows: dict[tuple[int, Held], tuple[tuple[int, ...], bool]] = {}
        self._fitting: dict[tuple[int, tuple[int, ...]], tuple[tuple[int, ...], bool]] = {}
        self._sizes = dict(space.mesh.axes)
        self._ones = {name for name, size in space.full_mesh.axes if name not in self._sizes}
        self.matched: list[str] = []
        #: The number of ops that the plan shards and that match by more than their kind.
        self.sharded = 0
        #: For each argument of the plan, its sharding and, if it is impossible, the reason.
        self.specs: dict[str, tuple[Spec, str]] = {}

    def ops(self) -> npt.NDArray[np.bool_]:
        """Apply the plan to the ops that it contains; returns ``[ops]`` which these are."""
        known = np.zeros(len(self.state), dtype=bool)
        here, there = keyed_ops(self._program), self.saved.ops
        ways: list[Callable[[OpKey], OpKey]] = [
            operator.attrgetter(way) for way in ("place", "loose", "looser")
        ]
        for known_by in [_outside_of_blocks, *ways] if self._recomputed else ways:
            ops: dict[OpKey, list[int]] = defaultdict(list)
            runs: dict[OpKey, list[Run]] = defaultdict(list)
            for key, numbers in here.items():
                ops[known_by(key)] += numbers
            for key, saved_runs in there.items():
                runs[known_by(key)] += saved_runs
            for key in runs.keys() & ops.keys():
                self._align(key, runs[key], sorted(ops[key]), known)
            here = {key: numbers for key, numbers in here.items() if known_by(key) not in runs}
            there = {
                key: saved_runs for key, saved_runs in there.items() if known_by(key) not in ops
            }
        return known

    def _align(
        self, key: OpKey, runs: Sequence[Run], ops: list[int], known: npt.NDArray[np.bool_]
    ) -> None:
        """Apply the plan to the ops of one key, one by one if their number is the same."""
        every = [run.held for run in runs for _ in range(run.count)]
        alike = math.gcd(len(every), len(ops))
        if len(every) == len(ops):
            states = every
        elif self._recomputed and key.kind in _PASSING:
            return  # other values are carried, or pass barriers
        elif self._recomputed and every == every[:alike] * (len(every) // alike):
            states = every[:alike] * (len(ops) // alike)  # other layers run again
        elif len({run.held for run in runs}) == 1:
            states = [runs[0].held] * len(ops)
        elif self.saved.replayed:
            return  # the actions shard these ops
        else:
            weights: Counter[Held] = Counter()
            for run in runs:
                weights[run.held] += run.count
            states = [weights.most_common(1)[0][0]] * len(ops)
        for op, held in zip(ops, states, strict=True):
            known[op] = self._hold(op, held)
            self.sharded += bool(known[op] and held and (key.path or key.label))

    def _hold(self, op: int, held: Held) -> bool:
        """Shard an op as in the plan; returns whether all axes could be set.

        Otherwise the op keeps the shardings of the plan's actions, if there are any.
        """
        if not held:
            self.wanted[op] = NONE
            if not self._any_pinned[op]:
                self.state[op] = NONE
                return True
        key = self._signature[op], held
        if key not in self._rows:
            self._rows[key] = self._row(*key)
        row, whole = self._rows[key]
        self.wanted[op] = row
        return self._set(op, row, whole) and whole

    def _row(self, signature: int, held: Held) -> tuple[tuple[int, ...], bool]:
        """The factor that each axis shards, and whether there is one for all axes of ``held``."""
        labels = [factor.label for factor in self.space.analysis.rules[signature].factors]
        row, whole = [NONE] * self.wanted.shape[1], True
        for axis, label in held:
            if axis in self._ones:
                continue
            if axis in self._sizes and label in labels:
                row[self.space.mesh.names.index(axis)] = labels.index(label)
            else:
                whole = False
        return tuple(row), whole

    def _set(self, op: int, wanted: Sequence[int], whole: bool = True) -> bool:
        """Set the axes of an op whose sizes divide; returns whether all are set.

        None are set if the op cannot have them together.
        """
        key = self._op_class[op], tuple(wanted)
        if key not in self._fitting:
            self._fitting[key] = self._fitted(*key)
        row, fits = self._fitting[key]
        whole &= fits
        if whole or self._recomputed or not self.saved.replayed:
            pinned = self._any_pinned[op]
            self.state[op] = np.where(self._pinned[op], self.state[op], row) if pinned else row
        return whole

    def _fitted(self, op_class: int, wanted: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The part of a row whose sizes divide, and whether it is all of it."""
        row, whole = [*wanted], True
        one = np.array([wanted], dtype=np.int8), np.array([op_class])
        if not self.space.restrictions.allow(*one).all():
            row, whole = [NONE] * len(row), False
        divisor = self.space.classes.divisor[op_class].tolist()
        shards: dict[int, int] = {}
        for axis, (factor, size) in enumerate(zip(row, self.space.mesh.sizes, strict=True)):
            if factor == NONE:
                continue
            if not self._exact and divisor[factor] % (shards.get(factor, 1) * size):
                row[axis], whole = NONE, False
            else:
                shards[factor] = shards.get(factor, 1) * size
        return tuple(row), whole

    def arguments(self) -> None:
        """Apply the shardings of arguments and results by path, or by pattern of paths."""
        program, saved = self._program, self.saved
        like: dict[str, set[Spec]] = defaultdict(set)
        for path, entry in saved.arguments.items():
            like[folded(path)].add(entry.spec)
        for op, path in enumerate(program.arguments):
            exact = saved.arguments.get(path)
            alike = like.get(folded(path), set())
            spec = exact.spec if exact else next(iter(alike)) if len(alike) == 1 else None
            if spec is not None:
                self.matched.append(path)
                self.specs[path] = spec, self._shard(op, program.argument_values[op], spec)
        first = len(program.ops) - len(program.results)
        for number, path in enumerate(program.results):
            if path in saved.results and program.aliases[number] < 0:
                self._shard(first + number, program.result_values[number], saved.results[path])

    def _shard(self, op: int, value: int, spec: Spec) -> str:
        """Shard an argument or result; returns ``""``, or why the sharding is impossible."""
        type_ = self._program.values[value].type
        shape = type_.shape
        if len(spec) != len(shape):
            return f"its rank is {len(shape)} now, {len(spec)} in the plan"
        if 0 in shape:
            return ""
        row, why = [NONE] * len(self._sizes), ""
        for d, axes in enumerate(spec):
            shards = math.prod(self._sizes.get(axis, 1) for axis in axes)
            missing = [axis for axis in axes if axis not in self._sizes and axis not in self._ones]
            if missing:
                why = f"mesh {self.space.full_mesh} has no axis {', '.join(missing)}"
            elif shape[d] % shards:
                why = f"{shards} devices ({', '.join(axes)}) do not divide dimension {d} of {type_}"
            for axis in axes:
                if axis in self._sizes:
                    row[self.space.mesh.names.index(axis)] = d
        self.placed[op], self.wanted[op] = True, row
        self._set(op, row)
        return why


def _outside_of_blocks(key: OpKey) -> OpKey:
    """The key of an op as if there were no block around it, unless it runs again in one.

    The gradient of ``NAME`` is ``transpose(jvp(NAME))`` there, and else
    ``transpose(jvp(jvp()))/checkpoint/NAME``.
    """
    path = key.path
    if _AGAIN not in path:
        path = _GRADIENT.sub(r"\1/\2", path.replace(_BLOCK, "/")).replace("//", "/")
    return key.place._replace(path=path)


def by_class(op_state: OpState, space: Space) -> tuple[States, npt.NDArray[np.bool_], bool]:
    """A state by op as a state by class.

    Returns the state, ``[ops]`` which ops determine it, and whether it is equal to ``op_state``.
    It is not if ops of one class have different states.
    """
    program, of_op = space.analysis.program, space.classes.of_op
    matters = np.ones(len(program.ops), dtype=bool)
    first = len(program.ops) - len(program.results)
    for result, alias in enumerate(program.aliases):
        matters[first + result] = (
            alias < 0
        )  # otherwise it has the sharding of the argument that it overwrites
    ops = np.arange(len(of_op))
    chosen = space.classes.representative.copy()
    chosen[of_op[matters][::-1]] = ops[matters][::-1]
    state = op_state[chosen]
    return state, matters, bool((space.of_ops(state) == op_state)[matters].all())


def _classed(
    op_state: OpState, space: Space, actions: Sequence[Action], resolution: Any
) -> tuple[Space, States, tuple[Action, ...]]:
    """The state by op class or, if ops of one class have different states, by op."""
    of_op = space.classes.of_op
    state, _, alike = by_class(op_state, space)
    if alike:
        return space, state, tuple(actions)
    single = Space(
        space.analysis, space.full_mesh, constraints=space.constraints, resolution=resolution,
        collapse=False,
    )  # fmt: skip
    spread = tuple(
        action._replace(part=tuple(
            (op, factor) for k, factor in action.part for op in np.flatnonzero(of_op == k).tolist()
        ))
        for action in actions
    )  # fmt: skip
    return single, op_state, spread
