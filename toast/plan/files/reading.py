"""A plan's file, or its data, read; what is damaged is said by its place."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from toast.apply import Spec
from toast.errors import PlanError, ToastError
from toast.hardware import COLLECTIVES, Mesh
from toast.plan.files.saved import (
    VERSION,
    Held,
    OpKey,
    Origin,
    Part,
    Run,
    Saved,
    SavedAction,
    SavedArgument,
)
from toast.plan.files.writing import plan_data
from toast.plan.prediction import Collective, Prediction
from toast.space import Constraints

if TYPE_CHECKING:
    from toast.plan.plan import Plan


def read(plan: Plan | Saved | Mapping[str, Any] | str | pathlib.Path) -> Saved:
    """A plan, its data or its JSON file, as a file says it; what was read already, as it is.

    Raises :class:`toast.errors.PlanError` for a file that cannot be read, is no plan, or was
    written by a newer TOAST.
    """
    if isinstance(plan, Saved):
        return plan
    if isinstance(plan, str | pathlib.Path):
        name = str(plan)
        data = _loaded(plan)
    else:
        if not isinstance(plan, Mapping) and not hasattr(plan, "analysis"):
            raise PlanError(f"{plan!r} is no plan; {_GIVE}", shell=_GIVE_IN_SHELL)
        data = plan if isinstance(plan, Mapping) else plan_data(plan)
        name = str(data.get("program", "the data"))
    if not isinstance(data, Mapping):
        raise _no_plan(name, f"{_kind(data)} in place of an object")
    if "version" not in data:
        raise _no_plan(name, "no key 'version'")
    version = data["version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _no_plan(name, f"version {version!r} is no positive whole number")
    if version > VERSION:
        raise PlanError(
            f"{name}: version {version} of plans was written by a newer TOAST, this one reads up "
            f"to {VERSION}; update toast-partitioner, or make the plan anew"
        )
    try:
        return _saved(name, data)
    except _Damage as damage:
        raise _no_plan(name, str(damage)) from None


def _no_plan(name: str, why: str) -> PlanError:
    return PlanError(f"{name} is no plan: {why}; {_GIVE}", shell=_GIVE_IN_SHELL)


_GIVE, _GIVE_IN_SHELL = "give what Plan.to_json wrote", "give what toast plan --json wrote"


def _loaded(path: str | pathlib.Path) -> Any:
    """The JSON of a file, its texts without control characters: they are printed."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        data = json.loads(text)
        return _printable(data) if _MAY_CONTROL.search(text) else data
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _no_plan(str(path), f"no JSON at {where} ({error.msg})") from None
    except UnicodeDecodeError:
        raise _no_plan(str(path), "no UTF-8 text") from None
    except (ValueError, RecursionError):
        raise _no_plan(str(path), "no JSON that can be read") from None


#: What terminals take for commands.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


#: JSON that may have such: they are escaped there, or above ASCII.
_MAY_CONTROL = re.compile(r"\\[bfru]|[\x7f-\x9f]")


def _printable(data: Any) -> Any:
    """JSON data with control characters written out, as Python does."""
    if isinstance(data, str):
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", data)
    if isinstance(data, dict):
        return {_printable(key): _printable(value) for key, value in data.items()}
    return [*map(_printable, data)] if isinstance(data, list) else data


class _Damage(Exception):
    """What is wrong in a file; the text says where."""


_Read = TypeVar("_Read")


def _at(given: Any, key: str, make: Callable[[Any], _Read]) -> _Read:
    """What ``make`` makes of an entry; raises :class:`_Damage`, which names the keys to it."""
    if not isinstance(given, Mapping):
        raise _Damage(f"{_kind(given)} in place of an object with key '{key}'")
    if key not in given:
        raise _Damage(f"no key '{key}'")
    return _within(key, given[key], make)


def _within(key: str, value: Any, make: Callable[[Any], _Read]) -> _Read:
    try:
        return make(value)
    except _Damage as damage:
        inner = str(damage)
        raise _Damage(f"in '{key}', {inner.removeprefix('in ')}") from None
    except ToastError as error:
        raise _Damage(f"in '{key}', {str(error).partition(';')[0]}") from None
    except KeyError as error:
        raise _Damage(f"in '{key}', no key {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        shown = repr(value) if not isinstance(value, Mapping | list) else _kind(value)
        raise _Damage(f"in '{key}', {shown[:40]} is not what a plan has there") from None


def _kind(value: Any) -> str:
    """How messages call what JSON has."""
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list) else repr(value)[:40]


