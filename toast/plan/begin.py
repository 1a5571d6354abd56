"""An earlier plan as the start of a search: the state that it is, and actions that lead there.

On the program and mesh that it was made for the search begins with the plan's very shardings.
What its actions do not lead to, and all that a baseline sharded without any, refinements stand for:
they are actions like others, so the search may drop, replace and follow them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast.errors import PlanError
from toast.plan.files import Saved
from toast.plan.labels import describe_value, folded
from toast.plan.matching import Offered
from toast.plan.reapply import Work, by_class
from toast.program import Program
from toast.space import NONE, Action, Resolving, Space, States
from toast.units import listed

#: Of another program, the share of the plan's arguments that it must have.
_LEAST = 0.1

#: Actions that approach the shardings of a plan that has none.
_MOST = 12


@dataclasses.dataclass(frozen=True)
class Start:
    """An earlier plan in a decision space."""

    saved: Saved
    #: The space given; with further classes, where the plan shards ops of one class apart.
    space: Space
    #: Whether it was made for this program on a mesh like this.
    exact: bool
    #: ``[classes, axes]`` its shardings; none where its actions alone say what there is of it.
    state: States | None
    #: ``[classes]`` whether the state of a class matters.
    matters: npt.NDArray[np.bool_]
    #: ``[ops]`` those of which the plan says something else than what is pinned.
    overruled: npt.NDArray[np.bool_]


class Begun(NamedTuple):
    """The actions with which a search begins, and what to know of them."""

    actions: tuple[Action, ...]
    notes: tuple[str, ...]
    #: Whether nothing is left of a plan that shards something.
    lost: bool


def check_program(saved: Saved, program: Program) -> None:
    """Raise :class:`toast.errors.PlanError` for a plan of another program altogether.

    That has another name, and hardly an argument with a path and a rank of the plan's.
    """
    if program.name == saved.program or program.digest == saved.digest or not saved.arguments:
        return
    ranks = {
        (folded(path), len(program.values[value].type.shape))
        for path, value in zip(program.arguments, program.argument_values, strict=True)
    }
    here = sum((folded(path), len(said.spec)) in ranks for path, said in saved.arguments.items())
    if here < _LEAST * len(saved.arguments):
        raise PlanError(
            f"start {saved.name}: is a plan of {saved.program}; {program.name} has "
            f"{here or 'none'} of its {len(saved.arguments)} arguments; do not start from it"
        )


def started(saved: Saved, space: Space, resolution: Resolving) -> Start:
    """The shardings of a plan in a space, which has the given ``resolution``."""
    program = space.analysis.program
    exact = saved.digest == program.digest and dict(saved.mesh.axes) == dict(space.mesh.axes)
    if not exact and saved.replayed:
        none = np.zeros(0, dtype=bool)
        return Start(saved, space, exact, None, none, none)
    pinned = space.of_ops(space.pinned)
    work = Work(saved, space, pinned.copy(), exact)
    known = work.ops()
    work.arguments()
    state, matters, alike = by_class(work.state, space)
    if not alike:
        op_state = np.where(matters[:, None], work.state, space.of_ops(state))
        space = Space(
            space.analysis, space.mesh, constraints=space.constraints, resolution=resolution,
            apart=op_state,
        )  # fmt: skip
        state = op_state[space.classes.representative]
    matter = np.bincount(space.classes.of_op, matters, len(state)) > 0
    against = ((work.wanted != pinned) & (pinned != NONE)).any(axis=1)
    overruled = (known | work.placed) & matters & against
    return Start(saved, space, exact, state, matter, overruled)


def begun(start: Start) -> Begun:
    """The actions that lead to the shardings of a plan, behind those with which the space begins.

    Of a plan that was made for another program or mesh, the actions that have a counterpart.
    """
    saved, space = start.saved, start.space
    state, found, missing = space.initial, [], []
    wanted = [action for action in saved.actions if action.axis] if saved.replayed else []
    offered = Offered(space) if wanted else None
    for step in wanted:
        action = offered.exactly(step) if offered else None
        if action is None:
            missing.append(f"{step.labels[0] if step.labels else 'nothing'} on {step.axis}")
        elif action not in space.begun:
            found.append(action)
            state = space.apply(state, action)
    notes = [] if start.exact else [_of_others(start, len(wanted), missing)]
    if start.state is not None:
        target = np.where(start.matters[:, None], space.within(start.state), state)
        notes += _kept_off(start, target)
        if not saved.replayed:
            state = _approach(space, state, target, found)
        known = len(found)
        state = _refine(space, state, target, found)
        if len(found) > known:
            notes.append("no actions lead to all of its shardings; refinements stand for the rest")
        if (state != target).any():
            notes.append("what the sizes do not divide by is not sharded")
    shards = wanted or any(axes for said in saved.arguments.values() for axes in said.spec)
    return Begun(
        tuple(found),
        tuple(f"start {saved.name}: {note}" for note in notes),
        bool(shards and not start.exact and not found and not space.begun),
    )


def _of_others(start: Start, wanted: int, missing: Sequence[str]) -> str:
    """What becomes of a plan that was made for another program or mesh."""
    saved, space = start.saved, start.space
    program = space.analysis.program
    what = f"mesh {saved.mesh}"
    if saved.digest != program.digest:
        what = "another program" if saved.program == program.name else saved.program
    if not saved.replayed:
        return f"made for {what}; what is known of it here is sharded as it was"
    if not missing:
        return f"made for {what}; all of its {wanted} actions have a counterpart here"
    return (
        f"made for {what}; {len(missing)} of {wanted} actions have no counterpart here: "
        f"{listed(missing)}"
    )


def _kept_off(start: Start, target: States) -> list[str]:
    """Whether constraints hold in place of what the plan says."""
    differ = ((target != start.state) & start.matters[:, None]).any(axis=1)
    ops = np.flatnonzero(differ[start.space.classes.of_op] | start.overruled).tolist()
    program = start.space.analysis.program
    named = [
        program.arguments[op] if op < len(program.arguments)
        else describe_value(program, program.ops[op].results[0])
        for op in ops if program.ops[op].results
    ]  # fmt: skip
    return [f"the constraints hold in place of what it says of {listed(named)}"] if named else []


def _approach(space: Space, state: States, target: States, found: list[Action]) -> States:
    """The state after actions that bring it nearer to another, each as near as one can."""
    for _ in range(_MOST if space.actions else 0):
        after = space.apply_each(state, range(len(space.actions)))
        gained = (np.where(after == target, 1, -1) * (after != state)).sum(axis=(1, 2))
        best = int(np.argmax(gained))
        if gained[best] <= 0:
            break
        found.append(space.actions[best])
        state = after[best]
    return state


def _refine(space: Space, state: States, target: States, found: list[Action]) -> States:
    """The state after refinements, an axis at a time, that make it another as far as sizes allow.

    Where an axis that is to go is in the way, it is let go before.
    """
    for let_go in (False, True, False):
        for axis in range(target.shape[1]):
            classes = np.flatnonzero(state[:, axis] != target[:, axis]).tolist()
            part = tuple((k, NONE if let_go else int(target[k, axis])) for k in classes)
            after = space.apply(state, Action(-1, (), axis, part)) if part else state
            if (after != state).any():
                found.append(Action(-1, (), axis, part))
            state = after
    return state
