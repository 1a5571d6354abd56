"""The listing of a report in headless Chromium: it folds, filters and searches.

Keys press the buttons: while the page still draws, it may move under a mouse.
"""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import toast
from tests.report.browser import SHOTS, embedded, missing, number, opened, says
from tests.report.test_html import planned
from toast.plan import Plan
from toast.report import write_html
from toast.report.html.sections import sections_of

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def test_filters_count_what_the_data_says(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    plan = planned("t2b", layers=2)
    program, found = plan.analysis.program, page.locator("#found")
    kinds = [program.kind(op) for op in range(len(program.ops))]
    page.locator("#kind").select_option("dot_general")
    says(page, f"^{kinds.count('dot_general')} of ")
    assert page.locator("tr[id^=op-]").count() == kinds.count("dot_general")
    page.locator("#only").select_option("moves")
    moved = {c.op for c in plan.breakdown.collectives}
    says(page, f"^{sum(kinds[op] == 'dot_general' for op in moved)} of ")
    page.locator("#clear").press("Enter")
    page.locator("#color").select_option("1")
    says(page, f"^{len([*colored(embedded(page)['listing'], 1)])} of ")
    page.locator("#clear").press("Enter")
    says(page, r"^[\d,]+ ops$")
    for kind in {c.kind for c in plan.breakdown.collectives}:
        page.locator("#query").fill(kind)
        wanted = {c.op for c in plan.breakdown.collectives if c.kind == kind}
        wanted |= {op for op, name in enumerate(kinds) if kind in name}
        says(page, f"^{len(wanted)} of ")
    page.locator("button[data-line]").first.press("Enter")
    assert number(found.inner_text()) > 0
    assert page.complaints == []
    page.close()


def colored(listing: dict[str, Any], color: int) -> Iterator[int]:
    """Ops with a name of a kind of colors."""
    runs, kind = listing["color"], [*listing["color_kind"], -1]
    colors = [kind[c] for c, times in zip(runs[::2], runs[1::2], strict=True) for _ in range(times)]
    at = 0
    for op, signature in enumerate(listing["signature"]):
        count = len(listing["signatures"][signature][2])
        if color in colors[at : at + count]:
            yield op
        at += count


def test_sections_fold_and_links_unfold_them(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    assert page.locator("tr[id^=op-]").count() == 0
    button = page.locator(".fold button", has_text="layers[1]").first
    button.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    op = page.locator("button.op").nth(20)
    op.press("Enter")
    assert op.get_attribute("aria-expanded") == "true"
    detail = page.locator("tr.detail")
    for part in ("source", "sharding rule", "operand 0", "transformer.py:"):
        assert part in detail.inner_text() or "layers.py:" in detail.inner_text(), part
    op.press("Enter")
    assert detail.count() == 0
    page.locator("#fold-all").press("Enter")
    assert page.locator("tr[id^=op-]").count() == 0
    page.locator("#memory a[href^='#op-']").first.press("Enter")
    here = page.locator("tr.here")
    assert here.is_visible()
    assert page.evaluate("document.activeElement.closest('tr').classList.contains('here')")
    assert page.complaints == []
    page.close()


def test_the_search_finds_what_the_page_shows(chrome: Any, report: pathlib.Path) -> None:
    page, plan = opened(chrome, report), planned("t2b", layers=2)
    program = plan.analysis.program
    named = [
        *enumerate(program.arguments),
        *enumerate(program.results, len(program.ops) - len(program.results)),
    ]

    def taking(word: str) -> set[int]:
        """Arguments and results with a word in their path, and the ops that use these arguments."""
        values = {
            v
            for path, v in zip(program.arguments, program.argument_values, strict=True)
            if word in path
        }
        found = {op for op, made in enumerate(program.ops) if values & set(made.operands)}
        return found | {op for op, path in named if word in path}

    def within(title: str, phase: str = "") -> set[int]:
        return {
            op for s in sections_of(program) if title in s.title and phase in s.phase
            for op in range(s.start, s.stop)
        }  # fmt: skip

    wq = taking("params['layers'][1]['wq']")
    assert len(wq) > 1
    moves = plan.breakdown.collectives
    gathers = {c.op for c in moves if c.kind == "all_gather"}
    layer = within("layers[1]") | taking("['layers'][1]")
    forward = within("", "forward")
    product = next(op for op in range(len(program.ops)) if program.kind(op) == "dot_general")
    for query, wanted in {
        "params['embedding']": taking("params['embedding']"),
        "params['layers'][1]['wq']": wq,
        "params.layers[1].wq": wq,
        "layers[1]": layer,
        "Backward": within("", "backward"),
        "layers[1] all_gather": layer & gathers,
        "forward layers[0]": forward & (within("layers[0]") | taking("['layers'][0]")),
        "conflict": {op for op, _ in torn(plan)},
        # Words of one op, which may have several collectives.
        "reduce_scatter data": {c.op for c in moves if c.kind == "reduce_scatter"}
        & {c.op for c in moves if "data" in c.axes},
        f"%{program.ops[product].results[0]}": {product},
        f"#{product}": {product},
        f"dot_general#{product}": {product},
    }.items():
        assert wanted, query
        page.locator("#clear").press("Enter")
        says(page, r"^[\d,]+ ops$")
        page.locator("#query").fill(query)
        says(page, f"^{len(wanted):,} of ")
        shown = page.evaluate("[...document.querySelectorAll('tr[id^=op-]')].map((r) => r.id)")
        assert {int(name[3:]) for name in shown} <= wanted, query
    assert page.complaints == []
    page.close()


def torn(plan: Plan) -> set[tuple[int, int]]:
    """Ops and operands, -1 for the result, with a conflict."""
    names, program = plan.analysis.names, plan.analysis.program
    return {
        (int(names.use_op[number]), int(names.use_index[number])) if where == "use"
        else (int(program.values[number].op), -1)
        for _, _, where, number in plan.analysis.sites
    }  # fmt: skip


def test_an_empty_listing_says_why(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    empty, query = page.locator("#listing .empty"), page.locator("#query")
    assert not empty.is_visible()
    query.fill("dot_general Nothing")
    says(page, "^0 of ")
    assert page.locator(".fold:visible").count() == 0
    assert empty.inner_text().startswith("No op has \u201cnothing\u201d. The search covers")
    page.locator("#kind").select_option("dot_general")
    query.fill("layers[1] %0")
    says(page, "^0 of ")
    known = "No op matches \u201clayers[1]\u201d and \u201c%0\u201d, kind dot_general. "
    page.wait_for_timeout(200)
    assert empty.inner_text().startswith(known)
    page.screenshot(path=SHOTS / "empty.png")
    page.get_by_role("button", name="Show all ops").press("Enter")
    says(page, r"^[\d,]+ ops$")
    assert page.evaluate("document.activeElement.id") == "query"
    assert not empty.is_visible()
    assert page.complaints == []
    page.close()


def test_badges_stand_by_what_is_moved(chrome: Any, report: pathlib.Path) -> None:
    page, plan = opened(chrome, report), planned("t2b", layers=2)
    wanted: Counter[tuple[int, int, str]] = Counter(
        (c.op, c.operand, c.kind + " " + "\u00d7".join(c.axes)) for c in plan.breakdown.collectives
    )
    assert {operand for _, operand, _ in wanted} >= {-1, 0, 1}
    wanted.update((op, operand, "conflict") for op, operand in torn(plan))
    for only in ("moves", "conflicts"):
        page.locator("#only").select_option(only)
        for button in page.locator(".fold:visible > h4 > button[aria-expanded=false]").all():
            button.press("Enter")
        rows = page.evaluate(BADGES)
        ops = {op for op, _, _, _ in rows}
        assert ops == {
            op for op, _, text in wanted if (text == "conflict") == (only == "conflicts")
        }  # fmt: skip
        assert {(op, operand, text): n for op, operand, text, n in rows} == {
            (op, operand, text): 1 if text == "conflict" else n
            for (op, operand, text), n in wanted.items() if op in ops
        }  # fmt: skip
    page.close()


#: Badges of the ops shown: op, operand or -1, text, how many.
BADGES = """() => [...document.querySelectorAll("tr[id^=op-]")].flatMap((row) => {
  const op = Number(row.id.slice(3));
  const read = (place, operand) => [...place.querySelectorAll(".tag")].map((tag) => {
    const [, text, n] = /^(.*?)(?: \u00d7(\\d+))?$/.exec(tag.textContent);
    return [op, operand, text, Number(n || 1)];
  });
  return [...read(row.cells[1], -1), ...[...row.querySelectorAll(".operand")].flatMap(read)];
})"""


def test_values_have_the_names_that_explain_knows(chrome: Any, tmp_path: pathlib.Path) -> None:
    facts = pathlib.Path(__file__).parents[2] / "facts" / "attention.lp"
    plan = toast.plan(facts, mesh="data=2", hardware="tpu-v5e")
    program, path = plan.analysis.program, tmp_path / "report.html"
    write_html(plan, path)
    page = opened(chrome, path)
    page.locator("#query").fill("dot_general")
    labels = program.value_names
    for op in (op for op in range(len(program.ops)) if program.kind(op) == "dot_general"):
        (value,) = program.ops[op].results
        row = page.locator(f"#op-{op}")
        assert row.locator("button.op .number").inner_text() == f"%{value}"
        assert row.locator("button.op code").inner_text().strip() == program.labels[value]
        operands = [a.inner_text() for a in row.locator(".operand > a").all()]
        assert operands == [labels[v] for v in program.ops[op].operands]
    assert page.complaints == []
    page.close()
