"""The one module that imports clingo: solving, reading facts, and checking rule files.

A solve is a single answer set: the rules of TOAST are stratified, so there is exactly one, and
clingo finds it while grounding.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import clingo
from clingo import ast

from toast.errors import FactError, RuleError, RuleWarning, ToastError
from toast.logic import trial
from toast.resources import directory

#: A ground term in Python: numbers, constants and strings as themselves, functions as (name, ...).
Term = int | str | tuple["Term", ...]

#: Predicate name and arity.
Predicate = tuple[str, int]


#: What grounding a user's rules may take; it need not end at all.
GROUND_SECONDS = 30.0
GROUND_ATOMS = 2_000_000


def solve(
    files: Sequence[pathlib.Path],
    facts: str,
    show: Iterable[str],
    *,
    doubted: pathlib.Path | None = None,
) -> dict[str, list[tuple[Term, ...]]]:
    """Ground ``files`` over ``facts`` and return the atoms of the predicates in ``show``.

    ``show`` holds ``"name/arity"``; the result maps each to its atoms' arguments, in clingo's
    order of derivation.  ``doubted`` is the file among them that a user wrote: whether grounding
    it ends is tried in a process of its own first.  What clingo finds odd, but no error, is a
    :class:`toast.errors.RuleWarning`.  Raises :class:`toast.errors.RuleError` with file and line
    when a file does not parse, is unsafe, or does not end within the limits.
    """
    if doubted is not None:
        _try(files, facts, doubted)
    messages: list[str] = []
    control = clingo.Control(["--warn=all"], logger=lambda _code, text: messages.append(text))
    try:
        for file in files:
            control.load(str(file))
        if facts:
            control.add("base", [], facts)
        control.ground([("base", [])])
    except RuntimeError as error:
        raise RuleError(one_line(messages) or str(error)) from None
    for message in messages:
        warnings.warn(one_line([message]), RuleWarning, stacklevel=2)
    found: dict[str, list[tuple[Term, ...]]] = {}
    for shown in show:
        name, arity = shown.split("/")
        found[shown] = [
            tuple(_term(argument) for argument in atom.symbol.arguments)
            for atom in control.symbolic_atoms.by_signature(name, int(arity))
            if atom.is_fact
        ]
    return found


def derivations(
    files: Sequence[pathlib.Path], facts: str, show: Iterable[str]
) -> dict[str, dict[tuple[Term, ...], list[tuple[pathlib.Path, int]]]]:
    """Which rules derive the atoms of the predicates in ``show``: file and line of each.

    Arguments as for :func:`solve`, which must have accepted the files.  Raises
    :class:`toast.errors.RuleError` where a file is gone or no longer parses.
    """
    shown = frozenset((name, int(arity)) for name, arity in (s.split("/") for s in show))
    control = clingo.Control(logger=lambda _code, _text: None)
    for file in files:
        written = file.stat().st_mtime_ns if file.is_file() else 0
        control.add("base", [], _traced(file, written, shown))
    control.add("base", [], facts)
    control.ground([("base", [])])
    found: dict[str, dict[tuple[Term, ...], list[tuple[pathlib.Path, int]]]] = {}
    for name, arity in sorted(shown):
        atoms = found[f"{name}/{arity}"] = {}
        for atom in control.symbolic_atoms.by_signature(_TRACED + name, arity + 2):
            *arguments, file_, line = (_term(a) for a in atom.symbol.arguments)
            place = pathlib.Path(str(file_)), int(str(line))
            atoms.setdefault(tuple(arguments), []).append(place)
    return {name: {key: sorted(at) for key, at in atoms.items()} for name, atoms in found.items()}


#: Before the name of a predicate: its atoms with file and line of the rule that derives them.
_TRACED = "traced_"


@functools.lru_cache(maxsize=64)
def _traced(file: pathlib.Path, _written: int, shown: frozenset[Predicate]) -> str:
    """A rule file's text, with a second rule for each for a predicate in ``shown``.

    Its head says where it stands: ``factor(Op,F,T,D)`` is ``traced_factor(Op,F,T,D,File,Line)``.
    """
    lines = []
    for statement in parse(file, RuleError):
        lines.append(str(statement))
        head = _head(statement) if statement.ast_type is ast.ASTType.Rule else None
        if head is not None and (head.name, len(head.arguments)) in shown:
            at = head.location
            place = (clingo.String(str(file)), clingo.Number(statement.location.begin.line))
            arguments = [*head.arguments, *(ast.SymbolicTerm(at, symbol) for symbol in place)]
            traced = ast.Function(at, _TRACED + head.name, arguments, 0)
            literal = statement.head.update(atom=ast.SymbolicAtom(traced))
            lines.append(str(statement.update(head=literal)))
    return "\n".join(lines)


def _head(statement: Any) -> Any:
    """The function that a rule's head is; None for any other head."""
    head = statement.head
    if head.ast_type is not ast.ASTType.Literal or head.atom.ast_type is not (
        ast.ASTType.SymbolicAtom
    ):
        return None
    return head.atom.symbol if head.atom.symbol.ast_type is ast.ASTType.Function else None


