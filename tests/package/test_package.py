"""The wheel works in an empty environment, away from the checkout."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import venv

import pytest

import toast
from toast.resources import directory

ROOT = directory("rules").parent


def run(*command: object, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_wheel_runs_away_from_the_checkout(tmp_path: pathlib.Path) -> None:
    wheels = tmp_path / "wheels"
    run(sys.executable, "-m", "build", "--wheel", "--outdir", wheels, ROOT, cwd=tmp_path)
    (wheel,) = wheels.glob("*.whl")
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    command = home / "bin" / "toast"
    plan = run(
        command, "plan", "mlp", "--mesh", "d=4", "--json", "p.json", "--report", "r.html", cwd=away
    )
    assert "Plan for mlp" in plan.stdout
    assert (away / "p.json").is_file()
    assert "largest_colors" in run(command, "query", "--list", cwd=away).stdout
    assert "</html>" in (away / "r.html").read_text()
    schema = "from toast.plan import schema; print(schema()['title'])"
    assert "A TOAST plan" in run(python, "-c", schema, cwd=away).stdout
    where = run(python, "-c", "import toast.resources as r; print(r.directory('rules'))", cwd=away)
    assert str(home) in where.stdout
    shutil.rmtree(home)


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(toast.__path__, "toast.")]
    return ["toast", *(name for name in found if not name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", modules())
def test_everything_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, name


def test_one_stage_imports_clingo_and_one_package_touches_mlir() -> None:
    for file in sorted((ROOT / "toast").glob("**/*.py")):
        text = file.read_text()
        if re.search(r"^\s*(?:import|from) clingo", text, re.M):
            assert file.parent.name == "logic"
        if re.search(r"^\s*(?:import|from) jax\._src", text, re.M):
            assert file.parent.name == "mlir"


@pytest.mark.parametrize(
    "name",
    ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "Makefile"],
)
def test_top_level_files(name: str) -> None:
    assert (ROOT / name).read_text().strip()
