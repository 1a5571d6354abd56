"""AutoMap, and Shardy's propagation alone: shardings of arguments, propagated by the compiler.

:func:`automap` is the search of AutoMap (Schaarschmidt et al. 2021, Alabed et al. 2022), as
described in the papers: a Monte Carlo tree search whose actions shard one dimension of a group of
arguments along one mesh axis.  The compiler propagates each action through the whole program before
it is priced.  Propagation is Shardy's, argument groups are TOAST's (so layers are sharded alike),
and prices are those of TOAST's cost model, so that plans are comparable.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast import inputs
from toast.analysis import Analysis
from toast.cost import CostModel, Overlap
from toast.errors import PlanError
from toast.evaluation.baselines.propagated import Propagator, Sharded
from toast.hardware import Mesh
from toast.inputs import AnyHardware, AnyMesh
from toast.paths import folded, matches
from toast.plan import Plan, Prediction, Step, make_plan
from toast.plan.prediction import reason_of
from toast.program import Spec
from toast.search import OVER_LIMIT, Round, SearchResult, Settings
from toast.space import FREE, Constraints, Resolved, Space, resolve

Floats = npt.NDArray[np.float64]

#: The note of a plan whose search the time limit ended.
OUT_OF_TIME = "stopped at its time limit"


class ArgumentAction(NamedTuple):
    """Shard a dimension of all arguments of a group (4.4) along a mesh axis."""

    group: int
    dimension: int
    axis: int


def automap(
    analysis: Analysis,
    mesh: AnyMesh,
    hardware: AnyHardware,
    *,
    memory_bytes: float | None = None,
    safety: float | None = None,
    seed: int = 0,
    budget: float | None = None,
    trajectories: int = 64,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    progress: Callable[[Round], None] | None = None,
) -> Plan:
    """The best plan of AutoMap's search over shardings of arguments.

    ``memory_bytes`` is the limit per device (default: the hardware's), and ``safety`` the odds with
    which a plan must fit.  The search ends after two
    rounds of ``trajectories`` without improvement (TOAST's after one), or ``budget`` seconds after
    the call, when the propagation in progress is finished; the note of the plan then states this.
    Without a budget, the same seed gives the same plan.  ``progress`` is called after each round.

    The search starts from the ``constraints`` on arguments and respects them there, but propagation
    ignores constraints (:func:`toast.space.broken` lists violations).

    Raises :class:`toast.errors.PlanError` if the program is a fact base.
    """
    begin = time.perf_counter()
    settings = Settings(seed=seed, budget=budget, patience=2)
    setting = _setting(analysis, mesh, hardware, overlap, memory_bytes, safety, constraints)
    if budget is not None:  # the budget includes the setup
        left = max(budget - (time.perf_counter() - begin), 0.0)
        settings = dataclasses.replace(settings, budget=left)
    search = _Search(setting, settings, trajectories, progress)
    result, path = search.run()
    note = OUT_OF_TIME if search.out_of_time else ""
    return _plan(setting, result, path, "automap", seed=seed, note=note)


def shardy(
    analysis: Analysis,
    mesh: AnyMesh,
    hardware: AnyHardware,
    *,
    batch: Mapping[str, int] | None = None,
    memory_bytes: float | None = None,
    safety: float | None = None,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
) -> Plan:
    """Data parallelism: the batch is sharded along all axes, and Shardy propagates it.

    ``batch`` maps patterns of argument paths to their batch dimension.  The default is dimension 0
    of the inputs: of the arguments that are not donated, if there are donated ones; otherwise of
    the integer arguments, or else of the first argument.  ``memory_bytes``, ``safety`` and
    ``constraints`` are as for :func:`automap`.

    Raises :class:`toast.errors.PlanError` if a pattern matches no argument dimension, or if the
    program is a fact base.
    """
    setting = _setting(analysis, mesh, hardware, overlap, memory_bytes, safety, constraints)
    begin = time.perf_counter()
    space, program = setting.space, analysis.program
    dimensions = _batch(analysis, batch)
    arguments = dict(setting.constrained)
    for argument, d in dimensions.items():
        shape = program.values[program.argument_values[argument]].type.shape
        spec = arguments.get(argument, ((),) * len(shape))
        for axis, size in enumerate(space.mesh.sizes):
            if size > 1 and setting.allowed[argument][d][axis]:
                spec = _with_axis(space.mesh, spec, shape, d, axis) or spec
        arguments[argument] = spec
    sharded = setting.propagator.run(arguments)
    prices = setting.model.price(np.stack([space.initial, sharded.state]))
    result = SearchResult(
        actions=(),
        state=sharded.state,
        cost=float(setting.model.cost(prices, setting.memory_bytes)[1]),
        states=2,
        seconds=time.perf_counter() - begin,
        rounds=(),
    )
    return _plan(setting, result, (), "shardy")


#: The exploration weight of UCT, in units of the logarithm of the cost.
_EXPLORATION = 2.0


class _Setting(NamedTuple):
    """What both methods need: a space with one class per op, its prices, and propagation."""

    space: Space
    model: CostModel
    propagator: Propagator
    memory_bytes: float
    #: The seconds of all stages so far.
    seconds: dict[str, float]
    #: The constraints on arguments: their shardings by number, and
    #: ``[arguments][dimensions][axes]`` whether an axis may shard a dimension.
    constrained: dict[int, Spec]
    allowed: list[list[list[bool]]]


def _setting(
    analysis: Analysis,
    mesh: AnyMesh,
    hardware: AnyHardware,
    overlap: Overlap,
    memory_bytes: float | None,
    safety: float | None,
    constraints: Constraints | None,
) -> _Setting:
    mesh, hardware = inputs.system_of(mesh, hardware)
    limit = inputs.limit_of(memory_bytes, hardware)
    begin = time.perf_counter()
    space = Space(analysis, mesh, collapse=False)
    model = CostModel(space, hardware, overlap=overlap, safety=safety)
    propagator = Propagator(space)
    spent = time.perf_counter() - begin
    seconds = {**analysis.seconds, "decision space": spent}
    resolved = resolve(analysis, mesh, constraints or Constraints())
    mesh = space.mesh
    constrained, allowed = _constrained(analysis, mesh, resolved), _allowed(analysis, resolved)
    return _Setting(space, model, propagator, limit, seconds, constrained, allowed)


def _constrained(analysis: Analysis, mesh: Mesh, resolved: Resolved) -> dict[int, Spec]:
    """The shardings of arguments, by number, that constraints require."""
    names, program = analysis.names, analysis.program
    count = len(program.arguments)
    wanted = [
        (op, int(names.first_name[op]) + factor, axis)
        for op, row in enumerate(resolved.holders[:count].tolist())
        for axis, factor in enumerate(row)
        if factor >= 0 and mesh.sizes[axis] > 1
    ]
    wanted += [(int(names.name_op[name]), name, axis) for name, axis in resolved.fixed]
    major = {name: place for place, name in enumerate(resolved.order or mesh.names)}
    specs: dict[int, Spec] = {}
    for op, name, axis in sorted(wanted, key=lambda row: major[mesh.names[row[2]]]):
        if op < count:
            value = program.argument_values[op]
            shape = program.values[value].type.shape
            d = names.def_name[names.value_dim[value] :][: len(shape)].tolist().index(name)
            spec = specs.get(op, ((),) * len(shape))
            specs[op] = _with_axis(mesh, spec, shape, d, axis) or spec
    return specs


def _allowed(analysis: Analysis, resolved: Resolved) -> list[list[list[bool]]]:
    """``[arguments][dimensions][axes]`` whether constraints allow the axis."""
    names, program = analysis.names, analysis.program
    allowed = []
    for argument, value in enumerate(program.argument_values):
        rows = names.def_name[names.value_dim[value] : names.value_dim[value + 1]]
        free = resolved.holders[argument] == FREE
        allowed.append([(free & ~resolved.closed[name]).tolist() for name in rows])
    return allowed


def _with_axis(mesh: Mesh, spec: Spec, shape: tuple[int, ...], d: int, axis: int) -> Spec | None:
    """A sharding with one more axis at a dimension; None if it does not divide or is in use."""
    name, shards = mesh.axes[axis]
    sizes = dict(mesh.axes)
    for other in spec[d]:
        shards *= sizes[other]
    if shape[d] % shards or any(name in axes for axes in spec):
        return None
    return (*spec[:d], (*spec[d], name), *spec[d + 1 :])


def _batch(analysis: Analysis, patterns: Mapping[str, int] | None) -> dict[int, int]:
    """The batch dimension of each argument that has one, by number."""
    program = analysis.program
    types = [program.values[v].type for v in program.argument_values]
    if patterns is None:
        inputs = [i for i in range(len(types)) if types[i].shape and i not in program.donated]
        if not program.donated:
            inputs = [i for i in inputs if types[i].dtype.lstrip("u").startswith("i")] or inputs[:1]
        return dict.fromkeys(inputs, 0)
    dimensions: dict[int, int] = {}
    for pattern, d in patterns.items():
        named = {
            i: d % len(types[i].shape)
            for i, path in enumerate(program.arguments)
            if matches(pattern, path) and -len(types[i].shape) <= d < len(types[i].shape)
        }
        if not named:
            raise PlanError(
                f"batch {pattern}:{d}: {program.name} has no such argument dimension; "
                f"its arguments are {', '.join(program.arguments[:8])} ..."
            )
        dimensions |= named
    return dimensions


def _plan(
    setting: _Setting,
    result: SearchResult,
    path: tuple[tuple[ArgumentAction, Sharded], ...],
    method: str,
    *,
    seed: int = 0,
    note: str = "",
) -> Plan:
    """The plan of a state, with a step for each action on its path."""
    plan = make_plan(
        setting.model, result, memory_bytes=setting.memory_bytes, seed=seed,
        seconds={**setting.seconds, "search": result.seconds}, method=method, note=note,
    )  # fmt: skip
    analysis = plan.analysis
    before, steps = plan.before, []
    for action, sharded in path:
        prices = setting.model.price(sharded.state[None])
        after = Prediction.of(prices).with_error_bars(setting.model, setting.memory_bytes)
        members = np.flatnonzero(analysis.argument_group == action.group).tolist()
        labels = [f"{folded(analysis.program.arguments[i])}:{action.dimension}" for i in members]
        steps.append(
            Step(
                dimensions=tuple(dict.fromkeys(labels)),
                axis=setting.space.mesh.names[action.axis],
                resolution=(),
                after=after,
                reason=reason_of(before, after, setting.memory_bytes, setting.model),
            )
        )
        before = after
    return dataclasses.replace(plan, steps=tuple(steps))


class _AutomapNode:
    """A node of AutoMap's tree: shardings of all arguments, propagated and priced."""

    __slots__ = ("actions", "children", "cost", "fits", "sharded", "total", "value", "visits")

    def __init__(
        self, sharded: Sharded, actions: list[ArgumentAction], cost: float, fits: bool
    ) -> None:
        self.sharded, self.actions, self.cost, self.fits = sharded, actions, cost, fits
        self.children: dict[int, _AutomapNode] = {}
        # The last entry is the action stop.  Propagation is expensive, so a child has the value of
        # its parent before its first visit.
        self.visits = np.zeros(len(actions) + 1)
        self.value: Floats = np.full(len(actions) + 1, -np.log(cost))
        self.total = 0


_Path = tuple[tuple[ArgumentAction, _AutomapNode], ...]


class _Search:
    """UCT with propagation after every action.

    A trajectory follows the tree.  From its first new state on, it takes random actions as long as
    each reduces the cost.
    """

    def __init__(
        self,
        setting: _Setting,
        settings: Settings,
        trajectories: int,
        progress: Callable[[Round], None] | None,
    ) -> None:
        self._setting, self._settings, self._progress = setting, settings, progress
        self._trajectories = trajectories
        self._random = np.random.default_rng(settings.seed)
        self._nodes: dict[tuple[bytes, tuple[Spec, ...]], _AutomapNode] = {}
        self._best: tuple[float, _Path] = (np.inf, ())
        self._begin = time.perf_counter()
        self.out_of_time = False
        analysis = setting.space.analysis
        self._members: dict[int, list[int]] = {
            group: np.flatnonzero(analysis.argument_group == group).tolist()
            for group in np.unique(analysis.argument_group).tolist()
        }
        program = analysis.program
        self._shapes = [program.values[v].type.shape for v in program.argument_values]

    def run(self) -> tuple[SearchResult, tuple[tuple[ArgumentAction, Sharded], ...]]:
        """Search until rounds bring no improvement; returns the best state and its actions."""
        settings = self._settings
        root = self._node(self._setting.propagator.run(self._setting.constrained))
        self._offer(root, ())
        rounds: list[Round] = []
        stale = 0
        for number in range(settings.rounds):
            before = self._best[0]
            for _ in range(self._trajectories):
                if self._late():
                    break
                self._trajectory(root)
            path = self._best[1]
            best = path[-1][1] if path else root
            elapsed = time.perf_counter() - self._begin
            rounds.append(Round(number, len(self._nodes), best.cost, elapsed))
            if self._progress:
                self._progress(rounds[-1])
            stale = 0 if self._best[0] < before - 1e-9 else stale + 1
            if self.out_of_time or stale >= settings.patience:
                break
        result = SearchResult(
            actions=(),
            state=best.sharded.state,
            cost=best.cost,
            states=len(self._nodes),
            seconds=time.perf_counter() - self._begin,
            rounds=tuple(rounds),
        )
        return result, tuple((action, node.sharded) for action, node in path)

    def _late(self) -> bool:
        budget = self._settings.budget
        if budget is not None and time.perf_counter() - self._begin >= budget:
            self.out_of_time = True
        return self.out_of_time

    def _trajectory(self, node: _AutomapNode) -> None:
        choices: list[tuple[_AutomapNode, int]] = []
        path: _Path = ()
        while len(path) < self._settings.depth:
            choice = self._select(node)
            choices.append((node, choice))
            if choice == len(node.actions):
                break
            known = len(self._nodes)
            child = self._child(node, choice)
            path = (*path, (node.actions[choice], child))
            self._offer(child, path)
            new = len(self._nodes) > known
            parent, node = node, child
            if (new and child.cost >= parent.cost) or self._late():
                break
        # Each choice is credited with the best state below it.
        reward = -np.inf
        nodes = [child for _, child in path]
        for depth in reversed(range(len(choices))):
            visited, choice = choices[depth]
            below = nodes[depth] if depth < len(nodes) else visited
            length = min(depth + 1, len(nodes))
            reward = max(reward, -np.log(self._length_cost(below.cost, length)))
            first = visited.visits[choice] == 0
            visited.value[choice] = reward if first else max(visited.value[choice], reward)
            visited.visits[choice] += 1
            visited.total += 1

    def _select(self, node: _AutomapNode) -> int:
        bonus = _EXPLORATION * np.sqrt(np.log(node.total + 1.0) / (node.visits + 1.0))
        score = node.value + bonus + 1e-9 * self._random.random(len(node.value))
        return int(np.argmax(score))

    def _child(self, node: _AutomapNode, choice: int) -> _AutomapNode:
        child = node.children.get(choice)
        if child is None:
            changes = self._changes(node.sharded, node.actions[choice])
            child = self._node(self._setting.propagator.run(changes, node.sharded))
            node.children[choice] = child
        return child

    def _node(self, sharded: Sharded) -> _AutomapNode:
        """The node of a state; new states are priced."""
        key = (sharded.state.tobytes(), sharded.arguments)
        node = self._nodes.get(key)
        if node is None:
            prices = self._setting.model.price(sharded.state[None])
            cost = float(self._setting.model.cost(prices, self._setting.memory_bytes)[0])
            fits = bool(self._setting.model.fits(prices, self._setting.memory_bytes)[0])
            node = self._nodes[key] = _AutomapNode(sharded, self._actions(sharded), cost, fits)
        return node

    def _actions(self, sharded: Sharded) -> list[ArgumentAction]:
        """The actions that change the sharding of at least one argument."""
        return [
            action
            for group, members in self._members.items()
            for d in range(len(self._shapes[members[0]]))
            for axis, size in enumerate(self._setting.space.axis_sizes.tolist())
            for action in [ArgumentAction(group, d, axis)]
            if size > 1 and self._changes(sharded, action)
        ]

    def _changes(self, sharded: Sharded, action: ArgumentAction) -> dict[int, Spec]:
        """The new shardings of the arguments that an action changes.

        Arguments that already have the axis, or that it does not divide, stay unchanged.
        """
        mesh, d, axis = self._setting.space.mesh, action.dimension, action.axis
        changes: dict[int, Spec] = {}
        for argument in self._members[action.group]:
            if self._setting.allowed[argument][d][axis]:
                spec = sharded.arguments[argument]
                after = _with_axis(mesh, spec, self._shapes[argument], d, axis)
                if after is not None:
                    changes[argument] = after
        return changes

    def _length_cost(self, cost: float, length: int) -> float:
        return cost * (1.0 + self._settings.action_cost * length)

    def _offer(self, node: _AutomapNode, path: _Path) -> None:
        rank = self._length_cost(node.cost, len(path)) + (0.0 if node.fits else OVER_LIMIT)
        if rank < self._best[0] - 1e-12:
            self._best = (rank, path)
