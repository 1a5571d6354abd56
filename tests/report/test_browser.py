"""Reports in headless Chromium: they open, can be read and say what the plan says."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

import toast
from tests.helpers import FORMS
from tests.report.browser import (
    SHOTS,
    axe_is_here,
    embedded,
    missing,
    number,
    opened,
    says,
    violations,
)
from tests.report.test_html import HOSTILE, QUICK, hostile, planned
from toast.evaluation.compare import compare
from toast.hardware import load
from toast.models import build
from toast.report import comparison_html, html, html_text, write_html
from toast.resources import directory
from toast.units import size_text, time_text

if not missing():
    from playwright.sync_api import expect

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize("name", FORMS)
def test_reports_of_the_zoo_open(name: str, chrome: Any, tmp_path: pathlib.Path) -> None:
    plan = toast.plan(build(name, small=True), mesh="data=2", hardware="tpu-v5e", **QUICK)
    write_html(plan, tmp_path / "r.html")
    page = opened(chrome, tmp_path / "r.html")
    assert page.locator("h1").inner_text() == plan.analysis.program.name
    assert number(page.locator("#found").inner_text()) == len(plan.analysis.program.ops)
    assert page.locator("[data-number=step_seconds]").inner_text() == time_text(
        plan.after.step_seconds
    )
    assert page.locator("[data-number=peak_bytes]").inner_text() == size_text(plan.after.peak_bytes)
    assert time_text(plan.after.step_seconds) in page.locator("#verdict").inner_text()
    expect(page.locator("#at-text")).to_contain_text("in memory")
    assert page.locator("#at-lanes dt").count() == len(plan.schedule.lanes)
    assert page.locator(".device").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []
    page.close()


def test_the_full_train_step_is_one_small_file(chrome: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t2b.html"
    plan = planned("t2b", "data=4,model=4")
    write_html(plan, path)
    assert path.stat().st_size <= 5 * 2**20
    page = opened(chrome, path, viewport={"width": 1360, "height": 950})
    assert number(page.locator("#found").inner_text()) == len(plan.analysis.program.ops) > 13_000
    page.screenshot(path=SHOTS / "t2b-summary.png")
    page.locator(".alike-button").first.click()
    page.locator(".fold button", has_text="layers[9]").first.click()
    rows = page.locator("tr[id^=op-]")
    assert rows.count() > 100
    page.locator("#query").fill("all_gather")
    says(page, " of ")
    gathered = {c.op for c in plan.breakdown.collectives if c.kind == "all_gather"}
    assert number(page.locator("#found").inner_text()) == len(gathered)
    page.locator("#program").scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / "t2b-program.png")
    assert page.complaints == []
    page.close()


def test_a_production_model_is_one_small_file(chrome: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "llama.html"
    plan = planned("llama3-8b", "data=8,model=8")
    write_html(plan, path)
    assert path.stat().st_size <= 2_000_000
    page = opened(chrome, path)
    assert number(page.locator("#found").inner_text()) == len(plan.analysis.program.ops)
    assert page.locator("#layout h3", has_text="32 alike").count() == 1
    assert page.locator(".alike-button", has_text="31 alike").count() >= 2
    expect(page.locator("#at-text")).to_contain_text("in memory")
    page.locator("#timeline").screenshot(path=SHOTS / "llama-timeline.png")
    page.locator(".block").screenshot(path=SHOTS / "llama-block.png")
    if axe_is_here():
        assert violations(page) == []
    assert page.complaints == []
    page.close()


def test_numbers_read_back_are_the_plans(chrome: Any, report: pathlib.Path) -> None:
    plan = planned("t2b", layers=2)
    page, known = opened(chrome, report), plan.to_dict()
    data = embedded(page)
    assert data["summary"]["step_seconds"] == known["after"]["step_seconds"]
    shown = {}
    for row in page.locator("table.arguments tbody tr").all():
        cells = row.locator(":scope > *")
        shown[cells.nth(0).locator("code").first.inner_text()] = (
            int(cells.nth(1).inner_text()), cells.nth(4).inner_text(), cells.nth(5).inner_text(),
        )  # fmt: skip
    assert shown == {
        row["patterns"][0]: (row["count"], row["spec"], size_text(row["device_bytes"]))
        for row in data["arguments"]
    }
    assert shown["tokens"][1] == known["arguments"]["tokens"]["spec"]
    reasons = page.locator("table.actions .why").all_inner_texts()
    assert [r for r in reasons if r] == [a["reason"] for a in known["actions"]]
    kinds = {
        row.locator("th").inner_text(): int(row.locator("td").first.inner_text())
        for row in page.locator("#collective-kinds tbody tr").all()
    }
    assert kinds == {c["kind"]: c["count"] for c in known["after"]["collectives"] if c["count"]}
    page.close()


def test_numbers_are_rounded_as_in_tables(chrome: Any) -> None:
    """A half, such as that of 1.125 GiB, goes to the even digit, as in Python."""
    source = (pathlib.Path(html.__file__).parent / "scripts/page.js").read_text()
    texts = source[source.index("const whole") : source.index("const grouped")]
    sizes = [n * 2.0**k for n in (0, 1.125, 1.375, 2.675, 12.25, 512.5, 999.5, 1000.5, 1001.5)
             for k in (0, 10, 20, 30)]  # fmt: skip
    seconds = [0.0, 1e-9, 0.0125, 1.125, 2.675, 12.25e-3, 2.5e-6, 999.5, 1000.5]
    page = chrome.new_page()
    shown = page.evaluate(
        f"([sizes, seconds]) => {{ {texts} return [sizes.map(sizeText), seconds.map(timeText)]; }}",
        [sizes, seconds],
    )
    page.close()
    assert shown == [[*map(size_text, sizes)], [*map(time_text, seconds)]]


def test_what_is_alive_adds_up(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    for which in ("after", "before"):
        memory = embedded(page)["memory"][which]
        listed = [b["bytes"] for b in memory["at_peak"]]
        assert memory["argument_bytes"] + sum(listed) + memory["more_bytes"] == pytest.approx(
            memory["peak_bytes"]
        )
        if which == "before":
            page.locator("#memory details summary").click()
        table = page.locator(f"#alive-{which}")
        more = page.locator(f"button[data-table=alive-{which}]")
        for shown in (12, len(listed)):
            count = sum(b["count"] for b in memory["at_peak"][shown:]) + memory["more"]
            rest = size_text(sum(listed[shown:]) + memory["more_bytes"])
            rows = table.locator("tbody tr:visible")
            texts = [row.inner_text().split("\t") for row in rows.all()]
            assert [t[0] for t in texts[1 : shown + 1]] == [*map(size_text, listed[:shown])]
            assert [(t[0], t[2], t[4]) for t in texts[shown + 1 :]] == (
                [(rest, f"{count:,}", f"smaller {'value' if count == 1 else 'values'}")]
                if count else []
            )  # fmt: skip
            if which == "after":  # the rows that are named are most of it
                assert sum(listed[:shown]) + memory["argument_bytes"] > 0.75 * memory["peak_bytes"]
            if shown == 12:
                more.click()
    page.close()


def test_a_conflict_is_drawn(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    data = embedded(page)
    assert number(page.locator("#conflicts .lead").inner_text().split("them. ")[1]) == len(
        data["conflicts"]
    )
    alike = page.locator("#conflict-list td.alike").all_inner_texts()
    assert sum(map(int, alike)) == len(data["conflicts"])
    view = page.locator("#conflict-view")
    for row in page.locator("#conflict-list button").all()[:6]:
        row.click()
        assert row.get_attribute("aria-pressed") == "true"
        assert view.locator(".node.torn").count() == 2
        name, other = data["conflicts"][int(view.get_attribute("data-conflict"))][:2]
        assert name != other
        assert view.locator("path.way").count() >= 2
        assert view.locator("path.torn-edge").count() >= 1
        chosen = int(view.get_attribute("data-conflict"))
        assert view.locator("h3").inner_text().startswith(f"Conflict {chosen}: ")
        _, _, set_, group, _ = data["conflicts"][chosen]
        assert f"compatibility set {set_}, resolution group {group}" in view.inner_text()
        assert f"toast explain TARGET --conflict {chosen}" in view.inner_text()
    view.screenshot(path=SHOTS / "conflict.png")
    assert page.complaints == []
    page.close()


def test_the_keyboard_is_enough(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    focused = "document.activeElement.id || document.activeElement.textContent.trim()"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the report"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
    order = []
    for _ in range(4):
        page.keyboard.press("Tab")
        order.append(page.evaluate(focused))
    assert order == ["theme", "Summary", "Timeline", "Layout"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("/")
    assert page.evaluate(focused) == "query"
    page.keyboard.type("dot_general")
    says(page, " of ")
    page.keyboard.press("Escape")
    assert " of " not in page.locator("#found").inner_text()
    button = page.locator(".fold button").nth(2)
    for key, open_ in (("Enter", "true"), ("Space", "false")):
        button.focus()
        page.keyboard.press(key)
        assert button.get_attribute("aria-expanded") == open_
    page.locator("#moment").focus()
    before = page.locator("#moment-text").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#moment-text").inner_text() != before
    assert "in the plan" in page.locator("#moment").get_attribute("aria-valuetext")
    page.close()


def test_the_timeline_is_read_by_the_mouse(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    memory = embedded(page)["memory"]["after"]
    page.locator("#moment").fill(str(memory["peak_op"]))
    assert size_text(memory["peak_bytes"]) in page.locator("#moment-text").inner_text()
    page.locator("svg.after").hover(position={"x": 120, "y": 60})
    assert size_text(memory["peak_bytes"]) not in page.locator("#moment-text").inner_text()
    page.close()


#: Text whose contrast to what is behind it is too little, by the formula of WCAG.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
      known.set(color, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(color);
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    if (e.closest(".node")) return rgba(getComputedStyle(e.closest(".node").querySelector("rect")).fill);
    for (; e; e = e.parentElement) {
      const ground = rgba(getComputedStyle(e).backgroundColor);
      if (ground[3] === 255) return ground;
    }
    return [255, 255, 255, 255];
  };
  const found = new Set(), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const e = node.parentElement;
    if (!node.textContent.trim() || e.closest("script,style,noscript,title,desc") || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), svg = e.closest("svg") && !e.closest("foreignObject");
    const a = light(rgba(svg ? style.fill : style.color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.add(`${e.tagName} ${e.className.baseVal ?? e.className}: ${node.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return [...found];
}"""


