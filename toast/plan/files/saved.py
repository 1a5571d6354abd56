"""Records of the contents of plan files."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

from toast.analysis import Lowering
from toast.hardware import Mesh
from toast.plan.origin import Origin
from toast.plan.prediction import Prediction
from toast.program import PaddedDimension, Program, Spec, TracedMemory
from toast.search import Round
from toast.space import Constraints
from toast.units import time_text

#: Version of the JSON format; older versions from 1 on can be read.
VERSION = 2

#: Mesh axes with the labels of the factors that hold them; other axes are absent.
Held = tuple[tuple[str, str], ...]


class OpKey(NamedTuple):
    """The key of an op in a plan file."""

    kind: str
    path: str
    file: str
    line: int
    function: str
    #: The name of its value by ``checkpoint_name`` or a fact base.
    label: str

    @property
    def place(self) -> OpKey:
        """The key without the folder of the file."""
        return self._replace(file=pathlib.PurePath(self.file).name)

    @property
    def loose(self) -> OpKey:
        """The key without file and line, for programs whose lines have moved."""
        return self._replace(file="", line=0)

    @property
    def looser(self) -> OpKey:
        """The key without function names, for programs with renamed functions."""
        outer, slash, inner = self.path.partition("/")
        return self.loose._replace(path=inner if slash else outer, function="")


@dataclasses.dataclass(frozen=True)
class SavedArgument:
    """An argument with its sharding; shape and element type are unknown in version 1."""

    #: The sharding: the mesh axes of each dimension.
    spec: Spec
    #: The shape; ``None`` if unknown.
    shape: tuple[int, ...] | None
    #: The element type, such as ``f32``; empty if unknown.
    dtype: str


class SavedPart(NamedTuple):
    """An op class of a refinement, and the factor that gets the axis (empty: none)."""

    #: What ops of the class have in common.
    key: OpKey
    #: The number of the class among those with this key, and how many there are.
    place: int
    #: The number of classes with this key.
    of: int
    #: The factor that gets the axis; empty if none does.
    factor: str
    #: Class and factor by number, for the program of the file.
    numbers: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SavedAction:
    """An action; the axis is empty for pins."""

    #: The dimensions of arguments that it shards, with ``*`` for list positions.
    dimensions: tuple[str, ...]
    #: The factors that it shards, if it shards no dimension of an argument.
    factors: tuple[str, ...]
    #: The mesh axis; empty for pins.
    axis: str
    #: The resolution of conflicts: one bit per resolution group.
    resolution: tuple[int, ...]
    #: The number of its color, for the program of the file; -1 if unknown.
    color: int
    #: For a refinement, the op classes that it changes.
    part: tuple[SavedPart, ...]
    #: Whether the user fixed it.
    fixed: bool
    #: What it saves and adds, in words.
    reason: str
    #: The prediction after it.
    after: Prediction

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that identify it."""
        return self.dimensions or self.factors


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive ops, among those with one key, with equal shardings."""

    #: The number of ops.
    count: int
    #: The mesh axes of each factor.
    held: Held
    #: The shardings of their results, as PartitionSpec texts.
    specs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Saved:
    """The contents of a plan file."""

    #: The name in messages: the path, or the program's name.
    name: str
    #: The name of the program.
    program: str
    #: Hash of the program without padding; empty in version 1.
    digest: str
    #: The TARGET and options of the command line, if any.
    origin: Origin | None
    #: The method: ``toast`` or a baseline.
    method: str
    #: Notes, one per line.
    note: str
    #: The mesh.
    mesh: Mesh
    #: The name of the hardware.
    hardware: str
    #: Hash of the hardware's figures.
    hardware_digest: str
    #: The limit per device, in bytes.
    memory_bytes: float
    #: The odds with which the plan had to fit; ``None`` if its predicted peak had to.
    safety: float | None
    #: How the prices let collectives overlap with products.
    overlap: str
    #: How the search resolved conflicts.
    resolution: str
    #: What partitions the program: XLA, or :mod:`toast.lower`.
    lowering: Lowering
    #: What the plan pads in the program.
    padding: tuple[PaddedDimension, ...]
    #: The constraints of the user.
    constraints: Constraints
    #: Whether every op is its own class.
    single: bool
    #: The arguments by path.
    arguments: dict[str, SavedArgument]
    #: The shardings of the results by path.
    results: dict[str, Spec]
    #: The pins and actions, in order.
    actions: tuple[SavedAction, ...]
    #: Whether the actions alone lead to the shardings; AutoMap's also need propagation.
    replayed: bool
    #: The shardings of values, by the keys of the ops that define them.
    ops: dict[OpKey, tuple[Run, ...]]
    #: The cost that the search minimised (4.5).
    cost: float
    #: The seed of the search.
    seed: int
    #: The prediction of the unsharded program.
    before: Prediction
    #: The prediction of the plan.
    after: Prediction
    #: By kind, axes and algorithm.
    collectives: tuple[dict[str, Any], ...]
    #: The number of states that the search priced, and its rounds.
    states: int = 0
    #: The progress of the search after each round.
    rounds: tuple[Round, ...] = ()
    #: The memory policy and the microbatches of its program; ``None`` if none were asked for.
    memory: TracedMemory | None = None
    #: As in :attr:`Plan.policies_bound_seconds`.
    policies_bound_seconds: float | None = None
    #: The path of the file, if any.
    path: pathlib.Path | None = None

    def is_of(self, program: Program) -> bool:
        """Whether the plan is for a program, with the same padding."""
        return self.digest == program.origin_digest and self.padding == program.padding

    def __repr__(self) -> str:
        return (
            f"<Saved {self.name}: plan for {self.program} on mesh {self.mesh} of {self.hardware}, "
            f"step {time_text(self.after.step_seconds)}>"
        )
