"""The interface to clingo: solving, reading facts, and checking rule files.

The rules of TOAST are stratified, so there is exactly one answer set, which clingo computes while
grounding.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import clingo
from clingo import ast

from toast.boundary import children, regular_files
from toast.boundary.printable import shortened
from toast.boundary.regular_files import is_within, read_text
from toast.errors import FactError, RuleError, RuleWarning, ToastError
from toast.logic import overflow, trial
from toast.logic.texts import LogicText, TextBlock, walk
from toast.resources import directory

#: A ground term in Python: an int, a str for constants and strings, (name, ...) for functions.
Term = int | str | tuple["Term", ...]

#: The name and the arity of a predicate.
Predicate = tuple[str, int]


#: The limits of grounding a user's rules, which may not terminate.
GROUND_SECONDS = 30.0
GROUND_ATOMS = 2_000_000
GROUND_BYTES = 6 * 2**30


#: A logic file: its path, or its text where it was read already.
LogicFile = pathlib.Path | LogicText


def solve(
    files: Sequence[LogicFile],
    facts: str,
    show: Iterable[str],
    *,
    doubted: LogicText | str | None = None,
) -> dict[str, list[tuple[Term, ...]]]:
    """Ground ``files`` over ``facts`` and return the atoms of the predicates in ``show``.

    ``show`` holds ``"name/arity"``; the result maps each to its atoms' arguments, in clingo's
    order of derivation.  ``doubted`` is the user's file among them, or the name of a stranger's
    facts: then grounding is tried in a process of its own first.  What clingo finds odd, but no
    error, is a :class:`toast.errors.RuleWarning`.
    Raises :class:`toast.errors.RuleError` with file and line
    when a file does not parse, is unsafe, or does not end within the limits.
    """
    block = TextBlock(read_files(files), facts)
    if doubted is not None:
        check_ends(block.texts, facts, doubted)
    messages: list[str] = []
    control = clingo.Control(
        ["--warn=all"], logger=lambda _code, text: messages.append(block.named(text))
    )
    try:
        for text in block.padded:
            control.add("base", [], text)
        if facts:
            control.add("base", [], facts)
        control.ground([("base", [])])
    except RuntimeError as error:
        raise RuleError(one_line(messages) or str(error)) from None
    for message in messages:
        warnings.warn(one_line([message]), RuleWarning, stacklevel=2)
    atoms_of: dict[str, list[tuple[Term, ...]]] = {}
    for shown in show:
        name, arity = shown.split("/")
        atoms_of[shown] = [
            tuple(_term(argument) for argument in atom.symbol.arguments)
            for atom in control.symbolic_atoms.by_signature(name, int(arity))
            if atom.is_fact
        ]
    return atoms_of


def derivations(
    files: Sequence[LogicFile], facts: str, show: Iterable[str]
) -> dict[str, dict[tuple[Term, ...], list[tuple[pathlib.Path, int]]]]:
    """The rules that derive the atoms of the predicates in ``show``, with file and line.

    Arguments as for :func:`solve`, which must have accepted the files.  Raises
    :class:`toast.errors.RuleError` where a file is gone or no longer parses.
    """
    shown = frozenset((name, int(arity)) for name, arity in (s.split("/") for s in show))
    control = clingo.Control(logger=lambda _code, _text: None)
    for file in files:
        control.add("base", [], _traced(read(file, RuleError), shown))
    control.add("base", [], facts)
    control.ground([("base", [])])
    places: dict[str, dict[tuple[Term, ...], list[tuple[pathlib.Path, int]]]] = {}
    for name, arity in sorted(shown):
        atoms = places[f"{name}/{arity}"] = {}
        for atom in control.symbolic_atoms.by_signature(_TRACED + name, arity + 2):
            *arguments, file_, line = (_term(a) for a in atom.symbol.arguments)
            place = pathlib.Path(str(file_)), int(str(line))
            atoms.setdefault(tuple(arguments), []).append(place)
    return {name: {key: sorted(at) for key, at in atoms.items()} for name, atoms in places.items()}


#: Prefix of predicates whose atoms have the file and the line of their rule.
_TRACED = "traced_"


@functools.lru_cache(maxsize=64)
def _traced(file: LogicText, shown: frozenset[Predicate]) -> str:
    """The text of a rule file, with a second rule for each rule of a predicate in ``shown``.

    Its head has the place of the rule: ``factor(Op,F,T,D)`` is
    ``traced_factor(Op,F,T,D,File,Line)``.
    """
    lines = []
    for statement in parse(file, RuleError):
        lines.append(str(statement))
        head = head_of(statement) if statement.ast_type is ast.ASTType.Rule else None
        if head is not None and (head.name, len(head.arguments)) in shown:
            at = head.location
            place = (clingo.String(str(file.path)), clingo.Number(statement.location.begin.line))
            arguments = [*head.arguments, *(ast.SymbolicTerm(at, symbol) for symbol in place)]
            traced = ast.Function(at, _TRACED + head.name, arguments, 0)
            literal = statement.head.update(atom=ast.SymbolicAtom(traced))
            lines.append(str(statement.update(head=literal)))
    return "\n".join(lines)


def head_of(statement: Any) -> Any:
    """The function in the head of a rule; None for other heads."""
    head = statement.head
    if head.ast_type is not ast.ASTType.Literal or head.atom.ast_type is not (
        ast.ASTType.SymbolicAtom
    ):
        return None
    return head.atom.symbol if head.atom.symbol.ast_type is ast.ASTType.Function else None


def rule_line(file: LogicFile, predicate: Predicate, using: str = "") -> int:
    """The line of the first rule for ``predicate`` with ``using`` in its body."""
    text = read(file, RuleError)
    for statement in parse(text, RuleError):
        if statement.ast_type is ast.ASTType.Rule:
            head = head_of(statement)
            body = " ".join(map(str, statement.body))
            if head and (head.name, len(head.arguments)) == predicate and using in body:
                line: int = statement.location.begin.line
                return line
    raise RuleError(
        f"{text.path}: no rule for {predicate[0]}/{predicate[1]}; check the installation"
    )


def check_ends(files: Sequence[LogicText], facts: str, doubted: LogicText | str) -> None:
    """Raise RuleError if grounding the untrusted text (``doubted``) exceeds a limit.

    Arithmetic beyond 32 bits is also an error.
    """
    if isinstance(doubted, LogicText):
        name, checked = str(doubted), parse(doubted, RuleError)
    else:
        # Shipped rules over doubted facts: what adds and compares positions cannot get there.
        name, checked = doubted, _products(files)
    checks = overflow.checks(checked)
    grounded = ground_apart(files, facts, memory_bytes=GROUND_BYTES, checks=checks)
    if isinstance(grounded, str):
        raise RuleError(
            f"{name}: grounding {grounded}; bound its recursion, or join fewer variables at once"
        )
    if grounded["undecided"]:
        raise RuleError(
            f"{name}: {grounded['undecided'][0]} is not decided: a rule derives it from the "
            "negation of itself, or by choice; write rules with one answer"
        )
    if grounded["overflow"]:
        if isinstance(doubted, LogicText):
            raise RuleError(f"{name}: {grounded['overflow']}")
        raise RuleError(
            f"{name}: a rule computes a number beyond {overflow.LARGEST} from its sizes: numbers "
            "have 32 bits; give a smaller program"
        )


def _products(files: Sequence[LogicText]) -> list[Any]:
    """The statements of rule files that have products or powers."""
    return [
        statement
        for file in files
        if overflow.multiplies(file.text)
        for statement in parse(file, RuleError)
        if overflow.multiplies(str(statement))
    ]


def ground_apart(
    files: Sequence[LogicText],
    facts: str,
    rules: str = "",
    answer: Predicate | None = None,
    *,
    rows: Mapping[Predicate, Sequence[str]] | None = None,
    memory_bytes: int | None = None,
    checks: overflow.Checks = overflow.NONE,
) -> dict[str, Any] | str:
    """Ground in a separate process within the limits; returns the data of :mod:`toast.logic.trial`.

    ``rows`` are more facts by predicate: a term ``(a,b)`` for ``name(a,b)``.  If a limit is
    exceeded, the result is a text: ``takes more than 30 seconds``.  ``checks`` find arithmetic
    beyond 32 bits; ``overflow`` in the data has their result.
    """
    block = TextBlock(files, rules)
    request = {
        "facts": facts, "rules": rules, "texts": block.padded, "answer": answer,
        "rows": [[*predicate, ",".join(terms)] for predicate, terms in (rows or {}).items()],
        "atoms": GROUND_ATOMS, "bytes": memory_bytes,
        "seconds": GROUND_SECONDS, "terms": checks.terms, "sums": checks.sums,
    }  # fmt: skip
    done = children.answer(
        pathlib.Path(trial.__file__), json.dumps(request).encode(), seconds=GROUND_SECONDS
    )
    if done.failure:
        return done.failure
    if done.status == trial.BEYOND:
        return f"makes more than {GROUND_ATOMS} atoms"
    if done.status:
        return "ran out of memory"
    answer_data: dict[str, Any] = json.loads(done.output)
    answer_data["messages"] = [block.named(text) for text in answer_data["messages"]]
    answer_data["overflow"] = overflow.MESSAGES[answer_data["overflow"]]
    return "ran out of memory" if "bad_alloc" in answer_data["error"] else answer_data


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
    """A term in clingo's syntax: ``('lhs', 0)`` is ``lhs(0)``."""
    if isinstance(term, tuple):
        head = term[0] if term else ""
        return f"{head}({','.join(show_term(part) for part in term[1:])})"
    return str(term)


