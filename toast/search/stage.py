"""The protocol of search stages: a stage takes a ledger and a budget, and offers trajectories."""

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
    """The remaining time of a search, and its progress."""

    def __init__(self, seconds: float | None, interrupt: threading.Event | None = None) -> None:
        """``seconds`` from now on (``None``: no limit); setting ``interrupt`` ends the search."""
        self._end = None if seconds is None else time.perf_counter() + seconds
        self._interrupt = interrupt or threading.Event()
        #: Number of the round, from 0.
        self.round = 0
        #: Whether this round has improved the best trajectory; true in the first round.
        self.improved = True

    @property
    def left(self) -> float | None:
        """Seconds until the end; ``None`` without a limit."""
        return None if self._end is None else max(0.0, self._end - time.perf_counter())

    @property
    def over(self) -> bool:
        """Whether no time is left, or the user has interrupted the search."""
        return self._interrupt.is_set() or self.left == 0.0

    def check(self) -> None:
        """Raise :class:`SearchEnd` if the budget is over."""
        if self.over:
            raise SearchEnd


class Stage(Protocol):
    """A step of the search: a function, or an object that can be called.

    A stage reads the ledger (``ledger.best``, and ``ledger.starts``, which the previous stage
    returned), prices states in batches (``ledger.price``) and offers trajectories
    (``ledger.offer``).  It returns the trajectories that the next stage begins with, or ``None`` to
    keep ``ledger.starts``.

    Pricing raises :class:`toast.search.SearchEnd` at the end of the budget; a stage must not catch
    it.  A stage that computes for long without pricing checks ``budget.over``.  Data is kept
    between rounds in ``ledger.memory``; every random choice is drawn from ``ledger.random``.  A
    stage with a true attribute ``uses_proposals`` may ask ``ledger.proposals`` for states of the
    relaxed pairwise program.
    """

    def __call__(self, ledger: Ledger, budget: Budget, /) -> Iterable[Trajectory] | None:
        """Offer trajectories, and return those for the next stage to begin with."""


@dataclasses.dataclass(frozen=True)
class WhenImproved:
    """Stages for the first round, and for rounds whose earlier stages improved the trajectory."""

    #: The stages.
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", check_stages(self.stages, 1))

    @property
    def uses_proposals(self) -> bool:
        """Whether one of the stages asks for proposals."""
        return use_proposals(self.stages)

    def __call__(self, ledger: Ledger, budget: Budget) -> None:
        """Run the stages."""
        if budget.improved:
            run_stages(self.stages, ledger, budget)


def run_stages(stages: Iterable[Stage], ledger: Ledger, budget: Budget) -> None:
    """Run stages in order; each begins with the trajectories that the previous one returned.

    Raises :class:`toast.errors.SearchError` if a stage fails.
    """
    before = ledger.best.rank
    for stage in stages:
        budget.check()
        try:
            returned = stage(ledger, budget)
            starts = None if returned is None else list(returned)
        except (SearchEnd, SearchError):
            raise
        except Exception as error:
            raise SearchError(
                f"stage {stage_name(stage)}: {type(error).__name__}: {error}"
            ) from error
        if starts is not None:
            if not all(isinstance(start, Trajectory) for start in starts):
                raise SearchError(
                    f"stage {stage_name(stage)}: returns something other than trajectories; "
                    "return what ledger.offer returns, or None"
                )
            ledger.starts = starts
        budget.improved |= ledger.best.rank < before


def stage_name(stage: Stage) -> str:
    """The name of a function, or of the class of an object."""
    return str(getattr(stage, "__name__", type(stage).__name__))


def use_proposals(stages: Iterable[Stage]) -> bool:
    """Whether one of the stages asks for proposals."""
    return any(getattr(stage, "uses_proposals", False) for stage in stages)


def check_stages(stages: Sequence[Stage], processes: int) -> tuple[Stage, ...]:
    """``stages`` as a tuple; worker processes need copies if ``processes`` is larger than 1.

    Raises :class:`toast.errors.SearchError` for an object that is no stage, or cannot be copied.
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
    except Exception:  # pickling may raise anything
        return False
