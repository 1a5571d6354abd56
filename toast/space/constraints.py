"""Constraints of the user: shardings of arguments and of named values.

A pin holds exactly: the rows of the pinned ops in a state are fixed, no action changes them, and
uses with another sharding pay for the reshard.  Ops with equal pins and equal behaviour still form
one class.
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from toast.errors import PinError
from toast.hardware import Mesh
from toast.paths import matches, near
from toast.program import Program
from toast.space.annotated import annotated_spec, annotation_label
from toast.space.manual_axes import FREE, RegionHolders, acyclic, hold, place_of_region

if TYPE_CHECKING:
    from toast.analysis import Analysis

#: The mesh axes of each dimension; ``None`` for a dimension that the search may shard.
Spec = tuple[tuple[str, ...] | None, ...]
Holders = npt.NDArray[np.int8]

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True)
class Constraints:
    """Constraints, by patterns of argument paths and of ``checkpoint_name`` names of values.

    A pattern that matches none of these is compared with the paths of results, such as
    ``result[0]``.  In patterns, ``*`` stands for any text and brackets for themselves.  Raises
    :class:`toast.errors.PinError` if a field is not a mapping of patterns.
    """

    #: Shardings: a ``PartitionSpec``, or a text such as ``"P('data', None)"``.
    pin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: Mesh axes along which arguments must not be sharded: ``"data"``, or a list.
    forbid: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)
    #: Dimensions that are sharded before the search: ``{"tokens:0": "data"}`` shards all dimensions
    #: of the color of the batch along ``data``.
    fix: Mapping[str, str | Sequence[str]] = dataclasses.field(default_factory=dict)
    #: Whether the shardings in the program hold: its sharding constraints and the ``in_shardings``
    #: of ``jax.jit``.
    keep: bool = False

    def __post_init__(self) -> None:
        examples = {"pin": "w: P('data')", "forbid": "w: 'data'", "fix": "'tokens:0': 'data'"}
        for option, example in examples.items():
            mapping = getattr(self, option)
            if not isinstance(mapping, Mapping):
                raise PinError(
                    f"{option}: {type(mapping).__name__} is not a mapping from argument paths; "
                    f"use {{{example}}}"
                )
            if wrong := [key for key in mapping if not isinstance(key, str)]:
                raise PinError(f"{option}: {wrong[0]!r} is not an argument path; use {{{example}}}")

    def __bool__(self) -> bool:
        return bool(self.pin or self.forbid or self.fix or self.keep)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The constraints for a program and a mesh, without contradictions.

    Axes are those of ``mesh.real``: a sharding along an axis of one device always holds.
    """

    #: ``[ops, axes]`` the factor that must hold each axis, -1 for none, or :data:`FREE`.
    holders: Holders
    #: ``[names]`` whether a dimension takes no further axis, for pinned values with an open
    #: dimension.
    closed: npt.NDArray[np.bool_]
    #: The mesh axes from major to minor in an order that agrees with all pins; empty if no pin
    #: needs an order.
    order: tuple[str, ...]
    #: The names (of arguments' dimensions) and axes of ``fix``, in order.
    fixed: tuple[tuple[int, int], ...]
    #: The pinned shardings that name axes of one device, by value; plans contain them as written.
    written: Mapping[int, Spec]
    #: The axes that manual regions hold; part of ``holders``.
    regions: RegionHolders