def one_line(messages: Sequence[str], *, columns: bool = False) -> str:
    """The first error of clingo's log on one line: ``file:line: message``, or with ``columns``."""
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
    """A documented predicate: the names of its arguments, and its documentation."""

    name: str
    arguments: tuple[str, ...]
    text: str

    @property
    def predicate(self) -> Predicate:
        """Name and arity."""
        return self.name, len(self.arguments)

    @property
    def writers(self) -> str:
        """What writes its atoms, as the schema says."""
        written = re.search(r"Written by: (.*?)\.\s", self.text)
        return written[1] if written else ""


def declarations(text: str) -> Iterator[Declaration]:
    """The documented predicates of a file: ``%*! p(A,B) ... *%`` and ``%! p(A): ...``."""
    for match in _DOCUMENTED.finditer(text):
        name, arguments, rest = match.groups()
        end = text.find("*%", match.end()) if match.group(0).startswith("%*") else match.end()
        body = rest + text[match.end() : end]
        yield Declaration(
            name, tuple(part.strip() for part in arguments.split(",")), body.strip(": \n")
        )


@functools.cache
def schema() -> Mapping[Predicate, Declaration]:
    """The predicates of ``facts/schema.lp``."""
    text = (directory("facts") / "schema.lp").read_text()
    return {declared.predicate: declared for declared in declarations(text)}


