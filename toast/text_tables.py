"""Tables for the terminal that show every text as it is."""

from __future__ import annotations

from typing import Any

import rich.table
from rich.console import RenderableType
from rich.text import Text

from toast.boundary.printable import printable


class TextTable(rich.table.Table):
    """Rich's, but nothing in its title, heads and cells is markup.

    Names, paths and error messages are the user's: ``[/tmp/x]`` would end a style that never began,
    and ``f.py:100:4`` would become a picture.
    """

    def __init__(self, *heads: str, title: str | None = None, **options: Any) -> None:
        super().__init__(*heads, **options)
        if title is not None:
            self.title = Text(printable(title), style=options.get("title_style", "table.title"))

    def add_column(self, header: RenderableType = "", *parts: Any, **options: Any) -> None:
        """As Rich's."""
        super().add_column(_plain(header), *parts, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """As Rich's."""
        super().add_row(*map(_plain, cells), **options)


def _plain(part: Any) -> Any:
    return Text(printable(part)) if isinstance(part, str) else part
