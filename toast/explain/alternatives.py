"""Alternatives to a plan: another sharding of an argument, and its price."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from toast.cost import CostModel
from toast.errors import PinError, PlanError
from toast.explain.arguments import argument_number
from toast.explain.collective_causes import explain_collectives
from toast.paths import folded, is_pattern, matches
from toast.plan import (
    Alternative,
    CollectiveCount,
    CollectiveExplanation,
    Plan,
    WhyNot,
    make_plan,
    spec_text,
)
from toast.plan.prediction import numbers
from toast.search import SearchResult, Settings, begin_with_fixed, find
from toast.space import Action, Constraints, Space
from toast.space.constraints import is_open, parse_spec

#: What is no argument, but an option of another trace (:func:`toast.why_not`).
POLICY_OPTIONS = ("remat", "microbatches", "keep", "recompute", "offload", "gathered")


def why_not(
    plan: Plan,
    argument: str,
    spec: Any,
    *,
    search: bool = True,
    budget: float | None = 10.0,
    progress: Callable[[Any], None] | None = None,
) -> WhyNot[Plan]:
    """Price another sharding of an argument; see :meth:`toast.Plan.why_not`.

    The sharding is pinned twice: with the rest of the plan unchanged and, with ``search``, as the
    start of a search of at most ``budget`` seconds (None: without a limit).  ``argument`` is a path
    or a pattern of paths, ``spec`` a ``PartitionSpec`` or its text.  The search calls ``progress``.

    Raises :class:`toast.errors.PlanError` if no argument matches.  Raises
    :class:`toast.errors.PinError` for a text that is not a sharding, an axis that the mesh does not
    have, or more entries than the argument has dimensions.
    """
    analysis = plan.analysis
    if not isinstance(argument, str):
        argument_number(plan, argument)  # raises the error
    if argument in POLICY_OPTIONS and not any(matches(argument, path) for path in plan.arguments):
        raise PlanError(
            f"{argument}={spec!r}: no argument has this name, and a memory policy takes another "
            f"trace; use toast.why_not(plan, function, *arguments, {argument}={spec!r})"
        )
    if not isinstance(spec, Iterable) or isinstance(spec, Mapping):
        raise PinError(f"{argument}: {spec!r} is not a sharding; write P('data', None)")
    entries = parse_spec(spec) if isinstance(spec, str) else tuple(spec)
    names = [path for path in plan.arguments if matches(argument, path)]
    if not names or not is_pattern(argument):
        argument = analysis.program.arguments[argument_number(plan, argument)]
        names = [argument]
    text = spec if isinstance(spec, str) else _text(spec)
    _check(plan, names, entries, f"{argument}={text}")
    now = tuple(dict.fromkeys(spec_text(plan.arguments[name]) for name in names))
    constraints = plan.constraints
    # The new pin replaces an earlier pin with the same pattern.
    pins = {pattern: pin for pattern, pin in constraints.pin.items() if pattern != argument}
    constraints = dataclasses.replace(constraints, pin={**pins, argument: spec})
    try:
        space = Space(analysis, plan.mesh, constraints=constraints, resolution=plan.resolution)
        pinned = _pinned_plan(plan, space, names, Constraints(pin={argument: spec}))
        model = _model(plan, space)
        begin_with_fixed(model)
    except PinError as error:
        return WhyNot(argument, text, now, impossible=str(error))
    first = second = _alternative(plan, pinned)
    if search:
        result = find(
            model, memory_bytes=plan.memory_bytes,
            settings=Settings(seed=plan.seed, budget=budget),
            start=(_start_of(plan, space),), progress=progress,
        )  # fmt: skip
        best = _plan_of(plan, model, result)
        # An equally good plan would only repeat the tables of the first.
        if (not best.fits, best.cost * (1 + 1e-9)) < (not pinned.fits, pinned.cost):
            second = _alternative(plan, best)
    return WhyNot(
        argument, text, now, pinned=first, searched=second if search else None,
        plan_cost=plan.cost, plan_fits=plan.fits,
    )  # fmt: skip


def other_policy(
    plan: Plan, other: Plan, option: str, value: str, before: Sequence[str] = ()
) -> WhyNot[Plan]:
    """Compare a plan with one of the same program that computes its gradient in another way.

    :param plan: the plan.
    :param other: a plan of the program with another memory policy or number of microbatches.
    :param option: ``remat``, ``microbatches``, or what happens to some residuals (``offload``).
    :param value: its value in ``other``: for the last, the names of residuals.
    :param before: what the plan does with these residuals (``keep``).
    :returns: the comparison.
    """
    now: tuple[str, ...]
    if option == "microbatches":
        now = (str(plan.microbatches),)
    elif before:
        now = tuple(
            f"gathered again = {value}" if (option, choice) == ("gathered", "keep")
            else f"{choice} = {value}" for choice in before
        )  # fmt: skip
    else:
        now = (plan.policy.label if plan.policy else "what the program says",)
    # The ops of the programs differ, and so do all their collectives.
    alternative = dataclasses.replace(_alternative(plan, other), appear=(), vanish=())
    return WhyNot(
        option, value, now, searched=alternative,
        plan_cost=plan.cost, plan_fits=plan.fits,
    )  # fmt: skip


def _check(plan: Plan, names: Sequence[str], entries: Sequence[Any], what: str) -> None:
    """Raise PinError for a sharding with unknown axes or too many entries."""
    for entry in entries:
        axes = (
            entry if isinstance(entry, tuple | list) else (entry,) if isinstance(entry, str) else ()
        )
        for axis in axes:
            if axis not in plan.mesh.names:
                known = ", ".join(plan.mesh.names)
                raise PinError(f"{what}: no axis {axis} in mesh {plan.mesh}; use {known}")
    program = plan.analysis.program
    for name in names:
        type_ = program.values[program.argument_values[program.arguments.index(name)]].type
        rank = len(type_.shape)
        if len(entries) > rank:
            has = "1 dimension" if rank == 1 else f"{rank} dimensions"
            raise PinError(f"{what}: {name} is {type_} and has {has}, not {len(entries)}")


def _text(spec: Any) -> str:
    entries = ["?" if is_open(entry) else repr(entry) for entry in spec]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _pinned_plan(plan: Plan, space: Space, names: Sequence[str], pins: Constraints) -> Plan:
    """The plan with the given pins, and the rest unchanged."""
    analysis = plan.analysis
    alone = Space(analysis, plan.mesh, constraints=pins, collapse=False)
    op_state = plan.op_state.copy()
    for name in names:
        op = analysis.program.arguments.index(name)
        op_state[op] = alone.pinned[op]
    state = op_state[space.classes.representative]
    if (space.of_ops(state) != op_state).any():
        space = Space(
            analysis, plan.mesh, constraints=space.constraints, resolution=plan.resolution,
            collapse=False,
        )  # fmt: skip
        state = op_state
    model = _model(plan, space)
    cost = float(model.cost(model.price(state[None]), plan.memory_bytes)[0])
    return _plan_of(plan, model, SearchResult((), state, cost, 1, 0.0, ()))


def _model(plan: Plan, space: Space) -> CostModel:
    """The plan's cost model for another space."""
    return CostModel(
        space, plan.hardware, overlap=plan.model.overlap, like=plan.model, safety=plan.safety
    )


