"""Pages that are run: their files are written, their Python runs, their commands print what they say.

In the order of the page, in a folder that is empty but for the shipped ``facts``, ``rules`` ...:

* a block with ``title="file"`` is written;
* ``console`` runs each ``$ command`` and compares what it prints, where ``...`` stands for any text
  within a line, or as a line for any number of lines;
* ``python`` runs, with the variables of the page's blocks before it, and prints what is in the
  ``output`` behind it;
* ``{live}``, which the site runs as well, runs at the root of the repository, with the variables of
  the live blocks before it.

Other blocks are there to be read.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]
_FENCED = re.compile(r'^```(\S*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
#: Directives' options: ``:output-only:``.
_OPTION = re.compile(r"^:[\w-]+:.*\n", re.MULTILINE)
_SHIPPED = ("examples", "facts", "hardware", "rules")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    body: str


def blocks(page: pathlib.Path) -> list[Block]:
    """The blocks of a page, in order."""
    return [Block(*found) for found in _FENCED.findall(page.read_text())]


def check(page: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page in ``folder``; fails where it does not do what it says."""
    found = blocks(page)
    own = {pathlib.Path(block.title).parts[0] for block in found if block.title}
    for name in {*_SHIPPED} - own:
        (folder / name).symlink_to(ROOT / name)
    environment = _environment(folder)
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    shown: dict[str, Any] = {"__name__": "live"}
    typed: dict[str, Any] = {"__name__": "page"}
    printed: list[str] = []
    for block in found:
        if block.title:
            (folder / block.title).parent.mkdir(exist_ok=True)
            (folder / block.title).write_text(block.body)
        elif block.language == "console":
            for command, expected in commands(block):
                printed = _run(command, folder, environment)
                assert matches(expected, printed), f"{command}\n" + "\n".join(printed)
        elif block.language == "python":
            with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.body, page.name, "exec"), typed)
            printed = output.getvalue().splitlines()
        elif block.language == "output":
            assert matches(block.body.splitlines(), printed), "\n".join(printed)
        elif block.language == "{live}":
            with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(_OPTION.sub("", block.body), page.name, "exec"), shown)


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The commands of a ``console`` block, and the lines that each prints."""
    for step in block.body.removeprefix("$ ").split("\n$ "):
        command, *expected = step.strip("\n").split("\n")
        yield command, expected


def matches(expected: list[str], printed: list[str]) -> bool:
    """Whether lines are as expected, where ``...`` stands for anything."""
    pattern = "".join(
        r"(?:.*\n)*"
        if line == "..."
        else ".*".join(map(re.escape, line.rstrip().split("..."))) + r"\n"
        for line in expected
    )
    return bool(re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed)))


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """That of a reader in a virtual environment where this TOAST is installed."""
    programs = folder / ".programs"
    programs.mkdir()
    for name in ("toast", "clingo"):
        shim = programs / name
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {name} "$@"\n')
        shim.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    here = pathlib.Path(sys.executable).parent
    return {
        **kept,
        "PATH": f"{programs}:{here}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }


def _run(command: str, folder: pathlib.Path, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()
