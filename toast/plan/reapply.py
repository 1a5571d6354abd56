"""A plan on a program that has changed since: what still matches, and what it costs now.

First come the plan's actions, found again by the dimensions that they shard; they reach ops that
the plan has never seen.  Then every op that the plan knows is sharded as it was, and every
argument.  On the program and mesh that it was made for, that is the plan again, number by number.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toast.apply import Spec
from toast.cost import CostModel
from toast.errors import PinError, PlanError
from toast.hardware import Hardware, Mesh
from toast.plan.files import (
    Held,
    OpKey,
    Part,
    Run,
    Saved,
    SavedAction,
    class_places,
    hardware_digest,
    keyed_ops,
    read,
)
from toast.plan.labels import action_labels, folded
from toast.plan.plan import Plan, Step, make_plan
from toast.search import Found
from toast.space import NONE, Action, Constraints, Space, States

if TYPE_CHECKING:
    from toast.analysis import Analysis

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
class Applied:
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


# -- actions ---------------------------------------------------------------------------------


def actions_like(space: Space, plan: Plan | str | pathlib.Path) -> tuple[Action, ...]:
    """The actions of ``space`` that do what those of an earlier plan, or of its JSON file, did.

    What has no counterpart is left out.  Raises :class:`toast.errors.PlanError` for a file that is
    no plan.
    """
    saved = read(plan)
    wanted = [action for action in saved.actions if action.axis]
    offered = _Offered(space)
    found = [action for action in map(offered.exactly, wanted) if action is not None]
    if wanted and not found:
        raise PlanError(
            f"{saved.name}: no action of this plan has a counterpart here; it is of another "
            "program or mesh, so begin without it"
        )
    return tuple(found)


class _Offered:
    """The actions of a space, by what they shard."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._by_labels: dict[tuple[tuple[str, ...], str], list[Action]] = defaultdict(list)
        for action in space.actions:
            axis = space.mesh.names[action.axis]
            self._by_labels[action_labels(space, action), axis].append(action)

    @functools.cached_property
    def _classes(self) -> tuple[dict[OpKey, list[int]], dict[OpKey, list[int]]]:
        """Op classes by key, and by what is left of keys when lines have moved."""
        exact: dict[OpKey, list[int]] = defaultdict(list)
        loose: dict[OpKey, list[int]] = defaultdict(list)
        for k, (key, _, _) in class_places(self._space).items():
            exact[key.place].append(k)
            loose[key.loose].append(k)
        return exact, loose

    def exactly(self, wanted: SavedAction) -> Action | None:
        """The same action, or none."""
        if wanted.axis not in self._space.mesh.names:
            return None
        if wanted.part:
            return self._refinement(wanted)
        found = self._by_labels.get((wanted.labels, wanted.axis), [])
        return next((a for a in found if a.resolution == wanted.resolution), None)

    def nearest(self, wanted: SavedAction) -> Action | None:
        """The action that shares most dimensions with ``wanted``, its resolution as far as it goes.

        Where conflicts have come or gone the first of its resolutions, unless all were at 1.
        """
        if wanted.part:
            return None

        def shared(labels: tuple[str, ...]) -> float:
            mine, theirs = set(map(_unplaced, wanted.labels)), set(map(_unplaced, labels))
            return len(mine & theirs) / len(mine | theirs) if mine & theirs else 0.0

        candidates = [labels for labels, axis in self._by_labels if axis == wanted.axis]
        best = max(candidates, key=shared, default=())
        if not candidates or not shared(best):
            return None

        def far(action: Action) -> int:
            bits = wanted.resolution
            if len(bits) != len(action.resolution):
                bits = (int(bool(bits) and all(bits)),) * len(action.resolution)
            return sum(a != b for a, b in zip(bits, action.resolution, strict=True))

        return min(self._by_labels[best, wanted.axis], key=far)

    def _refinement(self, wanted: SavedAction) -> Action | None:
        """The refinement of the ops with the same keys."""
        axis = self._space.mesh.names.index(wanted.axis)
        if not wanted.part[0].of:  # of version 1: by number, where the labels agree
            part = tuple(p.numbers for p in wanted.part)
            return self._numbered(Action(-1, (), axis, part), wanted.dimensions)
        pairs = [pair for part in wanted.part for pair in self._of_part(part)]
        return Action(-1, (), axis, tuple(dict.fromkeys(pairs))) if pairs else None

    def _numbered(self, action: Action, labels: tuple[str, ...]) -> Action | None:
        classes, factors = self._space.classes.divisor.shape
        if not all(0 <= k < classes and -1 <= f < factors for k, f in action.part):
            return None
        try:
            return action if action_labels(self._space, action) == labels else None
        except IndexError:  # a factor that the op does not have
            return None

    def _of_part(self, part: Part) -> Iterator[tuple[int, int]]:
        exact, loose = self._classes
        found = exact.get(part.key.place) or loose.get(part.key.loose, [])
        if len(found) == part.of:
            found = found[part.place : part.place + 1]
        for k in found:
            factor = _factor(self._space.analysis, self._space.classes.representative[k], part)
            if factor is not None:
                yield k, factor


