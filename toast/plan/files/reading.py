"""Reading of plan files; errors name the place in the file."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from toast.boundary.regular_files import read_text
from toast.boundary.typed import Misfit, checked, kind_text
from toast.cost import Interval
from toast.errors import PlanError, ToastError
from toast.hardware import Mesh
from toast.plan.files.format import (
    ActionEntry,
    ConstraintsEntry,
    PaddingEntry,
    PartEntry,
    PlanFile,
    PredictionEntry,
    RematEntry,
    RoundEntry,
    RunEntry,
    ValueEntry,
)
from toast.plan.files.saved import (
    VERSION,
    OpKey,
    Run,
    Saved,
    SavedAction,
    SavedArgument,
    SavedPart,
)
from toast.plan.files.writing import plan_data
from toast.plan.origin import Origin
from toast.plan.plan import Plan
from toast.plan.prediction import Collective, Prediction
from toast.program import Block, MemoryPolicy, PaddedDimension, Residual, TracedMemory
from toast.search import Round
from toast.space import Constraints


def read(plan: Plan | Saved | Mapping[str, Any] | str | pathlib.Path) -> Saved:
    """The contents of a plan, of its data or of its JSON file; a :class:`Saved` is returned as is.

    Raises :class:`toast.errors.PlanError` for a file that cannot be read, that is not a plan, or
    that was written by a newer version of TOAST.
    """
    if isinstance(plan, Saved):
        return plan
    if isinstance(plan, str | pathlib.Path):
        name = str(plan)
        data = _loaded(plan)
    else:
        if not isinstance(plan, Mapping) and not hasattr(plan, "analysis"):
            raise PlanError(f"{plan!r} is not a plan; {_GIVE}", shell=_GIVE_IN_SHELL)
        data = plan if isinstance(plan, Mapping) else plan_data(plan, over_time=False)
        name = str(data.get("program", "the data"))
    if not isinstance(data, Mapping):
        raise _no_plan(name, f"expected an object, not {kind_text(data)}")
    if "version" not in data:
        raise _no_plan(name, "no key 'version'")
    version = data["version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _no_plan(name, f"version {version!r} is not a positive whole number")
    if version > VERSION:
        raise PlanError(
            f"{name}: plan version {version} was written by a newer TOAST; this one reads "
            f"versions up to {VERSION}; update toast-partitioner, or plan again"
        )
    path = pathlib.Path(plan) if isinstance(plan, str | pathlib.Path) else None
    try:
        return _saved(name, path, _checked(data), old=version == 1)
    except Misfit as misfit:
        raise _no_plan(name, str(misfit)) from None


def _no_plan(name: str, why: str) -> PlanError:
    return PlanError(f"{name} is not a plan: {why}; {_GIVE}", shell=_GIVE_IN_SHELL)


_GIVE, _GIVE_IN_SHELL = (
    "use a file written by Plan.to_json",
    "use a file written by toast plan --json",
)


def _loaded(path: str | pathlib.Path) -> Any:
    """The JSON data of a file; control characters are escaped, because texts are printed."""
    text = read_text(path, PlanError, most=_LARGEST_BYTES)
    try:
        data = json.loads(text)
        return _printable(data) if _MAY_CONTROL.search(text) else data
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _no_plan(str(path), f"invalid JSON at {where} ({error.msg})") from None
    except (ValueError, RecursionError):
        raise _no_plan(str(path), "the JSON cannot be read") from None


#: Maximum size of a file; plans of programs of 100,000 ops have 40 MB.
_LARGEST_BYTES = 2**29

#: Characters that terminals may execute.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


#: JSON that may contain such characters: as escapes, or beyond ASCII.
_MAY_CONTROL = re.compile(r"\\[bfru]|[\x7f-\x9f]")


def _printable(data: Any) -> Any:
    """JSON data with escaped control characters, as in Python."""
    if isinstance(data, str):
        return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", data)
    if isinstance(data, dict):
        return {_printable(key): _printable(value) for key, value in data.items()}
    return [*map(_printable, data)] if isinstance(data, list) else data


def _checked(data: Mapping[str, Any]) -> PlanFile:
    """The data of a file, checked; raises :class:`Misfit`."""
    return checked(data if data["version"] == VERSION else _upgraded(data), PlanFile)


#: Defaults for keys that version 1 does not have.
_SINCE_VERSION_2 = {
    "program_hash": "0" * 64, "overlap": "partial", "resolution": "compatible",
    "constraints": {"pin": {}, "forbid": {}, "fix": {}, "keep": False}, "op_classes": "alike",
    "values": [],
}  # fmt: skip
_NO_KEY = {"kind": "", "path": "", "file": "", "line": 0, "function": "", "label": ""}


def _upgraded(data: Mapping[str, Any]) -> Any:
    """The data of a version 1 file in the current format; it is checked later."""
    known = {**_SINCE_VERSION_2, "replayed": data.get("method") == "toast", **data}
    arguments, actions = data.get("arguments"), data.get("actions")
    if isinstance(arguments, Mapping):
        known["arguments"] = {
            path: {"shape": [], "dtype": "", **entry} if isinstance(entry, Mapping) else entry
            for path, entry in arguments.items()
        }
    if isinstance(actions, list):
        known["actions"] = [*map(_upgraded_action, actions)]
    return {**known, "version": VERSION}


def _upgraded_action(action: Any) -> Any:
    if not isinstance(action, Mapping) or not isinstance(action.get("part"), list):
        return action
    part = [{**_NO_KEY, "place": 0, "of": 0, "factor": "", "numbers": p} for p in action["part"]]
    return {**action, "part": part}


def _memory(entry: RematEntry) -> TracedMemory:
    """The memory policy and the microbatches of a file."""
    policy = None
    if entry.policy is not None:
        names = {block: msgspec.structs.asdict(each) for block, each in entry.policy.items()}
        try:
            policy = MemoryPolicy.from_dict(names, entry.preset)
        except ToastError as error:
            raise Misfit(f"in 'remat', {str(error).partition(';')[0]}") from None
    blocks = tuple(
        Block(
            block.name, tuple(Residual(**msgspec.structs.asdict(r)) for r in block.residuals),
            block.runs, block.origin,
        )
        for block in entry.blocks
    )  # fmt: skip
    return TracedMemory(policy, entry.microbatches, blocks, entry.own, entry.accumulates)


def _saved(name: str, path: pathlib.Path | None, file: PlanFile, *, old: bool) -> Saved:
    """The contents of a file; an ``old`` file, of version 1, has no hashes and no shapes."""
    try:
        mesh = Mesh(tuple(file.mesh.items()), file.device_order)
    except ToastError as error:
        raise Misfit(f"in 'mesh', {str(error).partition(';')[0]}") from None
    return Saved(
        name=name,
        memory=None if file.remat is None else _memory(file.remat),
        policies_bound_seconds=file.policies_bound_seconds or None,
        program=file.program,
        digest="" if old else file.program_hash,
        origin=None if file.origin is None else Origin(**msgspec.structs.asdict(file.origin)),
        method=file.method,
        note=file.note,
        mesh=mesh,
        hardware=file.hardware,
        hardware_digest=file.hardware_hash,
        memory_bytes=file.memory_bytes,
        safety=file.safety,
        overlap=file.overlap,
        resolution=file.resolution,
        lowering=file.lowering,
        padding=tuple(map(_padding, file.padding)),
        constraints=_constraints(file.constraints),
        single=file.op_classes == "single",
        arguments={
            path: SavedArgument(a.sharding, None if old else a.shape, a.dtype)
            for path, a in file.arguments.items()
        },
        results=file.results,
        actions=tuple(map(_action, file.actions)),
        replayed=file.replayed,
        ops={_key(value): tuple(map(_run, value.shardings)) for value in file.values},
        cost=file.cost,
        seed=file.seed,
        before=_prediction(file.before),
        after=_prediction(file.after),
        collectives=tuple(
            {key: getattr(row, key) for key in row.__struct_fields__ if key != "edges"}
            for row in file.collectives
        ),
        states=file.search.states if file.search else 0,
        rounds=tuple(map(_round, file.search.rounds)) if file.search else (),
        path=path,
    )


def _padding(entry: PaddingEntry) -> PaddedDimension:
    if not entry.elements < entry.padded <= 2 * entry.elements:
        raise Misfit(
            f"in 'padding', {entry.elements} elements are padded to {entry.padded}; expected more, "
            "and at most twice as many"
        )
    return PaddedDimension(entry.dimension, entry.elements, entry.padded)


def _round(entry: RoundEntry) -> Round:
    return Round(entry.number, entry.states, entry.cost, entry.seconds)


def _key(entry: ValueEntry | PartEntry) -> OpKey:
    return OpKey(*(getattr(entry, name) for name in OpKey._fields))


def _run(entry: RunEntry) -> Run:
    return Run(entry.count, tuple(entry.axes.items()), entry.specs)


def _action(entry: ActionEntry) -> SavedAction:
    parts = (SavedPart(_key(p), p.place, p.of, p.factor, p.numbers) for p in entry.part)
    return SavedAction(
        dimensions=entry.dimensions,
        factors=entry.factors,
        axis=entry.axis,
        resolution=entry.resolution,
        color=entry.color,
        part=tuple(parts),
        fixed=entry.fixed,
        reason=entry.reason,
        after=_prediction(entry.after),
    )


def _prediction(entry: PredictionEntry) -> Prediction:
    collectives = (Collective(c.kind, c.count, c.bytes, c.seconds) for c in entry.collectives)
    step, peak = (
        None if ends is None else Interval(*ends)
        for ends in (entry.step_interval, entry.peak_interval)
    )
    return Prediction(**{
        **msgspec.structs.asdict(entry), "collectives": tuple(collectives),
        "step_interval": step, "peak_interval": peak,
    })  # fmt: skip


def _constraints(entry: ConstraintsEntry) -> Constraints:
    return Constraints(
        pin={pattern: _pin(spec) for pattern, spec in entry.pin.items()},
        forbid={pattern: [*axes] for pattern, axes in entry.forbid.items()},
        fix={dimension: [*axes] for dimension, axes in entry.fix.items()},
        keep=entry.keep,
    )


def _pin(spec: tuple[tuple[str, ...] | None, ...]) -> Any:
    from jax.sharding import PartitionSpec  # only plans with pins need JAX

    return PartitionSpec(
        *(PartitionSpec.UNCONSTRAINED if axes is None else axes or None for axes in spec)
    )
