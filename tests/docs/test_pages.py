"""Every page of the documentation, and the README, does what it says."""

from __future__ import annotations

import pathlib

import pytest

from tests.docs.blocks import ROOT, Block, blocks, check, commands, matches, renewed

PAGES = sorted([ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("docs/*.md")])
#: What pages on other libraries import, with the extra of each.
LIBRARIES = dict.fromkeys(("equinox", "flax", "optax", "orbax"), "libraries") | {"torch": "torch"}
#: What would be run if it were called ``console`` or ``python``.
NOT_RUN = {"bash", "sh", "shell", "pycon", "py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_does_what_it_says(
    page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    try:
        check(page, tmp_path)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library not in LIBRARIES:
            raise
        pytest.skip(f"without {library}: pip install 'toast-partitioner[{LIBRARIES[library]}]'")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_run(page: pathlib.Path) -> None:
    """What looks like code or a command is in a block that runs."""
    for block in blocks(page):
        assert block.language not in NOT_RUN, block
        assert block.language == "console" or not block.body.startswith(("$ ", ">>> ")), block


def test_it_is_under_a_page() -> None:
    page = ROOT / "docs" / "writing-rules.md"
    assert len([line for line in page.read_text().splitlines() if line.strip()]) <= 80
    assert sum(len(list(commands(b))) for b in blocks(page) if b.language == "console") >= 7


def test_commands() -> None:
    block = Block("console", "", "$ a\nx\ny\n$ b\n")
    assert list(commands(block)) == [("a", ["x", "y"]), ("b", [])]


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        (["a"], ["a"], True), (["...", "b"], ["a", "b"], True), (["a"], ["b"], False),
        ([], ["a"], False), (["a ... c"], ["a b c"], True), (["a ... c"], ["a b"], False),
        (["a", "...", "b"], ["a", "b"], True), (["a..."], ["a", "b"], False),
    ],
)  # fmt: skip
def test_matching(expected: list[str], printed: list[str], same: bool) -> None:
    assert matches(expected, printed) is same


def test_renewing() -> None:
    assert renewed(["...", "| x | 1 |", "..."], ["head", "| x | 2 |", "| y | 1 |"]) == [
        "...", "| x | 2 |", "...",
    ]  # fmt: skip
    assert renewed(["took ...", "a 1"], ["took 3 s", "a 2"]) == ["took ...", "a 2"]
    assert renewed(["a 1"], ["a 2", "b"]) == ["a 2", "b"]
    assert renewed(["a ..."], ["a 2"]) == ["a ..."]
