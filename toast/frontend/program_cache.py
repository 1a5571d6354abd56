"""The cache of programs, keyed by their inputs (entries of :mod:`toast.disk_cache`).

Commands that only read a program use the cache.  A cached program equals the lowered program and
has its source locations, but it has no MLIR module and cannot be called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from toast import disk_cache
from toast.boundary.typed import checked
from toast.program import Attribute, Location, Op, Program, Signature, TensorType, Value
from toast.program.soundness import unsound

#: The version of the entries' format; a new version invalidates older entries.
_FORMAT = "8"
_KIND = "program"

#: What changes how JAX lowers a function: its settings, and the default platform.
_VARIABLES = ("JAX_", "CUDA_", "TPU_", "ROCR_", "HIP_")
_PLATFORMS = ("jax_plugins", "libtpu")
_DEVICES = "/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/*", "/dev/kfd"


@dataclasses.dataclass(frozen=True)
class CachedLocations:
    """The source locations of a cached program."""

    #: The location of each op.
    locations: tuple[Location, ...]

    def location(self, op: int) -> Location:
        """Source location of a program op."""
        return self.locations[op]


def lowered(
    parts: Sequence[str | bytes], code: Iterable[pathlib.Path], lower: Callable[[], Program]
) -> Program:
    """The program that ``lower`` returns, from the cache if possible.

    :param parts: everything that the program depends on.  The frontend, JAX and its settings are
        added.
    :param code: folders of the Python files that build the program; their contents are part of the
        key.
    :param lower: builds the program if there is no valid entry.
    """
    if not disk_cache.enabled():
        return lower()
    here = pathlib.Path(__file__).parent
    folders = [*code, here, here.parent / "program"]
    files = itertools.chain.from_iterable(sorted(folder.rglob("*.py")) for folder in folders)
    key = disk_cache.digest([_FORMAT, *_surroundings(), disk_cache.digest_of_files(files), *parts])
    with contextlib.suppress(*disk_cache.DAMAGE):
        if entry := disk_cache.load(_KIND, key):
            return _unpacked(*entry)
    program = lower()
    if program.decompositions:  # entries have none
        return program
    disk_cache.keep(_KIND, key, *_packed(program), _KIND)
    return program


def _surroundings() -> Iterator[str]:
    for package in ("jax", "jaxlib"):
        yield f"{package} {importlib.metadata.version(package)}"
    yield from sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_VARIABLES))
    for package in _PLATFORMS:
        spec = importlib.util.find_spec(package)
        yield f"{package} {sorted(spec.submodule_search_locations or ()) if spec else ''}"
    yield repr(accelerators())


def accelerators() -> list[str]:
    """The device files of this machine's GPUs and TPUs."""
    return sorted(path for pattern in _DEVICES for path in glob.glob(pattern))


def _packed(program: Program) -> tuple[dict[str, Any], disk_cache.Arrays]:
    types: dict[TensorType, int] = {}
    places: dict[Location, int] = {}

    def typed(row: Iterable[TensorType]) -> list[int]:
        return [types.setdefault(type_, len(types)) for type_ in row]

    ops, values = program.ops, program.values
    arrays = {
        "op": [op.signature for op in ops],
        "location": [
            places.setdefault(program.location(op), len(places)) for op in range(len(ops))
        ],
        "operands": list(itertools.chain.from_iterable(op.operands for op in ops)),
        "operand_count": [len(op.operands) for op in ops],
        "results": list(itertools.chain.from_iterable(op.results for op in ops)),
        "result_count": [len(op.results) for op in ops],
        "value_type": typed(value.type for value in values),
        "value_op": [value.op for value in values],
        "value_result": [value.result for value in values],
        "repeats": program.repeats,
    }
    plain = {
        "name": program.name,
        "signatures": [
            [s.kind, s.attributes, typed(s.operands), typed(s.results)] for s in program.signatures
        ],
        "arguments": program.arguments,
        "results": program.results,
        "aliases": program.aliases,
        "ties": program.ties,
        "labels": [*program.labels.items()],
        "constraints": [*program.constraints.items()],
        "annotations": [*program.annotations.items()],
        "condition_reads": program.condition_reads,
        "foreign": program.foreign,
        "platform": program.platform,
        "types": [[type_.shape, type_.dtype] for type_ in types],
        "locations": [dataclasses.astuple(place) for place in places],
    }
    numbers = {name: np.array(row, dtype=np.int64) for name, row in arrays.items()}
    return plain, {name: disk_cache.small(row) for name, row in numbers.items()}


