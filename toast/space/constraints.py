"""What the user fixes before the search: shardings of arguments and of named values.

A pin holds exactly: the rows of a state that belong to what is pinned are fixed, so no action
changes them, and what uses it elsewhere pays for the reshard.  Ops that are pinned alike and
behave alike still form one class.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import fnmatch
import graphlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from toast.errors import PinError
from toast.frontend import Program
from toast.hardware import Mesh

if TYPE_CHECKING:
    from toast.analysis import Analysis

#: Mesh axes of each dimension; ``None`` for a dimension that is left to the search.
Spec = tuple[tuple[str, ...] | None, ...]
Holders = npt.NDArray[np.int8]

#: In :func:`holders`: an axis that the search may use as it likes.
FREE = -2

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Pins, by patterns of argument paths and of names that ``checkpoint_name`` gave to values.

    In patterns ``*`` stands for anything; brackets are themselves.
    """

    #: Shardings: a ``PartitionSpec``, or as text ``"P('data', None)"``.
    pin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: Mesh axes that arguments must not be sharded along: ``"data"``, or several.
    forbid: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)
    #: Dimensions that take axes before the search does: ``{"tokens:0": "data"}`` puts the batch,
    #: wherever it goes, on ``data``.
    fix: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)
    #: Whether the program's own sharding constraints hold.
    keep: bool = False

    def __bool__(self) -> bool:
        return bool(self.pin or self.forbid or self.fix or self.keep)


def parse_spec(text: str) -> tuple[Any, ...]:
    """The entries of a ``PartitionSpec`` as JAX writes it: ``P('data', None, ('a', 'b'))``.

    Axis names need no quotes.  Raises :class:`toast.errors.PinError`.
    """
    problem = PinError(f"'{text}' is no sharding; write P('data', None) as JAX does")
    inside = re.fullmatch(r"\s*(?:P|PartitionSpec)\((.*)\)\s*", text, re.DOTALL)
    if inside is None:
        raise problem
    # Names without quotes get some.
    quoted = re.sub(r"(?<!['\"\w])(?!None\b)[A-Za-z_]\w*(?!['\"\w])", r"'\g<0>'", inside[1])
    quoted = quoted.strip().removesuffix(",")
    try:
        found = ast.literal_eval(f"({quoted},)") if quoted else ()
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise problem from None
    entries: list[Any] = []
    for entry in found:
        names = entry if isinstance(entry, tuple) else (entry,)
        if entry is not None and not all(
            isinstance(name, str) and _NAME.fullmatch(name) for name in names
        ):
            raise problem
        entries.append(None if entry is None else tuple(names))
    return tuple(entries)


def holders(analysis: Analysis, mesh: Mesh, constraints: Constraints) -> Holders:
    """``[ops, axes]`` the factor that holds each axis, -1 for none, :data:`FREE` where unsaid.

    Raises :class:`toast.errors.PinError` for a pattern without a match, a sharding that cannot be,
    and two pins that contradict each other.
    """
    found = np.full((len(analysis.program.ops), len(mesh.axes)), FREE, dtype=np.int8)
    said: dict[int, str] = {}
    program = analysis.program
    for pattern, wanted in constraints.pin.items():
        for op in _matching(analysis, pattern):
            spec = _spec(wanted, pattern)
            row = _row(analysis, mesh, op, spec, f"pin {pattern}={_text(spec)}")
            if op in said and (found[op] != row).any():
                raise PinError(
                    f"{_label(analysis, op)}: {said[op]} contradicts {pattern}; drop one"
                )
            found[op], said[op] = row, pattern
    for pattern, axes in constraints.forbid.items():
        for op in _matching(analysis, pattern):
            for axis in _axes(mesh, axes, f"forbid {pattern}"):
                if found[op, axis] >= 0:
                    raise PinError(
                        f"{_label(analysis, op)}: {said[op]} pins it to axis {mesh.names[axis]}, "
                        f"which {pattern} forbids; drop one"
                    )
                found[op, axis] = -1
    if constraints.keep:
        for op, spec in program.constraints.items():
            row = _row(analysis, mesh, op, spec, f"sharding constraint {_text(spec)}")
            found[op] = np.where(found[op] == FREE, row, found[op])
    return found


def axis_order(mesh: Mesh, constraints: Constraints, program: Program) -> tuple[str, ...]:
    """The mesh's axes, major to minor, so that all pins have theirs in the order that they say.

    Raises :class:`toast.errors.PinError` where two pins have two orders: shards lie in one.
    """
    specs = {pattern: _spec(wanted, pattern) for pattern, wanted in constraints.pin.items()}
    if constraints.keep:
        specs |= {program.describe(op): spec for op, spec in program.constraints.items()}
    before: dict[tuple[str, str], str] = {}
    for what, spec in specs.items():
        for axes in spec:
            for first, then in itertools.combinations(axes or (), 2):
                before[first, then] = what
                if (then, first) in before:
                    raise PinError(
                        f"pin {what}: axes {first} and {then} in another order than pin "
                        f"{before[then, first]} has them; shards lie in one order, so drop one"
                    )
    if not before:
        return ()
    graph: dict[str, set[str]] = {name: set() for name in mesh.names}
    for first, then in before:
        graph.setdefault(then, set()).add(first)
    try:
        return tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        raise PinError("pins have axes in orders that contradict each other; drop one") from None


