"""What another sharding would change: alternatives to a plan, and the answer to "why not?"."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Generic, Protocol, TypeVar

from toast.errors import PlanError
from toast.plan.prediction import NumberChange, Prediction
from toast.records import Record
from toast.units import time_text


class PricedPlan(Protocol):
    """What alternatives need of plans."""

    @property
    def after(self) -> Prediction:
        """The prediction."""

    @property
    def cost(self) -> float:
        """The cost that the search minimizes."""

    @property
    def fits(self) -> bool:
        """Whether it fits."""


_Plan = TypeVar("_Plan", bound=PricedPlan)


@dataclasses.dataclass(frozen=True)
class CollectiveCount:
    """Collectives that one of two plans has in excess of the other."""

    #: The name in StableHLO, such as ``all_gather``.
    kind: str
    #: The mesh axes that they run along.
    axes: tuple[str, ...]
    #: The op that defines the value, and the op that uses it (empty for a sum).
    value: str
    #: The op that uses the value; empty for a sum.
    use: str
    #: The number in a step.
    count: float
    #: Seconds of all of them.
    seconds: float


@dataclasses.dataclass(frozen=True)
class Alternative(Generic[_Plan]):
    """A plan with another sharding, and its differences from the original plan."""

    #: The alternative.
    plan: _Plan = dataclasses.field(repr=False)
    #: The predictions that differ: first the original plan's, then the alternative's.
    numbers: tuple[NumberChange, ...]
    #: Collectives that the alternative has in excess of the plan.
    appear: tuple[CollectiveCount, ...]
    #: Collectives that the plan has in excess of the alternative.
    vanish: tuple[CollectiveCount, ...]
    #: Arguments with different shardings: path, original sharding, alternative sharding.
    arguments: tuple[tuple[str, str, str], ...]
    #: Its cost as that of the original plan, relative to the same unsharded program:
    #: ``plan.cost`` is relative to the alternative's, which another memory policy changes.
    cost: float

    def __repr__(self) -> str:
        return (
            f"<Alternative: {len(self.numbers)} figures, {len(self.arguments)} arguments differ; "
            f"{self.plan!r}>"
        )

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory limit, with the plan's safety."""
        return self.plan.fits

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data, for JSON, with the prediction of the alternative."""
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self) if field.name not in ("plan", "cost")
        }  # fmt: skip
        rows = {name: [_plain(row) for row in rows] for name, rows in data.items()}
        after = dataclasses.asdict(self.plan.after)
        return {**rows, "after": after, "fits": self.fits, "cost": self.cost}


@dataclasses.dataclass(frozen=True)
class WhyNot(Record, Generic[_Plan]):
    """The effect of another sharding of an argument, or of another memory policy."""

    #: The argument, or the pattern of arguments, that was asked about; or the option
    #: (``remat``, ``microbatches`` ...).
    argument: str
    #: The sharding that was asked about, or the value of the option, as text.
    spec: str
    #: The shardings of the arguments in the plan, or what it has in place of the value.
    now: tuple[str, ...]
    #: Why the sharding is impossible; empty if it is possible.
    impossible: str = ""
    #: The alternative with the sharding pinned and the rest of the plan unchanged.
    pinned: Alternative[_Plan] | None = None
    #: The best alternative of a search that starts there.
    searched: Alternative[_Plan] | None = None
    #: The cost of the plan.
    plan_cost: float = math.inf
    #: Whether the plan fits.
    plan_fits: bool = False

    def __repr__(self) -> str:
        parts = [self.impossible] if self.impossible else []
        for what, side in (("step", self.pinned), ("with a search", self.searched)):
            if side is not None:
                parts.append(f"{what} {time_text(side.plan.after.step_seconds)}")
        parts += ["better than the plan"] if self.better else []
        return f"<WhyNot {self.argument}={self.spec}: {', '.join(parts)}>"

    @property
    def best(self) -> Alternative[_Plan] | None:
        """The cheapest alternative, preferably one that fits; None if it is impossible."""
        sides = [side for side in (self.pinned, self.searched) if side is not None]
        return min(sides, key=lambda side: (not side.fits, side.cost), default=None)

    @property
    def better(self) -> bool:
        """Whether the best alternative costs less than the plan, and fits if the plan does."""
        best = self.best
        if best is None or best.fits < self.plan_fits:
            return False
        return best.fits > self.plan_fits or best.cost * (1 + 1e-9) < self.plan_cost

    def accept(self) -> _Plan:
        """The best alternative as a plan, with the sharding pinned.

        Raises :class:`toast.errors.PlanError` if the sharding is impossible.
        """
        if self.best is None:
            raise PlanError(f"{self.argument}={self.spec} is impossible: {self.impossible}")
        return self.best.plan

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data, for JSON."""
        sides = {"pinned": self.pinned, "searched": self.searched}
        return {
            "argument": self.argument,
            "spec": self.spec,
            "now": list(self.now),
            "impossible": self.impossible,
            "better": self.better,
            **{name: side and side.to_dict() for name, side in sides.items()},
        }


def _plain(row: Any) -> Any:
    return list(row) if isinstance(row, tuple) else dataclasses.asdict(row)
