"""Why a plan is as it is: its arguments and its collectives, each traced to what brought it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toast.analysis.dimensions import find_argument
from toast.apply import Spec
from toast.cost import Transfer
from toast.cost.transfers import Timed
from toast.errors import ExplainError, PlanError
from toast.frontend import element_bytes
from toast.given import is_whole
from toast.paths import is_pattern, matches
from toast.plan import notebook
from toast.plan.labels import describe_value, folded, shown_labels, spec_text
from toast.plan.prediction import Prediction
from toast.plan.shard import major_ranks, spec_of
from toast.space import NONE, States
from toast.units import listed, size_text, time_text

if TYPE_CHECKING:
    from toast.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Cause:
    """What gave a mesh axis to an op."""

    #: Step of the plan, from 1; 0 where no step did, but the plan's method.
    number: int
    #: ``pin``, ``fix``, ``action``, ``refinement``, or the method.
    kind: str
    axis: str
    #: Dimensions that the step shards.
    dimensions: tuple[str, ...] = ()
    resolution: tuple[int, ...] = ()
    #: What the step gained and what it paid.
    reason: str = ""
    before: Prediction | None = None
    after: Prediction | None = None

    def __str__(self) -> str:
        if not self.number:
            return f"{self.kind} put it there"
        shown = shown_labels(self.dimensions, 2) or "intermediate values"
        return f"step {self.number}, {self.kind} of {shown} along {self.axis or 'axes'}"


@dataclasses.dataclass(frozen=True)
class HeldAxis:
    """A mesh axis that shards a dimension of an argument."""

    dimension: int
    axis: str
    cause: Cause


@dataclasses.dataclass(frozen=True)
class FreeAxis:
    """A mesh axis that does not shard a dimension of an argument, and why."""

    dimension: int
    axis: str
    #: ``elsewhere`` (it shards another dimension), ``size`` (it does not divide this one),
    #: ``undone`` (a step put it there, a later one took it off), ``few`` (too few dimensions have
    #: the color), ``conflict``, ``constraint`` or ``price``.
    kind: str
    why: str
    #: What the plan would do with one action more that puts it there; of ``price`` and ``undone``.
    then: Prediction | None = None


@dataclasses.dataclass(frozen=True)
class ArgumentExplanation:
    """Why an argument is sharded as it is."""

    argument: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    #: Arguments of its group (4.4) with their list positions folded.
    group: tuple[str, ...]
    bytes: int
    device_bytes: int
    held: tuple[HeldAxis, ...]
    free: tuple[FreeAxis, ...]
    #: The collectives that move it, by number.
    moved_by: tuple[int, ...]
    #: All that were asked for by a pattern, this one first: they are sharded alike.
    alike: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<ArgumentExplanation of {self.argument}: {spec_text(self.spec)}, "
            f"{len(self.held)} axes held, {len(self.free)} free>"
        )

    def _repr_html_(self) -> str:
        """How notebooks show it."""
        return notebook.argument_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class CollectiveExplanation:
    """Collectives that are alike, and why they are there."""

    #: Its place among the plan's, those that take most time first, from 1.
    number: int
    kind: str
    axes: tuple[str, ...]
    #: Of the result that a device holds after each.
    bytes: float
    #: How many there are in a step, those of repeated layers and of loops counted, without those
    #: that XLA merges with others or makes anew; shares of some may be left.
    count: float
    #: Of one.
    seconds: float
    #: Of all: these sum to the prediction.
    total_seconds: float
    algorithm: str
    #: ``reshard``, ``sum`` (of parts), ``edges`` (of a window) or ``order`` (shards change places).
    what: str
    #: The value that moves, and how many like it.
    value: str
    values: int
    #: The ops that make it and use it, with their source lines; a sum has no use.
    definition: str
    use: str
    #: The sharding where it is made, and the one that is wanted.
    before: Spec
    after: Spec
    #: For each axis the factors that hold it where the value is made and where it is used.
    factors: tuple[tuple[str, str, str], ...]
    #: What gave these factors the axes, the last of which brought the collective.
    causes: tuple[Cause, ...]
    why: str

    def __repr__(self) -> str:
        return (
            f"<CollectiveExplanation {self.number}: {self.count:g} {self.kind} over "
            f"{' x '.join(self.axes)}, {time_text(self.total_seconds)}: {self.value}>"
        )

    def _repr_html_(self) -> str:
        """How notebooks show it."""
        return notebook.collective_html(self)

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return dataclasses.asdict(self)


class _History:
    """The states that the plan's steps led through."""

    def __init__(self, plan: Plan) -> None:
        space = plan.model.space
        self._plan = plan
        self.states: list[States] = [space.unsharded]
        if (space.pinned != space.unsharded).any():
            self.states.append(space.pinned)
        for action in plan.actions:
            self.states.append(space.apply(self.states[-1], action))

    def cause(self, k: int, axis: int) -> Cause:
        """What gave op class ``k`` what it has of an axis in the end."""
        plan, space = self._plan, self._plan.model.space
        name, final = space.mesh.names[axis], plan.state[k, axis]
        last = len(self.states) - 1
        if self.states[last][k, axis] != final:
            return Cause(0, plan.method, name)
        number = last
        while number and self.states[number - 1][k, axis] == final:
            number -= 1
        if not number or number > len(plan.steps):
            return Cause(0, plan.method, name)
        step = plan.steps[number - 1]
        first = len(self.states) - len(plan.actions)
        kind = "action"
        if number < first:
            kind = "pin"
        elif number < first + len(space.begun):
            kind = "fix"
        elif step.part:
            kind = "refinement"
        before = plan.steps[number - 2].after if number > 1 else plan.before
        return Cause(
            number, kind, name, step.dimensions, step.resolution, step.reason, before, step.after
        )

    def undone(self, k: int, axis: int, factor: int) -> str:
        """The steps that gave an axis to a factor and took it off again; empty where none did."""
        held = [state[k, axis] == factor for state in self.states]
        if not any(held) or held[-1] or len(held) > len(self._plan.steps) + 1:
            return ""
        off = len(held) - held[::-1].index(True)  # behind the last state that has it
        on = next(n for n in range(off - 1, -1, -1) if not n or not held[n - 1])
        reason = self._plan.steps[off - 1].reason
        return f"step {on} put it there, step {off} took it off: {reason}"