def closed_names(analysis: Analysis, constraints: Constraints) -> npt.NDArray[np.bool_]:
    """``[names]`` dimensions that take no further axis, of values with some dimension left open."""
    closed = np.zeros(analysis.names.count, dtype=bool)
    specs = [
        (op, _spec(wanted, pattern))
        for pattern, wanted in constraints.pin.items()
        for op in _matching(analysis, pattern)
    ] + list(analysis.program.constraints.items() if constraints.keep else ())
    names = analysis.names
    for op, spec in specs:
        first = names.value_dim[analysis.program.ops[op].results[0]]
        for d, axes in enumerate(spec):
            closed[names.def_name[first + d]] |= axes is not None and None in spec
    return closed


def fixed_dimensions(
    analysis: Analysis, mesh: Mesh, constraints: Constraints
) -> list[tuple[int, int]]:
    """Names (of arguments' dimensions) and the axes that ``fix`` puts them on, in order."""
    found = []
    for text, axes in constraints.fix.items():
        pattern, colon, dimension = text.rpartition(":")
        if not colon or not re.fullmatch(r"-?\d+", dimension):
            raise PinError(f"fix {text}: write argument:dimension, for example tokens:0")
        for op in _matching(analysis, pattern):
            names, (value,) = analysis.names, analysis.program.ops[op].results
            rank = len(analysis.program.values[value].type.shape)
            if not -rank <= int(dimension) < rank:
                raise PinError(f"fix {text}: {_label(analysis, op)} has {rank} dimensions")
            name = int(names.def_name[names.value_dim[value] + int(dimension) % rank])
            found += [(name, axis) for axis in _axes(mesh, axes, f"fix {text}")]
    return list(dict.fromkeys(found))


def _matching(analysis: Analysis, pattern: str) -> list[int]:
    """Ops that define the arguments and named values that a pattern matches."""
    program = analysis.program
    paths = dict(enumerate(program.arguments))
    named = {program.values[v].op: label for v, label in program.labels.items()}
    wanted = pattern.replace("[", "[[]")
    found = [op for op, path in {**named, **paths}.items() if fnmatch.fnmatchcase(path, wanted)]
    if not found:
        known = list(dict.fromkeys([*paths.values(), *named.values()]))
        near = difflib.get_close_matches(pattern, known, 3) or known[:3]
        raise PinError(f"{pattern} matches no argument; near it: {', '.join(near)}")
    return sorted(found)


def _spec(wanted: Any, pattern: str) -> Spec:
    """A ``PartitionSpec``, or its text, as axes per dimension."""
    entries = parse_spec(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(entries, Iterable):
        raise PinError(f"pin {pattern}: {wanted!r} is no sharding; write P('data', None)")
    spec: list[tuple[str, ...] | None] = []
    for entry in entries:
        if type(entry).__name__ == "UnconstrainedSingleton":
            spec.append(None)
        else:
            spec.append(
                () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            )
    return tuple(spec)


def _row(analysis: Analysis, mesh: Mesh, op: int, spec: Spec, what: str) -> Holders:
    """The factor of ``op`` that holds each axis, so that its result is sharded as ``spec`` says."""
    names, program = analysis.names, analysis.program
    (value,) = program.ops[op].results
    shape = program.values[value].type.shape
    where = f"{what}: {_label(analysis, op)} {program.values[value].type}"
    if len(spec) > len(shape):
        raise PinError(f"{where} has {len(shape)} dimensions, not {len(spec)}")
    # Axes that the spec does not name: to be kept off, unless some dimension is left open.
    row = np.full(len(mesh.axes), FREE if None in spec else -1, dtype=np.int8)
    used: set[str] = set()
    for d, axes in enumerate(spec):
        for axis in axes or ():
            (number,) = _axes(mesh, axis, where)
            if axis in used:
                raise PinError(f"{where}: axis {axis} stands twice; an axis shards one dimension")
            used.add(axis)
            name = int(names.def_name[names.value_dim[value] + d])
            row[number] = name - int(names.first_name[op])
        shards = math.prod(dict(mesh.axes)[axis] for axis in axes or ())
        if shape[d] % shards:
            raise PinError(
                f"{where}: {shards} devices ({', '.join(axes or ())}) do not divide dimension {d}"
            )
    return row


def _axes(mesh: Mesh, axes: str | Sequence[str], what: str) -> list[int]:
    listed = [axes] if isinstance(axes, str) else list(axes)
    for axis in listed:
        if axis not in mesh.names:
            raise PinError(f"{what}: no axis {axis} in mesh {mesh}; use {', '.join(mesh.names)}")
    return [mesh.names.index(axis) for axis in listed]


def _label(analysis: Analysis, op: int) -> str:
    program = analysis.program
    if op < len(program.arguments):
        return program.arguments[op]
    (value,) = program.ops[op].results
    return program.labels.get(value) or program.describe(op)


def _text(spec: Spec) -> str:
    parts = [
        "?" if axes is None else "None" if not axes else repr(axes[0] if len(axes) == 1 else axes)
        for axes in spec
    ]
    return f"P({', '.join(parts)})"
