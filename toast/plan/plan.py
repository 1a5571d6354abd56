"""Records of plans and of alternatives to them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toast import apply, ports
from toast.analysis import Analysis, Lowering, lowering_of
from toast.analysis.query import Relations, evaluate, prepare
from toast.cost import (
    Breakdown,
    CostModel,
    ErrorBars,
    StepSchedule,
    Timeline,
    Transfer,
    break_down,
    step_schedule,
)
from toast.errors import PlanError
from toast.files import write_all
from toast.hardware import Hardware, Mesh
from toast.plan.maxtext_policy import maxtext_policy
from toast.plan.origin import Origin
from toast.plan.prediction import NumberChange, Prediction, fit_text, odds_text
from toast.plan.reasons import (
    AnnotationExplanation,
    ArgumentExplanation,
    CollectiveExplanation,
)
from toast.plan.step_reshards import StepReshard, step_reshards
from toast.program import MemoryPolicy, PaddedDimension, Shardings, Spec
from toast.records import Record, late
from toast.search import MeshResult, Round
from toast.space import Action, Constraints, Resolving, States
from toast.units import size_text, time_text

if TYPE_CHECKING:
    import pandas as pd

    from toast.apply import JitShardings, Runnable, Verification
    from toast.lower import LocalProgram, OpFactors
    from toast.plan.torch_shardings import TorchShardings


@dataclasses.dataclass(frozen=True)
class Step:
    """An action of the plan, or its pins, with the effect."""

    #: The dimensions of arguments, with ``*`` for list positions:
    #: ``params['layers'][*]['gate']:1``.
    dimensions: tuple[str, ...]
    #: The mesh axis.
    axis: str
    #: One bit per resolution group; empty if the color has no conflicts.
    resolution: tuple[int, ...]
    #: The prediction after this step.
    after: Prediction
    #: What the step saves and adds, in words.
    reason: str
    #: For a refinement: the op classes that it changes, each with the factor that gets the axis.
    part: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ArgumentRow:
    """The arguments of one group (4.4) with equal shardings."""

    #: Their paths, with ``*`` for list positions: ``params['layers'][*]['gate']``.
    patterns: tuple[str, ...]
    #: The number of arguments.
    count: int
    #: Their shape.
    shape: tuple[int, ...]
    #: Their element type, such as ``f32``.
    dtype: str
    #: Their sharding: the mesh axes of each dimension.
    spec: Spec
    #: The bytes per device of all of them.
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan(Record):
    """A sharding of a program on a mesh: shardings, predictions, reasons, and ways to run it.

    ``memory_bytes`` is the limit per device, ``before`` the prediction of the unsharded program,
    ``after`` that of the plan, ``cost`` that of section 4.5, ``states`` the number of priced
    states.
    """

    #: The analysis of the program.
    analysis: Analysis
    #: The mesh; axes of one device shard nothing.
    mesh: Mesh
    #: The kind of device that prices are for.
    hardware: Hardware
    #: The limit per device, in bytes.
    memory_bytes: float
    #: The sharding of every value, argument and result, and the reshards.
    shardings: Shardings
    #: The pins and actions, in order, each with its reason.
    steps: tuple[Step, ...]
    #: The prediction of the unsharded program.
    before: Prediction
    #: The prediction of the plan.
    after: Prediction
    #: The cost that the search minimises (4.5).
    cost: float
    #: The number of states that the search priced.
    states: int
    #: The progress of the search after each round.
    rounds: tuple[Round, ...]
    #: The seed of the search.
    seed: int
    #: Every collective with its value class or use class and its algorithm.
    transfers: tuple[Transfer, ...] = dataclasses.field(repr=False)
    #: The seconds of each stage.
    seconds: dict[str, float] = dataclasses.field(compare=False)
    #: The method: ``toast`` or a baseline.
    method: str = "toast"
    #: Notes, one per line, for example that the budget ended the search.
    note: str = ""
    #: The result for each mesh, if the search was given a number of devices.
    meshes: tuple[MeshResult, ...] = dataclasses.field(default=(), repr=False)
    #: A lower bound of the step time of every plan on this mesh and hardware, in seconds.
    bound_seconds: float = 0.0
    #: The same for every memory policy and number of microbatches that ``remat="auto"`` may choose
    #: (:mod:`toast.plan.policy_bound`); 0 for other plans.
    policies_bound_seconds: float = 0.0
    #: The cost model, and the state of the plan in the model's space: ``[classes, axes]``.
    model: CostModel = dataclasses.field(kw_only=True, compare=False, repr=False)
    #: The state of the plan in the space of :attr:`model`: ``[classes, axes]``.
    state: States = dataclasses.field(kw_only=True, compare=False, repr=False)
    #: The actions of the steps after the pins; empty if the method has no actions.
    actions: tuple[Action, ...] = dataclasses.field(default=(), compare=False, repr=False)
    #: How the search resolved conflicts.
    resolution: Resolving = "compatible"
    #: The TARGET and options of the command line, if any.
    origin: Origin | None = dataclasses.field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        what = "Plan" if self.method == "toast" else f"Plan by {self.method}"
        return (
            f"<{what} for {self.analysis.program.name} on mesh {self.mesh} of "
            f"{self.hardware.name}: step {time_text(self.after.step_seconds)}, peak "
            f"{size_text(self.after.peak_bytes)} of {size_text(self.memory_bytes)}, "
            f"{fit_text(self.fits, self.after.fit_probability)}>"
        )

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the memory limit, with the odds :attr:`safety`.

        ``after.fit_probability`` has the odds that XLA's peak is.
        """
        return self.needed_bytes(self.after) <= self.memory_bytes

    @property
    def safety(self) -> float | None:
        """The odds with which the plan had to fit; ``None`` if its predicted peak had to."""
        return self.model.safety

    @property
    def error_bars(self) -> ErrorBars:
        """How far predictions for the program may be off: intervals for any odds."""
        return self.model.error_bars

    def needed_bytes(self, prediction: Prediction) -> float:
        """The memory of a state to compare with the limit: more than its peak with a safety."""
        return self.model.needed_bytes(prediction.argument_bytes, prediction.peak_bytes)

    @property
    def unsafe_text(self) -> str:
        """Why the plan does not fit with the odds :attr:`safety`, if its peak is in the limit."""
        odds, needed = self.after.fit_probability or 0.0, self.needed_bytes(self.after)
        return (
            f"may not fit: the odds are {odds_text(odds)}, and {100 * (self.safety or 0.0):g} % "
            f"are asked for; with these odds, it needs up to {size_text(needed)} per device, and "
            f"the limit is {size_text(self.memory_bytes)}"
        )

    @property
    def lowering(self) -> Lowering:
        """What partitions the program: XLA (``"xla"``), or TOAST (``"local"``, :meth:`lowered`)."""
        return self.analysis.lowering

    @property
    def padding(self) -> tuple[PaddedDimension, ...]:
        """The dimensions that are padded because the axes do not divide them."""
        return self.analysis.program.padding

    @property
    def policy(self) -> MemoryPolicy | None:
        """What happens to each residual, by name; ``None`` if the program's own policies stay.

        The program of the plan is traced with it, so that :meth:`jit` runs it.
        """
        memory = self.analysis.program.memory
        return None if memory is None else memory.policy

    @property
    def microbatches(self) -> int:
        """The number of microbatches of ``toast.accumulate`` that the plan asked for, or 1."""
        memory = self.analysis.program.memory
        return 1 if memory is None else memory.microbatches

    @late
    def to_torch(self) -> TorchShardings:
        """The shardings of a PyTorch module as DTensor placements and parallel styles.

        For a program of JAX, names are the paths of arguments, and there are no parallel styles.
        """
        raise NotImplementedError

    def to_maxtext(self) -> str:
        """The memory policy as lines of MaxText's configuration (``remat_policy: custom``).

        Raises :class:`toast.errors.PlanError` if the plan has none, or MaxText cannot say it.
        """
        return maxtext_policy(self.analysis.program.memory)

    @late
    def export(
        self,
        to: str,
        *,
        names: Mapping[str, str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> str:
        """The plan as a file of another trainer.

        :param to: ``python``, a module with the mesh and the shardings of arguments and results
            that needs JAX alone; ``flax``, a module with names of dimensions and rules for Linen
            and NNX; ``maxtext`` or ``levanter``, a configuration in YAML; ``torch``, a module with
            DTensor placements and parallel styles that needs PyTorch alone.
        :param names: names of logical axes by dimension of an argument, which may be a pattern:
            ``{"params['layers'][*]['w1']:1": "mlp"}``.
        :param rename: MaxText's mesh axis for an axis of the plan: ``{"model": "tensor"}``.
        :returns: the text; comments in it name what the format cannot say.
        :raises toast.errors.PlanError: for an unknown format, a name that is no word, a dimension
            that no argument has, an axis that MaxText lacks, a plan without any dimension that
            MaxText or Levanter has a name for, and one of a JAX function for ``torch``.
        """
        raise NotImplementedError

    @property
    def constraints(self) -> Constraints:
        """The user's constraints."""
        return self.model.space.constraints

    # -- parts of the prices -----------------------------------------------------------------

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The memory of a device in program order, with the live values at the peak."""
        return self.model.timeline(self.state)

    @functools.cached_property
    def timeline_before(self) -> Timeline:
        """The timeline of the unsharded program."""
        return self.model.timeline(self.model.space.unsharded)

    @functools.cached_property
    def breakdown(self) -> Breakdown:
        """The seconds of a step by op."""
        return break_down(self.model, self.state)

    @functools.cached_property
    def breakdown_before(self) -> Breakdown:
        """The breakdown of the unsharded program."""
        return break_down(self.model, self.model.space.unsharded)

    @functools.cached_property
    def schedule(self) -> StepSchedule:
        """When each op and each collective of a step runs: the breakdown along the priced path."""
        return step_schedule(self.breakdown, self.after.step_seconds)

    # -- shardings ---------------------------------------------------------------------------

    @property
    def op_state(self) -> npt.NDArray[np.int8]:
        """``[ops, axes]``: the factor of each op that holds each mesh axis, or -1."""
        return self.model.space.of_ops(self.state)

    @functools.cached_property
    @late
    def factors(self) -> OpFactors:
        """The factors of ops that hold the axes of the mesh, and the steps that chose them."""
        raise NotImplementedError

    def value_spec(self, value: int) -> Spec:
        """The sharding of a value, given by its number, at its definition."""
        return self.shardings.of(self.analysis.program, value)

    @functools.cached_property
    def arguments(self) -> dict[str, Spec]:
        """The sharding of each argument by path: the mesh axes of each dimension."""
        program = self.analysis.program
        return {
            name: self.value_spec(value)
            for name, value in zip(program.arguments, program.argument_values, strict=True)
        }

    @functools.cached_property
    def step_reshards(self) -> tuple[StepReshard, ...]:
        """The reshards of arguments that the program returns but does not donate.

        There is one for each tree of arrays that is an argument and, updated, a result.  The step
        time does not include the reshard.
        """
        values = self.analysis.program.argument_values
        return step_reshards(
            self.model, lambda number: self.value_spec(values[number]), self.shardings.results
        )

    @late
    def argument_table(self) -> tuple[ArgumentRow, ...]:
        """The arguments by group and sharding, by decreasing bytes per device."""
        raise NotImplementedError

    @late
    def argument_frame(self) -> pd.DataFrame:
        """A DataFrame with one row per argument: ``argument``, ``shape``, ``dtype``, ``spec``."""
        raise NotImplementedError

    # -- queries -----------------------------------------------------------------------------

    @functools.cached_property
    @late
    def vocabulary(self) -> Relations:
        """The relations for queries, by predicate and arity."""
        raise NotImplementedError

    def query(
        self, body: str | pathlib.Path, *, rules: Sequence[str | pathlib.Path] = ()
    ) -> pd.DataFrame:
        """Evaluate a query over the relations of the analysis, of the mesh and of the plan.

        Parameters, result and errors are those of :meth:`Analysis.query`.
        """
        return evaluate(prepare(body, rules), self.vocabulary, self.analysis.label)

    # -- running -----------------------------------------------------------------------------

    @property
    def in_shardings(self) -> Any:
        """PartitionSpecs in the structure of the arguments.

        With keyword arguments, this is the pair of positional and keyword shardings.  ``jax.jit``
        accepts PartitionSpecs only under ``jax.set_mesh``; without it, use :meth:`shardings_for`.
        """
        return apply.in_shardings(self.analysis.program, self.shardings)

    @property
    def out_shardings(self) -> Any:
        """PartitionSpecs in the structure of the result; see :attr:`in_shardings`."""
        return apply.out_shardings(self.analysis.program, self.shardings)

    def shardings_for(self, mesh: Any = None) -> JitShardings:
        """``in_shardings`` and ``out_shardings`` for ``jax.jit``, on real devices.

        ``mesh`` is as for :meth:`jit`.  Both are pytrees of ``jax.sharding.NamedSharding`` in the
        structures of :attr:`in_shardings` and :attr:`out_shardings`.  With these, XLA chooses the
        shardings of intermediate values; :meth:`jit` also fixes those.  Raises
        :class:`toast.errors.PlanError` if there are too few devices, or the axes of the mesh have
        other sizes than those of the plan.
        """
        apply.check_mesh(self.analysis.program, self.shardings, mesh)
        shardings: JitShardings = apply.jit_shardings(
            self.analysis.program, self.shardings, devices=mesh
        )
        return shardings

    def init(
        self,
        function: Callable[..., Any],
        mesh: Any = None,
        *arguments: Any,
        argument: int | str | None = None,
    ) -> Any:
        """Compute ``function(*arguments)``, such as the first parameters, sharded from birth.

        The result has the shardings of the argument that it is, or of successive arguments if it is
        a tuple of them: ``params, moments = plan.init(init, mesh, key)``.  No device holds more
        than its part.  Random values do not depend on the shardings
        (``jax_threefry_partitionable``).

        ``mesh`` is as for :meth:`jit`; ``argument`` is the position or the name of the argument; by
        default, it is the first one with the result's pytree, shapes and dtypes.  Raises
        :class:`toast.errors.PlanError` if there is none, or if there are too few devices.
        """
        return apply.initial(
            self.analysis.program, self.shardings, function, arguments, devices=mesh,
            argument=argument,
        )  # fmt: skip

    def types_for(self, mesh: Any = None) -> Any:
        """The types of the arguments with their shardings: what a checkpoint is restored to.

        The result has the structure of :attr:`in_shardings`, with a ``jax.ShapeDtypeStruct`` for
        each array: ``checkpointer.restore(path, plan.types_for(mesh)[0])`` with orbax.  ``mesh`` is
        as for :meth:`jit`.  Raises :class:`toast.errors.PlanError` as :meth:`shardings_for`.
        """
        return apply.argument_types(self.analysis.program, self.shardings, mesh)

    def place(self, state: Any, mesh: Any = None, *, argument: int | str | None = None) -> Any:
        """A state, such as a restored checkpoint, on the devices as the plan takes it.

        It is an argument, or a tuple of successive ones; ``argument`` is the position or the name
        of one, by default that with the same pytree.  ``mesh`` is as for :meth:`jit`.  Raises
        :class:`toast.errors.PlanError` for a state that does not fit: the message names the
        argument, the dimension and the sizes.
        """
        return apply.placed_state(
            self.analysis.program, self.shardings, state, devices=mesh, argument=argument
        )

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the program and its shardings: equal on hosts that run the same plan."""
        return apply.plan_digest(self.analysis.program, self.shardings)

    def jit(self, mesh: Any = None, *, lowering: Lowering | None = None) -> Runnable:
        """The sharded program as a function that XLA compiles and runs.

        With ``lowering="xla"``, XLA's partitioner inserts the collectives for the plan's
        annotations.  With ``"local"``, the program is :meth:`lowered`: its collectives are those
        that the plan predicts.  The default is that for which the plan was made.

        ``mesh`` is a ``jax.sharding.Mesh`` of the same sizes (axes of size 1 do not count), or a
        list of devices (default: the first of ``jax.devices()``).  Results are on that mesh, with
        its devices, axis names and axis types.  The result takes and returns the
        pytrees of the planned function; for a program from a file, it takes flat arguments and
        returns a list.  Raises :class:`toast.errors.PlanError` if there are too few devices.
        """
        plan = self._on(mesh)
        if self._lowering(lowering) == "local":
            options = {"analysis": plan.analysis, "factors": plan.factors}
            local: Runnable = plan.build("local", devices=mesh, **options)
            return local
        runnable: Runnable = plan.build("jax", devices=mesh)
        return runnable

    @late
    def lowered(self) -> LocalProgram:
        """The program of one device: StableHLO on local shapes, with every collective as an op.

        Its ``text`` is the module, its ``collectives`` are those of a step.  Raises
        :class:`toast.errors.PlanError` if the program is a fact base, or cannot be lowered.
        """
        raise NotImplementedError

    def _on(self, devices: Any) -> Plan:
        """The plan for the form of the program that JAX lowers for the platform of devices."""
        program = self.analysis.program
        if program.platform and program.platform != apply.platform_of(devices):
            return self.here()
        return self

    @late
    def here(self) -> Plan:
        """The plan, applied to the form of the program that JAX lowers for this machine.

        This is the plan itself unless the program is lowered for the hardware, and has other ops
        there.  Prices are those of the other form on the same hardware.  Raises
        :class:`toast.errors.PlanError` if nothing of the plan matches.
        """
        raise NotImplementedError

    def build(self, backend: str, **options: Any) -> Any:
        """Build the plan with a registered backend.

        ``"jax"`` is :meth:`jit`, ``"stablehlo"`` is :meth:`annotated`; ``options`` are those of the
        backend.  Raises :class:`toast.errors.PlanError` for an unknown backend.  :mod:`toast.ports`
        describes how to register one.
        """
        return ports.backend(backend).build(self.analysis.program, self.shardings, **options)

    def annotated(self) -> str:
        """The program as StableHLO text, with the plan as Shardy annotations.

        Raises :class:`toast.errors.PlanError` if XLA must not partition the plan
        (:attr:`lowering`).
        """
        self._lowering("xla")
        return str(self.build("stablehlo"))

    def _lowering(self, lowering: Lowering | None) -> Lowering:
        """What shall partition the program, by default that of the plan."""
        chosen = lowering_of(self.lowering if lowering is None else lowering)
        if chosen == "xla" and self.lowering == "local":
            raise PlanError(
                "the plan is for device-local programs, and XLA may compute wrong results with its "
                'shardings; use lowering="local", or make a plan without it'
            )
        return chosen

    def verify(self, *, seed: int = 0, lowering: Lowering | None = None) -> Verification:
        """Run the program sharded and unsharded on random inputs and compare the outputs.

        ``seed`` is that of the inputs, ``lowering`` as for :meth:`jit`.  Raises
        :class:`toast.errors.PlanError` if there are too few devices.
        """
        plan = self._on(None)
        program, shardings = plan.analysis.program, plan.shardings
        if self._lowering(lowering) == "xla":
            return apply.verify(program, shardings, seed=seed)
        local = plan.lowered()
        return apply.verify(program, shardings, seed=seed, module_of=lambda *_: local.module)

    # -- explanations ------------------------------------------------------------------------

    @late
    def explain_argument(self, name: str) -> ArgumentExplanation:
        """Explain the sharding of an argument: the step that gave it each axis, with its effect.

        The explanation also states why other axes do not shard its dimensions.  ``name`` is a path,
        or a pattern of paths of arguments with equal shardings.  Raises
        :class:`toast.errors.PlanError` if no argument matches, or if the matching arguments differ.
        """
        raise NotImplementedError

    @late
    def explain_collectives(self) -> tuple[CollectiveExplanation, ...]:
        """Explain every collective of a step, by decreasing time.

        The ``total_seconds`` of all collectives of a kind sum to the prediction for the kind.
        """
        raise NotImplementedError

    @late
    def explain_collective(self, number: int) -> CollectiveExplanation:
        """Explain a collective: the value that moves, the ops, and the steps that cause it.

        ``number`` is its position in :meth:`explain_collectives`, from 1.  Raises
        :class:`toast.errors.PlanError` if there is no collective with this number.
        """
        raise NotImplementedError

    @late
    def explain_annotations(self) -> tuple[AnnotationExplanation, ...]:
        """Explain every annotation of the program: its sharding, and the collectives it causes."""
        raise NotImplementedError

    @late
    def why_not(
        self, argument: str, spec: Any, *, search: bool = True, budget: float | None = 10.0
    ) -> WhyNot:
        """Compare another sharding of an argument with the plan, or state why it is impossible.

        The sharding is pinned twice: with the rest of the plan unchanged and, with ``search``, as
        the start of a search of at most ``budget`` seconds (None: without a limit).  ``argument``
        is a path or a pattern of paths, ``spec`` a ``PartitionSpec`` or its text.  Raises
        :class:`toast.errors.PlanError` if no argument matches, and :class:`toast.errors.PinError`
        if ``spec`` is not a sharding of it on the axes of the mesh.
        """
        raise NotImplementedError

    # -- files -------------------------------------------------------------------------------

    @late
    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON; ``docs/plan.schema.json`` is the schema."""
        raise NotImplementedError

    @late
    def at_peak(self) -> pd.DataFrame:
        """A DataFrame of the live values at the peak of memory, by decreasing size.

        Columns: ``bytes`` per device, ``value`` (its op, with the source line), ``what`` (the kind:
        the value, a resharded copy ...), and ``from`` and ``to`` (the source lines between which it
        is live, or ``end of the step``).
        """
        raise NotImplementedError

    @late
    def memory_data(self) -> dict[str, Any]:
        """The timeline as plain data: live bytes after the last change before each op."""
        raise NotImplementedError

    @late
    def trace(self) -> dict[str, Any]:
        """The schedule of a step in Chrome's trace format, as plain data for JSON.

        Perfetto (ui.perfetto.dev) and ``chrome://tracing`` show it: a track for matrix products,
        one for memory traffic and one for the collectives over each set of mesh axes, in
        microseconds, and the live bytes of a device.
        """
        raise NotImplementedError

    def to_json(self, path: str | pathlib.Path) -> None:
        """Write :meth:`to_dict` as JSON to the file ``path``.

        Raises :class:`toast.errors.PlanError` if the file cannot be written; no partial file
        remains.
        """
        if not isinstance(path, str | pathlib.Path):
            raise PlanError(f"path {path!r}: use the path of a file")
        write_all({path: self.json_text()}, PlanError)

    def json_text(self) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


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
class Alternative:
    """A plan with another sharding, and its differences from the original plan."""

    #: The alternative.
    plan: Plan = dataclasses.field(repr=False)
    #: The predictions that differ: first the original plan's, then the alternative's.
    numbers: tuple[NumberChange, ...]
    #: Collectives that the alternative has in excess of the plan.
    appear: tuple[CollectiveCount, ...]
    #: Collectives that the plan has in excess of the alternative.
    vanish: tuple[CollectiveCount, ...]
    #: Arguments with different shardings: path, original sharding, alternative sharding.
    arguments: tuple[tuple[str, str, str], ...]

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
            for field in dataclasses.fields(self) if field.name != "plan"
        }  # fmt: skip
        rows = {name: [_plain(row) for row in rows] for name, rows in data.items()}
        after = dataclasses.asdict(self.plan.after)
        return {**rows, "after": after, "fits": self.fits, "cost": self.plan.cost}


@dataclasses.dataclass(frozen=True)
class WhyNot(Record):
    """The effect of another sharding of an argument."""

    #: The argument, or the pattern of arguments, that was asked about.
    argument: str
    #: The sharding that was asked about, as text.
    spec: str
    #: The shardings of the arguments in the plan.
    now: tuple[str, ...]
    #: Why the sharding is impossible; empty if it is possible.
    impossible: str = ""
    #: The alternative with the sharding pinned and the rest of the plan unchanged.
    pinned: Alternative | None = None
    #: The best alternative of a search that starts there.
    searched: Alternative | None = None
    #: The cost of the plan, and whether it fits.
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
    def best(self) -> Alternative | None:
        """The cheapest alternative, preferably one that fits; None if it is impossible."""
        sides = [side for side in (self.pinned, self.searched) if side is not None]
        return min(sides, key=lambda side: (not side.fits, side.plan.cost), default=None)

    @property
    def better(self) -> bool:
        """Whether the best alternative costs less than the plan, and fits if the plan does."""
        best = self.best
        if best is None or best.fits < self.plan_fits:
            return False
        return best.fits > self.plan_fits or best.plan.cost * (1 + 1e-9) < self.plan_cost

    def accept(self) -> Plan:
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
