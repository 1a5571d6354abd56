"""Grounds a program in a process of its own: it may take too long, or too much memory.

Run as a script, by path: it must start fast and imports nothing of TOAST.  Reads JSON from its
standard input: ``facts``, ``rows`` of further ones (name, arity, and a term ``(a,b)`` each, with
commas between), ``files``, ``rules``, the ``answer`` (name and arity; none where only whether
grounding ends is asked), and the limits ``atoms`` and ``bytes`` (none: no limit).  Writes
JSON: clingo's ``messages``, an ``error`` or none, the ``rows``, one atom of the answer each as
clingo writes it, and how many atoms are ``open``: no one answer set decides them; ``undecided``
predicates of such atoms, and whether one of the ``checks``, bodies that find an ``overflow``,
holds.  Exits with 3 beyond the limit of atoms.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable, Sequence

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
    """Ground what standard input names."""
    given = json.load(sys.stdin)
    if given["bytes"] is not None:
        _bound(given["bytes"])
    messages: list[str] = []
    control = clingo.Control(["--warn=all"], logger=lambda _code, text: messages.append(text))
    found = []
    error = ""
    try:
        control.add("facts", [], given["facts"])
        context = types.SimpleNamespace()
        for number, (name, arity, terms) in enumerate(given["rows"]):
            # Read as one term, they take a third of the time that statements do.
            setattr(context, f"rows{number}", _arguments(f"({terms},)" if terms else "()"))
            variables = ",".join(f"X{i}" for i in range(arity))
            control.add("facts", [], f"{name}({variables}) :- ({variables}) = @rows{number}().")
        control.ground([("facts", [])], context=context)
        # From here on: the facts are many, and are not what may get out of hand.
        control.register_observer(_Counter(given["atoms"]))
        for file in given["files"]:
            control.load(file)
        control.add("base", [], given["rules"])
        control.ground([("base", [])])
        if given["answer"] is not None:
            found = list(control.symbolic_atoms.by_signature(*given["answer"]))
    except RuntimeError as failure:
        error = str(failure)
    rows = [str(atom.symbol) for atom in found if atom.is_fact]
    answer = {
        "messages": list(messages), "error": error, "rows": rows, "open": len(found) - len(rows),
        "undecided": sorted(_undecided(control))[:3],
        "overflow": _overflow(control, given.get("checks", ())),
    }  # fmt: skip
    json.dump(answer, sys.stdout)


def _undecided(control: clingo.Control) -> set[str]:
    """Predicates of atoms that no one answer set decides."""
    return {
        f"{atom.symbol.name}/{len(atom.symbol.arguments)}"
        for atom in control.symbolic_atoms if not atom.is_fact
    }  # fmt: skip


def _overflow(control: clingo.Control, checks: Sequence[str]) -> bool:
    """Whether one of the checks of arithmetic holds; one that cannot be asked says nothing."""
    for number, check in enumerate(checks):
        part, name = f"check{number}", f"overflow{number}"
        try:
            control.add(part, [], f"{name} :- {check}.")
            control.ground([(part, [])])
        except RuntimeError:
            continue
        if any(True for _ in control.symbolic_atoms.by_signature(name, 0)):
            return True
    return False


def _arguments(term: str) -> Callable[[], list[clingo.Symbol]]:
    return lambda: list(clingo.parse_term(term).arguments)


def _bound(size: int) -> None:
    """Bound the memory of this process, where the system can."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    main()
