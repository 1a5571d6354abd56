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

    spec: Spec
    shape: tuple[int, ...] | None
    dtype: str


class SavedPart(NamedTuple):
    """An op class of a refinement, and the factor that gets the axis (empty: none)."""

    key: OpKey
    #: The number of the class among those with this key, and how many there are.
    place: int
    of: int
    factor: str
    #: Class and factor by number, for the program of the file.
    numbers: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SavedAction:
    """An action; the axis is empty for pins."""

    dimensions: tuple[str, ...]
    #: The factors that it shards, if it shards no dimension of an argument.
    factors: tuple[str, ...]
    axis: str
    resolution: tuple[int, ...]
    #: The number of its color, for the program of the file; -1 if unknown.
    color: int
    part: tuple[SavedPart, ...]
    fixed: bool
    reason: str
    after: Prediction

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that identify it."""
        return self.dimensions or self.factors


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive ops, among those with one key, with equal shardings."""

    count: int
    held: Held
    #: The shardings of their results, as PartitionSpec texts.
    specs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Saved:
    """The contents of a plan file."""

    #: The name in messages: the path, or the program's name.
    name: str
    program: str
    #: Hash of the program without padding; empty in version 1.
    digest: str
    origin: Origin | None
    method: str
    note: str
    mesh: Mesh
    hardware: str
    hardware_digest: str
    memory_bytes: float
    safety: float | None
    overlap: str
    resolution: str
    lowering: Lowering
    #: What the plan pads in the program.
    padding: tuple[PaddedDimension, ...]
    constraints: Constraints
    #: Whether every op is its own class.
    single: bool
    arguments: dict[str, SavedArgument]
    results: dict[str, Spec]
    actions: tuple[SavedAction, ...]
    #: Whether the actions alone lead to the shardings; AutoMap's also need propagation.
    replayed: bool
    ops: dict[OpKey, tuple[Run, ...]]
    cost: float
    seed: int
    before: Prediction
    after: Prediction
    #: By kind, axes and algorithm.
    collectives: tuple[dict[str, Any], ...]
    #: The number of states that the search priced, and its rounds.
    states: int = 0
    rounds: tuple[Round, ...] = ()
    #: The memory policy and the microbatches of its program; ``None`` if none were asked for.
    memory: TracedMemory | None = None
    #: As in :attr:`Plan.policies_bound_seconds`.
    policies_bound_seconds: float = 0.0
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
