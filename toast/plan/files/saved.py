"""What a plan's file says, as Python has it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

from toast.hardware import Mesh
from toast.plan.origin import Origin
from toast.plan.prediction import Prediction
from toast.program import Spec
from toast.space import Constraints
from toast.units import time_text

#: Version of the JSON that plans are written as; older ones down to 1 are read.
VERSION = 2

#: Mesh axes, each with the label of the factor that holds it; axes without one are absent.
Held = tuple[tuple[str, str], ...]


class OpKey(NamedTuple):
    """What an op is known by in a file."""

    kind: str
    path: str
    file: str
    line: int
    function: str
    #: What ``checkpoint_name``, or a fact base, calls its value.
    label: str

    @property
    def place(self) -> OpKey:
        """The key where files have no folders."""
        return self._replace(file=pathlib.PurePath(self.file).name)

    @property
    def loose(self) -> OpKey:
        """What is left of the key when lines have moved."""
        return self._replace(file="", line=0)

    @property
    def looser(self) -> OpKey:
        """What is left when functions have other names, that which is partitioned too."""
        outer, slash, inner = self.path.partition("/")
        return self.loose._replace(path=inner if slash else outer, function="")


@dataclasses.dataclass(frozen=True)
class SavedArgument:
    """An argument with its sharding; shape and element type are unknown in version 1."""

    spec: Spec
    shape: tuple[int, ...] | None
    dtype: str


class SavedPart(NamedTuple):
    """An op class of a refinement: its ops, and the factor that takes the axis, or none."""

    key: OpKey
    #: Which of the classes with this key it is, and how many there are.
    place: int
    of: int
    factor: str
    #: In the file's own program: class and factor by number.
    numbers: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SavedAction:
    """An action; the axis is empty for pins."""

    dimensions: tuple[str, ...]
    #: Where it shards no dimension of an argument, the factors that it shards.
    factors: tuple[str, ...]
    axis: str
    resolution: tuple[int, ...]
    #: Its color by number, of use for the same program only; -1 where the file does not say.
    color: int
    part: tuple[SavedPart, ...]
    fixed: bool
    reason: str
    after: Prediction

    @property
    def labels(self) -> tuple[str, ...]:
        """What it is known by."""
        return self.dimensions or self.factors


@dataclasses.dataclass(frozen=True)
class Run:
    """Ops in a row, of those with one key, that are sharded alike."""

    count: int
    held: Held
    #: The shardings of their results, as JAX writes them.
    specs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a plan's file says."""

    #: How messages call it: the path, or the program's name.
    name: str
    program: str
    #: Hash of the program; empty in version 1.
    digest: str
    origin: Origin | None
    method: str
    note: str
    mesh: Mesh
    hardware: str
    hardware_digest: str
    memory_bytes: float
    overlap: str
    resolution: str
    constraints: Constraints
    #: Whether every op was a class of its own.
    single: bool
    arguments: dict[str, SavedArgument]
    results: dict[str, Spec]
    actions: tuple[SavedAction, ...]
    #: Whether they lead to the shardings; AutoMap's do not, without Shardy's propagation.
    replayed: bool
    ops: dict[OpKey, tuple[Run, ...]]
    cost: float
    seed: int
    before: Prediction
    after: Prediction
    #: By kind, axes and algorithm.
    collectives: tuple[dict[str, Any], ...]
    #: The file that it was read from, if any.
    path: pathlib.Path | None = None

    def __repr__(self) -> str:
        return (
            f"<Saved {self.name}: plan for {self.program} on mesh {self.mesh} of {self.hardware}, "
            f"step {time_text(self.after.step_seconds)}>"
        )
