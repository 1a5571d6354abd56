"""Monte Carlo tree search over actions (paper, sections 4.1 and 4.2).

The tree is a graph: a node is a state, not a sequence of actions, so transpositions share their
statistics by construction (4.3).  The cost of each child after one step is its prior: it directs
the first visits.  Where a program has many actions, a node looks at the most promising of them
first, as its parent saw them, and at more with every visit (progressive widening).

Trajectories go in waves: all of a wave take their next step together, so that the children of all
the nodes that they reach are priced in one batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from toast.search.ledger import Ledger, Trajectory
from toast.space import Action, States

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class _Node:
    """A state and its children, as far as they are priced."""

    __slots__ = (
        "actions",
        "cost",
        "key",
        "keys",
        "looked",
        "order",
        "prior",
        "state",
        "total",
        "value",
        "visits",
    )

    def __init__(self, key: bytes, state: States, cost: float, prior: Floats) -> None:
        self.key = key
        self.state = state
        self.cost = cost
        self.prior = prior.copy()  # [all actions] logarithm of what each does to the cost
        self.order: Ints = np.argsort(prior, kind="stable")  # in which they are looked at
        self.looked = 0
        self.actions: list[int] = []  # of each child, by number
        self.keys: list[bytes] = []  # of each child
        # Of each child, and last of the choice to stop here.
        self.visits: Floats = np.zeros(1)
        self.value: Floats = np.array([-np.log(cost)])  # best reward found below
        self.total = 0


@dataclasses.dataclass
class _Walker:
    """A trajectory on its way down."""

    node: _Node
    actions: tuple[Action, ...] = ()
    path: list[tuple[_Node, int]] = dataclasses.field(default_factory=list)
    done: bool = False


class Tree:
    """A search tree that grows wave by wave."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        depth: int,
        exploration: float,
        width: int,
        random: np.random.Generator,
    ) -> None:
        self._ledger = ledger
        self._space = ledger.model.space
        self._depth = depth
        self._exploration = exploration
        self._width = width
        self._random = random
        self._nodes: dict[bytes, _Node] = {}
        self._found: dict[bytes, Trajectory] = {}
        self._taken: set[bytes] = set()
        initial = self._space.initial
        (key,), (cost,) = ledger.price(initial[None])
        ledger.offer(key, ())
        self._root = _Node(key, initial, float(cost), np.zeros(len(self._space.actions)))
        self._nodes[key] = self._root

    def wave(self, walkers: int) -> None:
        """Walk down ``walkers`` times, and credit every choice on the way."""
        wave = [_Walker(self._root, done=not self._depth) for _ in range(walkers)]
        while going := [walker for walker in wave if not walker.done]:
            self._look({walker.node.key: walker.node for walker in going}.values())
            for walker in going:
                self._step(walker)
        for walker in wave:
            cost = self._ledger.length_cost(walker.node.cost, len(walker.actions))
            for node, choice in walker.path:
                node.value[choice] = max(node.value[choice], -np.log(cost))

    def take_best(self, count: int) -> list[Trajectory]:
        """The best trajectories to ``count`` states, the best first; each state only once ever."""
        ranked = sorted(self._found, key=lambda key: self._found[key].rank)
        taken = [key for key in ranked if key not in self._taken][:count]
        self._taken.update(taken)
        return [self._found[key] for key in taken]

    def _step(self, walker: _Walker) -> None:
        node = walker.node
        choice = self._select(node)
        # At once, so that the others of the wave rather go elsewhere.
        node.visits[choice] += 1
        node.total += 1
        walker.path.append((node, choice))
        if choice == len(node.actions):
            walker.done = True
            return
        action = self._space.actions[node.actions[choice]]
        walker.actions = (*walker.actions, action)
        walker.done = len(walker.actions) >= self._depth
        key = node.keys[choice]
        found = self._ledger.offer(key, walker.actions)
        if key not in self._found or found.rank < self._found[key].rank:
            self._found[key] = found
        if key not in self._nodes:
            state = self._space.apply(node.state, action)
            self._nodes[key] = _Node(key, state, self._ledger.cost(key), node.prior)
        walker.node = self._nodes[key]

    def _select(self, node: _Node) -> int:
        """UCT on the best reward below each choice; unvisited ones stand at their own price."""
        bonus = self._exploration * np.sqrt(np.log(node.total + 1.0) / (node.visits + 1.0))
        score = node.value + bonus + 1e-9 * self._random.random(len(node.value))
        return int(np.argmax(score))

    def _look(self, nodes: Iterable[_Node]) -> None:
        """Price the children that it is time for, of all ``nodes`` at once."""
        fresh: list[tuple[_Node, list[int]]] = []
        states: list[States] = []
        for node in nodes:
            # Nothing is known of any action at the root: it looks at all of them.
            all_of_them = node is self._root
            most = len(node.order) if all_of_them else self._width + int(np.sqrt(node.total))
            if node.looked < min(most, len(node.order)):
                actions = node.order[node.looked : most].tolist()
                node.looked = most
                fresh.append((node, actions))
                states.append(self._space.apply_each(node.state, actions))
        if not fresh:
            return
        keys, costs = self._ledger.price(np.concatenate(states))
        first = 0
        for node, actions in fresh:
            last = first + len(actions)
            self._add(node, actions, keys[first:last], costs[first:last])
            first = last

    def _add(self, node: _Node, actions: list[int], keys: list[bytes], costs: Floats) -> None:
        """New children of a node, without those that change nothing or are there already."""
        node.prior[actions] = np.log(costs / node.cost)
        known = {node.key, *node.keys}
        new = []
        for number, key in enumerate(keys):
            if key not in known:
                known.add(key)
                new.append(number)
        node.actions += [actions[number] for number in new]
        node.keys += [keys[number] for number in new]
        node.value = np.concatenate([node.value[:-1], -np.log(costs[new]), node.value[-1:]])
        node.visits = np.concatenate([node.visits[:-1], np.zeros(len(new)), node.visits[-1:]])
