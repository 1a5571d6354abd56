"""Settings of a search."""

from __future__ import annotations

import dataclasses
import math
import numbers

from toast.errors import SearchError


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the search; the defaults are the paper's where it names any.

    The fields of the stages (:data:`toast.search.DEFAULT_STAGES`) determine which changes they try.
    Raises :class:`toast.errors.SearchError` for a value that is not a number, or too small.
    """

    #: The same seed gives the same plan.
    seed: int = 0
    #: Maximum number of actions of a trajectory (4.2).
    depth: int = 30
    #: Maximum number of rounds; in each round, every stage runs once.
    rounds: int = 40
    #: Rounds without improvement after which the search ends (4.1).
    patience: int = 1
    #: Share of the cost that an action must save, so that shorter trajectories are preferred (4.1);
    #: a refinement must save five times that.
    action_cost: float = 1e-4
    #: Seconds after which the search returns its best plan so far; ``None`` for no limit.
    budget: float | None = None
    #: Number of searches; the best plan is kept.  The first uses ``seed``, the others seeds drawn
    #: from it.
    restarts: int = 1
    #: Searches that run at a time, each in its own process.  The plan does not depend on it, unless
    #: a budget or an interrupt ends the searches.
    processes: int = 1

    def __post_init__(self) -> None:
        least = dict.fromkeys(("restarts", "processes"), 1)
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
