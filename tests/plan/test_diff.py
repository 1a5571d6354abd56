"""What two plans do differently."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32, mlp
from toast.errors import PlanError
from toast.plan import Plan


def planned(mesh: str = "d=4,m=2", **options: object) -> Plan:
    return toast.plan(
        mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512), mesh=mesh, hardware="tpu-v5e",
        **options,
    )  # fmt: skip


def test_equal_plans_are_the_same(tmp_path: pathlib.Path) -> None:
    plan = planned()
    plan.to_json(tmp_path / "plan.json")
    again = planned(settings=toast.Settings(seed=0))
    for other in (plan, plan.to_dict(), tmp_path / "plan.json", again):
        found = toast.diff(plan, other)
        assert found.same
        assert not found.to_dict()["numbers"]


def test_everything_that_differs_is_told() -> None:
    one = planned()
    two = planned(constraints=toast.Constraints(pin={"w1": P(None, "m")}, forbid={"w2": "d"}))
    found = toast.diff(one, two)
    assert not found.same
    settings = {c.what: (c.first, c.second) for c in found.settings}
    assert settings == {"pin w1": ("", "P(None, 'm')"), "forbid w2": ("", "d")}
    arguments = {c.what: (c.first, c.second) for c in found.arguments}
    assert arguments["w1"] == ("P()", "P(None, 'm')")
    numbers = {n.what: (n.first, n.second) for n in found.numbers}
    assert numbers["step time"] == (one.after.step_seconds, two.after.step_seconds)
    assert numbers["peak memory"] == (one.after.peak_bytes, two.after.peak_bytes)
    assert "step time unsharded" not in numbers
    assert {a.axis for a in found.actions if a.second} >= {""}  # the pin
    for change in found.collectives:
        count = [
            sum(t.count for t in plan.transfers if (t.kind, t.axes) == (change.kind, change.axes))
            for plan in (one, two)
        ]
        assert tuple(count) == change.count
    assert any("dot_general at helpers.py" in change.what for change in found.values)
    assert json.loads(json.dumps(found.to_dict()))["same"] is False


def test_the_other_way_round() -> None:
    one, two = planned(), planned("d=4")
    there, back = toast.diff(one, two), toast.diff(two, one)
    swapped = tuple(dataclasses.replace(c, first=c.second, second=c.first) for c in back.settings)
    assert there.settings == swapped
    assert {c.what for c in there.arguments} == {c.what for c in back.arguments}
    assert {c.count for c in there.collectives} == {c.count[::-1] for c in back.collectives}


def test_programs_that_differ() -> None:
    one = planned()
    other = toast.plan(mlp, f32(8192, 512), f32(512, 2048), f32(2048, 512), mesh="d=4,m=2",
                       hardware="tpu-v5e")  # fmt: skip
    found = toast.diff(one, other)
    assert "program's hash" in {c.what for c in found.settings}
    assert ("x, type", "f32[4096,512]", "f32[8192,512]") in {
        (c.what, c.first, c.second) for c in found.arguments
    }
    assert any(n.what == "step time unsharded" for n in found.numbers)


def test_what_is_no_plan(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        PlanError, match=r"gone.json: cannot read: No such file or directory; check"
    ):
        toast.diff(tmp_path / "gone.json", planned())
    with pytest.raises(PlanError, match=r"plan version 9 was written by a newer TOAST"):
        toast.diff(planned(), {"version": 9, "program": "f"})