def rule_line(path: pathlib.Path, predicate: Predicate, using: str = "") -> int:
    """The line of the first rule for ``predicate`` with an atom ``using`` in its body."""
    for statement in parse(path, RuleError):
        if statement.ast_type is ast.ASTType.Rule:
            head = _head(statement)
            body = " ".join(map(str, statement.body))
            if head and (head.name, len(head.arguments)) == predicate and using in body:
                line: int = statement.location.begin.line
                return line
    raise RuleError(f"{path}: no rule for {predicate[0]}/{predicate[1]}; check the installation")


def _try(files: Sequence[pathlib.Path], facts: str, doubted: pathlib.Path) -> None:
    failure = ground_apart(files, facts)
    if isinstance(failure, str):
        raise RuleError(
            f"{doubted}: grounding {failure}; bound its recursion, or join fewer variables at once"
        )


def ground_apart(
    files: Sequence[pathlib.Path],
    facts: str,
    rules: str = "",
    answer: Predicate | None = None,
    *,
    rows: Mapping[Predicate, Sequence[str]] | None = None,
    memory_bytes: int | None = None,
) -> dict[str, Any] | str:
    """Ground in a process of its own, within the limits: what :mod:`toast.logic.trial` says.

    ``rows`` are further facts, by predicate: a term ``(a,b)`` for ``name(a,b)``.  A text says which
    limit was met: ``takes more than 30 seconds``.
    """
    given = {
        "files": list(map(str, files)), "facts": facts, "rules": rules, "answer": answer,
        "rows": [[*predicate, ",".join(given)] for predicate, given in (rows or {}).items()],
        "atoms": GROUND_ATOMS, "bytes": memory_bytes,
    }  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, trial.__file__], input=json.dumps(given), text=True,
            timeout=GROUND_SECONDS, check=False, capture_output=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"takes more than {GROUND_SECONDS:g} seconds"
    if done.returncode == trial.BEYOND:
        return f"makes more than {GROUND_ATOMS} atoms"
    if done.returncode:
        return "ran out of memory"
    found: dict[str, Any] = json.loads(done.stdout)
    return "ran out of memory" if "bad_alloc" in found["error"] else found


def _term(symbol: clingo.Symbol) -> Term:
    kind = symbol.type
    if kind is clingo.SymbolType.Number:
        return int(symbol.number)
    if kind is clingo.SymbolType.String:
        return str(symbol.string)
    if kind is clingo.SymbolType.Function:
        if not symbol.arguments:
            return symbol.name or ()
        return (symbol.name, *(_term(argument) for argument in symbol.arguments))
    return str(symbol)


def show_term(term: Term) -> str:
    """A term as clingo writes it: ``('lhs', 0)`` is ``lhs(0)``."""
    if isinstance(term, tuple):
        head = term[0] if term else ""
        return f"{head}({','.join(show_term(part) for part in term[1:])})"
    return str(term)


def one_line(messages: Sequence[str], *, columns: bool = False) -> str:
    """The first error of clingo's log on one line: ``file:line: message``, or with the column."""
    errors = [text for text in messages if "error:" in text] or list(messages)
    if not errors:
        return ""
    lines = [line.strip() for line in errors[0].strip().splitlines() if line.strip()]
    if "unsafe variables" in lines[0]:
        names = ", ".join(re.findall(r"note: '(\w+)' is unsafe", " ".join(lines)))
        where = lines[0].split("unsafe variables")[0]
        lines = [f"{where}unsafe variables {names}: no positive atom of the body binds them"]
    text = " ".join(lines)
    where = r"^(.*?:\d+)(:\d+)(?:-[\d:]+)?: (?:error|warning|info): "
    return re.sub(where, r"\1\2: " if columns else r"\1: ", text)


