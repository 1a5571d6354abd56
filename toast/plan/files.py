"""Plans as files: versioned JSON, keyed by what survives edits of the model.

Arguments and results are keyed by their paths, all other values by the op that makes them: its
kind, the path of JAX primitives and the source line that it comes from, and its place among the ops
that share these.  What an op computes in is said by the labels of its factors, never by numbers.
``docs/plan.schema.json`` says what the JSON looks like.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from toast.apply import Spec
from toast.errors import PlanError, ToastError
from toast.frontend import Program
from toast.hardware import Hardware, Mesh
from toast.plan.labels import action_labels, spec_text
from toast.plan.prediction import Collective, Prediction
from toast.resources import directory
from toast.space import Constraints, Space
from toast.space.constraints import parse_spec

if TYPE_CHECKING:
    from toast.analysis import Analysis
    from toast.plan.plan import Plan

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


def schema() -> dict[str, Any]:
    """The JSON Schema of plans: ``docs/plan.schema.json`` of this installation."""
    text = (directory("docs") / "plan.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


# -- writing ---------------------------------------------------------------------------------


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan as plain data, for JSON."""
    program = plan.analysis.program
    types = [program.values[v].type for v in program.argument_values]
    return {
        "version": VERSION,
        "program": program.name,
        "program_hash": program.digest,
        "origin": None if plan.origin is None else dataclasses.asdict(plan.origin),
        "method": plan.method,
        "note": plan.note,
        "mesh": dict(plan.mesh.axes),
        "device_order": list(plan.mesh.order or plan.mesh.names),
        "hardware": plan.hardware.name,
        "hardware_hash": hardware_digest(plan.hardware),
        "memory_bytes": plan.memory_bytes,
        "overlap": plan.model.overlap,
        "resolution": plan.resolution,
        "constraints": constraints_data(plan.constraints),
        "op_classes": "single" if _single(plan.model.space) else "alike",
        "fits": plan.fits,
        "cost": plan.cost,
        "seed": plan.seed,
        "arguments": {
            name: {
                "shape": list(type_.shape),
                "dtype": type_.dtype,
                "sharding": [list(axes) for axes in spec],
                "spec": spec_text(spec),
            }
            for type_, (name, spec) in zip(types, plan.arguments.items(), strict=True)
        },
        "results": {
            name: [list(axes) for axes in spec]
            for name, spec in zip(program.results, plan.shardings.results, strict=True)
        },
        "values": _values(plan),
        "reshards": len(plan.shardings.uses),
        "replayed": bool(plan.actions),
        "actions": _actions(plan),
        "collectives": [dataclasses.asdict(transfer) for transfer in plan.transfers],
        "memory": plan.memory_data(),
        "before": dataclasses.asdict(plan.before),
        "after": dataclasses.asdict(plan.after),
        "bound_seconds": plan.bound_seconds,
        "analysis": plan.analysis.counts(),
        "search": {
            "states": plan.states,
            "rounds": [dataclasses.asdict(r) for r in plan.rounds],
        },
        "meshes": [
            {**dataclasses.asdict(tried), "mesh": dict(tried.mesh.axes)} for tried in plan.meshes
        ],
        "seconds": plan.seconds,
    }


def _single(space: Space) -> bool:
    return len(space.classes.representative) == len(space.analysis.program.ops)


def hardware_digest(hardware: Hardware) -> str:
    """A hash of a device's figures."""
    return hashlib.sha256(repr(hardware).encode()).hexdigest()[:16]


def constraints_data(constraints: Constraints) -> dict[str, Any]:
    """The user's constraints as plain data; in a pin ``null`` is a dimension that is left open."""

    def entry(given: Any) -> Any:
        if type(given).__name__ == "UnconstrainedSingleton":
            return None
        return [] if given is None else _several(given)

    return {
        "pin": {
            pattern: [entry(e) for e in (parse_spec(spec) if isinstance(spec, str) else spec)]
            for pattern, spec in constraints.pin.items()
        },
        "forbid": {pattern: _several(axes) for pattern, axes in constraints.forbid.items()},
        "fix": {dimension: _several(axes) for dimension, axes in constraints.fix.items()},
        "keep": constraints.keep,
    }


def _several(axes: str | Iterable[str]) -> list[str]:
    return [axes] if isinstance(axes, str) else list(axes)


