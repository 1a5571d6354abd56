"""Tables for the terminal that print text literally."""

from __future__ import annotations

import copy
from typing import Any

import rich.box
import rich.table
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from toast.boundary.printable import printable

#: On terminals with fewer columns, tables that do not fit have no lines and no spared columns.
NARROW = 100


class TextTable(rich.table.Table):
    """A table of Rich without markup in its title, headings and cells.

    Names, paths and error messages may look like markup: ``[/tmp/x]`` would end a style, and
    ``f.py:100:4`` would become an emoji.
    """

    def __init__(self, *heads: str, title: str | None = None, **options: Any) -> None:
        #: The columns that narrow terminals do without.
        self._spared: list[str] = []
        super().__init__(*heads, **options)
        if title is not None:
            self.title = Text(printable(title), style=options.get("title_style", "table.title"))

    def add_column(self, header: RenderableType = "", *parts: Any, **options: Any) -> None:
        """As in Rich, without markup."""
        super().add_column(_plain(header), *parts, **options)

    def spare(self, *headers: str) -> None:
        """Leave out the columns with these headers where the table does not fit."""
        self._spared += headers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self.__rich_measure__(console, options.update(max_width=4 * NARROW)).maximum
        if options.max_width >= min(NARROW, whole):
            yield from super().__rich_console__(console, options)
            return
        table = copy.copy(self)
        table.columns = [c for c in self.columns if str(c.header) not in self._spared]
        table.box, table.padding = rich.box.SIMPLE_HEAD, (0, 1, 0, 0)
        table.pad_edge = False
        if self.title is not None:  # which need not be as narrow as the table
            yield self.title
            table.title = None
        yield from rich.table.Table.__rich_console__(table, console, options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """As in Rich, without markup."""
        super().add_row(*map(_plain, cells), **options)


def _plain(part: Any) -> Any:
    return Text(printable(part)) if isinstance(part, str) else part
