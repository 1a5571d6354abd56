"""Every command can write what it prints as JSON."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click
import pytest
import typer.main

from tests.cli.test_cli import run
from toast.cli import app
from toast.cli.json_files import plain


def commands(group: Any, *path: str) -> list[tuple[tuple[str, ...], click.Command]]:
    pairs = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            pairs += commands(command, *path, name)
        else:
            pairs.append(((*path, name), command))
    return pairs


def test_every_command_has_the_option() -> None:
    every = commands(typer.main.get_command(app))
    assert len(every) > 15
    without = [
        " ".join(path) for path, command in every
        if not any("--json" in option.opts for option in command.params)
    ]  # fmt: skip
    assert without == []


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("models",), {"models"}),
        (("hardware", "list"), {"devices"}),
        (("hardware", "show", "h100"), {"device"}),
        (("rules", "list"), {"rules", "proven"}),
        (("lower", "mlp", "--mesh", "data=2"), {"collectives", "equal", "gathered", "output"}),
        (("report", "mlp", "--mesh", "data=2"), {"output", "verdict"}),
    ],
)
def test_the_files(
    words: tuple[str, ...], keys: set[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words, "--json", "out.json")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert {*data} == {"version", *keys}
    assert all(
        data[key] not in (None, [], {}) for key in keys - {"collectives", "gathered", "output"}
    )


def test_plain_data() -> None:
    assert plain({"a": (float("inf"), pathlib.Path("x")), 1: [True, None, 2.5]}) == {
        "a": [None, "x"], "1": [True, None, 2.5],
    }  # fmt: skip
