"""Queries: rule bodies, or files of rules, that clingo evaluates over facts."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import clingo
from clingo import ast

from toast.errors import QueryError, RuleWarning
from toast.logic import engine, overflow
from toast.logic.engine import Predicate, declarations, one_line, predicate_of
from toast.logic.texts import LogicText, walk

#: The memory limit of the process that answers, in bytes.
_MEMORY_BYTES = 6 * 2**30

#: The predicate of the answer to a rule body.
_ANSWER = "answer"

_SORTED = re.compile(r"^%\s*Sorted by:\s*(.*?)\.?\s*$", re.MULTILINE)
_PREFIX = ":- "


@dataclasses.dataclass(frozen=True)
class Query:
    """A checked query."""

    #: The rules that derive ``answer``: their text, and files with more rules.
    rules: str
    files: tuple[LogicText, ...]
    answer: Predicate
    #: A name for each argument of ``answer``.
    columns: tuple[str, ...]
    #: The predicates of the facts that it uses.
    mentions: frozenset[Predicate]
    #: The columns by which rows are sorted first; True for descending order.
    order: tuple[tuple[int, bool], ...] = ()
    #: The number of characters of ``rules`` before the user's text.
    before: int = 0
    #: Checks of the arithmetic of all rules.
    checks: overflow.Checks = overflow.NONE


def as_term(text: str) -> str:
    """``text`` if it is a ground term, else the text as a quoted string."""
    try:
        term = str(clingo.parse_term(text, logger=lambda _code, _text: None))
    except RuntimeError:
        term = ""
    return text if text and term == text else str(clingo.String(text))


# -- reading -------------------------------------------------------------------------------------


def read_query(
    text: str, known: Collection[Predicate], files: Sequence[pathlib.Path] = ()
) -> Query:
    """Parse a rule body, or rules ``head :- body.``, over the predicates ``known``.

    The columns are the variables of the body in order of appearance, without those that begin with
    ``_``; or the arguments of the last rule's head.  ``files`` define additional predicates.
    Raises :class:`toast.errors.QueryError` with the column.
    """
    if not _bare(text).strip(" .\n\t"):
        raise QueryError("query: is empty; write a rule body such as 'color(D,C), dim(D,V,_,Size)'")
    whole = ":-" in _bare(text)
    source = text if whole else f"{_PREFIX}{text.rstrip().removesuffix('.')}\n."
    place = _Place("query", text, 0 if whole else len(_PREFIX))
    statements = _parse(source, place)
    rules = [statement for statement in statements if not _silent(statement)]
    if not whole and (len(rules) != 1 or _head(rules[0]) is not None):
        raise QueryError("query: write one rule body, or rules with heads: head(X) :- body.")
    texts = [engine.read(path, QueryError) for path in files]
    parts = [*map(_parsed, texts), (statements, place)]
    mentions = _survey(parts, known)
    checks = overflow.checks(statement for statements, _ in parts for statement in statements)
    if whole:
        rules = [statement for statement in rules if _head(statement)]
        if not rules:
            raise QueryError("query: no rule has a head; write head(X) :- body.")
        head = rules[-1].head.atom.symbol
        columns = _distinct([str(argument) for argument in head.arguments])
        answered = (head.name, len(columns))
        return Query(source, tuple(texts), answered, columns, mentions, checks=checks)
    columns = tuple(dict.fromkeys(_variables(rules[0].body)))
    head = f"{_ANSWER}({','.join(columns)})" if columns else _ANSWER
    answered = (_ANSWER, len(columns))
    rules_text = f"{head} {source}"
    before = rules_text.index(source) + len(_PREFIX)
    return Query(
        rules_text, tuple(texts), answered, columns, mentions, before=before, checks=checks
    )


def read_audit(
    path: pathlib.Path, known: Collection[Predicate], files: Sequence[pathlib.Path] = ()
) -> Query:
    """Parse a file of rules; the answer is the documented predicate with the name of the file.

    ``%! largest(Color, Size): ...`` names the columns of ``largest.lp``; a line ``% Sorted by:
    -Size, Color.`` the order of rows, ``-`` for the largest first.  Raises
    :class:`toast.errors.QueryError` with file and line.
    """
    texts = [engine.read(file, QueryError) for file in (*files, path)]
    parts = [*map(_parsed, texts)]
    mentions = _survey(parts, known)
    text = texts[-1].text
    documented = [d for d in declarations(text) if d.name == path.stem]
    if not documented:
        raise QueryError(
            f"{path}: has no answer predicate; define {path.stem}(...) and document it with a "
            f"line '%! {path.stem}(Column, ...): meaning.'"
        )
    columns = _distinct(documented[0].arguments if documented[0].arguments != ("",) else ())
    order = []
    for named in _SORTED.findall(text):
        for part in map(str.strip, named.split(",")):
            if part.removeprefix("-") not in columns:
                raise QueryError(
                    f"{path}: sorted by {part}, which is not one of its columns "
                    f"{', '.join(columns)}"
                )
            order.append((columns.index(part.removeprefix("-")), part.startswith("-")))
    answered = (path.stem, len(columns))
    checks = overflow.checks(statement for statements, _ in parts for statement in statements)
    return Query("", tuple(texts), answered, columns, mentions, tuple(order), checks=checks)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Unique column names; repeated names get numbers."""
    unique_names: dict[str, None] = {}
    for name in names:
        number = 2
        unique = name
        while unique in unique_names:
            unique, number = f"{name}_{number}", number + 1
        unique_names[unique] = None
    return tuple(unique_names)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A text and the form of places in it: ``query, column 12`` or ``file.lp:3:12``."""

    name: str
    text: str
    #: The number of characters before the user's text on the first line.
    before: int = 0
    file: bool = False

    def at(self, line: int, column: int) -> str:
        column = self._character(line, column)
        if self.file:
            return f"{self.name}:{line}:{column}"
        several = "\n" in self.text.strip()
        return f"{self.name}, {f'line {line}, ' if several else ''}column {column}"

    def of(self, node: Any) -> str:
        return self.at(node.location.begin.line, node.location.begin.column)

    def _character(self, line: int, column: int) -> int:
        """The user's column for clingo's column, which counts bytes and the added prefix."""
        column -= self.before if line == 1 else 0
        lines = self.text.splitlines()
        if not 0 < line <= len(lines):
            return column
        data = lines[line - 1].encode(errors="surrogatepass")
        beyond = max(0, column - 1 - len(data))
        return len(data[: max(0, column - 1)].decode(errors="ignore")) + 1 + beyond

    def rest(self, line: int, column: int) -> str:
        """The text at a place, shortened."""
        column = self._character(line, column)
        lines = self.text.splitlines()
        text = lines[line - 1][column - 1 :].strip() if line <= len(lines) else ""
        return text if len(text) <= 24 else f"{text[:24]}..."


#: The statements of a text, and the text.
_Part = tuple[list[Any], _Place]


def _parsed(text: LogicText) -> _Part:
    statements = engine.parse(text, QueryError, columns=True)
    return statements, _Place(str(text), text.text, file=True)


def _bare(text: str) -> str:
    """A text without comments, and with empty strings."""
    return overflow.ASIDE.sub(lambda aside: '""' if aside[0].startswith('"') else "", text)


def _numbers(place: _Place) -> None:
    """Raise QueryError for numbers that clingo would truncate."""
    if beyond := overflow.number_beyond(place.text):
        offset, shown = beyond
        before = place.text[:offset]
        line = 1 + before.count("\n")
        column = offset - before.rfind("\n") + (place.before if line == 1 else 0)
        raise QueryError(f"{place.at(line, column)}: {shown} {overflow.BEYOND}")


_WHERE = re.compile(r"<string>:(\d+):(\d+)[-\d:]*: error: (.*)", re.DOTALL)


def _parse(source: str, place: _Place) -> list[Any]:
    if "#include" in _bare(source):
        raise QueryError(
            "query: #include is not allowed; pass files as rules=['mine.lp']",
            shell="pass files with --with",
        )
    if "\0" in source:
        raise QueryError("query: is not text")
    if (offset := engine.foreign(source)) >= 0:
        line = source.count("\n", 0, offset) + 1
        start = source.rfind("\n", 0, offset) + 1
        column = len(source[start:offset].encode()) + 1
        raise QueryError(
            f"{place.at(line, column)}: {source[offset]!r} outside of strings; write plain ASCII"
        )
    messages: list[str] = []
    statements: list[Any] = []
    probed = engine.probe(source)
    if reason := engine.refusal(probed):
        raise QueryError(f"query: {reason[1]}")
    try:
        ast.parse_string(
            source, statements.append, logger=lambda _code, text: messages.append(text)
        )
    except RuntimeError as failure:
        match = _WHERE.match(messages[0]) if messages else None
        if match is None:
            raise QueryError(f"query: {one_line(messages) or failure}") from None
        line, column = int(match[1]), int(match[2])
        rest = place.rest(line, column)
        at = f" at '{rest}'" if rest else " at its end"
        what = " ".join(match[3].split()).removesuffix(", unexpected .")
        if not rest:
            line, column = 1 + place.text.rstrip().count("\n"), 0
            last = place.text.rstrip().splitlines()[-1] if place.text.strip() else ""
            column = len(last) + 1 + (place.before if line == 1 else 0)
            what = what.split(", unexpected")[0]
        raise QueryError(f"{place.at(line, column)}: {what}{at}") from None
    return statements


def _silent(statement: Any) -> bool:
    """Whether a statement has no effect: a comment, or the default program part."""
    kind = statement.ast_type
    return kind is ast.ASTType.Comment or (
        kind is ast.ASTType.Program and statement.name == "base" and not len(statement.parameters)
    )


def _allowed(statements: Sequence[Any], place: _Place) -> None:
    """Raise QueryError for statements that are not plain rules."""
    for statement in statements:
        kind = statement.ast_type.name
        if _silent(statement) or kind in ("Defined", "Definition"):
            continue
        if kind != "Rule":
            raise QueryError(
                f"{place.of(statement)}: {_NAMES.get(kind, kind)} is not allowed: a query "
                "may only contain rules; remove it"
            )
        head = statement.head.ast_type.name
        plain = head == "Literal" and not statement.head.sign
        if plain and _head(statement) is not None:
            plain = statement.head.atom.symbol.ast_type is ast.ASTType.Function
        elif str(statement.head) != "#false":
            plain = False
        if not plain:
            raise QueryError(f"{place.of(statement)}: a head must be one atom, without choices")
        for node in walk(statement):
            if node.ast_type is ast.ASTType.Function and bool(node.external):
                raise QueryError(
                    f"{place.of(node)}: @{node.name} is not allowed: queries cannot run code"
                )
            if overflow.constant_beyond(node):
                raise QueryError(f"{place.of(node)}: {node} {overflow.BEYOND}")


_NAMES = {
    "Script": "#script", "External": "#external", "ShowSignature": "#show", "ShowTerm": "#show",
    "Program": "#program", "Minimize": "#minimize", "TheoryDefinition": "#theory",
    "ProjectSignature": "#project", "ProjectAtom": "#project", "Heuristic": "#heuristic",
    "Edge": "#edge",
}  # fmt: skip


def _head(rule: Any) -> Predicate | None:
    """The predicate that a rule derives; None for constraints and other statements."""
    if rule.ast_type is not ast.ASTType.Rule:
        return None
    head = rule.head
    if head.ast_type is not ast.ASTType.Literal:
        return None
    if head.atom.ast_type is not ast.ASTType.SymbolicAtom:
        return None
    return predicate_of(head.atom.symbol)


def _survey(parts: Sequence[_Part], known: Collection[Predicate]) -> frozenset[Predicate]:
    """The predicates of the facts in all rules; raises QueryError for invalid rules."""
    defined: set[Predicate] = set()
    for statements, place in parts:
        _numbers(place)
        _allowed(statements, place)
        documented = {d.predicate for d in declarations(place.text)}
        for statement in statements:
            head = _head(statement)
            if head is None:
                continue
            name, arity = head
            if head in known or (name == _ANSWER and place.file):
                raise QueryError(
                    f"{place.of(statement)}: {name}/{arity} already exists; use another name"
                )
            if place.file and head not in documented:
                arguments = ", ".join("ABCDEFGH"[:arity])
                raise QueryError(
                    f"{place.of(statement)}: {name}/{arity} is not documented; add a line "
                    f"'%! {name}({arguments}): meaning.'"
                )
            defined.add(head)
    mentioned: set[Predicate] = set()
    for statements, place in parts:
        for statement in statements:
            for node in walk(statement):
                if node.ast_type is not ast.ASTType.SymbolicAtom:
                    continue
                predicate = predicate_of(node.symbol)
                if predicate in defined:
                    continue
                if predicate not in known:
                    raise _unknown(place.of(node.symbol), predicate, known, defined)
                mentioned.add(predicate)
    return frozenset(mentioned)


def _unknown(
    where: str,
    predicate: Predicate,
    known: Collection[Predicate],
    defined: Collection[Predicate],
) -> QueryError:
    name, arity = predicate
    what = f"{where}: there is no"
    every = {*known, *defined}
    arities = sorted(f"{n}/{a}" for n, a in every if n == name)
    if arities:
        listed = " or ".join(arities)
        return QueryError(
            f"{what} {name}/{arity}; {name} has a different number of arguments: {listed}"
        )
    near = difflib.get_close_matches(name, sorted({n for n, _ in every}), 3)
    shown = [f"{n}/{a}" for close in near for n, a in sorted(every) if n == close]
    if shown:
        return QueryError(f"{what} predicate {name}/{arity}; did you mean {' or '.join(shown)}?")
    return QueryError(
        f"{what} predicate {name}/{arity}; rules/queries/vocabulary.lp lists all",
        shell="toast query --predicates lists all",
    )


def _variables(body: Sequence[Any]) -> Iterator[str]:
    """The variables of a body in order of appearance, without local ones of aggregates."""
    for node in body:
        yield from _global(node)


_LOCAL = (
    ast.ASTType.BodyAggregateElement, ast.ASTType.ConditionalLiteral,
)  # fmt: skip


def _global(node: Any) -> Iterator[str]:
    if node.ast_type in _LOCAL:
        return
    if node.ast_type is ast.ASTType.Variable:
        if not node.name.startswith("_"):
            yield str(node.name)
        return
    for key in node.child_keys:
        child = getattr(node, key)
        for inner in child if isinstance(child, Sequence | ast.ASTSequence) else (child,):
            if isinstance(inner, ast.AST):
                yield from _global(inner)


# -- answering -----------------------------------------------------------------------------------


def ask(query: Query, facts: Mapping[Predicate, Sequence[str]]) -> list[tuple[str, ...]]:
    """Evaluate a query over ``facts``; returns rows of terms in clingo's syntax and order.

    Each fact is a term ``(a,b)``.  A separate process grounds the rules.  Raises
    :class:`toast.errors.QueryError` for unsafe variables, for an answer that is not unique, and if
    grounding exceeds a limit.
    """
    result = engine.ground_apart(
        query.files, "", query.rules, query.answer, rows=facts, memory_bytes=_MEMORY_BYTES,
        checks=query.checks,
    )  # fmt: skip
    if isinstance(result, str):
        raise QueryError(f"query: {result}; join fewer variables at once, or bound the recursion")
    if result["error"]:
        message = _unsafe(query, result["messages"]) or one_line(result["messages"])
        raise QueryError(_placed(message or result["error"]))
    if result["overflow"]:
        raise QueryError(f"query: {result['overflow']}")
    if result["open"]:
        name, arity = query.answer
        raise QueryError(
            f"query: {result['open']} atoms of {name}/{arity} depend on their own negation; "
            "remove 'not' from the recursion of its rules"
        )
    for message in result["messages"]:
        warnings.warn(_placed(one_line([message])), RuleWarning, stacklevel=2)
    return [_arguments(row, query.answer) for row in result["rows"]]


_UNSAFE = re.compile(r"^(.+?):(\d+):(\d+)[-\d:]*: error: unsafe variables")


def _unsafe(query: Query, messages: Sequence[str]) -> str:
    """The error for unsafe variables, at the place of the first one."""
    message = next((text for text in messages if "error:" in text), "")
    match = _UNSAFE.match(message)
    names = re.findall(r"note: '(\w+)' is unsafe", message)
    if match is None or not names:
        return ""
    file = match[1] != "<block>"
    text = next((text.text for text in query.files if str(text) == match[1]), query.rules)
    before = 0 if file else query.before
    bare = overflow.ASIDE.sub(lambda aside: re.sub(r"[^\n]", " ", aside[0]), text)
    lines = bare.splitlines(keepends=True)
    # The added head also contains the variables.
    begin = max(sum(map(len, lines[: int(match[2]) - 1])) + int(match[3]) - 1, before)
    uses = (
        (use.start(), name)
        for name in names if (use := re.compile(rf"\b{name}\b").search(bare, begin))
    )  # fmt: skip
    start, first = min(uses, default=(begin, names[0]))
    line = text.count("\n", 0, start) + 1
    column = len(text[text.rfind("\n", 0, start) + 1 : start].encode()) + 1
    user = text if file else text[before:].removesuffix("\n.")
    place = _Place(match[1] if file else "query", user, before if line == 1 else 0, file)
    listed = ", ".join(sorted(names, key=lambda name: name != first))
    return (
        f"{place.at(line, column)}: unsafe variables {listed}: no positive atom of the body binds "
        "them"
    )


def _placed(message: str) -> str:
    """A message of clingo about a text that is not a file."""
    return re.sub(r"^<block>:\d+:?", "query:", message)


def _argument_pattern(depth: int) -> re.Pattern[str]:
    """A pattern for a term in an argument list, with at most ``depth`` levels."""
    string = r'"(?:[^"\\]|\\.)*"'
    inner = rf'(?:[^()"]|{string})*'
    for _ in range(depth):
        inner = rf'(?:[^()"]|{string}|\({inner}\))*'
    return re.compile(rf'(?:[^(),"]|{string}|\({inner}\))+')


_ARGUMENT = _argument_pattern(4)


def _arguments(row: str, predicate: Predicate) -> tuple[str, ...]:
    """The arguments of an atom."""
    name, arity = predicate
    if not arity:
        return ()
    arguments = tuple(_ARGUMENT.findall(row[len(name) + 1 : -1]))
    if len(arguments) == arity:
        return arguments
    return tuple(str(argument) for argument in clingo.parse_term(row).arguments)