# -- arguments -------------------------------------------------------------------------------


def argument_number(plan: Plan, name: str) -> int:
    """The argument with a path, written as for :func:`toast.analysis.dimensions.find_value`.

    Raises :class:`toast.errors.PlanError` with near matches.
    """
    if isinstance(name, str) and is_pattern(name) and name not in plan.arguments:
        raise PlanError(
            f"{name}: matches no argument; give a path, or a pattern such as "
            f"{folded(next(iter(plan.arguments), 'x'))}"
        )
    try:
        return find_argument(plan.analysis.program, name)
    except ExplainError as error:
        raise PlanError(str(error)) from None


def _argument_numbers(plan: Plan, name: str) -> list[int]:
    """The arguments that a path names, or a pattern of paths of one group, sharded alike."""
    paths = list(plan.arguments)
    if not isinstance(name, str) or not is_pattern(name) or name in plan.arguments:
        return [argument_number(plan, name)]
    found = [op for op, path in enumerate(paths) if matches(name, path)]
    if not found:
        return [argument_number(plan, name)]  # which says so
    kinds: dict[object, list[int]] = {}
    for op in found:
        group = int(plan.analysis.argument_group[op])
        kinds.setdefault((group, plan.arguments[paths[op]]), []).append(op)
    if len(kinds) > 1:
        shown = [f"{paths[ops[0]]} {spec_text(plan.arguments[paths[ops[0]]])}"
                 for ops in kinds.values()]  # fmt: skip
        raise PlanError(
            f"{name}: matches {len(found)} arguments that are not sharded alike: "
            f"{listed(shown, 4)}; give one of them"
        )
    return found


