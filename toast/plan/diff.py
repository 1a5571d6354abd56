"""The differences between two plans: settings, arguments, actions, values, predictions."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toast.plan.files import OpKey, Run, Saved, SavedAction, constraints_data, read
from toast.plan.labels import spec_text
from toast.plan.plan import Plan
from toast.plan.prediction import NumberChange, close, numbers
from toast.records import Record
from toast.space import Constraints
from toast.units import size_text


@dataclasses.dataclass(frozen=True)
class Change:
    """A difference between two plans as text; ``""`` if a plan does not have it."""

    #: What differs: a setting, the path of an argument, or an op.
    what: str
    #: As it is in the first plan.
    first: str
    #: As it is in the second plan.
    second: str


@dataclasses.dataclass(frozen=True)
class ActionChange:
    """An action that only one of the plans has, or has at another position."""

    #: The position in its plan, from 1.
    number: int
    #: The dimensions of arguments that it shards.
    dimensions: tuple[str, ...]
    #: The mesh axis.
    axis: str
    #: The resolution of conflicts: one bit per resolution group.
    resolution: tuple[int, ...]
    #: Whether it belongs to the second plan.
    second: bool


@dataclasses.dataclass(frozen=True)
class CollectiveChange:
    """A difference in the collectives of one kind over the same axes; values per device."""

    #: The name in StableHLO, such as ``all_gather``.
    kind: str
    #: The mesh axes that they run along.
    axes: tuple[str, ...]
    #: Their number in the first and in the second plan.
    count: tuple[float, float]
    #: Their bytes in the first and in the second plan.
    bytes: tuple[float, float]
    #: Their seconds in the first and in the second plan.
    seconds: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Difference(Record):
    """All differences between two plans, except seeds and search times."""

    #: The names of the plans in messages.
    names: tuple[str, str]
    #: Settings that differ, such as the mesh.
    settings: tuple[Change, ...]
    #: Shardings and types by path; ``""`` if a plan does not have the argument.
    arguments: tuple[Change, ...]
    #: Actions that only one of the plans has, or that come in another order.
    actions: tuple[ActionChange, ...]
    #: Values other than arguments, by their ops.
    values: tuple[Change, ...]
    #: Collectives that differ, by kind and axes.
    collectives: tuple[CollectiveChange, ...]
    #: Time and memory.
    numbers: tuple[NumberChange, ...]

    def __repr__(self) -> str:
        kinds = ("settings", "arguments", "actions", "values", "collectives", "numbers")
        counts = {kind: len(getattr(self, kind)) for kind in kinds}
        text = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        return f"<Difference of {self.names[0]} and {self.names[1]}: {text or 'none'}>"

    @property
    def same(self) -> bool:
        """Whether there are no differences."""
        return not any((
            self.settings, self.arguments, self.actions, self.values, self.collectives,
            self.numbers,
        ))  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data, for JSON."""
        return {"version": 1, "same": self.same, **dataclasses.asdict(self)}


def diff(
    first: Plan | Mapping[str, Any] | str | pathlib.Path,
    second: Plan | Mapping[str, Any] | str | pathlib.Path,
) -> Difference:
    """The differences between two plans, each a :class:`Plan`, its data or the path of its file.

    Raises :class:`toast.errors.PlanError` for a file that is not a plan, and for a plan that was
    written by a newer version of TOAST.

    >>> import jax, jax.numpy as jnp, toast
    >>> x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    >>> one, two = (
    ...     toast.plan(lambda x: x @ x.T, x, mesh=mesh, hardware="h100") for mesh in ("a=2", "a=4")
    ... )
    >>> toast.diff(one, one).same
    True
    >>> toast.diff(one, two).settings
    (Change(what='mesh', first='a=2', second='a=4'),)
    """
    one, two = read(first), read(second)
    return Difference(
        names=(one.name, two.name),
        settings=tuple(_settings(one, two)),
        arguments=tuple(_arguments(one, two)),
        actions=tuple(_actions(one, two)),
        values=tuple(_values(one, two)),
        collectives=tuple(_collectives(one, two)),
        numbers=tuple(numbers(one.before, two.before, " unsharded"))
        + tuple(numbers(one.after, two.after)),
    )


def _settings(one: Saved, two: Saved) -> Iterator[Change]:
    for (what, was), now in zip(_setting(one).items(), _setting(two).values(), strict=True):
        if was != now and ((was and now) or "'s " not in what):  # version 1 has no hashes
            yield Change(what, was, now)
    mine, theirs = (_fixed(saved.constraints) for saved in (one, two))
    for what in dict.fromkeys((*mine, *theirs)):
        if mine.get(what) != theirs.get(what):
            yield Change(what, mine.get(what, ""), theirs.get(what, ""))


