"""Plan files: the schema holds, the same program gives the same plan, changed ones what is left."""

from __future__ import annotations

import copy
import functools
import json
import math
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import analyzed, f32, mlp
from tests.tiny_plan import MESH, machine
from toast.errors import MeshError, PlanError
from toast.evaluation.baselines import automap
from toast.evaluation.baselines.alpa import alpa
from toast.evaluation.baselines.manual import manual
from toast.facts import read as read_facts
from toast.hardware import COLLECTIVES, Mesh, load
from toast.models import ZOO
from toast.plan import VERSION, Plan, is_plan, read, schema
from toast.plan.files.format import schema_text
from toast.resources import directory

TINY = Mesh.parse(MESH)


def written(plan: Plan) -> Any:
    """The plan's data as a file has it, by the schema."""
    data = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    jsonschema.Draft202012Validator(schema()).validate(data)
    return data


def planned(name: str, mesh: str = "data=4,model=4", **options: Any) -> Plan:
    sizes = options.pop("sizes", {})
    return toast.plan(analyzed(name, **sizes), mesh=mesh, hardware="tpu-v5e", **options)


_MAKERS: dict[str, Callable[[], Plan]] = {
    "tiny": lambda: toast.plan(analyzed("t2b-tiny"), mesh=MESH, hardware=machine()),
    "constraints": lambda: toast.plan(
        analyzed("t2b-tiny"), mesh=MESH, hardware=machine(), resolution="independent",
        overlap="none",
        constraints=toast.Constraints(
            pin={"params['layers'][*]['wq']": P(None, "model"),
                 "params['embedding']": P(P.UNCONSTRAINED, "model")},
            forbid={"*final_norm*": ["data", "model"]}, fix={"tokens:0": "data"},
        ),
    ),
    "order": lambda: planned("mlp", "data=4,model=2@model,data"),
    "meshes": lambda: toast.plan(analyzed("mlp"), devices=4, hardware="h100"),
    "gns": lambda: planned("gns", sizes={"layers": 2}),
    "refined": lambda: toast.plan(
        analyzed("moe-scan", layers=2, experts=32), mesh="x=32", hardware="tpu-v3"
    ),
    "itx": lambda: planned("itx", sizes={"layers": 2}),
    "automap": lambda: automap(
        analyzed("t2b-tiny"), TINY, machine(), trajectories=8
    ),
    "alpa": lambda: alpa(analyzed("mlp"), Mesh.parse("a=2,b=2"), load("tpu-v5e")),
    "manual": lambda: manual(
        analyzed("moe", layers=2), Mesh.parse("data=4,model=4"), load("tpu-v5e"),
        ZOO["moe"].strategies,
    ),
    "facts": lambda: toast.plan(
        toast.analyze(read_facts(directory("facts") / "attention.lp")), mesh="a=2",
        hardware="tpu-v5e",
    ),
}  # fmt: skip
#: Each plan is made once in a process: AutoMap takes ten seconds for one.
PLANS = {name: functools.cache(make) for name, make in _MAKERS.items()}


@pytest.mark.parametrize("name", PLANS)
def test_on_the_same_program_it_is_the_same_plan(name: str) -> None:
    """Exactly: every sharding, every price, every step."""
    plan = PLANS[name]()
    data = written(plan)
    applied = toast.apply_plan(data, plan.analysis, hardware=plan.hardware)
    assert applied.plan.shardings == plan.shardings
    assert applied.plan.after == plan.after
    assert applied.plan.cost == plan.cost
    assert applied.plan.steps == plan.steps or plan.method != "toast"
    assert applied.same_program
    assert applied.ops_matched == applied.ops
    assert applied.notes == applied.gone == applied.new == applied.changed == ()
    assert applied.actions_gone == ()
    assert toast.diff(plan, applied.plan).same
    again = written(applied.plan)
    assert {**again, "seconds": 0} == {**data, "seconds": 0, "meshes": [], "note": plan.note}


def test_the_hash_is_of_content() -> None:
    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    def moved(x: jax.Array) -> jax.Array:

        return x * 2

    def tripled(x: jax.Array) -> jax.Array:
        return x + 2

    digests = [toast.analyze(f, f32(4)).program.digest for f in (doubled, moved, tripled)]
    assert digests[0] == digests[1] != digests[2]
    assert toast.analyze(doubled, f32(8)).program.digest != digests[0]


