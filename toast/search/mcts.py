"""Monte Carlo tree search over actions (paper, sections 4.1 and 4.2).

The tree is a graph: a node is a state, not a sequence of actions, so transpositions share their
statistics by construction (4.3).  When a node is first visited all its children are priced in one
batch; their costs are the priors that direct the first visits, and the best state seen anywhere is
always known.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from toast.cost import CostModel, Prices
from toast.space import Action, States

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Knobs of the search; the defaults are the paper's where it names any."""

    seed: int = 0
    #: Longest trajectory (4.2).
    depth: int = 30
    #: Trajectories per round; the search ends after a round without improvement (4.1).
    round_size: int = 64
    rounds: int = 40
    #: Rounds without improvement that end the search.
    patience: int = 2
    #: UCT's weight of exploration, in units of the logarithm of the cost.
    exploration: float = 2.0
    #: Best trajectories that local search finishes.
    finalists: int = 16
    #: Cost of an action, so that shorter trajectories are preferred (4.1).
    action_cost: float = 1e-3
    #: Seconds after which no new trajectory begins; ``None`` for no limit.
    budget: float | None = None


@dataclasses.dataclass(frozen=True)
class Round:
    """Progress after one round of trajectories."""

    number: int
    states: int
    cost: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Found:
    """The best trajectory of a search and how it was found."""

    actions: tuple[Action, ...]
    #: ``[classes, axes]``
    state: States
    cost: float
    states: int
    seconds: float
    rounds: tuple[Round, ...]


class _Node:
    """A state with its children, priced when first visited."""

    __slots__ = ("actions", "costs", "keys", "state", "total", "value", "visits")

    def __init__(self, state: States) -> None:
        self.state = state
        self.actions: list[Action] | None = None
        self.keys: list[bytes] = []
        self.costs: Floats = np.empty(0)  # cost of each child
        self.visits = np.empty(0)  # visits of each child; the last entry is stop
        self.value: Floats = np.empty(0)  # best reward found below each child
        self.total = 0


