"""Which values of a program are in the memory of the host.

JAX states the memory of a value with calls of ``annotate_device_placement`` (XLA's own names are
``MoveToHost`` and ``MoveToDevice``).  As XLA's host offloader does, we follow a value from the call
that moves it to the host to the one that moves it back, through ops that pass it on, and through
the stacks of values that loops carry.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from toast.cost.entities import Bools
from toast.cost.program_loops import LoopOps, loops_around
from toast.graphs import components
from toast.program import Program

#: Ops whose result is in the memory of their first operand.
_PASSING = frozenset({
    "reshape", "broadcast_in_dim", "transpose", "slice", "dynamic_slice", "optimization_barrier",
    "sdy_sharding_constraint", "bitcast_convert", "yield", "dynamic_update_slice",
})  # fmt: skip

#: Custom calls that state a memory, and that of those that state the same one always.
_CALLS = {"MoveToHost": "pinned_host", "MoveToDevice": "device", "annotate_device_placement": ""}


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Values in the memory of the host, and the transfers to it and back."""

    #: ``[values]`` whether the value is in the memory of the host.
    inside: Bools
    #: ``[values]`` whether the op that defines the value moves it to the host or back.
    moved: Bools


def host_memory(program: Program) -> HostMemory:
    """The values of ``program`` that are in the memory of the host."""
    count = len(program.values)
    inside, moved = np.zeros((2, count), dtype=bool)
    memories = [_memory(program, number) for number in range(len(program.signatures))]
    to_host: list[int] = []
    for op in program.ops:
        if memory := memories[op.signature]:
            moved[list(op.results)] = True
            if memory != "device":
                to_host += op.results
    if not to_host:
        return HostMemory(inside, np.zeros(count, dtype=bool))
    label = components(count, _passed_on(program))
    at_host = np.zeros(count, dtype=bool)  # by component
    at_host[label[to_host]] = True
    users = np.bincount([v for op in program.ops for v in op.operands], minlength=count)
    stacks = np.zeros(count, dtype=np.int64)  # loops that carry the value at the host
    for number, op in enumerate(program.ops):  # operands come first
        if program.kind(number) == "carry":
            if at_host[label[op.operands[0]]]:
                at_host[label[op.results[0]]] = True
            stacks[op.operands[0]] += at_host[label[op.results[0]]]
    inside = at_host[label] | ((stacks > 0) & (stacks == users))
    # A transfer begins or ends at the host; a value that stays on the device is not moved.
    source = np.arange(count)
    for value in np.flatnonzero(moved).tolist():
        source[value] = program.ops[program.values[value].op].operands[0]
    moved &= inside != inside[source]
    return HostMemory(inside, moved)


def round_trips(program: Program) -> list[tuple[int, int]]:
    """Pairs of ops outside of loops: one that moves a value to the host, and one back."""
    memories = [_memory(program, number) for number in range(len(program.signatures))]
    trips: list[tuple[int, int]] = []
    for number, op in enumerate(program.ops):
        if memories[op.signature] != "device" or program.repeats[number] > 1:
            continue
        value = op.operands[0]
        while program.kinds[before := program.makers[value]] in _PASSING:
            at = program.values[value].result
            value = program.ops[before].operands[at if len(program.ops[before].results) > 1 else 0]
        signature = program.ops[before].signature
        if memories[signature] not in ("", "device") and program.repeats[before] == 1:
            trips.append((before, number))
    return trips


def moved_in_loops(program: Program) -> list[tuple[int, int, int]]:
    """Values of the device that loops move to the host or back: each with its first and last op.

    XLA for TPUs sends what one iteration has computed beside the next one, and what the last one
    has until the loop that fetches it, which fetches beside each iteration what the next one needs.
    A loop that does both moves nothing for another one.
    """
    moves = _moves_in_loops(program)
    fetching = fetching_loops(program)
    sending = {loop for _, fetched, loop in moves if not fetched}
    found: list[tuple[int, int, int]] = []
    for op, fetched, loop in moves:
        value = (program.ops[op].results if fetched else program.ops[op].operands)[0]
        begin, end = loop.last_carry + 1, loop.end
        later = [other.begin for other in fetching if other.begin > end]
        if program.makers[value] < begin:
            continue
        if fetched and loop not in sending:
            found.append((value, begin, end))
        elif not fetched and later:
            found.append((value, begin, min(later)))
    return found


def fetching_loops(program: Program) -> list[LoopOps]:
    """The loops that move values from the host to the device, and none to the host."""
    moves = _moves_in_loops(program)
    sending = {loop for _, fetched, loop in moves if not fetched}
    fetching = dict.fromkeys(loop for _, fetched, loop in moves if fetched)
    return [loop for loop in fetching if loop not in sending]


def _moves_in_loops(program: Program) -> list[tuple[int, bool, LoopOps]]:
    """Ops in loops that state a memory: whether it is that of the device, and the loop."""
    memories = [_memory(program, number) for number in range(len(program.signatures))]
    if not any(memories):
        return []
    loops = loops_around(program)
    return [
        (number, memory == "device", loop)
        for number, op in enumerate(program.ops)
        if (memory := memories[op.signature]) and (loop := loops[number]) is not None
    ]


def _memory(program: Program, signature: int) -> str:
    """The memory that ops with this signature move their operand to; empty for others."""
    of = program.signatures[signature]
    if of.kind != "custom_call":
        return ""
    target = str(of.attribute("call_target_name"))
    return str(of.attribute("memory") or _CALLS[target]) if target in _CALLS else ""


def _passed_on(program: Program) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """``[edges, 2]`` pairs of values in one memory."""
    edges: list[tuple[int, int]] = []
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        if kind in _PASSING and op.results and op.operands:
            edges.append((op.operands[0], op.results[0]))
        if kind == "dynamic_update_slice":
            edges.append((op.operands[1], op.results[0]))
    for number, other in program.ties:
        op = program.ops[number]
        if program.kind(number) == "yield" and op.operands:
            edges.append((op.operands[0], program.ops[other].results[0]))
    return np.array(edges, dtype=np.int64).reshape(-1, 2)
