"""Why a plan is as it is, and not otherwise."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import analyzed, f32, mlp, printed
from tests.tiny_plan import MESH, machine
from toast import report
from toast.errors import PinError, PlanError
from toast.plan import Plan, make_plan
from toast.plan.labels import shown_labels
from toast.search import SearchResult
from toast.space import Action


def planned(mesh: str = "d=4,m=2", **options: object) -> Plan:
    return toast.plan(
        mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512), mesh=mesh, hardware="tpu-v5e",
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pinned() -> Plan:
    constraints = toast.Constraints(
        pin={"w2": P("m", None)}, fix={"x:0": "d"}, forbid={"w1": ["d", "m"]}
    )
    return planned(constraints=constraints)


# -- arguments -------------------------------------------------------------------------------


def test_every_argument_has_all_its_axes_explained(plan: Plan) -> None:
    real = [name for name, size in plan.mesh.axes if size > 1]
    for name, spec in plan.arguments.items():
        found = plan.explain_argument(name)
        assert found.spec == spec
        held = {(h.dimension, h.axis) for h in found.held}
        free = {(f.dimension, f.axis) for f in found.free}
        assert held == {(d, axis) for d, axes in enumerate(spec) for axis in axes}
        assert not held & free
        assert held | free == {(d, axis) for d in range(len(spec)) for axis in real}
        assert found.device_bytes * 2 ** len(held) == found.bytes
        for axis in found.held:
            step = plan.steps[axis.cause.number - 1]
            assert (axis.cause.axis, axis.cause.reason) == (step.axis, step.reason) == (
                axis.axis, step.reason
            )  # fmt: skip
            assert axis.cause.after == step.after
        json.dumps(found.to_dict())


def test_an_axis_is_traced_to_the_step_that_gave_it(pinned: Plan) -> None:
    kinds = {
        (path, held.dimension, held.axis): held.cause.kind
        for path in pinned.arguments
        for held in pinned.explain_argument(path).held
    }
    assert kinds["w2", 0, "m"] == "pin"
    assert kinds["x", 0, "d"] == "fix"
    (cause,) = (h.cause for h in pinned.explain_argument("w2").held)
    assert str(cause) == "step 1, pin of w2 along m"
    assert cause.before == pinned.before
    plan = planned()
    (first, *_) = plan.explain_argument("x").held
    assert first.cause.kind == "action"
    assert str(first.cause).startswith(f"step {first.cause.number}, action of x:0 along ")


def test_why_an_axis_is_kept_off() -> None:
    why = {(f.dimension, f.axis): (f.kind, f.why) for f in planned().explain_argument("x").free}
    assert why[1, "d"] == ("elsewhere", "it shards dimension 0")
    odd = toast.plan(mlp, f32(4096, 511), f32(511, 2048), f32(2048, 512), mesh="d=4",
                     hardware="tpu-v5e")  # fmt: skip
    (free,) = (f for f in odd.explain_argument("w1").free if f.dimension == 0)
    assert (free.kind, free.why) == ("size", "4 devices do not divide its 511 elements")
    thin = toast.plan(mlp, f32(4096, 1), f32(1, 2048), f32(2048, 512), mesh="d=4",
                      hardware="tpu-v5e")  # fmt: skip
    (free,) = (f for f in thin.explain_argument("w1").free if f.dimension == 0)
    assert (free.kind, free.why) == ("size", "the dimension has size 1")


def test_one_more_action_is_priced() -> None:
    plan = toast.plan(mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512), mesh="d=4",
                      hardware="tpu-v5e")  # fmt: skip
    assert plan.arguments["w1"] == ((), ())
    free = [f for f in plan.explain_argument("w1").free if f.kind == "price"]
    assert free
    for axis in free:
        assert axis.then is not None
        assert axis.why.startswith(
            ("no step shards it; the effect of sharding it: step ", "an action for this axis")
        )


def test_an_axis_that_a_later_step_took_off_again() -> None:
    def model(x: jax.Array, w: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
        y = jnp.tanh(x @ w) @ z
        return y, x @ x.T, y.sum()

    square = f32(512, 512)
    made = toast.plan(model, square, square, square, mesh="data=4,model=2", hardware="tpu-v5e",
                      settings=toast.Settings(budget=0.0))  # fmt: skip
    space = made.model.space
    name = int(made.analysis.names.def_name[made.analysis.names.value_dim[0]])
    model_axis = made.mesh.names.index("model")
    put = next(a for a in space.actions if a.axis == model_axis
               and a.color == int(space.color_group_of(name))
               and space.apply(space.unsharded, a)[space.classes.of_op[0], model_axis] == 0)  # fmt: skip
    off = Action(-1, (), model_axis, ((int(space.classes.of_op[0]), -1),))
    state = space.apply(space.apply(space.unsharded, put), off)
    plan = make_plan(
        made.model, SearchResult((put, off), state, 1.0, 1, 0.0, ()),
        memory_bytes=made.memory_bytes, seed=0, seconds={},
    )  # fmt: skip
    free = {(f.dimension, f.axis): f for f in plan.explain_argument("x").free}
    found = free[0, "model"]
    assert found.kind == "undone"
    assert found.why.startswith(
        f"step 1 sharded it, step 2 removed the axis: {plan.steps[1].reason}; sharding it again: "
        "step "
    )
    assert found.then is not None
    assert free[1, "model"].kind != "undone"
    assert free[0, "data"].kind == "price"
    assert plan.steps[1].dimensions == ("x:-",)  # what files have
    assert shown_labels(plan.steps[1].dimensions, 2) == "no dimension of x"


def test_labels_in_words() -> None:
    for label, shown in (
        ("dot_general:- at a.py:3", "no dimension of dot_general at a.py:3"),
        ("w['a']:-", "no dimension of w['a']"),
        ("w['a:-1']:0", "w['a:-1']:0"),
        ("x:0", "x:0"),
    ):
        assert shown_labels([label], 1) == shown
    assert shown_labels(["x:-", "y:0", "z:0"], 2) == "no dimension of x, y:0 and 1 more"


def test_what_is_forbidden_is_said(pinned: Plan) -> None:
    kinds = {(f.kind, f.why) for f in pinned.explain_argument("w1").free}
    assert kinds == {("constraint", "a pin or forbid excludes it")}


def test_dimensions_that_conflict() -> None:
    plan = toast.plan(lambda x: x + x.T, f32(4096, 4096), mesh="d=4", hardware="tpu-v5e",
                      constraints=toast.Constraints(fix={"x:0": "d"}))  # fmt: skip
    found = plan.explain_argument("x")
    assert [(h.dimension, h.cause.kind) for h in found.held] == [(0, "fix")]
    assert [(f.dimension, f.kind) for f in found.free] == [(1, "elsewhere")]


def test_a_baselines_plan_names_its_method(plan: Plan) -> None:
    from toast.evaluation.baselines import shardy
    from toast.hardware import Mesh

    made = shardy(analyzed("t2b-tiny"), Mesh.parse(MESH), machine())
    (held, *_) = made.explain_argument("tokens").held
    assert (held.cause.number, held.cause.kind) == (0, "shardy")
    assert str(held.cause) == "method shardy"
    assert made.explain_collectives()


def test_arguments_that_there_are_not(plan: Plan) -> None:
    with pytest.raises(PlanError) as error:
        plan.explain_argument("token")
    assert str(error.value) == "token: no such argument; did you mean tokens?"


def test_arguments_are_written_as_dimensions_are(plan: Plan) -> None:
    for name in ("params.layers[0].wq", 'params["layers"][0]["wq"]'):
        assert plan.explain_argument(name) == plan.explain_argument("params['layers'][0]['wq']")
    first = plan.analysis.program
    assert plan.explain_argument(f"%{first.argument_values[0]}").argument == first.arguments[0]
    found = plan.why_not("params.layers[0].wq", "P('model')", search=False)
    assert found.argument == "params['layers'][0]['wq']"
    assert found.pinned is not None
    assert found.pinned.plan.arguments["params['layers'][0]['wq']"] == (("model",), (), ())
    for ask in (plan.explain_argument, lambda name: plan.why_not(name, "P()")):
        with pytest.raises(PlanError, match=r"^params.layers\[0\].wqq: no such argument; did you"):
            ask("params.layers[0].wqq")
        with pytest.raises(PlanError, match="no such argument"):
            ask(first.results[0])


def test_patterns_of_arguments(plan: Plan) -> None:
    first = plan.explain_argument("params['layers'][0]['wq']")
    for pattern in ("params['layers'][*]['wq']", "params.layers[*].wq", "params.layers.*.wq"):
        found = plan.explain_argument(pattern)
        assert found.alike == tuple(f"params['layers'][{i}]['wq']" for i in (0, 1))
        assert dataclasses.replace(found, alike=()) == first
    one = plan.explain_argument("token?")
    assert (one.argument, one.alike) == ("tokens", ())
    with pytest.raises(PlanError, match=r"^params\.\*: matches \d+ arguments with different sh"):
        plan.explain_argument("params.*")
    for ask in (plan.explain_argument, lambda name: plan.why_not(name, "P()")):
        with pytest.raises(PlanError, match=r"^params.layers\[\*\].wqq: matches no argument; use"):
            ask("params.layers[*].wqq")
    found = plan.why_not("params.layers[*].wq", "P('model')", search=False)
    assert found.pinned is not None
    shown = {path: spec for path, _, spec in found.pinned.arguments}
    assert {path for path in shown if "params" in path} >= {
        f"params['layers'][{i}]['wq']" for i in (0, 1)
    }


# -- collectives -----------------------------------------------------------------------------


def test_collectives_sum_to_the_prediction(plan: Plan) -> None:
    rows = plan.explain_collectives()
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    assert [r.total_seconds for r in rows] == sorted((r.total_seconds for r in rows), reverse=True)
    count: Counter[str] = Counter()
    for row in rows:
        count[row.kind] += row.count
        assert row.seconds > 0
        assert row.causes
        assert row.factors
        json.dumps(row.to_dict())
    for predicted in plan.after.collectives:
        seconds = sum(r.total_seconds for r in rows if r.kind == predicted.kind)
        assert seconds == pytest.approx(predicted.seconds)
        assert count[predicted.kind] == pytest.approx(predicted.count, abs=2)


def test_a_partial_sum_names_its_contracting_dimension() -> None:
    plan = planned(
        constraints=toast.Constraints(fix={"x:0": "d", "w2:0": "m"}),
        settings=toast.Settings(budget=0.0),
    )
    rows = [row for row in plan.explain_collectives() if row.what == "sum"]
    (row,) = (row for row in rows if row.axes == ("m",))
    assert [cause.kind for cause in row.causes] == ["fix"]
    assert row.kind in ("all_reduce", "reduce_scatter")
    assert row.factors == (("m", "contracting(0)", ""),)
    assert row.definition.startswith("dot_general f32[4096,512] at ")
    assert "helpers.py" in row.definition
    assert row.use == ""
    assert "sum over contracting(0) along m" in row.why
    assert row == plan.explain_collective(row.number)


def test_a_reshard_names_the_two_shardings_that_meet(pinned: Plan) -> None:
    def transposed(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ jnp.sin(x).T

    plan = toast.plan(
        transposed, f32(4096, 512), mesh="d=4", hardware="tpu-v5e",
        constraints=toast.Constraints(fix={"x:0": "d"}),
    )  # fmt: skip
    (row,) = plan.explain_collectives()
    assert (row.kind, row.what) == ("all_gather", "reshard")
    assert (row.before, row.after) in {
        ((("d",), ()), ((), ())), (((), ("d",)), ((), ()))
    }  # fmt: skip
    assert row.use.startswith("dot_general f32[4096,4096] at ")
    assert row.causes[-1].kind == "fix"
    assert "the definition shards" in row.why


def test_repeated_layers_are_one_row() -> None:
    few, many = (
        toast.plan(analyzed("t2b", layers=layers), mesh="data=4,model=4", hardware="tpu-v5e",
                   constraints=toast.Constraints(fix={"tokens:0": "data"}),
                   settings=toast.Settings(budget=0.0))
        for layers in (1, 3)
    )  # fmt: skip
    rows = [len(p.explain_collectives()) for p in (few, many)]
    assert rows[1] <= rows[0] + 4
    assert max(r.count for r in many.explain_collectives()) >= 3


def test_collectives_that_there_are_not(pinned: Plan) -> None:
    rows = pinned.explain_collectives()
    for number in (0, -1, len(rows) + 1):
        with pytest.raises(PlanError) as error:
            pinned.explain_collective(number)
        assert str(error.value) == (
            f"no collective {number} in the plan of mlp; use 1 to {len(rows)}"
        )
    whole = toast.plan(lambda x: x * 2, f32(512), mesh="d=4", hardware="tpu-v5e")
    with pytest.raises(PlanError, match="no collective 1 in the plan of <lambda>; it has none"):
        whole.explain_collective(1)


# -- why not ---------------------------------------------------------------------------------


def test_an_alternative_is_priced_line_by_line() -> None:
    plan = planned("d=4")
    assert plan.arguments["w1"] == ((), ())
    found = plan.why_not("w1", "P(None, 'd')")
    assert found.now == ("P()",)
    assert not found.impossible
    for other in (found.pinned, found.searched):
        assert other is not None
        assert other.plan.arguments["w1"] == ((), ("d",))
        lines = {line.what: line for line in other.numbers}
        assert lines["step time"].second == other.plan.after.step_seconds
        assert lines["step time"].first == plan.after.step_seconds
        assert ("w1", "P()", "P(None, 'd')") in other.arguments
        assert other.fits
    assert found.pinned is not None
    assert found.pinned.plan.arguments == {**plan.arguments, "w1": ((), ("d",))}
    assert found.pinned.appear[0].kind == "all_gather"
    assert found.pinned.vanish == ()
    assert found.searched is not None
    assert found.searched.plan.cost <= found.pinned.plan.cost
    assert plan.cost <= found.searched.plan.cost
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_search_that_finds_nothing_better_prints_no_second_tables() -> None:
    plan = planned("d=4")
    found = plan.why_not("w1", "P(None, 'd')")
    assert found.searched is found.pinned
    text = printed(report.why_not_tables(found))
    assert text.count("step time") == 1
    assert "A search from there finds no better plan" in text


def test_what_beats_a_plan_can_be_kept(tmp_path: pathlib.Path) -> None:
    """A plan of a search without time, as any plan that an alternative beats."""
    poor = planned("d=4", settings=toast.Settings(budget=0.0))
    found = poor.why_not("x", "P('d')")
    assert found.better
    assert found.best is found.searched
    kept = found.accept()
    assert kept.cost < poor.cost
    assert kept.fits
    assert kept.arguments["x"] == (("d",), ())
    assert kept.constraints.pin == {"x": "P('d')"}
    kept.to_json(tmp_path / "kept.json")
    shapes = f32(4096, 512), f32(512, 2048), f32(2048, 512)
    again = toast.apply_plan(tmp_path / "kept.json", mlp, *shapes).plan
    assert again.arguments == kept.arguments
    text = printed(report.why_not_tables(found))
    assert f"Better than the plan: cost {kept.cost:.4g}, not {poor.cost:.4g} (" in text
    assert "-o FILE.json, or accept() in Python" in text
    good = planned("d=4").why_not("w1", "P(None, 'd')")
    assert not good.better
    assert "Better" not in printed(report.why_not_tables(good))
    with pytest.raises(PlanError, match="x=P\\('d', 'd'\\) is impossible"):
        poor.why_not("x", "P('d', 'd')").accept()


def test_a_partition_spec_and_patterns(plan: Plan) -> None:
    found = plan.why_not("params['layers'][*]['wq']", P("model"), search=False)
    assert found.searched is None
    assert found.spec == "P('model')"
    assert found.pinned is not None
    for layer in (0, 1):
        path = f"params['layers'][{layer}]['wq']"
        assert found.pinned.plan.arguments[path] == (("model",), (), ())
    same = plan.why_not("tokens", P(*plan.arguments["tokens"]), search=False)
    assert same.pinned is not None
    assert same.pinned.numbers == same.pinned.appear == same.pinned.vanish == ()


def test_an_alternative_on_a_refined_and_a_pinned_plan(pinned: Plan) -> None:
    refined = toast.plan(analyzed("moe-scan", layers=2, experts=32), mesh="x=32",
                         hardware="tpu-v3")  # fmt: skip
    path = next(iter(refined.arguments))
    found = refined.why_not(path, "P()", budget=0.0)
    assert found.pinned is not None
    assert found.searched is not None
    again = pinned.why_not("w2", "P(None, 'm')")
    assert again.pinned is not None
    assert again.pinned.plan.arguments["w2"] == ((), ("m",))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("P('z')", "w1=P('z'): no axis z in mesh d=4,m=2; use d, m"),
        (P(("d", "z")), "w1=P(('d', 'z')): no axis z in mesh d=4,m=2; use d, m"),
        (
            "P(None, None, 'd')",
            "w1=P(None, None, 'd'): w1 is f32[512,2048] and has 2 dimensions, not 3",
        ),
        (None, "w1: None is not a sharding; write P('data', None)"),
        (5, "w1: 5 is not a sharding; write P('data', None)"),
    ],
)
def test_a_sharding_that_is_none_of_the_argument(spec: object, why: str) -> None:
    with pytest.raises(PinError) as error:
        planned().why_not("w1", spec)
    assert str(error.value) == why


def test_what_is_no_name_or_number() -> None:
    plan = planned()
    for ask in (plan.explain_argument, lambda name: plan.why_not(name, "P()")):
        with pytest.raises(PlanError, match=r"^None: not a name; use a string"):
            ask(None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^collective '1': not a collective number; use a"):
        plan.explain_collective("1")  # type: ignore[arg-type]


def test_what_cannot_be() -> None:
    found = planned().why_not("w1", "P('d', 'd')")
    assert found.pinned is found.searched is None
    assert "axis d occurs twice" in found.impossible


def test_what_does_not_divide_or_is_fixed_cannot_be(pinned: Plan) -> None:
    odd = toast.plan(mlp, f32(4096, 511), f32(511, 2048), f32(2048, 512), mesh="d=4",
                     hardware="tpu-v5e")  # fmt: skip
    assert "4 devices (d) do not divide dimension 0" in odd.why_not("w1", "P('d')").impossible
    assert "remove one" in pinned.why_not("x", "P()").impossible
    with pytest.raises(PlanError, match="w9: no such argument; there are x, w1, w2"):
        pinned.why_not("w9", "P()")
    with pytest.raises(PinError, match=r"'d' is not a sharding; write P\('data', None\) as in JAX"):
        pinned.why_not("w1", "d")
