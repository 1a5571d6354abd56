"""The wheel works in an empty environment, away from the checkout."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import venv

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import toast
from tests.docs.blocks import blocks
from toast.resources import directory

ROOT = directory("rules").parent


def run(*command: object, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs a command with eight CPU devices, without the checkout on its path."""
    own = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": "",
    }  # fmt: skip
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd, env=os.environ | own, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_wheel_runs_away_from_the_checkout(tmp_path: pathlib.Path) -> None:
    wheels = tmp_path / "wheels"
    run(sys.executable, "-m", "build", "--wheel", "--outdir", wheels, ROOT, cwd=tmp_path)
    (wheel,) = wheels.glob("*.whl")
    home = tmp_path / "env"
    venv.create(home)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    link_requirements(home)
    run(*pip, "check", cwd=tmp_path)
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


def link_requirements(home: pathlib.Path) -> None:
    """Link what the wheel in the environment ``home`` requires, and nothing else, from this one.

    That an index has it is tested below; to unpack it once more would take most of the time.
    """
    (packages,) = home.glob("lib/python*/site-packages")
    (wheel,) = importlib.metadata.distributions(name="toast-partitioner", path=[str(packages)])
    linked: set[str] = set()
    left: list[tuple[importlib.metadata.Distribution, set[str]]] = [(wheel, {""})]
    while left:
        package, extras = left.pop()
        for requirement in map(Requirement, package.requires or ()):
            name, marker = canonicalize_name(requirement.name), requirement.marker
            if name in linked or (
                marker and not any(marker.evaluate({"extra": e}) for e in extras)
            ):
                continue
            linked.add(name)
            needed = importlib.metadata.distribution(name)
            left.append((needed, requirement.extras or {""}))
            for part in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
                if not (packages / part).exists():
                    (packages / part).symlink_to(needed.locate_file(part))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A package index (PEP 503) with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("index") / "toast-partitioner"
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=ROOT)
    names = sorted(file.name for file in folder.iterdir())
    links = "".join(f'<a href="{name}">{name}</a>' for name in names)
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return folder.parent


@pytest.mark.slow
def test_the_wheel_is_small_and_the_sdist_has_what_tests_need(index: pathlib.Path) -> None:
    (wheel,) = index.glob("*/*.whl")
    assert wheel.stat().st_size <= 2 * 2**20
    (sdist,) = index.glob("*/*.tar.gz")
    with tarfile.open(sdist) as archive:
        parts = {pathlib.PurePath(name).parts[1] for name in archive.getnames()}
    assert parts >= {"toast", "rules", "facts", "hardware", "tests", "docs", "LICENSE"}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_wheel_and_sdist_install_from_an_index(
    version: str, index: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    interpreter = interpreter_of(version)
    if interpreter is None:
        pytest.skip(f"without Python {version}")
    run(interpreter, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--extra-index-url", index.as_uri())
    run(*install, "toast-partitioner[report]", cwd=tmp_path)
    works(python, tmp_path)
    only = ("--force-reinstall", "--no-deps", "--no-binary", "toast-partitioner")
    run(*install, *only, "toast-partitioner", cwd=tmp_path)
    works(python, tmp_path)
    shutil.rmtree(tmp_path / "env")


def works(python: pathlib.Path, folder: pathlib.Path) -> None:
    """The commands, and the step of the landing page, away from the checkout."""
    command = python.parent / "toast"
    assert "plan" in run(command, "--help", cwd=folder).stdout
    plan = run(
        command, "plan", "t2b", "--mesh", "data=4,model=4", "--hardware", "tpu-v5e", cwd=folder
    )
    assert "t2b" in plan.stdout
    page = blocks(ROOT / "docs" / "index.md")
    (step,) = (block.body for block in page if block.title == "step.py")
    (folder / "step.py").write_text(step)
    shown = next(block.body for block in page if block.language == "console").splitlines()
    assert run(python, "step.py", cwd=folder).stdout.splitlines() == shown[1:]


def test_the_landing_page_takes_ten_lines() -> None:
    page = blocks(ROOT / "docs" / "index.md")
    (step,) = (block.body for block in page if block.title == "step.py")
    assert len([line for line in step.splitlines() if line.strip()]) <= 10


def interpreter_of(version: str) -> str | None:
    """A Python of this version: on the path, or of pyenv."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    places = [*sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    # Before those on the path, which may be shims that refuse to run.
    return str(places[-1]) if places else shutil.which(f"python{version}")


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
