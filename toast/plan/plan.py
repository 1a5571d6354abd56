"""Records of plans."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toast.analysis import Analysis
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
from toast.plan.jax_policy import jax_policy
from toast.plan.maxtext_policy import maxtext_policy
from toast.plan.origin import Origin
from toast.plan.prediction import Prediction, fit_text, odds_text
from toast.plan.reasons import (
    AnnotationExplanation,
    ArgumentExplanation,
    CollectiveExplanation,
)
from toast.plan.runnable_plan import RunnablePlan
from toast.plan.step_reshards import StepReshard, step_reshards
from toast.plan.why_not import WhyNot
from toast.program import MemoryPolicy, PaddedDimension, Shardings, Spec
from toast.records import late
from toast.search import MeshResult, Round
from toast.space import Action, Constraints, Resolving, States
from toast.units import size_text, time_text

if TYPE_CHECKING:
    import pandas as pd

    from toast.plan.survey_prices import PolicyPrices
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
class Plan(RunnablePlan):
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
    #: (:mod:`toast.plan.policy_bound`), infinite if none fits; ``None`` for plans of a policy that
    #: was stated, of several meshes, or with padding.
    policies_bound_seconds: float | None = None
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

    def jax_policy(self, block: str = "") -> Callable[..., Any]:
        """The memory policy of a block for ``jax.checkpoint(layer, policy=...)``.

        So a program without TOAST computes again what the plan does.  JAX's policies tell values by
        the names that ``jax.ad_checkpoint.checkpoint_name`` gives them, and products of matrices.
        They say nothing about gathers: what is ``gathered`` in the plan's policy is gathered again,
        unless ``prevent_cse`` of ``jax.checkpoint`` is false for these arguments.

        :param block: the name of the block, if several decide differently.
        :raises toast.errors.PlanError: if the plan has no policy or no blocks, if its layers decide
            differently, if no block has the name, or if values are kept or offloaded that have none
            in the program.

        >>> import jax, jax.numpy as jnp, toast
        >>> def layer(x, w):
        ...     return jnp.sin(x @ w)
        >>> block = toast.checkpoint(layer)
        >>> f32 = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> plan = toast.plan(jax.grad(lambda w, x: block(x, w).sum()), f32, f32,
        ...                   mesh="data=4", hardware="tpu-v5e", remat="minimal")
        >>> again = jax.checkpoint(layer, policy=plan.jax_policy())
        """
        return jax_policy(self.analysis.program.memory, block)

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

    @functools.cached_property
    @late
    def policy_prices(self) -> PolicyPrices:
        """The prices of the plan's shardings under other memory policies, if it is of a survey."""
        raise NotImplementedError

    def query(
        self, body: str | pathlib.Path, *, rules: Sequence[str | pathlib.Path] = ()
    ) -> pd.DataFrame:
        """Evaluate a query over the relations of the analysis, of the mesh and of the plan.

        Parameters, result and errors are those of :meth:`Analysis.query`.
        """
        return evaluate(prepare(body, rules), self.vocabulary, self.analysis.label)

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
    ) -> WhyNot[Plan]:
        """Compare another sharding of an argument with the plan, or state why it is impossible.

        The sharding is pinned twice: with the rest of the plan unchanged and, with ``search``, as
        the start of a search of at most ``budget`` seconds (None: without a limit).  ``argument``
        is a path or a pattern of paths, ``spec`` a ``PartitionSpec`` or its text.
        :func:`toast.why_not` compares other memory policies and numbers of microbatches.  Raises
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

        Gaps of the heap are not among them; those that are in fast memory are.

        Columns: ``bytes`` per device, ``value`` (its op, with the source line), ``what`` (the kind:
        the value, a resharded copy ...), and ``from`` and ``to`` (the source lines between which it
        is live, or ``start of the step`` and ``end of the step``).
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