#: What a screen reader would miss.
MISSING = """() => {
  const found = [];
  const name = (e) => e.getAttribute("aria-label") || e.textContent.trim() || (e.labels && [...e.labels].map((l) => l.textContent).join("").trim());
  for (const e of document.querySelectorAll("button, a, input, select, summary")) if (!name(e)) found.push(e.outerHTML);
  for (const e of document.querySelectorAll("th")) if (!e.scope) found.push(e.outerHTML);
  for (const e of document.querySelectorAll("table")) if (!e.caption && !e.closest("[role=region][aria-label]")) found.push(e.id || e.className);
  for (const e of document.querySelectorAll("svg")) if (!e.parentElement.closest("svg") && e.getAttribute("aria-hidden") !== "true" && !e.querySelector("title, desc")) found.push(e.outerHTML.slice(0, 80));
  for (const e of document.querySelectorAll("[aria-controls]")) if (e.getAttribute("aria-expanded") === "true" && !document.getElementById(e.getAttribute("aria-controls"))) found.push(e.outerHTML);
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of new Set(ids)) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push(`twice: ${id}`);
  let level = 0;
  for (const e of document.querySelectorAll("h1, h2, h3, h4")) { const n = Number(e.tagName[1]); if (n > level + 1) found.push(e.outerHTML); level = n; }
  for (const landmark of ["header", "nav[aria-label]", "main", "footer"]) if (document.querySelectorAll(landmark).length !== 1) found.push(landmark);
  if (!document.documentElement.lang || !document.title) found.push("language or title");
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_complaints(scheme: str, chrome: Any, report: pathlib.Path) -> None:
    if not axe_is_here():
        pytest.skip("axe-playwright-python is not installed")
    page = opened(chrome, report, color_scheme=scheme)
    page.locator("#conflicts").evaluate("section => section.scrollIntoView()")
    page.wait_for_selector(".node.torn")
    page.locator(".fold button", has_text="layers[1]").first.click()
    page.locator("tr:has(.tag) button.op").first.click()
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    # Elsewhere, the bar of the search may cover half of a button that scrolls beneath it.
    page.evaluate("scrollTo(0, 0)")
    assert violations(page) == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(scheme: str, chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report, color_scheme=scheme)
    page.locator("#conflicts").evaluate("section => section.scrollIntoView()")
    page.wait_for_selector(".node.torn")
    page.locator(".fold button", has_text="layers[1]").first.click()
    page.locator("tr:has(.tag) button.op").first.click()
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(MISSING) == []
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=SHOTS / f"{scheme}.png")
    page.close()


def test_the_switch_overrides_the_system(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark, switch = page.evaluate(ground), page.locator("#theme")
    switch.click()
    light = page.evaluate(ground)
    assert light != dark
    assert "light" in switch.inner_text()
    switch.click()
    assert page.evaluate(ground) == dark
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.close()


def test_it_fits_a_narrow_window(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report, viewport={"width": 400, "height": 800}, reduced_motion="reduce")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.screenshot(path=SHOTS / "narrow.png")
    # Texts of the timeline keep their size and stay on the panel.
    labels = page.evaluate(LABELS)
    assert len(labels) > 6
    for text, size, left, right in labels:
        assert size == 11, text
        assert 0 <= left < right <= 400, text
    # The bar goes with the page, below the conflicts once these are drawn.
    page.locator("#conflicts").evaluate("section => section.scrollIntoView()")
    page.wait_for_selector(".node.torn")
    for section in ("program", "search", "time", "summary"):
        link = page.locator(f"nav a[href='#{section}']")
        page.locator(f"#{section}").evaluate("e => e.scrollIntoView()")
        expect(link).to_have_attribute("aria-current", "true")
        box = link.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
    # What goes on at a side says so there.
    frame = page.locator("#arguments > .scroll")
    expect(frame).to_have_attribute("data-more", "right")
    assert "scroll sideways" in frame.evaluate("e => getComputedStyle(e, '::before').content")
    frame.evaluate("e => { e.scrollLeft = 40; }")
    expect(frame).to_have_attribute("data-more", "left right")
    frame.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
    expect(frame).to_have_attribute("data-more", "left")
    page.set_viewport_size({"width": 1400, "height": 800})
    expect(frame).not_to_have_attribute("data-more", re.compile("."))
    assert page.complaints == []
    page.close()


#: Texts of the timeline: their size in pixels, and where they are.
LABELS = """() => [...document.querySelectorAll(".timeline text")].map((e) => {
  const box = e.getBoundingClientRect();
  return [e.textContent, parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a, box.left, box.right];
})"""


def test_hostile_names_are_text(chrome: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "r.html").write_text(html_text(hostile()))
    page = opened(chrome, tmp_path / "r.html")
    assert HOSTILE in page.locator("table.arguments").text_content()
    for button in page.locator(".fold > h4 > button[aria-expanded=false]").all():
        button.click()
    for button in page.locator("button.op").all():
        button.click()
    assert HOSTILE in page.locator("#listing").inner_text()
    for button in page.locator("#conflict-list button").all():
        button.click()
    page.locator("#query").fill(HOSTILE)
    says(page, " of ")
    assert number(page.locator("#found").inner_text()) >= 1
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, main script").count() == 0
    assert page.complaints == []
    page.close()


def test_the_policy_holds(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); }"
    )
    assert page.evaluate("window.ran") is None
    assert (
        page.evaluate("fetch('https://example.com/').then(() => 'fetched', () => 'refused')")
        == "refused"
    )
    page.close()


def test_methods_are_beside_it(chrome: Any, tmp_path: pathlib.Path) -> None:
    plan = planned("mlp")
    rows = compare(
        plan.analysis, plan.mesh, load("tpu-v5e"), ("toast", "shardy", "manual"), limit=1
    )
    (tmp_path / "r.html").write_text(comparison_html(rows))
    page = opened(chrome, tmp_path / "r.html")
    shown = page.locator("#methods > .scroll tbody tr")
    assert shown.locator("th").all_inner_texts() == ["toast", "shardy", "manual"]
    assert shown.nth(0).locator("td").first.inner_text() == time_text(rows[0].step_seconds)
    assert page.complaints == []
    page.close()


def test_the_documentation_fits_into_the_window(chrome: Any, tmp_path: pathlib.Path) -> None:
    """Its right column is whole, or folded away, however wide the window is."""
    pytest.importorskip("furo", reason="furo is of the extra docs")
    source = tmp_path / "source"
    (source / "_static").mkdir(parents=True)
    shutil.copy(directory("docs") / "_static" / "toast.css", source / "_static")
    (source / "conf.py").write_text(
        'html_theme = "furo"\nhtml_static_path = ["_static"]\nhtml_css_files = ["toast.css"]\n'
    )
    (source / "index.rst").write_text("Page\n====\n\nOne\n---\n\nText.\n\nTwo\n---\n\nText.\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", source, tmp_path / "site"]
    subprocess.run(command, check=True, capture_output=True)
    for width in (1280, 1320, 1400, 1600, 1632, 1920):
        page = chrome.new_page(viewport={"width": width, "height": 700})
        page.goto((tmp_path / "site" / "index.html").as_uri())
        right = page.locator(".toc-drawer").bounding_box()
        assert right["x"] >= width or right["x"] + right["width"] <= width, width
        page.close()
