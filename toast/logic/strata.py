"""Evaluates rules in strata, so that rules can call closures.

The closures of ``rules/built_in.lp`` take whole relations.  All rules that derive a relation are
therefore grounded before the rules that call a function with it.  Rules that the requested
relations do not depend on are omitted, and so are rules for relations that are given as facts.
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
    """The predicate of a text: ``("color", 2)`` for ``"color/2"``."""
    name, arity = text.split("/")
    return name, int(arity)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of a file, with its dependencies."""

    file: pathlib.Path
    line: int
    text: str
    head: Predicate
    #: The predicates of the body.
    uses: frozenset[Predicate]
    #: The predicates that its functions take as whole relations.
    closes: frozenset[Predicate]


@functools.lru_cache(maxsize=64)
def _rules(text: LogicText) -> tuple[Rule, ...]:
    rules, file = [], text.path
    for statement in parse(text, RuleError):
        if statement.ast_type is not ast.ASTType.Rule:
            continue
        head, line = head_of(statement), statement.location.begin.line
        if head is None:
            raise RuleError(f"{file}:{line}: the head is not an atom; write one rule for each atom")
        closes = {
            relation
            for node in walk(statement)
            if node.ast_type is ast.ASTType.Function and node.external
            for relation in _relations(node.name, node.arguments)
        }
        body = (atom for part in statement.body for atom in walk(part))
        uses = {predicate_of(a.symbol) for a in body if a.ast_type is ast.ASTType.SymbolicAtom}
        own = head.name, len(head.arguments)
        rules.append(Rule(file, line, str(statement), own, frozenset(uses), frozenset(closes)))
    return tuple(rules)


def rules_of(files: Iterable[LogicFile]) -> list[Rule]:
    """The rules of files; raises :class:`toast.errors.RuleError` for invalid syntax."""
    return [rule for text in read_files(files) for rule in _rules(text)]


#: The arity of each relation that a function takes.
FUNCTIONS: Mapping[str, tuple[int, ...]] = {
    "components": (2, 1), "paths": (2, 2), "twins": (2, 3), "same": (2,),
}  # fmt: skip


def _relations(function: str, arguments: Sequence[Any]) -> list[Predicate]:
    """The relations that a function takes; raises RuleError for unknown functions."""
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
    """The rules that the predicates ``asked`` depend on, in strata in grounding order.

    Rules for the predicates ``stated`` are omitted.  Raises :class:`toast.errors.RuleError` if a
    function takes a relation that depends on its result.
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
    # There are few levels, and each pass raises dependent predicates, so the loop is short.
    for _ in range(len(needed) + 1):
        before = dict(level)
        for head in needed:
            for rule in by_head[head]:
                below = [level[p] for p in rule.uses] + [level[p] + 1 for p in rule.closes]
                level[head] = max([level[head], *below])
        if level == before:
            break
    else:
        raise RuleError("rules: a function takes a relation that depends on its result")
    levels: list[list[Rule]] = [[] for _ in range(max(level.values(), default=0) + 1)]
    for rule in rules:
        if rule.head in needed and rule in by_head[rule.head]:
            levels[level[rule.head]].append(rule)
    return levels


#: Called with a model and the rules that it has just grounded.
Observer = Callable[["LogicModel", Sequence[Rule]], None]
#: Observers of all models; tests use them to see which rules take part.
observers: list[Observer] = []


_NO_FILES = TextBlock(())


class LogicModel:
    """The atoms that rules derive from facts; rules are stratified, so there is one answer."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._control = clingo.Control(["--warn=all"], logger=lambda _code, t: self._log(t))
        self._parts = 0
        #: The predicates with facts or derived atoms.
        self._known: set[Predicate] = set()

    def _log(self, text: str) -> None:
        self._messages.append(text)

    def state(self, facts: str, predicates: Iterable[str]) -> None:
        """Add facts as text; ``predicates`` (``name/arity``) are those of the facts."""
        self._ground(facts)
        self._known |= {predicate(name) for name in predicates}

    def load(self, files: Sequence[LogicFile], derived: Iterable[str]) -> None:
        """Ground whole files, without closures; ``derived`` are the predicates for later use."""
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
        """Add facts by predicate (``name/arity``), each as a term ``(a,b)`` or ``(a,)``."""
        context = _RuleFunctions()
        text = []
        for number, (name, terms) in enumerate(rows.items()):
            symbol, arity = predicate(name)
            # Parsing one large term takes a third of the time of parsing statements.
            setattr(context, f"rows{number}", functools.partial(_symbols, terms))
            variables = ",".join(f"X{i}" for i in range(arity)) + "," * (arity == 1)
            text.append(f"{symbol}({variables.rstrip(',')}) :- ({variables}) = @rows{number}().")
            self._known.add((symbol, arity))
        self._ground("\n".join(text), context)

    def take(self, other: LogicModel, predicates: Iterable[str]) -> None:
        """Add the atoms of another model as facts."""
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
        """Derive the predicates ``asked`` (``name/arity``) with the rules of ``files``.

        Predicates that are known already, or ``stated``, are not derived.  Functions take the
        relations in ``arrays`` instead of atoms.  Raises :class:`toast.errors.RuleError`.
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
        """Call a function of ``rules/built_in.lp``."""
        relations = _relations(function, arguments)
        edges = arrays.get(relations[0][0])
        if edges is not None:
            return _of_numbers(function, edges, self._rows(relations[1]))
        rows = [self._rows(relation) for relation in relations[:1]]
        if function == "twins" and not rows[0]:
            return []  # without nodes, the many steps need not be read
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
        """The atoms of a predicate (``name/arity``) as clingo symbols."""
        return self._symbols(predicate(name))

    def atoms(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of the atoms of a predicate, in clingo's order of derivation."""
        return [row[1:] for row in read_terms(self.symbols(name))]

    def numbers(self, name: str, *, first: str = "") -> Ints:
        """``[atoms, numbers]``: all numbers in the arguments of the atoms of a predicate.

        The arguments must be numbers, or terms with the same count of numbers.  ``first`` selects
        the atoms with this constant as their first argument.
        """
        symbol, _ = predicate(name)
        texts = str(clingo.Tuple_(self.symbols(name))).split(f"{symbol}(")[1:]
        chosen = [text for text in texts if text.startswith(first)]
        digits = np.array(_DIGITS.findall(" ".join(chosen)), dtype=np.int64)
        return digits.reshape(len(chosen), -1 if chosen else 0)