def broken(
    analysis: Analysis, mesh: Mesh, constraints: Constraints, holders: Holders
) -> tuple[str, ...]:
    """The arguments and named values whose sharding violates the constraints.

    ``holders`` is a state, ``[ops, axes]``, with the axes of ``mesh.real``.  Raises the errors of
    :func:`resolve`.
    """
    resolved, names = resolve(analysis, mesh, constraints), analysis.names
    real = np.array(mesh.real.sizes) > 1
    wanted = resolved.holders
    wrong = (wanted != FREE) & (holders != np.maximum(wanted, -1)) & real
    held = names.first_name[: len(holders), None] + np.maximum(holders, 0)
    held = np.minimum(held, max(names.count - 1, 0))
    if names.count:
        # Only the open dimensions of a pin may take other axes.
        wrong |= (wanted == FREE) & (holders >= 0) & resolved.closed[held]
    for name, axis in resolved.fixed:
        op = int(names.name_op[name])
        wrong[op, axis] |= holders[op, axis] != name - int(names.first_name[op])
    ops = np.flatnonzero(wrong.any(axis=1)).tolist()
    program = analysis.program
    labels = []
    for op in ops:
        if program.kind(op) == "return":
            labels.append(_label(analysis, program.ops[op].operands[0], op))
        else:
            values = program.ops[op].results
            named = [value for value in values if value in program.labels]
            labels += [_label(analysis, value) for value in named or values]
    return tuple(dict.fromkeys(labels))


#: How messages begin for a sharding of the program itself.
_OWN = "the program's sharding"


class _Pin(NamedTuple):
    """The pinned sharding of one value where an op defines it, or where a ``return`` uses it."""

    op: int
    value: int
    spec: Spec
    #: Its name in messages: ``pin w*=P('data')``.
    what: str


def parse_spec(text: str) -> tuple[Any, ...]:
    """The entries of a ``PartitionSpec`` in JAX's notation: ``P('data', None, ('a', 'b'))``.

    Axis names may have no quotes; ``P.UNCONSTRAINED`` becomes ``...``.  Raises
    :class:`toast.errors.PinError` for other texts.
    """
    problem = PinError(f"'{text}' is not a sharding; write P('data', None) as in JAX")
    inside = re.fullmatch(r"\s*(?:P|PartitionSpec)\((.*)\)\s*", text, re.DOTALL)
    if inside is None:
        raise problem
    # Add quotes to names without them.
    opened = re.sub(r"\b(?:(?:P|PartitionSpec)\s*\.\s*)?UNCONSTRAINED\b", "...", inside[1])
    quoted = re.sub(r"(?<!['\"\w])(?!None\b)[A-Za-z_]\w*(?!['\"\w])", r"'\g<0>'", opened)
    quoted = quoted.strip().removesuffix(",")
    try:
        parsed = ast.literal_eval(f"({quoted},)") if quoted else ()
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise problem from None
    entries: list[Any] = []
    for entry in parsed:
        if entry is None or entry is ...:
            entries.append(entry)
            continue
        names = entry if isinstance(entry, tuple) else (entry,)
        if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
            raise problem
        entries.append(tuple(names))
    return tuple(entries)


def is_open(entry: Any) -> bool:
    """Whether an entry of a sharding leaves its dimension open (JAX's ``UNCONSTRAINED``)."""
    return entry is ... or type(entry).__name__ == "UnconstrainedSingleton"


