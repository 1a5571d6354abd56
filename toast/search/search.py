"""The search for the best trajectory (paper, sections 4.1 and 4.2).

In every round, each stage runs once; a round without improvement ends the search.  A budget or an
interrupt ends it earlier, with the best plan so far.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from toast.cost import CostModel
from toast.search.interrupts import noted_interrupts
from toast.search.ledger import Ledger, SearchEnd, length, state_key
from toast.search.polish import Polishing
from toast.search.settings import Settings
from toast.search.shorten import Shortening
from toast.search.stage import Budget, Stage, WhenImproved, check_stages, run_stages
from toast.search.tree import TreeSearch
from toast.space import Action, States

#: Stages after those for whole colors: parts of colors, regions of proposals (three times), and
#: finally the shardings of arguments.
_FINE_STAGES: tuple[Stage, ...] = (
    TreeSearch("parts", effort=256),
    TreeSearch("regions", effort=256), Shortening(), Polishing(),
    TreeSearch("regions", effort=128), Shortening(), Polishing(),
    TreeSearch("regions", effort=128),
    TreeSearch("arguments", effort=128), Shortening(),
)  # fmt: skip

#: The stages of a round, in order.
DEFAULT_STAGES: tuple[Stage, ...] = (
    TreeSearch(effort=128), Polishing(), WhenImproved(_FINE_STAGES),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Round:
    """Progress after one round."""

    #: The number of the round, from 1.
    number: int
    #: States priced so far.
    states: int
    #: The lowest cost so far.
    cost: float
    #: Seconds since the search began.
    seconds: float


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The best trajectory of a search, and what the search did."""

    #: The actions of the best trajectory, in order.
    actions: tuple[Action, ...]
    #: ``[classes, axes]``
    state: States
    #: Its cost C (4.5).
    cost: float
    #: States priced.
    states: int
    #: Seconds of the search.
    seconds: float
    #: The progress after each round.
    rounds: tuple[Round, ...]
    #: Why the search ended early: ``budget``, ``interrupt`` or empty.
    stopped: str = ""
    #: The objective that the search minimised (:meth:`Ledger.rank`).
    rank: float = np.inf
    #: Bytes of the smallest peak among the states priced.
    smallest_peak: float = np.inf
    #: Problems during the search.
    notes: tuple[str, ...] = ()


class Search:
    """One search of one decision space; ``run`` may be called once."""

    def __init__(
        self,
        model: CostModel,
        *,
        memory_bytes: float,
        settings: Settings | None = None,
        stages: Sequence[Stage] = DEFAULT_STAGES,
        start: Sequence[tuple[Action, ...]] = (),
        proposals: Callable[[float | None], Sequence[States]] = lambda _seconds: (),
        progress: Callable[[Round], None] | None = None,
        interrupt: threading.Event | None = None,
    ) -> None:
        """``start`` are trajectories to begin with, for example that of an earlier plan.

        The result costs no more than any of them: the penalty for length begins at the longest
        one's. ``proposals`` is called with the remaining seconds, and returns states that may be
        better in some regions (:func:`toast.search.relaxation.proposing`).  Setting ``interrupt``
        ends the search; so does Ctrl-C.
        """
        self._settings = settings or Settings()
        self._stages = check_stages(stages, 1)
        self._start = start
        self._progress = progress
        self._interrupt = interrupt
        self._ledger = Ledger(
            model, memory_bytes, self._settings.action_cost,
            depth=self._settings.depth, seed=self._settings.seed,
        )  # fmt: skip
        self._ledger.proposals = proposals

    def run(self) -> SearchResult:
        """Search until rounds bring no improvement.

        Raises :class:`toast.errors.SearchError` for a stage that fails.
        """
        begin = time.perf_counter()
        ledger, rounds = self._ledger, list[Round]()
        with noted_interrupts() as noted:
            interrupt = self._interrupt or noted
            budget = Budget(self._settings.budget, interrupt)
            try:
                for event in self._rounds(budget, begin):
                    rounds.append(event)
                    if self._progress:
                        self._progress(event)
            except SearchEnd:
                pass
            except KeyboardInterrupt:
                interrupt.set()
            over, ledger.check = budget.over, lambda: None
            actions = ledger.best.actions
            state = ledger.replay(actions)
            (key,), _ = ledger.price(state[None])
            # Report the model's price: the memo's is rounded differently.
            (cost,) = ledger.model.cost(ledger.model.price(state[None]), ledger.memory_bytes)
            stopped = "interrupt" if interrupt.is_set() else "budget"
        return SearchResult(
            actions=actions,
            state=state,
            cost=float(cost),
            states=len(ledger),
            seconds=time.perf_counter() - begin,
            rounds=tuple(rounds),
            stopped=stopped if over else "",
            rank=ledger.rank(key, length(actions)),
            smallest_peak=ledger.smallest_peak,
        )

    def _rounds(self, budget: Budget, begin: float) -> Iterator[Round]:
        settings, ledger = self._settings, self._ledger
        ledger.free = max(map(length, self._start), default=0)
        starts = [ledger.begin(actions) for actions in self._start]
        origin = ledger.begin()
        ledger.starts = starts or [origin]
        ledger.check = budget.check
        stale = 0
        for number in range(settings.rounds):
            before = ledger.best.rank
            budget.round, budget.improved = number, number == 0
            run_stages(self._stages, ledger, budget)
            elapsed = time.perf_counter() - begin
            yield Round(number, len(ledger), self._best_cost(), elapsed)
            stale = 0 if ledger.best.rank < before - 1e-9 else stale + 1
            if stale >= settings.patience:
                return
            ledger.starts = []

    def _best_cost(self) -> float:
        return self._ledger.cost(state_key(self._ledger.replay(self._ledger.best.actions)))
