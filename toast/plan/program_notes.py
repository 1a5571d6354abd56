"""Notes on a program: captured arrays, unused arguments, callbacks, kernels, trip counts."""

from __future__ import annotations

import math

from toast.analysis import Analysis
from toast.plan.kernel_notes import kernel_notes
from toast.program import (
    Program,
    callback_ops,
    element_bytes,
    has_callback_functions,
    uncounted_loops,
)
from toast.space.annotated import annotation_labels
from toast.units import listed, size_text

#: The most arguments and arrays that a note names.
_NAMED = 3


def program_notes(analysis: Analysis) -> list[str]:
    """Lines for captured arrays, unused arguments, callbacks, kernels, and unknown trip counts.

    The arrays that a function closes over are its last arguments
    (:attr:`Program.captured_arrays`).  In the program of a file, they are constants
    (:attr:`Program.captured`).
    """
    program = analysis.program
    notes = []
    if count := len(program.captured_arrays):
        named = zip(program.arguments[-count:], program.argument_values[-count:], strict=True)
        arrays = [f"{name} ({program.values[value].type})" for name, value in named]
        notes.append(
            f"captured arrays are arguments, which the plan passes itself: {listed(arrays, _NAMED)}"
        )
    captured = sorted(program.captured.items(), key=lambda pair: -pair[1])
    if captured:
        total = size_text(sum(program.captured.values()))
        types = [
            f"{program.signatures[program.ops[op].signature].results[0]} ({size_text(size)})"
            for op, size in captured
        ]
        notes.append(
            f"captured arrays: every device holds {total} whole: {listed(types, _NAMED)}; pass "
            "them as arguments to shard them"
        )
    used = {value for op in program.ops for value in op.operands}
    used |= {value for value, _ in program.condition_reads}
    unused = [
        name
        for name, value in zip(program.arguments, program.argument_values, strict=True)
        if value not in used
    ]
    if unused:
        notes.append(f"unused arguments: {listed(unused, _NAMED)}")
    if calls := annotation_labels(program):
        notes.append(f"annotations that hold: {listed(calls, _NAMED)}")
    return [*notes, *_callback_notes(program), *kernel_notes(analysis), *loop_notes(program)]


def _callback_notes(program: Program) -> list[str]:
    """Lines on callbacks into Python: where they are, and which arrays they get."""
    whole: dict[str, dict[str, float]] = {}
    inside: dict[str, None] = {}
    for op in callback_ops(program):
        place = str(program.location(op)).rstrip(":")
        if program.signatures[program.ops[op].signature].attribute("manual"):
            inside[place] = None
            continue
        for value in program.ops[op].operands:
            type_ = program.values[value].type
            size = math.prod(type_.shape) * element_bytes(type_.dtype)
            whole.setdefault(place, {})[str(type_)] = size
        whole.setdefault(place, {})
    notes = []
    if whole:
        calls = [f"{at} gets {', '.join(arrays) or 'no array'}" for at, arrays in whole.items()]
        total = size_text(sum(sum(arrays.values()) for arrays in whole.values()))
        notes.append(
            f"callbacks into Python: {listed(calls, _NAMED)}; one device gathers these arrays "
            f"whole ({total}), and their time is not in the price"
        )
    if inside:
        notes.append(
            f"callbacks into Python in shard_map: {listed([*inside], _NAMED)}; every device runs "
            "them on its part, and their time is not in the price"
        )
    if not notes:
        return []
    if not has_callback_functions(program):
        notes.append(
            "this plan cannot be run: the Python functions of its callbacks belong to the process "
            "that lowered it; plan the function itself"
        )
    elif not program.results:
        notes.append(
            "this plan cannot be run: plans run callbacks only in programs with results; return a "
            "value"
        )
    return notes


def loop_notes(program: Program) -> list[str]:
    """A line for each loop whose number of iterations is unknown: its body counts once."""
    loops = uncounted_loops(program)
    lines = [
        f"trip count unknown: loop {number} at {loop.place or 'an unknown place'} counts once; "
        f"state it with trip_counts={{{loop.place or str(number)!r}: N}}, or "
        f"--trip-count {loop.place or number}=N"
        for number, loop in enumerate(loops[:_NAMED])
    ]
    if len(loops) > _NAMED:
        lines.append(f"... and {len(loops) - _NAMED} more loops with unknown trip counts")
    return lines
