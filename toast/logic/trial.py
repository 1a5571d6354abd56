"""Grounds a program in a separate process, because it may take too much time or memory.

Run as a script, by path: it must start fast and imports nothing of TOAST.  Reads JSON from its
standard input: ``facts``, ``rows`` of further ones (name, arity, and a term ``(a,b)`` each, with
commas between), ``texts`` of files, ``rules``, the ``answer`` (name and arity; none where only
whether grounding ends is asked), the limits ``seconds``, ``atoms`` and ``bytes`` (none: no limit),
and the checks of arithmetic, ``terms`` and ``sums`` (:class:`toast.logic.overflow.Checks`).  Writes
JSON: clingo's ``messages``, an ``error`` or none, the ``rows``, one atom of the answer each as
clingo writes it, and how many atoms are ``open``: no one answer set decides them; ``undecided``
predicates of such atoms, and what the checks say of an ``overflow``: ``beyond``, ``unchecked``, or
nothing.  Exits with 3 beyond the limit of atoms.
"""

from __future__ import annotations

import collections
import json
import math
import operator
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence

import clingo

BEYOND = 3


class _Counter(clingo.Observer):  # type: ignore[misc]
    def __init__(self, limit: int) -> None:
        self._left = limit

    def rule(self, choice: bool, head: object, body: object) -> None:
        self._left -= 1
        if self._left < 0:
            os._exit(BEYOND)


def main() -> None:
    """Ground the program from standard input."""
    request = json.load(sys.stdin)
    if request["bytes"] is not None:
        _bound(request["bytes"])
    # Also where the parent is gone, which would have ended it.
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(request["seconds"]) + 2)
    messages: list[str] = []
    control = clingo.Control(["--warn=all"], logger=lambda _code, text: messages.append(text))
    atoms = []
    error = ""
    try:
        control.add("facts", [], request["facts"])
        context = types.SimpleNamespace()
        for number, (name, arity, terms) in enumerate(request["rows"]):
            # Parsing one large term takes a third of the time of parsing statements.
            setattr(context, f"rows{number}", _arguments(f"({terms},)" if terms else "()"))
            variables = ",".join(f"X{i}" for i in range(arity))
            control.add("facts", [], f"{name}({variables}) :- ({variables}) = @rows{number}().")
        control.ground([("facts", [])], context=context)
        # The limit applies from here on: facts are numerous, but bounded.
        control.register_observer(_Counter(request["atoms"]))
        for text in [*request["texts"], request["rules"]]:
            control.add("base", [], text)
        control.ground([("base", [])])
        if request["answer"] is not None:
            atoms = list(control.symbolic_atoms.by_signature(*request["answer"]))
    except RuntimeError as failure:
        error = str(failure)
    rows = [str(atom.symbol) for atom in atoms if atom.is_fact]
    answer = {
        "messages": list(messages), "error": error, "rows": rows, "open": len(atoms) - len(rows),
        "undecided": sorted(_undecided(control))[:3],
        "overflow": "" if error else _overflow(control, request["terms"], request["sums"]),
    }  # fmt: skip
    json.dump(answer, sys.stdout)


def _undecided(control: clingo.Control) -> set[str]:
    """The predicates of atoms that are undecided without a search."""
    return {
        f"{atom.symbol.name}/{len(atom.symbol.arguments)}"
        for atom in control.symbolic_atoms if not atom.is_fact
    }  # fmt: skip


def _overflow(
    control: clingo.Control, terms: Sequence[Sequence[str]], sums: Sequence[Sequence[Sequence[str]]]
) -> str:
    """Which of the checks of arithmetic holds, or cannot be asked."""
    for number, bodies in enumerate(terms):
        name = f"wraps{number}"
        if not any(_added(control, [f"{name} :- {body}."]) for body in bodies):
            return "unchecked"
        if any(True for _ in control.symbolic_atoms.by_signature(name, 0)):
            return "beyond"
    for number, elements in enumerate(sums):
        name = f"summed{number}"
        if not _added(control, [
            f"{name}({group},{element}) :- {body}." if body else f"{name}({group},{element})."
            for group, element, body in elements
        ]):  # fmt: skip
            return "unchecked"
        totals: dict[clingo.Symbol, int] = collections.defaultdict(int)
        for atom in control.symbolic_atoms.by_signature(name, 2):
            group, element = atom.symbol.arguments
            weight = element.arguments[0]
            if weight.type is clingo.SymbolType.Number:
                totals[group] += weight.number
        if any(not _LEAST <= total <= -_LEAST - 1 for total in totals.values()):
            return "beyond"
    return ""


def _added(control: clingo.Control, rules: Sequence[str]) -> bool:
    """Whether rules could be grounded."""
    _PARTS.append(part := f"check{len(_PARTS)}")
    try:
        control.add(part, [], "\n".join(rules))
        control.ground([(part, [])], context=_Exact())
    except RuntimeError:
        return False
    return True


#: The names of the parts that were grounded.
_PARTS: list[str] = []

#: The smallest number.
_LEAST = -(2**31)


class _Exact:
    """The functions of checks."""

    @staticmethod
    def wraps(sign: clingo.Symbol, one: clingo.Symbol, other: clingo.Symbol) -> clingo.Symbol:
        """1 if the exact value of an operation exceeds 32 bits, else 0."""
        if one.type is not clingo.SymbolType.Number or other.type is not clingo.SymbolType.Number:
            return clingo.Number(0)
        value = exact(sign.string, one.number, other.number)
        return clingo.Number(0 if _LEAST <= value <= -_LEAST - 1 else 1)


def exact(sign: str, one: int, other: int) -> int:
    """The value of an operation; for a power beyond 32 bits, any value beyond 32 bits."""
    return _OPERATIONS[sign](one, other)


def _power(base: int, exponent: int) -> int:
    """A power; exponents beyond 40 are reduced, because the values stay beyond 32 bits."""
    if exponent < 0:
        return 0
    return int(base ** (min(exponent, 40 + exponent % 2)))


_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": _power,
}  # fmt: skip


def _arguments(term: str) -> Callable[[], list[clingo.Symbol]]:
    return lambda: list(clingo.parse_term(term).arguments)


def _bound(size: int) -> None:
    """Limit the memory of this process, if the system supports it."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
