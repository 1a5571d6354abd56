"""Memory by what it is, at every moment of a step: weights, optimizer state, activations ..."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toast.cost import Buffer, Timeline
from toast.plan import Plan
from toast.program import Program, element_bytes
from toast.report.argument_roles import argument_roles

#: The groups, from the bottom of the chart to its top.  Those of arguments come first.
GROUPS = (
    "weights", "optimizer state", "caches", "inputs", "captured arrays",
    "weights in use", "kept activations", "activations", "gradients", "results", "workspace",
)  # fmt: skip

#: Kinds of buffers that are no values.
_WORKSPACE = frozenset({"second", "workspace", "ring", "rounded", "sum"})

#: Ops that only convert a weight into the form in which it is used.
_FORMS = frozenset({"convert", "transpose", "reshape", "broadcast_in_dim"})


@dataclasses.dataclass(frozen=True)
class MemoryGroups:
    """The memory of a device by group and over time."""

    groups: tuple[str, ...]
    #: ``[groups, ops + 1]`` bytes before each op; the sums are the live bytes of the timeline.
    live: npt.NDArray[np.float64]
    #: ``[buffers]`` the index in ``groups`` of each buffer of the timeline.
    of_buffer: npt.NDArray[np.int64]


def memory_groups(plan: Plan, line: Timeline) -> MemoryGroups:
    """The groups of the buffers of ``line``, which is a timeline of ``plan``."""
    program = plan.analysis.program
    ops = len(program.ops)
    live = np.zeros((len(GROUPS), ops + 1))
    of_buffer = np.array(_of_buffers(program, line.buffers), dtype=np.int64)
    size = np.array([b.bytes for b in line.buffers])
    for places, sign in (([b.start for b in line.buffers], 1), ([b.end for b in line.buffers], -1)):
        at = np.minimum(np.array(places, dtype=np.int64), ops)
        np.add.at(live, (of_buffer, at), sign * size)
    live = np.maximum(np.cumsum(live, axis=1), 0.0)
    live *= _part_in_memory(line, live.sum(axis=0))
    live += _arguments(plan, line.argument_bytes)[:, None]
    some = np.flatnonzero(live.max(axis=1) > 0)
    place = np.full(len(GROUPS), -1, dtype=np.int64)
    place[some] = np.arange(len(some))
    return MemoryGroups(tuple(GROUPS[k] for k in some), live[some], place[of_buffer])


def _part_in_memory(line: Timeline, buffers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``[ops + 1]`` temporary memory, with gaps and without fast memory, over that of buffers."""
    events = np.searchsorted(line.op, np.arange(len(buffers)), side="right")
    temporary = np.append(0.0, line.live_bytes - line.argument_bytes)[events]
    part = np.ones_like(buffers)
    np.divide(temporary, buffers, out=part, where=buffers > 0)
    return part


def _arguments(plan: Plan, total: float) -> npt.NDArray[np.float64]:
    """``[groups]`` the bytes of arguments; they add up to ``total``."""
    program, sizes = plan.analysis.program, dict(plan.mesh.axes)
    of_group = np.zeros(len(GROUPS))
    roles, captured = argument_roles(program), plan.model.captured_bytes
    for role, value in zip(roles, program.argument_values, strict=True):
        type_, spec = program.values[value].type, plan.value_spec(value)
        shards = np.prod([sizes[axis] for axes in spec for axis in axes], dtype=np.float64)
        size = np.prod(type_.shape, dtype=np.float64) * element_bytes(type_.dtype)
        of_group[GROUPS.index(role)] += float(size / shards)
    known = float(of_group.sum())
    # Padding and the allocator take their part of every argument.
    of_group *= (total - captured) / known if known > 0 else 0.0
    of_group[GROUPS.index("captured arrays")] = captured
    return of_group


def _of_buffers(program: Program, buffers: Sequence[Buffer]) -> list[int]:
    """The index in ``GROUPS`` of each buffer."""
    passes = program.passes
    backward = [op for op, of in enumerate(passes) if of == "backward"]
    first, last = (backward[0], backward[-1]) if backward else (len(program.ops), -1)
    weights = forms_of_weights(program)
    results = {program.values[value].op for value in program.result_values}
    indices = []
    for buffer in buffers:
        op = program.values[buffer.value].op
        if buffer.what in _WORKSPACE:
            group = "workspace"
        elif buffer.value in weights:
            group = "weights in use"
        elif backward and buffer.start <= first < buffer.end and passes[op] != "backward":
            group = "kept activations"
        elif passes[op] == "backward" and buffer.end > last:
            group = "gradients"
        elif op in results and buffer.end >= len(program.ops) - len(program.results):
            group = "results"
        else:
            group = "activations" if not backward or op <= last else "workspace"
        indices.append(GROUPS.index(group))
    return indices


def forms_of_weights(program: Program) -> dict[int, str]:
    """The weights, and the forms of them in which products use them, with their paths."""
    paths = zip(
        argument_roles(program), program.argument_values, program.arguments, strict=True
    )  # fmt: skip
    forms = {value: path for role, value, path in paths if role == "weights"}
    for op in range(len(program.arguments), len(program.ops)):
        if program.kind(op) in _FORMS and program.ops[op].operands[0] in forms:
            path = forms[program.ops[op].operands[0]]
            forms.update(dict.fromkeys(program.ops[op].results, path))
    return forms


__all__ = ["GROUPS", "MemoryGroups", "forms_of_weights", "memory_groups"]
