"""Checks of programs that were read from a cache."""

from __future__ import annotations

from collections.abc import Iterable

from toast.program.program import Program


def unsound(program: Program) -> str:
    """The name of the first invalid part of a program; empty if the program is sound.

    In a sound program, numbers are in range, types are those of the signatures, values are defined
    before they are used, and the first and last ops are arguments and returns.
    """
    ops, values, count = program.ops, program.values, len(program.ops)
    if len(program.repeats) != count or not _within(program.repeats, 0, 2**63):
        return "repeats"
    if not _within((op.signature for op in ops), 0, len(program.signatures)):
        return "signatures"
    if not _within((v for op in ops for v in op.operands), 0, len(values)):
        return "operands"
    if [v for op in ops for v in op.results] != list(range(len(values))):
        return "results"
    for number, op in enumerate(ops):
        signature = program.signatures[op.signature]
        used, defined = [values[v] for v in op.operands], [values[v] for v in op.results]
        if used and max([value.op for value in used]) >= number:
            return "a value that is used before it is defined"
        if tuple([value.type for value in used]) != signature.operands:
            return "types of operands"
        if tuple([value.type for value in defined]) != signature.results:
            return "types of results"
        for index, value in enumerate(defined):
            if value.op != number or value.result != index:
                return "places of results"
    arguments, results = len(program.arguments), len(program.results)
    kinds = [program.kind(op) for op in range(count)]
    ends = [place for place, kind in enumerate(kinds) if kind in ("argument", "return")]
    if ends != [*range(arguments), *range(count - results, count)]:
        return "ends"
    if "return" in kinds[:arguments] or "argument" in kinds[count - results :]:
        return "ends"
    if len(program.aliases) != results or not _within(program.aliases, -1, arguments):
        return "aliases"
    if not _within((op for pair in program.ties for op in pair), 0, count):
        return "ties"
    if not _within(program.labels, 0, len(values)) or not _within(program.constraints, 0, count):
        return "labels or constraints"
    reads = program.condition_reads
    if not _within((value for value, _ in reads), 0, len(values)):
        return "values that conditions read"
    if not all(0 <= op < count and kinds[op] == "carry" for _, op in reads):
        return "loops whose conditions read values"
    return ""


def _within(numbers: Iterable[int], least: int, end: int) -> bool:
    return all(least <= number < end for number in numbers)
