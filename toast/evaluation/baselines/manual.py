"""Expert strategies (section 5.1.1 of the paper), as states of the decision space."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from toast import inputs
from toast.analysis import Analysis
from toast.cost import CostModel, Overlap
from toast.errors import PlanError
from toast.inputs import AnyHardware, AnyMesh
from toast.models import Strategies
from toast.paths import matches
from toast.plan import Plan, make_plan
from toast.search import SearchResult, begin_with_fixed
from toast.space import Action, Constraints, Space, States

#: Maximum number of resolution orders per action; the cheapest state counts.
_MOST_ORDERS = 16

#: Maximum number of combinations that are extended by the next axis.
_FRONTIER = 64

#: The number of states in a batch.
_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Component:
    """Dimensions that experts shard together, on any axis: ``FSDP`` or ``Megatron``."""

    name: str
    #: Dimensions of arguments, as in strategies.
    dimensions: tuple[tuple[str, int], ...]


def components(strategies: Strategies) -> tuple[Component, ...]:
    """The components of strategies, in their order.

    Dimensions that always share their axes are one component.  Its name is that of the first
    strategy whose other components have names: ``FSDP`` consists of data parallelism and the width
    of the model, so the width gets its name.

    >>> components({"data": [("x", 0, "all")], "FSDP": [("x", 0, "all"), ("w", 0, "all")]})[1]
    Component(name='FSDP', dimensions=(('w', 0),))
    """
    places: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for name, steps in strategies.items():
        for pattern, dimension, where in steps:
            places.setdefault((pattern, dimension), []).append((name, where))
    groups: dict[tuple[tuple[str, str], ...], list[tuple[str, int]]] = {}
    for dimension_of, at in places.items():
        groups.setdefault(tuple(sorted(at)), []).append(dimension_of)
    names: dict[tuple[tuple[str, int], ...], str] = {}
    for name in strategies:
        inside = [tuple(g) for at, g in groups.items() if any(s == name for s, _ in at)]
        fresh = [group for group in inside if group not in names]
        # In "data + expert parallel + Megatron", the new component comes last.
        short = name.split(" + ")[-1]
        for group in fresh:
            names[group] = short if len(fresh) == 1 else f"{short} of {group[0][0]}"
    return tuple(Component(names[tuple(g)], tuple(g)) for g in groups.values())


def manual(
    analysis: Analysis,
    mesh: AnyMesh,
    hardware: AnyHardware,
    strategies: Strategies,
    *,
    memory_bytes: float | None = None,
    safety: float | None = None,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best expert strategy, or combination of components of strategies.

    Each axis may have any components in any order, as in section 5.1.1: for a transformer, data
    parallelism, FSDP, Megatron and sequence parallelism.  From the third axis on, only the best
    combinations of the earlier axes are extended.  Strategies come after ``constraints``, which
    hold.  ``memory_bytes`` is the limit per device (default: the hardware's); plans that fit, with
    the odds ``safety`` if they are set, rank first.  ``Plan.note`` names the best strategy.
    ``progress`` is called with messages.

    Raises :class:`toast.errors.PlanError` without strategies.
    """
    if not strategies:
        raise PlanError(
            f"{analysis.program.name} has no expert strategies, unlike the models of the zoo; "
            "pass strategies, or remove manual from the methods"
        )
    mesh, hardware = inputs.system_of(mesh, hardware)
    limit = inputs.limit_of(memory_bytes, hardware)
    report_stage = progress or (lambda _stage: None)
    seconds = dict(analysis.seconds)
    begin = time.perf_counter()
    report_stage("decision space")
    space = Space(analysis, mesh, constraints=constraints)
    model = CostModel(space, hardware, overlap=overlap, safety=safety)
    begin_with_fixed(model)
    seconds["decision space"] = time.perf_counter() - begin
    begin = time.perf_counter()
    report_stage("expert strategies")
    ranking = _Ranking(model, limit)
    ranking.add([("unsharded", model.space.initial)])
    ranking.add(list(manual_states(model, strategies)))
    frontier = [("", model.space.initial)]
    for axis in _axes(model.space, "all"):
        report_stage(f"combinations, up to axis {model.space.mesh.names[axis]}")
        frontier = ranking.add(_on_axis(model, components(strategies), axis, frontier))[:_FRONTIER]
    name, state, cost = ranking.best
    seconds["search"] = time.perf_counter() - begin
    result = SearchResult((), state, cost, ranking.priced, seconds["search"], ())
    return make_plan(
        model, result, memory_bytes=limit, seed=0, seconds=seconds, method="manual", note=name
    )


#: States with the names of their strategies.
_Named = list[tuple[str, States]]


