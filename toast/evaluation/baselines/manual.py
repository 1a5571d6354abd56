"""What experts write by hand (paper, section 5.1.1), as states of the decision space."""

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
from toast.search import SearchResult, begin_fixed
from toast.space import Action, Constraints, Space, States

#: Resolution orders that are tried per action; the cheapest state counts.
_MOST_ORDERS = 16

#: Combinations of the axes so far that go on to the next one.
_KEPT = 64

#: States that are priced at once.
_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Component:
    """What experts shard together, on whichever axis: ``FSDP`` or ``Megatron``."""

    name: str
    #: Dimensions of arguments, as strategies write them.
    dimensions: tuple[tuple[str, int], ...]


def components(strategies: Strategies) -> tuple[Component, ...]:
    """What strategies are made of, in the order they are written.

    Dimensions that always lie on the same axes are one component.  It is named by the first
    strategy whose other components have names: ``FSDP``, which is data parallelism and the width
    of the model, names that.

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
        # Of "data + expert parallel + Megatron" the new part comes last.
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
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The best of the experts' strategies and of all combinations of their components.

    Each axis takes any components in any order, as section 5.1.1 searches them: for a transformer,
    of data parallelism, FSDP, Megatron and sequence parallelism.  From the third axis on only the
    best combinations of those before go on.  All comes behind ``constraints``, which hold.  What
    fits ranks before what does not; ``Plan.note`` names the winner.

    Raises :class:`toast.errors.PlanError` without strategies.
    """
    if not strategies:
        raise PlanError(
            f"{analysis.program.name} has no expert strategies, unlike the models of the zoo; "
            "pass strategies, or remove manual from the methods"
        )
    mesh, hardware = inputs.system_of(mesh, hardware)
    limit = inputs.limit_of(memory_bytes, hardware)
    tell = progress or (lambda _stage: None)
    seconds = dict(analysis.seconds)
    begin = time.perf_counter()
    tell("decision space")
    model = CostModel(Space(analysis, mesh, constraints=constraints), hardware, overlap=overlap)
    begin_fixed(model)
    seconds["decision space"] = time.perf_counter() - begin
    begin = time.perf_counter()
    tell("experts' strategies")
    ranking = _Ranking(model, limit)
    ranking.add([("unsharded", model.space.initial)])
    ranking.add(list(manual_states(model, strategies)))
    frontier = [("", model.space.initial)]
    for axis in _axes(model.space, "all"):
        tell(f"combinations, up to axis {mesh.names[axis]}")
        frontier = ranking.add(_on_axis(model, components(strategies), axis, frontier))[:_KEPT]
    name, state, cost = ranking.best
    seconds["search"] = time.perf_counter() - begin
    found = SearchResult((), state, cost, ranking.priced, seconds["search"], ())
    return make_plan(
        model, found, memory_bytes=limit, seed=0, seconds=seconds, method="manual", note=name
    )


#: States by the way they came about.
_Named = list[tuple[str, States]]


class _Ranking:
    """Prices states once, and knows the best; of equals the first, which has the shortest name."""

    def __init__(self, model: CostModel, limit: float) -> None:
        self._model, self._limit = model, limit
        self._ranks: dict[bytes, tuple[bool, float]] = {}
        self.best: tuple[str, States, float] = ("", model.space.initial, np.inf)
        self._best_rank = (True, np.inf)

    @property
    def priced(self) -> int:
        """How many states were priced."""
        return len(self._ranks)

    def add(self, states: _Named) -> _Named:
        """Price ``states``; without those that are equal to an earlier one, the best first."""
        distinct: dict[bytes, tuple[str, States]] = {}
        for name, state in states:
            distinct.setdefault(state.tobytes(), (name, state))
        new = [key for key in distinct if key not in self._ranks]
        for start in range(0, len(new), _BATCH):
            part = new[start : start + _BATCH]
            prices = self._model.price(np.stack([distinct[key][1] for key in part]))
            costs = self._model.cost(prices, self._limit).tolist()
            over = (prices.peak_bytes > self._limit).tolist()
            for key, *rank in zip(part, over, costs, strict=True):
                self._ranks[key] = (rank[0], rank[1])
                if self._ranks[key] < self._best_rank:
                    self._best_rank = self._ranks[key]
                    self.best = (*distinct[key], rank[1])
        return [distinct[key] for key in sorted(distinct, key=self._ranks.__getitem__)]


def _on_axis(model: CostModel, offered: Sequence[Component], axis: int, before: _Named) -> _Named:
    """Each of ``before`` with every sequence of components on the axis, short sequences first."""
    space = model.space
    names, states = [name for name, _ in before], np.stack([state for _, state in before])
    level: list[tuple[tuple[Component, ...], States]] = [((), states)]
    found = list(before)
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
            found += zip(labels, reached, strict=True)
        level = following
    return found


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
    return np.asarray(_all_sharded(model, state[None], pattern, dimension, axis)[0])


def _all_sharded(
    model: CostModel, states: States, pattern: str, dimension: int, axis: int
) -> States:
    """The same for every one of ``states``, each with the resolution that takes least time."""
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
    """The color groups of a dimension of the arguments whose path matches."""
    program, names = space.analysis.program, space.analysis.names
    found: Mapping[int, None] = {
        int(
            space.color_group_of(int(names.def_name[names.value_dim[value] + dimension % rank]))
        ): None
        for path, value in zip(program.arguments, program.argument_values, strict=True)
        for rank in [len(program.values[value].type.shape)]
        if matches(pattern, path) and -rank <= dimension < rank
    }
    return list(found)
