"""Checks plain data (of JSON or TOML) against types.  Errors name the place in one line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec

_Type = TypeVar("_Type")

#: Characters of a value that messages show.
_SHOWN = 40


#: The words of messages for the types that msgspec names.
_WORDS = {
    "float": "a number", "int": "a whole number", "str": "text", "bool": "true or false",
    "object": "an object", "array": "a list",
}  # fmt: skip


@dataclasses.dataclass
class Misfit(Exception):
    """Data that does not fit its type."""

    #: The place, the value there, and what was expected.
    text: str
    #: Keys and indices of the value; for a missing or unknown key, those of its object.
    place: tuple[str | int, ...] = ()
    missing_key: str = ""
    unknown_key: str = ""

    def __str__(self) -> str:
        return self.text


def checked(data: Any, type_: type[_Type]) -> _Type:
    """``data`` (of JSON or TOML) as ``type_``, a :class:`msgspec.Struct`.

    Raises :class:`Misfit`: ``in 'after', 'peak_bytes', -1: expected a number >= 0.0``.
    """
    try:
        return msgspec.convert(data, type_)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), data, type_) from None
    except RecursionError:
        raise Misfit("it is nested too deeply") from None


def kind_text(value: Any) -> str:
    """A short name of a JSON value for messages."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    try:
        return repr(value)[:_SHOWN]
    except ValueError:  # Python does not write integers of thousands of digits
        return "a number"


def _misfit(message: str, data: Any, type_: Any) -> Misfit:
    """A message of msgspec as a misfit: with all keys of the place, and the value there."""
    problem, _, where = message.partition(" - at ")
    place: list[Any] = []
    value, has_place = data, True
    for key, index, unnamed in re.findall(
        r"\.([^.\[\]`]+)|\[(\d+)\]|(\[\.\.\.\])", where.rpartition("$")[2]
    ):
        if unnamed and not isinstance(value, Mapping):  # an element of a list
            has_place = False
            break
        if unnamed:
            step = _bad_key(data, place, [*value], type_, message)
        else:
            step = int(index) if index else key
        place.append(step)
        value = value[step]
    missing = re.fullmatch(r"Object missing required field `(.+)`", problem)
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", problem, re.DOTALL)
    if missing:
        problem = f"no key '{missing[1]}'"
    elif unknown:
        problem = f"unknown key {unknown[1][:_SHOWN]!r}"
    else:
        problem = problem[:1].lower() + problem[1:].partition(", got ")[0]
        if "matching regex" in problem and (title := _title(type_, place)):
            problem = f"expected {title}"
        for name, words in _WORDS.items():
            problem = problem.replace(f"`{name}`", words)
        problem = problem.replace("`", "")
        if where.startswith("`key`"):
            problem = f"a key: {problem}"
        elif has_place:
            problem = f"{kind_text(value)}: {problem}"
    keys = ", ".join(repr(str(step)[:_SHOWN]) for step in place)
    return Misfit(
        f"in {keys}, {problem}" if keys else problem,
        tuple(place),
        missing[1] if missing else "",
        unknown[1] if unknown else "",
    )


def _title(type_: Any, place: list[Any]) -> str:
    """The title of the type at ``place``, such as ``a printable text``; empty if it has none."""
    hint: Any = type_
    for key in place:
        fields = get_type_hints(hint, include_extras=True) if isinstance(hint, type) else {}
        hint = fields.get(key)
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.title:
            return meta.title
    return ""


def _bad_key(data: Any, place: list[Any], keys: list[Any], type_: Any, message: str) -> Any:
    """The key whose value does not fit, found by bisection: msgspec does not name it."""
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        is_in_half = _message(_with_keys(data, place, half), type_) == message
        keys = half if is_in_half else keys[len(half) :]
    return keys[0]


def _message(data: Any, type_: Any) -> str:
    try:
        msgspec.convert(data, type_)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _with_keys(data: Any, place: list[Any], keys: list[Any]) -> Any:
    """A copy of ``data`` in which the object at ``place`` has only ``keys``."""
    if not place:
        return {key: data[key] for key in keys}
    changed: Any = dict(data) if isinstance(data, Mapping) else [*data]
    changed[place[0]] = _with_keys(data[place[0]], place[1:], keys)
    return changed
