"""What the search knows: every state it has priced, and the best trajectories."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from toast.cost import CostModel, Memo, Prices, Worth
from toast.space import Action, States

Floats = npt.NDArray[np.float64]

_TINY = np.finfo(np.float64).tiny

#: States that are priced at once.
_BATCH = 256

#: Value classes of all states together up to which they are priced whole: it is faster at first.
_WHOLE = 1000

#: Actions that a refinement counts for.
REFINEMENT_LENGTH = 5

#: Added to the cost of what does not fit, so that it ranks behind all that does.
OVER_LIMIT = 1e3

#: Times the cost of the best trajectory that one may have which refinements begin with: they hardly
#: catch up with it from further away.
_FAR = 3.0


class SearchEnd(Exception):
    """The budget of a search is over; the best trajectory so far is its result."""


class Trajectory(NamedTuple):
    """Actions in order, and what they are worth: the search minimises ``rank``."""

    rank: float
    actions: tuple[Action, ...]
    #: That of the state they lead to, however many they are, and whether it fits or not.
    cost: float


class Ledger:
    """Prices states once (transpositions, 4.3) and keeps the best trajectory."""

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
        """``check`` is called before states are priced: it may raise :class:`SearchEnd`."""
        self.model = model
        #: The limit per device.
        self.memory_bytes = memory_bytes
        #: Actions that a trajectory has at most.
        self.depth = depth
        #: For every random choice of the stages.
        self.random = np.random.default_rng(seed)
        self.best = Trajectory(np.inf, (), np.inf)
        #: What the next stage begins with.
        self.starts: list[Trajectory] = []
        #: What stages remember from one round to the next.
        self.memory: dict[Hashable, Any] = {}
        #: Answers, within so many seconds, with states that may be better than the best one
        #: somewhere.
        self.proposals: Callable[[float | None], Sequence[States]] = lambda _seconds: ()
        #: Length that costs nothing: that of what the search begins with.
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
        """A key for each of ``states`` (``[S, classes, axes]``), and its cost C (4.5)."""
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
            fits = prices.peak_bytes <= self.memory_bytes
            self.smallest_peak = min(self.smallest_peak, float(prices.peak_bytes.min()))
            self._fits.update(zip(part, fits.tolist(), strict=True))
            self._cost.update(zip(part, costs.tolist(), strict=True))  # last: now they are known
        return keys, np.array([self._cost[key] for key in keys], dtype=np.float64)

    def _priced(self, states: States) -> Prices | Worth:
        if self._memo is None:
            classes = len(self.model.tables.values)
            if (len(self) + len(states)) * classes <= _WHOLE:
                return self.model.price(states)
            self._memo = Memo(self.model)
        return self._memo.price(states)

    def cost(self, key: bytes) -> float:
        """The cost of a priced state."""
        return self._cost[key]

    def fits(self, key: bytes) -> bool:
        """Whether a priced state fits."""
        return self._fits[key]

    def length_cost(self, cost: float, length: int) -> float:
        """The cost of a trajectory: shorter ones are preferred (4.1).

        An action has to earn a share of the cost: on many devices costs are tiny.
        """
        return cost * (1.0 + self._action_cost * max(0, length - self.free))

    def rank(self, key: bytes, length: int) -> float:
        """What the best plan minimises: its cost, after whether it fits at all."""
        return self.length_cost(self._cost[key], length) + (0.0 if self._fits[key] else OVER_LIMIT)

    def ranks(self, keys: Sequence[bytes], length: int | npt.NDArray[np.int64]) -> Floats:
        """The ranks of trajectories of that length, or lengths, to priced states."""
        cost = np.array([self._cost[key] for key in keys], dtype=np.float64)
        over = np.array([not self._fits[key] for key in keys], dtype=bool)
        longer = 1.0 + self._action_cost * np.maximum(0, length - self.free)
        return cost * longer + np.where(over, OVER_LIMIT, 0.0)

    def beaten(self, length: int) -> bool:
        """Whether no trajectory that long beats the best one: not even at the lower bound."""
        least = self.model.quick_bound / max(self.model.initial_seconds, _TINY)
        return self.length_cost(least, length) >= self.best.rank - 1e-9

    def far(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory costs too much to begin refinements with, whether it fits or not."""
        return trajectory.cost > _FAR * self.best.cost

    def offer(self, key: bytes, actions: tuple[Action, ...]) -> Trajectory:
        """Note a trajectory to a priced state; with its rank."""
        trajectory = Trajectory(self.rank(key, length(actions)), actions, self._cost[key])
        if trajectory.rank < self.best.rank - 1e-12:
            self.best = trajectory
        return trajectory

    def begin(self, actions: tuple[Action, ...] = ()) -> Trajectory:
        """Price what actions lead to, and note them."""
        (key,), _ = self.price(self.replay(actions)[None])
        return self.offer(key, actions)

    def replay(self, actions: Sequence[Action]) -> States:
        """The state that actions lead to."""
        state = self.model.space.initial
        for action in actions:
            state = self.model.space.apply(state, action)
        return state


def length(actions: Sequence[Action]) -> int:
    """The length of a trajectory: a refinement counts as several actions.

    It makes a plan harder to read, so it has to bring more.
    """
    return sum(REFINEMENT_LENGTH if action.part else 1 for action in actions)


def state_key(state: States) -> bytes:
    """A state as a key: a digest, since a state of a large program has thousands of bytes."""
    return hashlib.blake2b(state.tobytes(), digest_size=16).digest()
