"""What the user fixes holds, and what cannot hold is an error that says why."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import analyzed, f32, mlp, refinements
from toast import Constraints
from toast.errors import PinError, PlanError
from toast.hardware import Hardware, Mesh, load
from toast.models import build
from toast.paths import near
from toast.search import Polishing, TreeSearch
from toast.space import Action, Scope, Space
from toast.space.constraints import broken, parse_spec

MESH = "d=4,m=2"


def machine_for(analysis: toast.Analysis) -> Hardware:
    return toast.api.small_scale(analysis, Mesh.parse(MESH), load("h100"))


def planned(analysis: toast.Analysis, **constraints: object) -> toast.Plan:
    return toast.plan(
        analysis, mesh=MESH, hardware=machine_for(analysis),
        constraints=Constraints(**constraints),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def mlp_analysis() -> toast.Analysis:
    return toast.analyze(mlp, f32(256, 32), f32(32, 64), f32(64, 16))


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("P()", ()),
        ("P('d', None)", (("d",), None)),
        ("PartitionSpec(None, ('d', 'm'))", (None, ("d", "m"))),
        ("P(d, (d,m))", (("d",), ("d", "m"))),
        ("P(None, ())", (None, ())),
        ("P(P.UNCONSTRAINED, d)", (..., ("d",))),
        ("P(UNCONSTRAINED, PartitionSpec.UNCONSTRAINED)", (..., ...)),
    ],
)
def test_shardings_are_written_as_jax_does(text: str, entries: tuple[object, ...]) -> None:
    assert parse_spec(text) == entries


@pytest.mark.parametrize(
    "text",
    [
        "", "d", "Q('d')", "P('d'", "P('1d')", "P(d=4)", "P(('d','m')", "P('d',,'m')", "P(3)",
        "P((None,))", "P(" + "(" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_sharding(text: str) -> None:
    with pytest.raises(PinError, match=r"is not a sharding; write P\('data', None\)"):
        parse_spec(text)


@pytest.mark.parametrize("spec", [P("m", "d"), P(None, ("m", "d")), P(), "P('m', None)"])
def test_pinned_arguments_are_sharded_exactly_so(mlp_analysis: toast.Analysis, spec: P) -> None:
    plan = planned(mlp_analysis, pin={"w1": spec})
    entries = [() if e is None else (e,) if isinstance(e, str) else e for e in P(*spec)] if (
        not isinstance(spec, str)
    ) else [("m",), ()]  # fmt: skip
    assert [set(axes) for axes in plan.arguments["w1"]] == [
        set(axes) for axes in (*entries, (), ())[:2]
    ]
    assert plan.verify().equal


def test_one_layer_can_be_pinned_alone() -> None:
    analysis = analyzed("t2b-tiny")
    plan = planned(analysis, pin={"params['layers'][1]['gate']": P(None, "d")})
    assert plan.arguments["params['layers'][1]['gate']"] == ((), ("d",))
    other = planned(analysis, pin={"params['layers'][*]['gate']": P(None, "d")})
    for layer in (0, 1):
        assert other.arguments[f"params['layers'][{layer}]['gate']"] == ((), ("d",))
    assert plan.steps[0].reason.startswith("pinned: ")
    assert plan.verify().equal


def test_forbidden_axes_are_kept_off(mlp_analysis: toast.Analysis) -> None:
    free = planned(mlp_analysis)
    used = {axis for spec in free.arguments["x"] for axis in spec}
    assert used
    plan = planned(mlp_analysis, forbid={"x": sorted(used)})
    assert not used & {axis for spec in plan.arguments["x"] for axis in spec}


def test_a_fixed_batch_axis(mlp_analysis: toast.Analysis) -> None:
    plan = planned(mlp_analysis, fix={"x:0": "m"})
    assert "m" in plan.arguments["x"][0]
    assert plan.steps[0].axis == "m"
    assert plan.steps[0].reason.startswith("fixed: ")
    assert plan.verify().equal


def test_values_by_the_name_that_checkpoint_name_gave() -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return jnp.sum(hidden @ w.T)

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        kept = jax.checkpoint_policies.save_only_these_names("hidden")
        return jax.grad(jax.checkpoint(function, policy=kept))(x, w)

    analysis = toast.analyze(step, f32(64, 32), f32(32, 16))
    assert set(analysis.program.labels.values()) == {"hidden"}
    for spec in (P("d", "m"), P(None, "d")):
        plan = planned(analysis, pin={"hidden": spec})
        program = analysis.program
        (value,) = program.labels
        assert plan.shardings.of(program, value) == tuple(
            () if axis is None else (axis,) for axis in spec
        )
        assert plan.verify().equal
    assert "toast_name" not in plan.annotated()


def test_each_result_of_an_op_has_its_own_name(tmp_path: pathlib.Path) -> None:
    facts = [
        "op(0,argument). op(1,sort). op(2,add). op(3,return).",
        "result(0,0,x). result(1,0,low). result(1,1,high). result(2,0,both).",
        "operand(1,0,x). operand(1,1,x). operand(2,0,low). operand(2,1,high). operand(3,0,both).",
        'attribute(1,combiner,"other"). attribute(1,dimension,1). attribute(1,is_stable,1).',
    ]
    for value in ("x", "low", "high", "both"):
        facts.append(
            f'dtype({value},"f32"). rank({value},2). dim({value},0,64). dim({value},1,32).'
        )
    path = tmp_path / "sorted.lp"
    path.write_text("\n".join(facts) + "\n")
    analysis = toast.analyze(path)
    named = {label: value for value, label in analysis.program.labels.items()}
    for name in ("low", "high"):
        plan = planned(analysis, pin={name: P("d")})
        assert plan.shardings.of(analysis.program, named[name]) == (("d",), ())
        assert planned(analysis, fix={f"{name}:0": "m"}).steps[0].reason.startswith("fixed: ")
        with pytest.raises(
            PinError, match=rf"^{name}: pin {name}=P\('d'\) has axis d, which forbid"
        ):
            planned(analysis, pin={name: P("d")}, forbid={name: "d"})
        with pytest.raises(PinError, match=rf"^pin {name}=.* {name} f32\[64,32\] has 2 dimensions"):
            planned(analysis, pin={name: P("d", None, None)})
    with pytest.raises(PinError, match="contradicts"):
        planned(analysis, pin={"low": P("d"), "high": P()})


def test_the_program_s_own_constraints() -> None:
    # Axes are explicit by default since jax 0.12; constraints are for automatic ones.
    mesh = AbstractMesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("m", None)))
        loose = NamedSharding(mesh, P("d", P.UNCONSTRAINED))
        return jax.lax.with_sharding_constraint(jnp.sin(hidden) @ w.T, loose)

    analysis = toast.analyze(function, f32(64, 32), f32(32, 16))
    assert sorted(analysis.program.constraints.values(), key=str) == [
        (("d",), None), (("m",), ()),
    ]  # fmt: skip
    plan = planned(analysis, keep=True)
    program = analysis.program
    for op, spec in program.constraints.items():
        actual = plan.shardings.of(program, program.ops[op].results[0])
        for wanted, axes in zip(spec, actual, strict=True):
            assert wanted is None or wanted == axes
    assert plan.verify().equal
    with pytest.raises(PinError, match=r"the program's sharding P\('m', None\).*no axis m in mesh"):
        toast.plan(analysis, mesh="d=4", hardware="h100", constraints=Constraints(keep=True))


def test_shardings_of_arguments_in_the_program_are_pins_too(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((4, 2), ("d", "m"))

    def named(*entries: str | None) -> NamedSharding:
        return NamedSharding(mesh, P(*entries))

    function = jax.jit(
        lambda x, w: jnp.tanh(x @ w),
        in_shardings=(named("d", None), named(None, "m")), out_shardings=named("d", "m"),
    )  # fmt: skip
    shapes = f32(64, 32), f32(32, 16)
    (tmp_path / "sharded.mlir").write_text(function.lower(*shapes).as_text())
    traced, read = toast.analyze(function, *shapes), toast.analyze(tmp_path / "sharded.mlir")
    for analysis in (traced, read):
        plan = planned(analysis, keep=True)
        assert list(plan.arguments.values()) == [(("d",), ()), ((), ("m",))]
        assert plan.steps[0].dimensions == ("the program's own shardings",)
        assert plan.verify().equal
    with pytest.raises(
        PinError, match=r"x: pin x=P\('m'\) contradicts the program's sharding P\('d'"
    ):
        planned(traced, keep=True, pin={"x": P("m")})


def test_what_has_no_elements_takes_no_pin() -> None:
    analysis = toast.analyze(lambda x, y: (x * 2.0, y + 1.0), f32(0, 8), f32(64, 8))
    assert planned(analysis, pin={"*": P()}).verify().equal
    with pytest.raises(PinError, match=r"^pin x=P\(None, 'd'\): x f32\[0,8\] has no elements to"):
        planned(analysis, pin={"x": P(None, "d")})


def test_an_open_dimension_of_a_pin_takes_axes_and_the_others_do_not() -> None:
    """Of refinements, too."""
    analysis = analyzed("t2b-tiny")
    mesh = Mesh.parse(MESH)
    space = Space(analysis, mesh, constraints=toast.Constraints(
        pin={"params['embedding']": P(P.UNCONSTRAINED, "m")}
    ))  # fmt: skip
    op = analysis.program.arguments.index("params['embedding']")
    k, d = int(space.classes.of_op[op]), mesh.names.index("d")
    assert {tuple(row) for row in space.choices[k].tolist()} == {(-1, 1), (0, 1)}
    assert {action.part for action in refinements(space, Scope.CLASS, k)} == {((k, 0),), ((k, -1),)}
    for factor, wanted in ((0, 0), (1, -1)):
        refined = space.apply(space.pinned, Action(-1, (), d, ((k, factor),)))
        assert refined[k].tolist() == [wanted, 1]
        wild = space.pinned.copy()
        wild[k] = (factor, 0)
        assert space.within(wild)[k].tolist() == [wanted, 1]
    kept = space.for_search().apply(space.pinned, Action(-1, (), d, ((k, 1),)))
    assert (kept == space.pinned).all()


def test_ops_that_differ_are_classes_of_their_own() -> None:
    analysis = analyzed("t2b-tiny")
    plain = Space(analysis, Mesh.parse(MESH))
    apart = plain.of_ops(plain.unsharded).copy()
    (k, *_) = (k for k in range(len(plain.classes.count)) if (plain.classes.of_op == k).sum() > 1)
    op = int(np.flatnonzero(plain.classes.of_op == k)[0])
    apart[op, 0] = 0
    split = Space(analysis, Mesh.parse(MESH), apart=apart)
    assert len(split.classes.count) == len(plain.classes.count) + 1
    assert (split.classes.of_op == split.classes.of_op[op]).sum() == 1
    assert split.actions == plain.actions


BAD = [
    ({"pin": {"w3": P()}}, r"^pin w3: matches no argument, named value or result; similar: x, w1"),
    ({"pin": {"w1": P("q")}}, r"^pin w1=P\('q'\): w1 f32\[32,64\]: no axis q in mesh d=4,m=2; use d, m"),
    ({"pin": {"w1": P("d", "d")}}, r"axis d occurs twice; an axis can shard only one dimension$"),
    ({"pin": {"w1": P("d", "m", None)}}, r"w1 f32\[32,64\] has 2 dimensions, not 3$"),
    ({"pin": {"w*": P("d"), "w1": P("m")}}, r"^w1: pin w\*=P\('d'\) contradicts pin w1=P\('m'\); remove one$"),
    ({"pin": {"w1": 3}}, r"^pin w1: 3 is not a sharding"),
    ({"pin": {"w1": P("d")}, "forbid": {"*": "d"}}, r"^w1: pin w1=P\('d'\) has axis d, which forbid \* excludes; remove one$"),
    ({"pin": {"w1": (1, None)}}, r"^pin w1: 1 is not an axis, a tuple of axes, or None; write P"),
    ({"pin": {"w1": [("d", 1)]}}, r"^pin w1: \('d', 1\) is not an axis, a tuple of axes, or None"),
    ({"pin": {"w1": {"d": 1}}}, r"^pin w1: \{'d': 1\} is not a sharding; write P"),
    ({"pin": {"w1": P("d", unreduced={"m"})}}, r"unreduced axes cannot be pinned$"),
    ({"pin": {5: P()}}, r"^pin: 5 is not an argument path; use \{w: P\('data'\)\}$"),
    ({"pin": {"w1": P("q", P.UNCONSTRAINED)}}, r"^pin w1=P\('q', P.UNCONSTRAINED\): w1"),
    ({"pin": ["w1"]}, r"^pin: list is not a mapping from argument paths; use \{w: P\('data'\)\}$"),
    ({"forbid": "w1"}, r"^forbid: str is not a mapping from argument paths"),
    ({"forbid": {"w1": 1}}, r"^forbid w1: 1 is not a mesh axis; write 'data', or a list of axes$"),
    ({"fix": {1: "d"}}, r"^fix: 1 is not an argument path; use"),
    ({"pin": {"": P()}}, r"^pin: empty pattern; write an argument path, or \* for all$"),
    ({"forbid": {"": "d"}}, r"^forbid: empty pattern"),
    ({"fix": {":0": "d"}}, r"^fix: empty pattern"),
    (
        {"fix": {"w1:0": "d"}, "pin": {"w1": P("m")}},
        r"^fix: w1:0 cannot get axis d: pin w1=P\('m'\) excludes it; remove one$",
    ),
    (
        {"fix": {"w1:0": "d"}, "forbid": {"w*": "d"}},
        r"^fix: w1:0 cannot get axis d: forbid w\* excludes it; remove one$",
    ),
    (
        {"fix": {"w1:0": "m"}, "pin": {"w1": P("d", P.UNCONSTRAINED)}},
        r"^fix: w1:0 cannot get axis m: pin w1=P\('d', P.UNCONSTRAINED\) excludes it; remove one$",
    ),
    ({"fix": {"w1:0": "d", "w1:1": "d"}}, r"^fix: w1:1 cannot get axis d: fix w1:0 has it"),
    (
        {"pin": {"w*": P("d", P.UNCONSTRAINED), "w1": P("m", P.UNCONSTRAINED)}},
        r"^w1: pin w\*=P\('d', P.UNCONSTRAINED\) contradicts pin w1=P\('m', P.UNCONSTRAINED\); remove one$",
    ),
    ({"forbid": {"w1": "q"}}, r"^forbid w1: no axis q in mesh"),
    ({"fix": {"x": "d"}}, r"^fix x: write argument:dimension, for example tokens:0$"),
    ({"fix": {"x:2": "d"}}, r"^fix x:2: x has 2 dimensions$"),
    ({"fix": {"y:0": "d"}}, r"^fix y:0: matches no argument, named value or result; similar: "),
]  # fmt: skip


@pytest.mark.parametrize(("constraints", "message"), BAD)
def test_what_cannot_hold(
    mlp_analysis: toast.Analysis, constraints: dict[str, object], message: str
) -> None:
    with pytest.raises(PinError, match=message):
        planned(mlp_analysis, **constraints)


def test_devices_must_divide_what_is_pinned() -> None:
    analysis = toast.analyze(mlp, f32(256, 32), f32(32, 6), f32(6, 16))
    with pytest.raises(PinError, match=r"4 devices \(d\) do not divide dimension 1 of 6 elements"):
        planned(analysis, pin={"w1": P(None, "d")})
    with pytest.raises(PinError, match=r"fix: w1:1 cannot be sharded along d; it has 6 elements"):
        planned(analysis, fix={"w1:1": "d"})


def test_an_axis_of_one_device_holds_all_constraints(mlp_analysis: toast.Analysis) -> None:
    """It shards nothing; a program for several meshes need not leave its constraints out."""
    machine = machine_for(mlp_analysis)
    for said in (
        {"pin": {"w1": P("d", P.UNCONSTRAINED)}}, {"fix": {"w1:0": "d", "x:0": "d"}},
        {"fix": {"x:0": "d"}, "forbid": {"x": "d"}},
    ):  # fmt: skip
        made = toast.plan(
            mlp_analysis, mesh="d=1,m=4", hardware=machine, constraints=toast.Constraints(**said)
        )
        assert not any(step.axis == "d" for step in made.steps)


@pytest.mark.parametrize(
    ("pattern", "first"),
    [
        ("params*wq", "params['layers'][0]['wq']"),
        ("wq", "params['layers'][0]['wq']"),
        ("*['wv'", "params['layers'][0]['wv']"),
        ("params['layers'][1]['w_q']", "params['layers'][1]['wq']"),
        ("prams*['gate']", "params['layers'][0]['gate']"),
        ("tokn*", "tokens"),
        ("hidden", "params['embedding']"),
        ("q", "params['layers'][0]['wq']"),
        ("params.layers[*].q", "params['layers'][0]['wq']"),
    ],
)
def test_near_a_pattern_is_what_was_meant(pattern: str, first: str) -> None:
    analysis = analyzed("t2b-tiny")
    with pytest.raises(PinError) as caught:
        planned(analysis, pin={pattern: P("d")})
    close = str(caught.value).partition("similar: ")[2]
    assert close.split(", ")[0] == first
    layers = [re.sub(r"\d", "*", path) for path in close.split(", ")]
    assert len(set(layers)) == len(layers)


@pytest.mark.parametrize(
    ("pattern", "first"),
    [
        ("params['decodr']['Dense_1']['kernel']", "params['decoder']['Dense_1']['kernel']"),
        ("params.head.Dens_1.bias", "params['head']['Dense_1']['bias']"),
        ("params['dens'][0]", "params['dense'][0]"),
    ],
)
def test_near_a_pattern_is_what_was_meant_where_last_keys_are_alike(
    pattern: str, first: str
) -> None:
    """As flax names them."""
    dense = [
        f"params['{part}']['Dense_{number}']['{name}']"
        for part in ("encoder", "decoder", "head") for number in (0, 1)
        for name in ("kernel", "bias")
    ]  # fmt: skip
    assert near(pattern, [*dense, "state.opt[0]", "params['dense'][0]"])[0] == first


def test_what_is_fixed_stays_so() -> None:
    """No refinement takes it back, and nothing that contradicts it is accepted."""
    analysis = analyzed("t2b-tiny")
    plan = planned(analysis, fix={"tokens:0": "d", "params['embedding']:1": "m"})
    assert "d" in plan.arguments["tokens"][0]
    assert "m" in plan.arguments["params['embedding']"][1]
    for fixed, other in (
        ({"tokens:0": "d", "tokens:1": "d"}, {}),
        ({"tokens:0": "d"}, {"pin": {"tokens": P()}}),
        ({"tokens:0": "d"}, {"forbid": {"tokens": "d"}}),
    ):
        with pytest.raises(PinError, match=r"fix: tokens:\d cannot get axis d: .*; remove one"):
            planned(analysis, fix=fixed, **other)


def test_axes_of_one_dimension_lie_in_the_order_of_the_pin(mlp_analysis: toast.Analysis) -> None:
    for axes in (("d", "m"), ("m", "d")):
        plan = planned(mlp_analysis, pin={"w1": P(None, axes)})
        assert plan.arguments["w1"] == ((), axes)
        assert plan.verify().equal
    with pytest.raises(
        PinError, match=r"^pin w2=.*: the order of axes m and d contradicts pin w1="
    ):
        planned(mlp_analysis, pin={"w1": P(None, ("d", "m")), "w2": P(("m", "d"))})


def test_an_earlier_plan_is_where_a_search_can_begin(tmp_path: pathlib.Path) -> None:
    analysis = analyzed("t2b-tiny")
    machine = machine_for(analysis)
    first = toast.plan(analysis, mesh=MESH, hardware=machine)
    first.to_json(tmp_path / "plan.json")
    assert first.steps
    for start in (first, tmp_path / "plan.json"):
        again = toast.plan(
            analysis, mesh=MESH, hardware=machine, start=start,
            settings=toast.Settings(rounds=1), stages=(Polishing(), TreeSearch("parts")),
        )  # fmt: skip
        assert again.cost <= first.cost
    # Refinements, too.
    moe = toast.analyze(build("moe-scan", layers=2, experts=32))
    refined = toast.plan(moe, mesh="x=32", hardware="tpu-v3")
    assert any(step.part for step in refined.steps)
    refined.to_json(tmp_path / "refined.json")
    for start in (refined, tmp_path / "refined.json"):
        again = toast.plan(
            moe, mesh="x=32", hardware="tpu-v3", start=start, settings=toast.Settings(budget=0.0)
        )
        assert again.cost == refined.cost
        assert again.note == "stopped at its budget"
    with pytest.raises(
        PlanError,
        match=r"refined.json: this is a plan of moe-scan; t2b-tiny has only \w+ of its \d+ arguments; start",
    ):
        toast.plan(analysis, mesh=MESH, hardware=machine, start=tmp_path / "refined.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "newer.json").write_text(text.replace('"version": 2', '"version": 9'))
    with pytest.raises(PlanError, match=r"plan version 9 was written by a newer TOAST"):
        toast.plan(analysis, mesh=MESH, hardware=machine, start=tmp_path / "newer.json")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(
        PlanError, match=r"none.json is not a plan: .*; use a file written by Plan.to_json"
    ):
        toast.plan(analysis, mesh=MESH, hardware=machine, start=tmp_path / "none.json")
    with pytest.raises(PlanError, match="No such file"):
        toast.plan(analysis, mesh=MESH, hardware=machine, start=tmp_path / "gone.json")


@pytest.mark.parametrize("spec", [P("d"), P(None, "m"), P(("d", "m")), P("m", "d")])
def test_results_are_sharded_as_pinned(mlp_analysis: toast.Analysis, spec: P) -> None:
    constraints = toast.Constraints(pin={"result": spec})
    plan = toast.plan(mlp_analysis, mesh="d=4,m=2", hardware="tpu-v5e", constraints=constraints)
    assert tuple(plan.out_shardings) == (*spec, *(None,) * (2 - len(spec)))
    assert plan.verify().equal
    assert broken(mlp_analysis, plan.mesh, constraints, plan.op_state) == ()
    other = toast.Constraints(pin={"result": P(None, ("m", "d"))})
    assert broken(mlp_analysis, plan.mesh, other, plan.op_state) == ("result",)


def test_results_are_pinned_by_path_unless_an_argument_has_it() -> None:
    def function(result: Any, w: Any) -> Any:
        return {"a": result @ w, "b": [result * 2]}

    analysis = toast.analyze(function, f32(64, 32), f32(32, 16), donate=0)
    pins = {"result['a']": P(None, "d"), "result": P("m")}
    plan = toast.plan(
        analysis, mesh="d=4,m=2", hardware="tpu-v5e", constraints=toast.Constraints(pin=pins)
    )
    assert plan.out_shardings["a"] == P(None, "d")
    assert plan.arguments["result"] == (("m",), ())
    # The donated argument and the result that overwrites it have one sharding.
    (donated,) = analysis.program.donated
    assert analysis.program.arguments[donated] == "result"
    assert plan.out_shardings["b"][0] == P("m", None)
    again = toast.Constraints(pin={"result['b'][0]": P("d"), "w": P()})
    plan = toast.plan(analysis, mesh="d=4,m=2", hardware="tpu-v5e", constraints=again)
    assert plan.arguments["result"] == (("d",), ())


def test_open_and_forbidden_axes_of_results(mlp_analysis: toast.Analysis) -> None:
    forbid = toast.Constraints(forbid={"result": ["d", "m"]})
    plan = toast.plan(mlp_analysis, mesh="d=4,m=2", hardware="tpu-v5e", constraints=forbid)
    assert plan.out_shardings == P(None, None)
    both = toast.Constraints(pin={"result": P("d")}, forbid={"result": "d"})
    with pytest.raises(
        PinError, match=r"result: pin result=P\('d'\) has axis d, which forbid resul"
    ):
        toast.plan(mlp_analysis, mesh="d=4,m=2", hardware="tpu-v5e", constraints=both)
    wrong = toast.Constraints(pin={"result": P("d", None, "m")})
    with pytest.raises(PinError, match=r"result f32\[\d+,\d+\] has 2 dimensions, not 3"):
        toast.plan(mlp_analysis, mesh="d=4,m=2", hardware="tpu-v5e", constraints=wrong)
