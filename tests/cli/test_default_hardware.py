"""The user is told that the hardware is a default: before the work at a terminal, else after."""

from __future__ import annotations

import os
import pathlib
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.cli.test_cli import run
from toast.cli.common import _is_used


@pytest.mark.parametrize(("more", "told"), [((), True), (("--hardware", "h100"), False)])
def test_the_default_is_told_on_a_terminal(more: tuple[str, ...], told: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "toast",
        "plan",
        "mlp",
        "--mesh",
        "d=4",
        "--budget",
        "0",
        *more,
    ]
    terminal, end = pty.openpty()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=end, check=False)
    os.close(end)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # nothing is left
            break
        shown += part
    os.close(terminal)
    assert done.returncode == 0, shown
    assert (b"hardware tpu-v5e by default; use --hardware" in shown) is told
    piped = run(*map(str, command[3:]))
    assert ("hardware tpu-v5e by default; use --hardware" in piped.stderr) is told
    assert "by default; use" not in piped.stdout


def test_the_default_is_not_a_line_of_an_error() -> None:
    failed = run("plan", "nonsense", "--mesh", "d=4")
    assert failed.exit_code == 2
    assert failed.stderr.count("\n") == 1


def test_hardware_that_is_not_used_is_not_told(tmp_path: pathlib.Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    for name, parameters, used in (
        ("plan", {"target": "mlp"}, True),
        ("query", {"target": "mlp", "mesh": None}, False),
        ("query", {"target": "mlp", "mesh": "d=4"}, True),
        ("report", {"target": str(plan)}, False),
    ):
        assert _is_used(SimpleNamespace(info_name=name, params=parameters)) is used  # type: ignore[arg-type]
