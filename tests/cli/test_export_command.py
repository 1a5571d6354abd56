"""``toast export``."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner

from tests.export.small_plan import plan
from toast.cli import app


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan().to_json(path)
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_python_needs_the_file_alone(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    code, output, _ = run(file)
    assert (code, output) == (0, plan().export("python"))
    written = tmp_path / "shardings.py"
    code, said, _ = run(file, "--to", "python", "-o", written)
    assert (code, said) == (0, f"written to {written}\n")
    assert written.read_text() == output
    code, said, _ = run(file, "-o", written, "--json", "-")
    assert code == 0
    assert json.loads(said) == {
        "version": 1, "target": str(file), "to": "python", "files": [str(written)],
    }  # fmt: skip


def test_other_formats_need_the_program(file: pathlib.Path) -> None:
    code, _, error = run(file, "--to", "flax")
    assert code == 2
    assert error.count("\n") == 1
    assert "add TARGET after the file name" in error


@pytest.mark.parametrize(("arguments", "text"), [
    (["mlp"], "mlp: not a plan; write one with toast plan mlp --json FILE"),
    (["--name", "x"], "--name x: write a pair, such as \"params['w1']:1=mlp\""),
    (["--to", "maxtext", "--rename", "model"], "--rename model: write a pair"),
    (["-o", "/nowhere/x.py"], "/nowhere/x.py: cannot write"),
])  # fmt: skip
def test_wrong_options(file: pathlib.Path, arguments: list[str], text: str) -> None:
    code, output, error = run(*([file] if arguments[0].startswith("-") else []), *arguments)
    assert (code, output) == (2, "")
    assert text in error
    assert error.count("\n") == 1


def test_models_are_found_and_dimensions_named(tmp_path: pathlib.Path) -> None:
    made = tmp_path / "mlp.json"
    planned = [
        "plan",
        "mlp",
        "--mesh",
        "data=2",
        "--pin",
        "w1=P('data')",
        "--budget",
        "0",
        "--json",
        str(made),
    ]
    assert CliRunner().invoke(app, planned).exit_code == 0
    code, output, _ = run(made, "--to", "flax", "--name", "w1:1=hidden")
    assert code == 0
    assert "'w1': ('embed', 'hidden')" in output
    code, output, _ = run(made, "--to", "maxtext", "--name", "w1:0=embed", "--rename", "data=fsdp")
    assert code == 0
    assert "  - [embed, [fsdp]]\n" in output
    assert "ici_fsdp_parallelism: 2\n" in output
