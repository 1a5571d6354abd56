"""The JSON files of commands: what they print, as plain data."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from toast.errors import PlanError
from toast.files import write_all


def plain(value: Any) -> Any:
    """``value`` for JSON: dataclasses are objects, infinity and NaN null, others text."""
    if isinstance(value, bool | int | str) or value is None:
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): plain(v) for key, v in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(each) for each in value]
    return str(value)


def write_json(path: pathlib.Path | None, **data: Any) -> None:
    """Write ``data`` and the version of the format to the file ``path``, if there is one.

    Raises :class:`toast.errors.PlanError` if it cannot be written; no partial file remains.
    """
    if path is not None:
        text = json.dumps({"version": 1, **plain(data)}, indent=2, allow_nan=False)
        write_all({path: text + "\n"}, PlanError)


__all__ = ["plain", "write_json"]