# -- declarations --------------------------------------------------------------------------------

_DOCUMENTED = re.compile(r"^%\*?!\s*(\w+)\(([^)]*)\)(.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A documented predicate: its arguments' names, and its documentation."""

    name: str
    arguments: tuple[str, ...]
    text: str

    @property
    def predicate(self) -> Predicate:
        """Name and arity."""
        return self.name, len(self.arguments)


def declarations(text: str) -> Iterator[Declaration]:
    """The predicates a file documents: ``%*! p(A,B) ... *%`` blocks and ``%! p(A): ...`` lines."""
    for found in _DOCUMENTED.finditer(text):
        name, arguments, rest = found.groups()
        end = text.find("*%", found.end()) if found.group(0).startswith("%*") else found.end()
        body = rest + text[found.end() : end]
        yield Declaration(
            name, tuple(part.strip() for part in arguments.split(",")), body.strip(": \n")
        )


@functools.cache
def schema() -> Mapping[Predicate, Declaration]:
    """The predicates of ``facts/schema.lp``, the authority."""
    text = (directory("facts") / "schema.lp").read_text()
    return {declared.predicate: declared for declared in declarations(text)}


@functools.cache
def input_predicates() -> frozenset[Predicate]:
    """The predicates a fact base may state: section 1 of the schema."""
    text = (directory("facts") / "schema.lp").read_text()
    return frozenset(d.predicate for d in declarations(text[: text.index("%%% 2.")]))


# -- reading fact bases and checking rule files --------------------------------------------------


def parse(path: pathlib.Path, error: type[ToastError], *, columns: bool = False) -> list[Any]:
    """The statements of a logic file; raises ``error`` with file:line, or with the column too."""
    messages: list[str] = []
    statements: list[Any] = []
    if not path.is_file():
        raise error(f"{path}: no such file; check the path")
    if not str(path).isprintable():
        raise error(f"{str(path)!a}: not a name that can be printed; rename the file")
    _refuse_includes(path, error)
    try:
        ast.parse_files(
            [str(path)], statements.append, logger=lambda _code, text: messages.append(text)
        )
    except RuntimeError as failure:
        raise error(
            f"{one_line(messages, columns=columns) or failure}; correct the syntax"
        ) from None
    return statements


#: Comments and strings, then the one directive that clingo's parser obeys while parsing, and
#: characters that its messages would tear apart, which ends the process.
_TOKENS = re.compile(
    r'%\*.*?\*%|%[^\n]*|"(?:[^"\\\n]|\\.)*"|(?P<include>#include)|(?P<foreign>[^\x00-\x7f])',
    re.DOTALL,
)


def foreign(text: str) -> int:
    """Where the first character is that may stand in strings and comments only; -1 if nowhere."""
    return next((m.start() for m in _TOKENS.finditer(text) if m.group("foreign")), -1)


def _refuse_includes(path: pathlib.Path, error: type[ToastError]) -> None:
    """Refuse ``#include`` before parsing: the parser itself would open the other file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "not text"
        raise error(f"{path}: cannot read: {reason}; check the path") from None
    for found in _TOKENS.finditer(text):
        if found.group("include"):
            line = text.count("\n", 0, found.start()) + 1
            raise error(f"{path}:{line}: #include is not allowed: pass each file by name")
    if (place := foreign(text)) >= 0:
        line = text.count("\n", 0, place) + 1
        raise error(
            f"{path}:{line}: {text[place]!a} outside of strings and comments; write plain ASCII"
        )


def read_facts(path: str | pathlib.Path) -> dict[Predicate, list[tuple[Term, ...]]]:
    """The facts of a fact base by predicate, in the order of the file.

    Only ground facts of declared input predicates are allowed; raises
    :class:`toast.errors.FactError` with file:line otherwise.
    """
    path = pathlib.Path(path)
    found: dict[Predicate, list[tuple[Term, ...]]] = {}
    for statement in parse(path, FactError):
        if statement.ast_type in (ast.ASTType.Program, ast.ASTType.Comment):
            continue
        where = f"{path}:{statement.location.begin.line}"
        if statement.ast_type is not ast.ASTType.Rule or len(statement.body):
            shown = str(statement).splitlines()[0]
            raise FactError(f"{where}: not a fact: {shown}; a fact base holds facts only")
        try:
            symbol = clingo.parse_term(str(statement.head))
        except RuntimeError:
            raise FactError(
                f"{where}: not a ground fact: {statement}; write one fact with no variables, "
                "pools or intervals"
            ) from None
        predicate = (symbol.name, len(symbol.arguments))
        if predicate not in input_predicates():
            raise FactError(f"{where}: {_undeclared(predicate, input_predicates())}")
        found.setdefault(predicate, []).append(tuple(_term(a) for a in symbol.arguments))
    return found


def check_rules(path: str | pathlib.Path) -> None:
    """Refuse a rule file that could run code, read other files, or uses unknown predicates.

    A predicate must stand in ``facts/schema.lp`` or be documented in the file itself with a
    ``%! name(Arguments): meaning`` line.  Raises :class:`toast.errors.RuleError` with file:line.
    """
    path = pathlib.Path(path)
    statements = parse(path, RuleError)
    known = {*schema(), *(d.predicate for d in declarations(path.read_text()))}
    for statement in statements:
        _check_statement(path, statement, known)


#: Predicates with which a rule file says what it has a rule for.
_KINDS = frozenset({"rule", "custom_call_rule", "elementwise", "stays_whole"})


def kind_line(path: pathlib.Path, kind: str) -> int:
    """The line where a rule file says that it has a rule for ``kind``, 1 if no fact does."""
    for statement in parse(path, RuleError):
        if statement.ast_type is ast.ASTType.Rule:
            head = str(statement.head)
            if head.split("(")[0] in _KINDS and re.search(rf"\b{re.escape(kind)}\b", head):
                line: int = statement.location.begin.line
                return line
    return 1


_CODE = {"Script": "#script", "External": "#external"}


def _check_statement(path: pathlib.Path, statement: Any, known: set[Predicate]) -> None:
    where = f"{path}:{statement.location.begin.line}"
    kind = statement.ast_type.name
    if kind in _CODE:
        raise RuleError(f"{where}: {_CODE[kind]} is not allowed: a rule file is data; remove it")
    for node in walk(statement):
        if node.ast_type is ast.ASTType.Function and bool(node.external):
            raise RuleError(
                f"{where}: @{node.name} is not allowed: a rule file runs no code; remove it"
            )
        if node.ast_type is ast.ASTType.SymbolicAtom:
            predicate = predicate_of(node.symbol)
            if predicate not in known:
                raise RuleError(f"{where}: {_undeclared(predicate, known)}")


def predicate_of(symbol: Any) -> Predicate:
    """The predicate of an atom."""
    while symbol.ast_type is ast.ASTType.UnaryOperation:
        symbol = symbol.argument
    if symbol.ast_type is ast.ASTType.Pool:
        symbol = symbol.arguments[0]
    return symbol.name, len(symbol.arguments)


def walk(node: Any) -> Iterator[Any]:
    """A node of a syntax tree and all nodes in it, in the order of the text."""
    yield node
    for key in node.child_keys:
        child = getattr(node, key)
        children = child if isinstance(child, Sequence | ast.ASTSequence) else (child,)
        for inner in children:
            if isinstance(inner, ast.AST):
                yield from walk(inner)


def _undeclared(predicate: Predicate, known: Iterable[Predicate]) -> str:
    import difflib

    name, arity = predicate
    same_name = sorted(a for n, a in known if n == name)
    if same_name:
        arities = " or ".join(f"{name}/{a}" for a in same_name)
        return f"predicate {name}/{arity} is not declared; did you mean {arities}?"
    near = difflib.get_close_matches(name, {n for n, _ in known}, 1)
    hint = f"did you mean {near[0]}?" if near else "document it with a line '%! name(Args): ...'"
    return f"predicate {name}/{arity} is not declared; {hint}"
