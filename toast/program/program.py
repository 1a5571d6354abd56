"""Programs in flat SSA form: ops, values and locations, the input of all later stages.

Arguments and returned values are ops too (kinds ``argument`` and ``return``).  So every value has a
defining op, every use is an operand, and a dimension name is always a pair (op, factor), without
special cases in later stages (paper, section 3.1).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toast.program.memory_policy import TracedMemory
from toast.program.passes import Pass, passes_of

#: The value of an op's attribute.
Attribute = int | str | tuple[int | str, ...]

#: The bytes of an element by StableHLO element type; XLA rounds sub-byte types up.
BYTES = {
    "i1": 1, "pred": 1, "i2": 1, "i4": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
    "ui2": 1, "ui4": 1, "ui8": 1, "ui16": 2, "ui32": 4, "ui64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "token": 0,
}  # fmt: skip


#: The combiners that collectives have for numbers, and for truth values.
_SUMMED, _SUMMED_TRUTHS = ("add", "multiply", "maximum", "minimum"), ("and", "or")


def has_collective(combiner: str, dtype: str) -> bool:
    """Whether a collective combines partial results of an element type.

    If not (for a reduction of bits, or of several values at once), devices gather the partial
    results, and each device combines them.
    """
    return combiner in _SUMMED or (dtype == "i1" and combiner in _SUMMED_TRUTHS)


def element_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``; floats of 8 bits or fewer take one byte."""
    return BYTES.get(dtype, 1 if dtype.startswith("f") else 4)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and StableHLO element type (``f32``, ``bf16``, ``i1`` ...) of a value."""

    #: The elements along each dimension.
    shape: tuple[int, ...]
    #: The element type, in StableHLO's words.
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """The origin of an op: the path of JAX primitives and the user's innermost source line."""

    #: The path of JAX primitives, such as ``jit(step)/dot_general``.
    path: str = ""
    #: The user's file; empty if unknown.
    file: str = ""
    #: The line in the file, from 1; 0 if unknown.
    line: int = 0
    #: The user's function; empty if unknown.
    function: str = ""

    @property
    def shown_file(self) -> str:
        """The file for messages: relative to the working directory if it is below it."""
        return self.file.removeprefix(os.path.join(os.getcwd(), ""))

    def __str__(self) -> str:
        place = f"{self.shown_file}:{self.line}" if self.file else ""
        return " ".join(part for part in (place, self.path) if part) or "unknown location"


