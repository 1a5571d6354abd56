"""``toast compare``: a row per method, at the same prices; errors in one line."""

from __future__ import annotations

import json
import pathlib
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import toast
from tests.cli.test_cli import run
from tests.helpers import analyzed, f32, printed
from toast.errors import PlanError, SearchError
from toast.evaluation import compare as stage
from toast.evaluation.oracle import Verdict
from toast.hardware import Mesh, load
from toast.models import ZOO
from toast.report.summaries import comparison_table
from toast.resources import directory
from toast.search import Settings
from toast.space import Constraints, Space, broken
from toast.units import time_text

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
        assert row["step_seconds"] >= row["bound_seconds"] > 0
        assert row["states"] >= 1
        assert row["arguments"]
    assert rows["toast"]["cost"] <= rows["shardy"]["cost"] + 0.03  # 30 actions at most


def test_a_program_without_strategies_and_methods_by_choice() -> None:
    base = directory("facts") / "attention.lp"
    result = run("compare", base, "--mesh", "d=4", "--methods", "manual,toast", "--limit", 5)
    assert result.exit_code == 0, result.output
    assert "attention has no expert strategies, unlike" in result.stdout
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
            r"no method named alpha; did you mean alpa\? known: toast,",
        ),
        (("--methods", ","), "no method given; use toast, manual, automap, alpa, shardy"),
        (("--memory", "0"), r"memory limit of 0 bytes \(0 GiB\): must be positive"),
        (("--mesh", "d=7"), "mesh axis d=7 divides no dimension of mlp"),
        (
            ("--pin", "z=P('d')"),
            "pin z: matches no argument, named value or result; similar: x, w1, w2",
        ),
        (("--methods", "shardy", "--forbid", "x=q"), "forbid x: no axis q in mesh d=4; use d"),
        (
            ("--methods", "manual", "--fix", "w2:0=d", "--pin", "w2=P()"),
            "fix: w2:0 cannot get axis d",
        ),
        (("--hardware", "a100", "--oracle", "tpu"), "no TPU compiler for a100|not installed"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run("compare", "mlp", "--mesh", "d=4", *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert result.stderr.strip().count("\n") == 0


@pytest.mark.parametrize(
    "said",
    [
        {"pin": {"params['layers'][*]['wq']": "P(None, 'model')", "tokens": "P('model')"}},
        {"forbid": {"*": "data"}},
        {"fix": {"tokens:0": "model"}, "forbid": {"params*": "model"}},
        {"pin": {"tokens": P("data", P.UNCONSTRAINED)}, "fix": {"params['embedding']:1": "data"}},
    ],
)
def test_all_methods_have_the_users_constraints(said: dict[str, Any]) -> None:
    """A plan holds them, or its row says where it does not."""
    analysis, constraints = analyzed("t2b-tiny"), Constraints(**said)
    rows = stage.compare(
        analysis, MESH, load("tpu-v5e"), limit=5, strategies=ZOO["t2b-tiny"].strategies,
        constraints=constraints, settings=Settings(rounds=2),
    )  # fmt: skip
    found = {row.method: row for row in rows}
    assert [row.error for row in rows] == [""] * len(rows)
    for row in rows:
        assert row.plan is not None
        assert row.broken == broken(analysis, MESH, constraints, row.plan.op_state)
        assert ("violates the constraints: " in row.note) == bool(row.broken)
        assert row.to_dict()["broken"] == row.broken
    for method in ("toast", "manual", "alpa"):
        assert found[method].broken == ()


def test_a_plan_that_does_not_hold_a_pin_says_so(tmp_path: pathlib.Path) -> None:
    """Propagation does not know what is pinned in the middle, or kept off."""
    words = ("--pin", "w1=P()", "--pin", "w2=P('d')", "--pin", "x=P(None, 'd')")
    path = tmp_path / "c.json"
    result = run("compare", "mlp", "--mesh", "d=4", "--overlap", "none", "--budget", "9",
                 "--restarts", "2", *words, "--json", path)  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert data["constraints"]["pin"] == {"w1": "P()", "w2": "P('d')", "x": "P(None, 'd')"}
    assert (data["overlap"], data["budget_seconds"]) == ("none", 9)
    rows = {row["method"]: row for row in data["methods"]}
    assert "best of 2 searches" in rows["toast"]["note"]
    for row in rows.values():
        if not row["broken"]:
            assert row["arguments"] == {"x": "P(None, 'd')", "w1": "P()", "w2": "P('d')"}
    assert not any(rows[method]["broken"] for method in ("toast", "manual", "alpa"))


def test_of_a_value_that_is_pinned_propagation_knows_nothing() -> None:
    def function(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return checkpoint_name(jnp.tanh(x @ w1), "hidden") @ w2

    analysis = toast.analyze(function, f32(256, 32), f32(32, 64), f32(64, 16))
    rows = stage.compare(
        analysis, MESH, load("tpu-v5e"), ["toast", "alpa", "shardy"],
        constraints=Constraints(pin={"hidden": P(None, "data")}),
    )  # fmt: skip
    assert [row.broken for row in rows] == [(), (), ("hidden",)]
    assert rows[2].note == "violates the constraints: hidden"


def test_every_plan_stands_beside_one_bound() -> None:
    """A pin raises that of the methods that hold it."""

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return checkpoint_name(x @ w, "product") @ w

    analysis = toast.analyze(function, f32(1024, 512), f32(512, 512))
    rows = stage.compare(
        analysis, MESH, load("tpu-v5e"), ["toast", "shardy"],
        constraints=Constraints(pin={"product": P()}),
    )  # fmt: skip
    least = rows[1].bound_seconds
    assert rows[0].bound_seconds > least
    shown = printed(comparison_table(analysis, MESH, load("tpu-v5e"), 2.0**34, rows))
    assert f"Lower bound (roofline, no collectives): {time_text(least)}" in shown
    for row in rows:
        over = row.step_seconds / least
        assert re.search(rf"│ {row.method} .*│ +{over:,.{1 + (over < 10)}f}x │", shown)


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

    monkeypatch.setattr("toast.search.polish.polish", interrupt)
    result = run("compare", "mlp", "--mesh", "d=4", "--methods", "toast,manual")
    assert result.exit_code == 130
    assert re.search(r"│ toast .* interrupted", result.stdout)
    assert "manual" not in result.stdout
