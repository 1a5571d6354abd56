"""Texts for dimensions, and the dimensions that texts name.

``params['wq']:0`` is dimension 0 of an argument with JAX's path; ``params.wq:0`` is the same.
Dimensions of results (``result[0]:1``), of values with names, and of other values by number
(``%12:0``) are written in the same way.  Negative numbers count from the last dimension.
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

#: Maximum number of similar names in a message.
_NEAR = 3


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One dimension of a value."""

    #: The number of the value.
    value: int
    #: The number of the dimension, from 0.
    d: int
    #: The text that :func:`find_dimension` accepts: ``params['wq']:0``, ``%12:0``.
    label: str
    #: The type of the value: ``f32[8,4]``.
    type: str

    def __str__(self) -> str:
        return f"{self.label} {self.type}"


def dimension_of(program: Program, value: int, d: int) -> Dimension:
    """Dimension ``d`` of a value, given by its number."""
    label = f"{value_label(program, value)}:{d}"
    return Dimension(value, d, label, str(program.values[value].type))


def value_label(program: Program, value: int) -> str:
    """The label of a value: its path as an argument or result, its name, or ``%12``."""
    return program.value_names.get(value, f"%{value}")


def find_dimension(program: Program, text: str) -> Dimension:
    """The dimension that ``text`` names, such as ``params.layers[0].wq:1``, ``%12:0`` or ``x:-1``.

    Raises :class:`toast.errors.ExplainError` if there is no such value or dimension.
    """
    name, number = _parted(_text(text))
    value = find_value(program, name)
    type_ = program.values[value].type
    rank = len(type_.shape)
    if number is None or not -rank <= int(number) < rank:
        has = f"dimensions 0 to {rank - 1}" if rank > 1 else "dimension 0" if rank else "none"
        what = "no dimension" if number is None else f"no dimension {int(number)}"
        example = f"; write {name}:0" if rank and number is None else ""
        raise ExplainError(f"{text}: {what}: {name} is {type_} and has {has}{example}")
    return dimension_of(program, value, int(number) % rank)


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise ExplainError(f"{name!r}: not a name; use a string such as x or params['w']")
    return name


def _parted(text: str) -> tuple[str, str | None]:
    """The name and the number in ``NAME:D``; the number is None if it is missing."""
    name, colon, number = text.rpartition(":")
    if colon and re.fullmatch(r"\s*-?\d+\s*", number):
        return name.strip(), number
    # A name may contain colons.
    named = name if colon and re.fullmatch(r"\s*\w*\s*", number) else text
    return named.strip(), None


def find_value(program: Program, name: str) -> int:
    """The number of the value that ``name`` names: an argument, a named value, a result, ``%12``.

    Raises :class:`toast.errors.ExplainError` if there is no such value, or more than one.
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
    """The number of the argument that ``name`` names, written as for :func:`find_value`.

    Raises :class:`toast.errors.ExplainError` if there is no such argument, or more than one.
    """
    arguments = [*zip(program.argument_values, program.arguments, strict=True)]
    if re.fullmatch(r"%\d+", _text(name)) and int(name[1:]) in program.argument_values:
        return program.argument_values.index(int(name[1:]))
    return program.argument_values.index(_find(program, name, "argument", (arguments,)))


def _find(
    program: Program, name: str, what: str, kinds: Sequence[Sequence[tuple[int, str]]]
) -> int:
    """The value with a name, from the first of ``kinds`` that has it."""
    known = [(value, label) for kind in kinds for value, label in kind]
    for wanted in (lambda label: label == name, lambda label: keys(label) == keys(name)):
        for kind in kinds:
            matching = {value: label for value, label in kind if wanted(label)}
            if len(matching) > 1:
                several = listed([f"%{v} ({program.values[v].type})" for v in matching], _NEAR)
                raise ExplainError(f"{name}: several values have this name; use one of {several}")
            if matching:
                return next(iter(matching))
    raise ExplainError(f"{name}: no such {what}; {_hint(name, known)}")


def _hint(name: str, known: list[tuple[int, str]]) -> str:
    labels = {".".join(keys(label)): label for _, label in known}
    near = difflib.get_close_matches(".".join(keys(name)), labels, _NEAR)
    if near:
        return f"did you mean {' or '.join(labels[label] for label in near)}?"
    return f"there are {listed([label for _, label in known], _NEAR)}"
