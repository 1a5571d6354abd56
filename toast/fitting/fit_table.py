"""What fits: rows of sizes, policies and meshes with their prices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from toast import lazy
from toast.hardware import Mesh
from toast.plan import Plan
from toast.records import Record, late
from toast.units import size_text

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy.module("pandas")


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What to plan: sizes, microbatches, a policy, and a mesh or a number of devices."""

    #: Sizes of the target by name, such as ``("batch", 32)``.
    sizes: tuple[tuple[str, int], ...] = ()
    #: ``None`` for the program's own number.
    microbatches: int | None = None
    #: The mesh; ``None`` for the best one of :attr:`devices`.
    mesh: Mesh | None = None
    #: The number of devices; ``None`` if there is a mesh.
    devices: int | None = None
    #: The memory policy, ``auto``, or empty for the program's own recomputation.
    remat: str = ""

    @property
    def label(self) -> str:
        """The request in words: ``batch 32, 2 microbatches``."""
        parts = [f"{name} {size}" for name, size in self.sizes]
        parts += [f"{self.devices} devices"] if self.devices else []
        parts += [f"{self.microbatches} microbatches"] if (self.microbatches or 1) > 1 else []
        return ", ".join(parts)

    def with_size(self, name: str, value: int) -> PlanRequest:
        """The request with another size, or another number of devices."""
        if name == "devices":
            return dataclasses.replace(self, devices=value, mesh=None)
        sizes = {**dict(self.sizes), name: value}
        return dataclasses.replace(self, sizes=tuple(sizes.items()))

    @property
    def words(self) -> tuple[str, ...]:
        """The options of the policy, of the microbatches and of the mesh on the command line."""
        words = ["--mesh", str(self.mesh)] if self.mesh else []
        words += ["--devices", str(self.devices)] if self.devices and not self.mesh else []
        words += ["--remat", self.remat] if self.remat else []
        words += ["--microbatches", str(self.microbatches)] if self.microbatches else []
        return tuple(words)


