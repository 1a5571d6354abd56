"""Uneven dimensions with the default arguments of ``toast.plan`` and ``toast plan`` (GShard 3.3.1)."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.cli.test_cli import run
from tests.helpers import f32, mlp
from toast import api
from toast.cost import CostModel
from toast.errors import MeshError, PinError, PlanError
from toast.hardware import Mesh, load
from toast.space import Space
from toast.uneven import padded_program, uneven_dimensions


def rows(x: Any) -> Any:
    """Powers of a matrix in each row."""
    for _ in range(4):
        x = jnp.tanh(jnp.einsum("bij,bjk->bik", x, x))
    return x


def vocabulary(embedding: Any, x: Any) -> Any:
    return jax.nn.logsumexp(x @ embedding.T, axis=1).sum()


def heads(q: Any, k: Any, v: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
    return jnp.einsum("bhqk,bhkd->bhqd", scores, v)


#: Function, large and small shapes, meshes for both, and what is padded from and to.
CASES: dict[str, Any] = {
    "7 rows on 4": (
        rows, (f32(7, 1023, 1023),), (f32(7, 33, 33),),
        "a=4", "a=4", (7, 8),
    ),
    "50,257 tokens on 16": (
        vocabulary, (f32(50257, 768), f32(8192, 768)), (f32(4097, 33), f32(5, 33)),
        "data=8,model=16", "model=8", (50257, 50304),
    ),
    "12 heads on 8": (
        heads, (f32(1, 12, 2047, 64),) * 3, (f32(1, 12, 33, 9),) * 3, "a=8", "a=8", (12, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_plans_pad_by_default_and_say_what_it_costs(name: str) -> None:
    function, shapes, _, mesh, _, (size, to) = CASES[name]
    plan = toast.plan(function, *shapes, mesh=mesh, hardware="tpu-v5e")
    assert [(d.elements, d.padded) for d in plan.padding] == [(size, to)]
    note = plan.note.splitlines()[0]
    assert note.startswith("padded, as the axes do not divide them: ")
    assert f"from {size:,} to {to:,} elements (+" in note
    assert "Padding takes about " in note
    assert "; without it, a step takes " in note
    program = plan.analysis.program
    assert [program.values[v].type.shape for v in program.argument_values] == [
        shape.shape for shape in shapes
    ]


def small(name: str, lowering: str = "xla") -> tuple[Callable[..., Any], Any, toast.Plan]:
    """A case in its small form, its arguments, and its plan with scarce memory."""
    function, _, shapes, _, mesh, _ = CASES[name]
    analysis = toast.analyze(function, *shapes, lowering=lowering)
    hardware = api.small_scale(analysis, Mesh.parse("a=1"), load("tpu-v5e"))
    random = np.random.default_rng(0)
    inputs = [random.normal(size=shape.shape).astype("f4") for shape in shapes]
    plan = toast.plan(function, *shapes, mesh=mesh, hardware=hardware, lowering=lowering)
    return function, inputs, plan


@pytest.mark.parametrize("lowering", ["xla", "local"])
@pytest.mark.parametrize("name", CASES)
def test_padded_plans_run(name: str, lowering: str) -> None:
    function, inputs, plan = small(name, lowering)
    assert plan.padding
    expected = function(*inputs)
    np.testing.assert_allclose(plan.jit()(*inputs), expected, rtol=1e-5, atol=1e-5)
    if lowering == "xla":
        local = plan.jit(lowering="local")(*inputs)
        np.testing.assert_allclose(local, expected, rtol=1e-5, atol=1e-5)
    verification = plan.verify()
    assert verification.equal
    assert plan.lowered().counts() == plan.model.local_collectives(plan.state)


def test_plan_files_of_padded_plans() -> None:
    """A file is for the program as the user has it, and says what to pad."""
    function, shapes = CASES["12 heads on 8"][:2]
    plan = toast.plan(function, *shapes, mesh="a=8", hardware="tpu-v5e")
    data = plan.to_dict()
    assert data["padding"] == [{"dimension": "q:1", "elements": 12, "padded": 16}]
    assert data["program_hash"] == toast.analyze(function, *shapes).program.digest
    applied = toast.apply_plan(json.loads(json.dumps(data)), function, *shapes)
    assert applied.same_program
    assert not applied.remarks
    assert applied.plan.padding == plan.padding
    assert applied.plan.after == plan.after
    assert applied.plan.to_dict()["values"] == data["values"]
    again = toast.plan(
        function, *shapes, mesh="a=8", hardware="tpu-v5e", start=plan,
        settings=toast.Settings(budget=0.0),
    )  # fmt: skip
    assert (again.padding, again.cost) == (plan.padding, plan.cost)
    assert plan.explain_argument("q").held == ()
    assert len(plan.query("color(D,C)")) > 0
    assert plan.explain_collectives() == applied.plan.explain_collectives()


@pytest.mark.parametrize("to", [11, 12, 25, 10**15])
def test_files_with_padding_that_is_none(to: int) -> None:
    function, shapes = CASES["12 heads on 8"][:2]
    data = toast.plan(function, *shapes, mesh="a=8", hardware="tpu-v5e").to_dict()
    data["padding"][0]["padded"] = to
    with pytest.raises(PlanError, match=f"in 'padding', 12 elements are padded to {to}"):
        toast.apply_plan(data, function, *shapes)


def test_a_changed_program_is_padded_as_far_as_it_matches() -> None:
    function, shapes = CASES["12 heads on 8"][:2]
    plan = toast.plan(function, *shapes, mesh="a=8", hardware="tpu-v5e")
    applied = toast.apply_plan(plan, lambda q, k, v: 2 * heads(q, k, v), *shapes)
    assert not applied.same_program
    assert applied.plan.padding == plan.padding
    even = (f32(1, 16, 2047, 64),) * 3
    applied = toast.apply_plan(plan, heads, *even)
    assert applied.plan.padding == ()
    assert any(
        note.startswith("not padded, as in the plan: q:1 from 12 to 16") for note in applied.notes
    )


def test_the_command_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_heads.py").write_text(
        "import jax\nimport jax.numpy as jnp\n\n\ndef step(q, k, v):\n"
        "    scores = jax.nn.softmax(jnp.einsum('bhqd,bhkd->bhqk', q, k))\n"
        "    return jnp.einsum('bhqk,bhkd->bhqd', scores, v)\n"
    )
    target = "odd_heads:step", *("--arg", "f32[1,12,2047,65]") * 3
    result = run("plan", *target, "--mesh", "a=8", "--json", "plan.json", "-o", "plan.mlir")
    assert result.exit_code == 0, result.output
    assert "q:1 from 12 to 16 elements (+33 %)" in " ".join(result.stdout.split())
    for command in (
        ("explain", "plan.json", *target, "--argument", "q"),
        ("explain", "plan.json", *target, "--collective", "all"),
        ("query", "plan.json", "sharding(V,D,A,_)", *target),
        ("lower", "plan.json", *target),
        ("apply", "plan.json", *target),
        ("report", "plan.json", *target, "-o", "plan.html"),
        ("diff", "plan.json", "plan.json"),
    ):
        result = run(*command)
        assert result.exit_code == 0, (command, result.output)
    result = run("plan", *target, "--mesh", "a=8", "--uneven", "0")
    assert result.exit_code == 2
    assert "mesh axis a=8 divides no dimension of step" in result.stderr


@pytest.mark.parametrize("uneven", [None, 1])
def test_padding_that_does_not_pay_is_mentioned(uneven: float | None) -> None:
    """No dimension is divisible, and the program is too small for collectives."""
    shapes = f32(7, 333), f32(333, 555), f32(555, 111)
    with pytest.raises(MeshError) as caught:
        toast.plan(mlp, *shapes, mesh="data=4", hardware="tpu-v5e", uneven=uneven)
    assert re.fullmatch(
        r"mesh axis data=4 divides no dimension of mlp \(the largest has 555 elements\); padding is "
        r"possible, but does not pay: a step takes [\d.]+ us without this axis, and the search found "
        r"no better padded plan; choose an axis whose size divides a dimension, or pad the arrays in the program",
        str(caught.value),
    )
    with pytest.raises(
        MeshError, match=r"555 elements\); choose an axis whose size divides a dimension$"
    ):
        toast.plan(mlp, *shapes, mesh="data=4", hardware="tpu-v5e", uneven=0)


TWO = f32(2049, 20483), f32(20483, 2053), f32(5, 127, 129), f32(5, 129, 127)


def two(x: Any, w: Any, y: Any, z: Any) -> Any:
    return jnp.tanh(x @ w), jnp.tanh(jnp.einsum("bij,bjk->bik", y, z))


def test_some_dimensions_are_padded_and_others_whole() -> None:
    """No subset of up to three dimensions gives a better plan."""
    plan = toast.plan(two, *TWO, mesh="a=4", hardware="tpu-v5e")
    analysis = toast.analyze(two, *TWO)
    mesh = Mesh.parse("a=4")
    everything = [dimension.record for dimension in uneven_dimensions(analysis, mesh, 0.5)]
    assert 0 < len(plan.padding) < len(everything)
    for count in (1, 2):
        for subset in itertools.combinations(everything, count):
            larger = padded_program(analysis, mesh, 0.5, only=subset)
            assert larger is not None
            other = toast.plan(
                toast.analyze(larger.program), mesh=mesh, hardware="tpu-v5e", uneven=0,
                settings=toast.Settings(rounds=1),
            )  # fmt: skip
            assert plan.after.step_seconds <= other.after.step_seconds * 1.0001, subset


def test_names_annotations_and_pins_hold_in_padded_programs() -> None:
    from jax.ad_checkpoint import checkpoint_name

    def step(x: Any, w: Any, u: Any) -> Any:
        hidden = checkpoint_name(jnp.einsum("bij,bjk->bik", x, w), "hidden")
        return toast.replicate(hidden[0, :4] @ u), jax.nn.relu(hidden)

    shapes = f32(7, 1023, 1023), f32(7, 1023, 1023), f32(1023, 8)
    analysis = toast.analyze(step, *shapes)
    larger = padded_program(analysis, Mesh.parse("a=4"), 0.5)
    assert larger is not None
    program = larger.program
    assert [*program.annotations.values()] == [*analysis.program.annotations.values()]
    assert [*program.labels.values()] == ["hidden"]
    plan = toast.plan(
        toast.analyze(program), mesh="a=4", hardware="tpu-v5e", uneven=0,
        constraints=toast.Constraints(pin={"hidden": "P('a')"}),
    )  # fmt: skip
    (hidden,) = program.labels
    assert plan.shardings.of(program, hidden) == (("a",), (), ())


def test_the_name_of_a_slice_stays_where_padding_moves_it() -> None:
    from jax.ad_checkpoint import checkpoint_name

    def loss(logits: Any) -> Any:
        before = checkpoint_name(logits[:, :-1], "before")
        return jnp.sum(jnp.exp(before) * jnp.cos(before)), before

    plan = toast.plan(
        loss, f32(4, 4096, 512), mesh="a=8", hardware="tpu-v5e", lowering="local",
        constraints=toast.Constraints(pin={"before": "P(None, 'a')"}),
    )  # fmt: skip
    program = plan.analysis.program
    (before,) = program.labels
    assert plan.shardings.of(program, before) == ((), ("a",), ())
    assert plan.verify(lowering="local").equal


def test_what_cannot_be_padded_is_planned_whole() -> None:
    """Code for single devices and fact bases: by default without an error."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("a",))
    region = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    plan = toast.plan(
        lambda x, y: (region(x), y @ y.T), f32(8, 4), f32(4097, 4096), mesh="a=4",
        hardware="tpu-v5e",
    )  # fmt: skip
    assert plan.padding == ()


