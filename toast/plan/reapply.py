"""A plan on a program that has changed since: what still matches, and what it costs now.

First come the plan's actions, found again by the dimensions that they shard; they reach ops that
the plan has never seen.  Then every op that the plan knows is sharded as it was, and every
argument.  On the program and mesh that it was made for, that is the plan again, number by number.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from toast.cost import CostModel
from toast.errors import PinError, PlanError
from toast.hardware import Hardware, Mesh
from toast.plan.files import Held, OpKey, Run, Saved, SavedAction, hardware_digest, keyed_ops
from toast.plan.labels import action_labels, folded, shown_labels
from toast.plan.making import make_plan
from toast.plan.matching import Offered
from toast.plan.plan import Plan, Step
from toast.plan.prediction import Prediction
from toast.program import Program, Spec
from toast.records import Record
from toast.search import SearchResult
from toast.space import NONE, Action, Constraints, Space, States
from toast.units import listed, size_text, time_text

if TYPE_CHECKING:
    from toast.analysis import Analysis

#: Characters of a program's hash that messages show.
_HASH = 8

OpState = npt.NDArray[np.int8]


@dataclasses.dataclass(frozen=True)
class ArgumentChange:
    """An argument that is not sharded as the plan says."""

    argument: str
    #: What the plan says.
    saved: Spec
    #: What there is of it.
    applied: Spec
    why: str


@dataclasses.dataclass(frozen=True)
class Applied(Record):
    """A plan applied to a program that may have changed, and what did not match."""

    plan: Plan
    #: What the file says, its old prediction (``saved.after``) among it.
    saved: Saved
    #: Whether the program is the one that the plan was made for.
    same_program: bool
    #: Arguments of the plan that the program does not have.
    gone: tuple[str, ...]
    #: Arguments of the program that the plan does not know, with what its actions gave them.
    new: tuple[tuple[str, Spec], ...]
    #: Arguments that share a path, or a pattern of paths, with the plan's.
    matched: tuple[str, ...]
    changed: tuple[ArgumentChange, ...]
    #: Actions that have no counterpart, as text.
    actions_gone: tuple[str, ...]
    #: Ops, without arguments and results, that are sharded as the plan's; and all.
    ops_matched: int
    ops: int
    #: What else to know, a line each.
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return (
            f"<Applied {self.saved.name}: {len(self.matched):,} of "
            f"{len(self.plan.analysis.program.arguments):,} arguments matched, "
            f"{len(self.changed):,} changed, {len(self.gone):,} gone; {self.plan!r}>"
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to know of the plan where the rest is not shown, a line each."""
        return (*self.notes, *(f"no counterpart: {text}" for text in self.actions_gone))

    def to_dict(self) -> dict[str, Any]:
        """What matched and what did not, as plain data, for JSON."""
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
    progress: Callable[[str], None] | None = None,
    cache: bool = True,
) -> Applied:
    """Apply what a plan's file says to a program; ``cache`` says whether cost tables are kept.

    Raises :class:`toast.errors.PlanError` where nothing of it matches.
    """
    begin = time.perf_counter()
    tell = progress or (lambda _stage: None)
    tell("decision space")
    program = analysis.program
    same = saved.digest == program.digest
    check_axes(saved, mesh)
    space, notes = _space(saved, analysis, mesh)
    exact = same and mesh.axes == saved.mesh.axes and not notes
    offered = Offered(space)
    wanted = [(n, action) for n, action in enumerate(saved.actions, 1) if action.axis]
    found: list[tuple[Action, bool]] = []
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
            notes.append(f"step {number}, {_action_text(step)}: has no effect here")
            continue
        state = after
        found.append((action, step.fixed))
    actions = tuple(action for action, _ in found)
    begun = space.of_ops(state)
    work = Work(saved, space, begun.copy(), exact)
    known = work.ops()
    work.arguments()
    if not same and not found and not work.matched and not work.sharded:
        raise PlanError(
            f"{saved.name} is a plan of {saved.program} and does not match {program.name}: no "
            "argument, action or sharded op is the same; use the program of the plan"
        )
    notes = [*_setting_notes(saved, program, mesh, hardware), *notes]
    tell("prices")
    price = _Pricing(saved, actions, hardware, memory_bytes, cache)
    best = price(space, work.state)
    if found and not exact:
        anew = Work(saved, space, begun.copy(), exact)
        anew.arguments()
        other = price(space, anew.state, best.model)
        if other.rank < best.rank:
            best = other
            notes.append("values are sharded as the actions reach them: as in the plan costs more")
    fixed = next((i for i, (_, fix) in enumerate(found) if not fix), len(found))
    best.model.space.begin_with(best.actions[:fixed])
    spent = time.perf_counter() - begin
    made = make_plan(
        best.model, SearchResult(best.actions[fixed:], best.state, best.rank[1], 1, spent, ()),
        memory_bytes=memory_bytes, seed=saved.seed,
        seconds={**analysis.seconds, "plan applied": spent},
        method=saved.method, note=saved.note, resolution=resolution_of(saved),
    )  # fmt: skip
    if same and not saved.replayed and mesh == saved.mesh:
        made = dataclasses.replace(made, steps=tuple(map(_step, saved.actions)))
    if same and mesh == saved.mesh and hardware_digest(hardware) == saved.hardware_digest:
        notes += _price_notes(saved.after, made.after)
    applied = made.arguments
    changes = tuple(
        ArgumentChange(path, spec, applied[path], why or "something else has the axis")
        for path, (spec, why) in work.said.items()
        if applied[path] != spec
    )
    return Applied(
        plan=made,
        saved=saved,
        same_program=same,
        gone=tuple(path for path in saved.arguments if path not in applied),
        new=tuple((path, spec) for path, spec in applied.items() if path not in work.said),
        matched=tuple(work.matched),
        changed=changes,
        actions_gone=tuple(lost),
        ops_matched=int((known & (made.op_state == work.wanted).all(axis=1)).sum()),
        ops=len(program.ops) - len(program.arguments) - len(program.results),
        notes=tuple(notes),
    )


