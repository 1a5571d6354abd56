"""The documentation builds into a site without a warning."""

from __future__ import annotations

import html.parser
import pathlib
import re
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, SITE_LACKS

pytestmark = pytest.mark.skipif(
    bool(SITE_LACKS),
    reason=f"without {', '.join(SITE_LACKS)}: pip install 'toast-partitioner[docs]'",
)


def test_the_site_builds_without_a_warning(tmp_path: pathlib.Path) -> None:
    site = tmp_path / "html"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", tmp_path / "trees",
         ROOT / "docs", site],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

    contents = (site / "index.html").read_text()
    for page in {path.stem for path in ROOT.glob("docs/*.md")} - {"index"}:
        assert (site / f"{page}.html").is_file()
        assert f'href="{page}.html"' in contents, f"{page} is not in the table of contents"

    # The answers of the paper's figures, made by the code.
    concepts = text(site / "concepts.html")
    assert "y : [B, U] = dot_general(x, w1)" in concepts
    assert "a : [S, S] = dot_general(k, qt)" in concepts
    assert "15 names, 16 edges, 5 conflicts" in (site / "concepts.html").read_text()
    # All options and docstrings are there.
    assert "--keep-constraints" in text(site / "_generated" / "commands.html")
    assert "argument_frame" in text(site / "api" / "toast.html")
    # The site needs no network.
    for page in site.glob("**/*.html"):
        assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?:', page.read_text()), page


def text(page: pathlib.Path) -> str:
    """What a page says."""
    words: list[str] = []
    parser = html.parser.HTMLParser()
    parser.handle_data = words.append  # type: ignore[method-assign]
    parser.feed(page.read_text())
    return " ".join("".join(words).split())