def _values(plan: Plan) -> list[dict[str, Any]]:
    """The ops by key, and how each is sharded."""
    program = plan.analysis.program
    labels = held_labels(plan.analysis, plan.mesh, plan.op_state)
    found = []
    for key, ops in keyed_ops(program).items():
        runs = [
            (held, specs, len(list(same)))
            for (held, specs), same in itertools.groupby(
                ops, lambda op: (labels[op], tuple(map(plan.value_spec, program.ops[op].results)))
            )
        ]
        found.append({
            **key._asdict(),
            "shardings": [
                {"count": count, "axes": dict(held), "specs": [spec_text(s) for s in specs]}
                for held, specs, count in runs
            ],
        })  # fmt: skip
    return found


def held_labels(analysis: Analysis, mesh: Mesh, op_state: np.ndarray[Any, Any]) -> list[Held]:
    """For each op the mesh axes that shard it, each with the label of the factor that holds it."""
    signature = analysis.names.signature.tolist()
    labels = [[factor.label for factor in rule.factors] for rule in analysis.rules]
    return [
        tuple((axis, labels[s][f]) for axis, f in zip(mesh.names, row, strict=True) if f >= 0)
        for s, row in zip(signature, op_state.tolist(), strict=True)
    ]


def key_of(program: Program, op: int) -> OpKey:
    """What an op is known by in a file."""
    at = program.location(op)
    named = [program.labels[v] for v in program.ops[op].results if v in program.labels]
    return OpKey(program.kind(op), at.path, at.file, at.line, at.function, ", ".join(named))


def keyed_ops(program: Program) -> dict[OpKey, list[int]]:
    """The ops between arguments and results, in program order, by key."""
    found: dict[OpKey, list[int]] = {}
    for op in range(len(program.arguments), len(program.ops) - len(program.results)):
        found.setdefault(key_of(program, op), []).append(op)
    return found


def class_places(space: Space) -> dict[int, tuple[OpKey, int, int]]:
    """For each op class its key, its place among the classes with that key, and their number."""
    program = space.analysis.program
    classes: dict[OpKey, list[int]] = {}
    for k, op in enumerate(space.classes.representative.tolist()):
        key = key_of(program, op)
        if op < len(program.arguments):
            key = key._replace(label=program.arguments[op])
        classes.setdefault(key, []).append(k)
    return {
        k: (key, place, len(alike)) for key, alike in classes.items()
        for place, k in enumerate(alike)
    }  # fmt: skip


def _actions(plan: Plan) -> list[dict[str, Any]]:
    space, analysis = plan.model.space, plan.analysis
    places = class_places(space) if any(step.part for step in plan.steps) else {}
    first = next((i for i, step in enumerate(plan.steps) if step.axis), 0)  # behind the pins

    def part(k: int, factor: int) -> dict[str, Any]:
        key, place, of = places[k]
        rule = analysis.rules[analysis.names.signature[space.classes.representative[k]]]
        label = rule.factors[factor].label if factor >= 0 else ""
        return {
            **key._asdict(), "place": place, "of": of, "factor": label, "numbers": [k, factor],
        }  # fmt: skip

    actions = dict(enumerate(plan.actions, first))
    return [
        {
            "dimensions": list(step.dimensions),
            "factors": list(action_labels(space, actions[number]))
            if number in actions and not step.dimensions else [],
            "axis": step.axis,
            "resolution": list(step.resolution),
            "part": [part(k, factor) for k, factor in step.part],
            "fixed": first <= number < first + len(space.begun),
            "reason": step.reason,
            "after": dataclasses.asdict(step.after),
        }
        for number, step in enumerate(plan.steps)
    ]  # fmt: skip


# -- reading ---------------------------------------------------------------------------------


