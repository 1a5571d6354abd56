"""Monte Carlo tree search over colors, parts of colors and regions (paper, sections 4.1 and 4.2).

The tree is a graph: a node is a state, not a sequence of actions, so transpositions share their
statistics (4.3).  A child differs from its node by one change: an action on a color, a refinement
(an action on a part of a color), or the refinements that give a region of op classes the sharding
of a proposal.

Children are priced in batches: all children of a start at once, the hundreds of other nodes
gradually.  The gain of a change is similar before and after another change.  A node therefore
prices its children in the order of their gains at its parent: a few at first, and more with every
visit (progressive widening).  A rollout combines the changes that improve the node: the best two,
the best three, and so on.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from toast.errors import SearchError
from toast.search.ledger import OVER_LIMIT, REFINEMENT_LENGTH, Ledger, Trajectory, length
from toast.search.regions import region_changes
from toast.search.stage import Budget
from toast.space import Action, Scope, States

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Op classes up to which a program is small.  Small programs get more effort (with half as many
#: classes, twice), and refinements even of trajectories far from the best.
_SMALL = 48

#: Penalty of states that do not fit, as a share of the cost: small, because the path to states that
#: fit may lead through them.
_OVER = 0.1

#: Number of best children whose distance is the unit of exploration.
_SCALE = 8

#: Consecutive waves without a new state after which a tree is exhausted.
_IDLE = 20

#: The changes of a tree:
#:
#: * ``colors``: actions on whole colors;
#: * ``parts``: also refinements of parts of colors, families of op classes, single classes of
#:   larger families, and groups of classes that differ in sizes only;
#: * ``regions``: also regions of proposals (op classes that uses connect take the proposal's
#:   sharding);
#: * ``arguments``: only families of arguments.  They take hardly any time, so the other trees leave
#:   them out, but users ask why an argument is not sharded otherwise.
Changes = Literal["colors", "parts", "regions", "arguments"]


@dataclasses.dataclass(frozen=True)
class TreeSearch:
    """A stage: Monte Carlo tree search from the starting trajectories.

    Equal stages of one search share a tree: the second one continues it.
    """

    #: The kinds of changes.
    changes: Changes = "colors"
    #: States without improvement after which the stage ends; more for small programs.
    effort: int = 256
    #: Children that a node prices at its first visit.
    width: int = 64
    #: Nodes that are expanded in one batch.
    wave: int = 4
    #: UCT's weight of exploration, in units of the distance between a node's best children.
    exploration: float = 1.0
    #: Weight of the Gumbel noise, in the same units.
    temperature: float = 0.1
    #: Maximum number of changes that a rollout combines.
    rollout: int = 16
    #: Number of families, classes and groups that change alone: those with the longest times.
    hottest: int = 48
    #: Number of parts of colors that change alone.
    widest: int = 256

    def __post_init__(self) -> None:
        if self.changes not in get_args(Changes):
            raise SearchError(f"changes {self.changes!r}: use {', '.join(get_args(Changes))}")
        least = {"effort": 1, "width": 1, "wave": 1}
        for field in dataclasses.fields(self)[1:]:
            value, low = getattr(self, field.name), least.get(field.name, 0)
            whole = field.type == "int"
            kind = numbers.Integral if whole else numbers.Real
            if not isinstance(value, kind) or not low <= float(value) < np.inf:
                what = "a whole number" if whole else "a number"
                raise SearchError(f"{field.name} {value!r}: must be {what} of at least {low}")

    @property
    def uses_proposals(self) -> bool:
        """Whether the stage asks for proposals."""
        return self.changes == "regions"

    def __call__(self, ledger: Ledger, budget: Budget) -> list[Trajectory]:
        """The starting trajectories, and the best new trajectory of the tree."""
        if self.changes in ("parts", "regions") and ledger.beaten(REFINEMENT_LENGTH):
            return ledger.starts
        if self not in ledger.memory:
            ledger.memory[self] = _Tree(ledger, self)
        tree: _Tree = ledger.memory[self]
        if self.uses_proposals and not tree.propose(ledger.proposals(budget.left)):
            return ledger.starts
        # States of a few op classes cost next to nothing.
        times = _SMALL / max(1, len(ledger.model.space.initial))
        starts = ledger.starts or [ledger.begin()]
        if self.changes == "arguments" and ledger.cheapest.cost < ledger.best.cost:
            # The sharding of one argument may make it fit, perhaps in place of a step.
            actions = ledger.cheapest.actions
            shorter = [actions[:i] + actions[i + 1 :] for i in range(len(actions))]
            starts = [*starts, ledger.cheapest, *map(ledger.begin, shorter)]
        for start in sorted(dict.fromkeys(starts)):
            if times >= 1 or not ledger.far(start):
                tree.begin(start)
        tree.grow(max(1, int(times)) * self.effort)
        return [*ledger.starts, *tree.take_best()]


class _Node:
    """A state, and its priced children."""

    __slots__ = (
        "actions", "changes", "gains", "is_start", "key", "keys", "order", "priced", "state",
        "states", "total", "value", "values", "visits",
    )  # fmt: skip

    def __init__(
        self,
        key: bytes,
        state: States,
        actions: tuple[Action, ...],
        value: float,
        gains: Floats,
        changes: Ints,
        *,
        is_start: bool,
    ) -> None:
        self.key = key
        self.state = state
        self.actions = actions
        self.value = value
        self.is_start = is_start
        #: ``[all changes]`` what each adds to the value, here or at the closest ancestor that
        #: priced it.
        self.gains = gains
        #: The order in which the node prices its changes, and the number priced.
        self.order: Ints = changes[np.argsort(gains[changes], kind="stable")]
        self.priced = 0
        # For each child: its changes, and what is known about it.
        self.changes: list[tuple[int, ...]] = []
        self.keys: list[bytes] = []
        self.states: list[States] = []
        self.values: Floats = np.empty(0)  # the best below each child
        self.visits: Floats = np.empty(0)  # infinite for exhausted children
        self.total = 0

    @property
    def best(self) -> float:
        """The best value of the node and of the tree below it."""
        return min(self.value, float(self.values.min(initial=np.inf)))


#: Nodes from a start on, each with the index of the next child; -1 for the last node.
_Path = list[tuple[_Node, int]]


class _Tree:
    """A search tree that grows by a wave of nodes at a time."""

    def __init__(self, ledger: Ledger, settings: TreeSearch) -> None:
        self._ledger = ledger
        self._space = ledger.model.space
        self._settings = settings
        #: Changes are numbered: colors, then refinements, then regions.
        self._colors = len(self._space.actions)
        self._refined = self._colors + (
            0 if settings.changes == "colors" else len(self._space.refinements)
        )
        self._regions: dict[tuple[Action, ...], None] = {}
        self._targets: set[bytes] = set()
        self._number()
        self._nodes: dict[bytes, _Node] = {}
        self._starts: list[_Node] = []
        self._visits: Floats = np.empty(0)  # of each start
        self._best: dict[bytes, Trajectory] = {}
        self._taken: set[bytes] = set()

    # -- starts ---------------------------------------------------------------------------

    def begin(self, start: Trajectory) -> None:
        """Add a trajectory to the starts of the tree."""
        state = self._ledger.replay(start.actions)
        (key,), _ = self._ledger.price(state[None])
        self._taken.add(key)
        node = self._nodes.get(key)
        if node is None or not node.is_start:
            (value,) = self._values(self._ledger.ranks([key], length(start.actions)), [key])
            node = self._node(key, state, start.actions, value, None)
            self._nodes[key] = node
            self._starts.append(node)
            self._visits = np.append(self._visits, 0.0)

    def propose(self, targets: Iterable[States]) -> bool:
        """Add the regions in which proposals differ from the best and from the empty trajectory.

        Returns whether there are proposals.
        """
        any_target = False
        for target in targets:
            any_target = True
            for actions in (self._ledger.best.actions, ()):
                state = self._ledger.replay(actions)
                self._regions.update(dict.fromkeys(region_changes(self._space, state, target)))
        self._number()
        return any_target

    def take_best(self) -> list[Trajectory]:
        """The best trajectory, unless it is a start or was taken before."""
        key = min(self._best, key=lambda key: self._best[key].rank, default=b"")
        if not key or key in self._taken:
            return []
        self._taken.add(key)
        return [self._best.pop(key)]

    def grow(self, effort: int) -> None:
        """Grow until ``effort`` states bring no improvement, or the tree is exhausted."""
        ledger = self._ledger
        rank, states, idle = ledger.best.rank, len(ledger), 0
        while len(ledger) - states < effort and idle < _IDLE:
            paths = [path for _ in range(self._settings.wave) if (path := self._select())]
            before = len(ledger)
            self._expand({path[-1][0].key: path[-1][0] for path in paths}.values())
            for path in paths:
                best = path[-1][0].best
                for node, child in path[:-1]:
                    node.values[child] = min(node.values[child], best)
            idle = idle + 1 if len(ledger) == before else 0
            if ledger.best.rank < rank - 1e-12:
                rank, states = ledger.best.rank, len(ledger)

    # -- selection ---------------------------------------------------------------------------

    def _select(self) -> _Path:
        """The path to the next node to expand; empty at an exhausted node or in a cycle."""
        values = np.array([start.best for start in self._starts])
        number = self._choose(values, self._visits)
        if number < 0:
            return []
        # Count the visit now, so that the rest of the wave prefers other nodes.
        self._visits[number] += 1
        node, visits = self._starts[number], self._visits
        path: _Path = []
        known: set[bytes] = set()
        while node.changes and not self._is_narrow(node):
            known.add(node.key)
            child = self._choose(node.values, node.visits)
            if child < 0:
                break
            visits, number = node.visits, child
            if node.keys[child] in known:  # a cycle
                visits[number] = np.inf
                return []
            visits[number] += 1
            node.total += 1
            path.append((node, child))
            node = self._child(node, child)
        if node.priced >= len(node.order) and not np.isfinite(node.visits).any():
            visits[number] = np.inf  # exhausted
            return []
        return [*path, (node, -1)]

    def _is_narrow(self, node: _Node) -> bool:
        """Whether the node should price more children (progressive widening)."""
        times = node.priced / self._settings.width
        return node.priced < len(node.order) and node.total >= 4 * times**2

    def _choose(self, values: Floats, visits: Floats) -> int:
        """The child with the best UCT score, from the best values below it; -1 for none.

        Programs differ by orders of magnitude in the gains of changes, so the distance between the
        best children is the unit.  Gumbel noise draws the child at random, by its score.
        """
        finite = np.isfinite(visits)
        if not finite.any():
            return -1
        best, last = float(values.min()), min(_SCALE, len(values) - 1)
        scale = max(1e-4, float(np.partition(values, last)[last]) - best)
        settings, chance = self._settings, self._ledger.random.gumbel(size=len(values))
        bonus = np.sqrt(np.log(visits[finite].sum() + 1.0) / (visits + 1.0))
        score = (best - values) / scale + settings.exploration * bonus
        score += settings.temperature * chance
        return int(np.argmax(np.where(finite, score, -np.inf)))

    def _child(self, node: _Node, child: int) -> _Node:
        key = node.keys[child]
        if key not in self._nodes:
            actions = (*node.actions, *self._actions(node.changes[child]))
            self._nodes[key] = self._node(
                key, node.states[child], actions, float(node.values[child]), node.gains
            )
        return self._nodes[key]

    def _node(
        self,
        key: bytes,
        state: States,
        actions: tuple[Action, ...],
        value: float,
        gains: Floats | None,
    ) -> _Node:
        """A new node; a node without the ``gains`` of a parent is a start."""
        start = gains is None
        known = np.zeros(len(self._lengths))
        if gains is not None:
            known[: len(gains)] = gains
        changes = self._changes(state)
        if self._ledger.beaten(length(actions) + 1):
            changes = changes[:0]
        fits = len(actions) + self._counts[changes] <= self._ledger.depth
        return _Node(key, state, actions, value, known, changes[fits], is_start=start)

    # -- changes -----------------------------------------------------------------------------

    def _number(self) -> None:
        """Number the changes, with the length and the number of actions of each: ``[changes]``."""
        lengths, refined = np.ones(self._colors, dtype=np.int64), self._refined - self._colors
        regions = [*self._regions]
        self._region_list = regions
        self._lengths: Ints = np.concatenate([
            lengths, np.full(refined, REFINEMENT_LENGTH),
            np.array([length(region) for region in regions], dtype=np.int64),
        ])  # fmt: skip
        self._counts: Ints = np.ones_like(self._lengths)
        self._counts[self._refined :] = [len(region) for region in regions]

    def _changes(self, state: States) -> Ints:
        """The changes that are tried from a state."""
        space, settings = self._space, self._settings
        colors = np.arange(self._colors)
        if settings.changes == "arguments":
            family = space.classes.family
            several = np.bincount(family)[family[space.arguments]] > 1
            rows = [
                space.refinements.rows(Scope.FAMILY, np.unique(family[space.arguments])),
                space.refinements.rows(Scope.CLASS, np.asarray(space.arguments)[several]),
            ]
            return np.concatenate(rows) + self._colors
        if settings.changes == "colors":
            return colors
        seconds = self._ledger.model.waiting(state)
        family, refinements = space.classes.family, space.refinements

        def most(weights: npt.NDArray[Any]) -> Ints:
            return np.argsort(-weights, kind="stable")[: settings.hottest]

        several = np.bincount(family)[family] > 1
        classes = most(np.where(several, seconds, -1.0))
        rows = [
            refinements.rows(Scope.FAMILY, most(np.bincount(family, seconds))),
            refinements.rows(Scope.CLASS, classes[several[classes]]),
            refinements.rows(Scope.ALIKE, most(np.bincount(space.alike, seconds))),
            space.parts_by(seconds)[: settings.widest],
        ]
        regions = np.arange(self._refined, len(self._lengths))
        return np.concatenate([regions, np.concatenate(rows) + self._colors, colors])

    def _actions(self, changes: Iterable[int]) -> tuple[Action, ...]:
        """The actions of changes, in order."""
        actions: list[Action] = []
        for change in changes:
            if change < self._colors:
                actions.append(self._space.actions[change])
            elif change < self._refined:
                actions += self._space.refinements.actions([change - self._colors])
            else:
                actions += self._region_list[change - self._refined]
        return tuple(actions)

    def _after(self, state: States, changes: Ints) -> tuple[Ints, States]:
        """The states after each of the changes alone, without some that have no effect."""
        colors = changes[changes < self._colors]
        refined = changes[(changes >= self._colors) & (changes < self._refined)] - self._colors
        regions = changes[changes >= self._refined]
        numbers, after = [colors], [self._space.apply_each(state, colors.tolist())]
        if len(refined):
            rows, states = self._space.refine(state, refined)
            numbers.append(rows + self._colors)
            after.append(states)
        for region in regions.tolist():
            changed = state
            for action in self._actions([region]):
                changed = self._space.apply(changed, action)
            after.append(changed[None])
        return np.concatenate([*numbers, regions]), np.concatenate(after)

    # -- expansion ---------------------------------------------------------------------------

    def _expand(self, nodes: Iterable[_Node]) -> None:
        """Price more children of nodes in one batch; then roll out from each node."""
        parts: list[tuple[_Node, Ints, States]] = []
        for node in nodes:
            all_of_them = node.is_start and not node.priced
            last = len(node.order) if all_of_them else node.priced + self._settings.width
            changes = node.order[node.priced : last]
            node.priced = min(last, len(node.order))
            if len(changes):
                node.gains[changes] = np.inf  # a change without effect has none below
                changes, states = self._after(node.state, changes)
                if len(changes):
                    parts.append((node, changes, states))
        if not parts:
            return
        keys, _ = self._ledger.price(np.concatenate([states for *_, states in parts]))
        first = 0
        for node, changes, states in parts:
            here = keys[first : first + len(changes)]
            first += len(changes)
            values = self._add(node, [(change,) for change in changes.tolist()], here, states)
            unchanged = np.array([key == node.key for key in here], dtype=bool)
            node.gains[changes] = np.where(unchanged, np.inf, values - node.value)
        rollouts = [rollout for node, *_ in parts if (rollout := self._rollout(node))[1]]
        if rollouts:
            keys, _ = self._ledger.price(np.concatenate([states for *_, states in rollouts]))
            for node, together, states in rollouts:
                self._add(node, together, keys[: len(together)], states, some=1)
                keys = keys[len(together) :]

    def _rollout(self, node: _Node) -> tuple[_Node, list[tuple[int, ...]], States]:
        """The best two, three, ... of the changes that improve a node together, and the states."""
        order = np.argsort(node.values, kind="stable")[: self._settings.rollout]
        state, together = node.state, tuple[int, ...]()
        changes: list[tuple[int, ...]] = []
        states: list[States] = []
        room = self._ledger.depth - len(node.actions)
        for child in order[node.values[order] < node.value].tolist():
            if len(node.changes[child]) > 1:
                continue  # an earlier rollout
            after = state
            for action in self._actions(node.changes[child]):
                after = self._space.apply(after, action)
            longer = (*together, *node.changes[child])
            if (after != state).any() and self._counts[list(longer)].sum() <= room:
                state, together = after, longer
                changes.append(together)
                states.append(state)
        if len(changes) < 2:
            return node, [], node.state[None]
        return node, changes[1:], np.stack(states[1:])

    def _add(
        self,
        node: _Node,
        changes: Sequence[tuple[int, ...]],
        keys: Sequence[bytes],
        states: States,
        *,
        some: int | None = None,
    ) -> Floats:
        """Add children to a node, or only the best ``some``; returns the values of all."""
        added = [int(self._lengths[list(change)].sum()) for change in changes]
        lengths = length(node.actions) + np.array(added, dtype=np.int64)
        ranks = self._ledger.ranks(keys, lengths)
        values = self._values(ranks, keys)
        best = int(np.argmin(ranks))
        leader = min((offer.rank for offer in self._best.values()), default=np.inf)
        if keys[best] not in self._taken and ranks[best] < leader:
            actions = (*node.actions, *self._actions(changes[best]))
            self._best = {keys[best]: self._ledger.offer(keys[best], actions)}
        known = {node.key, *node.keys}
        new = []
        for child in (
            np.argsort(values, kind="stable")[:some].tolist() if some else range(len(keys))
        ):
            if keys[child] not in known:
                known.add(keys[child])
                new.append(child)
        node.changes += [changes[child] for child in new]
        node.keys += [keys[child] for child in new]
        node.states += [states[child] for child in new]
        node.values = np.concatenate([node.values, values[new]])
        node.visits = np.concatenate([node.visits, np.zeros(len(new))])
        return values

    def _values(self, ranks: Floats, keys: Sequence[bytes]) -> Floats:
        """The logarithms of the costs of these ranks, plus ``_OVER`` for states that do not fit."""
        over = np.array([not self._ledger.fits(key) for key in keys], dtype=bool)
        return np.log(ranks - OVER_LIMIT * over) + _OVER * over
