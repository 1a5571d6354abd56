"""The start of a search: actions that the user's constraints require."""

from __future__ import annotations

import numpy as np

from toast.cost import CostModel
from toast.errors import PinError
from toast.space import Action


def begin_with_fixed(model: CostModel) -> None:
    """Make searches begin with the dimensions that the user fixed on axes.

    If the color of such a dimension has conflicts, the resolution with the shortest step is used.
    Raises :class:`toast.errors.PinError` for a dimension that cannot be sharded.
    """
    space = model.space
    names = space.analysis.names
    actions: list[Action] = []
    wanted = space.resolved.fixed
    groups = dict.fromkeys((int(space.color_group_of(name)), name, axis) for name, axis in wanted)
    for group, name, axis in groups:
        offered = [a for a in space.actions if a.color == group and a.axis == axis]
        if not offered:
            raise PinError(
                f"fix: {space.analysis.name_label(name)} cannot be sharded along "
                f"{space.mesh.names[axis]}; it has {int(names.divisor[name])} elements"
            )
        if any(a.color == group and a.axis == axis for a in actions):
            continue  # another argument of the color requires it already
        after = np.stack([space.apply(space.initial, a) for a in offered])
        actions.append(offered[int(np.argmin(model.price(after).seconds))])
        space.begin_with(actions)
    for name, axis in wanted:
        op = int(names.name_op[name])
        k, factor = int(space.classes.of_op[op]), name - int(names.first_name[op])
        held = int(space.initial[k, axis])
        if held != factor:
            why = (
                "its size or another fix excludes it" if held < 0
                else f"{space.analysis.name_label(name - factor + held)} has it"
            )  # fmt: skip
            raise PinError(
                f"fix: {space.analysis.name_label(name)} cannot get axis "
                f"{space.mesh.names[axis]}: {why}; remove one"
            )
        space.hold(k, axis)
