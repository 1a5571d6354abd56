"""Texts of logic files: clingo gets the texts that were read and checked, and opens no file."""

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
    """The text of a logic file."""

    path: pathlib.Path
    text: str

    def __str__(self) -> str:
        return str(self.path)


class TextBlock:
    """Texts for ``Control.add``; clingo's messages name all of them ``<block>``.

    Each text begins with as many empty lines as the texts before it have, so a line number
    identifies its text.  ``own`` is text without a file; it has the first lines.
    """

    def __init__(self, texts: Sequence[LogicText], own: str = "") -> None:
        self.texts = tuple(texts)
        self.padded: list[str] = []
        #: The number of lines before each text.
        self._before: list[int] = []
        line = own.count("\n") + 1
        for text in self.texts:
            self._before.append(line)
            self.padded.append("\n" * line + text.text)
            line += text.text.count("\n") + 1

    def named(self, message: str) -> str:
        """A message of clingo, with the names and lines of files."""
        return _PLACE.sub(self._named, message)

    def _named(self, match: re.Match[str]) -> str:
        line = int(match[1])
        number = bisect.bisect_left(self._before, line) - 1
        if number < 0:
            return match[0]
        return f"{self.texts[number].path}:{line - self._before[number]}"


_PLACE = re.compile(r"<block>:(\d+)")


def walk(node: Any) -> Iterator[Any]:
    """A node of a syntax tree and all its descendants, in the order of the text."""
    yield node
    for key in node.child_keys:
        child = getattr(node, key)
        children = child if isinstance(child, Sequence | ast.ASTSequence) else (child,)
        for inner in children:
            if isinstance(inner, ast.AST):
                yield from walk(inner)
