"""Queries over the relations of an analysis (section 3 of the paper), as DataFrames."""

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

#: Columns of terms in clingo's syntax; numbers may be integers.
Columns = Sequence[Iterable[Any]]
#: For each predicate, a function that returns its relation.
Relations = Mapping[Predicate, Callable[[], Columns]]

#: The predicates of ``facts/schema.lp`` for queries.
SCHEMA_PREDICATES: frozenset[Predicate] = frozenset({
    ("op", 2), ("operand", 3), ("result", 3), ("dtype", 2), ("rank", 2), ("dim", 3),
    ("attribute", 3), ("attribute", 4), ("tied", 2), ("repeats", 2),
    ("factor", 5), ("factor_size", 3), ("reduction", 3), ("need_replication", 2),
    ("permutation", 2), ("halo", 3), ("without_rule", 1), ("manual", 2), ("fixed", 3),
    ("annotates", 3), ("def_use", 2), ("shardable", 1), ("color", 2), ("conflict", 3), ("box", 4),
    ("compatibility_set", 3), ("isomorphic", 2), ("argument_group", 2), ("color_group", 2),
    ("same_name", 2),
})  # fmt: skip


def facts(relations: Relations, mentions: Iterable[Predicate]) -> dict[Predicate, list[str]]:
    """The relations of the predicates in ``mentions``, with a term ``(a,b)`` for each row.

    Raises :class:`toast.errors.QueryError` for a number beyond 32 bits.
    """
    rows_of = {}
    for predicate in sorted(mentions):
        row = f"({','.join(['%s'] * predicate[1])})"
        columns = [list(column) for column in relations[predicate]()]
        for column in columns:
            _check_range(predicate, column)
        rows_of[predicate] = [*map(row.__mod__, zip(*columns, strict=True))]
    return rows_of


def _check_range(predicate: Predicate, column: list[Any]) -> None:
    """Raise QueryError if a column of integers has one beyond 32 bits."""
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
        """For each predicate, a function that returns its relation."""

    @property
    def names(self) -> Sequence[str]:
        """``[names]`` the term of each name."""


#: What a predicate needs, by its section of the vocabulary.
_MISSING = {2: "a mesh", 3: "a plan"}
_WORD = re.compile(r"[a-z_][A-Za-z0-9_]*")


def audits() -> dict[str, pathlib.Path]:
    """The audits: the files of ``rules/queries`` by name."""
    files = sorted((directory("rules") / "queries").glob("*.lp"))
    return {path.stem: path for path in files if path.stem != "vocabulary"}


def purpose(path: pathlib.Path) -> str:
    """The purpose of an audit: the ``%%%`` comment at the beginning of its file, on one line."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("%%%"):
            break
        lines.append(line.lstrip("% ").strip())
    return " ".join(lines)


@functools.cache
def vocabulary() -> Mapping[Predicate, tuple[Declaration, int]]:
    """The predicates of ``rules/queries/vocabulary.lp``, with the number of their section."""
    text = (directory("rules") / "queries" / "vocabulary.lp").read_text(encoding="utf-8")
    sections = re.split(r"^%%% (?=\d\. )", text, flags=re.MULTILINE)[1:]
    return {
        declared.predicate: (declared, number)
        for number, section in enumerate(sections, 1)
        for declared in declarations(section)
    }


def meanings() -> list[tuple[Declaration, int]]:
    """All predicates for queries, with the level that they need (:func:`needs`)."""
    declared_in_schema = [
        (declared, 1) for predicate, declared in schema().items() if predicate in SCHEMA_PREDICATES
    ]
    return [*declared_in_schema, *vocabulary().values()]


def prepare(body: str | pathlib.Path, rules: Sequence[str | pathlib.Path] = ()) -> Query:
    """Parse a query: the name of an audit, a file, or a rule body.

    ``rules`` are files that define additional predicates.  Raises
    :class:`toast.errors.QueryError` for an invalid query.
    """
    if not isinstance(body, str | pathlib.Path):
        raise QueryError(
            f"query: {type(body).__name__} is not a query; use a string or the Path of a file"
        )
    listed = isinstance(rules, Sequence) and not isinstance(rules, str)
    if not listed or not all(isinstance(path, str | pathlib.Path) for path in rules):
        raise QueryError("query: rules must be a list of paths; use rules=['mine.lp']")
    known = {*SCHEMA_PREDICATES, *vocabulary()}
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


def missing(query: Query, available: Container[Predicate] = ()) -> QueryError:
    """The error for a query that needs a mesh or a plan."""
    lacking = (p for p in query.mentions if p in vocabulary() and p not in available)
    name, arity = predicate = max(lacking, key=lambda p: (vocabulary()[p][1], p))
    what = _MISSING[vocabulary()[predicate][1]]
    return QueryError(
        f"query: only {what} has {name}/{arity}; use Plan.query",
        shell="add --mesh, or use a plan file as TARGET",
    )


def needs(query: Query) -> int:
    """The level that a query needs: 1 for an analysis, 2 for a mesh, 3 for a plan."""
    return max((vocabulary()[p][1] for p in query.mentions if p in vocabulary()), default=1)


def evaluate(query: Query, relations: Relations, label: Callable[[int, str], str]) -> pd.DataFrame:
    """The answer to a query: one column per variable, with distinct, sorted rows.

    Numbers are integers, everything else is text; ``label`` returns the text for the factor of an
    op.  Raises :class:`toast.errors.QueryError` if ``relations`` lack a predicate of the query, or
    if a limit is exceeded.
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


#: The name of a dimension as a term; its factor has at most three levels.
_NAME = re.compile(r"name\((\d+),((?:[^()\"]|\"(?:[^\"\\]|\\.)*\"|\((?:[^()]|\([^()]*\))*\))*)\)")
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def _decode(text: str, label: Callable[[int, str], str]) -> int | str:
    if text.startswith('"'):
        return re.sub(r'\\[n"\\]', lambda match: _ESCAPES[match[0]], text[1:-1])
    if text.removeprefix("-").isdigit():
        return int(text)
    return _NAME.sub(lambda match: label(int(match[1]), match[2]), text)


def _key(text: str, cell: int | str) -> tuple[Any, ...]:
    """A sort key: numbers, then names by op, then other texts."""
    if isinstance(cell, int):
        return 0, cell, ""
    match = _NAME.match(text)
    return (1, int(match[1]), match[2]) if match else (2, 0, cell)
