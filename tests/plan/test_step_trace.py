"""Traces are valid in Chrome's format, and their tracks add up to the breakdown."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict

import numpy as np
import pytest

import toast
from tests.helpers import analyzed
from tests.tiny_plan import tiny
from toast.cost import step_schedule
from toast.cost.step_schedule import HOST, MEMORY, PRODUCTS
from toast.plan import Plan
from toast.search import Settings


def test_a_trace_is_valid() -> None:
    plan = tiny()
    data = json.loads(json.dumps(plan.trace(), allow_nan=False))
    events = data["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "t2b-tiny, one of 4 devices of tpu-v5e"
    ]
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["tid"] for span in spans} == {*named}
    for span in spans:
        assert span["pid"] == 1
        assert span["dur"] > 0
        assert 0 <= span["ts"] <= span["ts"] + span["dur"] <= plan.after.step_seconds * 1.000001e6
        assert span["args"]["op"].startswith(
            plan.analysis.program.kind(int(span["args"]["op"].partition("#")[2]))
        )
    by_track = defaultdict(list)
    for span in spans:
        by_track[span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for track in by_track.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(track)):
            assert begin >= end - 1e-6  # spans of a track do not overlap
    most = max(e["args"]["live bytes"] for e in events if e["ph"] == "C")
    assert most <= plan.after.peak_bytes * 1.000001


@pytest.mark.parametrize("overlap", ["none", "partial", "full"])
def test_tracks_add_up_to_the_breakdown(overlap: str) -> None:
    plan = toast.plan(
        analyzed("t2b-tiny"), mesh="data=2,model=2", hardware="tpu-v5e", overlap=overlap,
        settings=Settings(budget=0.0), start=tiny(),
    )  # fmt: skip
    _check(plan)


def test_lanes_of_a_plan_with_hidden_collectives() -> None:
    plan = tiny()
    assert plan.after.hidden_seconds > 0
    _check(plan)


def _check(plan: Plan) -> None:
    parts, lanes = plan.breakdown, plan.schedule
    assert lanes.lane_seconds(PRODUCTS) == pytest.approx(plan.after.matmul_seconds)
    assert lanes.lane_seconds(PRODUCTS) == pytest.approx(parts.product_seconds.sum())
    assert lanes.lane_seconds(MEMORY) == pytest.approx(parts.memory_seconds.sum())
    for axes in {c.axes for c in parts.collectives}:
        seconds = sum(c.seconds for c in parts.collectives if c.axes == axes)
        assert lanes.lane_seconds(" x ".join(axes)) == pytest.approx(seconds)
    hidden = sum(c.hidden_seconds for c in parts.collectives)
    assert hidden == pytest.approx(plan.after.hidden_seconds)
    # The critical path is the step.
    assert lanes.op_begin[-1] == pytest.approx(plan.after.step_seconds)
    assert (np.diff(lanes.op_begin) >= 0).all()


def test_transfers_to_the_host_run_beside_the_step() -> None:
    plan = tiny()
    host = np.zeros_like(plan.breakdown.host_seconds)
    host[[3, 5]] = plan.after.step_seconds
    lanes = step_schedule(
        dataclasses.replace(plan.breakdown, host_seconds=host), 2 * plan.after.step_seconds
    )
    assert lanes.lane_seconds(HOST) == pytest.approx(2 * plan.after.step_seconds)
    assert lanes.op_begin[-1] == pytest.approx(plan.after.step_seconds)
    assert lanes.step_seconds == 2 * plan.after.step_seconds
