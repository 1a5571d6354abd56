"""End to end on 8 CPU devices: what XLA runs equals the unsharded program."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

import toast
from tests.helpers import action, analyzed, f32, mlp, model_of, printed
from toast import api, report
from toast.apply import Runnable, annotate, collectives_in, verify
from toast.apply.verify import UnshardedRun
from toast.errors import PlanError
from toast.hardware import Mesh, load
from toast.models import build
from toast.plan.shard import shardings_of
from toast.program import Program, Shardings, Spec

#: XLA's CPU compiler has no pass that makes reduce-scatters: it all-reduces and slices.
ON_CPU = {"reduce_scatter": "all_reduce"}


def small_plan(name: str, mesh: str, **options: int) -> toast.Plan:
    analysis = toast.analyze(build(name, small=True, **options))
    parsed = Mesh.parse(mesh)
    machine = api.small_scale(analysis, parsed, load("tpu-v5e"))
    return toast.plan(analysis, mesh=parsed, hardware=machine)


def test_errors_stand_beside_the_magnitude_of_what_they_are_of() -> None:
    plan = small_plan("mlp", "data=4,model=2")
    found = plan.verify()
    (output,) = found.outputs
    assert output.magnitude > 100 * output.max_abs_error
    assert output.relative_error == pytest.approx(output.max_abs_error / output.magnitude)
    text = printed(report.verification_table(plan, found))
    head = ("output", "largest value", "largest error", "relative error", "equal")
    assert all(column in text for column in head)
    assert f"{output.magnitude:.2g}" in text


def kinds(counts: dict[str, int]) -> set[str]:
    return {ON_CPU.get(kind, kind) for kind, count in counts.items() if count}


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("mlp", "data=4,model=2", {}),
        ("attention", "s=8", {}),
        ("attention", "data=2,model=4", {}),
        ("t2b-tiny", "data=8", {"layers": 1}),
        ("t2b-tiny", "data=4,model=2", {"layers": 2}),
        ("t2b-tiny", "x=2,y=2,z=2", {"layers": 1}),
    ],
)
def test_planned_programs_run_with_equal_numbers(
    name: str, mesh: str, options: dict[str, int]
) -> None:
    plan = small_plan(name, mesh, **options)
    assert plan.steps
    found = plan.verify()
    for output in found.outputs:
        assert output.relative_error <= 1e-5, output
    predicted = {c.kind: c.count for c in plan.after.collectives}
    assert kinds(found.collectives) <= kinds(predicted)
    assert ("all_reduce" in kinds(predicted)) == ("all_reduce" in kinds(found.collectives))


def test_random_states_run_with_equal_numbers() -> None:
    """Any state the search may visit is a program that computes the same."""
    model = model_of(analyzed("t2b-tiny", layers=1), "d=4,m=2")
    random = np.random.default_rng(0)
    for _ in range(4):
        state = model.space.initial
        for chosen in random.permutation(len(model.space.actions))[:6].tolist():
            state = model.space.apply(state, model.space.actions[chosen])
        shardings = shardings_of(model, state)
        assert verify(model.space.analysis.program, shardings).equal


def figure_2c() -> tuple[Program, Shardings]:
    analysis = toast.analyze(mlp, f32(256, 32), f32(32, 64), f32(64, 16))
    model = model_of(analysis, "b=4,m=2")
    space = model.space
    state = space.apply(space.initial, action(space, "x", 0, "b"))
    state = space.apply(state, action(space, "w1", 1, "m"))
    return analysis.program, shardings_of(model, state)


def wrapped(x: jax.Array, _y: jax.Array) -> jax.Array:
    return jnp.concatenate([x[-32:], x, x[:32]])


def spliced(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.concatenate([x[:64], y[32:96]])


@pytest.mark.parametrize(
    "joined", [lambda x, y: jnp.roll(x, 32, axis=0) + y, wrapped, spliced], ids=["roll", "wrap", "splice"]
)  # fmt: skip
def test_joined_slices_run_in_shards(joined: Callable[..., Any]) -> None:
    """Rolls and the like: devices exchange the elements along the sharded dimension."""
    analysis = toast.analyze(lambda x, y: joined(x, y) * 2, f32(128, 8), f32(128, 8))
    model, program = model_of(analysis, "d=4"), analysis.program
    state = model.space.apply(model.space.initial, action(model.space, "x", 0, "d"))
    shardings = shardings_of(model, state)
    (joining,) = (
        op for op in program.ops if program.signatures[op.signature].kind == "concatenate"
    )
    (result,) = joining.results
    assert shardings.of(program, result)[0] == ("d",)
    assert verify(program, shardings).equal


def test_figure_2c_compiles_to_one_all_reduce() -> None:
    program, shardings = figure_2c()
    runnable = Runnable(program, shardings)
    assert collectives_in(runnable.compiled_text()) == {"all_reduce": 1}
    x, w1, w2 = (jnp.ones(s.shape) for s in (f32(256, 32), f32(32, 64), f32(64, 16)))
    result = runnable(x, w1, w2)
    np.testing.assert_allclose(result, mlp(x, w1, w2))
    assert tuple(result.sharding.spec)[:1] == ("b",)


def test_annotations_are_shardy(tmp_path: pathlib.Path) -> None:
    program, shardings = figure_2c()
    text = annotate(program, shardings).operation.get_asm(enable_debug_info=True)
    assert 'sdy.mesh @toast_mesh = <["b"=4, "m"=2]>' in text
    assert 'sdy.sharding = #sdy.sharding<@toast_mesh, [{"b"}, {}]>' in text
    # What was written is a program: read it back and plan it again.
    path = tmp_path / "annotated.mlir"
    path.write_text(text)
    plan = toast.plan(path, mesh="b=4", hardware="tpu-v5e")
    assert list(plan.arguments) == list(program.arguments)


def test_resharded_uses_are_constrained_once() -> None:
    def twice(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w + y @ w

    analysis = toast.analyze(twice, f32(64, 32), f32(64, 32), f32(32, 32))
    model = model_of(analysis, "d=8", min_dimensions=0)
    space = model.space
    state = space.apply(space.initial, action(space, "x", 0, "d"))
    state = space.apply(state, action(space, "w", 1, "d"))
    shardings = shardings_of(model, state)
    text = str(annotate(analysis.program, shardings))
    assert text.count("sdy.sharding_constraint %arg") == 1
    assert collectives_in(Runnable(analysis.program, shardings).compiled_text()) == {
        "all_gather": 1
    }


def test_axes_in_another_order_are_reached_step_by_step() -> None:
    """XLA would gather the whole value: it cannot scatter along an axis that becomes the major one."""
    program = toast.analyze(jnp.dot, f32(32, 64), f32(64, 16)).program
    (x, w), result = program.argument_values, program.result_values[0]
    computed, stored = (("b",), ()), (("m", "b"), ())
    values = {x: (("b",), ("m",)), w: (("m",), ()), result: stored}
    shardings = Shardings(Mesh.parse("b=4,m=2"), values, {}, (stored,), {result: computed})
    text = str(annotate(program, shardings))
    assert text.index('[{"b", "m"}, {}]') < text.index(
        '[{"m", "b"}, {}]', text.index("dot_general")
    )
    check = verify(program, shardings)
    assert check.equal
    assert "all_gather" not in kinds(check.collectives)
    assert "collective_permute" in kinds(check.collectives)


def test_reshards_are_reached_step_by_step() -> None:
    """XLA would gather the whole value in one step, where half of it will do."""
    program = toast.analyze(jnp.negative, f32(64, 64)).program
    (x,), (result,) = program.argument_values, program.result_values
    stored = (("m",), ())
    values = {x: ((), ("b", "m")), result: stored}
    uses = {(program.values[result].op, 0): stored}
    shardings = Shardings(Mesh.parse("b=4,m=2"), values, uses, (stored,), {})
    check = verify(program, shardings)
    assert check.equal
    assert {*kinds(check.collectives)} == {"all_to_all", "all_gather"}


@pytest.mark.parametrize("reads", [1, 2])
def test_no_constraint_parts_a_product_and_its_transpose(reads: int) -> None:
    """XLA multiplies into the transposed layout before it sums: nothing is copied into it later."""

    def gradient(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        product = jnp.einsum("bd,bh->hd", x, y)
        return (product.T, jnp.tanh(product))[:reads]

    program = toast.analyze(gradient, f32(64, 16), f32(64, 32)).program
    kinds_of_ops = [program.kind(op) for op in range(len(program.ops))]
    product, transposed = (
        program.ops[kinds_of_ops.index(kind)].results[0] for kind in ("dot_general", "transpose")
    )
    rows = (("b",), ())
    values: dict[int, Spec] = dict.fromkeys(program.argument_values, rows)
    values |= {product: ((), ("b",)), transposed: rows}
    sums = {product: ((), ())}
    results = (rows, ((), ()))[:reads]
    shardings = Shardings(Mesh.parse("b=8"), values, {}, results, sums)
    (line,) = (
        line for line in str(annotate(program, shardings)).splitlines() if "dot_general" in line
    )
    name = line.split()[0]
    parted = f"sdy.sharding_constraint {name} " in str(annotate(program, shardings))
    assert parted == (reads > 1)
    check = verify(program, shardings)
    assert check.equal
    assert "all_reduce" in kinds(check.collectives)


def test_pytrees_keywords_and_donation() -> None:
    def step(
        params: dict[str, jax.Array], *, batch: tuple[jax.Array, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(p: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((batch[0] @ p["w"] + p["b"] - batch[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    params = {"w": jnp.ones((32, 16)), "b": jnp.zeros((16,))}
    batch = (jnp.ones((64, 32)), jnp.ones((64, 16)))
    plan = toast.plan(step, params, batch=batch, donate=(0,), mesh="d=8", hardware="tpu-v5e")
    assert list(plan.arguments) == ["params['b']", "params['w']", "batch[0]", "batch[1]"]
    expected, value = step(params, batch=batch)
    fresh = jax.tree.map(jnp.copy, params)
    actual, sharded_value = plan.jit()(fresh, batch=batch)
    jax.tree.map(np.testing.assert_allclose, actual, expected)
    np.testing.assert_allclose(sharded_value, value)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    (in_params,), in_keywords = plan.in_shardings
    assert set(in_params) == {"w", "b"}
    assert set(in_keywords) == {"batch"}
    out_params, _ = plan.out_shardings
    assert out_params["w"] == in_params["w"]
    assert plan.jit(mesh)(jax.tree.map(jnp.copy, params), batch=batch)[1] == sharded_value


def test_the_order_of_devices_is_the_mesh_s() -> None:
    shapes = (f32(4096, 256), f32(256, 512), f32(512, 256))
    devices = np.array(jax.devices()[:8])
    given = jax.sharding.Mesh(devices.reshape(2, 4).T, ("d", "m"))
    plan = toast.plan(mlp, *shapes, mesh=given, hardware="tpu-v5e")
    assert str(plan.mesh) == "d=4,m=2@m,d"
    runs = [plan.jit(mesh) for mesh in (None, given)]
    for run in runs:
        assert (run.mesh.devices == given.devices).all()
    arrays = [jnp.ones(shape.shape) for shape in shapes]
    np.testing.assert_allclose(runs[1](*arrays), mlp(*arrays), rtol=1e-5)
    other = jax.sharding.Mesh(devices.reshape(2, 4), ("d", "m"))
    with pytest.raises(PlanError, match=r"the plan is for mesh d=4,m=2@m,d, not d=2,m=4"):
        plan.jit(other)


def test_shardings_are_what_jax_jit_takes() -> None:
    shapes = (f32(4096, 256), f32(256, 512), f32(512, 256))
    plan = toast.plan(mlp, *shapes, mesh="d=8", hardware="tpu-v5e")
    assert len(plan.in_shardings) == 3
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        jitted = jax.jit(mlp, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
        arguments = [np.ones(s.shape, np.float32) for s in shapes]
        np.testing.assert_allclose(jitted(*arguments), mlp(*arguments), rtol=1e-5)


def test_shardings_for_a_mesh_need_no_mesh_to_be_set() -> None:
    """The documented way: jax.jit takes them as they are, in whatever mode the mesh is."""
    shapes = ({"w1": f32(256, 512), "w2": f32(512, 256)}, f32(4096, 256))

    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        return params, mlp(x, **params)

    plan = toast.plan(step, *shapes, donate=0, mesh="d=4,m=2", hardware="tpu-v5e")
    arguments = jax.tree.map(lambda s: np.full(s.shape, 0.5, np.float32), shapes)
    for mesh in (None, jax.devices()[:8], jax.make_mesh((4, 2), ("d", "m"))):
        into, out = plan.shardings_for(mesh)
        assert jax.tree.map(lambda s: s.spec, (into, out)) == (
            plan.in_shardings, plan.out_shardings,
        )  # fmt: skip
        params, hidden = jax.jit(step, in_shardings=into, out_shardings=out)(*arguments)
        np.testing.assert_allclose(hidden, mlp(arguments[1], **arguments[0]), rtol=1e-5)
        assert params["w1"].sharding == into[0]["w1"]
    with pytest.raises(PlanError, match="the plan is for mesh d=4,m=2, not d=8"):
        plan.shardings_for(jax.make_mesh((8,), ("d",)))


def test_programs_from_files_run_on_flat_arguments(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mlp.mlir"
    shapes = (f32(256, 32), f32(32, 64), f32(64, 16))
    path.write_text(jax.jit(mlp).lower(*shapes).as_text())
    plan = toast.plan(path, mesh="d=8", hardware="tpu-v5e")
    x, w1, w2 = (jnp.ones(s.shape) for s in shapes)
    (result,) = plan.jit()(x, w1, w2)
    np.testing.assert_allclose(result, mlp(x, w1, w2))
    with pytest.raises(PlanError, match="takes 3 flat arguments, got 2"):
        plan.jit()(x, w1)


def test_too_few_devices() -> None:
    program, shardings = figure_2c()
    with pytest.raises(PlanError, match=r"mesh b=4,m=2 needs 8 devices, but JAX has 4"):
        Runnable(program, shardings, devices=jax.devices()[:4])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((("b",), ("b",)), "axis b shards it twice"),
        ((("q",), ()), "has no axis q"),
        ((("b",),), "has 1 dimensions, but the value has 2"),
        (((), ("b", "m")), "8 shards along b x m do not divide 100"),
    ],
)
def test_impossible_shardings_are_refused(spec: tuple[tuple[str, ...], ...], message: str) -> None:
    program = api.program_of(lambda x: x + 1.0, f32(64, 100))
    bad = Shardings(Mesh.parse("b=4,m=2"), {0: spec}, {}, (((), ()),))
    with pytest.raises(PlanError, match=message):
        annotate(program, bad)


def test_fact_bases_have_no_program() -> None:
    from toast.resources import directory

    plan = toast.plan(directory("facts") / "mlp.lp", mesh="b=4", hardware="tpu-v5e")
    with pytest.raises(PlanError, match="mlp is a fact base"):
        plan.jit()


def test_an_array_that_is_donated_is_no_other_argument() -> None:
    plan = toast.plan(
        lambda a, b: a + b, f32(64, 32), f32(64, 32), donate=(0,), mesh="d=8", hardware="tpu-v5e"
    )
    x = jnp.ones((64, 32))
    with pytest.raises(
        PlanError, match=r"argument a is donated, and the same array is argument b; "
    ):
        plan.jit()(x, x)
    assert float(plan.jit()(x, x.copy()).sum()) == 2.0 * 64 * 32
    host = np.ones((64, 32), np.float32)  # copied to the devices anyway
    assert float(plan.jit()(host, host).sum()) == 2.0 * 64 * 32


def test_derivatives_of_a_planned_program_are_refused() -> None:
    plan = toast.plan(jnp.tanh, f32(64, 32), mesh="d=8", hardware="tpu-v5e")
    step, x = plan.jit(), jnp.ones((64, 32))
    for derivative in (
        lambda: jax.grad(lambda x: step(x).sum())(x),
        lambda: jax.jvp(step, (x,), (x,)),
        lambda: jax.jit(jax.grad(lambda x: step(x).sum()))(x),
    ):
        with pytest.raises(PlanError, match="plan the function that computes the gradient"):
            derivative()
    np.testing.assert_allclose(jax.jit(step)(x), np.tanh(x), rtol=1e-6)


def test_vmap_of_a_planned_program_is_refused() -> None:
    plan = toast.plan(jnp.tanh, f32(64, 32), mesh="d=8", hardware="tpu-v5e")
    many = jnp.ones((3, 64, 32))
    for lowering in ("xla", "local"):
        step = plan.jit(lowering=lowering)
        for batched in (jax.vmap(step), jax.jit(jax.vmap(step)), jax.vmap(jax.jit(step))):
            with pytest.raises(PlanError, match="plan the function that vmap returns"):
                batched(many)


def test_nan_in_both_is_named() -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        row = jnp.arange(x.shape[0])[:, None]
        return x / (x * 0.0) * 0.0, jnp.where(row == 3, jnp.nan, x), x

    plan = toast.plan(function, f32(64, 32), mesh="d=8", hardware="tpu-v5e")
    found = plan.verify()
    assert [output.equal for output in found.outputs] == [True] * 3
    assert [output.proves for output in found.outputs] == [False, True, True]
    assert [output.nan for output in found.outputs] == [1.0, 1 / 64, 0.0]
    console = rich.console.Console(width=120, record=True, file=io.StringIO())
    console.print(report.verification_table(plan, found))
    text = console.export_text()
    assert "all NaN: inconclusive" in text
    assert "yes, 1.6% NaN in both" in text
    assert "3 of 3 outputs equal, 1 of them all NaN and inconclusive" in text
    assert (found.equal, found.inconclusive) == (True, ("result[0]",))
    assert found.not_finite == {"result[0]": 1.0, "result[1]": 1 / 64}


def test_what_is_not_finite_anywhere_is_not_said_to_be_equal() -> None:
    """Neither NaN nor infinity can be told from the results of another program that has them."""
    for nothing in (jnp.nan, jnp.inf):
        plan = toast.plan(lambda x, n=nothing: x * n, f32(64, 32), mesh="d=8", hardware="tpu-v5e")
        found = plan.verify()
        assert [output.equal for output in found.outputs] == [True]
        assert not found.equal
        what = "NaN" if np.isnan(nothing) else "NaN or infinite"
        assert str(found) == f"1 of 1 outputs equal, 1 of them all {what} and inconclusive"


def test_inputs_are_smaller_where_results_would_overflow() -> None:
    def deep(x: jax.Array, w: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (x + x @ w, None), x, w)
        return x - 2 * x.mean()

    plan = toast.plan(deep, f32(64, 64), f32(64, 64, 64), mesh="d=8", hardware="tpu-v5e")
    run = UnshardedRun.of(plan.analysis.program)
    assert all(np.isfinite(array).all() for array in run.expected)
    assert max(float(array.max()) for array in run.arguments) < 0.11 / 4
    assert (plan.verify().equal, plan.verify().not_finite) == (True, {})
    # Inputs of programs without NaN stay as they were.
    small = toast.plan(jnp.tanh, f32(64, 64), mesh="d=8", hardware="tpu-v5e").analysis.program
    assert UnshardedRun.of(small).arguments[0].max() > 0.1


def test_results_of_a_step_are_not_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        return {"w": state["w"] * 2, "key": state["key"]}, state["w"].sum() + x

    state = {"w": jnp.ones((64, 32)), "key": jnp.zeros((2,), jnp.uint32)}
    plan = toast.plan(step, state, jnp.float32(0), donate=0, mesh="d=8", hardware="tpu-v5e")
    run = plan.jit()
    moved: list[tuple[int, ...]] = []
    place = jax.device_put

    def recorded(arrays: Any, *rest: Any) -> Any:
        moved.extend(map(np.shape, arrays))
        return place(arrays, *rest)

    monkeypatch.setattr(jax, "device_put", recorded)
    state, _ = run(state, np.float32(1))
    assert sorted(moved) == [(), (2,), (64, 32)]
    moved.clear()
    state, total = run(state, np.float32(1))
    assert moved == [()]
    assert float(total) == 2.0 * 64 * 32 + 1
    with pytest.raises(PlanError, match=r"argument state\['w'\] was planned as f32\[64,32\], got"):
        run({**state, "w": state["w"].astype(jnp.bfloat16)}, np.float32(1))


@pytest.mark.parametrize("platform", [None, "tpu"])
def test_custom_calls_keep_their_computations(platform: str | None) -> None:
    """The order of ``approx_max_k`` is a function; without it, XLA's parser crashed."""
    plan = toast.plan(
        lambda x: jax.lax.approx_max_k(x * 2, 4), f32(64, 64), mesh="d=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": jax.sharding.PartitionSpec("d")}),
        platform=platform,
    )  # fmt: skip
    assert plan.verify().equal
