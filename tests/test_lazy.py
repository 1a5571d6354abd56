"""What is imported, and when: a name of TOAST's brings its modules, ``--help`` and questions few."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys

import pytest

import toast
from toast import targets
from toast.models import ZOO

HEAVY = ("jax", "pandas", "scipy", "clingo", "toast.cost", "toast.plan", "toast.models")


def imported(script: str, **environment: str) -> list[str]:
    """Which heavy modules a script has imported at its end."""
    ending = f"import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}\n{ending}"], capture_output=True, text=True, check=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout.splitlines()[-1].split()


def command(*arguments: str) -> str:
    return f"""
import sys
from toast.cli import main
sys.argv = ["toast", *{arguments!r}]
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize("package", ["toast", "toast.report", "toast.explain"])
def test_a_package_offers_what_it_says(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= {*dir(module)}
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'none'"):
        module.none  # noqa: B018


def test_the_function_is_not_hidden_by_the_package() -> None:
    script = "import toast.plan, toast\nfrom toast.plan import Plan\nassert toast.plan.__call__"
    assert "toast.plan" in imported(script)
    assert callable(toast.plan)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["query", "--help"], ["plan", "--none"], ["explain", "t2b"]],
)
def test_help_and_bad_usage_are_said_at_once(arguments: list[str]) -> None:
    assert imported(command(*arguments)) == []


def test_questions_about_a_kept_program_do_without_jax(tmp_path: pathlib.Path) -> None:
    kept = {"XDG_CACHE_HOME": str(tmp_path), "TOAST_CACHE": ""}
    asked = command("query", "attention", "conflict(_,_,_)")
    assert "jax" in imported(asked, **kept)
    assert imported(asked, **kept) == ["pandas", "clingo"]
    explained = command("explain", "attention", "x:0", "wq:0")
    assert imported(explained, **kept) == ["scipy", "clingo"]


def test_questions_about_a_plan_do_without_jax(tmp_path: pathlib.Path) -> None:
    kept = {"XDG_CACHE_HOME": str(tmp_path), "TOAST_CACHE": ""}
    plan = str(tmp_path / "plan.json")
    imported(command("plan", "attention", "--mesh", "data=2", "--json", plan), **kept)
    assert "jax" in imported(command("explain", plan, "--argument", "x"), **kept)  # not kept yet
    few = {"scipy", "clingo", "toast.cost", "toast.plan"}
    assert {*imported(command("explain", plan, "--argument", "x"), **kept)} <= few
    assert "jax" not in imported(command("query", plan, "reshards"), **kept)
    conflict = command("explain", "attention", "--conflict", "0", "--mesh", "data=2")
    assert "jax" in imported(conflict, **kept)  # the form for this machine was not cached yet
    assert "jax" not in imported(conflict, **kept)


def test_names_of_models_are_known_without_jax() -> None:
    assert set(targets.MODEL_NAMES) == set(ZOO)