def _start_of(plan: Plan, space: Space) -> tuple[Action, ...]:
    """The plan's actions after the fixed ones, on the op classes of another space."""
    before = plan.model.space
    offered = set(space.actions)
    actions = []
    for action in plan.actions[len(before.first_actions) :]:
        if not action.part:
            actions += [action] if action in offered else []
            continue
        pairs = [
            (k, factor) for old, factor in action.part
            for k in np.unique(space.classes.of_op[before.classes.of_op == old]).tolist()
        ]  # fmt: skip
        actions.append(action._replace(part=tuple(dict.fromkeys(pairs))))
    return tuple(actions)


def _plan_of(plan: Plan, model: CostModel, result: SearchResult) -> Plan:
    alternative = make_plan(
        model, result, memory_bytes=plan.memory_bytes, seed=plan.seed,
        seconds={"search": result.seconds}, resolution=plan.resolution,
    )  # fmt: skip
    return dataclasses.replace(alternative, origin=plan.origin)


def _alternative(plan: Plan, other: Plan) -> Alternative[Plan]:
    mine, theirs = (_counted(explain_collectives(p)) for p in (plan, other))
    return Alternative(
        plan=other,
        numbers=tuple(numbers(plan.after, other.after)),
        appear=_more(theirs, mine),
        vanish=_more(mine, theirs),
        arguments=tuple(
            (path, spec_text(spec), spec_text(other.arguments[path]))
            for path, spec in plan.arguments.items()
            if plan.mesh.sharding(other.arguments[path]) != plan.mesh.sharding(spec)
        ),
        cost=_cost_as_of(plan, other),
    )


def _cost_as_of(plan: Plan, other: Plan) -> float:
    """The cost of another plan, relative to the unsharded program of ``plan``.

    Programs with other memory policies have other unsharded steps and peaks.
    """
    mine, theirs = plan.model, other.model
    time = other.after.step_seconds / max(theirs.initial_seconds, _TINY)
    misfit = max(0.0, other.cost - time) if not other.fits else 0.0
    seconds = max(theirs.initial_seconds, _TINY) / max(mine.initial_seconds, _TINY)
    peaks = max(theirs.initial_peak, 1.0) / max(mine.initial_peak, 1.0)
    return (other.cost - misfit) * seconds + misfit * peaks


#: Programs without time must not divide by zero.
_TINY = float(np.finfo(np.float64).tiny)

#: Smaller counts of a collective are ignored: XLA merges shares of some.
_SHARE = 0.01

_Counted = dict[tuple[str, tuple[str, ...], str, str], tuple[float, float]]


def _counted(rows: Sequence[CollectiveExplanation]) -> _Counted:
    """Counts and seconds of collectives, by kind, axes and ops; list positions are ``*``."""
    totals: _Counted = {}
    for row in rows:
        key = (row.kind, row.axes, folded(row.definition), folded(row.use))
        count, seconds = totals.get(key, (0.0, 0.0))
        totals[key] = count + row.count, seconds + row.total_seconds
    return totals


def _more(these: _Counted, those: _Counted) -> tuple[CollectiveCount, ...]:
    """The collectives that ``these`` have in excess of ``those``, by decreasing time."""
    excess = []
    for key, (count, seconds) in these.items():
        other, spent = those.get(key, (0.0, 0.0))
        if count > other + _SHARE:
            excess.append(CollectiveCount(*key, count - other, max(0.0, seconds - spent)))
    return tuple(sorted(excess, key=lambda row: -row.seconds))