def check_axes(saved: Saved, mesh: Mesh) -> None:
    """Raise :class:`toast.errors.PlanError` where a mesh has none of the axes of a plan."""
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
    #: What fits goes before what does not, then the cost counts.
    rank: tuple[bool, float]


class _Pricing:
    """Prices states of ops, by class."""

    def __init__(
        self,
        saved: Saved,
        actions: tuple[Action, ...],
        hardware: Hardware,
        memory_bytes: float,
        cache: bool,
    ) -> None:
        self._saved, self._actions, self._cache = saved, actions, cache
        self._hardware, self._memory = hardware, memory_bytes

    def __call__(self, space: Space, op_state: OpState, like: CostModel | None = None) -> _Priced:
        space, state, actions = _classed(op_state, space, self._actions, resolution_of(self._saved))
        overlap: Any = self._saved.overlap
        model = CostModel(space, self._hardware, overlap=overlap, like=like, keep=self._cache)
        prices = model.price(state[None])
        cost = float(model.cost(prices, self._memory)[0])
        return _Priced(model, state, actions, (bool(prices.peak_bytes[0] > self._memory), cost))


def resolution_of(saved: Saved) -> Any:
    """How conflicts are resolved, as :class:`toast.space.Space` takes it."""
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
    parts = [f"it has {listed(come)} now"] if come else []
    parts += [f"it has {listed(gone)} no longer"] if gone else []
    if action.resolution != wanted.resolution:
        here = "".join(map(str, action.resolution)) or "none"
        parts.append(f"resolution {''.join(map(str, wanted.resolution)) or 'none'} is {here} here")
    return f"action {_action_text(wanted)}: {', '.join(parts)}"


#: Prices that differ by less are the same.
_SAME = 1e-3


def _setting_notes(saved: Saved, program: Program, mesh: Mesh, hardware: Hardware) -> Iterator[str]:
    """What is not as it was when the plan was made."""
    if not saved.digest:
        yield "the file does not say which program it was made for (version 1 of plans)"
    elif saved.digest != program.digest:
        yield (
            f"the plan was made for another program, {saved.digest[:_HASH]}: {program.name}, "
            f"{program.digest[:_HASH]}, has other ops, types or arguments"
        )
    if program.arguments and not saved.arguments:
        yield f"{saved.name} says nothing of arguments: they are sharded as the actions reach them"
    if mesh != saved.mesh:
        yield f"the plan was made for mesh {saved.mesh}"
    if hardware.name != saved.hardware:
        yield f"the plan was made for {saved.hardware}"
    elif saved.hardware_digest and saved.hardware_digest != hardware_digest(hardware):
        yield f"the plan was made with other figures of {saved.hardware}"


