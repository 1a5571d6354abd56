"""docs/reading-a-report.md: its pictures are there, its options exist."""

from __future__ import annotations

import pathlib
import re

from tests.cli.test_cli import run

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reading-a-report.md"


def test_the_pictures_are_there_and_small() -> None:
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / name).stat().st_size < 300_000


def test_the_options_exist() -> None:
    for command in ("plan", "compare", "report"):
        text = run(command, "--help").stdout
        for line in re.findall(rf"^toast {command} .*", PAGE.read_text(), re.MULTILINE):
            for option in re.findall(r"--?\w+", line):
                if option.startswith("--") or option == "-o":
                    assert option in text, (command, option)
