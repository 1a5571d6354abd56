"""Evaluates rules in strata, so that closures can be called from them.

The closures of ``rules/built_in.lp`` take whole relations.  So rules are put in order: all that
derive a relation are grounded before those that call a function with it.  Rules that what is asked
for does not depend on are left out, and so are those for relations that are stated.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import clingo
import numpy as np
import numpy.typing as npt
from clingo import ast

from toast.errors import RuleError, RuleWarning
from toast.logic import closures
from toast.logic.closures import Edges
from toast.logic.engine import (
    LogicFile,
    Predicate,
    head_of,
    one_line,
    parse,
    predicate_of,
    read_files,
)
from toast.logic.texts import LogicText, TextBlock, walk

Ints = npt.NDArray[np.int64]


def predicate(text: str) -> Predicate:
    """``("color", 2)`` of ``"color/2"``."""
    name, arity = text.split("/")
    return name, int(arity)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of a file, with what it depends on."""

    file: pathlib.Path
    line: int
    text: str
    head: Predicate
    #: Predicates of its body.
    uses: frozenset[Predicate]
    #: Predicates that its functions take as a whole.
    closes: frozenset[Predicate]


@functools.lru_cache(maxsize=64)
def _rules(text: LogicText) -> tuple[Rule, ...]:
    found, file = [], text.path
    for statement in parse(text, RuleError):
        if statement.ast_type is not ast.ASTType.Rule:
            continue
        head, line = head_of(statement), statement.location.begin.line
        if head is None:
            raise RuleError(f"{file}:{line}: a head that is no atom; write one rule for each atom")
        closes = {
            relation
            for node in walk(statement)
            if node.ast_type is ast.ASTType.Function and node.external
            for relation in _relations(node.name, node.arguments)
        }
        body = (atom for part in statement.body for atom in walk(part))
        uses = {predicate_of(a.symbol) for a in body if a.ast_type is ast.ASTType.SymbolicAtom}
        own = head.name, len(head.arguments)
        found.append(Rule(file, line, str(statement), own, frozenset(uses), frozenset(closes)))
    return tuple(found)


def rules_of(files: Iterable[LogicFile]) -> list[Rule]:
    """The rules of some files; raises :class:`toast.errors.RuleError` where one does not parse."""
    return [rule for text in read_files(files) for rule in _rules(text)]


#: The arity of each relation that a function takes.
FUNCTIONS: Mapping[str, tuple[int, ...]] = {
    "components": (2, 1), "paths": (2, 2), "twins": (2, 3), "same": (2,),
}  # fmt: skip


def _relations(function: str, arguments: Sequence[Any]) -> list[Predicate]:
    """The relations that a function is called with."""
    arities = FUNCTIONS.get(function, ())
    if len(arguments) != len(arities):
        known = ", ".join(f"@{name}" for name in FUNCTIONS)
        raise RuleError(
            f"@{function} with {len(arguments)} relations: no such function; there are {known}"
        )
    return [(str(argument), arity) for argument, arity in zip(arguments, arities, strict=True)]


def strata(
    rules: Sequence[Rule], asked: Iterable[Predicate], stated: Iterable[Predicate]
) -> list[list[Rule]]:
    """The rules that ``asked`` depends on, in the order in which they can be grounded.

    There are none for what is ``stated``.
    """
    by_head: dict[Predicate, list[Rule]] = defaultdict(list)
    for rule in rules:
        by_head[rule.head].append(rule)
    for known in stated:
        by_head.pop(known, None)
    needed: set[Predicate] = set()
    left = list(asked)
    while left:
        head = left.pop()
        if head not in needed:
            needed.add(head)
            left += [p for rule in by_head[head] for p in rule.uses | rule.closes]
    level = dict.fromkeys(needed, 0)
    # Few levels, and each pass raises what depends on others: a fixed point soon.
    for _ in range(len(needed) + 1):
        before = dict(level)
        for head in needed:
            for rule in by_head[head]:
                below = [level[p] for p in rule.uses] + [level[p] + 1 for p in rule.closes]
                level[head] = max([level[head], *below])
        if level == before:
            break
    else:
        raise RuleError("rules: a function is called with a relation that follows from its answer")
    found: list[list[Rule]] = [[] for _ in range(max(level.values(), default=0) + 1)]
    for rule in rules:
        if rule.head in needed and rule in by_head[rule.head]:
            found[level[rule.head]].append(rule)
    return found


