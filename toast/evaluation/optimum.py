"""Optima of small programs, to measure what the search and the space miss.

:func:`best_reachable` prices every state that actions lead to; the search cannot do better.
:func:`best_legal` also covers states that no action leads to, which resolve compatible conflicts
differently (3.5) or shard only some dimensions of a color (4.2).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast.cost import CostModel
from toast.cost.model import MEMORY_WEIGHT
from toast.errors import SearchError
from toast.evaluation.joint_bounds import JointBound, joint_bounds
from toast.search.ledger import OVER_LIMIT, Ledger
from toast.search.search import Search
from toast.search.settings import Settings
from toast.space import Action, Space, States

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Maximum number of entries of a bound's table.
_TABLE = 1 << 18

#: Partial states that are extended in one batch.
_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best of a set of states."""

    #: ``[classes, axes]``
    state: States
    #: C(s) of section 4.5.
    cost: float
    #: Its seconds of a step.
    seconds: float
    #: Its peak of memory per device.
    peak_bytes: float
    #: Whether it fits.
    fits: bool
    #: The fewest actions that lead to it; empty for :func:`best_legal`.
    actions: tuple[Action, ...]
    #: Number of states in the set, and of those that were priced.
    states: int
    #: The number of states that were priced.
    priced: int


def best_reachable(
    model: CostModel,
    memory_bytes: float,
    *,
    action_cost: float = 0.0,
    depth: int = 30,
    max_states: int = 100_000,
) -> Optimum:
    """The optimum of all states that at most ``depth`` actions lead to.

    States are visited once, breadth first, so a state's trajectory is the shortest.
    ``memory_bytes`` is the limit per device.  With the ``action_cost`` of the search's settings,
    this is exactly what the search minimises.  Raises :class:`toast.errors.SearchError` beyond
    ``max_states``.
    """
    space, ledger = model.space, Ledger(model, memory_bytes, action_cost)
    every = range(len(space.actions))
    (key,), _ = ledger.price(space.initial[None])
    ledger.offer(key, ())
    seen = {key}
    level: list[tuple[States, tuple[Action, ...]]] = [(space.initial, ())]
    for _ in range(depth if space.actions else 0):
        following: list[tuple[States, tuple[Action, ...]]] = []
        for state, actions in level:
            after = space.apply_each(state, every)
            keys, _ = ledger.price(after)
            for number, key in enumerate(keys):
                if key not in seen:
                    seen.add(key)
                    path = (*actions, space.actions[number])
                    ledger.offer(key, path)
                    following.append((after[number], path))
            if len(seen) > max_states:
                raise SearchError(
                    f"{space.analysis.program.name} has more than {max_states:,} reachable states "
                    f"on mesh {space.mesh}; use a smaller program or raise max_states"
                )
        level = following
    state = space.initial
    for action in ledger.best.actions:
        state = space.apply(state, action)
    return _optimum(model, memory_bytes, state, ledger.best.actions, len(seen), len(seen))


def best_legal(
    model: CostModel,
    memory_bytes: float,
    *,
    max_states: int = 5_000_000,
) -> Optimum:
    """The optimum of all legal states: any choice of ``Space.choices`` for every op class.

    Branch and bound: op classes choose one after another, and a partial state is dropped if it
    cannot beat the best known state.  Bounds of its seconds and live bytes come from
    :mod:`toast.evaluation.joint_bounds` for the choices so far, and from bucket elimination for the
    rest (mini-buckets if tables would grow).  The remaining states are priced.  Tied ops choose
    together; ops that cannot be sharded choose nothing.

    Raises :class:`toast.errors.SearchError` beyond ``max_states`` partial states.
    """
    search = Search(model, memory_bytes=memory_bytes, settings=Settings(rounds=4))
    return _Branching(model, memory_bytes, search.run().state, max_states).run()


def random_legal(space: Space, count: int, random: np.random.Generator) -> States:
    """``count`` legal states, drawn uniformly: ``[count, classes, axes]``."""
    states = np.stack(
        [rows[random.integers(len(rows), size=count)] for rows in space.choices], axis=1
    )
    return with_ties(space, states)


def with_ties(space: Space, states: States) -> States:
    """``states`` in which tied op classes follow those that they are tied to."""
    states = states.copy()
    for k, other, factor in space.tied:
        states[:, k] = factor[states[:, other]]
    return states


