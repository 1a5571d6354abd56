"""Searches that begin with an earlier plan: with its very shardings, or with what is left of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import analyzed, f32, mlp
from tests.plan.test_files import PLANS, TINY
from tests.tiny_plan import MESH, machine
from toast.errors import PlanError
from toast.evaluation.baselines import shardy
from toast.hardware import load
from toast.plan import Plan, check_program, read, saved_start, start_actions
from toast.plan.reapply import by_class
from toast.space import Space

NOTHING = toast.Settings(budget=0.0)
#: How close the costs of the same shardings are where ops have other classes: the accesses of a class
#: are the mean of those of its members.
SAME = 1e-4
REST = "actions do not reach all of its shardings; refinements replace the rest"


def from_start(start: Plan, given: object = None, **options: object) -> Plan:
    """The plan that a search without time finds from ``start``, given as it is or otherwise."""
    options = {
        "mesh": start.mesh, "hardware": start.hardware, "overlap": start.model.overlap,
        "resolution": start.resolution, "constraints": start.constraints, "settings": NOTHING,
        "start": start if given is None else given, **options,
    }  # fmt: skip
    return toast.plan(start.analysis, **options)  # type: ignore[arg-type]


def same_shardings(first: Plan, second: Plan) -> bool:
    _, matters, _ = by_class(first.op_state, first.model.space)
    return bool((first.op_state == second.op_state)[matters].all())


@pytest.mark.parametrize("name", PLANS)
def test_the_search_begins_with_the_very_shardings_of_a_plan(
    name: str, tmp_path: pathlib.Path
) -> None:
    first = PLANS[name]()
    first.to_json(tmp_path / "plan.json")
    for given in (first, tmp_path / "plan.json"):
        again = from_start(first, given)
        assert same_shardings(first, again)
        assert again.arguments == first.arguments
        assert again.cost == pytest.approx(first.cost, rel=SAME)
        if first.method == "toast":
            assert again.cost == first.cost
            assert again.steps == first.steps
            assert again.note == "stopped at its budget"


def test_files_of_before_do_not_say_colors() -> None:
    """Labels fold layers, so that they do not tell all actions apart: refinements do the rest."""
    first = PLANS["gns"]()
    data = json.loads(json.dumps(first.to_dict()))
    for action in data["actions"]:
        del action["color"]
    given = dataclasses.replace(read(data), name="old.json")
    at = saved_start(given, Space(first.analysis, first.mesh), "compatible")
    found = start_actions(at)
    state = at.space.initial
    for action in found.actions:
        state = at.space.apply(state, action)
    assert (state == first.state)[at.matters].all()
    assert set(found.notes) <= {f"start old.json: {REST}"}


@pytest.mark.parametrize("name", ["alpa", "manual", "automap"])
def test_what_a_baseline_did_without_actions_are_actions_of_the_plan(
    name: str, tmp_path: pathlib.Path
) -> None:
    first = PLANS[name]()
    assert not first.actions
    again = from_start(first)
    space, state = again.model.space, again.model.space.initial
    for action in again.actions:
        state = space.apply(state, action)
    assert (state == again.state).all()
    assert again.steps[-1].after == again.after
    assert len(again.steps) == len(again.actions) > 0
    assert (f"start {first.analysis.program.name}: {REST}" in again.note) == any(
        step.part for step in again.steps
    )
    # Such a plan is one like others.
    again.to_json(tmp_path / "again.json")
    third = from_start(first, tmp_path / "again.json")
    assert same_shardings(again, third)
    assert third.cost == again.cost
    applied = toast.apply_plan(again, again.analysis)
    assert same_shardings(again, applied.plan)


def test_only_what_the_plan_shards_apart_becomes_further_classes() -> None:
    first = PLANS["automap"]()
    plain = len(Space(first.analysis, first.mesh).classes.count)
    split = len(from_start(first).model.space.classes.count)
    assert plain <= split < len(first.model.space.classes.count)


def test_a_search_goes_on_from_a_baseline() -> None:
    first = PLANS["automap"]()
    options = {"rounds": 1}
    for processes in (1, 2):
        settings = toast.Settings(restarts=2, processes=processes, **options)
        again = from_start(first, settings=settings)
        assert again.fits >= first.fits
        assert again.cost < first.cost


def test_a_start_worse_than_no_sharding_is_not_kept() -> None:
    """Latency eats what a tiny program could gain; the best so far is the unsharded program."""
    first = shardy(analyzed("t2b-tiny"), TINY, load("tpu-v5e"))
    assert first.cost > 1.0
    again = from_start(first)
    assert again.cost == 1.0
    assert not again.steps


def test_another_resolution_does_not_change_the_shardings() -> None:
    first = PLANS["tiny"]()
    again = from_start(first, resolution="independent")
    assert same_shardings(first, again)
    assert again.cost == pytest.approx(first.cost, rel=SAME)


@pytest.mark.parametrize("spec", [P(None, "data"), P("data"), P()])
@pytest.mark.parametrize("pin", [P(None, "data"), P("data"), P()])
def test_a_pin_on_the_axis_of_the_start_is_told(spec: P, pin: P) -> None:
    def planned(said: P, **more: Any) -> toast.Plan:
        return toast.plan(
            analyzed("mlp"), mesh="data=2", hardware="tpu-v5e",
            constraints=toast.Constraints(pin={"x": said}), settings=toast.Settings(budget=0), **more,
        )  # fmt: skip

    again = planned(pin, start=planned(spec))
    assert ("constraints replace its shardings of x" in again.note) == (spec != pin)


def test_constraints_hold_in_place_of_the_start() -> None:
    first = PLANS["tiny"]()
    name = next(path for path, spec in first.arguments.items() if any(spec))
    again = from_start(first, constraints=toast.Constraints(pin={name: P()}))
    assert not any(again.arguments[name])
    assert f"start t2b-tiny: constraints replace its shardings of {name}" in again.note
    others = [path for path in first.arguments if path != name]
    assert all(again.arguments[path] == first.arguments[path] for path in others)
    forbidden = from_start(first, constraints=toast.Constraints(forbid={"*": "data"}))
    assert not any("data" in axes for spec in forbidden.arguments.values() for axes in spec)
    assert "constraints replace its shardings of " in forbidden.note
    fixed = from_start(first, constraints=toast.Constraints(fix={"tokens:1": "data"}))
    assert "data" in fixed.arguments["tokens"][1]
    assert fixed.steps[0].reason.startswith("fixed: ")


def test_what_was_fixed_and_still_is_stands_once() -> None:
    first = PLANS["constraints"]()
    again = from_start(first)
    assert [step.reason for step in again.steps] == [step.reason for step in first.steps]
    assert sum(step.reason.startswith("fixed: ") for step in again.steps) == 1
    free = from_start(first, constraints=None)
    assert same_shardings(first, free)
    assert not any(step.reason.startswith(("fixed: ", "pinned: ")) for step in free.steps)


def other_layers(x: object, w1: object, w2: object) -> object:
    return mlp(x, w1, w2) * 2.0  # type: ignore[arg-type]


def test_of_a_changed_program_the_start_says_what_it_uses() -> None:
    first = toast.plan(mlp, f32(256, 32), f32(32, 64), f32(64, 16), mesh=MESH, hardware=machine())
    changed = toast.analyze(other_layers, f32(256, 32), f32(32, 64), f32(64, 16))
    options = {"mesh": MESH, "hardware": machine(), "settings": NOTHING}
    again = toast.plan(changed, start=first, **options)  # type: ignore[arg-type]
    count = len(first.steps)
    assert again.note.splitlines()[-1] == (
        f"start mlp: plan for mlp; all of its {count} actions match"
    )
    foreign = tuple(dataclasses.replace(step, dimensions=("y:0",)) for step in first.steps)
    partly = dataclasses.replace(first, steps=first.steps + foreign)
    again = toast.plan(changed, start=partly, **options)  # type: ignore[arg-type]
    assert again.note.splitlines()[-1].startswith(
        f"start mlp: plan for mlp; {count} of {2 * count} actions match nothing: y:0 on "
    )
    none = dataclasses.replace(first, steps=foreign)
    with pytest.raises(
        PlanError, match=r"^start mlp: plan for mlp; .* y:0 on .*; start from another plan$"
    ):
        toast.plan(changed, start=none, **options)  # type: ignore[arg-type]


def test_of_a_changed_program_a_baselines_shardings_are_used_by_op() -> None:
    first = toast.plan(mlp, f32(256, 32), f32(32, 64), f32(64, 16), mesh=MESH, hardware=machine())
    bare = dataclasses.replace(first, actions=(), steps=(), method="manual")
    changed = toast.analyze(other_layers, f32(256, 32), f32(32, 64), f32(64, 16))
    again = toast.plan(changed, start=bare, mesh=MESH, hardware=machine(), settings=NOTHING)
    assert again.arguments == first.arguments
    assert "start mlp: plan for mlp; values that match are sharded as in the plan" in again.note


def test_another_mesh_is_named() -> None:
    first = PLANS["tiny"]()
    again = from_start(first, mesh="data=4,model=2", settings=toast.Settings(rounds=1))
    assert f"start t2b-tiny: plan for mesh {MESH}; " in again.note
    with pytest.raises(PlanError, match=r"^t2b-tiny: mesh x=4 lacks the plan's axes data, "):
        from_start(first, mesh="x=4")
    swapped = from_start(first, mesh="model=2,data=2")
    assert (swapped.op_state[:, ::-1] == first.op_state).all()
    assert swapped.note == "stopped at its budget"


def test_a_plan_of_another_program_is_no_start() -> None:
    first = PLANS["tiny"]()
    message = (
        r"^start t2b-tiny: this is a plan of t2b-tiny; gns has only \d+ of its \d+ arguments; "
        r"start from another plan$"
    )
    options = {"hardware": machine(), "start": first}
    with pytest.raises(PlanError, match=message):
        toast.plan(analyzed("gns", layers=1), mesh=MESH, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message):
        toast.plan(analyzed("gns", layers=1), devices=4, **options)  # type: ignore[arg-type]
    # The same function with other layers, or by another name, is no other program.
    saved = read(first)
    check_program(dataclasses.replace(saved, program="gns"), analyzed("t2b-tiny").program)
    check_program(saved, analyzed("t2b", layers=1).program)


def test_shardings_that_sizes_do_not_divide_by_are_said(tmp_path: pathlib.Path) -> None:
    analysis = toast.analyze(mlp, f32(256, 32), f32(32, 6), f32(6, 16))
    first = toast.plan(analysis, mesh="data=4", hardware=machine(), settings=NOTHING)
    data = json.loads(json.dumps(first.to_dict()))
    data["arguments"]["w1"]["sharding"] = [[], ["data"]]
    (tmp_path / "edited.json").write_text(json.dumps(data))
    again = toast.plan(
        analysis, mesh="data=4", hardware=machine(), settings=NOTHING,
        start=tmp_path / "edited.json",
    )  # fmt: skip
    assert again.arguments["w1"] == ((), ())
    assert "dimensions that an axis does not divide are not sharded" in again.note


def test_every_mesh_of_so_many_devices_takes_what_it_can() -> None:
    first = toast.plan(analyzed("mlp"), mesh="a=2,b=2", hardware="h100")
    found = toast.plan(analyzed("mlp"), devices=4, hardware="h100", start=first, settings=NOTHING)
    assert np.isfinite(found.cost)
    assert found.cost <= first.cost
