"""Pages that are run: their files are written, their Python runs, their commands print what they say.

In the order of the page, in a folder that is empty but for the shipped ``facts``, ``rules`` ...:

* a block with ``title="file"`` is written;
* ``console`` runs each ``$ command`` and compares what it prints, where ``...`` stands for any text
  within a line, or as a line for any number of lines; a command that shows nothing must succeed;
* ``python`` runs, with the variables of the page's blocks before it, and prints what is in the
  ``output`` behind it;
* ``{live}``, which the site shows with what it prints, runs when that is built; without Sphinx it
  runs here: at the root of the repository, with the variables of the live blocks before it.

Other blocks are there to be read.  ``python -m tests.docs.blocks PAGE...`` writes what is printed
today into pages; look at the difference before you commit it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from tests import durations
from tests.docs import preloaded

ROOT = pathlib.Path(__file__).parents[2]
_FENCED = re.compile(r'^```(\S*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
#: Directives' options: ``:output-only:``.
_OPTION = re.compile(r"^:[\w-]+:.*\n", re.MULTILINE)
#: What is not installed of what builds the site.
SITE_LACKS = [n for n in ("furo", "myst_parser", "sphinx") if not importlib.util.find_spec(n)]
_SHIPPED = ("examples", "facts", "hardware", "rules")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    body: str


def blocks(page: pathlib.Path) -> list[Block]:
    """The blocks of a page, in order."""
    return [Block(*found) for found in _FENCED.findall(page.read_text())]


def check(page: pathlib.Path, folder: pathlib.Path) -> None:
    """Run a page in the empty ``folder``; fails where it does not do what it says."""
    for what, expected, printed in run(page, folder):
        assert matches(expected, printed), f"{what}\n" + "\n".join(printed)


def run(page: pathlib.Path, folder: pathlib.Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Run a page; of each command and each ``output``, the lines it shows and those printed."""
    found = blocks(page)
    own = {pathlib.Path(block.title).parts[0] for block in found if block.title}
    for name in {*_SHIPPED} - own:
        (folder / name).symlink_to(ROOT / name)
    has_commands = any(block.language == "console" for block in found)
    environment = _environment(folder) if has_commands else {}
    cache = mock.patch.dict(os.environ, _cache(folder))
    shown: dict[str, Any] = {"__name__": "live"}
    typed: dict[str, Any] = {"__name__": "page"}
    printed: list[str] = []
    for block in found:
        if block.title:
            (folder / block.title).parent.mkdir(exist_ok=True)
            (folder / block.title).write_text(block.body)
        elif block.language == "console":
            for command, expected in commands(block):
                done = _run(command, folder, environment)
                # What fails on purpose shows how.
                assert done.returncode == 0 or {*expected} - {"..."}, f"{command}\n{done.stderr}"
                yield command, expected, done.stdout.splitlines()
        elif block.language == "python":
            with cache:
                printed = _exec(block.body, page, folder, typed)
        elif block.language == "output":
            yield block.body, block.body.splitlines(), printed
        elif block.language == "{live}" and SITE_LACKS:
            with cache:
                _exec(_OPTION.sub("", block.body), page, ROOT, shown)


def _exec(code: str, page: pathlib.Path, folder: pathlib.Path, names: dict[str, Any]) -> list[str]:
    """Run Python in ``folder``; the lines that it prints."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, page.name, "exec"), names)
    return output.getvalue().splitlines()


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


def renewed(expected: list[str], printed: list[str]) -> list[str]:
    """``expected`` with its lines as they are printed now, where ``...`` was left as it is.

    Without ``...`` these are all the lines; else each line becomes the one most like it.
    """
    if matches(expected, printed):
        return expected
    if not any("..." in line for line in expected):
        return printed
    found, start = [], 0
    for line in expected:
        rest = printed[start:]
        if line != "..." and rest:
            best = max(range(len(rest)), key=lambda i: _likeness(line, rest[i]))
            start += best + 1
            line = line if matches([line], [rest[best]]) else rest[best].rstrip()
        found.append(line)
    return found


def _likeness(one: str, two: str) -> float:
    return difflib.SequenceMatcher(None, one, two, autojunk=False).ratio()


def _cache(folder: pathlib.Path) -> dict[str, str]:
    """The settings of a cache that is empty at first, as a new reader's is."""
    return {"TOAST_CACHE": "", "XDG_CACHE_HOME": str(folder / ".cache")}


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """That of a reader in a virtual environment where this TOAST is installed."""
    programs = folder / ".programs"
    programs.mkdir()
    clingo = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m clingo "$@"\n'
    for name, text in {"toast": preloaded.server().program(), "clingo": clingo}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    here = pathlib.Path(sys.executable).parent
    return {
        **kept,
        **_cache(folder),
        "PATH": f"{programs}:{here}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }


def _run(
    command: str, folder: pathlib.Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    before = preloaded.server().user_cpu_seconds()
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    durations.elsewhere_seconds += preloaded.server().user_cpu_seconds() - before
    return done


def _renew(page: pathlib.Path) -> None:
    """Write what is printed now into ``page``."""
    with tempfile.TemporaryDirectory() as folder:
        ran = list(run(page, pathlib.Path(folder)))
    text, place = page.read_text(), 0
    for _, expected, printed in ran:
        if expected:
            before = "\n".join(expected) + "\n"
            place = text.index(before, place)
            after = "\n".join(renewed(expected, printed)) + "\n"
            text = text[:place] + after + text[place + len(before) :]
            place += len(after)
    page.write_text(text)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    sys.path.append(str(ROOT / "docs" / "_ext"))
    for argument in sys.argv[1:]:
        _renew(pathlib.Path(argument).resolve())