def resolve(analysis: Analysis, mesh: Mesh, constraints: Constraints) -> Resolved:
    """The constraints as states of the ops of a program on a mesh.

    Raises :class:`toast.errors.PinError` for a pattern without a match, an impossible sharding, and
    constraints that contradict each other.
    """
    names, full_mesh, mesh = analysis.names, mesh, mesh.real
    regions = hold(analysis, full_mesh)
    holders = regions.holders.copy()
    written: dict[int, Spec] = {}
    closed = np.zeros(names.count, dtype=bool)
    causes: dict[tuple[int, int], str] = {}  # the constraint of an op and an axis
    pins: dict[int, list[_Pin]] = defaultdict(list)
    for pin in [*_pins(analysis, constraints), *_annotations(analysis, full_mesh, regions)]:
        whole = pin.spec
        pin = pin._replace(spec=_real(analysis, full_mesh, pin))
        defined = pin.value in analysis.program.ops[pin.op].results
        if defined and whole != pin.spec and 0 not in analysis.program.values[pin.value].type.shape:
            written.setdefault(pin.value, whole)
        row = _row(analysis, mesh, pin)
        _check_region(analysis, mesh, pin, row, regions.holders[pin.op])
        for other in pins[pin.op]:
            same = pin.value == other.value
            if (same and _contradict(pin.spec, other.spec)) or _clash(holders[pin.op], row):
                raise PinError(
                    f"{_label(analysis, pin.value, pin.op)}: {other.what} contradicts "
                    f"{pin.what}; remove one"
                )
        pins[pin.op].append(pin)
        holders[pin.op] = np.where(row == FREE, holders[pin.op], row)
        causes |= {(pin.op, axis): pin.what for axis in np.flatnonzero(row != FREE).tolist()}
        if None in pin.spec:
            for name, entry in zip(_names_at(analysis, pin.op, pin.value), pin.spec, strict=True):
                closed[name] |= entry is not None
    _check_annotations(analysis, pins)
    for pattern, axes in constraints.forbid.items():
        for op, value in _matching(analysis, pattern, "forbid"):
            for axis in _axes(full_mesh, axes, f"forbid {pattern}"):
                if holders[op, axis] >= 0 > regions.holders[op, axis]:
                    raise PinError(
                        f"{_label(analysis, value, op)}: {causes[op, axis]} has axis "
                        f"{mesh.names[axis]}, which forbid {pattern} excludes; remove one"
                    )
                holders[op, axis] = -1
                causes.setdefault((op, axis), f"forbid {pattern}")
    fixed = _fixed(analysis, full_mesh, constraints)
    taken: dict[tuple[int, int], int] = {}
    for name, axis in fixed:
        op = int(names.name_op[name])
        factor = name - int(names.first_name[op])
        earlier = taken.setdefault((op, axis), name)
        here = holders[op, axis]
        if here not in (FREE, factor) or (closed[name] and here == FREE):
            why = f"{causes.get((op, axis)) or pins[op][0].what} excludes it"
        elif earlier != name:
            why = f"fix {analysis.name_label(earlier)} has it"
        else:
            continue
        raise PinError(
            f"fix: {analysis.name_label(name)} cannot get axis {mesh.names[axis]}: {why}; "
            "remove one"
        )
    order = _order(mesh, itertools.chain.from_iterable(pins.values()), regions.order)
    fixed = tuple((name, axis) for name, axis in fixed if mesh.sizes[axis] > 1)
    return Resolved(holders, closed, order, fixed, written, regions)


def _check_region(analysis: Analysis, mesh: Mesh, pin: _Pin, row: Holders, region: Holders) -> None:
    """Refuses a pin that contradicts a manual region."""
    wrong = (row != FREE) & (region != FREE) & (row != region)
    for axis in np.flatnonzero(wrong).tolist():
        raise PinError(
            f"{pin.what}: {_label(analysis, pin.value, pin.op)}: the region of shard_map at "
            f"{place_of_region(analysis.program, pin.op)} takes axis {mesh.names[axis]}; "
            "remove the pin"
        )


def _pins(analysis: Analysis, constraints: Constraints) -> list[_Pin]:
    """All pins: those of the user, then those of the program."""
    program = analysis.program
    pins = []
    for pattern, wanted in constraints.pin.items():
        spec = _spec(wanted, pattern)
        what = f"pin {pattern}={_text(spec)}"
        places = _matching(analysis, pattern, "pin")
        pins += [_Pin(op, value, spec, what) for op, value in places]
    if constraints.keep:
        for op, spec in program.constraints.items():
            (value,) = program.ops[op].results
            pins.append(_Pin(op, value, spec, f"{_OWN} {_text(spec)}"))
    return [pin._replace(spec=_whole(analysis, pin)) for pin in pins]


