"""The search for the best trajectory (paper, sections 4.1 and 4.2).

Rounds of tree search, each followed by a local search from the best new trajectory that it found,
or several, until a round brings nothing better.  The best plan so far is known at every moment: a
budget, or an interrupt, ends the search with it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from toast.cost import CostModel
from toast.errors import SearchError
from toast.search.interrupts import heard
from toast.search.ledger import REFINEMENT_LENGTH, Ledger, Trajectory, length, state_key
from toast.search.local import polish, refine, replay
from toast.search.relink import relink
from toast.search.tree import Tree
from toast.space import Action, States

#: Op classes up to which a program is small: with half as many, twice the effort goes into it; and
#: refinements begin even with what is far from the best.
_SMALL = 24


@dataclasses.dataclass(frozen=True)
class Settings:
    """Knobs of the search; the defaults are the paper's where it names any.

    Raises :class:`toast.errors.SearchError` for what is no number, or too small a one.
    """

    seed: int = 0
    #: Longest trajectory (4.2).
    depth: int = 30
    #: Trajectories per round; the search ends after a round without improvement (4.1).
    round_size: int = 16
    rounds: int = 40
    #: Rounds without improvement that end the search.
    patience: int = 1
    #: Trajectories that go together, to be priced together.
    wave: int = 8
    #: UCT's weight of exploration, in units of the logarithm of the cost.
    exploration: float = 2.0
    #: Actions that a node looks at before its first visit; after n visits, the root of n more.
    width: int = 32
    #: Best trajectories that local search improves after each round.
    finalists: int = 1
    #: Op classes whose sharding local search tries to change alone, behind the best trajectory; and
    #: groups of classes that differ in sizes only.
    hottest: int = 24
    #: Parts of colors that it tries to shard apart from the rest.
    widest: int = 256
    #: States that it prices in one step from its best trajectories; of small programs more.
    effort: int = 1024
    #: Share of the cost that an action must save, so that shorter trajectories are preferred (4.1).
    action_cost: float = 1e-3
    #: Seconds after which the best plan so far is returned; ``None`` for no limit.
    budget: float | None = None
    #: Independent searches, of which the best counts: the first with ``seed``, the others with
    #: seeds made of it.
    restarts: int = 1
    #: Searches that run at a time, each in a process of its own; the plan does not depend on it,
    #: if no budget or interrupt ends them.
    processes: int = 1

    def __post_init__(self) -> None:
        least = dict.fromkeys(("wave", "restarts", "processes"), 1)
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            real = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if name == "budget":
                if value is not None and not (real and value >= 0):
                    text = f"of {value:g} seconds" if real else repr(value)
                    raise SearchError(f"budget {text}: must be positive, or 0")
            elif not real or value == math.inf:
                raise SearchError(f"{name} {value!r}: must be a number")
            elif field.type == "int" and not isinstance(value, numbers.Integral):
                raise SearchError(f"{name} {value!r}: must be a whole number")
            elif not value >= least.get(name, 0):
                raise SearchError(f"{name} {value}: must be at least {least.get(name, 0)}")
        if self.budget == math.inf:
            object.__setattr__(self, "budget", None)


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
    #: What ended the search early: ``budget``, ``interrupt`` or nothing.
    stopped: str = ""
    #: What the search minimised: the cost, longer trajectories after shorter ones, and all that
    #: does not fit behind all that does.
    rank: float = np.inf
    #: Bytes of the smallest peak among the states priced.
    smallest_peak: float = np.inf
    #: What went wrong on the way.
    notes: tuple[str, ...] = ()


class Search:
    """One search on one decision space; ``run`` may be called once."""

    def __init__(
        self,
        model: CostModel,
        *,
        memory_bytes: float,
        settings: Settings | None = None,
        start: Sequence[tuple[Action, ...]] = (),
        proposals: Callable[[float | None], Sequence[States]] = lambda _seconds: (),
        progress: Callable[[Round], None] | None = None,
    ) -> None:
        """``start`` are trajectories to begin with, for example that of an earlier plan.

        What is found costs no more than any of them: only beyond their length are shorter
        trajectories preferred.  ``proposals`` is asked, once they are needed, for states that may
        be better than the best one somewhere (:func:`toast.search.pairwise.proposing`), with the
        seconds that are left.
        """
        self._space = model.space
        self._settings = settings or Settings()
        self._start = start
        self._proposals = proposals
        self._progress = progress
        self._ledger = Ledger(model, memory_bytes, self._settings.action_cost)

    def run(self) -> Found:
        """Search until rounds bring no improvement; returns the best trajectory."""
        begin = time.perf_counter()
        rounds: list[Round] = []
        stopped = ""
        try:
            with heard() as check:
                for event in self._rounds(begin, check):
                    rounds.append(event)
                    if self._progress:
                        self._progress(event)
                check()
            if self._out_of_time(begin):
                stopped = "budget"
        except KeyboardInterrupt:
            stopped = "interrupt"
        actions = self._ledger.best.actions
        state = replay(self._ledger, actions)
        (key,), _ = self._ledger.price(state[None])
        model = self._ledger.model
        # As anyone else prices it, to the last digit: not by what differs from some other state.
        (cost,) = model.cost(model.price(state[None]), self._ledger.memory_bytes)
        return Found(
            actions=actions,
            state=state,
            cost=float(cost),
            states=len(self._ledger),
            seconds=time.perf_counter() - begin,
            rounds=tuple(rounds),
            stopped=stopped,
            rank=self._ledger.rank(key, length(actions)),
            smallest_peak=self._ledger.smallest_peak,
        )

    def _rounds(self, begin: float, check: Callable[[], None]) -> Iterator[Round]:
        settings, ledger = self._settings, self._ledger
        ledger.free = max(map(length, self._start), default=0)
        first = []
        for actions in self._start:
            (key,), _ = ledger.price(replay(ledger, actions)[None])
            first.append(ledger.offer(key, actions))
        tree = Tree(
            ledger,
            depth=settings.depth,
            exploration=settings.exploration,
            width=settings.width,
            random=np.random.default_rng(settings.seed),
        )
        (key,), _ = ledger.price(self._space.initial[None])
        origin = ledger.offer(key, ())
        first = first or [origin]

        def stop() -> bool:
            check()
            return self._out_of_time(begin)

        waves = -(-settings.round_size // settings.wave)
        stale = 0
        for number in range(settings.rounds):
            before = ledger.best.rank
            for _ in range(waves):
                if not stop():
                    tree.wave(settings.wave)
            polished = [
                polish(ledger, found, depth=settings.depth, stop=stop)
                for found in (*first, *tree.take_best(settings.finalists))
            ]
            first = []
            if ledger.best.rank < before or number == 0:
                starts = [*polished, origin]
                for groups in (False, True):
                    self._refine(starts, groups, stop)
                    starts.append(ledger.best)
                # Behind all that would have been tried without them.
                over = stop() or ledger.beaten(REFINEMENT_LENGTH)
                relinked = [
                    relink(ledger, found, state, depth=settings.depth, stop=stop)
                    for state in (() if over else self._proposals(self._left(begin)))
                    for found in (ledger.best, *([] if number else [origin]))
                ]
                if relinked:
                    self._refine(relinked, True, stop)
            elapsed = time.perf_counter() - begin
            yield Round(number, len(ledger), self._best_cost(), elapsed)
            stale = 0 if ledger.best.rank < before - 1e-9 else stale + 1
            if stale >= settings.patience or stop():
                return

    def _refine(self, starts: Sequence[Trajectory], groups: bool, stop: Callable[[], bool]) -> None:
        settings, ledger = self._settings, self._ledger
        # States of a few op classes cost next to nothing.
        times = _SMALL / max(1, len(self._space.initial))
        refine(
            ledger, sorted(start for start in starts if times >= 1 or not ledger.far(start)),
            depth=settings.depth, hottest=settings.hottest, widest=settings.widest, groups=groups,
            effort=max(1, int(times)) * settings.effort, stop=stop,
        )  # fmt: skip

    def _best_cost(self) -> float:
        return self._ledger.cost(state_key(replay(self._ledger, self._ledger.best.actions)))

    def _left(self, begin: float) -> float | None:
        """Seconds until the budget ends."""
        budget = self._settings.budget
        return None if budget is None else max(0.0, begin + budget - time.perf_counter())

    def _out_of_time(self, begin: float) -> bool:
        return self._left(begin) == 0.0
