"""The plan, and the alternatives to it, as records."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toast import apply, ports
from toast.analysis import Analysis
from toast.analysis.query import Relations, evaluate, prepare
from toast.cost import Breakdown, CostModel, Timeline, Transfer, break_down
from toast.errors import PlanError
from toast.files import write_all
from toast.hardware import Hardware, Mesh
from toast.plan.origin import Origin
from toast.plan.prediction import NumberChange, Prediction
from toast.plan.reasons import ArgumentExplanation, CollectiveExplanation
from toast.plan.returned import StepReshard, step_reshards
from toast.program import Shardings, Spec
from toast.records import Record, late
from toast.search import MeshResult, Round
from toast.space import Action, Constraints, Resolving, States
from toast.units import size_text, time_text

if TYPE_CHECKING:
    import pandas as pd

    from toast.apply import JitShardings, Verification


@dataclasses.dataclass(frozen=True)
class Step:
    """One action of the plan with what it did."""

    #: Argument dimensions of the color, layers folded: ``params['layers'][*]['gate']:1``.
    dimensions: tuple[str, ...]
    axis: str
    #: Bit per resolution group; empty where the color has no conflicts.
    resolution: tuple[int, ...]
    after: Prediction
    reason: str
    #: Of a refinement: the op classes that it reaches, each with the factor that takes the axis.
    part: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ArgumentRow:
    """Arguments of one group (4.4) with one sharding."""

    #: Their paths, positions in lists folded: ``params['layers'][*]['gate']``.
    patterns: tuple[str, ...]
    count: int
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    #: Bytes of all of them on one device.
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan(Record):
    """A sharding of a program on a mesh: shardings, predictions, reasons; and how to run it."""

    analysis: Analysis
    mesh: Mesh
    hardware: Hardware
    memory_bytes: float
    shardings: Shardings
    steps: tuple[Step, ...]
    before: Prediction
    after: Prediction
    cost: float
    states: int
    rounds: tuple[Round, ...]
    seed: int
    #: Every collective, by what it moves, with the algorithm that it is priced with.
    transfers: tuple[Transfer, ...] = dataclasses.field(repr=False)
    #: Seconds per stage.
    seconds: dict[str, float] = dataclasses.field(compare=False)
    #: What made it: TOAST's search, or a baseline.
    method: str = "toast"
    #: What else there is to know of it, such as that its search ran out of time.
    note: str = ""
    #: How every mesh did, where a number of devices was given and no mesh.
    meshes: tuple[MeshResult, ...] = dataclasses.field(default=(), repr=False)
    #: Seconds that the step of every plan on this mesh and hardware takes at least.
    bound_seconds: float = 0.0
    #: What prices it, and the state of the model's space that it is: ``[classes, axes]``.
    model: CostModel = dataclasses.field(kw_only=True, compare=False, repr=False)
    state: States = dataclasses.field(kw_only=True, compare=False, repr=False)
    #: The actions of the steps behind the pins; none where no actions led to the state.
    actions: tuple[Action, ...] = dataclasses.field(default=(), compare=False, repr=False)
    #: How conflicts were resolved.
    resolution: Resolving = "compatible"
    #: What the command line made it from.
    origin: Origin | None = dataclasses.field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        what = "Plan" if self.method == "toast" else f"Plan by {self.method}"
        return (
            f"<{what} for {self.analysis.program.name} on mesh {self.mesh} of "
            f"{self.hardware.name}: step {time_text(self.after.step_seconds)}, peak "
            f"{size_text(self.after.peak_bytes)} of {size_text(self.memory_bytes)}, "
            f"{'fits' if self.fits else 'does not fit'}>"
        )

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory limit."""
        return self.after.peak_bytes <= self.memory_bytes

    @property
    def constraints(self) -> Constraints:
        """What the user fixed."""
        return self.model.space.constraints

    # -- prices, taken apart -----------------------------------------------------------------

    @functools.cached_property
    def timeline(self) -> Timeline:
        """Memory of a device in program order, with what is alive at the peak."""
        return self.model.timeline(self.state)

    @functools.cached_property
    def timeline_before(self) -> Timeline:
        """The same of the unsharded program."""
        return self.model.timeline(self.model.space.unsharded)

    @functools.cached_property
    def breakdown(self) -> Breakdown:
        """Seconds of a step by op."""
        return break_down(self.model, self.state)

    @functools.cached_property
    def breakdown_before(self) -> Breakdown:
        """The same of the unsharded program."""
        return break_down(self.model, self.model.space.unsharded)

    # -- shardings ---------------------------------------------------------------------------

    @property
    def op_state(self) -> npt.NDArray[np.int8]:
        """``[ops, axes]`` the factor of each op that holds each mesh axis, or -1."""
        return self.model.space.of_ops(self.state)

    def value_spec(self, value: int) -> Spec:
        """The sharding of a value where it is defined."""
        return self.shardings.of(self.analysis.program, value)

    @functools.cached_property
    def arguments(self) -> dict[str, Spec]:
        """The sharding of each argument: mesh axes per dimension."""
        program = self.analysis.program
        return {
            name: self.value_spec(value)
            for name, value in zip(program.arguments, program.argument_values, strict=True)
        }

    @functools.cached_property
    def step_reshards(self) -> tuple[StepReshard, ...]:
        """Arguments that the program returns but does not donate, and the reshard that this costs.

        One for each tree of arrays that comes in as an argument and leaves as a result, updated.
        The step time does not have that reshard in it.
        """
        values = self.analysis.program.argument_values
        return step_reshards(
            self.model, lambda number: self.value_spec(values[number]), self.shardings.results
        )

    @late
    def argument_table(self) -> tuple[ArgumentRow, ...]:
        """Arguments by group and sharding, those with most bytes on the device first."""
        raise NotImplementedError

    @late
    def argument_frame(self) -> pd.DataFrame:
        """``argument, shape, dtype, spec``: one row per argument."""
        raise NotImplementedError

    # -- queries -----------------------------------------------------------------------------

    @functools.cached_property
    @late
    def vocabulary(self) -> Relations:
        """The relations that queries may use."""
        raise NotImplementedError

    def query(
        self, body: str | pathlib.Path, *, rules: Sequence[str | pathlib.Path] = ()
    ) -> pd.DataFrame:
        """:meth:`Analysis.query`, with the relations of the mesh and of the plan as well."""
        return evaluate(prepare(body, rules), self.vocabulary, self.analysis.label)

    # -- running -----------------------------------------------------------------------------

    @property
    def in_shardings(self) -> Any:
        """PartitionSpecs in the structure of the arguments.

        With keyword arguments it is the pair of positional and keyword shardings.  ``jax.jit``
        takes PartitionSpecs under ``jax.set_mesh`` only: give it those of :meth:`shardings_for`.
        """
        return apply.in_shardings(self.analysis.program, self.shardings)

    @property
    def out_shardings(self) -> Any:
        """PartitionSpecs in the structure of the result; see :attr:`in_shardings`."""
        return apply.out_shardings(self.analysis.program, self.shardings)

    def shardings_for(self, mesh: Any = None) -> JitShardings:
        """``in_shardings`` and ``out_shardings`` for ``jax.jit``, on real devices.

        ``mesh`` is as for :meth:`jit`.  Both are pytrees of ``jax.sharding.NamedSharding`` in the
        structures of :attr:`in_shardings` and :attr:`out_shardings`.  ``jax.jit`` with these alone
        leaves intermediate values to XLA; :meth:`jit` does not.  Raises
        :class:`toast.errors.PlanError` when there are too few devices.
        """
        found: JitShardings = apply.jit_shardings(
            self.analysis.program, self.shardings, devices=mesh
        )
        return found

    def jit(self, mesh: Any = None) -> Callable[..., Any]:
        """The sharded program as a function that XLA compiles and runs.

        ``mesh`` is a ``jax.sharding.Mesh`` of the plan's shape, whose order of devices is kept, or
        a list of as many devices (default: the first of ``jax.devices()``).  The function takes and
        returns the pytrees of the one that was planned; for a program from a file, flat arguments
        and a list.  Raises :class:`toast.errors.PlanError` when there are too few devices.
        """
        runnable: Callable[..., Any] = self.build("jax", devices=mesh)
        return runnable

    def build(self, backend: str, **options: Any) -> Any:
        """What a registered backend makes of the plan, with ``options`` of its own.

        ``"jax"`` is :meth:`jit`, ``"stablehlo"`` is :meth:`annotated`.  Raises
        :class:`toast.errors.PlanError` for a backend that there is not; :mod:`toast.ports` says how
        one is registered.
        """
        return ports.backend(backend).build(self.analysis.program, self.shardings, **options)

    def annotated(self) -> str:
        """StableHLO text with the plan as Shardy annotations."""
        return str(self.build("stablehlo"))

    def verify(self, *, seed: int = 0) -> Verification:
        """Run the program sharded and unsharded on small random inputs and compare outputs."""
        return apply.verify(self.analysis.program, self.shardings, seed=seed)

    # -- explanations ------------------------------------------------------------------------

    @late
    def explain_argument(self, name: str) -> ArgumentExplanation:
        """Why an argument is sharded as it is: which step gave it each axis, with its effect.

        And what keeps other axes off each of its dimensions.  ``name`` may be a pattern of paths,
        of arguments that are sharded alike.  Raises :class:`toast.errors.PlanError` for an argument
        that does not exist, and a pattern of arguments that differ.
        """
        raise NotImplementedError

    @late
    def explain_collectives(self) -> tuple[CollectiveExplanation, ...]:
        """Every collective of a step with its cause, those that take most time first.

        ``total_seconds`` of all of a kind sum to what is predicted for it.
        """
        raise NotImplementedError

    @late
    def explain_collective(self, number: int) -> CollectiveExplanation:
        """Why a collective is there: the value that moves, between which ops, by which steps.

        ``number`` is its place in :meth:`explain_collectives`, from 1.  Raises
        :class:`toast.errors.PlanError` for a number that there is not.
        """
        raise NotImplementedError

    @late
    def why_not(
        self, argument: str, spec: Any, *, search: bool = True, budget: float | None = 10.0
    ) -> WhyNot:
        """Price a sharding that the plan does not have, beside the plan, or say why it cannot be.

        It is pinned, once with all else as in the plan, and once with a search (of at most
        ``budget`` seconds) that begins there.  ``argument`` is a path or a pattern of paths,
        ``spec`` a ``PartitionSpec`` or its text.  Raises :class:`toast.errors.PlanError` for an
        argument that does not exist, :class:`toast.errors.PinError` for what is no sharding of it
        on a mesh with these axes.
        """
        raise NotImplementedError

    # -- files -------------------------------------------------------------------------------

    @late
    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON: ``docs/plan.schema.json`` says what it looks like."""
        raise NotImplementedError

    @late
    def at_peak(self) -> pd.DataFrame:
        """What is alive where a device needs most memory, the largest first.

        Columns: ``bytes`` per device, ``value`` (the op that makes it, with its source line),
        ``what`` of it (the value, a resharded copy ...), and the source lines where it begins and
        ends, or ``end of the step``.
        """
        raise NotImplementedError

    @late
    def memory_data(self) -> dict[str, Any]:
        """The timeline as plain data: bytes after the last change before each op."""
        raise NotImplementedError

    def to_json(self, path: str | pathlib.Path) -> None:
        """Write :meth:`to_dict` to ``path``, whole or not at all.

        Raises :class:`toast.errors.PlanError` where it cannot be written.
        """
        if not isinstance(path, str | pathlib.Path):
            raise PlanError(f"path {path!r}: give the path of a file")
        write_all({path: self.json_text()}, PlanError)

    def json_text(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


@dataclasses.dataclass(frozen=True)
class CollectiveCount:
    """Collectives that one side has more of than the other."""

    kind: str
    axes: tuple[str, ...]
    #: The op that makes what moves, and the op that wants it otherwise (none of a sum).
    value: str
    use: str
    count: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A plan with the other sharding, and how it differs from the one that is explained."""

    plan: Plan = dataclasses.field(repr=False)
    #: Every figure that differs: the plan's, and the alternative's.
    numbers: tuple[NumberChange, ...]
    appear: tuple[CollectiveCount, ...]
    vanish: tuple[CollectiveCount, ...]
    #: Arguments that are sharded otherwise than in the plan: path, plan's, alternative's.
    arguments: tuple[tuple[str, str, str], ...]

    def __repr__(self) -> str:
        return (
            f"<Alternative: {len(self.numbers)} figures, {len(self.arguments)} arguments differ; "
            f"{self.plan!r}>"
        )

    @property
    def fits(self) -> bool:
        """Whether its peak is within the memory limit."""
        return self.plan.fits

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data, for JSON; of its plan the prediction."""
        data = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self) if field.name != "plan"
        }  # fmt: skip
        rows = {name: [_plain(row) for row in rows] for name, rows in data.items()}
        after = dataclasses.asdict(self.plan.after)
        return {**rows, "after": after, "fits": self.fits, "cost": self.plan.cost}


@dataclasses.dataclass(frozen=True)
class WhyNot(Record):
    """What another sharding of an argument would do."""

    argument: str
    spec: str
    #: The plan's own shardings of the arguments that are meant.
    now: tuple[str, ...]
    #: Why it cannot be; empty where it can.
    impossible: str = ""
    #: The sharding pinned, all else as in the plan.
    kept: Alternative | None = None
    #: The best that a search finds that begins there.
    searched: Alternative | None = None
    #: The cost of the plan that was asked, and whether it fits.
    plan_cost: float = math.inf
    plan_fits: bool = False

    def __repr__(self) -> str:
        said = [self.impossible] if self.impossible else []
        for what, side in (("step", self.kept), ("with a search", self.searched)):
            if side is not None:
                said.append(f"{what} {time_text(side.plan.after.step_seconds)}")
        said += ["better than the plan"] if self.better else []
        return f"<WhyNot {self.argument}={self.spec}: {', '.join(said)}>"

    @property
    def best(self) -> Alternative | None:
        """The alternative that fits, if one does, and costs least; nothing if it cannot be."""
        sides = [side for side in (self.kept, self.searched) if side is not None]
        return min(sides, key=lambda side: (not side.fits, side.plan.cost), default=None)

    @property
    def better(self) -> bool:
        """Whether the best alternative beats the plan: it costs less, and fits if the plan does."""
        best = self.best
        if best is None or best.fits < self.plan_fits:
            return False
        return best.fits > self.plan_fits or best.plan.cost * (1 + 1e-9) < self.plan_cost

    def accept(self) -> Plan:
        """The best alternative as a plan to keep, with the sharding pinned.

        Raises :class:`toast.errors.PlanError` where the sharding cannot be.
        """
        if self.best is None:
            raise PlanError(f"{self.argument}={self.spec} cannot be: {self.impossible}")
        return self.best.plan

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data, for JSON."""
        sides = {"kept": self.kept, "searched": self.searched}
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