def test_more_layers_are_sharded_as_those_there_were() -> None:
    plan = planned("t2b", sizes={"layers": 1})
    applied = toast.apply_plan(written(plan), analyzed("t2b", layers=2))
    assert not applied.same_program
    assert applied.notes[0] == (
        f"the plan is for another program (hash {plan.analysis.program.digest[:8]}): t2b "
        f"(hash {applied.plan.analysis.program.digest[:8]}) has other ops, types or arguments"
    )
    assert applied.gone == applied.changed == applied.new == ()
    for path, spec in applied.plan.arguments.items():
        assert spec == plan.arguments[path.replace("[1]", "[0]")], path
    assert applied.plan.after.step_seconds < 2.5 * plan.after.step_seconds
    found = planned("t2b", sizes={"layers": 2})
    assert applied.plan.after.step_seconds < 1.2 * found.after.step_seconds


def test_what_no_longer_matches_is_said() -> None:
    plan = toast.plan(mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512),
                      mesh="data=4,model=2", hardware="tpu-v5e")  # fmt: skip
    assert plan.arguments["x"] == (("data", "model"), ())

    def changed(x: jax.Array, w1: jax.Array, w3: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w1) @ w3

    applied = toast.apply_plan(plan, changed, f32(4100, 512), f32(512, 2048), f32(2048, 512))
    assert applied.gone == ("w2",)
    assert [path for path, _ in applied.new] == ["w3"]
    (change,) = applied.changed
    assert (change.argument, change.saved) == ("x", (("data", "model"), ()))
    assert change.applied == (("data",), ())
    assert change.why == "8 devices (data, model) do not divide dimension 0 of f32[4100,512]"
    assert applied.ops_matched == 0  # all had both axes
    assert applied.plan.verify().equal
    fits = toast.apply_plan(plan, changed, f32(4096, 512), f32(512, 2048), f32(2048, 512))
    assert 0 < fits.ops_matched < fits.ops
    data = applied.to_dict()
    assert json.loads(json.dumps(data))["gone"] == ["w2"]

    def flat(x: jax.Array) -> jax.Array:
        return x * 2

    (change,) = toast.apply_plan(plan, flat, f32(4096)).changed
    assert change.why == "its rank is 1 now, 2 in the plan"


def test_lines_may_move() -> None:
    """Values without arguments' help: those of a baseline's plan, which has no actions."""

    def before(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(x @ w)

    plan = manual(
        toast.analyze(before, f32(4096, 64), f32(64, 64)), Mesh.parse("d=4"), load("tpu-v5e"),
        {"data": [("x", 0, "all")]},
    )  # fmt: skip
    data = written(plan)
    for entry in data["values"]:
        entry["line"] += 7
        entry["file"] = "/elsewhere/model.py"
    applied = toast.apply_plan(data, plan.analysis)
    assert applied.plan.shardings == plan.shardings
    assert applied.ops_matched == applied.ops


def test_another_mesh_and_hardware(plan: Plan) -> None:
    data = written(plan)
    half = toast.apply_plan(data, plan.analysis, mesh="data=2", hardware=plan.hardware)
    assert "the plan is for mesh data=2,model=2" in half.notes
    assert any("mesh data=2 has no axis model" in change.why for change in half.changed)
    other = toast.apply_plan(data, plan.analysis, hardware="h100")
    assert other.notes == ("the plan is for tpu-v5e",)
    assert other.plan.arguments == plan.arguments
    assert other.plan.memory_bytes == load("h100").memory_limit_bytes
    assert toast.apply_plan(data, plan.analysis, hardware="tpu-v5e").notes == (
        "the plan is for other figures of tpu-v5e",
    )


def test_constraints_that_no_longer_hold_are_dropped() -> None:
    plan = toast.plan(
        mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512), mesh="d=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"w1": "P(None, 'd')", "w2": "P('d')"}),
    )  # fmt: skip
    applied = toast.apply_plan(
        plan, lambda x, w1: jax.nn.relu(x @ w1), f32(4096, 512), f32(512, 2048)
    )
    assert (
        "no longer holds: pin w2: matches no argument, named value or result; similar: x, w1, result"
        in applied.notes
    )
    assert applied.plan.arguments["w1"] == ((), ("d",))
    assert [*applied.plan.constraints.pin] == ["w1"]