@functools.cache
def input_predicates() -> frozenset[Predicate]:
    """The predicates of fact bases: section 1 of the schema."""
    text = (directory("facts") / "schema.lp").read_text()
    return frozenset(d.predicate for d in declarations(text[: text.index("%%% 2.")]))


# -- reading fact bases and checking rule files --------------------------------------------------


def read(file: LogicFile, error: type[ToastError]) -> LogicText:
    """A logic file with its text; raises ``error`` as :func:`read_logic`."""
    return file if isinstance(file, LogicText) else LogicText(file, read_logic(file, error))


def read_files(files: Iterable[LogicFile]) -> list[LogicText]:
    """Rule files with their texts; raises :class:`toast.errors.RuleError`."""
    return [read(file, RuleError) for file in files]


def parse(file: LogicFile, error: type[ToastError], *, columns: bool = False) -> list[Any]:
    """The statements of a logic file; raises ``error`` with file:line, or with the column too.

    What is not shipped is parsed first where it can do no harm (:func:`probe`).
    """
    text = read(file, error)
    path = text.path
    if not _is_shipped(path):
        probed = probe(text.text)
        if reason := refusal(probed):
            line, why = reason
            raise error(f"{path}:{line}: {why}" if line else f"{path}: {why}")
        if probed["failed"]:
            message = one_line(_named(probed["messages"], path), columns=columns)
            raise error(f"{message or probed['failed']}; correct the syntax")
    messages: list[str] = []
    statements: list[Any] = []
    try:
        ast.parse_string(
            text.text, statements.append, logger=lambda _code, text: messages.append(text)
        )
    except RuntimeError as failure:
        message = one_line(_named(messages, path), columns=columns)
        raise error(f"{message or failure}; correct the syntax") from None
    return statements


