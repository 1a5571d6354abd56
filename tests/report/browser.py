"""A headless Chromium for tests and benchmarks: Debian's, driven by playwright."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

from toast.resources import directory

#: Screenshots are kept here, for people to look at.
SHOTS = directory("rules").parent / "build" / "report-screenshots"

#: What Debian, and others, call it.
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Where Chromium is, if it is installed."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def missing() -> str:
    """Why there is no browser to test with; nothing if there is."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install 'toast-partitioner[test]'"
    return "" if chromium() else "Chromium is not installed: apt-get install chromium"


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser; it needs no sandbox to open our own files, and root has none."""
    from playwright.sync_api import sync_playwright

    arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield started
        finally:
            started.close()


def opened(browser: Any, path: pathlib.Path, **options: Any) -> Any:
    """A page that shows the report at ``path``, with what went wrong in ``page.complaints``."""
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
    page.complaints = []
    page.on("console", lambda m: page.complaints.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("dialog", lambda dialog: page.complaints.append(dialog.message))
    address = path.resolve().as_uri()
    page.on(
        "request",
        lambda r: None if r.url.split("#")[0] == address else page.complaints.append(r.url),
    )
    page.goto(address)
    page.wait_for_selector("html[data-ready]", state="attached")
    return page


def axe_is_here() -> bool:
    """Whether axe, which checks the accessibility of pages, is installed."""
    return importlib.util.find_spec("axe_playwright_python") is not None


def violations(page: Any) -> list[str]:
    """What axe finds wrong with the accessibility of a page, best practices included."""
    import axe_playwright_python

    script = pathlib.Path(axe_playwright_python.__file__).with_name("axe.min.js")
    page.evaluate(script.read_text(encoding="utf-8"))
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    options = {"runOnly": {"type": "tag", "values": tags}}
    result = page.evaluate("options => axe.run(document, options)", options)
    return [f"{v['id']}: {node['html'][:200]}" for v in result["violations"] for node in v["nodes"]]


def embedded(page: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(page.locator("#data").text_content())
    return data


def says(page: Any, pattern: str) -> None:
    """Wait until the number of ops found reads as told; the page forbids scripts that wait."""
    from playwright.sync_api import expect

    expect(page.locator("#found")).to_have_text(re.compile(pattern))


def number(text: str) -> int:
    return int(text.split()[0].replace(",", ""))