def _annotations(analysis: Analysis, mesh: Mesh, regions: RegionHolders) -> list[_Pin]:
    """The annotations of the program as pins."""
    program, pins = analysis.program, []
    for op, text in program.annotations.items():
        (value,) = program.ops[op].results
        what = annotation_label(program, op)
        row = regions.holders[op]
        taken = [name for name, held in zip(mesh.real.names, row, strict=True) if held != FREE]
        spec = annotated_spec(text, mesh, what, taken)
        pins.append(_Pin(op, value, spec, what))
    return pins


def _check_annotations(analysis: Analysis, pins: Mapping[int, list[_Pin]]) -> None:
    """Refuses an annotation whose operand, or whose returned result, the user pins otherwise."""
    program = analysis.program
    for op in program.annotations:
        (operand,), (result,) = program.ops[op].operands, program.ops[op].results
        maker, annotated = program.values[operand].op, pins.get(op, ())
        if maker not in program.annotations:
            _check_pins(analysis, annotated, pins.get(maker, ()), operand)
        for end in _returns(program, result):
            _check_pins(analysis, annotated, pins.get(end, ()), result)


def _returns(program: Program, value: int) -> Iterator[int]:
    """The ops that return a value."""
    for op in range(len(program.ops) - len(program.results), len(program.ops)):
        if program.ops[op].operands == (value,):
            yield op


def _check_pins(
    analysis: Analysis, annotated: Sequence[_Pin], pins: Sequence[_Pin], value: int
) -> None:
    """Refuses pins of a value by the user that contradict an annotation."""
    for pin, other in itertools.product(annotated, pins):
        own = other.what.startswith(_OWN)
        if not own and other.value == value and _contradict(pin.spec, other.spec):
            raise PinError(
                f"{_label(analysis, value, other.op)}: {pin.what} contradicts {other.what}; "
                "remove one"
            )


def _whole(analysis: Analysis, pin: _Pin) -> Spec:
    """The spec with an entry for each dimension; missing entries mean unsharded."""
    type_ = analysis.program.values[pin.value].type
    missing = len(type_.shape) - len(pin.spec)
    if missing < 0:
        raise PinError(
            f"{pin.what}: {_label(analysis, pin.value, pin.op)} {type_} has {len(type_.shape)} "
            f"dimensions, not {len(pin.spec)}"
        )
    return (*pin.spec, *((),) * missing)


def _real(analysis: Analysis, mesh: Mesh, pin: _Pin) -> Spec:
    """The spec without axes of one device; raises PinError for unknown and repeated axes."""
    where = _where(analysis, pin)
    listed = [axis for axes in pin.spec for axis in axes or ()]
    own = pin.what.startswith(_OWN)
    _axes(mesh, listed, where, "name the mesh's axes as the program does" if own else "")
    for number, axis in enumerate(listed):
        if axis in listed[:number]:
            raise PinError(
                f"{where}: axis {axis} occurs twice; an axis can shard only one dimension"
            )
    real = mesh.real.names
    return tuple(
        None if axes is None else tuple(axis for axis in axes if axis in real) for axes in pin.spec
    )


def _clash(row: Holders, other: Holders) -> bool:
    """Whether two pins of one op put an axis on different factors."""
    return bool(((row != other) & (row != FREE) & (other != FREE)).any())


def _contradict(spec: Spec, other: Spec) -> bool:
    """Whether two pins have different sets of axes for one dimension."""
    return any(
        a is not None and b is not None and set(a) != set(b)
        for a, b in zip(spec, other, strict=True)
    )


