"""The documentation builds into a site without a warning."""

from __future__ import annotations

import html.parser
import importlib.util
import pathlib
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT

missing = [name for name in ("furo", "myst_parser", "sphinx") if not importlib.util.find_spec(name)]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"without {', '.join(missing)}: pip install 'toast-partitioner[docs]'"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", folder / "trees",
         ROOT / "docs", folder / "html"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def text(page: pathlib.Path) -> str:
    """What a page says."""
    words: list[str] = []
    parser = html.parser.HTMLParser()
    parser.handle_data = words.append  # type: ignore[method-assign]
    parser.feed(page.read_text())
    return " ".join("".join(words).split())


def test_every_page_is_there(site: pathlib.Path) -> None:
    for page in ROOT.glob("docs/*.md"):
        assert (site / f"{page.stem}.html").is_file()
    contents = (site / "index.html").read_text()
    assert [p.stem for p in ROOT.glob("docs/*.md") if f'href="{p.stem}.html' not in contents] in (
        [], ["index"],
    )  # fmt: skip


def test_figures_are_live(site: pathlib.Path) -> None:
    """The answers of the paper's figures stand on the page, made by the code."""
    page = site / "concepts.html"
    assert "y : [B, U] = dot_general(x, w1)" in text(page)
    assert "a : [S, S] = dot_general(k, qt)" in text(page)
    assert "5 conflicts" in page.read_text()


def test_commands_and_docstrings_are_there(site: pathlib.Path) -> None:
    assert "--keep-constraints" in text(site / "_generated" / "commands.html")
    api = text(site / "api.html")
    for name in ("toast.plan", "toast.analyze", "argument_frame", "best_legal"):
        assert name in api, name


def test_it_needs_no_network(site: pathlib.Path) -> None:
    for page in site.glob("**/*.html"):
        for line in page.read_text().splitlines():
            assert not ("<script" in line and 'src="http' in line), line
            assert not ("<link" in line and 'rel="stylesheet"' in line and 'href="http' in line)