def test_version_1_is_read(plan: Plan, tmp_path: pathlib.Path) -> None:
    data = written(plan)
    old = {
        **{key: data[key] for key in (
            "program", "method", "note", "mesh", "device_order", "hardware", "memory_bytes", "cost",
            "seed", "results", "collectives", "before", "after",
        )},
        "version": 1,
        "arguments": {
            path: {"sharding": e["sharding"], "spec": e["spec"]}
            for path, e in data["arguments"].items()
        },
        "actions": [
            {**{key: a[key] for key in ("dimensions", "axis", "resolution", "reason", "after")},
             "part": [p["numbers"] for p in a["part"]]}
            for a in data["actions"]
        ],
    }  # fmt: skip
    (tmp_path / "old.json").write_text(json.dumps(old))
    applied = toast.apply_plan(tmp_path / "old.json", plan.analysis, hardware=plan.hardware)
    assert applied.notes[0] == (
        "the file does not state the program of the plan (version 1 of plan files)"
    )
    assert applied.plan.arguments == plan.arguments
    assert applied.actions_gone == ()
    assert math.isclose(applied.plan.after.step_seconds, plan.after.step_seconds, rel_tol=0.05)


def test_a_step_that_can_no_longer_act_is_said_and_left_out() -> None:
    def shapes(rows: int) -> list[Any]:
        return [f32(rows, 512), f32(512, 2048), f32(2048, 512)]

    plan = toast.plan(mlp, *shapes(4096), mesh="d=4,m=2", hardware="tpu-v5e")
    assert [(step.dimensions[0], step.axis) for step in plan.steps] == [("x:0", "d"), ("x:0", "m")]
    applied = toast.apply_plan(written(plan), mlp, *shapes(4100))  # 8 devices do not divide it
    assert "step 2, x:0 along m: has no effect on this program" in applied.notes
    assert [(step.dimensions[0], step.axis) for step in applied.plan.steps] == [("x:0", "d")]
    assert applied.plan.arguments["x"] == (("d",), ())
    again = toast.apply_plan(written(plan), mlp, *shapes(4096))
    assert again.notes == ()
    assert len(again.plan.steps) == 2


def test_plans_of_newer_versions_are_refused(plan: Plan) -> None:
    data = {**written(plan), "version": VERSION + 1}
    with pytest.raises(PlanError) as error:
        toast.apply_plan(data, plan.analysis)
    assert str(error.value) == (
        f"t2b-tiny: plan version {VERSION + 1} was written by a newer TOAST; this one reads versions "
        f"up to {VERSION}; update toast-partitioner, or plan again"
    )


def test_nothing_that_matches_is_an_error(plan: Plan) -> None:
    first, second, *more = plan.arguments
    with pytest.raises(PlanError) as error:
        toast.apply_plan(plan, lambda a: a + 1, f32(8), hardware="tpu-v5e")
    assert str(error.value) == (
        "t2b-tiny is a plan of t2b-tiny and does not match <lambda>: it has no argument of the "
        f"plan, such as {first}, {second} and {len(more)} more; use the program of the plan"
    )
    with pytest.raises(
        PlanError, match="mlp: no action or sharded op is the same; use the program"
    ):
        toast.apply_plan({**written(plan), "arguments": {}}, mlp, f32(8, 8), f32(8, 8), f32(8, 8))
    with pytest.raises(PlanError) as error:
        toast.apply_plan(plan, plan.analysis, mesh="x=2,y=2")
    assert str(error.value) == (
        "t2b-tiny: mesh x=2,y=2 lacks the plan's axes data, model; "
        "name its axes as in data=2,model=2"
    )
    with pytest.raises(MeshError):
        toast.apply_plan(plan, plan.analysis, mesh="nonsense")


