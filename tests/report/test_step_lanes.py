"""The timeline of a report: lanes and memory add up, and keys, mouse and address move in it."""

from __future__ import annotations

import itertools
import math
import pathlib
from typing import Any

import numpy as np
import pytest

import toast
from tests.helpers import f32
from tests.report.browser import missing, opened
from tests.report.test_html import planned
from tests.tiny_plan import tiny
from toast.plan import Plan
from toast.report.argument_roles import argument_roles
from toast.report.html import gather
from toast.report.memory_groups import GROUPS, memory_groups


def test_lanes_are_the_breakdown() -> None:
    plan = tiny()
    data = gather(plan)
    steps = data["timeline"]
    unit = steps["seconds"] / steps["parts"]
    of_lane = {lane["name"]: lane for lane in steps["lanes"]}
    for name, seconds in (
        ("matrix products", plan.breakdown.product_seconds),
        ("memory traffic", plan.breakdown.memory_seconds),
    ):
        lane = of_lane.pop(name)
        assert lane["seconds"] == pytest.approx(seconds.sum())
        assert np.cumsum(lane["op"]).tolist() == np.flatnonzero(seconds).tolist()
        assert sum(lane["length"]) * unit == pytest.approx(seconds.sum(), rel=0.01)
    moves = data["listing"]["moves"]
    for name, lane in of_lane.items():
        assert lane["kind"] == "moved"
        axes = [data["listing"]["move_axes"][moves[m][3]] for m in lane["move"]]
        assert {" x ".join(each) for each in axes} == {name}
        assert [moves[m][0] for m in lane["move"]] == np.cumsum(lane["op"]).tolist()
    assert sum(len(lane["move"]) for lane in of_lane.values()) == len(moves)
    assert sorted(steps["sections"]) == steps["sections"]
    assert [name for _, name in steps["phases"]] == ["forward", "backward", "adam"]


def test_a_program_without_buffers_has_groups() -> None:
    plan = toast.plan(lambda _: (), f32(64, 64), mesh="d=4", hardware="tpu-v5e")
    assert not len(plan.timeline.op)
    of = memory_groups(plan, plan.timeline)
    assert of.live.sum(axis=0) == pytest.approx(plan.timeline.argument_bytes)


def test_groups_add_up_to_the_memory() -> None:
    plan = tiny()
    line = plan.timeline
    of = memory_groups(plan, line)
    total = of.live.sum(axis=0)
    last = np.flatnonzero(np.diff(line.op, append=line.op[-1] + 1))
    at = np.minimum(line.op[last], len(total) - 1)
    assert total[at] == pytest.approx(line.live_bytes[last], rel=1e-6)
    assert {"weights", "optimizer state", "kept activations"} <= {*of.groups} <= {*GROUPS}
    # Two moments have twice the bytes of their weights, before sharding.
    program, roles = plan.analysis.program, argument_roles(plan.analysis.program)
    whole, sharded = dict.fromkeys(roles, 0.0), dict.fromkeys(roles, 0.0)
    for role, value in zip(roles, program.argument_values, strict=True):
        whole[role] += program.value_bytes[value]
        sharded[role] += program.value_bytes[value] / devices(plan, plan.value_spec(value))
    assert whole["optimizer state"] == pytest.approx(2 * whole["weights"], rel=0.01)
    state, weights = (of.live[of.groups.index(role)][0] for role in ("optimizer state", "weights"))
    assert state / weights == pytest.approx(sharded["optimizer state"] / sharded["weights"])
    memory = gather(plan)["timeline"]["memory"]
    drawn = np.sum(memory["live"], axis=0) * memory["peak_bytes"] / memory["parts"]
    assert drawn.max() == pytest.approx(line.peak_bytes, rel=1e-3)
    alive = sum(b[3] for b in memory["buffers"] if b[4] <= line.peak_op < b[5])
    assert line.argument_bytes + alive <= (line.peak_bytes + line.fast_bytes) * 1.001


def devices(plan: Plan, spec: Any) -> int:
    """The devices that share a value."""
    sizes = dict(plan.mesh.axes)
    return math.prod(sizes[axis] for axes in spec for axis in axes)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_moment_is_told(chrome: Any, report: pathlib.Path) -> None:
    plan: Plan = planned("t2b", layers=2)
    page = opened(chrome, report)
    told = page.locator("#at-text")
    expect_text(told, "in memory")
    page.locator("#lanes").focus()
    texts = [told.inner_text()]
    for key in ("End", "ArrowLeft", "Home"):
        page.keyboard.press(key)
        page.wait_for_timeout(60)
        texts.append(told.inner_text())
        assert page.locator("#at").get_attribute("aria-valuetext") == texts[-1]
    assert all(a != b for a, b in itertools.pairwise(texts))
    assert page.locator("#at-lanes dt").count() == len(plan.schedule.lanes)
    for key, text in (("+", " to "), ("0", "the whole step")):
        page.keyboard.press(key)
        page.wait_for_timeout(60)
        assert text in page.locator("#range").inner_text()
    page.locator("#zoom-in").press("Enter")
    page.locator("#at").fill("250000")
    page.wait_for_timeout(400)
    address = page.evaluate("location.hash")
    assert "range=" in address
    assert "at=250000" in address
    shown = [told.inner_text(), page.locator("#range").inner_text()]
    page.evaluate("location.reload()")
    page.wait_for_selector("html[data-ready]", state="attached")
    page.wait_for_timeout(60)
    assert [told.inner_text(), page.locator("#range").inner_text()] == shown
    assert page.complaints == []
    page.close()


def expect_text(locator: Any, text: str) -> None:
    from playwright.sync_api import expect

    expect(locator).to_contain_text(text)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_mouse_enlarges_a_range(chrome: Any, report: pathlib.Path) -> None:
    page = opened(chrome, report)
    box = page.locator("#lanes canvas").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 60)
    page.mouse.up()
    page.wait_for_timeout(60)
    assert " to " in page.locator("#range").inner_text()
    page.locator("#at-peak").press("Enter")
    page.wait_for_timeout(60)
    groups = page.locator(".groups tbody tr").all_inner_texts()
    assert len(groups) == len(
        memory_groups(planned("t2b", layers=2), planned("t2b", layers=2).timeline).groups
    )
    page.locator("#zoom-all").press("Enter")
    assert page.locator("#zoom-all").is_disabled()
    assert page.complaints == []
    page.close()
