"""Queries over solved relations, as DataFrames (paper, section 3: the analysis as relations)."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from toast import lazy
from toast.errors import QueryError
from toast.logic import (
    LARGEST,
    Declaration,
    Predicate,
    Query,
    ask,
    declarations,
    read_audit,
    read_query,
    schema,
)
from toast.resources import directory

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy.module("pandas")

#: Columns of terms, as clingo writes them; numbers may be numbers.
Columns = Sequence[Iterable[Any]]
#: How to make each relation.
Relations = Mapping[Predicate, Callable[[], Columns]]

#: Predicates that queries may use of ``facts/schema.lp``.
GIVEN: frozenset[Predicate] = frozenset({
    ("op", 2), ("operand", 3), ("result", 3), ("dtype", 2), ("rank", 2), ("dim", 3),
    ("attribute", 3), ("attribute", 4), ("tied", 2), ("repeats", 2),
    ("factor", 5), ("factor_size", 3), ("reduction", 3), ("need_replication", 2),
    ("permutation", 2), ("halo", 3), ("without_rule", 1),
    ("annotates", 3), ("def_use", 2), ("shardable", 1), ("color", 2), ("conflict", 3), ("box", 4),
    ("compatibility_set", 3), ("isomorphic", 2), ("argument_group", 2), ("color_group", 2),
    ("same_name", 2),
})  # fmt: skip


def facts(relations: Relations, mentions: Iterable[Predicate]) -> dict[Predicate, list[str]]:
    """The relations that are mentioned: a term ``(a,b)`` for each row.

    Raises :class:`toast.errors.QueryError` for a number that clingo would wrap.
    """
    found = {}
    for predicate in sorted(mentions):
        row = f"({','.join(['%s'] * predicate[1])})"
        columns = [list(column) for column in relations[predicate]()]
        for column in columns:
            _check_range(predicate, column)
        found[predicate] = [*map(row.__mod__, zip(*columns, strict=True))]
    return found


def _check_range(predicate: Predicate, column: list[Any]) -> None:
    """Columns hold numbers, or terms."""
    if column and isinstance(column[0], int):
        beyond = next((n for n in (max(column), -min(column) - 1) if n > LARGEST), None)
        if beyond is not None:
            name, arity = predicate
            raise QueryError(
                f"query: {name}/{arity} has numbers beyond {LARGEST}, the limit of 32 bits; "
                "remove it from the query"
            )


class Vocabulary(Protocol):
    """The relations of a program and its analysis."""

    @property
    def relations(self) -> Relations:
        """How to make the relation of every predicate."""

    @property
    def names(self) -> Sequence[str]:
        """``[names]`` the term of each name."""


#: What is missing, by the section of the vocabulary.
_MISSING = {2: "a mesh", 3: "a plan"}
_WORD = re.compile(r"[a-z_][A-Za-z0-9_]*")


def audits() -> dict[str, pathlib.Path]:
    """The shipped audits: files of ``rules/queries`` by name."""
    files = sorted((directory("rules") / "queries").glob("*.lp"))
    return {path.stem: path for path in files if path.stem != "vocabulary"}


def purpose(path: pathlib.Path) -> str:
    """What an audit answers: the ``%%%`` comment that its file opens with, on one line."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("%%%"):
            break
        lines.append(line.lstrip("% ").strip())
    return " ".join(lines)


@functools.cache
def vocabulary() -> Mapping[Predicate, tuple[Declaration, int]]:
    """Every predicate of ``rules/queries/vocabulary.lp``, with its section: what it needs."""
    text = (directory("rules") / "queries" / "vocabulary.lp").read_text(encoding="utf-8")
    sections = re.split(r"^%%% (?=\d\. )", text, flags=re.MULTILINE)[1:]
    return {
        declared.predicate: (declared, number)
        for number, section in enumerate(sections, 1)
        for declared in declarations(section)
    }


def meanings() -> list[tuple[Declaration, int]]:
    """Every predicate that queries may use, with what it needs (:func:`needs`)."""
    given = [(declared, 1) for predicate, declared in schema().items() if predicate in GIVEN]
    return [*given, *vocabulary().values()]


