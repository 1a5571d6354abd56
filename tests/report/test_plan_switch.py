"""Plans beside that of a page, the plan as Python, names of colors, and where a page comes from."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.cli.test_cli import run
from tests.helpers import f32
from tests.report.browser import missing, opened
from tests.report.test_html import QUICK, embedded, planned
from tests.tiny_plan import tiny
from toast.errors import PlanError
from toast.evaluation.compare import MethodResult
from toast.plan import Plan, spec_text
from toast.report import PageOrigin, html_text, parse_names, verdict_of
from toast.report.argument_roles import argument_roles
from toast.report.html.plan_switch import python_text
from toast.report.verdict import baseline_text
from toast.search import Settings
from toast.space import Constraints


@pytest.fixture(scope="module")
def pair() -> tuple[Plan, Plan]:
    first = tiny()
    second = toast.plan(
        first.analysis, mesh=first.mesh, hardware=first.hardware,
        constraints=Constraints(forbid={"params*": ["data"]}), settings=Settings(budget=0.0),
    )  # fmt: skip
    return first, second


def rows(pair: tuple[Plan, Plan]) -> list[MethodResult]:
    return [MethodResult.of("now", pair[0]), MethodResult.of("earlier", pair[1])]


def test_other_plans_have_what_differs(pair: tuple[Plan, Plan]) -> None:
    first = pair[0]
    data = embedded(html_text(first, rows(pair)))
    assert [plan["name"] for plan in data["plans"]] == ["now", "earlier"]
    for plan, row in zip(pair, data["plans"], strict=True):
        assert row["numbers"][0][2] == plan.after.step_seconds
        assert sum(row["memory"].values()) == pytest.approx(plan.after.peak_bytes)
        assert sum(c[2] for c in row["collectives"].values()) == pytest.approx(
            plan.after.collective_seconds
        )
        assert {*row["arguments"].values()} <= {spec_text(s) for s in plan.arguments.values()}
    assert data["verdict"]["baselines"] == []  # the other plan does not fit
    assert embedded(html_text(first))["plans"] == []


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_switch_stays_in_the_address(
    pair: tuple[Plan, Plan], chrome: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "r.html"
    third = MethodResult.of("<b>third</b>", pair[1])
    path.write_text(html_text(pair[0], [*rows(pair), third]))
    page = opened(chrome, path)
    shown = page.locator("#beside .verdict strong")
    assert shown.inner_text() == "earlier"
    page.locator("#plans button").nth(1).press("Enter")
    assert shown.inner_text() == "<b>third</b>"
    page.wait_for_timeout(300)
    assert "beside=" in page.evaluate("location.hash")
    page.evaluate("location.reload()")
    page.wait_for_selector("html[data-ready]", state="attached")
    assert shown.inner_text() == "<b>third</b>"
    page.locator(".as-python summary").press("Enter")
    page.locator("[data-copy=python]").press("Enter")
    page.wait_for_timeout(50)
    assert page.locator("[data-copy=python]").inner_text() in ("Copied", "Selected")
    assert page.complaints == []
    page.close()


def test_the_python_has_the_shardings_of_the_plan() -> None:
    plan = tiny()
    scope: dict[str, Any] = {}
    exec(python_text(plan), scope)
    sharded, mesh = scope["sharded"], scope["mesh"]
    assert dict(mesh.shape) == dict(plan.mesh.axes)
    params = {"layers": [{"wq": 0}, {"wq": 0}], "embedding": 0}
    tree = sharded("params", params)
    for path, sharding in (
        ("params['layers'][1]['wq']", tree["layers"][1]["wq"]),
        ("params['embedding']", tree["embedding"]),
    ):
        assert spec_text(plan.arguments[path]) == repr(sharding.spec).replace(
            "PartitionSpec", "P"
        ).replace(",)", ")")


def test_colors_are_named_by_arguments_and_by_the_user() -> None:
    plan = planned("t2b", layers=2)
    named = {row["name"]: row for row in embedded(html_text(plan))["colors"] if row["name"]}
    assert {"batch", "sequence", "model", "hidden", "vocabulary", "heads"} <= {*named}
    assert "tokens:0" in named["batch"]["arguments"]
    assert named["hidden"]["sizes"] == [16384]
    mine = embedded(html_text(plan, names={"tokens:0": "rows", "params*'gate']:1": "width"}))
    assert {"rows", "width"} <= {row["name"] for row in mine["colors"]}
    assert "batch" not in {row["name"] for row in mine["colors"]}
    with pytest.raises(PlanError, match=r"token:0=rows: no dimension of an argument matches"):
        html_text(plan, names={"token:0": "rows"})
    assert parse_names(["x:*=a"]) == {"x:*": "a"}
    with pytest.raises(PlanError, match=r"--name tokens=batch: write DIMENSION=NAME"):
        parse_names(["tokens=batch"])


def test_roles_follow_from_names_and_uses() -> None:
    def step(theta: Any, state: Any, x: Any) -> Any:
        def loss(theta: Any) -> Any:
            return (jnp.tanh(x @ theta) ** 2).sum()

        gradient = jax.grad(loss)(theta)
        state = 0.9 * state + gradient
        return theta - state, state

    plan = toast.plan(
        step, f32(64, 32), f32(64, 32), f32(128, 64), mesh="data=2", hardware="tpu-v5e",
        donate=(0, 1), **QUICK,
    )  # fmt: skip
    assert argument_roles(plan.analysis.program) == ["weights", "optimizer state", "inputs"]
    verdict = verdict_of(plan)
    assert (verdict.unit, verdict.grade, verdict.measure) == ("rows", "good", "MFU")
    assert verdict.rate == pytest.approx(128 / plan.after.step_seconds)
    # Forward, and the gradient of theta; that of x is not computed.
    flops = 2 * (2 * 128 * 64 * 32)
    peak = plan.hardware.peak("f32") / plan.hardware.matmul_efficiency
    assert verdict.utilization == pytest.approx(flops / peak / 2 / plan.after.step_seconds)
    assert str(verdict).startswith(f"{toast.units.time_text(plan.after.step_seconds)} per step, ")


def test_plans_are_compared_in_words() -> None:
    assert baseline_text("manual", 1.314) == "1.31x faster than manual"
    assert baseline_text("alpa", 0.5) == "2.00x slower than alpa"
    assert baseline_text("shardy", 1.001) == "as fast as shardy"
    plan = planned("mlp")
    rows = [MethodResult.of("toast", plan), MethodResult("alpa", error="no plan")]
    rows.append(
        dataclasses.replace(
            rows[0], method="manual", step_seconds=2 * rows[0].step_seconds, plan=None
        )
    )
    assert verdict_of(plan, rows).baselines == (("manual", pytest.approx(2.0)),)
    assert "2.00x faster than manual" in str(verdict_of(plan, rows))


def test_a_page_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("mlp")
    day = datetime.date(2026, 1, 2)
    text = html_text(plan, origin=PageOrigin("toast plan '<mlp>'", day))
    assert embedded(text)["origin"]["date"] == "2026-01-02"
    assert 'datetime="2026-01-02"' in text
    assert "toast plan &#39;&lt;mlp&gt;&#39;" in text
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert embedded(html_text(plan))["origin"]["date"] == "1970-01-02"


def test_earlier_plans_on_the_command_line(tmp_path: pathlib.Path) -> None:
    earlier, page, trace = tmp_path / "earlier.json", tmp_path / "r.html", tmp_path / "t.json"
    planned("mlp").to_json(earlier)
    result = run(
        "report", "mlp", "--mesh", "data=2", "-o", page, "--trace", trace, "--name", "x:0=rows",
        "--beside", earlier,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = embedded(page.read_text())
    assert data["origin"]["command"] == "toast plan mlp --mesh data=2 --hardware tpu-v5e"
    assert [plan["name"] for plan in data["plans"]] == ["toast", "earlier"]
    assert "rows" in {row["name"] for row in data["colors"]}
    assert trace.read_text().startswith('{"traceEvents"')


def test_earlier_plans_of_other_programs(tmp_path: pathlib.Path) -> None:
    """A plan without a common argument is refused; what else differs is a note of its row."""
    own, other, page = tmp_path / "own.json", tmp_path / "other.json", tmp_path / "r.html"
    planned("mlp").to_json(own)
    tiny().to_json(other)
    for target in (("mlp", "--mesh", "data=2"), (own, "mlp")):
        result = run("report", *target, "-o", page, "--beside", other)
        assert result.exit_code == 2
        assert "other.json is a plan of " in result.stderr
        assert " and does not match mlp: it has no argument of the plan" in result.stderr
        assert not page.exists()
    result = run("report", own, "mlp", "-o", page, "--methods", "manual")
    assert result.exit_code == 2
    assert "use toast report TARGET --methods, or --beside another plan" in result.stderr
    written = json.loads(own.read_text())
    own.write_text(json.dumps({**written, "program_hash": "0" * 64}))
    result = run("report", "mlp", "--mesh", "data=2", "-o", page, "--beside", own)
    assert result.exit_code == 0, result.output
    said = "the plan is for another program (hash 00000000): mlp"
    assert f"note: own.json: {said}" in result.stderr
    assert f'<td class="remark">{said}' in page.read_text()
