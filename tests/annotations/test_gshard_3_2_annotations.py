"""GShard 3.2: the annotation API ``replicate`` and ``split``; A.3: ``shard``."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.cli.test_cli import run

MESH = "data=4,model=2"


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def specs(function, *arguments, mesh: str = MESH):
    """The plan's sharding of each annotated value."""
    settings = toast.Settings(budget=0.2)
    plan = toast.plan(function, *arguments, mesh=mesh, hardware="tpu-v5e", settings=settings)
    program = plan.analysis.program
    values = [program.ops[op].results[0] for op in sorted(program.annotations)]
    return plan, [tuple(map(tuple, plan.shardings.of(program, value))) for value in values]


def test_an_annotation_is_the_identity_without_toast() -> None:
    x = jnp.arange(8.0)

    def f(x):
        return (toast.split(x, 0, 4) * toast.replicate(x)).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(f))(x), 2 * x)
    np.testing.assert_array_equal(jax.vmap(lambda r: toast.split(r, 0, "a"))(x[None]), x[None])


def test_annotations_hold_also_for_cotangents() -> None:
    def loss(w, x):
        return (toast.split(x, 0, "data") @ toast.split(w, 1, 2)).sum()

    _, shardings = specs(jax.grad(loss), f32(16, 8), f32(32, 16))
    assert ((), ("model",)) in shardings
    assert shardings.count(((), ("model",))) >= 1


def test_a_device_assignment_is_mapped_to_axes() -> None:
    def f(x):
        return toast.shard(x, np.arange(8).reshape(4, 2).T) * 2

    plan, shardings = specs(f, f32(8, 16))
    assert shardings == [(("model",), ("data",))]
    assert "annotations that hold: shard(" in plan.note
    assert "test_gshard_3_2_annotations.py:" in plan.note


def test_annotations_hold_in_a_scan() -> None:
    def f(x, ws):
        return jax.lax.scan(lambda c, w: (toast.split(jnp.tanh(c @ w), 0, 4), None), x, ws)[0]

    _, shardings = specs(f, f32(16, 8), f32(3, 8, 8))
    assert shardings == [(("data",), ())]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: toast.split(x, 0, "rows"), "no axis rows in mesh data=4,model=2"),
        (lambda x: toast.split(x, 0, 3), "no axes of mesh data=4,model=2 have 3 devices"),
        (lambda x: toast.split(x, 2, "data"), "use a dimension below 2"),
        (lambda x: toast.split(x, 0, 32), "32 parts of dimension 0, which has 16 elements"),
        (lambda x: toast.shard(x, np.zeros((4, 2), int)), "no permutation of devices"),
        (lambda x: toast.shard(x, [[0, 1], [3, 2], [4, 5], [6, 7]]), "no tiling by the axes"),
    ],
)
def test_an_annotation_that_cannot_hold_is_one_line(function, message: str) -> None:
    with pytest.raises(toast.ToastError, match=message) as error:
        specs(function, f32(16, 8))
    assert "\n" not in str(error.value)


def test_an_ambiguous_number_of_parts_names_the_axes() -> None:
    with pytest.raises(toast.ToastError, match="2 parts may be along a or b of mesh a=2,b=2"):
        specs(lambda x: toast.split(x, 0, 2), f32(16, 8), mesh="a=2,b=2")


def test_an_annotation_that_contradicts_a_pin_names_both() -> None:
    with pytest.raises(toast.ToastError, match=r"split\(0, 'data'\) at .* contradicts pin x="):
        toast.plan(
            lambda x: toast.split(x, 0, "data"), f32(16, 8), mesh=MESH, hardware="tpu-v5e",
            constraints=toast.Constraints(pin={"x": "P('model')"}),
        )  # fmt: skip


def test_an_annotation_that_contradicts_the_pin_of_a_result_names_both() -> None:
    with pytest.raises(toast.ToastError, match=r"split\(0, 'data'\) at .* contradicts pin result="):
        toast.plan(
            lambda x: toast.split(x * 2, 0, "data"), f32(16, 8), mesh=MESH, hardware="tpu-v5e",
            constraints=toast.Constraints(pin={"result": "P('model')"}),
        )  # fmt: skip


def test_dispatch_and_combine_of_a_mixture_of_experts_are_all_to_alls() -> None:
    def moe(x, gate, inner, outer):
        x = toast.split(x, 0, "d")
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, toast.replicate(gate)))
        dispatched = toast.split(jnp.einsum("gse,gsm->egsm", gates, x), 0, "d")
        hidden = jax.nn.relu(jnp.einsum("egsm,emh->egsh", dispatched, inner))
        combined = toast.split(jnp.einsum("egsh,ehm->gsem", hidden, outer), 0, "d")
        return jnp.einsum("gsem,gse->gsm", combined, gates)

    # Experts whose weights are larger than the tokens.
    shapes = (8, 16, 32), (32, 8), (8, 32, 512), (8, 512, 32)
    arrays = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    plan, _ = specs(moe, *arrays, mesh="d=8")
    assert [transfer.kind for transfer in plan.transfers] == ["all_to_all", "all_to_all"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("d",))
    expected = np.array(moe(*arrays))
    np.testing.assert_allclose(np.array(plan.jit(mesh)(*arrays)), expected, rtol=1e-4, atol=1e-4)