def test_a_budget_limits_all_searches() -> None:
    function, shapes = CASES["12 heads on 8"][:2]
    plan = toast.plan(
        function, *shapes, mesh="a=8", hardware="tpu-v5e", settings=toast.Settings(budget=0.0)
    )
    assert plan.padding == ()
    assert "stopped at its budget" in plan.note


@pytest.mark.parametrize("lowering", ["xla", "local"])
def test_annotations_of_uneven_dimensions_hold_by_padding(lowering: str) -> None:
    """As in GShard, and pins of named values: the price does not matter."""
    from jax.ad_checkpoint import checkpoint_name

    def step(x: Any) -> Any:
        rows = toast.split(jnp.tanh(x), 0, "a")
        return checkpoint_name(rows * 2, "rows") @ jnp.ones((8, 3)), rows.max(0)

    plan = toast.plan(
        step, f32(7, 8), mesh="a=4", hardware="tpu-v5e", lowering=lowering,
        constraints=toast.Constraints(pin={"rows": "P('a')"}),
    )  # fmt: skip
    assert [str(d) for d in plan.padding] == ["x:0 from 7 to 8 elements (+14 %)"]
    assert "without it, no plan satisfies the pins and annotations" in plan.note
    assert [row.spec for row in plan.explain_annotations()] == [(("a",), ())]
    x = np.random.default_rng(0).normal(size=(7, 8)).astype("f4")
    for result, expected in zip(plan.jit()(x), step(x), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("uneven", [0, 0.1, None])
def test_annotations_that_padding_does_not_help_are_one_line(uneven: float | None) -> None:
    rows = 3 if uneven is None else 7
    with pytest.raises(PinError, match=f"do not divide dimension 0 of {rows} elements"):
        toast.plan(
            lambda x: toast.split(x, 0, "a") * 2, f32(rows, 8), mesh="a=8", hardware="tpu-v5e",
            uneven=uneven,
        )  # fmt: skip


def test_prices_include_padding() -> None:
    """A padded program costs more unsharded: it has more elements, and ops that pad and cut."""
    function, shapes = CASES["12 heads on 8"][:2]
    analysis = toast.analyze(function, *shapes)
    larger = padded_program(analysis, Mesh.parse("a=8"), 0.5)
    assert larger is not None
    whole, padded = (
        CostModel(Space(a, Mesh.parse("a=8")), load("tpu-v5e"))
        for a in (analysis, toast.analyze(larger.program))
    )
    assert padded.initial_seconds > 1.2 * whole.initial_seconds