def explain_argument(plan: Plan, name: str) -> ArgumentExplanation:
    """Why an argument is sharded as it is, and not otherwise.

    Of a pattern of paths, the first that it matches, if all are of one group and sharded alike.
    Raises :class:`toast.errors.PlanError` for an argument that does not exist, and a pattern of
    arguments that differ.
    """
    op, *others = _argument_numbers(plan, name)
    program, analysis = plan.analysis.program, plan.analysis
    space = plan.model.space
    name = program.arguments[op]
    type_ = program.values[program.argument_values[op]].type
    spec = plan.arguments[name]
    history = _History(plan)
    k = int(space.classes.of_op[op])
    sizes = dict(plan.mesh.axes)
    shards = int(np.prod([sizes[a] for axes in spec for a in axes], dtype=np.int64))
    size = int(np.prod(type_.shape, dtype=np.int64)) * element_bytes(type_.dtype)
    group = np.flatnonzero(analysis.argument_group == analysis.argument_group[op]).tolist()
    held = [
        HeldAxis(d, axis, history.cause(k, plan.mesh.names.index(axis)))
        for d, axes in enumerate(spec)
        for axis in axes
    ]
    free = [
        _free(plan, history, op, d, axis)
        for d in range(len(type_.shape))
        for axis, (label, devices) in enumerate(plan.mesh.axes)
        if devices > 1 and label not in spec[d]
    ]
    value = program.argument_values[op]
    return ArgumentExplanation(
        argument=name,
        shape=type_.shape,
        dtype=type_.dtype,
        spec=spec,
        group=tuple(dict.fromkeys(folded(program.arguments[a]) for a in group)),
        bytes=size,
        device_bytes=size // shards,
        held=tuple(held),
        free=tuple(free),
        moved_by=tuple(
            number for number, row in enumerate(_ordered(plan), 1) if value in _values_of(plan, row)
        ),
        alike=tuple(program.arguments[a] for a in (op, *others)) if others else (),
    )


