"""Checks rule files of users for errors and suspicious parts."""

from __future__ import annotations

import difflib
import pathlib
import warnings
from collections.abc import Sequence

from toast.analysis.rules import factor_files, known_rules, rule_entries, solve_rules, user_files
from toast.assurance import instances
from toast.errors import RuleError
from toast.frontend import mlir
from toast.logic import LogicText, kind_line, solve
from toast.program import Program

#: Kinds that the frontend adds for the boundary of a program and its control flow.
_OWN_KINDS = frozenset({
    "argument", "return", "carry", "yield", "join", "manual_entry", "manual_exit", "custom_call",
})  # fmt: skip

#: The number of random ops of each kind on which a rule is solved.
_DRAWN = 20


def check(
    paths: Sequence[str | pathlib.Path], on: Program | None = None
) -> tuple[int, tuple[str, ...]]:
    """Checks rule files.

    :param paths: rule files, or folders of rule files.
    :param on: a program on whose ops the rules are solved too.
    :returns: the number of files, and warnings.
    :raises toast.errors.RuleError: with ``file:line``, for invalid syntax, undeclared predicates,
        unsafe variables, code, two rules for one op, grounding beyond the limits, and for
        dimensions without a factor or of different sizes with one factor (on random ops of each
        kind and the ops of ``on``).
    """
    files = user_files(paths)
    if not files:
        raise RuleError(f"no .lp files in {', '.join(map(str, paths)) or 'an empty list'}")
    unknown: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rule_entries(paths)
        for file in files:
            solve([*factor_files()[:2], file], "", (), doubted=file)
            for kind, custom in sorted(known_rules(file)):
                name = f"custom_call {kind}" if custom else kind
                if name in instances.KINDS:
                    drawn = instances.program_of(instances.draw(name, _DRAWN), name)
                    solve_rules(drawn, [file], typical=True)
                elif not custom and kind not in mlir.op_kinds() | _OWN_KINDS:
                    unknown.append(_unknown(file, kind))
        if on is not None:
            solve_rules(on, files)
    warned = {str(warning.message): None for warning in caught}
    return len(files), (*unknown, *warned)


def _unknown(file: LogicText, kind: str) -> str:
    near = difflib.get_close_matches(kind, mlir.op_kinds(), 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "for a custom call: custom_call_rule"
    return f"{file}:{kind_line(file, kind)}: no op is of kind {kind}; {hint}"