def _price_notes(was: Prediction, now: Prediction) -> Iterator[str]:
    """What the same plan on the same hardware costs now, where that is not what the file says."""
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
            f"the plan has other prices than when it was made: {'; '.join(changed)}: other rules, "
            "another version of TOAST, or an edited file"
        )


def _space(saved: Saved, analysis: Analysis, mesh: Mesh) -> tuple[Space, list[str]]:
    """The plan's space, without those of its constraints that cannot hold here."""

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
    kept = Constraints(keep=constraints.keep)
    space = make(Constraints())
    for option in ("pin", "forbid", "fix"):
        for pattern, said in getattr(constraints, option).items():
            more: dict[str, Any] = {option: {**getattr(kept, option), pattern: said}}
            tried = dataclasses.replace(kept, **more)
            try:
                space, kept = make(tried), tried
            except PinError as error:
                notes.append(f"no longer holds: {error}")
    return space, notes


class Work:
    """The state of every op, as it becomes the plan's."""

    def __init__(self, saved: Saved, space: Space, state: OpState, exact: bool) -> None:
        self.saved, self.space, self._exact = saved, space, exact
        self.state = state  # [ops, axes]
        #: What the plan says of each op that it knows: ``[ops, axes]``.
        self.wanted = np.full_like(state, NONE)
        #: Arguments and results whose shardings it says: ``[ops]``.
        self.placed = np.zeros(len(state), dtype=bool)
        self._program = space.analysis.program
        self._pinned = space.of_ops(space.pinned) != NONE
        self._sizes = dict(space.mesh.axes)
        self.matched: list[str] = []
        #: Ops that the plan shards, known by more than their kind.
        self.sharded = 0
        #: For each argument that the plan knows, what it says and why that cannot be.
        self.said: dict[str, tuple[Spec, str]] = {}

    def ops(self) -> npt.NDArray[np.bool_]:
        """Give every op that the plan knows its factors: ``[ops]`` which it knows."""
        known = np.zeros(len(self.state), dtype=bool)
        here, there = keyed_ops(self._program), self.saved.ops
        for known_by in map(operator.attrgetter, ("place", "loose", "looser")):
            ops: dict[OpKey, list[int]] = defaultdict(list)
            runs: dict[OpKey, list[Run]] = defaultdict(list)
            for key, found in here.items():
                ops[known_by(key)] += found
            for key, said in there.items():
                runs[known_by(key)] += said
            for key in runs.keys() & ops.keys():
                self._align(key, runs[key], sorted(ops[key]), known)
            here = {key: found for key, found in here.items() if known_by(key) not in runs}
            there = {key: said for key, said in there.items() if known_by(key) not in ops}
        return known

    def _align(
        self, key: OpKey, runs: Sequence[Run], ops: list[int], known: npt.NDArray[np.bool_]
    ) -> None:
        """Give ops of one key what the plan says of them, one by one where their number agrees."""
        if sum(run.count for run in runs) == len(ops):
            said = [run.held for run in runs for _ in range(run.count)]
        elif len({run.held for run in runs}) == 1:
            said = [runs[0].held] * len(ops)
        elif self.saved.replayed:
            return  # the actions know better
        else:
            weights: Counter[Held] = Counter()
            for run in runs:
                weights[run.held] += run.count
            said = [weights.most_common(1)[0][0]] * len(ops)
        for op, held in zip(ops, said, strict=True):
            known[op] = self._hold(op, held)
            self.sharded += bool(known[op] and held and (key.path or key.label))

    def _hold(self, op: int, held: Held) -> bool:
        """Shard an op as the plan says; whether that goes all the way.

        If not, the plan's actions know better, if it has any.
        """
        if not held:
            self.wanted[op] = NONE
            if not self._pinned[op].any():
                self.state[op] = NONE
                return True
        analysis = self.space.analysis
        labels = [f.label for f in analysis.rules[analysis.names.signature[op]].factors]
        row, whole = [NONE] * len(self.wanted[op]), True
        for axis, label in held:
            if axis in self._sizes and label in labels:
                row[self.space.mesh.names.index(axis)] = labels.index(label)
            else:
                whole = False
        self.wanted[op] = row
        return self._set(op, row, whole) and whole

    def _set(self, op: int, row: list[int], whole: bool = True) -> bool:
        """Set the axes of an op, except those whose sizes do not divide; whether all are set."""
        divisor = self.space.classes.divisor[self.space.classes.of_op[op]].tolist()
        shards: dict[int, int] = {}
        for axis, (factor, size) in enumerate(zip(row, self.space.mesh.sizes, strict=True)):
            if factor == NONE:
                continue
            if not self._exact and divisor[factor] % (shards.get(factor, 1) * size):
                row[axis], whole = NONE, False
            else:
                shards[factor] = shards.get(factor, 1) * size
        if whole or not self.saved.replayed:
            self.state[op] = np.where(self._pinned[op], self.state[op], row)
        return whole

    def arguments(self) -> None:
        """Give arguments and results the shardings of their paths, or of what is like them."""
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
                self.said[path] = spec, self._shard(op, program.argument_values[op], spec)
        first = len(program.ops) - len(program.results)
        for number, path in enumerate(program.results):
            if path in saved.results and program.aliases[number] < 0:
                self._shard(first + number, program.result_values[number], saved.results[path])

    def _shard(self, op: int, value: int, spec: Spec) -> str:
        """Shard what an op of one factor per dimension holds; why that cannot be, or nothing."""
        type_ = self._program.values[value].type
        shape = type_.shape
        if len(spec) != len(shape):
            return f"it has {len(shape)} dimensions now, {len(spec)} in the plan"
        if 0 in shape:
            return ""
        row, why = [NONE] * len(self._sizes), ""
        for d, axes in enumerate(spec):
            shards = math.prod(self._sizes.get(axis, 1) for axis in axes)
            missing = [axis for axis in axes if axis not in self._sizes]
            if missing:
                why = f"mesh {self.space.mesh} has no axis {', '.join(missing)}"
            elif shape[d] % shards:
                why = f"{shards} devices ({', '.join(axes)}) do not divide dimension {d} of {type_}"
            for axis in axes:
                if axis in self._sizes:
                    row[self.space.mesh.names.index(axis)] = d
        self.placed[op], self.wanted[op] = True, row
        self._set(op, row)
        return why


