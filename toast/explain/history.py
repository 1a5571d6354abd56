"""The states after each step of a plan, and the step that caused each sharding."""

from __future__ import annotations

import numpy as np

from toast.lower import LocalProgram, OpFactors, lower
from toast.plan import Cause, Plan, shard
from toast.space import FREE, States, place_of_region


class History:
    """The states after each step of a plan, the unsharded state first."""

    def __init__(self, plan: Plan) -> None:
        space = plan.model.space
        self._plan = plan
        self.states: list[States] = [space.unsharded]
        if (space.pinned != space.unsharded).any():
            self.states.append(space.pinned)
        for action in plan.actions:
            self.states.append(space.apply(self.states[-1], action))

    def cause(self, op_class: int, axis: int) -> Cause:
        """The step that gave op class ``op_class`` its final factor along ``axis``."""
        plan, space = self._plan, self._plan.model.space
        name, final = space.mesh.names[axis], plan.state[op_class, axis]
        if space.regions[op_class, axis] != FREE:
            op = int(space.classes.representative[op_class])
            place = place_of_region(plan.analysis.program, op)
            return Cause(0, "region", name, (place,))
        last = len(self.states) - 1
        if self.states[last][op_class, axis] != final:
            return Cause(0, plan.method, name)
        number = last
        while number and self.states[number - 1][op_class, axis] == final:
            number -= 1
        if not number or number > len(plan.steps):
            return Cause(0, plan.method, name)
        step = plan.steps[number - 1]
        first = len(self.states) - len(plan.actions)
        kind = "action"
        if number < first:
            kind = "pin"
        elif number < first + len(space.first_actions):
            kind = "fix"
        elif step.part:
            kind = "refinement"
        before = plan.steps[number - 2].after if number > 1 else plan.before
        return Cause(
            number, kind, name, step.dimensions, step.resolution, step.reason, before, step.after
        )

    def undone(self, op_class: int, axis: int, factor: int) -> str:
        """The steps that gave an axis to a factor and later removed it, as text, or ``""``."""
        held = [state[op_class, axis] == factor for state in self.states]
        if not any(held) or held[-1] or len(held) > len(self._plan.steps) + 1:
            return ""
        off = len(held) - held[::-1].index(True)  # after the last state that has it
        on = next(n for n in range(off - 1, -1, -1) if not n or not held[n - 1])
        reason = self._plan.steps[off - 1].reason
        return f"step {on} sharded it, step {off} removed the axis: {reason}"


def op_factors(plan: Plan) -> OpFactors:
    """The factors of ops that hold the axes of the mesh, and the steps of the plan that chose them.

    A step is that after which a factor keeps an axis until the end of the plan.
    """
    states = np.stack(History(plan).states)
    differs = states != plan.state
    # The last state that differs comes just before the step; none differs if nothing was chosen.
    after_last = len(states) - np.argmax(differs[::-1], axis=0)
    steps = np.where(differs.any(axis=0) & ~differs[-1], after_last, 0)
    steps[steps > len(plan.steps)] = 0
    return shard.op_factors(plan.model, plan.state, steps[plan.model.space.classes.of_op])


def lowered(plan: Plan) -> LocalProgram:
    """The device-local program of a plan."""
    return lower(plan.analysis, plan.shardings, plan.factors)
