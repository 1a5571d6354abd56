"""Notes on a program that its author may want to change: captured arrays, unused arguments."""

from __future__ import annotations

from toast.program import Program
from toast.units import listed, size_text

#: The most arguments and arrays that a note names.
_NAMED = 3


def program_notes(program: Program) -> list[str]:
    """One line for the arrays that a program captures, and one for the arguments that it ignores.

    An array that a function closes over is a constant of its program (:attr:`Program.captured`).
    """
    notes = []
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
    unused = [
        name
        for name, value in zip(program.arguments, program.argument_values, strict=True)
        if value not in used
    ]
    if unused:
        notes.append(f"unused arguments: {listed(unused, _NAMED)}")
    return notes
