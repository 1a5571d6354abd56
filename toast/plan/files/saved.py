"""What a plan's file says, as Python has it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from toast.apply import Spec
from toast.hardware import Mesh
from toast.plan.prediction import Prediction
from toast.resources import directory
from toast.space import Constraints
from toast.units import time_text

#: Version of the JSON that plans are written as; older ones down to 1 are read.
VERSION = 2

#: Mesh axes, each with the label of the factor that holds it; axes without one are absent.
Held = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a plan was made from on the command line, so that it can be found again."""

    target: str
    #: Options that changed a model's size, by name.
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: Example arguments of a function: ``f32[8,4]``.
    shapes: tuple[str, ...] = ()
    #: Further rule files.
    rules: tuple[str, ...] = ()
    #: A name, or the path of a hardware file.
    hardware: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """TARGET and the options that say how to read it, as on the command line."""
        options = [(name, str(size)) for name, size in self.sizes.items()]
        options += [("arg", shape) for shape in self.shapes]
        options += [("rules", path) for path in self.rules]
        return (self.target, *(word for name, value in options for word in (f"--{name}", value)))


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


class Part(NamedTuple):
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
    part: tuple[Part, ...]
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

    def __repr__(self) -> str:
        return (
            f"<Saved {self.name}: plan for {self.program} on mesh {self.mesh} of {self.hardware}, "
            f"step {time_text(self.after.step_seconds)}>"
        )


def schema() -> dict[str, Any]:
    """The JSON Schema of plans: ``docs/plan.schema.json`` of this installation."""
    text = (directory("docs") / "plan.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
