"""docs/writing-rules.md, run line by line: its files are written, its commands print what it says."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "writing-rules.md"
FENCED = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def run(command: str, folder: pathlib.Path) -> str:
    here = pathlib.Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    (folder / "bin").mkdir(exist_ok=True)
    shim = folder / "bin" / "toast"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m toast "$@"\n')
    shim.chmod(0o755)
    environment["PATH"] = f"{shim.parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(PAGE.parents[1])
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def matches(expected: list[str], printed: list[str]) -> bool:
    """Whether lines are as expected, where a line ``...`` stands for any number of them."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else re.escape(line.rstrip()) + r"\n" for line in expected
    )
    return bool(re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed)))


def test_the_page_does_what_it_says(tmp_path: pathlib.Path) -> None:
    commands = 0
    for language, title, body in FENCED.findall(PAGE.read_text()):
        if title:
            (tmp_path / title).parent.mkdir(exist_ok=True)
            (tmp_path / title).write_text(body)
            continue
        assert language == "console", "other blocks have a title"
        for step in body.removeprefix("$ ").split("\n$ "):
            command, *expected = step.strip("\n").split("\n")
            printed = run(command, tmp_path).splitlines()
            assert matches(expected, printed), f"{command}\n" + "\n".join(printed)
            commands += 1
    assert commands >= 7


def test_it_is_under_a_page() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.strip()]
    assert len(lines) <= 80


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [(["a"], ["a"], True), (["...", "b"], ["a", "b"], True), (["a"], ["b"], False), ([], ["a"], False)],
)  # fmt: skip
def test_matching(expected: list[str], printed: list[str], same: bool) -> None:
    assert matches(expected, printed) is same