def test_other_arguments_are_another_program() -> None:
    """Even if ops and actions match: these would be prices of what nobody planned."""
    plan = toast.plan(mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512), mesh="d=4",
                      hardware="tpu-v5e")  # fmt: skip

    def renamed(tokens: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return mlp(tokens, up, down)

    with pytest.raises(PlanError, match="no argument of the plan, such as x, w1 and 1 more; use"):
        toast.apply_plan(plan, renamed, f32(4096, 512), f32(512, 2048), f32(2048, 512))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "invalid JSON at line 1, column 1 (Expecting value)"),
        (
            '{"version": 2,\n "argu',
            "invalid JSON at line 2, column 2 (Unterminated string starting at)",
        ),
        ("[" * 99, "invalid JSON at line 1, column 100 (Expecting value)"),
        ("[]", "expected an object, not a list"),
        ("3", "expected an object, not 3"),
        ("{}", "no key 'version'"),
        ('{"version": "2"}', "version '2' is not a positive whole number"),
        ('{"version": true}', "version True is not a positive whole number"),
        ('{"version": 0}', "version 0 is not a positive whole number"),
    ],
)
def test_what_is_no_plan(text: str, why: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "none.json"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        read(path)
    assert str(error.value) == f"{path} is not a plan: {why}; use a file written by Plan.to_json"
    with pytest.raises(PlanError, match="No such file or directory"):
        read(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("place", "damage", "why"),
    [
        (("mesh", "data"), 0, "in 'mesh', 'data', 0: expected a whole number >= 1"),
        (("mesh",), [], "in 'mesh', a list: expected an object"),
        (("arguments",), [], "in 'arguments', a list: expected an object"),
        (("arguments", "tokens"), 7, "in 'arguments', 'tokens', 7: expected an object"),
        (("arguments", "tokens", "sharding"), "data", "in 'arguments', 'tokens', 'sharding', 'dat"),
        (("actions", 0, "after", "step_seconds"), math.nan,
         "in 'actions', '0', 'after', 'step_seconds', nan: expected a number >= 0.0"),
        (("after", "peak_bytes"), -1, "in 'after', 'peak_bytes', -1: expected a number >= 0.0"),
        (("after", "collectives", 1, "seconds"), math.inf, "in 'after', 'collectives', '1', 'se"),
        (("collectives", 0, "bytes"), None, "in 'collectives', '0', 'bytes', None: expected a number"),
    ],
)  # fmt: skip
def test_damage_names_its_key(
    place: tuple[Any, ...], damage: Any, why: str, plan: Plan, tmp_path: pathlib.Path
) -> None:
    data = written(plan)
    parent = data
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = damage
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError) as error:
        read(path)
    assert str(error.value).startswith(f"{path} is not a plan: {why}")
    assert str(error.value).endswith("; use a file written by Plan.to_json")
    del parent[place[-1]]
    if isinstance(place[-1], str) and place[0] not in ("mesh", "arguments"):
        with pytest.raises(PlanError, match=f"no key '{place[-1]}'"):
            read(data)


def test_plans_are_known_by_what_they_hold(plan: Plan, tmp_path: pathlib.Path) -> None:
    for name, text, known in (
        ("plan.txt", json.dumps(written(plan)), True),
        ("plan.json", json.dumps(written(plan))[:99], True),
        ("none.txt", '{"version": 1}', False),
        ("none.mlir", "module {", False),
        ("none.bin", "{\udc80", False),
    ):
        path = tmp_path / name
        path.write_bytes(text.encode(errors="surrogateescape"))
        assert is_plan(path) is known, name
    assert is_plan("gone.json")
    assert not is_plan("t2b")
    assert not is_plan(tmp_path)


def test_a_plan_without_arguments_gets_a_note(plan: Plan) -> None:
    applied = toast.apply_plan({**written(plan), "arguments": {}}, plan.analysis,
                               hardware=plan.hardware)  # fmt: skip
    assert applied.notes == ("t2b-tiny has no arguments: they get the shardings of the actions",)


def test_texts_of_files_command_no_terminal(plan: Plan, tmp_path: pathlib.Path) -> None:
    data = {**written(plan), "method": "a\x1b[31mb\x9bc\td"}
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert read(tmp_path / "a.json").method == r"a\x1b[31mb\x9bc" + "\td"


