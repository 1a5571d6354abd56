"""Tables show texts as they are."""

from __future__ import annotations

import io
import pathlib

import rich.console

import toast
from tests.helpers import printed
from toast.text_tables import TextTable

ODD = ("[/tmp/x]", "[bold]b[/bold]", "model.py:100:4", "params['w'][0]", "\\[a]")


def test_no_text_is_markup() -> None:
    for odd in ODD:
        table = TextTable(f"head {odd}", title=f"title {odd}")
        table.add_column(f"more {odd}")
        table.add_row(f"cell {odd}", odd)
        text = printed(table)
        assert all(f"{place} {odd}" in text for place in ("title", "head", "more", "cell"))


def test_titles_keep_their_style() -> None:
    table = TextTable("a", title="title", title_style="bold", title_justify="left")
    assert printed(table).startswith("title")
    console = rich.console.Console(width=30, force_terminal=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    assert "\x1b[1mtitle" in capture.get()


def test_every_table_is_one_of_these() -> None:
    package = pathlib.Path(toast.__file__).parent
    assert [
        path.name for path in package.rglob("*.py") if "rich.table" in path.read_text("utf-8")
    ] == ["text_tables.py"]