def by_class(op_state: OpState, space: Space) -> tuple[States, npt.NDArray[np.bool_], bool]:
    """A state of ops as one of classes, the ops that matter for it, and whether it is the same.

    Ops of one class that are not sharded alike cannot be, without further classes.
    """
    program, of_op = space.analysis.program, space.classes.of_op
    matters = np.ones(len(program.ops), dtype=bool)
    first = len(program.ops) - len(program.results)
    for result, alias in enumerate(program.aliases):
        matters[first + result] = alias < 0  # else it is sharded as the argument that it overwrites
    ops = np.arange(len(of_op))
    chosen = space.classes.representative.copy()
    chosen[of_op[matters][::-1]] = ops[matters][::-1]
    state = op_state[chosen]
    return state, matters, bool((space.of_ops(state) == op_state)[matters].all())


def _classed(
    op_state: OpState, space: Space, actions: Sequence[Action], resolution: Any
) -> tuple[Space, States, tuple[Action, ...]]:
    """The state by op class; by op, where ops of one class are not sharded alike."""
    of_op = space.classes.of_op
    state, _, alike = by_class(op_state, space)
    if alike:
        return space, state, tuple(actions)
    single = Space(
        space.analysis, space.mesh, constraints=space.constraints, resolution=resolution,
        collapse=False,
    )  # fmt: skip
    spread = tuple(
        action._replace(part=tuple(
            (op, factor) for k, factor in action.part for op in np.flatnonzero(of_op == k).tolist()
        ))
        for action in actions
    )  # fmt: skip
    return single, op_state, spread