def _fixed(constraints: Constraints) -> dict[str, str]:
    """The constraints, one entry each."""
    options = constraints_data(constraints)
    entries = {
        f"{option} {pattern}": ", ".join("?" if axes is None else str(axes) for axes in axis_names)
        for option in ("forbid", "fix")
        for pattern, axis_names in options[option].items()
    }
    for pattern, spec in options["pin"].items():
        parts = [
            "?" if e is None else "None" if not e else repr(e[0] if len(e) == 1 else tuple(e))
            for e in spec
        ]
        entries[f"pin {pattern}"] = f"P({', '.join(parts)})"
    return {**entries, **({"keep constraints": "yes"} if options["keep"] else {})}


def _setting(saved: Saved) -> dict[str, str]:
    return {
        "program": saved.program,
        "program's hash": saved.digest[:12],
        "method": saved.method,
        "mesh": str(saved.mesh),
        "hardware": saved.hardware,
        "hardware's figures": saved.hardware_digest,
        "memory limit": size_text(saved.memory_bytes),
        "safety": "" if saved.safety is None else f"{saved.safety:g}",
        "overlap": saved.overlap,
        "resolution": saved.resolution,
        "lowering": saved.lowering,
    }


def _arguments(one: Saved, two: Saved) -> Iterator[Change]:
    for path in dict.fromkeys((*one.arguments, *two.arguments)):
        was, now = one.arguments.get(path), two.arguments.get(path)
        texts = ["" if entry is None else spec_text(entry.spec) for entry in (was, now)]
        types = [
            "" if entry is None or entry.shape is None
            else f"{entry.dtype}[{','.join(map(str, entry.shape))}]"
            for entry in (was, now)
        ]  # fmt: skip
        if texts[0] != texts[1]:
            yield Change(path, *texts)
        if types[0] != types[1] and all(types):
            yield Change(f"{path}, type", *types)


def _actions(one: Saved, two: Saved) -> Iterator[ActionChange]:
    """The removed and added actions, relative to a longest common sequence."""

    def key(action: SavedAction) -> Any:
        part = tuple((p.key.place, p.factor) for p in action.part)
        return action.labels, action.axis, action.resolution, part

    mine, theirs = list(map(key, one.actions)), list(map(key, two.actions))
    matcher = difflib.SequenceMatcher(None, mine, theirs, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            for saved, places, second in ((one, range(i1, i2), False), (two, range(j1, j2), True)):
                for place in places:
                    a = saved.actions[place]
                    yield ActionChange(place + 1, a.labels, a.axis, a.resolution, second)


def _values(one: Saved, two: Saved) -> Iterator[Change]:
    """Ops of both programs with different shardings."""
    if not one.ops or not two.ops:  # version 1
        return
    theirs = {key.place: runs for key, runs in two.ops.items()}
    for key, runs in one.ops.items():
        others = theirs.get(key.place)
        if others is None:
            continue
        was, now = _counts(runs), _counts(others)
        if was != now:
            yield Change(op_text(key), _counted(was), _counted(now))


def op_text(key: OpKey) -> str:
    """``dot_general at moe.py:169 jit(f)/dot_general``."""
    place = f"{pathlib.PurePath(key.file).name}:{key.line}" if key.file else ""
    at = " ".join(part for part in (place, key.path) if part)
    return f"{key.kind}{f' {key.label}' if key.label else ''}{f' at {at}' if at else ''}"


def _counts(runs: Sequence[Run]) -> Counter[str]:
    """The number of results for each sharding."""
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(dict.fromkeys(run.specs, run.count))
    return counts


def _counted(specs: Counter[str]) -> str:
    return ", ".join(f"{count} {spec}" for spec, count in specs.items() if count)


def _collectives(one: Saved, two: Saved) -> Iterator[CollectiveChange]:
    tables = []
    for saved in (one, two):
        table: dict[tuple[str, tuple[str, ...]], tuple[float, float, float]] = {}
        for c in saved.collectives:
            count, size, seconds = table.get((c["kind"], c["axes"]), (0.0, 0.0, 0.0))
            table[c["kind"], c["axes"]] = (
                count + c["count"],
                size + c["count"] * c["bytes"],
                seconds + c["count"] * c["seconds"],
            )
        tables.append(table)
    for kind, axes in sorted({**tables[0], **tables[1]}):
        (c1, b1, s1), (c2, b2, s2) = (table.get((kind, axes), (0.0, 0.0, 0.0)) for table in tables)
        if not close(c1, c2) or not close(b1, b2) or not close(s1, s2):
            yield CollectiveChange(kind, axes, (c1, c2), (b1, b2), (s1, s2))
