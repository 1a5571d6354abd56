"""Arithmetic beyond 32 bits, which clingo silently truncates.

:func:`number_beyond` checks the numbers in a text.  The process that grounds rules
(:mod:`toast.logic.trial`) checks their arithmetic: for each sum, product or power in a rule,
another rule holds if the rest of the body holds and the exact value exceeds 32 bits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

import clingo
from clingo import ast

from toast.logic.texts import walk
from toast.logic.trial import exact

#: The largest number; the smallest is ``-LARGEST - 1``.
LARGEST = 2**31 - 1

#: Error texts: for a number, and for each result of the checks of arithmetic.
BEYOND = f"is beyond {LARGEST}: numbers have 32 bits; ask for less, or in a larger unit"
MESSAGES = {
    "": "",
    "beyond": (
        f"a sum, a product or a power goes beyond {LARGEST}: numbers have 32 bits; divide first, "
        "as in Size / 1024"
    ),
    "unchecked": (
        "arithmetic that cannot be checked; bind its variables by atoms, and name its value: "
        "Product = One * Other"
    ),
}

#: Comments and strings.
ASIDE = re.compile(r'%\*.*?\*%|%[^\n]*|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(r"(?<![\w'])(?:0x[0-9A-Fa-f]+|0o[0-7]+|0b[01]+|[1-9][0-9]*)")


def number_beyond(text: str) -> tuple[int, str] | None:
    """The position and text of the first number beyond 32 bits outside strings, or None."""
    plain = ASIDE.sub(lambda aside: re.sub(r"[^\n]", " ", aside[0]), text)
    for number in _NUMBER.finditer(plain):
        lowest = LARGEST + plain[: number.start()].rstrip().endswith("-")
        if len(number[0]) >= 40 or int(number[0], 0) > lowest:
            shown = number[0] if len(number[0]) <= 24 else f"{number[0][:24]}..."
            return number.start(), shown
    return None


def multiplies(text: str) -> bool:
    """Whether rules have products or powers."""
    return "*" in ASIDE.sub("", text)


def constant_beyond(node: Any) -> bool:
    """Whether a term of numbers and arithmetic has a value beyond 32 bits."""
    value = _constant(node)
    return value is not None and not _holds(value)


def _constant(node: Any) -> int | None:
    kind = node.ast_type
    if kind is ast.ASTType.SymbolicTerm and node.symbol.type is clingo.SymbolType.Number:
        return int(node.symbol.number)
    if kind is not ast.ASTType.BinaryOperation or node.operator_type not in _OPERATORS:
        return None
    left, right = _constant(node.left), _constant(node.right)
    if left is None or right is None or not (_holds(left) and _holds(right)):
        return None  # operands beyond the limit have their own error
    return exact(_OPERATORS[node.operator_type], left, right)


def _holds(value: int) -> bool:
    return -LARGEST - 1 <= value <= LARGEST


@dataclasses.dataclass(frozen=True)
class Checks:
    """The checks of the arithmetic of rules."""

    #: ``[head, body]`` each: the body holds if a term exceeds 32 bits; ``@wraps`` is exact
    #: arithmetic.  A second body, if there is one, is used if the first is unsafe.
    terms: tuple[tuple[str, ...], ...] = ()
    #: For each ``#sum``, ``[group, element, body]`` for each of its elements: the terms of the
    #: aggregate's own variables, and the tuples whose first terms are added.
    sums: tuple[tuple[tuple[str, str, str], ...], ...] = ()


NONE = Checks()


def checks(statements: Iterable[Any]) -> Checks:
    """The checks of all rules among statements."""
    terms: list[tuple[str, ...]] = []
    sums: list[tuple[tuple[str, str, str], ...]] = []
    for statement in statements:
        if statement.ast_type is ast.ASTType.Rule:
            rule = _Rule(statement)
            terms += rule.terms()
            sums += rule.sums()
    return Checks(tuple(dict.fromkeys(terms)), tuple(sums))


_AGGREGATES = (ast.ASTType.BodyAggregate, ast.ASTType.Aggregate)
_SUMS = (ast.AggregateFunction.Sum, ast.AggregateFunction.SumPlus)
_LINEAR = (
    ast.BinaryOperator.Plus, ast.BinaryOperator.Minus, ast.BinaryOperator.Multiplication,
)  # fmt: skip
_OPERATORS = {
    ast.BinaryOperator.Plus: "+", ast.BinaryOperator.Minus: "-",
    ast.BinaryOperator.Multiplication: "*", ast.BinaryOperator.Power: "**",
}  # fmt: skip


class _Rule:
    """A rule whose arithmetic is checked."""

    def __init__(self, rule: Any) -> None:
        self._head = rule.head
        self._body = [*rule.body]
        outside = [part for part in self._body if not _is_nested(part)]
        guards = [guard for part in self._body if _is_aggregate(part) for guard in _guards(part)]
        #: Variables of the rule; those of aggregates and conditions alone are local to them.
        self._global = _names([rule.head, *outside, *guards])
        #: A suffix that makes the names of local variables unique.
        self._suffix = "'" * (1 + max((n.count("'") for n in _names([rule])), default=0))

    def terms(self) -> Iterator[tuple[str, ...]]:
        """Bodies that hold if a term exceeds 32 bits."""
        yield from self._of([self._head], self._body, None)
        for part in self._body:
            if _is_aggregate(part):
                yield from self._of(_guards(part), self._body, part)
                others = [other for other in self._body if other is not part]
                for element in part.atom.elements:
                    yield from self._element(element, others)
            elif part.ast_type is ast.ASTType.ConditionalLiteral:
                yield from self._element(part, [other for other in self._body if other is not part])
            else:
                yield from self._of([part], self._body, part)

    def _element(self, element: Any, others: list[Any]) -> Iterator[tuple[str, ...]]:
        """Of an element of an aggregate, or a literal with a condition."""
        own = self._renamed(element)
        conditions = [*own.condition]  # each of them one object from here on
        inner = [*others, *conditions]
        terms = own.terms if hasattr(own, "terms") else [own.literal]
        yield from self._of(terms, inner, None)
        for part in conditions:
            yield from self._of([part], inner, part)

    def sums(self) -> Iterator[tuple[tuple[str, str, str], ...]]:
        """The elements of each sum."""
        for part in self._body:
            if _is_aggregate(part) and getattr(part.atom, "function", None) in _SUMS:
                shared = sorted(self._global & _names(part.atom.elements))
                group = f"({','.join(shared)},)" if shared else "()"
                others = self._relaxed([other for other in self._body if other is not part])
                elements = []
                for element in part.atom.elements:
                    own = self._renamed(element)
                    terms = ",".join(map(str, own.terms))
                    body = ", ".join(map(str, [*others, *own.condition]))
                    elements.append((group, f"({terms},)", body))
                yield tuple(elements)

    def _of(self, nodes: Iterable[Any], body: list[Any], own: Any) -> Iterator[tuple[str, ...]]:
        """Of the terms in ``nodes``, which are in the part ``own`` of a body, or beside it."""
        for node in nodes:
            for term in walk(node):
                if wraps := _wraps(term):
                    yield self._bodies(wraps, _names([term]), body, own)

    def _bodies(self, wraps: str, names: set[str], body: list[Any], own: Any) -> tuple[str, ...]:
        """The parts of a body that do not follow from a term, and all of it."""
        bodies: dict[str, None] = {}
        for parts in ([part for part in body if part is not own], body):
            relaxed = self._relaxed(parts)
            if names <= _bound(relaxed):
                bodies[", ".join([*map(str, relaxed), wraps])] = None
                break
        bodies[", ".join([*map(str, body), wraps])] = None
        return tuple(bodies)

    def _relaxed(self, body: list[Any]) -> list[Any]:
        """The parts of a body whose variables it binds: others follow from what was left out."""
        shared = self._global | _names(part for part in body if not _is_nested(part))
        while True:
            bound = _bound(body)
            relaxed = [part for part in body if _names([part]) & shared <= bound]
            if len(relaxed) == len(body):
                return relaxed
            body = relaxed

    def _renamed(self, element: Any) -> Any:
        local = _names([element]) - self._global
        return _Renaming({name: f"{name}{self._suffix}" for name in local}).visit(element)


class _Renaming(ast.Transformer):  # type: ignore[misc]
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Variable(self, node: Any) -> Any:  # noqa: N802 (the library's name)
        return node.update(name=self._names.get(node.name, node.name))


def _wraps(term: Any) -> str:
    """The condition under which a term exceeds 32 bits; ``""`` if it cannot."""
    if term.ast_type is ast.ASTType.BinaryOperation and term.operator_type in _OPERATORS:
        return f'@wraps("{_OPERATORS[term.operator_type]}",({term.left}),({term.right})) = 1'
    if term.ast_type is ast.ASTType.UnaryOperation:
        if term.operator_type == ast.UnaryOperator.Absolute:
            return f'@wraps("-",0,({term.argument})) = 1'
        # The minus of a number is part of it.
        if term.operator_type == ast.UnaryOperator.Minus and _names([term]):
            return f'@wraps("-",0,({term.argument})) = 1'
    return ""


def _is_aggregate(part: Any) -> bool:
    return part.ast_type is ast.ASTType.Literal and part.atom.ast_type in _AGGREGATES


def _is_nested(part: Any) -> bool:
    """Whether a part of a body has variables of its own."""
    return _is_aggregate(part) or part.ast_type is ast.ASTType.ConditionalLiteral


def _guards(aggregate: Any) -> list[Any]:
    guards = (aggregate.atom.left_guard, aggregate.atom.right_guard)
    return [guard for guard in guards if guard is not None]


def _names(nodes: Iterable[Any]) -> set[str]:
    return {
        str(inner.name)
        for node in nodes for inner in walk(node)
        if inner.ast_type is ast.ASTType.Variable and inner.name != "_"
    }  # fmt: skip


def _bound(body: list[Any]) -> set[str]:
    """The variables that the parts of a body bind."""
    bound: set[str] = set()
    while True:
        before = len(bound)
        for part in body:
            if part.ast_type is not ast.ASTType.Literal or part.sign != ast.Sign.NoSign:
                continue
            if part.atom.ast_type is ast.ASTType.SymbolicAtom:
                bound |= _bindable(part.atom.symbol)
            elif part.atom.ast_type is ast.ASTType.Comparison:
                bound |= _of_comparison(part.atom, bound)
            elif _is_aggregate(part):
                for guard in _guards(part):
                    if guard.comparison == ast.ComparisonOperator.Equal:
                        bound |= _bindable(guard.term)
        if len(bound) == before:
            return bound


def _of_comparison(comparison: Any, bound: set[str]) -> set[str]:
    extended: set[str] = set()
    left = comparison.term
    for guard in comparison.guards:
        if guard.comparison == ast.ComparisonOperator.Equal:
            for one, other in ((left, guard.term), (guard.term, left)):
                if _names([one]) <= bound | extended:
                    extended |= _bindable(other)
        left = guard.term
    return extended


def _bindable(term: Any) -> set[str]:
    """The variables that a term's value binds: not those under arithmetic, unless it is linear."""
    kind = term.ast_type
    if kind is ast.ASTType.Variable:
        return _names([term])
    if kind is ast.ASTType.BinaryOperation:
        names = _names([term])
        sides = [_bindable(term.left), _bindable(term.right)]
        linear = term.operator_type in _LINEAR and len(names) == 1 and not all(sides)
        return sides[0] | sides[1] if linear else set()
    if kind is ast.ASTType.UnaryOperation and term.operator_type == ast.UnaryOperator.Minus:
        return _bindable(term.argument)
    if kind in (ast.ASTType.Function, ast.ASTType.Pool) and not getattr(term, "external", 0):
        return {name for argument in term.arguments for name in _bindable(argument)}
    return set()
