"""What is wrong, or odd, about a user's rule files, found before a program needs them."""

from __future__ import annotations

import difflib
import pathlib
import warnings
from collections.abc import Sequence

from toast.analysis.rules import factor_files, known_rules, rule_entries, solve_rules, user_files
from toast.assurance import instances
from toast.frontend import mlir
from toast.logic import LogicText, kind_line, solve
from toast.program import Program

#: Ops with which the frontend writes down the boundary of a program and its control flow.
_OWN_KINDS = frozenset({"argument", "return", "carry", "yield", "join", "custom_call"})

#: Drawn ops of each kind that a rule is tried on.
_TRIED = 20


def check(
    paths: Sequence[str | pathlib.Path], on: Program | None = None
) -> tuple[int, tuple[str, ...]]:
    """The number of rule files at ``paths`` (files or folders), and what is odd about them.

    Raises :class:`toast.errors.RuleError` with ``file:line`` for syntax, undeclared predicates,
    unsafe variables, code, two rules for one op, grounding that does not end; and for dimensions
    without a factor, or of different size under one, on drawn ops of each kind and those of ``on``.
    """
    files = user_files(paths)
    odd: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rule_entries(paths)
        for file in files:
            solve([*factor_files()[:2], file], "", (), doubted=file)
            for kind, custom in sorted(known_rules(file)):
                name = f"custom_call {kind}" if custom else kind
                if name in instances.KINDS:
                    drawn = instances.program_of(instances.draw(name, _TRIED), name)
                    solve_rules(drawn, [file])
                elif not custom and kind not in mlir.op_kinds() | _OWN_KINDS:
                    odd.append(_unknown(file, kind))
        if on is not None:
            solve_rules(on, files)
    found = {str(warning.message): None for warning in caught}
    return len(files), (*odd, *found)


def _unknown(file: LogicText, kind: str) -> str:
    near = difflib.get_close_matches(kind, mlir.op_kinds(), 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "for a custom call: custom_call_rule"
    return f"{file}:{kind_line(file, kind)}: no op is of kind {kind}; {hint}"
