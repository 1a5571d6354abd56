"""Tables show texts as they are."""

from __future__ import annotations

import io
import pathlib

import rich.console

import toast
from tests.helpers import printed
from tests.tiny_plan import tiny
from toast import report
from toast.evaluation.compare import MethodResult
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


def test_narrow_terminals_get_fewer_columns_and_no_lines() -> None:
    table = TextTable("kind", "algorithms", "time", title="Collectives")
    table.spare("algorithms")
    table.add_row("all_gather", "bidirectional ring over data x model, line over model", "17.5 ms")
    wide, narrow = (printed(table, width=width) for width in (120, 70))
    assert "algorithms" in wide
    assert "\u2502" in wide
    assert "algorithms" not in narrow
    assert "bidirectional" not in narrow
    assert "all_gather  17.5 ms" in narrow
    assert "\u2502" not in narrow
    assert printed(table, width=120) == wide


def test_tables_of_plans_fit_80_columns() -> None:
    plan = tiny()
    rows = [MethodResult.of("toast", plan), MethodResult("alpa", error="no plan " * 30)]
    parts = (
        report.plan_tables(plan),
        report.comparison_table(plan.analysis, plan.mesh, plan.hardware, 1e9, rows),
        report.collectives_table(plan.explain_collectives()),
        report.hardware_tables(plan.hardware),
        report.hardware_list([plan.hardware]),
        report.analysis_table(plan.analysis),
    )
    for part in parts:
        text = printed(part, width=80)
        assert max(map(len, text.splitlines())) <= 80
