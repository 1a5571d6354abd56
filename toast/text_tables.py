"""Tables for the terminal that print text literally."""

from __future__ import annotations

from typing import Any

import rich.table
from rich.console import RenderableType
from rich.text import Text

from toast.boundary.printable import printable


class TextTable(rich.table.Table):
    """A table of Rich without markup in its title, headings and cells.

    Names, paths and error messages may look like markup: ``[/tmp/x]`` would end a style, and
    ``f.py:100:4`` would become an emoji.
    """

    def __init__(self, *heads: str, title: str | None = None, **options: Any) -> None:
        super().__init__(*heads, **options)
        if title is not None:
            self.title = Text(printable(title), style=options.get("title_style", "table.title"))

    def add_column(self, header: RenderableType = "", *parts: Any, **options: Any) -> None:
        """As in Rich, without markup."""
        super().add_column(_plain(header), *parts, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """As in Rich, without markup."""
        super().add_row(*map(_plain, cells), **options)


def _plain(part: Any) -> Any:
    return Text(printable(part)) if isinstance(part, str) else part