def scanned(x, ws):
    body = lambda c, w: (toast.split(jnp.tanh(c @ w), 0, 4), None)  # noqa: E731
    return jax.lax.scan(body, toast.split(x, 1, "model"), ws)[0].sum()


SCANNED = f32(16, 8), f32(3, 8, 8)


@pytest.mark.parametrize("stage", ["traced", "lowered", "exported", "text", "locations", "bytes"])
def test_annotations_survive_in_stages_and_files(stage: str, tmp_path) -> None:
    jitted = jax.jit(jax.grad(scanned))
    exported = jax.export.export(jitted)(*SCANNED)
    lowered = jitted.lower(*SCANNED)
    contents = {
        "text": lowered.as_text(), "locations": lowered.as_text(debug_info=True),
        "bytes": exported.mlir_module_serialized,
    }  # fmt: skip
    if stage in contents:
        target = tmp_path / "program.mlir"
        content = contents[stage]
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
        line = "program.mlir:" if stage == "text" else "test_gshard_3_2_annotations.py:"
    else:
        target = {"traced": jitted.trace(*SCANNED), "lowered": lowered, "exported": exported}[stage]
        line = "test_gshard_3_2_annotations.py:"
    plan, shardings = specs(target)
    assert shardings.count((("data",), ())) == 2  # forward and backward
    assert shardings.count(((), ("model",))) == 2
    assert "annotations that hold: split(1, 'model') at " in plan.note
    assert line in plan.note


def test_exported_and_compiled_programs_run_without_toast() -> None:
    inputs = [jnp.ones(shape.shape) for shape in SCANNED]
    expected = scanned(*inputs)
    exported = jax.export.export(jax.jit(scanned), platforms=("cpu", "tpu"))(*SCANNED)
    np.testing.assert_allclose(jax.jit(exported.call)(*inputs), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(scanned)(*inputs), expected, rtol=1e-6)


TEXT = """func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {{
  %0 = stablehlo.composite "toast.annotation" %x {{composite_attributes = {{
    toast_annotation = "{text}"}}, decomposition = @f}} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}}
func.func private @f(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {{ return %x : tensor<8x4xf32> }}
"""


@pytest.mark.parametrize(
    "text",
    [
        "split",
        "[]",
        "{'call': 'f', 'entries': [['data']], 'devices': []}",
        "{'call': 'f', 'entries': [['data'], 0], 'devices': []}",
        "{'call': 'f', 'entries': [2, 1], 'devices': [0, 0]}",
        "{'call': 'f', 'entries': [2, 2], 'devices': [0, 1]}",
        "{'call': 'f', 'entries': [1000000000000, 1], 'devices': [7]}",
        "{'call': 'f\\\\u001b[31m', 'entries': [[], []], 'devices': []}",
        "{'call': 'f', 'entries': [[], []], 'devices': [], 'more': 1}",
        "[" * 20_000,
    ],
)
def test_texts_of_files_that_are_no_annotations(text: str, tmp_path) -> None:
    file = tmp_path / "program.mlir"
    file.write_text(TEXT.format(text=text.replace("'", "\\22")))
    with pytest.raises(
        toast.errors.TargetError, match=r"none of toast\.replicate, split and shard"
    ):
        toast.analyze(file)
    file.write_text(TEXT.format(text="{'call': 'f', 'entries': [['data'], []], 'devices': []}"
                                .replace("'", "\\22")))  # fmt: skip
    assert specs(file)[1] == [(("data",), ())]


def test_random_keys_are_replicated() -> None:
    def noisy(key, x):
        return x + jax.random.normal(toast.replicate(key), x.shape)

    _, shardings = specs(noisy, jax.random.key(0), f32(16, 8))
    assert shardings == [((),)]