@dataclasses.dataclass(frozen=True)
class FitRow:
    """A plan of the table."""

    #: Sizes of the target by name, such as ``("batch", 32)``.
    sizes: tuple[tuple[str, int], ...]
    #: The number of microbatches; 1 without any.
    microbatches: int
    #: The name of the memory policy, ``own`` for one that was chosen by name of residual, or empty.
    remat: str
    #: The policy as text, which ``--remat`` takes; empty for the program's own recomputation.
    policy: str
    #: The mesh of the plan.
    mesh: Mesh
    #: The predicted seconds of a step.
    step_seconds: float
    #: The predicted peak of a device, and the odds that XLA's is within the limit.
    peak_bytes: float
    #: The odds that XLA's peak is within the limit; ``None`` if unknown.
    fit_probability: float | None
    #: Whether the plan fits.
    fits: bool
    #: Tokens, rows or steps per second of the whole mesh (:attr:`Fit.unit`).
    rate: float
    #: The command that makes this plan; empty in Python.
    command: str = ""
    #: What plans the row again: with the mesh and the microbatches of its plan.
    request: PlanRequest = dataclasses.field(
        default_factory=PlanRequest, compare=False, repr=False, kw_only=True
    )
    #: The plan itself.
    plan: Plan | None = dataclasses.field(default=None, compare=False, repr=False, kw_only=True)

    @staticmethod
    def of(plan: Plan, request: PlanRequest, work: float) -> FitRow:
        """The row of a plan whose step does ``work``, such as its number of tokens."""
        label, count = "", request.microbatches
        if plan.policy is not None:
            label = plan.policy.preset or "own"
        memory = plan.analysis.program.memory
        if count is None and memory is not None and memory.accumulates:
            count = plan.microbatches  # which "auto" would choose anew
        return FitRow(
            sizes=request.sizes,
            microbatches=plan.microbatches,
            remat=label,
            policy="" if plan.policy is None else plan.policy.preset or str(plan.policy),
            mesh=plan.mesh,
            step_seconds=plan.after.step_seconds,
            peak_bytes=plan.after.peak_bytes,
            fit_probability=plan.after.fit_probability,
            fits=plan.fits,
            rate=work / plan.after.step_seconds,
            request=dataclasses.replace(request, mesh=plan.mesh, devices=None, microbatches=count),
            plan=plan,
        )

    @property
    def devices(self) -> int:
        """The devices of the mesh."""
        return self.mesh.devices

    def value(self, name: str) -> int:
        """A size, or the number of devices."""
        return self.devices if name == "devices" else dict(self.sizes)[name]

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data, for JSON."""
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self) if field.name not in ("request", "plan")
        }  # fmt: skip
        return {
            **data, "sizes": dict(self.sizes), "mesh": str(self.mesh), "devices": self.devices
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change with which a plan would fit."""

    #: The options of the command line that make the change: ``--remat auto``.
    change: str
    #: What it does, in words.
    text: str
    #: ``planned`` if a plan was made and fits, ``priced`` if it follows from prices.
    source: str
    #: The predicted peak of a device; ``None`` if unknown.
    peak_bytes: float | None = None
    #: The predicted seconds of a step; ``None`` if unknown.
    step_seconds: float | None = None
    #: The whole command.
    command: str = ""
    #: Work per second of the whole mesh; ``None`` if unknown.
    rate: float | None = None
    #: What :attr:`rate` counts: ``tokens``, ``rows`` or ``steps``.
    unit: str = "steps"
    #: Whether the figures are those of a plan that recomputes everything.  The plan of the command,
    #: with ``--remat auto``, is about as fast or faster.
    recomputes: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The remedy as plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Fit(Record):
    """The answer to a question such as "what is the largest batch that fits?".

    ``str()`` is a table of 80 columns, :meth:`frame` a DataFrame.
    """

    #: The name of the program, of the size that was looked for, and of the hardware.
    program: str
    #: The size that was looked for, such as ``batch``, or ``devices``.
    find: str
    #: The name of the hardware.
    hardware: str
    #: The limit per device, in bytes.
    memory_bytes: float
    #: The odds with which plans must fit; ``None`` if the prediction itself must.
    safety: float | None
    #: What :attr:`FitRow.rate` counts: ``tokens``, ``rows`` or ``steps``.
    unit: str
    #: The plans that fit.  Of batches and sequences, most work per second first; of other sizes,
    #: such as the number of layers, the largest first; of devices, the fewest.
    rows: tuple[FitRow, ...]
    #: If nothing fits, the plan with the smallest peak.
    nearest: FitRow | None = None
    #: The next size above :attr:`value` that was tried, of which no plan fits: what is between was
    #: not planned.  Of devices, the next smaller number.  ``None`` if none was tried.
    next_size: int | None = None
    #: Notes, one per line.
    note: str = ""
    #: Why the search ended early: ``budget``, ``interrupt``, or empty.
    stopped: str = ""
    #: The number of plans that were computed, and their seconds.
    plans: int = 0
    #: The seconds of the whole search.
    seconds: float = dataclasses.field(default=0.0, compare=False)

    def __repr__(self) -> str:
        if self.largest is None:
            return f"<Fit of {self.program}: no {self.find} fits>"
        return (
            f"<Fit of {self.program}: {self.find} {self.largest.value(self.find)}, "
            f"{len(self.rows)} plans>"
        )

    @late
    def __str__(self) -> str:
        """The answer and its table, at most 80 columns wide."""
        raise NotImplementedError

    @property
    def fits(self) -> bool:
        """Whether anything fits."""
        return bool(self.rows)

    @property
    def best(self) -> FitRow | None:
        """The first row; ``None`` if nothing fits: the fastest, if rates of the sizes compare."""
        return self.rows[0] if self.rows else None

    @property
    def largest(self) -> FitRow | None:
        """The row with the largest size or the fewest devices, of these the fastest.

        Larger batches always fit in more microbatches.  So the largest batch is that of the rows
        with fewest.
        """
        sign = 1 if self.find == "devices" else -1
        fewest = min((row.microbatches for row in self.rows), default=1)
        own = [row for row in self.rows if self.find != "batch" or row.microbatches == fewest]
        rows = sorted(own, key=lambda row: (sign * row.value(self.find), -row.rate))
        return rows[0] if rows else None

    @property
    def value(self) -> int | None:
        """The largest size that fits, or the fewest devices; ``None`` if nothing does."""
        return self.largest.value(self.find) if self.largest else None

    def frame(self) -> pd.DataFrame:
        """A DataFrame with one row per plan, in the order of :attr:`rows`.

        Columns: the sizes, ``microbatches``, ``remat``, ``mesh``, ``devices``, ``step_seconds``,
        ``peak_bytes``, ``fit_probability``, and the rate (``tokens_per_s``).
        """
        names = list(dict.fromkeys(name for row in self.rows for name, _ in row.sizes))
        columns = [
            "microbatches", "remat", "mesh", "devices", "step_seconds", "peak_bytes",
            "fit_probability",
        ]  # fmt: skip
        return pd.DataFrame(
            [
                {
                    **dict(row.sizes),
                    **{column: getattr(row, column) for column in columns},
                    "mesh": str(row.mesh),
                    f"{self.unit}_per_s": row.rate,
                }
                for row in self.rows
            ],
            columns=[*names, *columns, f"{self.unit}_per_s"],
        )

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data, for JSON."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            "version": 1,
            **data,
            "value": self.value,
            "rows": [row.to_dict() for row in self.rows],
            "nearest": self.nearest and self.nearest.to_dict(),
        }


def nearest_text(row: FitRow, limit: float) -> str:
    """What the plan with the smallest need lacks."""
    where = [f"{name} {size}" for name, size in row.sizes]
    where += [f"{row.devices} devices"] if row.devices > 1 else ["1 device"]
    if row.microbatches > 1:
        where.append(f"{row.microbatches} microbatches")
    return (
        f"the smallest need found is {size_text(row.peak_bytes)} per device ({', '.join(where)}), "
        f"and the limit is {size_text(limit)}"
    )


def counted_sizes(sizes: Mapping[str, int], one_token: bool = False) -> tuple[str, tuple[str, ...]]:
    """What the work of a step is counted in, and the sizes whose product it is.

    ``one_token`` says that a step handles one token of each sequence, as in decoding.
    """
    if "sequence" in sizes and not one_token:
        return "tokens", ("batch", "sequence")
    if "batch" in sizes:
        return ("tokens" if one_token else "rows"), ("batch",)
    return "steps", ()


def work(sizes: Iterable[tuple[str, int]], counted: Iterable[str]) -> float:
    """The work of a step: the product of the sizes that count."""
    known = dict(sizes)
    return float(math.prod(known.get(name, 1) for name in counted))


def better(rate: float, than: float, share: float) -> bool:
    """Whether a rate is better by more than a share."""
    return rate > than * (1.0 + share) if math.isfinite(than) else True