def complaint(data: Any, plan: Plan) -> str:
    """What applying it says, if that is an error of the user's."""
    try:
        toast.apply_plan(data, plan.analysis, hardware=plan.hardware)
    except toast.ToastError as error:
        return str(error)
    return ""


#: What reading does without.
OPTIONAL = {
    "origin", "hardware_hash", "lowering", "fits", "reshards", "memory", "bound_seconds", "analysis", "search",
    "meshes", "seconds", "padding", "safety", "error_bars",
}  # fmt: skip


def test_damage_is_an_error_of_one_line() -> None:
    """Whatever of a plan is missing, or of another type: never a traceback."""
    plan = toast.plan(mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512), mesh="d=4",
                      hardware="tpu-v5e")  # fmt: skip
    data = written(plan)
    for key in data:
        for damage in (None, 7, -1.5, "text", [], {"a": 1}, [None], math.nan):
            assert "\n" not in complaint({**data, key: damage}, plan)
        missing = complaint({k: v for k, v in data.items() if k != key}, plan)
        assert ("is not a plan" in missing) is (key not in OPTIONAL), key


def inner(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of everything in JSON data."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from inner(value, (*path, key))


def damaged_at(data: Any, place: tuple[Any, ...], damage: Any) -> Any:
    """A copy of JSON data with something else at one place."""
    damaged = parent = copy.deepcopy(data)
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = damage
    return damaged


def test_damage_inside_is_an_error_of_one_line() -> None:
    """Two hundred places at random."""
    plan = toast.plan(mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512), mesh="d=4,m=2",
                      hardware="tpu-v5e",
                      constraints=toast.Constraints(pin={"w1": "P(None, 'm')"}))  # fmt: skip
    data = written(plan)
    places = [place for place in inner(data) if place[0] not in OPTIONAL]
    rng = random.Random(0)
    for place in rng.choices(places, k=200):
        damaged = damaged_at(data, place, rng.choice(
            [None, 7, -3, 1e300, math.inf, math.nan, "", "d", [], {}, [[]], True, ["d", "d"]]
        ))  # fmt: skip
        said = complaint(damaged, plan)
        assert "\n" not in said, place
        if not said:
            assert toast.diff(data, damaged).to_dict()


def test_the_schema_in_the_docs_is_that_of_the_types() -> None:
    """Else: ``python -m toast.plan.files.schema_file docs/plan.schema.json``."""
    assert (directory("rules").parent / "docs" / "plan.schema.json").read_text() == schema_text()
    assert schema()["$defs"]["TransferEntry"]["properties"]["kind"]["enum"] == sorted(COLLECTIVES)


def test_the_schema_is_strict(plan: Plan) -> None:
    validator = jsonschema.Draft202012Validator(schema())
    jsonschema.Draft202012Validator.check_schema(schema())
    data = written(plan)
    assert not validator.is_valid({**data, "unknown": 1})
    assert not validator.is_valid({**data, "version": 1})
    assert not validator.is_valid({key: value for key, value in data.items() if key != "values"})


def test_what_is_read_is_as_the_schema_says() -> None:
    """Three hundred places at random, of those that something follows from."""
    validator = jsonschema.Draft202012Validator(schema())
    data = written(PLANS["order"]())
    places = [p for p in inner(data) if p[0] not in OPTIONAL and p[-1] not in ("spec", "edges")]
    rng = random.Random(1)
    for place in rng.choices(places, k=300):
        damage = rng.choice([None, 7, -3, 0.5, "", "d d", [], {}, [[]], True, ["d"]])
        damaged = damaged_at(data, place, damage)
        if not validator.is_valid(damaged):
            with pytest.raises(PlanError):
                pytest.fail(f"{place}: {read(damaged)}")
    for key, damage in {
        "overlap": "some", "resolution": "none", "op_classes": "x", "program_hash": "0", "cost": -1,
    }.items():  # fmt: skip
        assert not validator.is_valid({**data, key: damage})
        with pytest.raises(PlanError, match=f"is not a plan: in '{key}', "):
            read({**data, key: damage})
