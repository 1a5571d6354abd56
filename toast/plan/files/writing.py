"""Plans as plain data, and the keys of their ops."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from toast.analysis import Analysis
from toast.hardware import Hardware, Mesh
from toast.plan.files.saved import VERSION, Held, OpKey
from toast.plan.labels import action_labels, spec_text
from toast.plan.origin import Origin
from toast.plan.plan import Plan
from toast.program import Program, TracedMemory, is_residual_label
from toast.space import Constraints, Space
from toast.space.constraints import is_open, parse_spec


def plan_data(plan: Plan, *, over_time: bool = True) -> dict[str, Any]:
    """A plan as plain data, for JSON; no search starts from its memory ``over_time``."""
    program = plan.analysis.program
    types = [program.values[v].type for v in program.argument_values]
    return {
        "version": VERSION,
        "program": program.name,
        "program_hash": program.origin_digest,
        "origin": None if plan.origin is None else _origin_data(plan.origin),
        "method": plan.method,
        "note": plan.note,
        "mesh": dict(plan.mesh.axes),
        "device_order": list(plan.mesh.order or plan.mesh.names),
        "hardware": plan.hardware.name,
        "hardware_hash": hardware_digest(plan.hardware),
        "memory_bytes": plan.memory_bytes,
        "safety": plan.safety,
        "overlap": plan.model.overlap,
        "resolution": plan.resolution,
        "lowering": plan.lowering,
        "padding": [dataclasses.asdict(dimension) for dimension in plan.padding],
        **({"remat": memory_data(program.memory)} if program.memory else {}),
        "constraints": constraints_data(plan.constraints),
        "op_classes": "single" if _single(plan.model.space) else "alike",
        "fits": plan.fits,
        "error_bars": plan.error_bars.basis,
        "cost": plan.cost,
        "seed": plan.seed,
        "arguments": {
            name: {
                "shape": list(type_.shape),
                "dtype": type_.dtype,
                "sharding": [list(axes) for axes in spec],
                "spec": spec_text(spec),
            }
            for type_, (name, spec) in zip(types, plan.arguments.items(), strict=True)
        },
        "results": {
            name: [list(axes) for axes in spec]
            for name, spec in zip(program.results, plan.shardings.results, strict=True)
        },
        "values": _values(plan),
        "reshards": len(plan.shardings.uses),
        "replayed": bool(plan.actions),
        "actions": _actions(plan),
        "collectives": [dataclasses.asdict(transfer) for transfer in plan.transfers],
        **({"memory": plan.memory_data()} if over_time else {}),
        "before": dataclasses.asdict(plan.before),
        "after": dataclasses.asdict(plan.after),
        "bound_seconds": plan.bound_seconds,
        **_nonzero("policies_bound_seconds", plan.policies_bound_seconds),
        "analysis": plan.analysis.counts(),
        "search": {
            "states": plan.states,
            "rounds": [dataclasses.asdict(r) for r in plan.rounds],
        },
        "meshes": [
            {**dataclasses.asdict(tried), "mesh": dict(tried.mesh.axes)} for tried in plan.meshes
        ],
        "seconds": plan.seconds,
    }


def _nonzero(key: str, value: float | None) -> dict[str, float]:
    return {key: value} if value is not None and 0 < value < math.inf else {}


def _origin_data(origin: Origin) -> dict[str, Any]:
    """An origin as plain data, without empty options of memory."""
    data = dataclasses.asdict(origin)
    return {k: v for k, v in data.items() if v or k not in ("remat", "microbatches")}


def memory_data(memory: TracedMemory) -> dict[str, Any]:
    """The memory policy and the microbatches of a program as plain data.

    Policies are by names of residuals, so that aliases are not of use.  What notes and errors need
    beyond these comes from the program, when it is traced again.
    """
    data = dataclasses.asdict(memory)
    del data["own_names"]
    for block in data["blocks"]:
        del block["repeats"], block["recomputes"]
        for residual in block["residuals"]:
            del residual["alias"]
    return {
        **data,
        "preset": memory.policy.preset if memory.policy else "",
        "policy": memory.policy.to_dict() if memory.policy else None,
    }


def _single(space: Space) -> bool:
    return len(space.classes.representative) == len(space.analysis.program.ops)


def hardware_digest(hardware: Hardware) -> str:
    """The hash of a device's figures."""
    content = repr(hardware) + (repr(hardware.networks) if hardware.networks else "")
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def constraints_data(constraints: Constraints) -> dict[str, Any]:
    """The user's constraints as plain data; in a pin, ``None`` leaves a dimension open."""

    def axes_of(entry: Any) -> Any:
        if is_open(entry):
            return None
        return [] if entry is None else _several(entry)

    return {
        "pin": {
            pattern: [axes_of(e) for e in (parse_spec(spec) if isinstance(spec, str) else spec)]
            for pattern, spec in constraints.pin.items()
        },
        "forbid": {pattern: _several(axes) for pattern, axes in constraints.forbid.items()},
        "fix": {dimension: _several(axes) for dimension, axes in constraints.fix.items()},
        "keep": constraints.keep,
    }


