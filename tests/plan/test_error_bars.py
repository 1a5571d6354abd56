"""Plans with error bars: intervals, odds of fitting, and a safety for the search."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
from typing import Any

import pytest
import rich.console

import toast
from tests.cli.test_cli import run
from tests.helpers import analyzed
from tests.tiny_plan import MESH, machine
from toast import report
from toast.cost.error_bars import SURE
from toast.errors import SearchError
from toast.evaluation.compare import compare
from toast.plan import Plan, Prediction, fit_text, odds_text, read
from toast.report.summaries import misfit
from toast.search import Settings
from toast.units import size_text

QUICK = Settings(rounds=1)


@pytest.fixture(scope="module")
def tight(plan: Plan) -> float:
    """A limit that the plan's prediction just meets."""
    return 1.001 * plan.after.peak_bytes


@pytest.fixture(scope="module")
def safe(tight: float) -> Plan:
    return planned(safety=0.8, limit=2 * tight)


def planned(*, safety: float | None, limit: float, **options: Any) -> Plan:
    tiny = dataclasses.replace(machine(), memory_limit_bytes=limit)
    options = {"mesh": MESH, "settings": QUICK, **options}
    return toast.plan(analyzed("t2b-tiny"), hardware=tiny, safety=safety, **options)


def test_predictions_have_intervals_and_odds(plan: Plan) -> None:
    for prediction in (plan.before, plan.after, *(step.after for step in plan.steps)):
        assert prediction.step_interval is not None
        assert prediction.peak_interval is not None
        assert prediction.fit_probability is not None
        assert 0 < prediction.step_interval.low < prediction.step_interval.high
        low, high = prediction.peak_interval
        assert prediction.argument_bytes <= low < high
    bars, after = plan.error_bars, plan.after
    wide = bars.peak_interval(after.argument_bytes, after.peak_bytes, odds=0.95)
    assert wide.low <= after.peak_interval.low  # type: ignore[union-attr]
    assert plan.safety is None
    assert plan.fits


def test_a_plan_that_does_not_fit_says_what_is_predicted_and_what_it_may_need(plan: Plan) -> None:
    large = dataclasses.replace(plan, memory_bytes=0.9 * plan.after.peak_bytes)
    (text, _) = map(str, misfit(large))
    assert text.startswith(f"Does not fit: the plan needs {size_text(plan.after.peak_bytes)} per ")
    safer = planned(safety=0.95, limit=0.3 * plan.after.peak_bytes)
    (text, _) = map(str, misfit(safer))
    most, predicted = safer.needed_bytes(safer.after), safer.after.peak_bytes
    assert predicted < most
    assert text.startswith(
        f"Does not fit: with odds of 95 %, the plan may need up to {size_text(most)} per device "
        f"(predicted: {size_text(predicted)}), {size_text(most - safer.memory_bytes)} more than "
    )


def test_a_safer_plan_fits_with_these_odds_and_allows_a_smaller_peak(plan: Plan) -> None:
    peaks = []
    for safety in (None, 0.6, 0.9):
        found = planned(safety=safety, limit=1.3 * plan.after.peak_bytes)
        assert found.safety == safety
        assert found.fits == (found.needed_bytes(found.after) <= found.memory_bytes)
        if safety and found.fits:
            assert (found.after.fit_probability or 0.0) >= safety - 1e-9
        peaks.append(found.needed_bytes(found.after) / found.after.peak_bytes)
    assert peaks[0] == 1.0
    assert peaks == sorted(peaks)


def test_no_safety_changes_no_plan(plan: Plan) -> None:
    again = planned(safety=None, limit=plan.memory_bytes)
    certain = planned(safety=1e-6, limit=plan.memory_bytes)  # predictions must fit, and no more
    assert again.cost == certain.cost
    assert again.arguments == certain.arguments


def test_a_plan_that_is_not_safe_enough_is_said_to_be_so(tight: float) -> None:
    found = planned(safety=0.999, limit=tight)
    assert not found.fits
    assert found.after.peak_bytes <= tight
    assert "may not fit: the odds are" in found.note
    assert "99.9 % are asked for" in found.note
    text = run_table(found)
    assert "may not fit (" in text.splitlines()[0]
    assert text.splitlines()[1].startswith("May not fit: the odds are")
    assert "What it takes to fit" in text
    with pytest.raises(SearchError, match=r"no plan on mesh .* fits with odds of 99.9 %"):
        planned(safety=0.999, limit=1e9, memory_bytes=tight)


def test_meshes_have_odds_and_obey_the_safety(plan: Plan) -> None:
    limit = 1.3 * plan.after.peak_bytes
    found = planned(safety=0.9, limit=limit, mesh=None, devices=4)
    rows = [row for row in found.meshes if not row.skipped]
    assert len(rows) > 1
    for row in rows:
        assert row.fit_probability is not None
        assert row.fits == (row.fit_probability >= 0.9 - 1e-9)


