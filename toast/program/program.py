"""The program as every later stage sees it: flat SSA over ops, values and locations.

Arguments and returned values are ops too (kinds ``argument`` and ``return``), so that every
value has a defining op and every use is an operand; a dimension name is then always a pair
(op, factor) and no later stage needs a special case (paper, section 3.1).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

#: What an op's attribute may hold once it has left MLIR.
Attribute = int | str | tuple[int | str, ...]

#: Size of an element in bytes by StableHLO element type; sub-byte types are rounded up by XLA.
BYTES = {
    "i1": 1, "pred": 1, "i2": 1, "i4": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8,
    "ui2": 1, "ui4": 1, "ui8": 1, "ui16": 2, "ui32": 4, "ui64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "token": 0,
}  # fmt: skip


def element_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``; the 8-bit (and smaller) floats all take one."""
    return BYTES.get(dtype, 1 if dtype.startswith("f") else 4)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and StableHLO element type (``f32``, ``bf16``, ``i1`` ...) of a value."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Where an op comes from: the JAX primitive path and the user's innermost source line."""

    path: str = ""
    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def shown_file(self) -> str:
        """The file as people are told: below the current folder, as seen from there."""
        return self.file.removeprefix(os.path.join(os.getcwd(), ""))

    def __str__(self) -> str:
        place = f"{self.shown_file}:{self.line}" if self.file else ""
        return " ".join(part for part in (place, self.path) if part) or "unknown location"


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """All that an op's sharding rule may look at; equal signatures share one solved rule."""

    kind: str
    attributes: tuple[tuple[str, Attribute], ...]
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    def attribute(self, name: str) -> Attribute | None:
        """The attribute called ``name``, or ``None``."""
        return dict(self.attributes).get(name)


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One op: its signature and the values it uses and defines, as indices into ``values``."""

    signature: int
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One SSA value: its type, the op that defines it, and which of the op's results it is."""

    type: TensorType
    op: int
    result: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A whole function, calls inlined, in program order.

    ``ops`` starts with one ``argument`` op per argument and ends with one ``return`` op per
    result, so argument ``i`` is op ``i`` and result ``j`` is op ``len(ops) - len(results) + j``.
    """

    name: str
    signatures: tuple[Signature, ...]
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    #: Argument paths, e.g. ``params['layers'][3]['wq']``.
    arguments: tuple[str, ...]
    #: Result paths, e.g. ``result[0]['wq']``.
    results: tuple[str, ...]
    #: For each result the argument whose (donated) buffer it overwrites, or -1.
    aliases: tuple[int, ...]
    #: Pairs (op, other) of ops whose factors are the same names: the ``yield`` of a value carried
    #: round a loop and its ``carry``, the ``return`` of a result and the argument it overwrites.
    ties: tuple[tuple[int, int], ...]
    #: How often each op runs: the product of the trip counts of the loops around it.
    repeats: tuple[int, ...]
    #: Names of values: all in fact bases; in JAX functions those that ``checkpoint_name`` gives.
    labels: Mapping[int, str] = dataclasses.field(default_factory=dict, repr=False)
    #: What the program itself demands, by op: its sharding constraints, and shardings of its
    #: arguments.  Mesh axes per dimension, ``None`` for a dimension that is left open.
    constraints: Mapping[int, tuple[tuple[str, ...] | None, ...]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    #: Whether a file says what it is: its names, sizes and depth are a stranger's.
    foreign: bool = dataclasses.field(default=False, repr=False, compare=False)
    #: The MLIR this program was read from, with the handles needed to write a plan back.
    source: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self.ops):,} ops, {len(self.arguments):,} arguments>"

    @property
    def traced(self) -> bool:
        """Whether a function was traced in this process; else it is what some file says."""
        return getattr(self.source, "calling", None) is not None

    def kind(self, op: int) -> str:
        """The kind of an op, e.g. ``dot_general``."""
        return self.signatures[self.ops[op].signature].kind

    def location(self, op: int) -> Location:
        """Source location of an op; unknown for arguments, results and fact bases."""
        return Location() if self.source is None else self.source.location(op)

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
        """Arguments whose buffer some result overwrites."""
        return frozenset(alias for alias in self.aliases if alias >= 0)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of ops, types and paths; source lines and the program's name do not count."""
        content = (
            self.signatures, self.ops, self.arguments, self.results, self.aliases, self.ties,
            self.repeats, sorted(self.labels.items()), sorted(self.constraints.items()),
        )  # fmt: skip
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @functools.cached_property
    def value_names(self) -> dict[int, str]:
        """A name for each value that is an argument, has one of its own, or is a result.

        No two values have the same; a name that several would have is that of none.
        """
        count = collections.Counter(self.labels.values())
        named = [
            *zip(self.argument_values, self.arguments, strict=True),
            *((value, name) for value, name in self.labels.items() if count[name] == 1),
            *zip(self.result_values, self.results, strict=True),
        ]
        found: dict[int, str] = {}
        taken: set[str] = set()
        for value, name in named:
            if value not in found and name not in taken:
                found[value] = name
                taken.add(name)
        return found

    def describe(self, op: int) -> str:
        """``dot_general f32[8,4] at model.py:12 jit(f)/dot``: how messages name an op.

        A custom call is named with its target: ``custom_call @mystery f32[8,4] at ...``.
        """
        types = ", ".join(str(self.values[v].type) for v in self.ops[op].results)
        target = self.signatures[self.ops[op].signature].attribute("call_target_name")
        called = f" @{target}" if target else ""
        return f"{self.kind(op)}{called} {types} at {self.location(op)}"


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names of which no two are the same: a second ``x`` is ``x (2)``."""
    found: dict[str, None] = {}
    for name in names:
        number, unique = 2, name
        while unique in found:
            unique, number = f"{name} ({number})", number + 1
        found[unique] = None
    return tuple(found)


class Builder:
    """Collects ops in program order and interns their signatures."""

    def __init__(self) -> None:
        self._signatures: dict[Signature, int] = {}
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._ties: list[tuple[int, int]] = []
        self._repeats: list[int] = []

    @property
    def next_op(self) -> int:
        """The index the next added op will get."""
        return len(self._ops)

    @property
    def next_value(self) -> int:
        """The index the next defined value will get."""
        return len(self._values)

    def type(self, value: int) -> TensorType:
        """The type of an already defined value."""
        return self._values[value].type

    def add(
        self,
        kind: str,
        operands: Sequence[int],
        results: Sequence[TensorType],
        attributes: tuple[tuple[str, Attribute], ...] = (),
        *,
        repeats: int = 1,
    ) -> tuple[int, ...]:
        """Append an op that runs ``repeats`` times; returns the values it defines."""
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
        """Make the factors of ``op`` the same names as those of the earlier op ``other``."""
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
        source: Any = None,
        foreign: bool = False,
    ) -> Program:
        """The finished program; results that overwrite arguments are tied to them."""
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
            foreign=foreign,
            source=source,
        )