def _unplaced(label: str) -> str:
    """A label without the source line."""
    return label.partition(" at ")[0]


def _factor(analysis: Analysis, op: int, part: Part) -> int | None:
    """The factor of an op with the label of a part; -1 for none, None where there is no such."""
    if not part.factor:
        return NONE
    labels = [f.label for f in analysis.rules[analysis.names.signature[op]].factors]
    return labels.index(part.factor) if part.factor in labels else None


# -- the whole plan --------------------------------------------------------------------------


def apply_saved(
    saved: Saved,
    analysis: Analysis,
    *,
    mesh: Mesh,
    hardware: Hardware,
    memory_bytes: float,
    progress: Callable[[str], None] | None = None,
) -> Applied:
    """Apply what a plan's file says to a program.

    Raises :class:`toast.errors.PlanError` where nothing of it matches.
    """
    begin = time.perf_counter()
    tell = progress or (lambda _stage: None)
    tell("decision space")
    program = analysis.program
    same = saved.digest == program.digest
    space, notes = _space(saved, analysis, mesh)
    offered = _Offered(space)
    wanted = [action for action in saved.actions if action.axis] if saved.replayed else []
    found: list[tuple[Action, bool]] = []
    lost = []
    for step in wanted:
        action = offered.exactly(step)
        if action is None and (action := offered.nearest(step)) is not None:
            notes.append(_nearly(space, step, action))
        if action is None:
            lost.append(_action_text(step))
        else:
            found.append((action, step.fixed))
    actions = tuple(action for action, _ in found)
    state = space.pinned
    for action in actions:
        state = space.apply(state, action)
    work = _Work(saved, space, space.of_ops(state).copy(), same)
    work.ops()
    work.arguments()
    if not same and not found and not work.matched and not work.sharded_ops:
        raise PlanError(
            f"{saved.name} is a plan of {saved.program}; nothing of it matches {program.name}: no "
            "argument, no action and no op that it shards; give the program that it was made for"
        )
    notes = [*_setting_notes(saved, same, program.name, mesh, hardware), *notes]
    resolution = resolution_of(saved)
    space, state, actions = _classed(work.state, space, actions, resolution)
    fixed = next((i for i, (_, fix) in enumerate(found) if not fix), len(found))
    space.begin_with(actions[:fixed])
    tell("prices")
    model = CostModel(space, hardware, overlap=saved.overlap)  # type: ignore[arg-type]
    spent = time.perf_counter() - begin
    cost = float(model.cost(model.price(state[None]), memory_bytes)[0])
    made = make_plan(
        model, Found(actions[fixed:], state, cost, 1, spent, ()),
        memory_bytes=memory_bytes, seed=saved.seed,
        seconds={**analysis.seconds, "plan applied": spent},
        method=saved.method, note=saved.note, resolution=resolution,
    )  # fmt: skip
    if same and not saved.replayed and mesh == saved.mesh:
        made = dataclasses.replace(made, steps=tuple(map(_step, saved.actions)))
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
        ops_matched=work.matched_ops,
        ops=len(program.ops) - len(program.arguments) - len(program.results),
        notes=tuple(notes),
    )


def resolution_of(saved: Saved) -> Any:
    """How conflicts are resolved, as :class:`toast.space.Space` takes it."""
    if saved.resolution not in ("compatible", "independent"):
        raise PlanError(f"{saved.name}: resolution {saved.resolution!r} is not known")
    return saved.resolution


def _step(action: SavedAction) -> Step:
    return Step(action.dimensions, action.axis, action.resolution, action.after, action.reason)


def _action_text(action: SavedAction) -> str:
    shown = ", ".join(action.dimensions[:2]) or "intermediate values"
    more = len(action.dimensions) - 2
    return f"{shown}{f' and {more} more' if more > 0 else ''} along {action.axis}"


def _nearly(space: Space, wanted: SavedAction, action: Action) -> str:
    labels = action_labels(space, action)
    come = [label for label in labels if label not in wanted.labels]
    gone = [label for label in wanted.labels if label not in labels]
    parts = [f"it has {_listed(come)} now"] if come else []
    parts += [f"it has {_listed(gone)} no longer"] if gone else []
    if action.resolution != wanted.resolution:
        here = "".join(map(str, action.resolution)) or "none"
        parts.append(f"resolution {''.join(map(str, wanted.resolution)) or 'none'} is {here} here")
    return f"action {_action_text(wanted)}: {', '.join(parts)}"


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - 3
    return ", ".join(texts[:3]) + (f" and {more} more" if more > 0 else "")