class _Ranking:
    """Prices each state once and keeps the best; of equal costs, the first."""

    def __init__(self, model: CostModel, limit: float) -> None:
        self._model, self._limit = model, limit
        self._ranks: dict[bytes, tuple[bool, float]] = {}
        self.best: tuple[str, States, float] = ("", model.space.initial, np.inf)
        self._best_rank = (True, np.inf)

    @property
    def priced(self) -> int:
        """The number of priced states."""
        return len(self._ranks)

    def add(self, states: _Named) -> _Named:
        """Price ``states``; returns the distinct ones, best first."""
        distinct: dict[bytes, tuple[str, States]] = {}
        for name, state in states:
            distinct.setdefault(state.tobytes(), (name, state))
        new = [key for key in distinct if key not in self._ranks]
        for start in range(0, len(new), _BATCH):
            part = new[start : start + _BATCH]
            prices = self._model.price(np.stack([distinct[key][1] for key in part]))
            costs = self._model.cost(prices, self._limit).tolist()
            over = (~self._model.fits(prices, self._limit)).tolist()
            for key, *rank in zip(part, over, costs, strict=True):
                self._ranks[key] = (rank[0], rank[1])
                if self._ranks[key] < self._best_rank:
                    self._best_rank = self._ranks[key]
                    self.best = (*distinct[key], rank[1])
        return [distinct[key] for key in sorted(distinct, key=self._ranks.__getitem__)]


def _on_axis(model: CostModel, offered: Sequence[Component], axis: int, before: _Named) -> _Named:
    """Extend each state by every sequence of components on the axis, short sequences first."""
    space = model.space
    names, states = [name for name, _ in before], np.stack([state for _, state in before])
    level: list[tuple[tuple[Component, ...], States]] = [((), states)]
    extended = list(before)
    while level:
        following = []
        for chosen, reached in level:
            for component in offered:
                if component in chosen:
                    continue
                after = reached
                for pattern, dimension in component.dimensions:
                    after = _all_sharded(model, after, pattern, dimension, axis)
                if (after != reached).any():
                    following.append(((*chosen, component), after))
        for chosen, reached in following:
            text = f"{space.mesh.names[axis]}: {', '.join(c.name for c in chosen)}"
            labels = [f"{name}; {text}" if name else text for name in names]
            extended += zip(labels, reached, strict=True)
        level = following
    return extended


def manual_states(model: CostModel, strategies: Strategies) -> Iterator[tuple[str, States]]:
    """The names and states of the strategies that shard something on the model's mesh.

    A strategy lists dimensions of arguments with their mesh axes: ``"first"``, ``"last"`` or
    ``"all"`` of the axes with more than one device, or the name of an axis, which does nothing on a
    mesh without it.  If the color of a dimension has conflicts, the resolution with the shortest
    step is used.
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
    groups = {"all": real, "first": real[:1], "last": real[-1:]}
    return groups.get(where, [axis for axis in real if space.mesh.names[axis] == where])


def _sharded(model: CostModel, state: States, pattern: str, dimension: int, axis: int) -> States:
    """``state`` with a dimension of all matching arguments sharded along the axis as well."""
    return np.asarray(_all_sharded(model, state[None], pattern, dimension, axis)[0])


def _all_sharded(
    model: CostModel, states: States, pattern: str, dimension: int, axis: int
) -> States:
    """``states`` with the dimension sharded as well, each with the fastest resolution."""
    groups = _color_groups(model.space, pattern, dimension)
    actions = [
        [a for a in model.space.actions if a.color == group and a.axis == axis] for group in groups
    ]
    offered = [a for a in actions if a]
    orders = list(itertools.islice(itertools.product(*offered), _MOST_ORDERS))
    variants = [_replayed(model.space, states, chosen) for chosen in orders]
    if len(variants) == 1:
        return variants[0]
    rows: list[npt.NDArray[np.float64]] = [model.price(variant).seconds for variant in variants]
    cheapest = np.argmin(rows, axis=0)
    return np.asarray(np.stack(variants)[cheapest, np.arange(len(states))])


def _replayed(space: Space, states: States, actions: Sequence[Action]) -> States:
    for action in actions:
        states = space.apply_all(states, action)
    return states


def _color_groups(space: Space, pattern: str, dimension: int) -> list[int]:
    """The color groups of a dimension of the matching arguments."""
    program, names = space.analysis.program, space.analysis.names
    groups: Mapping[int, None] = {
        int(
            space.color_group_of(int(names.def_name[names.value_dim[value] + dimension % rank]))
        ): None
        for path, value in zip(program.arguments, program.argument_values, strict=True)
        for rank in [len(program.values[value].type.shape)]
        if matches(pattern, path) and -rank <= dimension < rank
    }
    return list(groups)
