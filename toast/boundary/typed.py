"""Plain data checked against types; what does not fit is named by its place, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

_Type = TypeVar("_Type")

#: Characters of a value that messages show.
_SHOWN = 40


#: What msgspec calls types.
_WORDS = {
    "float": "a number", "int": "a whole number", "str": "text", "bool": "true or false",
    "object": "an object", "array": "a list",
}  # fmt: skip


class Misfit(Exception):
    """What of some data does not fit its type; the text says where, and what is there."""


def checked(data: Any, type_: type[_Type]) -> _Type:
    """``data`` (of JSON or TOML) as ``type_``, a :class:`msgspec.Struct`.

    Raises :class:`Misfit`: ``in 'after', 'peak_bytes', -1: expected a number >= 0.0``.
    """
    try:
        return msgspec.convert(data, type_)
    except msgspec.ValidationError as error:
        raise Misfit(_text(str(error), data, type_)) from None
    except RecursionError:
        raise Misfit("it is nested too deeply") from None


def kind_text(value: Any) -> str:
    """How messages call what JSON has: short, whatever it is."""
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else repr(value)[:_SHOWN]


def _text(message: str, data: Any, type_: Any) -> str:
    """Msgspec's message with the keys that lead to what it is about, and that itself."""
    what, _, where = message.partition(" - at ")
    place: list[Any] = []
    value, spoiled = data, True
    for key, index, unnamed in re.findall(
        r"\.([^.\[\]`]+)|\[(\d+)\]|(\[\.\.\.\])", where.rpartition("$")[2]
    ):
        if unnamed and isinstance(value, Mapping):
            step = _culprit(data, place, [*value], type_, message)
        elif unnamed:
            spoiled = False
            break
        else:
            step = int(index) if index else key
        place.append(step)
        value = value[step]
    if found := re.fullmatch(r"Object missing required field `(.+)`", what):
        what, spoiled = f"no key '{found[1]}'", False
    elif found := re.fullmatch(r"Object contains unknown field `(.+)`", what, re.DOTALL):
        what, spoiled = f"unknown key {found[1][:_SHOWN]!r}", False
    else:
        what = what[:1].lower() + what[1:].partition(", got ")[0]
        for name, words in _WORDS.items():
            what = what.replace(f"`{name}`", words)
        what = what.replace("`", "")
    if where.startswith("`key`"):
        what, spoiled = f"a key: {what}", False
    if spoiled:
        what = f"{kind_text(value)}: {what}"
    keys = ", ".join(repr(str(step)[:_SHOWN]) for step in place)
    return f"in {keys}, {what}" if keys else what


def _culprit(data: Any, place: list[Any], keys: list[Any], type_: Any, message: str) -> Any:
    """The key of an object, of which msgspec names none, whose value does not fit: by bisection."""
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        keys = (
            half
            if _message(_with_keys(data, place, half), type_) == message
            else (keys[len(half) :])
        )
    return keys[0]


def _message(data: Any, type_: Any) -> str:
    try:
        msgspec.convert(data, type_)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _with_keys(data: Any, place: list[Any], keys: list[Any]) -> Any:
    """A copy of data whose object at a place has some keys only."""
    if not place:
        return {key: data[key] for key in keys}
    changed: Any = dict(data) if isinstance(data, Mapping) else [*data]
    changed[place[0]] = _with_keys(data[place[0]], place[1:], keys)
    return changed
