"""Explanations of the shardings of arguments."""

from __future__ import annotations

import numpy as np

from toast.analysis.dimensions import find_argument
from toast.errors import ExplainError, PlanError
from toast.explain.collective_causes import in_order, values_of
from toast.explain.gathered_copies import gathered_copies
from toast.explain.history import History
from toast.paths import folded, is_pattern, matches
from toast.plan import ArgumentExplanation, FreeAxis, HeldAxis, Plan, Prediction, spec_text
from toast.program import element_bytes
from toast.units import listed, size_text, time_text


def argument_number(plan: Plan, name: str) -> int:
    """The number of an argument by its path (:func:`toast.analysis.dimensions.find_value`).

    Raises :class:`toast.errors.PlanError` with similar paths if there is no such argument.
    """
    if isinstance(name, str) and is_pattern(name) and name not in plan.arguments:
        raise PlanError(
            f"{name}: matches no argument; use a path, or a pattern such as "
            f"{folded(next(iter(plan.arguments), 'x'))}"
        )
    try:
        return find_argument(plan.analysis.program, name)
    except ExplainError as error:
        raise PlanError(str(error)) from None


def _argument_numbers(plan: Plan, name: str) -> list[int]:
    """The numbers of the arguments of a path or pattern, which must have equal shardings."""
    paths = list(plan.arguments)
    if not isinstance(name, str) or not is_pattern(name) or name in plan.arguments:
        return [argument_number(plan, name)]
    matching = [op for op, path in enumerate(paths) if matches(name, path)]
    if not matching:
        return [argument_number(plan, name)]  # raises the error
    kinds: dict[object, list[int]] = {}
    for op in matching:
        group = int(plan.analysis.argument_group[op])
        kinds.setdefault((group, plan.arguments[paths[op]]), []).append(op)
    if len(kinds) > 1:
        shown = [f"{paths[ops[0]]} {spec_text(plan.arguments[paths[ops[0]]])}"
                 for ops in kinds.values()]  # fmt: skip
        raise PlanError(
            f"{name}: matches {len(matching)} arguments with different shardings: "
            f"{listed(shown, 4)}; use one of them"
        )
    return matching


def explain_argument(plan: Plan, name: str) -> ArgumentExplanation:
    """Explain the sharding of an argument; see :meth:`toast.Plan.explain_argument`.

    ``name`` is a path or a pattern of paths.  A pattern must match arguments of one group with
    equal shardings; the explanation is that of the first.  Raises :class:`toast.errors.PlanError`
    if no argument matches, or if the matching arguments differ.
    """
    op, *others = _argument_numbers(plan, name)
    program, analysis = plan.analysis.program, plan.analysis
    space = plan.model.space
    name = program.arguments[op]
    type_ = program.values[program.argument_values[op]].type
    spec = plan.arguments[name]
    history = History(plan)
    k = int(space.classes.of_op[op])
    sizes = dict(plan.mesh.axes)
    shards = int(np.prod([sizes[a] for axes in spec for a in axes], dtype=np.int64))
    size = int(np.prod(type_.shape, dtype=np.int64)) * element_bytes(type_.dtype)
    group = np.flatnonzero(analysis.argument_group == analysis.argument_group[op]).tolist()
    held = [
        HeldAxis(d, axis, history.cause(k, space.mesh.names.index(axis)))
        for d, axes in enumerate(spec)
        for axis in axes
        if axis in space.mesh.names
    ]
    free = [
        _free(plan, history, op, d, axis)
        for d in range(len(type_.shape))
        for axis, (label, devices) in enumerate(space.mesh.axes)
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
            number for number, row in enumerate(in_order(plan), 1) if value in values_of(plan, row)
        ),
        alike=tuple(program.arguments[a] for a in (op, *others)) if others else (),
        gathered=gathered_copies(plan, op),
    )


def _free(plan: Plan, history: History, op: int, d: int, axis: int) -> FreeAxis:
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
        rest = f" per device of {', '.join(spec[d])}" if spec[d] else ""
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
        why = f"its color has {count} dimensions in the program, too few for an action"
        return FreeAxis(d, label, "few", why)
    outcomes = [space.apply(plan.state, action) for action in offered]
    after = [state for state in outcomes if state[k, axis] == factor]
    if not after:
        if undone:
            return FreeAxis(d, label, "undone", undone)
        rivals = [
            plan.analysis.name_label(r.names[r.names[0] == name])
            for r in plan.analysis.resolutions if name in r.names
        ]  # fmt: skip
        if rivals:
            return FreeAxis(d, label, "conflict", f"in conflict with {', '.join(rivals[:3])}")
        return FreeAxis(d, label, "constraint", "a pin or forbid excludes it")
    prices = plan.model.price(np.stack(after))
    best = int(np.argmin(plan.model.cost(prices, plan.memory_bytes)))
    then = Prediction.of(prices, best).with_error_bars(plan.model, plan.memory_bytes)
    if (after[best] == plan.state).all():
        why = "an action for this axis changes nothing"
        return FreeAxis(d, label, "price", why, then)
    if undone:
        again = f"sharding it again: {_effect(plan, then)}"
        return FreeAxis(d, label, "undone", f"{undone}; {again}", then)
    return FreeAxis(
        d,
        label,
        "price",
        f"no step shards it; the effect of sharding it: {_effect(plan, then)}",
        then,
    )


def _effect(plan: Plan, then: Prediction) -> str:
    was = plan.after
    parts = [f"step {time_text(was.step_seconds)} to {time_text(then.step_seconds)}"]
    parts.append(f"peak {size_text(was.peak_bytes)} to {size_text(then.peak_bytes)}")
    if plan.needed_bytes(was) <= plan.memory_bytes < plan.needed_bytes(then):
        parts[-1] += ", over the limit"
    paid = [
        f"{new.count - old.count:+} {new.kind}"
        for old, new in zip(was.collectives, then.collectives, strict=True)
        if new.count != old.count
    ]
    return "; ".join([*parts, *([", ".join(paid)] if paid else [])])