#: The limits of parsing a text in a separate process.
_PROBE_SECONDS, _PROBE_BYTES = 30.0, 2 * 2**30

#: Maximum nesting depth of terms, sums and conditions.
DEEPEST = 100

#: Maximum sizes of rule files and of fact bases, in bytes.
LARGEST_RULES, LARGEST_FACTS = 2**20, 2**26

_PROBE = pathlib.Path(__file__).with_name("probe.py")

_NOT_OPENED = re.compile(r":(\d+):\d+[-\d:]*: error: file could not be opened")


def probe(text: str, *, facts: bool = False) -> dict[str, Any]:
    """What :mod:`toast.logic.probe` says of a text, in a process that opens no file.

    A key ``failure`` says which limit it met, or how its process died.
    """
    return _probed(text, facts)


@functools.lru_cache(maxsize=64)
def _probed(text: str, facts: bool) -> dict[str, Any]:
    request = {
        "text": text, "facts": facts, "bytes": _PROBE_BYTES, "seconds": _PROBE_SECONDS,
        "depth": DEEPEST,
    }  # fmt: skip
    answered = children.answer(_PROBE, json.dumps(request).encode(), seconds=_PROBE_SECONDS)
    if answered.failure or answered.status:
        return {"failure": answered.failure or "cannot be parsed", "messages": [], "failed": ""}
    result: dict[str, Any] = json.loads(answered.output)
    return result


def refusal(probed: Mapping[str, Any]) -> tuple[int, str] | None:
    """Why a text must not be used: the line (0 if unknown) and the reason; None if it may be."""
    if "failure" in probed:
        return 0, f"parsing it {probed['failure']}; write it in smaller pieces"
    for message in probed["messages"]:
        if opened := _NOT_OPENED.search(message):
            return int(opened[1]), "#include is not allowed: pass each file by name"
    if probed["deep"]:
        return probed["deep"], f"nested more than {DEEPEST} deep; write it in smaller pieces"
    return None


def _named(messages: Sequence[str], path: pathlib.Path) -> list[str]:
    """Messages of clingo about a text, with the name of its file."""
    return [text.replace("<string>", str(path), 1) for text in messages]


def _is_shipped(path: pathlib.Path) -> bool:
    return any(is_within(path, directory(name)) for name in ("rules", "facts"))


#: Comments and strings; the only directive that clingo's parser executes; and characters that its
#: messages would split, which crashes the process.
_TOKENS = re.compile(
    r'%\*.*?\*%|%[^\n]*|"(?:[^"\\\n]|\\.)*"|(?P<include>#include)|(?P<foreign>[^\x00-\x7f])',
    re.DOTALL,
)


def foreign(text: str) -> int:
    """The position of the first non-ASCII character outside strings and comments, or -1."""
    return next((m.start() for m in _TOKENS.finditer(text) if m.group("foreign")), -1)


