"""An earlier plan as the start of a search: its state, and actions that lead to the state.

On the program and mesh of the plan, the search starts with exactly the plan's shardings.
Refinements replace shardings that the plan's actions do not reach, and those of a baseline, which
has no actions.  The search can drop, replace and extend refinements like other actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast.distinct import distinct_rows
from toast.errors import PlanError
from toast.hardware import Mesh
from toast.paths import folded
from toast.plan.files import Saved
from toast.plan.labels import describe_value
from toast.plan.matching import Offered
from toast.plan.reapply import Work, by_class
from toast.plan.unknown_ops import follow
from toast.program import Program, Signature
from toast.space import NONE, Action, Resolving, Space, States
from toast.units import listed

#: The minimum share of the plan's arguments that another program must have.
_LEAST = 0.1

#: The least share of ops that a program and the one that is expected have in common.
_SAME_PROGRAM = 0.5

#: Maximum number of actions that approximate the shardings of a plan without actions.
_MOST = 12


@dataclasses.dataclass(frozen=True)
class Start:
    """An earlier plan in a decision space."""

    saved: Saved
    #: The decision space; it has more classes if the plan shards ops of one class differently.
    space: Space
    #: Whether the plan has the same program and mesh axes.
    exact: bool
    #: ``[classes, axes]`` the plan's shardings; None if only its actions are used.
    state: States | None
    #: ``[classes]`` whether the plan determines the state of the class.
    matters: npt.NDArray[np.bool_]
    #: ``[ops]`` whether a pin contradicts the plan.
    overruled: npt.NDArray[np.bool_]


class StartActions(NamedTuple):
    """The initial actions of a search, and notes about them."""

    actions: tuple[Action, ...]
    notes: tuple[str, ...]
    #: Whether no sharding of the plan is left although the plan has some.
    lost: bool
    #: The actions of the plan that have a match, without the refinements after them.
    matched: tuple[Action, ...] = ()

    @property
    def starts(self) -> tuple[tuple[Action, ...], ...]:
        """The trajectories with which the search begins."""
        return tuple(dict.fromkeys([self.actions, self.matched or self.actions]))


def check_program(saved: Saved, program: Program) -> None:
    """Raise :class:`toast.errors.PlanError` for a plan of an unrelated program.

    An unrelated program has another name and shares too few arguments (path and rank) with the
    plan.
    """
    if (
        program.name == saved.program
        or program.origin_digest == saved.digest
        or not saved.arguments
    ):
        return
    ranks = {
        (folded(path), len(program.values[value].type.shape))
        for path, value in zip(program.arguments, program.argument_values, strict=True)
    }
    here = sum((folded(path), len(entry.spec)) in ranks for path, entry in saved.arguments.items())
    if here < _LEAST * len(saved.arguments):
        raise PlanError(
            f"start {saved.name}: this is a plan of {saved.program}; {program.name} has only "
            f"{here} of its {len(saved.arguments)} arguments; start from another plan"
        )


@dataclasses.dataclass(frozen=True)
class ShardedOps:
    """The ops of a program, and the factor of each that every axis of a mesh shards."""

    program: Program
    mesh: Mesh
    #: ``[ops, axes]``
    state: npt.NDArray[np.int8]


def saved_start(
    saved: Saved,
    space: Space,
    resolution: Resolving,
    *,
    recomputed: bool = False,
    written: ShardedOps | None = None,
) -> Start:
    """The shardings of a plan in ``space``; a space with more classes uses ``resolution``.

    With ``recomputed``, the programs differ in what they recompute: ops that both have keep their
    shardings.  ``written`` is the program of the plan with what this program recomputes, if it is
    known: its ops are those of this program, but for a few.
    """
    program = space.analysis.program
    exact = saved.is_of(program) and dict(saved.mesh.real.axes) == dict(space.mesh.axes)
    if recomputed and not exact:
        initial = space.of_ops(space.pinned).copy()
        known = np.zeros(len(initial), dtype=bool)
        if written and dict(written.mesh.axes) == dict(space.mesh.axes):
            shardings, known = _of_same_ops(written, program, initial)
        if known.mean() < _SAME_PROGRAM:
            work = Work(saved, space, initial.copy(), exact, recomputed=True)
            known = work.ops()
            work.arguments()
            known |= work.placed
            shardings = work.state
        follow(shardings, known, space)
        state = _of_most(shardings, known, space)
        if (space.of_ops(state) != shardings)[known].any():
            op_state = np.where(known[:, None], shardings, space.of_ops(state))
            space = Space(
                space.analysis, space.full_mesh, constraints=space.constraints,
                resolution=resolution, apart=op_state,
            )  # fmt: skip
            state = op_state[space.classes.representative]
        matter = np.bincount(space.classes.of_op, known, len(state)) > 0
        return Start(saved, space, exact, state, matter, np.zeros(len(known), dtype=bool))
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
            space.analysis, space.full_mesh, constraints=space.constraints, resolution=resolution,
            apart=op_state,
        )  # fmt: skip
        state = op_state[space.classes.representative]
    matter = np.bincount(space.classes.of_op, matters, len(state)) > 0
    against = ((work.wanted != pinned) & (pinned != NONE)).any(axis=1)
    overruled = (known | work.placed) & matters & against
    return Start(saved, space, exact, state, matter, overruled)


def _of_same_ops(
    written: ShardedOps, program: Program, initial: npt.NDArray[np.int8]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.bool_]]:
    """``[ops, axes]`` the shardings of the same ops of another program, and ``[ops]`` whether any.

    The others have those of ``initial``, and so have the axes that it shards.  Ops are the same if
    they have the same signature and source line, and the programs have equally many of them.
    """
    theirs, ours = _by_line(written.program), _by_line(program)
    state, known = initial.copy(), np.zeros(len(initial), dtype=bool)
    for key, ops in ours.items():
        others = theirs.get(key, [])
        if len(others) == len(ops):
            state[ops] = np.where(initial[ops] == NONE, written.state[others], initial[ops])
            known[ops] = True
    return state, known


def _by_line(program: Program) -> dict[tuple[Signature, str, int], list[int]]:
    """The ops by signature, source file and line."""
    ops: dict[tuple[int, str, int], list[int]] = {}  # comparing numbers is faster
    for number, op in enumerate(program.ops):
        at = program.location(number)
        ops.setdefault((op.signature, at.file, at.line), []).append(number)
    return {
        (program.signatures[each], file, line): numbers
        for (each, file, line), numbers in ops.items()
    }


def _of_most(op_state: npt.NDArray[np.int8], known: npt.NDArray[np.bool_], space: Space) -> States:
    """The state of most of the known ops of each class: ``[classes, axes]``."""
    state = space.pinned.copy()
    ops = np.flatnonzero(known)
    rows = np.column_stack([space.classes.of_op[ops], op_state[ops]])
    each, _, _, count = distinct_rows(rows)
    for row in np.argsort(count, kind="stable").tolist():  # the most frequent one comes last
        state[each[row, 0]] = each[row, 1:]
    return state


def start_actions(start: Start) -> StartActions:
    """The actions that lead to the shardings of a plan, after the initial actions of the space.

    For another program or mesh, these are the plan's actions that have a match.
    """
    saved, space = start.saved, start.space
    state, actions, missing = space.initial, [], []
    wanted = [action for action in saved.actions if action.axis] if saved.replayed else []
    offered = Offered(space) if wanted else None
    for step in wanted:
        action = offered.exactly(step) if offered else None
        if action is None:
            missing.append(f"{step.labels[0] if step.labels else 'nothing'} on {step.axis}")
        elif action not in space.first_actions:
            actions.append(action)
            state = space.apply(state, action)
    notes = [] if start.exact else [_other_program_note(start, len(wanted), missing)]
    matched = tuple(actions) if start.state is not None and not start.exact else ()
    if start.state is not None:
        target = np.where(start.matters[:, None], space.within(start.state), state)
        notes += _pin_notes(start, target)
        if not saved.replayed:
            state = _approach(space, state, target, actions)
        known = len(actions)
        state = _refine(space, state, target, actions)
        if len(actions) > known and start.exact:
            notes.append("actions do not reach all of its shardings; refinements replace the rest")
        if (state != target).any():
            notes.append("dimensions that an axis does not divide are not sharded")
    shards = wanted or any(axes for entry in saved.arguments.values() for axes in entry.spec)
    return StartActions(
        tuple(actions),
        tuple(f"start {saved.name}: {note}" for note in notes),
        bool(shards and not start.exact and not actions and not space.first_actions),
        matched,
    )


def _other_program_note(start: Start, wanted: int, missing: Sequence[str]) -> str:
    """A note on the actions of a plan for another program or mesh."""
    saved, space = start.saved, start.space
    program = space.analysis.program
    what = f"mesh {saved.mesh}"
    if not saved.is_of(program):
        what = "another program" if saved.program == program.name else saved.program
    if not saved.replayed:
        return f"plan for {what}; values that match are sharded as in the plan"
    if not missing:
        return f"plan for {what}; all of its {wanted} actions match"
    return f"plan for {what}; {len(missing)} of {wanted} actions match nothing: {listed(missing)}"


def _pin_notes(start: Start, target: States) -> list[str]:
    """A note on the values whose shardings in the plan violate constraints; else empty."""
    differ = ((target != start.state) & start.matters[:, None]).any(axis=1)
    ops = np.flatnonzero(differ[start.space.classes.of_op] | start.overruled).tolist()
    program = start.space.analysis.program
    named = [
        program.arguments[op] if op < len(program.arguments)
        else describe_value(program, program.ops[op].results[0])
        for op in ops if program.ops[op].results
    ]  # fmt: skip
    return [f"constraints replace its shardings of {listed(named)}"] if named else []


def _approach(space: Space, state: States, target: States, actions: list[Action]) -> States:
    """Apply the actions that approach ``target`` most, one by one; adds them to ``actions``."""
    for _ in range(_MOST if space.actions else 0):
        after = space.apply_each(state, range(len(space.actions)))
        gained = (np.where(after == target, 1, -1) * (after != state)).sum(axis=(1, 2))
        best = int(np.argmax(gained))
        if gained[best] <= 0:
            break
        actions.append(space.actions[best])
        state = after[best]
    return state


def _refine(space: Space, state: States, target: States, actions: list[Action]) -> States:
    """Apply refinements, one axis at a time, that reach ``target`` as far as sizes allow.

    Adds them to ``actions``.  A second pass first removes axes that block others.
    """
    for remove in (False, True, False):
        for axis in range(target.shape[1]):
            classes = np.flatnonzero(state[:, axis] != target[:, axis]).tolist()
            part = tuple((k, NONE if remove else int(target[k, axis])) for k in classes)
            after = space.apply(state, Action(-1, (), axis, part)) if part else state
            if (after != state).any():
                actions.append(Action(-1, (), axis, part))
            state = after
    return state