def prepare(body: str | pathlib.Path, rules: Sequence[str | pathlib.Path] = ()) -> Query:
    """The query that ``body`` is: an audit's name, a file, or a rule body.

    ``rules`` are files that define further predicates.  Raises :class:`toast.errors.QueryError`.
    """
    if not isinstance(body, str | pathlib.Path):
        raise QueryError(
            f"query: {type(body).__name__} is not a query; use a string or the Path of a file"
        )
    listed = isinstance(rules, Sequence) and not isinstance(rules, str)
    if not listed or not all(isinstance(path, str | pathlib.Path) for path in rules):
        raise QueryError("query: rules must be a list of paths; use rules=['mine.lp']")
    known = {*GIVEN, *vocabulary()}
    files = [pathlib.Path(path) for path in rules]
    text = str(body).strip()
    if isinstance(body, pathlib.Path) or text.endswith(".lp"):
        return read_audit(pathlib.Path(body), known, files)
    if _WORD.fullmatch(text):
        shipped = audits()
        if text not in shipped:
            raise QueryError(f"no audit named {text}; {_near(text, shipped)}")
        return read_audit(shipped[text], known, files)
    return read_query(str(body), known, files)


def _near(name: str, known: Mapping[str, Any]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def missing(query: Query, given: Container[Predicate] = ()) -> QueryError:
    """The error of a query that is not given what it needs."""
    lacking = (p for p in query.mentions if p in vocabulary() and p not in given)
    name, arity = predicate = max(lacking, key=lambda p: (vocabulary()[p][1], p))
    what = _MISSING[vocabulary()[predicate][1]]
    return QueryError(
        f"query: only {what} has {name}/{arity}; ask Plan.query",
        shell="give --mesh, or a plan's JSON file for TARGET",
    )


def needs(query: Query) -> int:
    """What a query asks for: 1 an analysis alone, 2 a mesh, 3 a plan."""
    return max((vocabulary()[p][1] for p in query.mentions if p in vocabulary()), default=1)


def evaluate(query: Query, relations: Relations, label: Callable[[int, str], str]) -> pd.DataFrame:
    """The answer: a column per variable, distinct rows, sorted.

    Numbers are numbers; ``label`` says what the name of an op's factor is called, everything else
    is text.  Raises :class:`toast.errors.QueryError` where ``relations`` lack what is asked.
    """
    if not query.mentions <= relations.keys():
        raise missing(query, relations)
    lazy.begin("pandas")
    rows = ask(query, facts(relations, query.mentions))
    if not query.columns:
        return pd.DataFrame(index=pd.RangeIndex(len(rows)))
    cells = {text: _decode(text, label) for row in rows for text in row}
    keys = {text: _key(text, cells[text]) for text in cells}
    rows.sort(key=lambda row: [keys[text] for text in row])
    for column, largest_first in reversed(query.order):
        rows.sort(key=lambda row: keys[row[column]], reverse=largest_first)
    columns = zip(*rows, strict=True) if rows else [()] * len(query.columns)
    return pd.DataFrame(
        {
            name: pd.Series([cells[text] for text in column], dtype=None if rows else object)
            for name, column in zip(query.columns, columns, strict=True)
        }
    )


#: A dimension name as a term; its factor is at most three deep.
_NAME = re.compile(r"name\((\d+),((?:[^()\"]|\"(?:[^\"\\]|\\.)*\"|\((?:[^()]|\([^()]*\))*\))*)\)")
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def _decode(text: str, label: Callable[[int, str], str]) -> int | str:
    if text.startswith('"'):
        return re.sub(r'\\[n"\\]', lambda found: _ESCAPES[found[0]], text[1:-1])
    if text.removeprefix("-").isdigit():
        return int(text)
    return _NAME.sub(lambda found: label(int(found[1]), found[2]), text)


def _key(text: str, cell: int | str) -> tuple[Any, ...]:
    """Numbers come first, names by op, then all else by its text."""
    if isinstance(cell, int):
        return 0, cell, ""
    found = _NAME.match(text)
    return (1, int(found[1]), found[2]) if found else (2, 0, cell)
