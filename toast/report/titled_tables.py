"""Terminal tables with a title, of which the first rows are shown."""

from __future__ import annotations

from collections.abc import Iterable

from toast.text_tables import TextTable

#: Maximum number of rows of a table; the JSON has all rows.
MOST_ROWS = 40


def titled_table(title: str, *columns: str, right: Iterable[str] = ()) -> TextTable:
    """A table without rows; columns in ``right`` are aligned right."""
    table = TextTable(title=title, title_justify="left", title_style="bold", header_style="")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def add_rest(table: TextTable, count: int, shown: int = MOST_ROWS) -> TextTable:
    """Adds a last row with the number of omitted rows, if there are any."""
    if count > shown:
        table.add_row(f"... and {count - shown} more", *[""] * (len(table.columns) - 1))
    return table