def _entries(given: Any, make: Callable[[Any], _Read]) -> tuple[_Read, ...]:
    """What ``make`` makes of the entries of a list."""
    if not isinstance(given, list | tuple):
        raise TypeError("no list")
    return tuple(_within(str(number), entry, make) for number, entry in enumerate(given))


def _named(given: Any, make: Callable[[Any], _Read]) -> dict[str, _Read]:
    """What ``make`` makes of the entries of an object."""
    return {str(key): _within(str(key), entry, make) for key, entry in given.items()}


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError("no text")
    return given


def _flag(given: Any) -> bool:
    if not isinstance(given, bool):
        raise TypeError("neither true nor false")
    return given


def _whole(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError("no whole number")
    return given


def _count(given: Any) -> int:
    if _whole(given) < 0:
        raise _Damage(f"{given!r} is negative")
    return int(given)


def _one_of(*known: str) -> Callable[[Any], str]:
    """A text that is one of those."""

    def make(given: Any) -> str:
        if given not in known:
            raise _Damage(f"{given!r} is none of {', '.join(known)}")
        return _text(given)

    return make


def _amount(given: Any) -> float:
    """Seconds, bytes or a cost."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError("no number")
    amount = float(given)
    if not 0 <= amount < math.inf:
        raise _Damage(f"{given!r} is no amount: it is negative or not finite")
    return amount


def _saved(name: str, data: Mapping[str, Any]) -> Saved:
    old = _at(data, "version", int) == 1

    def of(key: str, make: Callable[[Any], _Read]) -> _Read:
        return _at(data, key, make)

    def later(key: str, make: Callable[[Any], _Read], before: _Read) -> _Read:
        """What version 1 did not have."""
        return before if old else of(key, make)

    order = of("device_order", _texts)
    return Saved(
        name=name,
        program=of("program", _text),
        digest=later("program_hash", _hash, ""),
        origin=_within("origin", data.get("origin"), _origin),
        method=of("method", _text),
        note=of("note", _text),
        mesh=of("mesh", lambda axes: Mesh(
            tuple((axis, _whole(size)) for axis, size in axes.items()), order
        )),
        hardware=of("hardware", _text),
        hardware_digest=_within("hardware_hash", data.get("hardware_hash", ""), _text),
        memory_bytes=of("memory_bytes", _amount),
        overlap=later("overlap", _one_of("none", "partial", "full"), "partial"),
        resolution=later("resolution", _one_of("compatible", "independent"), "compatible"),
        constraints=later("constraints", _constraints, Constraints()),
        single=later("op_classes", _one_of("alike", "single"), "alike") == "single",
        arguments=of("arguments", lambda given: _named(given, _argument)),
        results=of("results", lambda given: _named(given, _spec)),
        actions=of("actions", lambda given: _entries(given, lambda entry: _action(entry, old))),
        replayed=data["method"] == "toast" if old else of("replayed", _flag),
        ops=later("values", lambda given: dict(_entries(given, _runs)), {}),
        cost=of("cost", _amount),
        seed=of("seed", _count),
        before=of("before", _prediction),
        after=of("after", _prediction),
        collectives=of("collectives", lambda given: _entries(given, _transfer)),
    )  # fmt: skip


def _origin(given: Any) -> Origin | None:
    return None if given is None else Origin(
        target=_at(given, "target", _text),
        sizes=_at(given, "sizes", lambda sizes: _named(sizes, _whole)),
        shapes=_at(given, "shapes", _texts),
        rules=_at(given, "rules", _texts),
        hardware=_at(given, "hardware", _text),
    )  # fmt: skip


def _argument(entry: Mapping[str, Any]) -> SavedArgument:
    return SavedArgument(
        _at(entry, "sharding", _spec),
        _at(entry, "shape", lambda shape: _entries(shape, _count)) if "shape" in entry else None,
        _within("dtype", entry.get("dtype", ""), _text),
    )


def _runs(entry: Mapping[str, Any]) -> tuple[OpKey, tuple[Run, ...]]:
    return _key(entry), _at(entry, "shardings", lambda runs: _entries(runs, _run))


def _run(run: Mapping[str, Any]) -> Run:
    return Run(_at(run, "count", _some), _at(run, "axes", _held), _at(run, "specs", _specs))


def _transfer(entry: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Callable[[Any], Any]] = {
        "kind": _one_of(*COLLECTIVES), "axes": _axes, "bytes": _amount, "count": _amount,
        "algorithm": _text, "seconds": _amount,
    }  # fmt: skip
    return {key: _at(entry, key, make) for key, make in made.items()}


def _bit(given: Any) -> int:
    if _whole(given) not in (0, 1):
        raise _Damage(f"{given!r} is neither 0 nor 1")
    return int(given)


def _hash(given: Any) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", _text(given)):
        raise _Damage(f"{given[:40]!r} is no hash of a program")
    return str(given)


def _texts(given: Sequence[Any]) -> tuple[str, ...]:
    if not isinstance(given, list | tuple):
        raise TypeError("no list")
    return tuple(map(_text, given))


def _spec(given: Sequence[Sequence[str]]) -> Spec:
    if not isinstance(given, list | tuple):
        raise TypeError("no list")
    return tuple(map(_axes, given))


def _some(given: Any) -> int:
    if not _count(given):
        raise _Damage("there are none")
    return int(given)


def _specs(given: Any) -> tuple[str, ...]:
    specs = _texts(given)
    for spec in specs:
        if not (spec.startswith("P(") and spec.endswith(")")):
            raise _Damage(f"{spec[:40]!r} is no sharding")
    return specs


def _axes(given: Any) -> tuple[str, ...]:
    axes = _texts(given)
    for axis in axes:
        if not _AXIS.fullmatch(axis):
            raise _Damage(f"{axis!r} is no name of a mesh axis")
    return axes


_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _held(given: Mapping[str, Any]) -> Held:
    return tuple(zip(_axes([*given]), map(_text, given.values()), strict=True))


def _key(entry: Mapping[str, Any]) -> OpKey:
    def text(key: str) -> str:
        return _at(entry, key, _text)

    return OpKey(
        text("kind"), text("path"), text("file"), _at(entry, "line", _count), text("function"),
        text("label"),
    )  # fmt: skip


def _action(entry: Mapping[str, Any], old: bool) -> SavedAction:
    def part(given: Any) -> Part:
        if old:
            k, factor = given
            return Part(OpKey("", "", "", 0, "", ""), 0, 0, "", (int(k), int(factor)))
        k, factor = given["numbers"]
        return Part(
            _key(given), _at(given, "place", _count), _at(given, "of", _some),
            _at(given, "factor", _text), (_whole(k), _whole(factor)),
        )  # fmt: skip

    return SavedAction(
        dimensions=_at(entry, "dimensions", _texts),
        factors=_within("factors", entry.get("factors", ()), _texts),
        axis=_at(entry, "axis", _text),
        resolution=_at(entry, "resolution", lambda bits: _entries(bits, _bit)),
        color=_within("color", entry.get("color", -1), _whole),
        part=_at(entry, "part", lambda parts: _entries(parts, part)),
        fixed=_within("fixed", entry.get("fixed", False), _flag),
        reason=_at(entry, "reason", _text),
        after=_at(entry, "after", _prediction),
    )


def _prediction(given: Mapping[str, Any]) -> Prediction:
    fields = dataclasses.fields(Prediction)
    needed = {f.name for f in fields if f.default is dataclasses.MISSING} | set(given)
    return Prediction(
        **{
            field.name: _at(given, field.name, _amount)
            for field in fields if field.name in needed - {"collectives"}
        },
        collectives=_at(given, "collectives", lambda rows: _entries(rows, _collective)),
    )  # fmt: skip


def _collective(given: Mapping[str, Any]) -> Collective:
    return Collective(
        _at(given, "kind", _one_of(*COLLECTIVES)), _at(given, "count", _count),
        _at(given, "bytes", _amount), _at(given, "seconds", _amount),
    )  # fmt: skip


def _constraints(given: Mapping[str, Any]) -> Constraints:
    return Constraints(
        pin={pattern: _pin(spec) for pattern, spec in given["pin"].items()},
        forbid={pattern: list(_axes(axes)) for pattern, axes in given["forbid"].items()},
        fix={dimension: list(_axes(axes)) for dimension, axes in given["fix"].items()},
        keep=_flag(given["keep"]),
    )


def _pin(spec: Any) -> Any:
    from jax.sharding import PartitionSpec  # which plans without pins do without

    def entry(axes: Any) -> Any:
        return PartitionSpec.UNCONSTRAINED if axes is None else _axes(axes) or None

    if not isinstance(spec, list | tuple):
        raise TypeError("no list")
    return PartitionSpec(*map(entry, spec))
