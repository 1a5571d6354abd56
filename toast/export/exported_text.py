"""Texts of exported files: comments, and literals that the names of a plan cannot break out of."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from toast.boundary.printable import printable

#: What begins the line on something that the format of a file cannot say.
UNSAID = "cannot be said in logical axes: "


def comments(texts: Iterable[str], width: int = 96) -> str:
    """Comment lines, one or more for each text; a further line of a text is indented."""
    lines = [
        line
        for text in texts
        for line in textwrap.wrap(
            printable(" ".join(text.split())), width, initial_indent="# ",
            subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False,
        )
    ]  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


def axes_literal(axes: Sequence[str]) -> str:
    """Mesh axes in Python: ``None``, ``'data'`` or ``('data', 'model')``."""
    if not axes:
        return "None"
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))


def axes_yaml(axes: Sequence[str]) -> str:
    """Mesh axes in YAML: ``[data, model]``; their names are words."""
    return f"[{', '.join(axes)}]"


__all__ = ["UNSAID", "axes_literal", "axes_yaml", "comments"]