def _free(plan: Plan, history: _History, op: int, d: int, axis: int) -> FreeAxis:
    """Why an axis does not shard a dimension of an argument."""
    space, names, program = plan.model.space, plan.analysis.names, plan.analysis.program
    value = program.argument_values[op]
    size, label = program.values[value].type.shape[d], space.mesh.names[axis]
    devices = int(space.axis_sizes[axis])
    k = int(space.classes.of_op[op])
    sizes = dict(plan.mesh.axes)
    spec = plan.arguments[program.arguments[op]]
    shards = int(np.prod([sizes[a] for a in spec[d]], dtype=np.int64))
    if (size // shards) % devices or size % (shards * devices):
        left = size // shards
        rest = f" that {'x'.join(spec[d])} leaves" if spec[d] else ""
        why = f"{devices} devices do not divide its {left} element{'s' * (left != 1)}{rest}"
        why = "the dimension has size 1" if size == 1 else why
        return FreeAxis(d, label, "size", why)
    elsewhere = next((other for other, axes in enumerate(spec) if label in axes), None)
    if elsewhere is not None:
        return FreeAxis(d, label, "elsewhere", f"it shards dimension {elsewhere}")
    name = int(names.def_name[names.value_dim[value] + d])
    factor = name - int(names.first_name[op])
    undone = history.undone(k, axis, factor)
    group = int(space.color_group_of(name))
    offered = [a for a in space.actions if a.color == group and a.axis == axis]
    if not offered and not undone:
        count = space.color_groups[group].dimensions
        why = f"its color has {count} dimensions in the whole program, too few for an action"
        return FreeAxis(d, label, "few", why)
    found = [space.apply(plan.state, action) for action in offered]
    after = [state for state in found if state[k, axis] == factor]
    if not after:
        if undone:
            return FreeAxis(d, label, "undone", undone)
        rivals = [
            plan.analysis.name_label(r.names[r.names[0] == name])
            for r in plan.analysis.resolutions if name in r.names
        ]  # fmt: skip
        if rivals:
            return FreeAxis(d, label, "conflict", f"in conflict with {', '.join(rivals[:3])}")
        return FreeAxis(d, label, "constraint", "a pin, or what is forbidden, keeps it off")
    prices = plan.model.price(np.stack(after))
    best = int(np.argmin(plan.model.cost(prices, plan.memory_bytes)))
    then = Prediction.of(prices, best)
    if (after[best] == plan.state).all():
        why = "it has it already, but nothing of it is left to shard"
        return FreeAxis(d, label, "price", why, then)
    if undone:
        again = f"one more that put it there: {_effect(plan, then)}"
        return FreeAxis(d, label, "undone", f"{undone}; {again}", then)
    return FreeAxis(d, label, "price", f"no step does; one that did: {_effect(plan, then)}", then)


def _effect(plan: Plan, then: Prediction) -> str:
    was = plan.after
    parts = [f"step {time_text(was.step_seconds)} to {time_text(then.step_seconds)}"]
    parts.append(f"peak {size_text(was.peak_bytes)} to {size_text(then.peak_bytes)}")
    if was.peak_bytes <= plan.memory_bytes < then.peak_bytes:
        parts[-1] += ", over the limit"
    paid = [
        f"{new.count - old.count:+} {new.kind}"
        for old, new in zip(was.collectives, then.collectives, strict=True)
        if new.count != old.count
    ]
    return "; ".join([*parts, *([", ".join(paid)] if paid else [])])


# -- collectives -----------------------------------------------------------------------------


class _Row(NamedTuple):
    """One value class, or use class, in one kind of collective."""

    timed: Timed
    #: The class.
    x: int
    transfer: Transfer


def _ordered(plan: Plan) -> list[_Row]:
    """Every collective, those that take most time first."""
    model = plan.model
    layout = model.layout(plan.state[None])
    found: list[tuple[Timed, int]] = []
    for timed in model.timed(layout, *model.sizes(layout)):
        times = (timed.times * (1 - timed.move.spared))[0]
        found += [(timed, x) for x in np.flatnonzero(times).tolist()]
    # As the plan's own list has them.
    rows = [_Row(*row, line) for row, line in zip(found, plan.transfers, strict=True)]
    return [rows[i] for i in numbered(plan)]


def numbered(plan: Plan) -> list[int]:
    """The collectives of ``plan.transfers`` in the order of their numbers, from 1.

    Those that take most time come first; those that take none have no number.
    """
    seconds = [transfer.count * transfer.seconds for transfer in plan.transfers]
    return sorted((i for i, spent in enumerate(seconds) if spent > 0), key=lambda i: -seconds[i])


def _values_of(plan: Plan, row: _Row) -> list[int]:
    """The values that a collective moves."""
    tables = plan.model.tables
    if row.timed.move.of_uses:
        uses = np.flatnonzero(tables.use_class == row.x)
        return [*map(int, np.unique(plan.analysis.names.use_value[uses]))]
    return [*map(int, np.flatnonzero(tables.value_class == row.x))]


def explain_collectives(plan: Plan) -> tuple[CollectiveExplanation, ...]:
    """Every collective of the plan, those that take most time first."""
    history = _History(plan)
    return tuple(
        _explained(plan, history, number, row) for number, row in enumerate(_ordered(plan), 1)
    )


def explain_collective(plan: Plan, number: int) -> CollectiveExplanation:
    """Why a collective is there; ``number`` counts from 1, those that take most time first.

    Raises :class:`toast.errors.PlanError` for a number that there is not.
    """
    rows = _ordered(plan)
    if not is_whole(number):
        raise PlanError(f"collective {number!r}: no number of a collective; give a whole number")
    if not 1 <= number <= len(rows):
        there = f"give 1 to {len(rows)}" if rows else "it has none"
        raise PlanError(
            f"no collective {number} in the plan of {plan.analysis.program.name}; {there}"
        )
    return _explained(plan, _History(plan), number, rows[number - 1])


def _explained(plan: Plan, history: _History, number: int, row: _Row) -> CollectiveExplanation:
    model, analysis = plan.model, plan.analysis
    program, names, tables = analysis.program, analysis.names, model.tables
    timed, x = row.timed, row.x
    move, kind = timed.move, row.transfer.kind
    layout = model.layout(plan.state[None])
    major = major_ranks(layout)
    chosen = int(move.axes[0, x])
    axes = [a for a in range(len(plan.mesh.axes)) if chosen >> a & 1]
    labels = tuple(plan.mesh.names[a] for a in axes)
    values = _values_of(plan, row)
    value = values[0]
    rank = len(program.values[value].type.shape)
    c = int(tables.use_value[x]) if move.of_uses else x
    maker = int(tables.slot_class[tables.value_slot[c]])
    user, use_text = maker, ""
    if move.of_uses:
        user = int(tables.slot_class[tables.use_slot[x]])
        use = int(np.flatnonzero(tables.use_class == x)[0])
        use_text = program.describe(int(names.use_op[use]))
        if names.use_op[use] >= len(program.ops) - len(program.results):
            result = int(names.use_op[use]) - len(program.ops) + len(program.results)
            use_text = program.results[result]
    before, after = (
        spec_of(dims, rank, plan.mesh.names, major)
        for dims in (
            (layout.settled[0, c], layout.used[0, x]) if move.of_uses
            else (layout.defined[0, c], layout.settled[0, c])
        )
    )  # fmt: skip
    factors = tuple(
        (label, _factor(plan, maker, a), _factor(plan, user, a) if move.of_uses else "")
        for label, a in zip(labels, axes, strict=True)
    )
    held = [(k, a) for a in axes for k in dict.fromkeys((maker, user)) if plan.state[k, a] != NONE]
    causes = sorted(
        dict.fromkeys(history.cause(k, a) for k, a in held), key=lambda cause: cause.number
    )
    what = "reshard"
    if move.edges:
        what = "edges"
    elif move.places:
        what = "order"
    elif not move.of_uses:
        what = "sum"
    return CollectiveExplanation(
        number=number,
        kind=kind,
        axes=labels,
        bytes=row.transfer.bytes,
        count=row.transfer.count,
        seconds=row.transfer.seconds,
        total_seconds=row.transfer.count * row.transfer.seconds,
        algorithm=row.transfer.algorithm,
        what=what,
        value=describe_value(program, value),
        values=len(values),
        definition=describe_value(program, value),
        use=use_text,
        before=before,
        after=after,
        factors=factors,
        causes=tuple(causes),
        why=_why(what, kind, factors),
    )


def _factor(plan: Plan, k: int, axis: int) -> str:
    """The label of the factor of an op class that holds an axis; empty for none."""
    factor = int(plan.state[k, axis])
    if factor == NONE:
        return ""
    analysis = plan.analysis
    rule = analysis.rules[analysis.names.signature[plan.model.space.classes.representative[k]]]
    label: str = rule.factors[factor].label
    return label


def _why(what: str, kind: str, factors: tuple[tuple[str, str, str], ...]) -> str:
    """What meets there, in one line."""
    held = ", ".join(f"{_named(made)} along {axis}" for axis, made, _ in factors)
    if what == "sum":
        kept = ", and kept in parts" if kind == "reduce_scatter" else ""
        return f"each device has a part of the sum over {held}: the parts are added up{kept}"
    if what == "edges":
        return f"shards of {held} need the edges of their neighbours"
    if what == "order":
        return "an axis comes or goes that stands major to one that stays: shards change places"
    return "; ".join(
        f"along {axis}, {_named(made)} is sharded where it is made, {_named(used)} where it is used"
        for axis, made, used in factors
    )


def _named(label: str) -> str:
    """A factor as a sentence calls it; those of elementwise ops are numbers of dimensions."""
    return f"dimension {label}" if label.isdigit() else label or "nothing"
