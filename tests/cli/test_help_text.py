"""The written help of ``toast --help`` is the one that the command line makes."""

from __future__ import annotations

import contextlib
import io
import pathlib
import sys

import pytest
from typer.testing import CliRunner

import toast.__main__ as entry
from toast import cli

WRITTEN = pathlib.Path(cli.__file__).with_name("help.txt")


def said(monkeypatch: pytest.MonkeyPatch, program: str) -> str:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        entry.main()
    return output.getvalue()


def test_the_written_help_is_true(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    made = CliRunner().invoke(
        cli.app, ["--help"], prog_name="toast", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    )
    if request.config.getoption("--regenerate"):
        WRITTEN.write_text(made.stdout, encoding="ascii")
    assert made.stdout.startswith("Usage: toast [OPTIONS]")
    assert said(monkeypatch, "/usr/bin/toast") == made.stdout, "if meant: pytest --regenerate"
    assert said(monkeypatch, "/x/toast/__main__.py").startswith("Usage: python -m toast [OPTIONS]")


def test_narrow_terminals_get_help_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert not entry._print_help()