class Search:
    """One search on one decision space; ``run`` may be called once."""

    def __init__(
        self,
        model: CostModel,
        *,
        memory_bytes: float,
        settings: Settings | None = None,
        progress: Callable[[Round], None] | None = None,
    ) -> None:
        self._model = model
        self._space = model.space
        self._memory = memory_bytes
        self._settings = settings or Settings()
        self._progress = progress
        self._random = np.random.default_rng(self._settings.seed)
        self._nodes: dict[bytes, _Node] = {}
        self._cost: dict[bytes, float] = {}
        self._fits: dict[bytes, bool] = {}
        self._best: tuple[float, tuple[Action, ...]] = (np.inf, ())
        self._finalists: dict[bytes, tuple[float, tuple[Action, ...]]] = {}
        self._smallest_peak = np.inf

    def smallest_peak(self) -> float:
        """Bytes of the smallest peak among the states priced so far."""
        return self._smallest_peak

    def run(self) -> Found:
        """Search until a round brings no improvement; returns the best trajectory."""
        begin = time.perf_counter()
        settings = self._settings
        initial = self._space.initial
        self._price([initial])
        self._offer(initial.tobytes(), ())
        rounds: list[Round] = []
        stale = 0
        out_of_time = False
        for number in range(settings.rounds):
            before = self._best[0]
            for _ in range(settings.round_size):
                elapsed = time.perf_counter() - begin
                if settings.budget is not None and elapsed >= settings.budget:
                    out_of_time = True
                    break
                self._trajectory(initial)
            elapsed = time.perf_counter() - begin
            best = self._cost[self._replay(self._best[1]).tobytes()]
            rounds.append(Round(number, len(self._cost), best, elapsed))
            if self._progress:
                self._progress(rounds[-1])
            stale = 0 if self._best[0] < before - 1e-9 else stale + 1
            if out_of_time or stale >= settings.patience:
                break
        ranked = sorted(self._finalists.values(), key=lambda entry: entry[0])
        polished = [self._polish(actions, begin) for _, actions in ranked[: settings.finalists]]
        actions = min(polished, key=self._rank_of)
        state = self._replay(actions)
        return Found(
            actions=actions,
            state=state,
            cost=self._cost[state.tobytes()],
            states=len(self._cost),
            seconds=time.perf_counter() - begin,
            rounds=tuple(rounds),
        )

    # -- trajectories ------------------------------------------------------------------------

    def _trajectory(self, state: States) -> None:
        """Select down to a stop or the depth limit, then credit every choice on the way."""
        path: list[tuple[_Node, int]] = []
        actions: tuple[Action, ...] = ()
        node = self._node(state)
        while len(actions) < self._settings.depth:
            choice = self._select(node)
            path.append((node, choice))
            assert node.actions is not None
            if choice == len(node.actions):
                break
            actions = (*actions, node.actions[choice])
            self._offer(node.keys[choice], actions)
            node = self._node(np.frombuffer(node.keys[choice], np.int8).reshape(state.shape))
        reward = self._reward(self._cost[node.state.tobytes()], len(actions))
        for visited, choice in path:
            visited.visits[choice] += 1
            visited.total += 1
            visited.value[choice] = max(visited.value[choice], reward)

    def _select(self, node: _Node) -> int:
        """UCT on the best reward below each child; unvisited children stand at their own price."""
        exploration = self._settings.exploration
        bonus = exploration * np.sqrt(np.log(node.total + 1.0) / (node.visits + 1.0))
        score = node.value + bonus
        score = score + 1e-9 * self._random.random(len(score))
        return int(np.argmax(score))

    def _node(self, state: States) -> _Node:
        key = state.tobytes()
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(state)
            children = self._space.available(state)
            self._price([after for _, after in children])
            node.actions = [action for action, _ in children]
            node.keys = [after.tobytes() for _, after in children]
            node.costs = np.array([self._cost[k] for k in node.keys], dtype=np.float64)
            stop = self._cost[key]
            node.value = -np.log(np.append(node.costs, stop))
            node.visits = np.zeros(len(node.value))
        return node

    def _price(self, states: list[States]) -> None:
        """Price the states that have no price yet, in batches."""
        fresh = {s.tobytes(): s for s in states}
        keys = [key for key in fresh if key not in self._cost]
        for start in range(0, len(keys), 32):
            part = keys[start : start + 32]
            prices: Prices = self._model.price(np.stack([fresh[key] for key in part]))
            costs = self._model.cost(prices, self._memory)
            self._cost.update(zip(part, costs.tolist(), strict=True))
            fits = prices.peak_bytes <= self._memory
            self._fits.update(zip(part, fits.tolist(), strict=True))
            self._smallest_peak = min(self._smallest_peak, float(prices.peak_bytes.min()))

    def _reward(self, cost: float, length: int) -> float:
        """Rewards are logarithmic: halving the cost counts alike wherever it happens."""
        return -float(np.log(self._length_cost(cost, length)))

    def _length_cost(self, cost: float, length: int) -> float:
        return cost + self._settings.action_cost * length

    def _rank(self, key: bytes, length: int) -> float:
        """What the best plan minimises: its cost, after whether it fits at all."""
        return self._length_cost(self._cost[key], length) + (0.0 if self._fits[key] else 1e3)

    def _rank_of(self, actions: tuple[Action, ...]) -> float:
        return self._rank(self._replay(actions).tobytes(), len(actions))

    def _offer(self, key: bytes, actions: tuple[Action, ...]) -> None:
        rank = self._rank(key, len(actions))
        if rank < self._best[0] - 1e-12:
            self._best = (rank, actions)
        if rank < self._finalists.get(key, (np.inf, ()))[0]:
            self._finalists[key] = (rank, actions)

    # -- finishing ---------------------------------------------------------------------------

    def _replay(self, actions: tuple[Action, ...]) -> States:
        state = self._space.initial
        for action in actions:
            state = self._space.apply(state, action)
        return state

    def _polish(self, actions: tuple[Action, ...], begin: float) -> tuple[Action, ...]:
        """Local search on the best trajectory: drop, replace, insert or swap single actions."""
        best = actions
        best_rank = self._rank_of(best)
        budget = self._settings.budget
        improved = True
        while improved:
            improved = False
            for variants in self._neighbourhoods(best):
                if budget is not None and time.perf_counter() - begin >= budget:
                    return best
                states = [self._replay(variant) for variant in variants]
                self._price(states)
                ranks = [
                    self._rank(s.tobytes(), len(v)) for s, v in zip(states, variants, strict=True)
                ]
                if ranks and min(ranks) < best_rank - 1e-9:
                    index = int(np.argmin(ranks))
                    best, best_rank, improved = variants[index], ranks[index], True
                    break
        return best

    def _neighbourhoods(self, actions: tuple[Action, ...]) -> list[list[tuple[Action, ...]]]:
        n = len(actions)
        drops = [actions[:i] + actions[i + 1 :] for i in range(n)]
        swaps = [
            actions[:i] + (actions[i + 1], actions[i]) + actions[i + 2 :] for i in range(n - 1)
        ]
        replaced = [
            actions[:i] + (other,) + actions[i + 1 :]
            for i in range(n)
            for other in self._space.actions
            if other != actions[i]
        ]
        inserted = [
            actions[:i] + (other,) + actions[i:]
            for i in range(n + 1)
            for other in self._space.actions
            if n < self._settings.depth and other not in actions
        ]
        return [drops, swaps, replaced, inserted]
