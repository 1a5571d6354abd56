"""``toast lower``."""

from __future__ import annotations

import pathlib

from typer.testing import CliRunner, Result

from toast.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_lower_compares_collectives_and_writes_the_program(tmp_path: pathlib.Path) -> None:
    plan, output = tmp_path / "plan.json", tmp_path / "local.mlir"
    target = "attention", "--mesh", "data=2,model=2"
    assert run("plan", *target, "--json", plan).exit_code == 0
    for source in (target, (plan,)):
        result = run("lower", *source, "-o", output)
        assert result.exit_code == 0, result.output
        assert "collectives" in result.stdout
        assert "sdy.manual_computation" in output.read_text()


def test_bad_invocations_are_one_line(tmp_path: pathlib.Path) -> None:
    plan = tmp_path / "plan.json"
    assert run("plan", "mlp", "--mesh", "data=2", "--json", plan).exit_code == 0
    for arguments, message in (
        (("mlp",), "--mesh is missing"),
        (("mlp", "other", "--mesh", "data=2"), "other: PROGRAM is only for plans"),
        ((plan, "--mesh", "data=2"), "--mesh cannot be used with a plan"),
        (("mlp", "--mesh", "data=2", "-o", tmp_path / "no" / "local.mlir"), "local.mlir"),
    ):
        result = run("lower", *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