def read(plan: Plan | Mapping[str, Any] | str | pathlib.Path) -> Saved:
    """A plan, its data or its JSON file, as a file says it.

    Raises :class:`toast.errors.PlanError` for a file that cannot be read, is no plan, or was
    written by a newer TOAST.
    """
    if isinstance(plan, str | pathlib.Path):
        name = str(plan)
        data = _loaded(plan)
    else:
        if not isinstance(plan, Mapping) and not hasattr(plan, "analysis"):
            raise PlanError(f"{plan!r} is no plan; give what --json wrote")
        data = plan if isinstance(plan, Mapping) else plan_data(plan)
        name = str(data.get("program", "the data"))
    if not isinstance(data, Mapping):
        raise _no_plan(name, f"{_kind(data)} in place of an object")
    if "version" not in data:
        raise _no_plan(name, "no key 'version'")
    version = data["version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _no_plan(name, f"version {version!r} is no positive whole number")
    if version > VERSION:
        raise PlanError(
            f"{name}: version {version} of plans was written by a newer TOAST, this one reads up "
            f"to {VERSION}; update toast-partitioner, or make the plan anew"
        )
    try:
        return _saved(name, data)
    except _Damage as damage:
        raise _no_plan(name, str(damage)) from None


def _no_plan(name: str, why: str) -> PlanError:
    return PlanError(f"{name} is no plan: {why}; give what --json wrote")


def _loaded(path: str | pathlib.Path) -> Any:
    """The JSON of a file, its texts without control characters: they are printed."""
    try:
        return _printable(json.loads(pathlib.Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _no_plan(str(path), f"no JSON at {where} ({error.msg})") from None
    except UnicodeDecodeError:
        raise _no_plan(str(path), "no UTF-8 text") from None
    except (ValueError, RecursionError):
        raise _no_plan(str(path), "no JSON that can be read") from None


#: What terminals take for commands.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _printable(data: Any) -> Any:
    """JSON data with control characters written out, as Python does."""
    if isinstance(data, str):
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", data)
    if isinstance(data, dict):
        return {_printable(key): _printable(value) for key, value in data.items()}
    return [*map(_printable, data)] if isinstance(data, list) else data


class _Damage(Exception):
    """What is wrong in a file; the text says where."""


_Read = TypeVar("_Read")


def _at(given: Any, key: str, make: Callable[[Any], _Read]) -> _Read:
    """What ``make`` makes of an entry; raises :class:`_Damage`, which names the keys to it."""
    if not isinstance(given, Mapping):
        raise _Damage(f"{_kind(given)} in place of an object with key '{key}'")
    if key not in given:
        raise _Damage(f"no key '{key}'")
    return _within(key, given[key], make)


def _within(key: str, value: Any, make: Callable[[Any], _Read]) -> _Read:
    try:
        return make(value)
    except _Damage as damage:
        inner = str(damage)
        raise _Damage(f"in '{key}', {inner.removeprefix('in ')}") from None
    except ToastError as error:
        raise _Damage(f"in '{key}', {str(error).partition(';')[0]}") from None
    except KeyError as error:
        raise _Damage(f"in '{key}', no key {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        shown = repr(value) if not isinstance(value, Mapping | list) else _kind(value)
        raise _Damage(f"in '{key}', {shown[:40]} is not what a plan has there") from None


def _kind(value: Any) -> str:
    """How messages call what JSON has."""
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list) else repr(value)[:40]


def _entries(given: Any, make: Callable[[Any], _Read]) -> tuple[_Read, ...]:
    """What ``make`` makes of the entries of a list."""
    if not isinstance(given, list | tuple):
        raise TypeError("no list")
    return tuple(_within(str(number), entry, make) for number, entry in enumerate(given))


def _named(given: Any, make: Callable[[Any], _Read]) -> dict[str, _Read]:
    """What ``make`` makes of the entries of an object."""
    return {str(key): _within(str(key), entry, make) for key, entry in given.items()}


def _amount(given: Any) -> float:
    """Seconds, bytes or a cost."""
    amount = float(given)
    if not 0 <= amount < math.inf:
        raise _Damage(f"{given!r} is no amount: it is negative or not finite")
    return amount


def _saved(name: str, data: Mapping[str, Any]) -> Saved:
    old = _at(data, "version", int) == 1

    def of(key: str, make: Callable[[Any], _Read]) -> _Read:
        return _at(data, key, make)

    def later(key: str, make: Callable[[Any], _Read], before: _Read) -> _Read:
        """What version 1 did not have."""
        return before if old else of(key, make)

    order = of("device_order", _texts)
    return Saved(
        name=name,
        program=of("program", str),
        digest=later("program_hash", str, ""),
        origin=_within("origin", data.get("origin"), _origin),
        method=of("method", str),
        note=of("note", str),
        mesh=of("mesh", lambda axes: Mesh(
            tuple((str(axis), int(size)) for axis, size in axes.items()), order
        )),
        hardware=of("hardware", str),
        hardware_digest=str(data.get("hardware_hash", "")),
        memory_bytes=of("memory_bytes", _amount),
        overlap=later("overlap", str, "partial"),
        resolution=later("resolution", str, "compatible"),
        constraints=later("constraints", _constraints, Constraints()),
        single=later("op_classes", lambda classes: bool(classes == "single"), False),
        arguments=of("arguments", lambda given: _named(given, _argument)),
        results=of("results", lambda given: _named(given, _spec)),
        actions=of("actions", lambda given: _entries(given, lambda entry: _action(entry, old))),
        replayed=data["method"] == "toast" if old else of("replayed", bool),
        ops=later("values", lambda given: dict(_entries(given, _runs)), {}),
        cost=of("cost", _amount),
        seed=of("seed", int),
        before=of("before", _prediction),
        after=of("after", _prediction),
        collectives=of("collectives", lambda given: _entries(given, _transfer)),
    )  # fmt: skip


def _origin(given: Any) -> Origin | None:
    return None if given is None else Origin(
        target=_at(given, "target", str),
        sizes=_at(given, "sizes", lambda sizes: _named(sizes, int)),
        shapes=_at(given, "shapes", _texts),
        rules=_at(given, "rules", _texts),
        hardware=_at(given, "hardware", str),
    )  # fmt: skip


def _argument(entry: Mapping[str, Any]) -> SavedArgument:
    return SavedArgument(
        _at(entry, "sharding", _spec),
        _at(entry, "shape", lambda shape: tuple(map(int, shape))) if "shape" in entry else None,
        str(entry.get("dtype", "")),
    )


def _runs(entry: Mapping[str, Any]) -> tuple[OpKey, tuple[Run, ...]]:
    return _key(entry), _at(entry, "shardings", lambda runs: _entries(runs, _run))


def _run(run: Mapping[str, Any]) -> Run:
    return Run(_at(run, "count", int), _at(run, "axes", _held), _at(run, "specs", _texts))


def _transfer(entry: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Callable[[Any], Any]] = {
        "kind": str, "axes": _texts, "bytes": _amount, "count": _amount, "algorithm": str,
        "seconds": _amount,
    }  # fmt: skip
    return {key: _at(entry, key, make) for key, make in made.items()}


def _texts(given: Sequence[Any]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise TypeError("a text is no list")
    return tuple(map(str, given))


def _spec(given: Sequence[Sequence[str]]) -> Spec:
    return tuple(map(_texts, given))


def _held(given: Mapping[str, Any]) -> Held:
    return tuple((str(axis), str(label)) for axis, label in given.items())


def _key(entry: Mapping[str, Any]) -> OpKey:
    def text(key: str) -> str:
        return _at(entry, key, str)

    return OpKey(
        text("kind"), text("path"), text("file"), _at(entry, "line", int), text("function"),
        text("label"),
    )  # fmt: skip


def _action(entry: Mapping[str, Any], old: bool) -> SavedAction:
    def part(given: Any) -> Part:
        if old:
            k, factor = given
            return Part(OpKey("", "", "", 0, "", ""), 0, 0, "", (int(k), int(factor)))
        k, factor = given["numbers"]
        return Part(
            _key(given), int(given["place"]), int(given["of"]), str(given["factor"]),
            (int(k), int(factor)),
        )  # fmt: skip

    return SavedAction(
        dimensions=_at(entry, "dimensions", _texts),
        factors=_texts(entry.get("factors", ())),
        axis=_at(entry, "axis", str),
        resolution=_at(entry, "resolution", lambda bits: tuple(map(int, bits))),
        part=_at(entry, "part", lambda parts: _entries(parts, part)),
        fixed=bool(entry.get("fixed", False)),
        reason=_at(entry, "reason", str),
        after=_at(entry, "after", _prediction),
    )


def _prediction(given: Mapping[str, Any]) -> Prediction:
    fields = dataclasses.fields(Prediction)
    needed = {f.name for f in fields if f.default is dataclasses.MISSING} | set(given)
    return Prediction(
        **{
            field.name: _at(given, field.name, _amount)
            for field in fields if field.name in needed - {"collectives"}
        },
        collectives=_at(given, "collectives", lambda rows: _entries(rows, _collective)),
    )  # fmt: skip


def _collective(given: Mapping[str, Any]) -> Collective:
    return Collective(
        _at(given, "kind", str), int(_at(given, "count", _amount)),
        _at(given, "bytes", _amount), _at(given, "seconds", _amount),
    )  # fmt: skip


def _constraints(given: Mapping[str, Any]) -> Constraints:
    from jax.sharding import PartitionSpec

    def entry(axes: Any) -> Any:
        return PartitionSpec.UNCONSTRAINED if axes is None else _texts(axes) or None

    return Constraints(
        pin={
            str(pattern): PartitionSpec(*map(entry, spec)) for pattern, spec in given["pin"].items()
        },
        forbid={str(pattern): list(_texts(axes)) for pattern, axes in given["forbid"].items()},
        fix={str(dimension): list(_texts(axes)) for dimension, axes in given["fix"].items()},
        keep=bool(given["keep"]),
    )
