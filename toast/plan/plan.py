"""The plan: what the search found, why, what it costs, and how to run it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toast import apply, lazy
from toast.analysis import Analysis
from toast.analysis.query import evaluate, prepare
from toast.analysis.vocabulary import Relations
from toast.apply import Shardings, Spec
from toast.cost import Breakdown, CostModel, Timeline, Transfer, break_down
from toast.errors import PlanError
from toast.files import write_all
from toast.frontend import element_bytes
from toast.hardware import Hardware, Mesh
from toast.plan import alternatives, explain, relations
from toast.plan.alternatives import WhyNot
from toast.plan.explain import ArgumentExplanation, CollectiveExplanation
from toast.plan.files import Origin, plan_data
from toast.plan.labels import describe_value, dimension_labels, folded, place_of, spec_text
from toast.plan.notebook import plan_html
from toast.plan.prediction import Prediction, reason_of
from toast.plan.shard import shardings_of
from toast.search import Found, Round, Tried
from toast.space import Action, Constraints, Resolving, States
from toast.units import size_text, time_text

if TYPE_CHECKING:
    import pandas as pd

    from toast.apply import Verification
else:
    pd = lazy.module("pandas")


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
class Plan:
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
    meshes: tuple[Tried, ...] = dataclasses.field(default=(), repr=False)
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

    def argument_table(self) -> tuple[ArgumentRow, ...]:
        """Arguments by group and sharding, those with most bytes on the device first."""
        program, analysis = self.analysis.program, self.analysis
        rows: dict[Any, list[str]] = {}
        for index, (name, spec) in enumerate(self.arguments.items()):
            type_ = program.values[program.argument_values[index]].type
            rows.setdefault((int(analysis.argument_group[index]), type_, spec), []).append(name)
        sizes = dict(self.mesh.axes)
        table = []
        for (_, type_, spec), names in rows.items():
            shards = int(np.prod([sizes[a] for axes in spec for a in axes], dtype=np.int64))
            size = int(np.prod(type_.shape, dtype=np.int64)) * element_bytes(type_.dtype)
            patterns = tuple(dict.fromkeys(map(folded, names))) if len(names) > 1 else (names[0],)
            table.append(
                ArgumentRow(
                    patterns, len(names), type_.shape, type_.dtype, spec,
                    size // shards * len(names),
                )
            )  # fmt: skip
        return tuple(sorted(table, key=lambda row: -row.device_bytes))

    def argument_frame(self) -> pd.DataFrame:
        """``argument, shape, dtype, spec``: one row per argument."""
        program = self.analysis.program
        types = [program.values[v].type for v in program.argument_values]
        return pd.DataFrame(
            {
                "argument": list(self.arguments),
                "shape": [t.shape for t in types],
                "dtype": [t.dtype for t in types],
                "spec": [spec_text(spec) for spec in self.arguments.values()],
            }
        )

    # -- queries -----------------------------------------------------------------------------

    @functools.cached_property
    def vocabulary(self) -> Relations:
        """What queries are given."""
        return relations.relations(self)

    def query(
        self, body: str | pathlib.Path, *, rules: Sequence[str | pathlib.Path] = ()
    ) -> pd.DataFrame:
        """:meth:`Analysis.query`, with the relations of the mesh and of the plan as well."""
        return evaluate(prepare(body, rules), self.vocabulary, self.analysis.label)

    def _repr_html_(self) -> str:
        """How notebooks show it."""
        return plan_html(self)

    # -- running -----------------------------------------------------------------------------

    @property
    def in_shardings(self) -> Any:
        """PartitionSpecs in the structure of the arguments, as ``jax.jit(in_shardings=...)`` takes.

        ``jax.jit`` with these alone leaves intermediate values to XLA; :meth:`jit` does not.  With
        keyword arguments it is the pair of positional and keyword shardings.
        """
        return apply.in_shardings(self.analysis.program, self.shardings)

    @property
    def out_shardings(self) -> Any:
        """PartitionSpecs in the structure of the result, for ``jax.jit(out_shardings=...)``."""
        return apply.out_shardings(self.analysis.program, self.shardings)

    def jit(self, mesh: Any = None) -> Callable[..., Any]:
        """The sharded program as a function that XLA compiles and runs.

        ``mesh`` is a ``jax.sharding.Mesh`` of the plan's shape, whose order of devices is kept, or
        a list of as many devices (default: the first of ``jax.devices()``).  The function takes and
        returns the pytrees of the one that was planned; for a program from a file, flat arguments
        and a list.  Raises :class:`toast.errors.PlanError` when there are too few devices.
        """
        runnable: Callable[..., Any] = apply.callable_of(
            self.analysis.program, self.shardings, devices=mesh
        )
        return runnable

    def annotated(self) -> str:
        """StableHLO text with the plan as Shardy annotations."""
        module = apply.annotate(self.analysis.program, self.shardings)
        return str(module.operation.get_asm(enable_debug_info=True))

    def verify(self, *, seed: int = 0) -> Verification:
        """Run the program sharded and unsharded on small random inputs and compare outputs."""
        return apply.verify(self.analysis.program, self.shardings, seed=seed)

    # -- explanations ------------------------------------------------------------------------

    def explain_argument(self, name: str) -> ArgumentExplanation:
        """Why an argument is sharded as it is: which step gave it each axis, with its effect.

        And what keeps other axes off each of its dimensions.  ``name`` may be a pattern of paths,
        of arguments that are sharded alike.  Raises :class:`toast.errors.PlanError` for an argument
        that does not exist, and a pattern of arguments that differ.
        """
        return explain.explain_argument(self, name)

    def explain_collectives(self) -> tuple[CollectiveExplanation, ...]:
        """Every collective of a step with its cause, those that take most time first.

        ``total_seconds`` of all of a kind sum to what is predicted for it.
        """
        return explain.explain_collectives(self)

    def explain_collective(self, number: int) -> CollectiveExplanation:
        """Why a collective is there: the value that moves, between which ops, by which steps.

        ``number`` is its place in :meth:`explain_collectives`, from 1.  Raises
        :class:`toast.errors.PlanError` for a number that there is not.
        """
        return explain.explain_collective(self, number)

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
        return alternatives.why_not(self, argument, spec, search=search, budget=budget)

    # -- files -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON: ``docs/plan.schema.json`` says what it looks like."""
        return plan_data(self)

    def at_peak(self) -> pd.DataFrame:
        """What is alive where a device needs most memory, the largest first.

        Columns: ``bytes`` per device, ``value`` (the op that makes it, with its source line),
        ``what`` of it (the value, a resharded copy ...), and the source lines where it begins and
        ends, or ``end of the step``.
        """
        program = self.analysis.program
        return pd.DataFrame([
            {
                "bytes": buffer.bytes,
                "value": describe_value(program, buffer.value),
                "what": buffer.what,
                "from": place_of(program, buffer.start),
                "to": place_of(program, buffer.end),
            }
            for buffer in self.timeline.at_peak
        ], columns=["bytes", "value", "what", "from", "to"])  # fmt: skip

    def memory_data(self) -> dict[str, Any]:
        """The timeline as plain data: bytes after the last change before each op."""
        line, program = self.timeline, self.analysis.program
        last = np.flatnonzero(np.diff(line.op, append=len(program.ops) + 1))
        return {
            "argument_bytes": line.argument_bytes,
            "peak_bytes": line.peak_bytes,
            "peak_at": place_of(program, line.peak_op),
            "at_peak": self.at_peak().head(50).to_dict("records"),
            "op": line.op[last].tolist(),
            "live_bytes": line.live_bytes[last].tolist(),
        }

    def to_json(self, path: str | pathlib.Path) -> None:
        """Write :meth:`to_dict` to ``path``, whole or not at all."""
        write_all({path: self.json_text()}, PlanError)

    def json_text(self) -> str:
        """:meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def make_plan(
    model: CostModel,
    found: Found,
    *,
    memory_bytes: float,
    seed: int,
    seconds: dict[str, float],
    method: str = "toast",
    note: str = "",
    meshes: tuple[Tried, ...] = (),
    resolution: Resolving = "compatible",
) -> Plan:
    """The plan for a search's result, every action replayed for its effect.

    A state that was found without actions, by a baseline, has no steps.
    """
    space = model.space
    states = [space.unsharded]
    pinned = (space.pinned != space.unsharded).any()
    if pinned:
        states.append(space.pinned)
    actions = (*space.begun, *found.actions)
    for action in actions:
        states.append(space.apply(states[-1], action))
    if (states[-1] != found.state).any():
        states.append(found.state)  # a baseline's, that no actions lead to
    prices = model.price(np.stack(states))
    predictions = [Prediction.of(prices, i) for i in range(len(states))]
    reasons = [
        reason_of(before, after, memory_bytes) for before, after in itertools.pairwise(predictions)
    ]
    own = ("the program's own shardings",) if space.constraints.keep else ()
    pins = [
        Step((*space.constraints.pin, *own), "", (), after, f"pinned: {reason}")
        for after, reason in zip(predictions[1 : 1 + pinned], reasons, strict=False)
    ]
    steps = tuple(pins) + tuple(
        Step(
            dimensions=dimension_labels(space, action),
            axis=space.mesh.names[action.axis],
            resolution=action.resolution,
            after=after,
            reason=f"fixed: {reason}" if i < len(space.begun) else reason,
            part=action.part,
        )
        for i, (action, after, reason) in enumerate(
            zip(actions, predictions[1 + pinned :], reasons[int(pinned) :], strict=False)
        )
    )
    return Plan(
        analysis=space.analysis,
        mesh=space.mesh,
        hardware=model.hardware,
        memory_bytes=memory_bytes,
        shardings=shardings_of(model, found.state),
        steps=steps,
        before=predictions[0],
        after=predictions[-1],
        cost=found.cost,
        states=found.states,
        rounds=found.rounds,
        seed=seed,
        transfers=tuple(model.transfers(found.state)),
        seconds=seconds,
        method=method,
        note=note,
        meshes=meshes,
        bound_seconds=model.lower_bound(),
        model=model,
        state=found.state,
        actions=actions,
        resolution=resolution,
    )