def read_logic(path: pathlib.Path, error: type[ToastError], *, most: int = LARGEST_RULES) -> str:
    """The text of a logic file without what its parser must not see.

    Raises ``error``: it is no regular file, too large, no text, or has an ``#include``, which
    clingo's parser would open at once.  A scan cannot see all of those: :func:`probe` does.
    """
    if not str(path).isprintable():
        raise error(f"{regular_files.shown(path)}: the name cannot be printed; rename the file")
    if not os.path.lexists(path):
        raise error(f"{regular_files.shown(path)}: no such file; check the path")
    text = read_text(path, error, most=most)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise error(f"{path}:{line}: not text; remove the NUL character")
    for match in _TOKENS.finditer(text):
        if match.group("include"):
            line = text.count("\n", 0, match.start()) + 1
            raise error(f"{path}:{line}: #include is not allowed: pass each file by name")
    if (place := foreign(text)) >= 0:
        line = text.count("\n", 0, place) + 1
        raise error(
            f"{path}:{line}: {text[place]!a} outside of strings and comments; write plain ASCII"
        )
    return text


def read_facts(path: str | pathlib.Path) -> dict[Predicate, list[tuple[Term, ...]]]:
    """The facts of a fact base by predicate, in the order of the file.

    Only ground facts of declared input predicates are allowed; raises
    :class:`toast.errors.FactError` with file:line otherwise.  The file is parsed in a process of
    its own.
    """
    path = pathlib.Path(path)
    text = read_logic(path, FactError, most=LARGEST_FACTS)
    if beyond := overflow.number_beyond(text):
        offset, number = beyond
        line = text.count("\n", 0, offset) + 1
        raise FactError(
            f"{path}:{line}: {number} is beyond {overflow.LARGEST}: numbers have 32 bits"
        )
    probed = probe(text, facts=True)
    if reason := refusal(probed):
        line, why = reason
        raise FactError(f"{path}:{line}: {why}" if line else f"{path}: {why}")
    if probed["failed"]:
        message = one_line(_named(probed["messages"], path))
        raise FactError(f"{message or probed['failed']}; correct the syntax")
    facts_of: dict[Predicate, list[tuple[Term, ...]]] = {}
    for line, name, arguments in probed["facts"]:
        if name is None:
            raise FactError(
                f"{path}:{line}: {shortened(arguments)}; a fact base holds facts only, with no "
                "variables, pools or intervals"
            )
        predicate = (name, len(arguments))
        if predicate not in input_predicates():
            raise FactError(f"{path}:{line}: {_undeclared(predicate, input_predicates())}")
        facts_of.setdefault(predicate, []).append(tuple(map(_from_json, arguments)))
    return facts_of


def _from_json(term: Any) -> Term:
    return tuple(map(_from_json, term)) if isinstance(term, list) else term


def check_rules(file: str | LogicFile, *, functions: Iterable[str] = ()) -> LogicText:
    """Refuse a rule file that could run code, read other files, or uses unknown predicates.

    ``functions`` are the ``@`` functions that a shipped file may call.

    A predicate must stand in ``facts/schema.lp`` or be documented in the file itself with a
    ``%! name(Arguments): meaning`` line.  Returns the text that was checked: the file may be
    another one by the time it is used.  Raises :class:`toast.errors.RuleError` with file:line.
    """
    text = read(pathlib.Path(file) if isinstance(file, str) else file, RuleError)
    statements = parse(text, RuleError)
    if beyond := overflow.number_beyond(text.text):
        offset, number = beyond
        line = text.text.count("\n", 0, offset) + 1
        raise RuleError(f"{text.path}:{line}: {number} {overflow.BEYOND}")
    known = {*schema(), *(d.predicate for d in declarations(text.text))}
    for statement in statements:
        _check_statement(text.path, statement, known, frozenset(functions))
    return text


#: What the schema says of predicates that rule files write.
_RULE_FILES = re.compile(r"op rule|rules/ops/")

