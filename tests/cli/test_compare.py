"""``toast compare``: a row per method, at the same prices; errors in one line."""

from __future__ import annotations

import json
import pathlib
import re
import time
from typing import Any

import pytest

from tests.cli.test_cli import run
from tests.helpers import analyzed
from toast import compare as stage
from toast.errors import PlanError, SearchError
from toast.hardware import Mesh, load
from toast.models import ZOO
from toast.oracle import Verdict
from toast.resources import directory
from toast.space import Space

MESH = Mesh.parse("data=4,model=2")


@pytest.mark.parametrize("target", ["mlp", "t2b-tiny"])
def test_every_method_has_a_row(target: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.json"
    result = run("compare", target, "--mesh", "data=4,model=2", "--limit", 3, "--json", path)
    assert result.exit_code == 0, result.output
    for method in stage.METHODS:
        assert re.search(rf"│ {method} ", result.stdout), method
    assert f"{target} on mesh data=4,model=2 of tpu-v5e" in result.stdout
    data = json.loads(path.read_text())
    rows = {row["method"]: row for row in data["methods"]}
    assert list(rows) == list(stage.METHODS)
    for row in rows.values():
        assert row["error"] == ""
        assert row["fits"] is True
        assert row["step_seconds"] > 0
        assert row["states"] >= 1
        assert row["arguments"]
    assert rows["toast"]["cost"] <= rows["shardy"]["cost"] + 0.03  # 30 actions at most


def test_a_program_without_strategies_and_methods_by_choice() -> None:
    base = directory("facts") / "attention.lp"
    result = run("compare", base, "--mesh", "d=4", "--methods", "manual,toast", "--limit", 5)
    assert result.exit_code == 0, result.output
    assert "attention has no experts' strategies, as models" in result.stdout
    assert "automap" not in result.stdout


@pytest.mark.parametrize("method", ["automap", "alpa"])
def test_the_limit_holds_what_is_set_up(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the set-up takes all of it, there is one plan, and the note says why."""
    made = Space.__init__

    def slow(self: Space, *arguments: Any, **options: Any) -> None:
        time.sleep(0.3)
        made(self, *arguments, **options)

    monkeypatch.setattr(Space, "__init__", slow)
    (row,) = stage.compare(analyzed("t2b-tiny"), MESH, load("tpu-v5e"), [method], limit=0.2)
    assert "time limit" in row.note
    assert row.plan is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--methods", "toast,alpha"),
            r"no method called alpha; did you mean alpa\? known: toast,",
        ),
        (("--methods", ","), "no method given; known: toast, manual, automap, alpa, shardy"),
        (("--memory", "0"), "memory limit of 0 bytes: must be positive"),
        (("--mesh", "d=7"), "mesh axis d=7 divides no dimension of mlp"),
        (("--hardware", "a100", "--oracle", "tpu"), "no TPU compiler for a100|not installed"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run("compare", "mlp", "--mesh", "d=4", *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert result.stderr.strip().count("\n") == 0


def test_what_does_not_fit_is_a_row_too() -> None:
    rows = stage.compare(
        analyzed("t2b", layers=1), MESH, load("tpu-v5e"), ["toast", "shardy"], memory_bytes=2**20
    )
    assert [row.fits for row in rows] == [False, False]
    assert all(row.cost > 1 for row in rows)


def test_a_failed_method_or_compile_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise SearchError("out of luck")

    verdicts = iter([None, Verdict(1.0, 1.0, 0.0, 5.0, 5.0, True, (), 1.0)])

    def judged(*_arguments: object, **_options: object) -> Verdict:
        verdict = next(verdicts)
        if verdict is None:
            raise PlanError("the compiler died")
        return verdict

    monkeypatch.setattr(stage, "alpa", fail)
    monkeypatch.setattr(stage, "check", lambda _hardware: None)
    monkeypatch.setattr(stage, "judge", judged)
    rows = stage.compare(
        analyzed("mlp"), MESH, load("tpu-v5e"), ["alpa", "toast", "manual"],
        strategies=ZOO["mlp"].strategies, oracle="tpu",
    )  # fmt: skip
    assert [row.error for row in rows] == ["out of luck", "", ""]
    assert [row.verdict_error for row in rows] == ["", "the compiler died", ""]
    assert rows[2].verdict is not None
    assert rows[2].to_dict()["verdict"]["out_of_memory"] is True


def test_an_interrupt_keeps_the_rows_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "shardy", interrupt)
    path = tmp_path / "c.json"
    result = run(
        "compare", "mlp", "--mesh", "d=4", "--methods", "toast,manual,shardy", "--json", path
    )
    assert result.exit_code == 130
    assert result.stderr.strip() == "toast: interrupted"
    assert re.search(r"│ manual ", result.stdout)
    rows = json.loads(path.read_text())["methods"]
    assert [row["method"] for row in rows] == ["toast", "manual"]


def test_a_search_that_is_interrupted_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("toast.search.search.polish", interrupt)
    result = run("compare", "mlp", "--mesh", "d=4", "--methods", "toast,manual")
    assert result.exit_code == 130
    assert re.search(r"│ toast .* interrupted", result.stdout)
    assert "manual" not in result.stdout
