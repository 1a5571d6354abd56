"""The search for the best mesh of a number of devices."""

from __future__ import annotations

import dataclasses
import json
import time

import jax
import pytest

import toast
from tests.helpers import analyzed, f32
from toast.errors import MeshError, PinError, SearchError
from toast.hardware import Hardware, Mesh, load, meshes_of
from toast.search import Settings
from toast.space import Constraints

QUICK = Settings(rounds=2)


def sizes(devices: int, hardware: str) -> list[tuple[int, ...]]:
    return [mesh.sizes for mesh in meshes_of(devices, load(hardware))]


def small(name: str, devices: int) -> Hardware:
    """Hardware on which a small program is sharded as a large one would be."""
    return toast.api.small_scale(analyzed(name), Mesh((("d", devices),)), load("tpu-v5e"))


def test_meshes_are_factorisations_in_the_orders_that_matter() -> None:
    # A slice of 4x2x2 chips has a side for each axis; a minor axis of 4 takes the square of 2x2.
    assert sizes(16, "tpu-v4") == [(16,), (8, 2), (4, 4), (4, 2, 2), (2, 2, 4)]
    # On 4x4 chips the minor axis has neighbours, an axis of 8 takes a side and half of the other.
    assert sizes(16, "tpu-v5e") == [(16,), (8, 2), (2, 8), (4, 4), (4, 2, 2)]
    # One node of a switch looks alike from everywhere; of two, the minor axes are inside.
    assert sizes(8, "h100") == [(8,), (4, 2), (2, 2, 2)]
    assert (2, 8) in sizes(16, "h100")
    assert sizes(12, "tpu-v4") == [(12,), (6, 2), (4, 3), (3, 2, 2)]
    assert sizes(7, "tpu-v4") == [(7,)]
    assert [m.names for m in meshes_of(8, load("h100"))] == [("a",), ("a", "b"), ("a", "b", "c")]


def test_a_batch_that_divides_by_four_leaves_the_rest_to_another_axis() -> None:
    """8 devices: 4 take the batch, 2 the hidden dimension; no single axis of 8 fits anywhere."""

    def mlp(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w1) @ w2

    shapes = f32(4 * 8193, 4097), f32(4097, 2 * 8193), f32(2 * 8193, 4097)
    plan = toast.plan(mlp, *shapes, devices=8, hardware="tpu-v5e", settings=QUICK)
    assert plan.mesh == Mesh.parse("a=4,b=2")
    assert plan.arguments["x"] == (("a",), ())
    assert plan.after.matmul_seconds == pytest.approx(plan.before.matmul_seconds / 8, rel=0.05)
    tried = {str(row.mesh): row for row in plan.meshes}
    assert list(tried) == ["a=8", "a=4,b=2", "a=2,b=2,c=2"]
    assert "mesh axis a=8 divides no dimension" in tried["a=8"].skipped
    assert tried["a=4,b=2"].full
    assert plan.cost <= tried["a=4,b=2"].cost  # the last stage may still improve it


def test_it_is_the_best_of_all_meshes() -> None:
    analysis, machine = analyzed("t2b-tiny"), small("t2b-tiny", 16)
    made = toast.plan(analysis, devices=16, hardware=machine, settings=QUICK)
    alone = {
        row.mesh: toast.plan(analysis, mesh=row.mesh, hardware=machine, settings=QUICK)
        for row in made.meshes
        if not row.skipped
    }
    best = min(alone.values(), key=lambda plan: (not plan.fits, plan.cost))
    assert made.mesh == best.mesh
    assert made.shardings == best.shardings
    assert (made.cost, made.after) == (best.cost, best.after)
    assert sum(row.full for row in made.meshes) == 3
    for row in made.meshes:
        if row.full:
            assert row.cost == alone[row.mesh].cost
            assert row.peak_bytes == alone[row.mesh].after.peak_bytes
    assert len({row.cost for row in made.meshes}) > 1


def test_processes_change_nothing() -> None:
    analysis, machine = analyzed("t2b-tiny"), small("t2b-tiny", 8)
    one, two = (
        toast.plan(
            analysis, devices=8, hardware=machine,
            settings=dataclasses.replace(QUICK, restarts=2, processes=number),
        )
        for number in (1, 2)
    )  # fmt: skip
    assert one.meshes == two.meshes
    assert (one.mesh, one.shardings, one.states) == (two.mesh, two.shardings, two.states)


def test_the_budget_is_for_all_meshes() -> None:
    begin = time.perf_counter()
    plan = toast.plan(
        analyzed("t2b-tiny"), devices=16, hardware=small("t2b-tiny", 16),
        settings=Settings(rounds=10_000, patience=10_000, budget=3.0),
    )  # fmt: skip
    assert time.perf_counter() - begin < 20  # with much to spare on a busy machine
    assert plan.steps
    assert not any(row.full for row in plan.meshes)
    at_once = toast.plan(
        analyzed("t2b-tiny"), devices=16, hardware="tpu-v5e", settings=Settings(budget=0.0)
    )
    assert at_once.meshes[1].skipped == "the budget ran out"


def test_the_table_is_in_report_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    from toast.report import plan_tables

    plan = toast.plan(analyzed("t2b-tiny"), devices=4, hardware="h100", settings=QUICK)
    rows = json.loads(plan.json_text())["meshes"]
    assert [row["mesh"] for row in rows] == [{"a": 4}, {"a": 2, "b": 2}]
    assert all(row["full"] and row["fits"] and not row["skipped"] for row in rows)
    import rich.console

    rich.console.Console(width=160).print(plan_tables(plan))
    assert "Meshes of 4 devices" in capsys.readouterr().out


def test_what_cannot_be_is_said() -> None:
    analysis = analyzed("t2b-tiny")
    for devices, message in (
        (7, r"mesh axis a=7 divides no dimension of t2b-tiny"),
        (1, r"1 devices do not form a mesh; use at least 2"),
    ):
        with pytest.raises(MeshError, match=message):
            toast.plan(analysis, devices=devices, hardware="tpu-v5e")
    for keywords in ({}, {"mesh": "d=2", "devices": 2}):
        with pytest.raises(MeshError, match=r"a number of devices given; use either"):
            toast.plan(analysis, hardware="tpu-v5e", **keywords)  # type: ignore[arg-type]
    with pytest.raises(SearchError, match=r"no plan on any mesh of 2 devices fits"):
        toast.plan(analysis, devices=2, hardware="tpu-v5e", memory_bytes=1000.0)
    with pytest.raises(PinError, match=r"pin nothing: matches no argument"):
        toast.plan(
            analysis, devices=2, hardware="tpu-v5e", constraints=Constraints(pin={"nothing": "P()"})
        )


def test_meshes_without_a_pinned_axis_are_skipped() -> None:
    plan = toast.plan(
        analyzed("t2b-tiny"), devices=4, hardware="tpu-v5e", settings=QUICK,
        constraints=Constraints(fix={"tokens:0": "b"}),
    )  # fmt: skip
    assert plan.mesh == Mesh.parse("a=2,b=2")
    assert "no axis b in mesh a=4" in plan.meshes[0].skipped
