"""Update the pictures of reports in ``docs``: summary, timeline, block, conflict, ops of a line.

    python benchmarks/pictures.py

This needs Chromium and the extra toast-partitioner[test].
"""

from __future__ import annotations

import argparse
import inspect
import pathlib
import sys
import tempfile
from typing import Any

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS.parent))

import toast
from tests.report.browser import browser, missing, opened
from toast.cli.elapsed import steps
from toast.models import build, transformer
from toast.report import write_html

VIEW = {"width": 1240, "height": 980}


def products_of_the_mlp() -> str:
    """The source line of the products with ``up`` in t2b, such as ``transformer.py:153``."""
    lines = inspect.getsource(transformer).splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if 'x @ layer["up"]' in text)
    return f"transformer.py:{line}"


def train_step(started: Any, path: pathlib.Path) -> None:
    """Pictures of the top of the page, and of three products of a layer with their collectives."""
    page = opened(started, path, viewport=VIEW)
    page.screenshot(path=DOCS / "report.png")
    page.locator("#timeline").screenshot(path=DOCS / "report-timeline.png")
    page.locator(".block").screenshot(path=DOCS / "report-block.png")
    page.locator("#query").fill(products_of_the_mlp())
    page.locator("#only").select_option("moves")
    page.get_by_role("button", name="Fold all").click()
    page.locator(".fold button", has_text="layers[3]").first.click()
    page.locator("tr[id^=op-] button").nth(1).click()
    page.locator("#program").evaluate("section => section.scrollIntoView()")
    page.screenshot(path=DOCS / "report-program.png")


def attention(started: Any, path: pathlib.Path) -> None:
    """A picture of the first conflict of the paper's Figure 5."""
    page = opened(started, path, viewport=VIEW)
    page.locator("#conflict-list button").first.click()
    page.locator("#conflicts").screenshot(path=DOCS / "report-conflict.png")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if missing():
        sys.exit(missing())
    shown = {"t2b": ("data=4,model=4", train_step), "attention": ("data=2,model=2", attention)}
    with browser() as started, tempfile.TemporaryDirectory() as folder:
        for name in steps(shown):
            mesh, show = shown[name]
            path = pathlib.Path(folder) / f"{name}.html"
            write_html(toast.plan(build(name), mesh=mesh, hardware="tpu-v5e"), path)
            show(started, path)


if __name__ == "__main__":
    main()