_Number = Annotated[int, msgspec.Meta(ge=0)]


class _ProgramEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of an entry."""

    name: str
    #: Kind, attributes, types of operands and of results.
    signatures: list[tuple[str, list[tuple[str, Any]], list[_Number], list[_Number]]]
    arguments: list[str]
    results: list[str]
    aliases: list[int]
    ties: list[tuple[int, int]]
    labels: list[tuple[int, str]]
    constraints: list[tuple[int, list[list[str] | None]]]
    annotations: list[tuple[int, str]]
    condition_reads: list[tuple[_Number, _Number]]
    foreign: bool
    platform: str
    types: list[tuple[list[_Number], str]]
    #: Path, file, line and function.
    locations: list[tuple[str, str, int, str]]


_COLUMNS = frozenset({
    "op", "location", "operands", "operand_count", "results", "result_count", "value_type",
    "value_op", "value_result", "repeats",
})  # fmt: skip


def _unpacked(data: Any, arrays: disk_cache.Arrays) -> Program:
    """The program in an entry; raises one of ``disk_cache.DAMAGE`` where it is none."""
    plain = checked(data, _ProgramEntry)
    types = [TensorType(tuple(shape), dtype) for shape, dtype in plain.types]
    places = [Location(*place) for place in plain.locations]
    if arrays.keys() != _COLUMNS:
        raise ValueError("other columns")
    column = {name: disk_cache.numbers(row, (-1,)).tolist() for name, row in arrays.items()}

    def chosen(row: list[int], choices: Sequence[_Chosen]) -> tuple[_Chosen, ...]:
        if row and min(row) < 0:
            raise ValueError("a number below 0")
        return tuple([choices[number] for number in row])

    def parted(name: str) -> Iterator[tuple[int, ...]]:
        flat, counts = iter(column[name]), column[f"{name[:-1]}_count"]
        if len(counts) != len(column["op"]) or sum(counts) != len(column[name]):
            raise ValueError("other counts")
        return (tuple(itertools.islice(flat, n)) for n in counts)

    columns = (chosen(column["value_type"], types), column["value_op"], column["value_result"])
    program = Program(
        name=plain.name,
        signatures=tuple(
            Signature(
                kind, _attributes(attributes), chosen(operands, types), chosen(results, types)
            )
            for kind, attributes, operands, results in plain.signatures
        ),
        ops=tuple(map(Op, column["op"], parted("operands"), parted("results"))),
        values=tuple(Value(*row) for row in zip(*columns, strict=True)),
        arguments=tuple(plain.arguments),
        results=tuple(plain.results),
        aliases=tuple(plain.aliases),
        ties=tuple(plain.ties),
        repeats=tuple(column["repeats"]),
        labels=dict(plain.labels),
        constraints={op: _tuples(dimensions) for op, dimensions in plain.constraints},
        annotations=dict(plain.annotations),
        condition_reads=tuple(plain.condition_reads),
        foreign=plain.foreign,
        platform=plain.platform,
        source=CachedLocations(chosen(column["location"], places)),
    )
    if reason := unsound(program):
        raise ValueError(f"no program: {reason}")
    if len(column["location"]) != len(program.ops):
        raise ValueError("other locations")
    return program


_Chosen = TypeVar("_Chosen")


def _attributes(pairs: list[tuple[str, Any]]) -> tuple[tuple[str, Attribute], ...]:
    """The attributes of a signature, numbers or texts, or lists of them."""
    for _, value in pairs:
        if any(type(item) not in (int, str) for item in _flat(value)):
            raise ValueError("another attribute")
    return tuple((name, _tuples(value)) for name, value in pairs)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _tuples(data: Any) -> Any:
    """``data`` with all lists, also nested ones, as tuples."""
    return tuple(map(_tuples, data)) if isinstance(data, list) else data
