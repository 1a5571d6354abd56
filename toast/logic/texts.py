"""Texts of logic files: clingo gets what was read and checked, and opens no file."""

from __future__ import annotations

import bisect
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from clingo import ast


@dataclasses.dataclass(frozen=True)
class LogicText:
    """A logic file as it was read."""

    path: pathlib.Path
    text: str

    def __str__(self) -> str:
        return str(self.path)


class TextBlock:
    """Texts for ``Control.add``, whose messages call all of them ``<block>``.

    Each begins with as many empty lines as those before it have, so that a line's number says whose
    it is.  ``own`` is text without a file, which has the first lines.
    """

    def __init__(self, texts: Sequence[LogicText], own: str = "") -> None:
        self.texts = tuple(texts)
        self.padded: list[str] = []
        #: Lines before each text.
        self._before: list[int] = []
        line = own.count("\n") + 1
        for text in self.texts:
            self._before.append(line)
            self.padded.append("\n" * line + text.text)
            line += text.text.count("\n") + 1

    def named(self, message: str) -> str:
        """A message of clingo's, with files and their lines."""
        return _PLACE.sub(self._named, message)

    def _named(self, found: re.Match[str]) -> str:
        line = int(found[1])
        number = bisect.bisect_left(self._before, line) - 1
        if number < 0:
            return found[0]
        return f"{self.texts[number].path}:{line - self._before[number]}"


_PLACE = re.compile(r"<block>:(\d+)")


def walk(node: Any) -> Iterator[Any]:
    """A node of a syntax tree and all nodes in it, in the order of the text."""
    yield node
    for key in node.child_keys:
        child = getattr(node, key)
        children = child if isinstance(child, Sequence | ast.ASTSequence) else (child,)
        for inner in children:
            if isinstance(inner, ast.AST):
                yield from walk(inner)