def _located(rules: Sequence[Rule]) -> str:
    """The error in the files of rules, with file and line; ``""`` if the files are valid alone."""
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
    """The context in which clingo looks up ``@`` functions."""


def _of_numbers(function: str, edges: Edges, rows: list[Any]) -> list[clingo.Symbol]:
    """The result of a function whose first relation is an array."""
    pairs: Iterable[tuple[int, int]]
    if function == "components":
        nodes = [node for (node,) in rows]
        pairs = zip(nodes, edges.components[nodes].tolist(), strict=True)
    else:
        pairs = closures.paths(edges.pairs, rows)
    return _symbols(f"({one},{other})" for one, other in pairs)


# -- many terms at once: single clingo symbols take ten times as long ----------------------

_DIGITS = re.compile(r"\d+")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|\w*\(|#?-?\w+|\)')
_ESCAPES = re.compile(r'\\([n"\\])')


def read_terms(symbols: Sequence[clingo.Symbol], *, quotes: bool = False) -> list[Any]:
    """Symbols as terms; with ``quotes``, strings keep quotes, unlike constants."""
    inner: list[Any] = []
    outer: list[list[Any]] = []
    for token in _TOKENS.findall(str(clingo.Tuple_(symbols)) if symbols else ""):
        if token.isdecimal():  # most are numbers
            inner.append(int(token))
        elif token == ")":
            done, inner = tuple(inner), outer.pop()
            inner.append(() if done == ("",) else done)
        elif token[-1] == "(":
            outer.append(inner)
            inner = [token[:-1]]
        elif token[0] == '"':
            inner.append(token if quotes else _ESCAPES.sub(_unescaped, token[1:-1]))
        else:
            inner.append(int(token) if token[0] == "-" else token)
    return list(inner[0][1:]) if inner else []


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def written(term: Any) -> str:
    """A term in clingo's syntax; strings must have quotes."""
    if term == ():
        return "()"
    if isinstance(term, tuple):
        inner = ",".join(map(written, term[1:]))
        return f"{term[0]}({inner}{',' * (not term[0] and len(term) == 2)})"
    return str(term)


def _symbols(texts: Iterable[str]) -> list[clingo.Symbol]:
    """The symbols of texts, parsed as one term."""
    listed = ",".join(texts)
    return list(clingo.parse_term(f"({listed},)").arguments) if listed else []