@dataclasses.dataclass(frozen=True, slots=True)
class PaddedDimension:
    """The dimensions of one color and size that a padded program has with more elements."""

    #: The first of them in the program without padding: ``params['embed']:0``.
    dimension: str
    elements: int
    padded: int

    def __str__(self) -> str:
        share = 100 * (self.padded / self.elements - 1)
        return (
            f"{self.dimension} from {self.elements:,} to {self.padded:,} elements (+{share:.2g} %)"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """All inputs of an op's sharding rule; ops with equal signatures share one solved rule."""

    #: The kind of op, such as ``dot_general``.
    kind: str
    #: The attributes that the rule depends on, by name.
    attributes: tuple[tuple[str, Attribute], ...]
    #: The types of the operands.
    operands: tuple[TensorType, ...]
    #: The types of the results.
    results: tuple[TensorType, ...]

    def attribute(self, name: str) -> Attribute | None:
        """The attribute ``name``, or ``None``."""
        return dict(self.attributes).get(name)


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """An op: the index of its signature, and the indices of the values it uses and defines."""

    #: The number of the signature.
    signature: int
    #: The numbers of the values that it uses.
    operands: tuple[int, ...]
    #: The numbers of the values that it defines.
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """An SSA value: its type, the op that defines it, and its index among the op's results."""

    #: The shape and the element type.
    type: TensorType
    #: The number of the op that defines it.
    op: int
    #: Which of the op's results it is, from 0.
    result: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A whole function, calls inlined, in program order.

    ``ops`` starts with one ``argument`` op per argument and ends with one ``return`` op per
    result, so argument ``i`` is op ``i`` and result ``j`` is op ``len(ops) - len(results) + j``.
    """

    #: The name of the function.
    name: str
    #: The different signatures of ops: kind, types and attributes.
    signatures: tuple[Signature, ...]
    #: The ops, in program order.
    ops: tuple[Op, ...]
    #: The values, by number.
    values: tuple[Value, ...]
    #: Argument paths, e.g. ``params['layers'][3]['wq']``.
    arguments: tuple[str, ...]
    #: Result paths, e.g. ``result[0]['wq']``.
    results: tuple[str, ...]
    #: The argument whose donated buffer each result overwrites, or -1.
    aliases: tuple[int, ...]
    #: Pairs (op, other) of ops whose factors have the same names: the ``yield`` and the ``carry``
    #: of a value that a loop carries, the ``return`` of a result and the argument it overwrites.
    ties: tuple[tuple[int, int], ...]
    #: The number of runs of each op: the product of the trip counts of the loops around it.
    repeats: tuple[int, ...]
    #: Names of values: all in fact bases, those of ``checkpoint_name`` in JAX functions.
    labels: Mapping[int, str] = dataclasses.field(default_factory=dict, repr=False)
    #: Shardings in the program, by op: its sharding constraints, and the shardings of its
    #: arguments.  Mesh axes per dimension; ``None`` for an open dimension.
    constraints: Mapping[int, tuple[tuple[str, ...] | None, ...]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    #: Annotations of shardings (``toast.split`` and others) by op, as JSON.
    annotations: Mapping[int, str] = dataclasses.field(default_factory=dict, repr=False)
    #: Values that the conditions of loops read, carried or from outside of the loop, each with the
    #: first ``carry`` of the loop; the conditions have no ops.
    condition_reads: tuple[tuple[int, int], ...] = dataclasses.field(default=(), repr=False)
    #: Uses in the program of a survey, as numbers of ops and of operands, in which a gradient uses
    #: the result of an operation before the result has the name of a residual.
    result_uses: frozenset[tuple[int, int]] = dataclasses.field(
        default=frozenset(), repr=False, compare=False
    )
    #: The decompositions of composites without a local form of their own, by signature.  Composites
    #: with one signature may have several.
    decompositions: Mapping[Signature, tuple[Program, ...]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    #: Whether it was read from a file, so that its names, sizes and depth are untrusted.
    foreign: bool = dataclasses.field(default=False, repr=False, compare=False)
    #: The platform that JAX lowered it for, such as ``cpu`` or ``tpu``; empty if unknown.
    platform: str = dataclasses.field(default="", repr=False, compare=False)
    #: What was padded in it (:mod:`toast.uneven`), and the digest of the program as it was given,
    #: before that and before :mod:`toast.frontend.shifts`; empty if it is this one.
    padding: tuple[PaddedDimension, ...] = dataclasses.field(default=(), repr=False, compare=False)
    #: The digest before padding and before shifts; empty if the program is as it was given.
    whole_digest: str = dataclasses.field(default="", repr=False, compare=False)
    #: The memory policy and the microbatches that it was traced with; ``None`` if none were asked
    #: for.
    memory: TracedMemory | None = dataclasses.field(default=None, repr=False, compare=False)
    #: The MLIR module of the program and the places of its ops in it, or its locations only.
    source: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self.ops):,} ops, {len(self.arguments):,} arguments>"

    def same_ops(self, other: Program) -> bool:
        """Whether the other program has the same ops, values and results under any name."""
        mine, theirs = (
            (
                program.signatures, program.ops, program.argument_values, program.result_values,
                program.ties, program.condition_reads, program.decompositions,
            )
            for program in (self, other)
        )  # fmt: skip
        return mine == theirs

    @property
    def traced(self) -> bool:
        """Whether it was traced in this process, and not read from a file."""
        return getattr(self.source, "calling", None) is not None

    def kind(self, op: int) -> str:
        """The kind of an op, such as ``dot_general``."""
        return self.signatures[self.ops[op].signature].kind

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """``[ops]`` the kind of each op."""
        kinds = [signature.kind for signature in self.signatures]
        return tuple([kinds[op.signature] for op in self.ops])

    @functools.cached_property
    def makers(self) -> tuple[int, ...]:
        """``[values]`` the op that defines each value."""
        return tuple([value.op for value in self.values])

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """``[values]`` the ops that use each value, in program order: one for each operand."""
        users: list[list[int]] = [[] for _ in self.values]
        for number, op in enumerate(self.ops):
            for value in op.operands:
                users[value].append(number)
        return tuple([tuple(ops) for ops in users])

    @functools.cached_property
    def elements(self) -> tuple[int, ...]:
        """``[values]`` the number of elements of each value."""
        return tuple([math.prod(value.type.shape) for value in self.values])

    @functools.cached_property
    def value_bytes(self) -> tuple[int, ...]:
        """``[values]`` the bytes of each value."""
        return tuple([n * size for n, size in zip(self.elements, self.element_bytes, strict=True)])

    @functools.cached_property
    def element_bytes(self) -> tuple[int, ...]:
        """``[values]`` the bytes of an element of each value."""
        dtypes = [value.type.dtype for value in self.values]
        known = {dtype: element_bytes(dtype) for dtype in {*dtypes}}
        return tuple([known[dtype] for dtype in dtypes])

    @functools.cached_property
    def most_dimensions(self) -> int:
        """The most dimensions of a value, at least 1."""
        return max([1, *(len(value.type.shape) for value in self.values)])

    def condition_runs(self, carry: int) -> int:
        """How often in a step the condition of the loop with the op ``carry`` runs.

        It runs once more than the body, which counts once if its trip count is unknown.
        """
        trips = self.signatures[self.ops[carry].signature].attribute("trip_count")
        return self.repeats[carry] * (1 + max(1, int(str(trips))))

    def location(self, op: int) -> Location:
        """The source location of an op; unknown for arguments, results and fact bases."""
        return Location() if self.source is None else self.source.location(op)

    @functools.cached_property
    def passes(self) -> tuple[Pass, ...]:
        """``[ops]`` the pass that each op belongs to."""
        paths = (self.location(op).path for op in range(len(self.ops)))
        return tuple(passes_of(zip(self.kinds, paths, strict=True)))

    @functools.cached_property
    def argument_values(self) -> tuple[int, ...]:
        """The value of each argument."""
        return tuple(self.ops[i].results[0] for i in range(len(self.arguments)))

    @functools.cached_property
    def result_values(self) -> tuple[int, ...]:
        """The value returned as each result."""
        first = len(self.ops) - len(self.results)
        return tuple(op.operands[0] for op in self.ops[first:])

    @functools.cached_property
    def donated(self) -> frozenset[int]:
        """The arguments whose buffer a result overwrites."""
        return frozenset(alias for alias in self.aliases if alias >= 0)

    @property
    def captured_arrays(self) -> tuple[Any, ...]:
        """The arrays that a traced function closes over, which are its last arguments."""
        return tuple(getattr(getattr(self.source, "calling", None), "captured", ()))

    @functools.cached_property
    def captured(self) -> dict[int, int]:
        """Bytes of each large constant, by op: an array that the function of a file closed over.

        XLA puts them whole into the program of every device.
        """
        known = [bool(signature.attribute("captured")) for signature in self.signatures]
        types = {
            number: self.signatures[op.signature].results[0]
            for number, op in enumerate(self.ops)
            if known[op.signature]
        }
        return {op: math.prod(t.shape) * element_bytes(t.dtype) for op, t in types.items()}

    @property
    def origin_digest(self) -> str:
        """The :attr:`digest` of the program as it was given, before padding and shifts."""
        return self.whole_digest or self.digest

    @functools.cached_property
    def digest(self) -> str:
        """A hash of ops, types, paths and platform, without source lines and the program's name.

        The platform is left out if it is unknown or ``cpu``.
        """
        content = (
            self.signatures, self.ops, self.arguments, self.results, self.aliases, self.ties,
            self.repeats, sorted(self.labels.items()), sorted(self.constraints.items()),
            *([sorted(self.annotations.items())] if self.annotations else []),
            *([self.platform] if self.platform not in ("", "cpu") else []),
        )  # fmt: skip
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @functools.cached_property
    def value_names(self) -> dict[int, str]:
        """Unique names of values: those of arguments, labels and results.

        A label that several values have is not used.
        """
        count = collections.Counter(self.labels.values())
        named = [
            *zip(self.argument_values, self.arguments, strict=True),
            *((value, name) for value, name in self.labels.items() if count[name] == 1),
            *zip(self.result_values, self.results, strict=True),
        ]
        names: dict[int, str] = {}
        used: set[str] = set()
        for value, name in named:
            if value not in names and name not in used:
                names[value] = name
                used.add(name)
        return names

    def describe(self, op: int) -> str:
        """The description of an op in messages: ``dot_general f32[8,4] at model.py:12 jit(f)/dot``.

        That of a composite includes its name, that of a custom call its target,
        ``custom_call @mystery f32[8,4] at ...``, and the name of its kernel if it has one:
        ``custom_call @tpu_custom_call (my_kernel) ...``.
        """
        types = ", ".join(str(self.values[v].type) for v in self.ops[op].results)
        signature = self.signatures[self.ops[op].signature]
        named = "name" if signature.kind == "composite" else "call_target_name"
        target, kernel = map(signature.attribute, (named, "kernel_name"))
        suffix = f" @{target}" * bool(target) + f" ({kernel})" * bool(kernel)
        return f"{self.kind(op)}{suffix} {types} at {self.location(op)}"


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """``names``, made unique: a second ``x`` becomes ``x (2)``."""
    unique: dict[str, None] = {}
    for name in names:
        number, candidate = 2, name
        while candidate in unique:
            candidate, number = f"{name} ({number})", number + 1
        unique[candidate] = None
    return tuple(unique)


class Builder:
    """Builds a program: collects ops in program order."""

    def __init__(self) -> None:
        self._signatures: dict[Signature, int] = {}
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._ties: list[tuple[int, int]] = []
        self._repeats: list[int] = []

    @property
    def next_op(self) -> int:
        """The index of the next op."""
        return len(self._ops)

    @property
    def next_value(self) -> int:
        """The index of the next value."""
        return len(self._values)

    def type(self, value: int) -> TensorType:
        """The type of an already defined value."""
        return self._values[value].type

    def signature(self, op: int) -> Signature:
        """The signature of an already defined op."""
        number = self._ops[op].signature
        return next(itertools.islice(self._signatures, number, None))

    def add(
        self,
        kind: str,
        operands: Sequence[int],
        results: Sequence[TensorType],
        attributes: tuple[tuple[str, Attribute], ...] = (),
        *,
        repeats: int = 1,
    ) -> tuple[int, ...]:
        """Appends an op.

        :param kind: the kind, such as ``dot_general``.
        :param operands: the values that it uses.
        :param results: the types of the values that it defines.
        :param attributes: names and values, sorted by name.
        :param repeats: the number of times it runs.
        :returns: the values that it defines.
        """
        signature = Signature(
            kind, attributes, tuple(self._values[v].type for v in operands), tuple(results)
        )
        number = self._signatures.setdefault(signature, len(self._signatures))
        first = len(self._values)
        self._values.extend(
            Value(type_, len(self._ops), index) for index, type_ in enumerate(results)
        )
        values = tuple(range(first, len(self._values)))
        self._ops.append(Op(number, tuple(operands), values))
        self._repeats.append(repeats)
        return values

    def tie(self, op: int, other: int) -> None:
        """Gives the factors of ``op`` the names of the factors of the earlier op ``other``."""
        self._ties.append((op, other))

    def build(
        self,
        name: str,
        arguments: Sequence[str],
        results: Sequence[str],
        aliases: Sequence[int],
        *,
        labels: Mapping[int, str] | None = None,
        constraints: Mapping[int, tuple[tuple[str, ...] | None, ...]] | None = None,
        annotations: Mapping[int, str] | None = None,
        condition_reads: Sequence[tuple[int, int]] = (),
        result_uses: Iterable[tuple[int, int]] = (),
        decompositions: Mapping[Signature, tuple[Program, ...]] | None = None,
        source: Any = None,
        foreign: bool = False,
    ) -> Program:
        """The program.  Results that overwrite arguments are tied to them.

        Names that are not unique get a suffix; the parameters are fields of :class:`Program`.
        """
        first = len(self._ops) - len(results)
        ties = [(first + j, alias) for j, alias in enumerate(aliases) if alias >= 0]
        return Program(
            name=name,
            signatures=tuple(self._signatures),
            ops=tuple(self._ops),
            values=tuple(self._values),
            arguments=_distinct(arguments),
            results=_distinct(results),
            aliases=tuple(aliases),
            ties=(*self._ties, *ties),
            repeats=tuple(self._repeats),
            labels=labels or {},
            constraints=constraints or {},
            annotations=annotations or {},
            condition_reads=tuple(condition_reads),
            result_uses=frozenset(result_uses),
            decompositions=decompositions or {},
            foreign=foreign,
            source=source,
        )