@pytest.mark.parametrize("lowering", ["xla", "local"])
def test_annotations_in_regions_that_are_manual_over_some_axes(lowering: str) -> None:
    """Manual over ``data``; ``model`` is automatic, and annotated there."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def step(x, w):
        def body(x, w):
            hidden = toast.split(jax.nn.relu(x @ w), 1, 2)
            return jax.lax.pmean(hidden @ w.T, "data")

        manual = jax.shard_map(
            body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"}
        )
        return manual(toast.replicate(x), w).sum(0)

    def loss(w, x):
        return (step(x, w) ** 2).sum()

    inputs = jax.random.normal(jax.random.key(0), (16, 32)), jnp.ones((8, 16))
    for function in (loss, jax.grad(loss)):
        plan, shardings = specs(function, *inputs)
        assert shardings.count(((), ("model",))) >= 1
        np.testing.assert_allclose(
            plan.jit(mesh, lowering=lowering)(*inputs), jax.jit(function)(*inputs), rtol=1e-4
        )


@pytest.mark.parametrize("lowering", ["xla", "local"])
def test_annotated_programs_run_sharded(lowering: str) -> None:
    """Under ``grad`` and in a scan, with a device assignment in the mesh's order."""

    def loss(w, x):
        def body(c, w):
            return jnp.tanh(toast.split(c, 0, 4) @ toast.split(w, 1, "model")), None

        tiles = np.arange(8).reshape(4, 2)
        return (toast.shard(jax.lax.scan(body, x, w)[0], tiles) ** 2).sum()

    inputs = 0.1 * jax.random.normal(jax.random.key(0), (3, 16, 16)), jnp.ones((8, 16))
    plan, shardings = specs(jax.grad(loss), *inputs)
    assert (("data",), ("model",)) in shardings
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    np.testing.assert_allclose(
        plan.jit(mesh, lowering=lowering)(*inputs), jax.grad(loss)(*inputs), rtol=1e-4, atol=1e-7
    )


def test_a_region_that_takes_the_axis_of_an_annotation_is_named() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def step(x):
        body = lambda x: toast.split(x * 2, 1, "data")  # noqa: E731
        return jax.shard_map(
            body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )(x)

    message = r"split\(1, 'data'\) at .*: the region of shard_map at .* takes axis data"
    with pytest.raises(toast.errors.PinError, match=message) as error:
        specs(step, f32(16, 8))
    assert "\n" not in str(error.value)


def test_annotations_with_contradictory_orders_name_both() -> None:
    def step(x):
        return toast.split(toast.split(x, 0, ("data", "model")) * 2, 0, ("model", "data"))

    message = (
        r"split\(0, \('model', 'data'\)\) at .*: the order of axes .* contradicts "
        r"split\(0, \('data', 'model'\)\) at .*"
    )
    with pytest.raises(toast.errors.PinError, match=message) as error:
        specs(step, f32(16, 8))
    assert "\n" not in str(error.value)


def test_annotations_of_an_annotation_are_a_reshard() -> None:
    """As two sharding constraints of JAX are."""
    plan, shardings = specs(
        lambda x: toast.split(toast.split(x, 0, "data"), 1, "data") * 2, f32(512, 256)
    )
    assert shardings == [(("data",), ()), ((), ("data",))]
    assert [transfer.kind for transfer in plan.transfers] == ["all_to_all"]
    first, second = plan.explain_annotations()
    assert first.call == "split(0, 'data')"
    assert (second.before, second.spec) == ((("data",), ()), ((), ("data",)))
    assert second.moved_by == (1,)
    assert plan.explain_collectives()[0].causes[-1].kind == "pin"
    assert any("split(1, 'data') at " in label for label in plan.steps[0].dimensions)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return toast.split(x, 5, 'data')", "split(5, 'data') at model.py:6: the array has shape"),
        ("return toast.split(x, 0, 32)", "split(0, 32) at model.py:6: 32 parts of dimension 0"),
        ("return toast.split(x, 0, 3)", "split(0, 3) at model.py:6: no "
         "axes of mesh data=4,model=2 have 3 devices; change the mesh"),
        ("return toast.shard(x, [[0, 0], [1, 2]])", "at model.py:6: it is no permutation of devic"),
        ("return toast.shard(x, [0, 1])", "at model.py:6: it has 1 dimensions, and the array has 2"),
        ("return toast.split(x, 0, 'model')", "contradicts pin x=P('data')"),
    ],
)  # fmt: skip
def test_annotations_on_the_command_line(body: str, message: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"model_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"import toast\n\n\n\ndef step(x):\n    {body}\n")
    result = run(
        "plan", f"{name}:step", "--arg", "f32[16,8]", "--mesh", MESH, "--pin", "x=P('data')"
    )
    assert result.exit_code == 2
    assert message.replace("model.py", f"{name}.py") in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_explain_lists_the_annotations_of_a_plan(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "annotated.py").write_text(
        "import toast\n\n\ndef step(x, w):\n    return toast.split(x, 0, 4) @ toast.replicate(w)\n"
    )
    arguments = "annotated:step", "--arg", "f32[4096,512]", "--arg", "f32[512,512]"
    assert run("plan", *arguments, "--mesh", MESH, "--json", "plan.json").exit_code == 0
    result = run("explain", "plan.json", *arguments, "--annotations", "--json", "why.json")
    assert result.exit_code == 0, result.output
    assert "split(0, 4) " in result.stdout
    assert "replicate " in result.stdout
    first, second = json.loads((tmp_path / "why.json").read_text())["explained"]
    assert first["spec"] == [["data"], []]
    assert second["place"].startswith("annotated.py:5")
    for arguments in (("mlp", "--annotations"), ("plan.json", "--annotations", "--conflict", "0")):
        result = run("explain", *arguments)
        assert result.exit_code == 2