#: The predicates with which a rule file declares its rules.
_KINDS = frozenset({"rule", "custom_call_rule", "composite_rule", "elementwise", "stays_whole"})


def check_heads(file: LogicFile) -> None:
    """Refuse rules of a user's file that derive what only the frontend or the analysis writes.

    So are rules that declare op kinds by what depends on the program.  Raises
    :class:`toast.errors.RuleError` with file:line.
    """
    declared, rules = schema(), list[tuple[int, Predicate, set[Predicate]]]()
    for statement in parse(file, RuleError):
        head = head_of(statement) if statement.ast_type is ast.ASTType.Rule else None
        if head is not None:
            body = {
                predicate_of(node.symbol)
                for literal in statement.body
                for node in walk(literal)
                if node.ast_type is ast.ASTType.SymbolicAtom
            }
            rules.append((statement.location.begin.line, predicate_of(head), body))
    of_program = {predicate for predicate in declared if predicate[0] not in _KINDS}
    while new := {
        head
        for _, head, body in rules
        if head not in of_program and head[0] not in _KINDS and body & of_program
    }:
        of_program |= new
    for line, (name, arity), body in rules:
        writers = declared[name, arity].writers if (name, arity) in declared else ""
        if writers and not _RULE_FILES.search(writers):
            raise RuleError(
                f"{file}:{line}: a rule file cannot derive {name}/{arity}, which is written by "
                f"{writers}; remove the rule"
            )
        if name in _KINDS and body & of_program:
            raise RuleError(
                f"{file}:{line}: {name} cannot depend on the program; state the name itself, such "
                f"as {_example(declared[name, arity])}"
            )


def _example(declaration: Declaration) -> str:
    return declaration.text.rpartition("Example: ")[2].rstrip(".\n")


def kind_line(file: LogicFile, kind: str) -> int:
    """The line where a rule file declares a rule for ``kind``; 1 if there is none."""
    for statement in parse(file, RuleError):
        if statement.ast_type is ast.ASTType.Rule:
            head = str(statement.head)
            if head.split("(")[0] in _KINDS and re.search(rf"\b{re.escape(kind)}\b", head):
                line: int = statement.location.begin.line
                return line
    return 1


def kinds_of_heads(file: LogicFile, predicates: Set[str]) -> Iterator[tuple[int, str]]:
    """The lines of rules that derive one of ``predicates``, with the op kinds in their bodies."""
    for statement in parse(file, RuleError):
        if statement.ast_type is not ast.ASTType.Rule:
            continue
        if str(statement.head).split("(")[0] in predicates:
            for kind in re.findall(r"\bop\(\w+,([a-z]\w*)\)", str(statement)):
                yield statement.location.begin.line, kind


#: The kinds of statements that a rule file may contain.
_STATEMENTS = frozenset({
    "Rule", "Defined", "Definition", "Program", "Comment", "ShowSignature", "ShowTerm",
})  # fmt: skip

_CODE = {"Script": "#script", "External": "#external"}


def _check_statement(
    path: pathlib.Path, statement: Any, known: set[Predicate], functions: frozenset[str]
) -> None:
    where = f"{path}:{statement.location.begin.line}"
    kind = statement.ast_type.name
    if kind in _CODE:
        raise RuleError(f"{where}: {_CODE[kind]} is not allowed in a rule file; remove it")
    if kind not in _STATEMENTS:
        raise RuleError(f"{where}: {kind} is not allowed: a rule file has rules only; remove it")
    if kind == "Rule" and (head_of(statement) is None or statement.head.sign):
        raise RuleError(
            f"{where}: a head is one atom: choices, disjunctions and constraints are not allowed; "
            "write rules with one answer"
        )
    for node in walk(statement):
        external = node.ast_type is ast.ASTType.Function and bool(node.external)
        if external and node.name not in functions:
            raise RuleError(
                f"{where}: @{node.name} is not allowed: rule files cannot run code; remove it"
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