def _several(axes: str | Iterable[str]) -> list[str]:
    return [axes] if isinstance(axes, str) else list(axes)


def _values(plan: Plan) -> list[dict[str, Any]]:
    """The ops by key, with their shardings."""
    program = plan.analysis.program
    labels = held_labels(plan.analysis, plan.model.space.mesh, plan.op_state)
    entries = []
    for key, ops in keyed_ops(program).items():
        runs = [
            (held, specs, len(list(same)))
            for (held, specs), same in itertools.groupby(
                ops, lambda op: (labels[op], tuple(map(plan.value_spec, program.ops[op].results)))
            )
        ]
        entries.append({
            **key._asdict(),
            "shardings": [
                {"count": count, "axes": dict(held), "specs": [spec_text(s) for s in specs]}
                for held, specs, count in runs
            ],
        })  # fmt: skip
    return entries


def held_labels(analysis: Analysis, mesh: Mesh, op_state: np.ndarray[Any, Any]) -> list[Held]:
    """For each op, the mesh axes that shard it with the labels of their factors.

    ``op_state`` is ``[ops, axes]``, with the axes of ``mesh``.
    """
    signature = analysis.names.signature.tolist()
    labels = [[factor.label for factor in rule.factors] for rule in analysis.rules]
    return [
        tuple((axis, labels[s][f]) for axis, f in zip(mesh.names, row, strict=True) if f >= 0)
        for s, row in zip(signature, op_state.tolist(), strict=True)
    ]


def key_of(program: Program, op: int) -> OpKey:
    """The key of an op in a plan file."""
    at = program.location(op)
    labels = [program.labels[v] for v in program.ops[op].results if v in program.labels]
    named = [label for label in labels if not is_residual_label(label)]
    return OpKey(program.kind(op), at.path, at.file, at.line, at.function, ", ".join(named))


def keyed_ops(program: Program) -> dict[OpKey, list[int]]:
    """The ops between arguments and results, in program order, by key."""
    by_key: dict[OpKey, list[int]] = {}
    for op in range(len(program.arguments), len(program.ops) - len(program.results)):
        by_key.setdefault(key_of(program, op), []).append(op)
    return by_key


def class_places(space: Space) -> dict[int, tuple[OpKey, int, int]]:
    """For each op class: its key, its number among the classes with that key, and their count."""
    program = space.analysis.program
    classes: dict[OpKey, list[int]] = {}
    for op_class, op in enumerate(space.classes.representative.tolist()):
        key = key_of(program, op)
        if op < len(program.arguments):
            key = key._replace(label=program.arguments[op])
        classes.setdefault(key, []).append(op_class)
    return {
        op_class: (key, place, len(members)) for key, members in classes.items()
        for place, op_class in enumerate(members)
    }  # fmt: skip


def _actions(plan: Plan) -> list[dict[str, Any]]:
    space, analysis = plan.model.space, plan.analysis
    places = class_places(space) if any(step.part for step in plan.steps) else {}
    first = next((i for i, step in enumerate(plan.steps) if step.axis), 0)  # after the pins

    def part(op_class: int, factor: int) -> dict[str, Any]:
        key, place, of = places[op_class]
        rule = analysis.rules[analysis.names.signature[space.classes.representative[op_class]]]
        label = rule.factors[factor].label if factor >= 0 else ""
        return {
            **key._asdict(), "place": place, "of": of, "factor": label,
            "numbers": [op_class, factor],
        }  # fmt: skip

    actions = dict(enumerate(plan.actions, first))
    return [
        {
            "dimensions": list(step.dimensions),
            "factors": list(action_labels(space, actions[number]))
            if number in actions and not step.dimensions else [],
            "axis": step.axis,
            "resolution": list(step.resolution),
            "color": actions[number].color if number in actions and not step.part else -1,
            "part": [part(op_class, factor) for op_class, factor in step.part],
            "fixed": first <= number < first + len(space.first_actions),
            "reason": step.reason,
            "after": dataclasses.asdict(step.after),
        }
        for number, step in enumerate(plan.steps)
    ]  # fmt: skip
