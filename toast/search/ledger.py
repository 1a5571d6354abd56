"""The ledger: every state that a search has priced, and the best trajectory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from toast.cost import CostModel, Memo, Prices, Worth, memo_of
from toast.space import Action, States

Floats = npt.NDArray[np.float64]

_TINY = np.finfo(np.float64).tiny

#: States priced in one batch.
_BATCH = 256

#: Value classes, over all priced states, up to which the model prices faster than a memo.
_WHOLE = 1000

#: Number of actions that a refinement counts as.
REFINEMENT_LENGTH = 5

#: Added to the cost of states that do not fit, to rank them after all states that fit.
OVER_LIMIT = 1e3

#: Refinements begin with trajectories whose cost is at most this multiple of the best cost: others
#: hardly ever catch up.
_FAR = 3.0


class SearchEnd(Exception):
    """The budget of a search is over; its result is the best trajectory so far."""


class Trajectory(NamedTuple):
    """Actions in order, with the rank that the search minimises."""

    #: What the search minimises: the cost with the length and ``OVER_LIMIT``.
    rank: float
    #: The actions, in order.
    actions: tuple[Action, ...]
    #: Cost C (4.5) of the final state, without length and ``OVER_LIMIT``.
    cost: float


class Ledger:
    """Prices each state once (transpositions, 4.3) and keeps the best trajectory."""

    def __init__(
        self,
        model: CostModel,
        memory_bytes: float,
        action_cost: float,
        *,
        depth: int = 30,
        seed: int = 0,
        check: Callable[[], None] | None = None,
    ) -> None:
        """``check`` is called before every batch is priced; it may raise :class:`SearchEnd`."""
        self.model = model
        #: Memory limit per device.
        self.memory_bytes = memory_bytes
        #: Maximum number of actions of a trajectory.
        self.depth = depth
        #: Source of all random choices of the stages.
        self.random = np.random.default_rng(seed)
        self.best = Trajectory(np.inf, (), np.inf)
        #: The trajectory of the lowest cost, whether it fits or not.
        self.cheapest = self.best
        #: Trajectories that the next stage begins with.
        self.starts: list[Trajectory] = []
        #: Data that stages keep between rounds.
        self.memory: dict[Hashable, Any] = {}
        #: Returns proposals within the given seconds: states that may be better in some regions.
        self.proposals: Callable[[float | None], Sequence[States]] = lambda _seconds: ()
        #: Length that costs nothing: that of the longest trajectory that the search begins with.
        self.free = 0
        #: Bytes of the smallest peak among the states priced so far.
        self.smallest_peak = np.inf
        self.check = check or (lambda: None)
        self._memo: Memo | None = None
        self._action_cost = action_cost
        self._cost: dict[bytes, float] = {}
        self._fits: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._cost)

    def price(self, states: States) -> tuple[list[bytes], Floats]:
        """The keys and the costs C (4.5) of ``states`` (``[S, classes, axes]``): ``[S]`` each."""
        self.check()
        keys = [state_key(state) for state in states]
        fresh: dict[bytes, int] = {}
        for number, key in enumerate(keys):
            if key not in self._cost:
                fresh.setdefault(key, number)
        new, rows = list(fresh), list(fresh.values())
        for start in range(0, len(new), _BATCH):
            if start:
                self.check()
            part = new[start : start + _BATCH]
            prices = self._priced(states[rows[start : start + _BATCH]])
            costs = self.model.cost(prices, self.memory_bytes)
            fits = self.model.fits(prices, self.memory_bytes)
            self.smallest_peak = min(self.smallest_peak, float(prices.peak_bytes.min()))
            self._fits.update(zip(part, fits.tolist(), strict=True))
            self._cost.update(zip(part, costs.tolist(), strict=True))  # last: marks them as priced
        return keys, np.array([self._cost[key] for key in keys], dtype=np.float64)

    def _priced(self, states: States) -> Prices | Worth:
        if self._memo is None:
            classes = len(self.model.tables.values)
            if self.model.priced_alone and (len(self) + len(states)) * classes <= _WHOLE:
                return self.model.price(states)
        return self.memo.price(states)

    @property
    def memo(self) -> Memo:
        """The prices of what states have in common."""
        if self._memo is None:
            self._memo = memo_of(self.model, self.memory_bytes)
        return self._memo

    def price_again(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory at the prices of now: a stage may have found better memory policies."""
        state = self.replay(trajectory.actions)
        self._cost.pop(state_key(state), None)
        (key,), _ = self.price(state[None])
        return self.offer(key, trajectory.actions)

    def cost(self, key: bytes) -> float:
        """The cost of a priced state."""
        return self._cost[key]

    def fits(self, key: bytes) -> bool:
        """Whether a priced state fits."""
        return self._fits[key]

    def length_cost(self, cost: float, length: int) -> float:
        """The cost of a trajectory of this length: shorter ones are preferred (4.1).

        The penalty is a share of the cost, because costs are tiny on many devices.
        """
        return cost * (1.0 + self._action_cost * max(0, length - self.free))

    def rank(self, key: bytes, length: int) -> float:
        """The search's objective: :meth:`length_cost`, plus ``OVER_LIMIT`` if it does not fit."""
        return self.length_cost(self._cost[key], length) + (0.0 if self._fits[key] else OVER_LIMIT)

    def ranks(self, keys: Sequence[bytes], length: int | npt.NDArray[np.int64]) -> Floats:
        """``[keys]`` ranks of trajectories to priced states, of one length or of ``[keys]``."""
        cost = np.array([self._cost[key] for key in keys], dtype=np.float64)
        over = np.array([not self._fits[key] for key in keys], dtype=bool)
        longer = 1.0 + self._action_cost * np.maximum(0, length - self.free)
        return cost * longer + np.where(over, OVER_LIMIT, 0.0)

    def beaten(self, length: int) -> bool:
        """Whether no trajectory of this length beats the best one, even at the lower bound."""
        least = self.model.quick_bound / max(self.model.initial_seconds, _TINY)
        return self.length_cost(least, length) >= self.best.rank - 1e-9

    def far(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory costs too much to begin refinements with, fitting or not."""
        return trajectory.cost > _FAR * self.best.cost

    def offer(self, key: bytes, actions: tuple[Action, ...]) -> Trajectory:
        """Record a trajectory to a priced state; returns it with its rank."""
        trajectory = Trajectory(self.rank(key, length(actions)), actions, self._cost[key])
        if trajectory.rank < self.best.rank - 1e-12:
            self.best = trajectory
        if trajectory.cost < self.cheapest.cost:
            self.cheapest = trajectory
        return trajectory

    def begin(self, actions: tuple[Action, ...] = ()) -> Trajectory:
        """Price the state that actions lead to, and offer the trajectory."""
        (key,), _ = self.price(self.replay(actions)[None])
        return self.offer(key, actions)

    def replay(self, actions: Sequence[Action]) -> States:
        """The state that actions lead to."""
        state = self.model.space.initial
        for action in actions:
            state = self.model.space.apply(state, action)
        return state


def length(actions: Sequence[Action]) -> int:
    """The length of a trajectory; a refinement is harder to read and counts as several actions."""
    return sum(REFINEMENT_LENGTH if action.part else 1 for action in actions)


def state_key(state: States) -> bytes:
    """A digest of a state: states of large programs have thousands of bytes."""
    return hashlib.blake2b(state.tobytes(), digest_size=16).digest()