def test_files_keep_the_error_bars(safe: Plan, tmp_path: pathlib.Path) -> None:
    safe.to_json(tmp_path / "plan.json")
    saved = read(tmp_path / "plan.json")
    assert (saved.safety, saved.before, saved.after) == (0.8, safe.before, safe.after)
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["error_bars"] == safe.error_bars.basis
    assert data["after"]["peak_interval"] == list(safe.after.peak_interval or ())
    applied = toast.apply_plan(saved, safe.analysis, hardware=safe.hardware)
    assert applied.plan.safety == 0.8
    assert applied.plan.after == safe.after
    other = toast.apply_plan(saved, safe.analysis, hardware=safe.hardware, safety=0.5)
    assert other.plan.safety == 0.5


def test_files_without_error_bars_are_read(safe: Plan) -> None:
    data = json.loads(safe.json_text())
    del data["safety"], data["error_bars"]
    every = [data["before"], data["after"], *(action["after"] for action in data["actions"])]
    for prediction in every:
        del prediction["step_interval"], prediction["peak_interval"], prediction["fit_probability"]
    saved = read(data)
    assert saved.safety is None
    assert saved.after.peak_interval is None
    applied = toast.apply_plan(saved, safe.analysis, hardware=safe.hardware)
    assert applied.plan.safety is None
    assert applied.plan.arguments == safe.arguments
    assert applied.plan.after.peak_interval == safe.after.peak_interval


def test_methods_are_compared_with_odds() -> None:
    tiny = machine()
    rows = compare(analyzed("t2b-tiny"), MESH, tiny, ("toast", "shardy"), safety=0.9)
    for row in rows:
        assert row.plan is not None
        assert row.plan.safety == 0.9
        assert row.fit_probability == row.plan.after.fit_probability
        assert row.fits == ((row.fit_probability or 0.0) >= 0.9 - 1e-9)


@pytest.mark.parametrize("safety", [0, 1, -0.5, 1.5, float("nan"), True, "0.9"])
def test_a_safety_that_is_no_probability_is_refused(safety: Any) -> None:
    with pytest.raises(SearchError, match=r"safety .*: use the odds with which"):
        toast.plan(analyzed("mlp"), mesh="data=4", hardware="tpu-v5e", safety=safety)
    with pytest.raises(SearchError, match=r"safety .*: use the odds with which"):
        compare(analyzed("mlp"), "data=4", "tpu-v5e", ("toast",), safety=safety)


def test_a_wrong_safety_is_one_line_on_the_command_line(tmp_path: pathlib.Path) -> None:
    for command in (
        ("plan", "mlp", "--mesh", "data=4"), ("compare", "mlp", "--mesh", "data=4"),
        ("report", "mlp", "--mesh", "data=4", "-o", tmp_path / "report.html"),
    ):  # fmt: skip
        result = run(*command, "--safety", 1.5)
        assert result.exit_code == 2
        assert "safety 1.5: use the odds with which the plan must fit, between 0 and 1" in " ".join(
            result.output.split()
        )


def test_words_follow_odds_and_the_prediction() -> None:
    assert fit_text(True, SURE) == "fits (95 %)"
    assert fit_text(True, 0.999) == "fits (> 99 %)"
    assert fit_text(True, 0.62) == "may not fit (62 %)"
    assert fit_text(True, 0.02) == "may not fit (2 %)"  # the prediction says that it fits
    assert fit_text(False, 0.97) == "may not fit (97 %)"  # and here, that it does not
    assert fit_text(False, 0.001) == "does not fit (< 1 %)"
    assert (fit_text(True), fit_text(False)) == ("fits", "does not fit")
    assert [*map(odds_text, (0.0, 0.5, 0.999, 1.0))] == ["0 %", "50 %", "> 99 %", "100 %"]


def test_tables_and_reports_show_intervals_and_odds(safe: Plan) -> None:
    after = safe.after
    text = run_table(safe)
    assert "with odds of 80 %" in text
    assert fit_text(safe.fits, after.fit_probability) in text
    page = report.html_text(safe)
    assert fit_text(safe.fits, after.fit_probability).replace(">", "&gt;") in page
    assert "with odds of 80 %" in page
    gpu = toast.plan(analyzed("mlp"), mesh="data=4", hardware="h100", settings=QUICK)
    assert gpu.error_bars.borrowed
    assert "Intervals and odds: " in run_table(gpu)
    assert gpu.error_bars.basis in report.html_text(gpu)


def run_table(plan: Plan) -> str:
    out = io.StringIO()
    rich.console.Console(file=out, width=200).print(report.plan_tables(plan))
    return out.getvalue()


def test_predictions_of_batches_have_no_error_bars(plan: Plan) -> None:
    bare = Prediction.of(plan.model.price(plan.state[None]))
    assert (bare.step_interval, bare.peak_interval, bare.fit_probability) == (None, None, None)
    assert bare.with_error_bars(plan.model, plan.memory_bytes) == plan.after