def _order(mesh: Mesh, pins: Iterable[_Pin], regions: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """An order of the mesh axes that agrees with all pins: a plan has one order of shards.

    ``regions`` are pairs of axes for manual regions, whose first axis is major if pins allow it.
    """
    before: dict[tuple[str, str], str] = {}
    for pin in pins:
        for axes in pin.spec:
            for first, then in itertools.combinations(axes or (), 2):
                before[first, then] = pin.what
                if (then, first) in before:
                    raise PinError(
                        f"{pin.what}: the order of axes {first} and {then} contradicts "
                        f"{before[then, first]}; remove one of the two pins"
                    )
    if not before and not regions:
        return ()
    graph: dict[str, set[str]] = {name: set() for name in mesh.names}
    for first, then in (*before, *acyclic(regions, (*before,))):
        graph[then].add(first)
    try:
        return tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        raise PinError("pins have contradictory axis orders; remove one") from None


def _fixed(analysis: Analysis, mesh: Mesh, constraints: Constraints) -> tuple[tuple[int, int], ...]:
    """The names and axes of ``fix``."""
    fixed = []
    for text, axes in constraints.fix.items():
        pattern, colon, dimension = text.rpartition(":")
        if not colon or not re.fullmatch(r"-?\d+", dimension):
            raise PinError(f"fix {text}: write argument:dimension, for example tokens:0")
        for op, value in _matching(analysis, pattern, "fix", f":{dimension}"):
            names = _names_at(analysis, op, value)
            rank = len(names)
            if not -rank <= int(dimension) < rank:
                raise PinError(f"fix {text}: {_label(analysis, value, op)} has {rank} dimensions")
            name = names[int(dimension) % rank]
            fixed += [(name, axis) for axis in _axes(mesh, axes, f"fix {text}")]
    return tuple(dict.fromkeys(fixed))


def _matching(
    analysis: Analysis, pattern: str, option: str, rest: str = ""
) -> list[tuple[int, int]]:
    """The arguments and named values that a pattern matches, with the ops that define them.

    If there are none, the results that it matches, with the ops that return them; a result in a
    donated argument is that argument.  Errors quote the option, the pattern and the ``rest`` of the
    user's text.
    """
    if not pattern:
        raise PinError(f"{option}: empty pattern; write an argument path, or * for all")
    program = analysis.program
    paths = dict(zip(program.argument_values, program.arguments, strict=True))
    named = {**program.labels, **paths}
    values = [value for value, path in named.items() if matches(pattern, path)]
    places = [(program.values[value].op, value) for value in values]
    if not values:
        first = len(program.ops) - len(program.results)
        for number, path in enumerate(program.results):
            if matches(pattern, path):
                alias, op = program.aliases[number], first + number
                places.append(
                    (alias, program.argument_values[alias]) if alias >= 0
                    else (op, program.ops[op].operands[0])
                )  # fmt: skip
    if not places:
        known = [*paths.values(), *program.labels.values(), *program.results]
        close = ", ".join(near(pattern, known)) or "none"
        raise PinError(
            f"{option} {pattern}{rest}: matches no argument, named value or result; similar: "
            f"{close}"
        )
    return sorted(set(places))


def _names_at(analysis: Analysis, op: int, value: int) -> list[int]:
    """The name of each dimension of a value at the op that defines it, or that returns it."""
    names, program = analysis.names, analysis.program
    rank = len(program.values[value].type.shape)
    if value in program.ops[op].results:
        first = int(names.value_dim[value])
        return [int(name) for name in names.def_name[first : first + rank]]
    (use,) = np.flatnonzero(names.use_op == op).tolist()
    first = int(names.use_dim[use])
    return [int(name) for name in names.use_name[first : first + rank]]


def _spec(wanted: Any, pattern: str) -> Spec:
    """A ``PartitionSpec``, its text, or a ``NamedSharding``, as a :data:`Spec`."""
    if hasattr(wanted, "spec") and hasattr(wanted, "mesh"):
        wanted = wanted.spec
    if getattr(wanted, "unreduced", None) or getattr(wanted, "reduced", None):
        raise PinError(f"pin {pattern}: {wanted!r}: unreduced axes cannot be pinned")
    try:
        entries = parse_spec(wanted) if isinstance(wanted, str) else wanted
    except PinError as error:
        raise PinError(f"pin {pattern}: {error}") from None
    if not isinstance(entries, Iterable) or isinstance(entries, Mapping | Set | bytes):
        raise PinError(f"pin {pattern}: {wanted!r} is not a sharding; write P('data', None)")
    spec: list[tuple[str, ...] | None] = []
    for entry in entries:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if is_open(entry):
            spec.append(None)
        elif isinstance(axes, tuple | list) and all(isinstance(axis, str) for axis in axes):
            spec.append(tuple(axes))
        else:
            raise PinError(
                f"pin {pattern}: {entry!r} is not an axis, a tuple of axes, or None; "
                "write P('data', None)"
            )
    return tuple(spec)


def _row(analysis: Analysis, mesh: Mesh, pin: _Pin) -> Holders:
    """``[axes]`` the factor of the op that holds each axis under the pin."""
    names, program = analysis.names, analysis.program
    op, value, spec, _ = pin
    shape = program.values[value].type.shape
    where = _where(analysis, pin)
    at = _names_at(analysis, op, value)
    # Axes that are not in the spec must not be used, unless a dimension is open.
    row = np.full(len(mesh.axes), FREE if None in spec else -1, dtype=np.int8)
    for d, axes in enumerate(spec):
        for axis in axes or ():
            number = mesh.names.index(axis)
            row[number] = at[d] - int(names.first_name[op])
        shards = math.prod(dict(mesh.axes)[axis] for axis in axes or ())
        if shape[d] % shards:
            whole = {program.kind(op), program.kind(program.values[value].op)}
            remedy = (
                "pad the array (JAX shards arguments and results in equal parts)"
                if whole & {"argument", "return"}
                else "plan with uneven=1 (--uneven 1)"
            )
            raise PinError(
                f"{where}: {shards} devices ({', '.join(axes or ())}) do not divide dimension {d} "
                f"of {shape[d]} elements; use axes that divide it, or {remedy}"
            )
    if any(spec) and not math.prod(shape):
        raise PinError(f"{where} has no elements to shard; remove the pin")
    return row


def _where(analysis: Analysis, pin: _Pin) -> str:
    """The beginning of a message on a pin: what it is, and the value."""
    type_ = analysis.program.values[pin.value].type
    if pin.op in analysis.program.annotations:  # it names its place itself
        return f"{pin.what}: {type_}"
    return f"{pin.what}: {_label(analysis, pin.value, pin.op)} {type_}"


def _axes(mesh: Mesh, axes: Any, what: str, remedy: str = "") -> list[int]:
    """The numbers in ``mesh.real`` of these axes; those of one device are left out.

    The error for an axis that the mesh does not have names its axes, or another ``remedy``.
    """
    listed = [axes] if isinstance(axes, str) else axes
    if not isinstance(listed, Sequence | Set) or not all(isinstance(axis, str) for axis in listed):
        raise PinError(f"{what}: {axes!r} is not a mesh axis; write 'data', or a list of axes")
    for axis in listed:
        if axis not in mesh.names:
            remedy = remedy or f"use {', '.join(mesh.names)}"
            raise PinError(f"{what}: no axis {axis} in mesh {mesh}; {remedy}")
    real = mesh.real.names
    return [real.index(axis) for axis in listed if axis in real]


def _label(analysis: Analysis, value: int, op: int | None = None) -> str:
    """The path or name of a value, where ``op`` defines or returns it."""
    program = analysis.program
    first = len(program.ops) - len(program.results)
    if op is not None and op >= first:
        return program.results[op - first]
    op = program.values[value].op
    if op < len(program.arguments):
        return program.arguments[op]
    return program.labels.get(value) or program.describe(op)


def _text(spec: Spec) -> str:
    def entry(axes: tuple[str, ...] | None) -> str:
        if axes is None:
            return "P.UNCONSTRAINED"
        return repr(axes[0] if len(axes) == 1 else axes) if axes else "None"

    parts = map(entry, spec)
    return f"P({', '.join(parts)})"
