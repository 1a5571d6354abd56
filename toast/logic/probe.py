"""Parses an untrusted logic program in a confined process.

clingo's parser opens the files that ``#include`` names, and a deeply nested program crashes it.
This module runs as a script, by path: it must start fast, and imports only the limits of TOAST.
Reads JSON from its standard input: the ``text``, the limits ``bytes``, ``seconds`` and ``depth``,
and whether its ``facts`` are wanted.  It opens no file.  Writes JSON: clingo's ``messages``,
whether the text ``failed``, the line of the first term or sum that is too ``deep``, and the facts:
``[line, name, arguments]`` each, numbers, strings and lists as :data:`toast.logic.engine.Term` has
them, or ``[line, null, text]`` for what is no ground fact.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import clingo
from clingo import ast

_LIMITS = pathlib.Path(__file__).parents[1] / "boundary" / "limits.py"


def main() -> None:
    """Parse the text from standard input."""
    request = json.load(sys.stdin)
    limits = runpy.run_path(str(_LIMITS))
    limits["bound"](request["bytes"], request["seconds"])
    limits["close_files"]()
    messages: list[str] = []
    statements: list[Any] = []
    failed = ""
    try:
        ast.parse_string(
            request["text"], statements.append, logger=lambda _code, text: messages.append(text)
        )
    except (RuntimeError, ValueError) as failure:
        failed = str(failure) or "syntax error"
    deep = 0
    facts: list[Any] = []
    for statement in () if failed else statements:
        if _depth_beyond(statement, request["depth"]):
            deep = statement.location.begin.line
            break
        if request["facts"]:
            facts += _facts(statement)
    answer = {"messages": messages[:20], "failed": failed, "deep": deep, "facts": facts}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # deleting a deep syntax tree would crash the process


def _depth_beyond(statement: Any, limit: int) -> bool:
    """Whether a syntax tree is deeper than ``limit``, without recursion."""
    level = [statement]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: Any) -> Iterator[Any]:
    for key in node.child_keys:
        child = getattr(node, key)
        if isinstance(child, Sequence | ast.ASTSequence):
            yield from (inner for inner in child if isinstance(inner, ast.AST))
        elif isinstance(child, ast.AST):
            yield child


def _facts(statement: Any) -> list[Any]:
    """The fact in a statement; empty for comments."""
    kind = statement.ast_type
    if kind is ast.ASTType.Comment or (kind is ast.ASTType.Program and statement.name == "base"):
        return []
    line = statement.location.begin.line
    if kind is not ast.ASTType.Rule or len(statement.body):
        return [[line, None, f"not a fact: {str(statement).splitlines()[0]}"]]
    try:
        symbol = clingo.parse_term(str(statement.head), logger=lambda _code, _text: None)
    except RuntimeError:
        return [[line, None, f"not a ground fact: {statement}"]]
    if symbol.type is not clingo.SymbolType.Function or not symbol.positive:
        return [[line, None, f"not a fact: {statement}"]]
    return [[line, symbol.name, [_term(argument) for argument in symbol.arguments]]]


def _term(symbol: clingo.Symbol) -> Any:
    kind = symbol.type
    if kind is clingo.SymbolType.Number:
        return int(symbol.number)
    if kind is clingo.SymbolType.String:
        return str(symbol.string)
    if kind is clingo.SymbolType.Function and symbol.positive:
        if not symbol.arguments:
            return symbol.name or []
        return [symbol.name, *(_term(argument) for argument in symbol.arguments)]
    return str(symbol)


if __name__ == "__main__":
    main()
