"""Dimensions by name: what people write for them, and what they are shown as.

``params['wq']:0`` is dimension 0 of an argument, by its path as JAX writes it; ``params.wq:0`` is
the same.  Results (``result[0]:1``), values that the program names, and all others by number
(``%12:0``) have dimensions too; negative ones count from the last.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence

from toast.errors import ExplainError
from toast.paths import keys
from toast.program import Program
from toast.units import listed

#: Near names that a message offers.
_NEAR = 3


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension of a value."""

    value: int
    d: int
    #: For people, and found again by :func:`find_dimension`: ``params['wq']:0``, ``%12:0``.
    label: str
    #: Shape and element type of the value: ``f32[8,4]``.
    type: str

    def __str__(self) -> str:
        return f"{self.label} {self.type}"


def dimension_of(program: Program, value: int, d: int) -> Dimension:
    """Dimension ``d`` of a value."""
    label = f"{value_label(program, value)}:{d}"
    return Dimension(value, d, label, str(program.values[value].type))


def value_label(program: Program, value: int) -> str:
    """A value's path as an argument, its own name, its path as a result, or ``%12``."""
    return program.value_names.get(value, f"%{value}")


def find_dimension(program: Program, text: str) -> Dimension:
    """The dimension that ``text`` names, such as ``params.layers[0].wq:1``, ``%12:0`` or ``x:-1``.

    Raises :class:`toast.errors.ExplainError` where there is no such value or dimension.
    """
    name, found = _parted(_text(text))
    value = find_value(program, name)
    type_ = program.values[value].type
    rank = len(type_.shape)
    if found is None or not -rank <= int(found) < rank:
        has = f"dimensions 0 to {rank - 1}" if rank > 1 else "dimension 0" if rank else "none"
        what = "no dimension" if found is None else f"no dimension {int(found)}"
        example = f"; write {name}:0" if rank and found is None else ""
        raise ExplainError(f"{text}: {what}: {name} is {type_} and has {has}{example}")
    return dimension_of(program, value, int(found) % rank)


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise ExplainError(f"{name!r}: not a name; use a string such as x or params['w']")
    return name


def _parted(text: str) -> tuple[str, str | None]:
    """The name in ``NAME:D``, and the number; None where there is none."""
    name, colon, number = text.rpartition(":")
    if colon and re.fullmatch(r"\s*-?\d+\s*", number):
        return name.strip(), number
    # A name may have colons; they do not end it.
    named = name if colon and re.fullmatch(r"\s*\w*\s*", number) else text
    return named.strip(), None


def find_value(program: Program, name: str) -> int:
    """The value that ``name`` names: an argument, a value with a name, a result, or ``%12``.

    Raises :class:`toast.errors.ExplainError` where there is none, or are several.
    """
    if re.fullmatch(r"%\d+", _text(name)):
        if int(name[1:]) >= len(program.values):
            raise ExplainError(
                f"{name}: no such value; values are %0 to %{len(program.values) - 1}"
            )
        return int(name[1:])
    return _find(program, name, "argument, result or value", (
        [*zip(program.argument_values, program.arguments, strict=True)],
        [*program.labels.items()],
        [*zip(program.result_values, program.results, strict=True)],
    ))  # fmt: skip


def find_argument(program: Program, name: str) -> int:
    """The argument that ``name`` names, by number; names are as for :func:`find_value`.

    Raises :class:`toast.errors.ExplainError` where there is none, or are several.
    """
    arguments = [*zip(program.argument_values, program.arguments, strict=True)]
    if re.fullmatch(r"%\d+", _text(name)) and int(name[1:]) in program.argument_values:
        return program.argument_values.index(int(name[1:]))
    return program.argument_values.index(_find(program, name, "argument", (arguments,)))


def _find(
    program: Program, name: str, what: str, kinds: Sequence[Sequence[tuple[int, str]]]
) -> int:
    """The value with a name, of the first kind of values that has it."""
    known = [(value, label) for kind in kinds for value, label in kind]
    for wanted in (lambda label: label == name, lambda label: keys(label) == keys(name)):
        for kind in kinds:
            found = {value: label for value, label in kind if wanted(label)}
            if len(found) > 1:
                several = listed([f"%{v} ({program.values[v].type})" for v in found], _NEAR)
                raise ExplainError(f"{name}: several values have this name; use one of {several}")
            if found:
                return next(iter(found))
    raise ExplainError(f"{name}: no such {what}; {_hint(name, known)}")


def _hint(name: str, known: list[tuple[int, str]]) -> str:
    labels = {".".join(keys(label)): label for _, label in known}
    near = difflib.get_close_matches(".".join(keys(name)), labels, _NEAR)
    if near:
        return f"did you mean {' or '.join(labels[found] for found in near)}?"
    return f"there are {listed([label for _, label in known], _NEAR)}"