def _optimum(
    model: CostModel,
    memory_bytes: float,
    state: States,
    actions: tuple[Action, ...],
    states: int,
    priced: int,
) -> Optimum:
    prices = model.price(state[None])
    return Optimum(
        state=state,
        cost=float(model.cost(prices, memory_bytes)[0]),
        seconds=float(prices.seconds[0]),
        peak_bytes=float(prices.peak_bytes[0]),
        fits=bool(model.fits(prices, memory_bytes)[0]),
        actions=actions,
        states=states,
        priced=priced,
    )


class _Message(NamedTuple):
    """The least seconds that later classes add, by the choices of earlier ones."""

    scope: tuple[int, ...]
    seconds: Floats
    #: The class that was eliminated.
    behind: int


class _Partial(NamedTuple):
    """Partial states: the choices of the first classes of the order."""

    chosen: npt.NDArray[np.int16]  # [N, chosen]
    seconds: Floats  # [N] of the terms whose classes have all chosen
    memory: Floats  # [N, moments] lower bounds


class _Branching:
    """Branch and bound over op classes."""

    def __init__(
        self, model: CostModel, memory_bytes: float, known: States, max_states: int
    ) -> None:
        self._model, self._memory, self._max_states = model, memory_bytes, max_states
        self._space = model.space
        self._choices = self._space.choices
        self._priced = self._looked = 0
        self._best, self._rank = known, np.inf
        self._offer(known[None])
        prices = model.price(known[None])
        # Better states take no longer, if the known state fits.
        fits = model.fits(prices, memory_bytes)[0]
        room = float(prices.seconds[0]) if fits else math.inf
        try:
            self._terms = joint_bounds(model, room, most=_TABLE)
        except ValueError as error:
            raise SearchError(
                f"{self._space.analysis.program.name} on mesh {self._space.mesh}: a value is used "
                f"by too many ops ({error}); use a smaller program or mesh"
            ) from None
        tied = {k for k, *_ in self._space.tied}
        self._free = [k for k, rows in enumerate(self._choices) if len(rows) > 1 and k not in tied]
        self._order = self._ordered()
        self._place = {k: i for i, k in enumerate(self._order)}
        self._terms = [self._reduced(term) for term in self._terms]
        self._messages = self._eliminated()

    def run(self) -> Optimum:
        """The best legal state."""
        moments = self._terms[0].memory.shape[-1]
        start = _Partial(
            np.zeros((1, 0), dtype=np.int16),
            np.array([sum(float(t.seconds) for t in self._terms if not t.scope)], dtype=np.float64),
            np.sum([self._least(term, 0).reshape(1, moments) for term in self._terms], axis=0),
        )
        stack = [start]
        while stack:
            part = stack.pop()
            if part.chosen.shape[1] == len(self._order):
                self._offer(self._states(part.chosen))
                continue
            grown = self._extended(part)
            # The most promising are last, and go on top of the stack.
            for first in range(0, len(grown.seconds), _CHUNK):
                rows = slice(first, first + _CHUNK)
                stack.append(_Partial(grown.chosen[rows], grown.seconds[rows], grown.memory[rows]))
        legal = math.prod(len(self._choices[k]) for k in self._free)
        return _optimum(self._model, self._memory, self._best, (), legal, self._priced)

    def _offer(self, states: States) -> None:
        """Price whole states and keep the best."""
        if not len(states):
            return
        prices = self._model.price(states)
        over = ~self._model.fits(prices, self._memory)
        rank = self._model.cost(prices, self._memory) + OVER_LIMIT * over
        self._priced += len(states)
        best = int(np.argmin(rank))
        if rank[best] < self._rank:
            self._best, self._rank = states[best], float(rank[best])

    def _states(self, chosen: npt.NDArray[np.int16]) -> States:
        states = np.stack([rows[0] for rows in self._choices])[None].repeat(len(chosen), axis=0)
        for i, k in enumerate(self._order):
            states[:, k] = self._choices[k][chosen[:, i]]
        return with_ties(self._space, states)

    # -- order and tables --------------------------------------------------------------------

    def _ordered(self) -> list[int]:
        """The order of choices, built backwards: the last has the fewest neighbours, and so on."""
        near: dict[int, set[int]] = {k: set() for k in self._free}
        for term in self._terms:
            inside = [k for k in term.scope if k in near]
            for k in inside:
                near[k].update(inside)
        order = []
        while near:
            k = min(near, key=lambda k: math.prod(len(self._choices[n]) for n in near[k]))
            around = near.pop(k) - {k}
            for n in around:
                near[n] |= around
                near[n].discard(k)
            order.append(k)
        return order[::-1]

    def _reduced(self, term: JointBound) -> JointBound:
        """The term by places in the order, without classes that have only one choice.

        Tied classes are left out: the tables of their tensors are those of the op they are tied to.
        """
        index = tuple(slice(None) if k in self._place else 0 for k in term.scope)
        places = [self._place[k] for k in term.scope if k in self._place]
        turn = sorted(range(len(places)), key=lambda axis: places[axis])
        return JointBound(
            tuple(sorted(places)),
            np.asarray(term.seconds[index]).transpose(turn),
            np.asarray(term.memory[index]).transpose(*turn, len(turn)),
        )

    def _eliminated(self) -> list[_Message]:
        """Bounds of the remaining choices: classes are eliminated from the last on."""
        waiting: list[tuple[tuple[int, ...], Floats]] = [
            (term.scope, term.seconds) for term in self._terms if term.scope
        ]
        messages: list[_Message] = []
        for place in reversed(range(len(self._order))):
            bucket = [each for each in waiting if each[0][-1] == place]
            waiting = [each for each in waiting if each[0][-1] != place]
            for scope, table in self._joined(bucket):
                message = _Message(scope[:-1], table.min(axis=-1), place)
                messages.append(message)
                if message.scope:
                    waiting.append((message.scope, message.seconds))
        return messages

    def _joined(
        self, bucket: list[tuple[tuple[int, ...], Floats]]
    ) -> list[tuple[tuple[int, ...], Floats]]:
        """Sums of the tables of a bucket: as few as possible without a table that is too large."""
        joined: list[tuple[tuple[int, ...], Floats]] = []
        for scope, table in sorted(bucket, key=lambda each: -each[1].size):
            for number, (other, sum_) in enumerate(joined):
                both = tuple(sorted({*scope, *other}))
                if math.prod(self._size(place) for place in both) <= _TABLE:
                    joined[number] = (both, self._spread(scope, table, both)
                                      + self._spread(other, sum_, both))  # fmt: skip
                    break
            else:
                joined.append((scope, table))
        return joined

    def _size(self, place: int) -> int:
        return len(self._choices[self._order[place]])

    def _spread(self, scope: tuple[int, ...], table: Floats, over: tuple[int, ...]) -> Floats:
        return table.reshape([self._size(p) if p in scope else 1 for p in over])

    # -- bounds ------------------------------------------------------------------------------

    def _extended(self, part: _Partial) -> _Partial:
        """Every partial state with every choice of the next class that may beat the best state."""
        place = part.chosen.shape[1]
        size = self._size(place)
        self._looked += len(part.chosen) * size
        if self._looked > self._max_states:
            raise SearchError(
                f"{self._space.analysis.program.name} on mesh {self._space.mesh}: more than "
                f"{self._max_states:,} partial states remain; use a smaller program "
                "or raise max_states"
            )
        chosen = np.repeat(part.chosen, size, axis=0)
        next_ = np.tile(np.arange(size, dtype=np.int16), len(part.chosen))
        chosen = np.concatenate([chosen, next_[:, None]], axis=1)
        seconds = np.repeat(part.seconds, size)
        memory = np.repeat(part.memory, size, axis=0)
        for term in self._terms:
            if term.scope and term.scope[-1] == place:
                seconds += term.seconds[tuple(chosen[:, p] for p in term.scope)]
            if place in term.scope:
                for sign, chosen_classes in ((1, place + 1), (-1, place)):
                    known = tuple(chosen[:, p] for p in term.scope if p < chosen_classes)
                    memory += sign * self._least(term, chosen_classes)[known]
        least = seconds.copy()
        for message in self._messages:
            if message.behind > place and all(p <= place for p in message.scope):
                least += message.seconds[tuple(chosen[:, p] for p in message.scope)]
        rank = self._least_rank(least, memory.max(axis=1, initial=0.0))
        order = np.argsort(-rank, kind="stable")  # the best last
        order = order[rank[order] < self._rank - 1e-9]
        return _Partial(chosen[order], seconds[order], memory[order])

    def _least_rank(self, seconds: Floats, peak: Floats) -> Floats:
        """A lower bound of the rank of states with at least these seconds and this peak."""
        model = self._model
        peak = model.machine.in_memory(peak)  # at least, as arguments are not in fast memory
        over = np.maximum(peak * (1 - 1e-9) - self._memory, 0.0)
        cost = seconds / max(model.initial_seconds, 1e-300)
        return cost + MEMORY_WEIGHT * over / max(model.initial_peak, 1.0) + OVER_LIMIT * (over > 0)

    def _least(self, term: JointBound, classes: int) -> Floats:
        """The least bytes of a term if only the first ``classes`` of the order have chosen."""
        later = tuple(axis for axis, p in enumerate(term.scope) if p >= classes)
        return np.asarray(term.memory.min(axis=later))