#: Called with a model and the rules that were just grounded in it.
Observer = Callable[["LogicModel", Sequence[Rule]], None]
#: Tests look on here, to see which rules take part.
observers: list[Observer] = []


_NO_FILES = TextBlock(())


class LogicModel:
    """The atoms that rules derive from facts; there is one answer, since rules are stratified."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._control = clingo.Control(["--warn=all"], logger=lambda _code, t: self._log(t))
        self._parts = 0
        #: Predicates that were stated or derived.
        self._known: set[Predicate] = set()

    def _log(self, text: str) -> None:
        self._messages.append(text)

    def state(self, facts: str, predicates: Iterable[str]) -> None:
        """Add facts, as text; ``predicates`` are those that it may hold."""
        self._ground(facts)
        self._known |= {predicate(name) for name in predicates}

    def load(self, files: Sequence[LogicFile], derived: Iterable[str]) -> None:
        """Ground whole files, without closures; ``derived`` is what may be used of their answer."""
        block = TextBlock(read_files(files))
        self._messages.clear()
        try:
            for text in block.padded:
                self._control.add("base", [], text)
            self._control.ground([("base", [])])
        except RuntimeError as error:
            raise RuleError(block.named(one_line(self._messages)) or str(error)) from None
        self._remark(block)
        self._known |= {predicate(name) for name in derived}
        for observer in observers:
            observer(self, rules_of(block.texts))

    def state_rows(self, rows: Mapping[str, Sequence[str]]) -> None:
        """Add facts by predicate (``name/arity``): a term ``(a,b)``, or ``(a,)``, for each."""
        context = _RuleFunctions()
        text = []
        for number, (name, terms) in enumerate(rows.items()):
            symbol, arity = predicate(name)
            # Read as one term, they take a third of the time that statements do.
            setattr(context, f"rows{number}", functools.partial(_symbols, terms))
            variables = ",".join(f"X{i}" for i in range(arity)) + "," * (arity == 1)
            text.append(f"{symbol}({variables.rstrip(',')}) :- ({variables}) = @rows{number}().")
            self._known.add((symbol, arity))
        self._ground("\n".join(text), context)

    def take(self, other: LogicModel, predicates: Iterable[str]) -> None:
        """Add the atoms of another model, as facts."""
        with self._control.backend() as backend:
            for name in predicates:
                for symbol in other.symbols(name):
                    backend.add_rule([backend.add_atom(symbol)])

    def derive(
        self,
        files: Iterable[LogicFile],
        asked: Iterable[str],
        *,
        stated: Iterable[str] = (),
        arrays: Mapping[str, Edges] | None = None,
    ) -> None:
        """Derive what is ``asked`` (``name/arity``) by the rules of ``files``.

        Relations that are known already, or ``stated``, are not derived.  ``arrays`` are relations
        that functions take in place of atoms.
        """
        goals = [predicate(name) for name in asked]
        self._known |= {predicate(name) for name in stated}
        for rules in strata(rules_of(files), goals, self._known):
            if rules:
                self._derive(rules, arrays or {})
        self._known |= set(goals)

    def _derive(self, rules: Sequence[Rule], arrays: Mapping[str, Edges]) -> None:
        context = _RuleFunctions()
        for name in FUNCTIONS:
            setattr(context, name, functools.partial(self._call, name, arrays))
        mentioned = {p for rule in rules for p in rule.uses}
        silent = "".join(f"#defined {name}/{arity}.\n" for name, arity in sorted(mentioned))
        try:
            self._ground(silent + "\n".join(rule.text for rule in rules), context)
        except RuleError as error:
            raise RuleError(_located(rules) or str(error)) from None
        self._known |= {rule.head for rule in rules}
        for observer in observers:
            observer(self, rules)

    def _ground(self, text: str, context: object = None) -> None:
        part = f"part{self._parts}"
        self._parts += 1
        self._messages.clear()
        try:
            self._control.add(part, [], text)
            self._control.ground([(part, [])], context=context)
        except RuntimeError as error:
            raise RuleError(one_line(self._messages) or str(error)) from None
        self._remark()

    def _remark(self, block: TextBlock = _NO_FILES) -> None:
        for message in self._messages:
            warnings.warn(one_line([block.named(message)]), RuleWarning, stacklevel=4)

    def _call(
        self, function: str, arrays: Mapping[str, Edges], *arguments: clingo.Symbol
    ) -> list[clingo.Symbol]:
        """A function of ``rules/built_in.lp``."""
        relations = _relations(function, arguments)
        edges = arrays.get(relations[0][0])
        if edges is not None:
            return _of_numbers(function, edges, self._rows(relations[1]))
        rows = [self._rows(relation) for relation in relations[:1]]
        if function == "twins" and not rows[0]:
            return []  # nothing to compare, so no need to read the many steps
        rows += [self._rows(relation) for relation in relations[1:]]
        if function == "components":
            rows[1] = [row[0] for row in rows[1]]
        pairs = getattr(closures, function)(*rows)
        return _symbols(f"({written(one)},{written(other)})" for one, other in pairs)

    def _rows(self, relation: Predicate) -> list[Any]:
        return [row[1:] for row in read_terms(self._symbols(relation), quotes=True)]

    def _symbols(self, relation: Predicate) -> list[clingo.Symbol]:
        # All are facts, as rules are stratified.
        return [atom.symbol for atom in self._control.symbolic_atoms.by_signature(*relation)]

    def symbols(self, name: str) -> list[clingo.Symbol]:
        """The atoms of a predicate (``name/arity``) as clingo's symbols."""
        return self._symbols(predicate(name))

    def atoms(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of a predicate's atoms, in clingo's order of derivation."""
        return [row[1:] for row in read_terms(self.symbols(name))]

    def numbers(self, name: str, *, first: str = "") -> Ints:
        """``[atoms, numbers]``: all numbers in the arguments of a predicate's atoms, in order.

        They have no others than numbers, or terms made of as many.  With ``first`` those alone that
        have this constant as their first argument.
        """
        symbol, _ = predicate(name)
        texts = str(clingo.Tuple_(self.symbols(name))).split(f"{symbol}(")[1:]
        chosen = [text for text in texts if text.startswith(first)]
        digits = np.array(_DIGITS.findall(" ".join(chosen)), dtype=np.int64)
        return digits.reshape(len(chosen), -1 if chosen else 0)


def _located(rules: Sequence[Rule]) -> str:
    """What is wrong with the files of rules, by file and line; empty where nothing is by itself."""
    messages: list[str] = []
    control = clingo.Control(logger=lambda _code, text: messages.append(text))
    try:
        for file in dict.fromkeys(rule.file for rule in rules):
            control.load(str(file))
        control.ground([("base", [])], context=_RuleFunctions())
    except RuntimeError:
        return one_line(messages)
    return ""


class _RuleFunctions:
    """What ``@`` functions are looked up in."""


def _of_numbers(function: str, edges: Edges, rows: list[Any]) -> list[clingo.Symbol]:
    """What a function answers where its first relation is an array."""
    pairs: Iterable[tuple[int, int]]
    if function == "components":
        nodes = [node for (node,) in rows]
        pairs = zip(nodes, edges.components[nodes].tolist(), strict=True)
    else:
        pairs = closures.paths(edges.pairs, rows)
    return _symbols(f"({one},{other})" for one, other in pairs)


# -- terms, many at once: one by one, clingo's symbols take ten times as long ----------------------

_DIGITS = re.compile(r"\d+")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|\w*\(|#?-?\w+|\)')
_ESCAPES = re.compile(r'\\([n"\\])')


def read_terms(symbols: Sequence[clingo.Symbol], *, quotes: bool = False) -> list[Any]:
    """Symbols as terms; with ``quotes``, strings keep theirs, so that they are no constants."""
    inner: list[Any] = []
    outer: list[list[Any]] = []
    for token in _TOKENS.findall(str(clingo.Tuple_(symbols)) if symbols else ""):
        if token == ")":
            done, inner = tuple(inner), outer.pop()
            inner.append(() if done == ("",) else done)
        elif token[-1] == "(":
            outer.append(inner)
            inner = [token[:-1]]
        elif token[0] == '"':
            inner.append(token if quotes else _ESCAPES.sub(_unescaped, token[1:-1]))
        else:
            inner.append(int(token) if token.lstrip("-").isdigit() else token)
    return list(inner[0][1:]) if inner else []


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def written(term: Any) -> str:
    """A term as clingo reads it; strings have their quotes."""
    if term == ():
        return "()"
    if isinstance(term, tuple):
        inner = ",".join(map(written, term[1:]))
        return f"{term[0]}({inner}{',' * (not term[0] and len(term) == 2)})"
    return str(term)


def _symbols(texts: Iterable[str]) -> list[clingo.Symbol]:
    """Terms, read as one."""
    listed = ",".join(texts)
    return list(clingo.parse_term(f"({listed},)").arguments) if listed else []
