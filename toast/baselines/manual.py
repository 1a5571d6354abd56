"""What experts write by hand (paper, section 5.1.1), as states of the decision space."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from toast.cost import CostModel
from toast.models import Strategies
from toast.space import Action, Space, States

#: Resolution orders that are tried per action; the cheapest state counts.
_MOST_ORDERS = 16


def manual_states(model: CostModel, strategies: Strategies) -> Iterator[tuple[str, States]]:
    """Each strategy's state on the model's mesh, by name, those that can be had there.

    A strategy names argument dimensions and the mesh axis for each, ``"first"``, ``"last"`` or
    ``"all"`` of the mesh's axes of more than one device.  Where the color of a dimension has
    conflicts, its resolution is the one with which the step takes least time.
    """
    for name, steps in strategies.items():
        state = model.space.initial
        for pattern, dimension, where in steps:
            for axis in _axes(model.space, where):
                state = _sharded(model, state, pattern, dimension, axis)
        if (state != model.space.initial).any():
            yield name, state


def _axes(space: Space, where: str) -> Sequence[int]:
    real = [axis for axis, size in enumerate(space.axis_sizes.tolist()) if size > 1]
    return {"all": real, "first": real[:1], "last": real[-1:]}[where]


def _sharded(model: CostModel, state: States, pattern: str, dimension: int, axis: int) -> States:
    """``state`` with the dimension of all arguments like ``pattern`` on the axis as well."""
    groups = _color_groups(model.space, pattern, dimension)
    actions = [
        [a for a in model.space.actions if a.color == group and a.axis == axis] for group in groups
    ]
    offered = [a for a in actions if a]
    orders = itertools.islice(itertools.product(*offered), _MOST_ORDERS)
    states = [_replayed(model.space, state, chosen) for chosen in orders]
    return states[int(np.argmin(model.price(np.stack(states)).seconds))] if states else state


def _replayed(space: Space, state: States, actions: Sequence[Action]) -> States:
    for action in actions:
        state = space.apply(state, action)
    return state


def _color_groups(space: Space, pattern: str, dimension: int) -> list[int]:
    """The color groups of a dimension of the arguments whose path matches."""
    program, names = space.analysis.program, space.analysis.names
    # Brackets of paths are no character classes.
    wanted = pattern.replace("[", "[[]")
    found: Mapping[int, None] = {
        int(
            space.color_group_of(int(names.def_name[names.value_dim[value] + dimension % rank]))
        ): None
        for path, value in zip(program.arguments, program.argument_values, strict=True)
        for rank in [len(program.values[value].type.shape)]
        if fnmatch.fnmatchcase(path, wanted) and -rank <= dimension < rank
    }
    return list(found)