def _setting_notes(
    saved: Saved, same: bool, name: str, mesh: Mesh, hardware: Hardware
) -> Iterator[str]:
    """What is not as it was when the plan was made."""
    if not saved.digest:
        yield "the file does not say which program it was made for (version 1 of plans)"
    elif not same:
        yield f"the plan was made for another program: {name} has other ops, types or arguments"
    if mesh != saved.mesh:
        yield f"the plan was made for mesh {saved.mesh}"
    if hardware.name != saved.hardware:
        yield f"the plan was made for {saved.hardware}"
    elif saved.hardware_digest and saved.hardware_digest != hardware_digest(hardware):
        yield f"the plan was made with other figures of {saved.hardware}"


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
                notes.append(f"{option} {pattern} no longer holds: {error}")
    return space, notes


class _Work:
    """The state of every op, as it becomes the plan's."""

    def __init__(self, saved: Saved, space: Space, state: OpState, same: bool) -> None:
        self.saved, self.space, self.same = saved, space, same
        self.state = state  # [ops, axes]
        self._program = space.analysis.program
        self._pinned = space.of_ops(space.pinned) != NONE
        self._sizes = dict(space.mesh.axes)
        self.matched: list[str] = []
        self.matched_ops = 0
        #: Ops that the plan shards, found by more than their kind.
        self.sharded_ops = 0
        #: For each argument that the plan knows, what it says and why that cannot be.
        self.said: dict[str, tuple[Spec, str]] = {}

    def ops(self) -> None:
        """Give every op that the plan knows its factors."""
        here = keyed_ops(self._program)
        exact = {key.place: ops for key, ops in here.items()}
        left: dict[OpKey, list[Run]] = defaultdict(list)
        done: set[OpKey] = set()
        for key, runs in self.saved.ops.items():
            if key.place in exact:
                done.add(key.place)
                self._align(key, runs, exact[key.place])
            else:
                left[key.loose] += runs
        loose: dict[OpKey, list[int]] = defaultdict(list)
        for key, ops in here.items():
            if key.place not in done:
                loose[key.loose] += ops
        for key, found in left.items():
            if key in loose:
                self._align(key, found, sorted(loose[key]))

    def _align(self, key: OpKey, runs: Sequence[Run], ops: list[int]) -> None:
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
            self.matched_ops += self._hold(op, held)
            self.sharded_ops += bool(held and (key.path or key.label))

    def _hold(self, op: int, held: Held) -> bool:
        """Shard an op as the plan says, as far as that goes; whether it goes all the way."""
        analysis = self.space.analysis
        labels = [f.label for f in analysis.rules[analysis.names.signature[op]].factors]
        row, whole = [NONE] * len(self.state[op]), True
        for axis, label in held:
            if axis in self._sizes and label in labels:
                row[self.space.mesh.names.index(axis)] = labels.index(label)
            else:
                whole = False
        return self._set(op, row) and whole

    def _set(self, op: int, row: list[int]) -> bool:
        """Set the axes of an op, except those whose sizes do not divide; whether all are set."""
        divisor = self.space.classes.divisor[self.space.classes.of_op[op]].tolist()
        shards: dict[int, int] = {}
        whole = True
        for axis, (factor, size) in enumerate(zip(row, self.space.mesh.sizes, strict=True)):
            if factor == NONE:
                continue
            if not self.same and divisor[factor] % (shards.get(factor, 1) * size):
                row[axis], whole = NONE, False
            else:
                shards[factor] = shards.get(factor, 1) * size
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
        self._set(op, row)
        return why


def _classed(
    op_state: OpState, space: Space, actions: Sequence[Action], resolution: Any
) -> tuple[Space, States, tuple[Action, ...]]:
    """The state by op class; by op, where ops of one class are not sharded alike."""
    program, of_op = space.analysis.program, space.classes.of_op
    matters = np.ones(len(program.ops), dtype=bool)
    first = len(program.ops) - len(program.results)
    for result, alias in enumerate(program.aliases):
        matters[first + result] = alias < 0  # else it is sharded as the argument that it overwrites
    ops = np.arange(len(of_op))
    chosen = space.classes.representative.copy()
    chosen[of_op[matters][::-1]] = ops[matters][::-1]
    state = op_state[chosen]
    if (space.of_ops(state) == op_state)[matters].all():
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
