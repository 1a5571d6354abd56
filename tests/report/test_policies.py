"""The memory of several policies over one another."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import f32
from tests.report.browser import missing, opened
from tests.report.test_html import QUICK, embedded
from toast.plan import Plan
from toast.report import html_text
from toast.report.html import policy_timelines as module
from toast.report.html.policy_timelines import policy_rows
from toast.units import size_text


def loss(weights: Any, x: Any) -> Any:
    for up, down in weights:
        x = toast.checkpoint(lambda x, up, down: x + jnp.sin(x @ up) @ down, name="layer")(
            x, up, down
        )
    return (x**2).sum()


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    shapes = [(f32(64, 256), f32(256, 64))] * 3, f32(2048, 64)
    return {
        remat: toast.plan(
            jax.grad(loss), *shapes, mesh="data=4", hardware="tpu-v5e", remat=remat, **QUICK
        )
        for remat in ("none", "full", "layer: keep=@product")
    }


def test_the_plan_is_drawn_over_the_others(plans: dict[str, Plan]) -> None:
    none, full, plan = plans.values()
    assert policy_rows(plan, ()) == []
    rows = policy_rows(plan, [none, full])
    assert [row["label"] for row in rows] == ["everything kept", "full recomputation", "the plan"]
    for row, drawn in zip(rows, (none, full, plan), strict=True):
        assert max(row["live_bytes"]) == pytest.approx(drawn.after.peak_bytes, abs=1)
        assert row["seconds"] == sorted(row["seconds"])
        assert row["seconds"][-1] <= drawn.after.step_seconds * 1.001
    data = embedded(html_text(plan, policies=[none, full]))
    assert data["memory"]["policies"] == rows
    assert embedded(html_text(plan))["memory"]["policies"] == []


def test_long_lines_keep_their_peaks(
    plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans["full"]
    long = policy_rows(plan, [plan])[-1]
    monkeypatch.setattr(module, "_POINTS", 20)
    short = policy_rows(plan, [plan])[-1]
    assert len(short["seconds"]) <= 22 < len(long["seconds"])
    assert max(short["live_bytes"]) == max(long["live_bytes"])
    assert short["live_bytes"][-1] == long["live_bytes"][-1]
    assert np.all(np.diff(short["seconds"]) >= 0)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_chart_opens(plans: dict[str, Plan], chrome: Any, tmp_path: pathlib.Path) -> None:
    none, full, plan = plans.values()
    path = tmp_path / "report.html"
    toast.report.write_html(plan, path, policies=[none, full])
    page = opened(chrome, path)
    assert page.locator("svg.policies path").count() == 4 + 3  # the area, the lines, the legend
    cells = page.locator(".by-policy tbody tr").all_inner_texts()
    for text, drawn in zip(cells, (plan, full, none), strict=True):
        assert size_text(int(drawn.after.peak_bytes)) in text
    assert page.complaints == []
    page.close()
