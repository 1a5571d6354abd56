"""What a stage of the search is: it takes a ledger and a budget, and offers trajectories."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from toast.errors import SearchError
from toast.search.ledger import Ledger, SearchEnd, Trajectory


class Budget:
    """What a search may still spend, and how far it is."""

    def __init__(self, seconds: float | None, interrupt: threading.Event | None = None) -> None:
        """``seconds`` from now on (``None``: no limit); ``interrupt`` ends the search when set."""
        self._end = None if seconds is None else time.perf_counter() + seconds
        self._interrupt = interrupt or threading.Event()
        #: Number of the round, from 0 on.
        self.round = 0
        #: Whether this round has a better trajectory than the rounds before; true in the first.
        self.improved = True

    @property
    def left(self) -> float | None:
        """Seconds until the end; ``None`` without a limit."""
        return None if self._end is None else max(0.0, self._end - time.perf_counter())

    @property
    def over(self) -> bool:
        """Whether the time is over, or the user has interrupted the search."""
        return self._interrupt.is_set() or self.left == 0.0

    def check(self) -> None:
        """Raise :class:`SearchEnd` where the budget is over."""
        if self.over:
            raise SearchEnd


class Stage(Protocol):
    """One way of making trajectories; a function, or an object that can be called.

    A stage looks at what the ledger knows (``ledger.best``, and ``ledger.starts``, which the stage
    before has returned), prices states in batches (``ledger.price``) and offers what is worth it
    (``ledger.offer``).  It returns the trajectories that the next stage begins with; ``None``
    leaves ``ledger.starts`` as they are.

    Pricing raises :class:`toast.search.SearchEnd` at the end of the budget, which a stage lets
    pass; one that computes for long without pricing looks at ``budget.over``.  What a stage
    remembers from round to round is in ``ledger.memory``; every random choice is drawn from
    ``ledger.random``.  A stage with a true attribute ``uses_proposals`` may ask
    ``ledger.proposals`` for states of the relaxed pairwise program.
    """

    def __call__(self, ledger: Ledger, budget: Budget, /) -> Iterable[Trajectory] | None:
        """Offer trajectories, and return those for the next stage to begin with."""


@dataclasses.dataclass(frozen=True)
class WhenImproved:
    """Stages that run, in turn, in rounds whose earlier stages found a better trajectory."""

    stages: tuple[Stage, ...]

    @property
    def uses_proposals(self) -> bool:
        """Whether one of the stages does."""
        return use_proposals(self.stages)

    def __call__(self, ledger: Ledger, budget: Budget) -> None:
        """Run the stages."""
        if budget.improved:
            run_stages(self.stages, ledger, budget)


def run_stages(stages: Iterable[Stage], ledger: Ledger, budget: Budget) -> None:
    """Run stages in turn; each begins with the trajectories that the one before has returned.

    Raises :class:`toast.errors.SearchError` for one that fails.
    """
    before = ledger.best.rank
    for stage in stages:
        budget.check()
        try:
            returned = stage(ledger, budget)
        except (SearchEnd, SearchError):
            raise
        except Exception as error:
            raise SearchError(
                f"stage {stage_name(stage)}: {type(error).__name__}: {error}"
            ) from error
        if returned is not None:
            ledger.starts = list(returned)
        budget.improved |= ledger.best.rank < before


def stage_name(stage: Stage) -> str:
    """The name of a function, or of the class of an object."""
    return str(getattr(stage, "__name__", type(stage).__name__))


def use_proposals(stages: Iterable[Stage]) -> bool:
    """Whether one of the stages asks for proposals."""
    return any(getattr(stage, "uses_proposals", False) for stage in stages)


def check_stages(stages: Sequence[Stage], processes: int) -> tuple[Stage, ...]:
    """The stages, of which processes need copies.

    Raises :class:`toast.errors.SearchError` for what is no stage, or cannot be copied.
    """
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        raise SearchError(f"stages {stages!r}: give a list of functions of a ledger and a budget")
    for stage in stages:
        if not callable(stage):
            raise SearchError(f"stage {stage!r}: give a function of a ledger and a budget")
        if isinstance(stage, type):
            raise SearchError(f"stage {stage.__name__} is a class; give {stage.__name__}()")
        if processes > 1 and not _can_be_sent(stage):
            raise SearchError(
                f"stage {stage_name(stage)} cannot be sent to other processes; define it at the "
                "top of a module that can be imported, or use one process"
            )
    return tuple(stages)


def _can_be_sent(stage: Stage) -> bool:
    """Whether another interpreter, which does not run the user's script, can load the stage."""
    try:
        return b"__main__" not in pickle.dumps(stage)
    except Exception:  # whatever its methods raise
        return False
