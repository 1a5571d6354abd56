"""JAX functions and StableHLO files become the same programs."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import f32, mlp
from toast import api
from toast.errors import PlanError, TargetError
from toast.frontend import mlir
from toast.models import build
from toast.program import Location, Program

SHAPES = (f32(256, 32), f32(32, 64), f32(64, 16))


def kinds(program: Program) -> list[str]:
    return [program.kind(op) for op in range(len(program.ops))]


def test_arguments_are_named_by_their_paths() -> None:
    def f(params: dict[str, list[jax.Array]], x: jax.Array, *, scale: jax.Array) -> jax.Array:
        return x @ params["layers"][1] * scale + params["layers"][0].sum()

    program = api.program_of(
        f, {"layers": [f32(4), f32(8, 8)]}, f32(2, 8), scale=jax.ShapeDtypeStruct((), jnp.float32)
    )
    assert program.arguments == ("params['layers'][0]", "params['layers'][1]", "x", "scale")
    assert program.results == ("result",)


def test_unused_arguments_stay() -> None:
    program = api.program_of(lambda x, y: x + 1.0, f32(4), f32(8))
    assert program.arguments == ("x", "y")


def test_concrete_arrays_and_abstract_ones_give_one_program() -> None:
    one = api.program_of(mlp, *SHAPES)
    other = api.program_of(mlp, *(jnp.ones(s.shape) for s in SHAPES))
    assert one.ops == other.ops
    assert one.signatures == other.signatures


def test_calls_are_inlined_per_call_site() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2.0

    def f(x: jax.Array) -> jax.Array:
        return inner(inner(x)) + inner(x * 3.0)

    program = api.program_of(f, f32(4, 4))
    assert kinds(program).count("tanh") == 3
    assert "func_call" not in kinds(program)


def test_composites_are_inlined_unless_they_have_rules() -> None:
    @functools.partial(jax.lax.composite, name="mine.double")
    def double(x: jax.Array) -> jax.Array:
        return x + x

    @functools.partial(jax.lax.composite, name="toast.double")
    def opaque(x: jax.Array, *, by: int) -> jax.Array:
        return jax.jit(lambda x: x * by)(x)

    program = api.program_of(lambda x: opaque(double(opaque(x, by=2)), by=3), f32(4, 4))
    assert kinds(program)[1:-1] == ["composite", "add", "composite"]
    attributes = [program.signatures[op.signature].attributes for op in program.ops]
    assert attributes[1] == (("by", 2), ("name", "toast.double"))
    y = api.plan(program, mesh="x=1", hardware="tpu-v5e").jit()(jnp.ones((4, 4)))
    assert float(y[0, 0]) == 12.0


def test_ops_keep_their_source_lines() -> None:
    program = api.program_of(mlp, *SHAPES)
    (first, _) = [op for op, kind in enumerate(kinds(program)) if kind == "dot_general"]
    location = program.location(first)
    assert location.file.endswith("helpers.py")
    assert location.function == "mlp"
    assert location.path.endswith("dot_general")
    assert f"helpers.py:{location.line}" in program.describe(first)


def test_donated_arguments_alias_results() -> None:
    program = api.program_of(lambda a, b: (b * 2.0, a + 1.0), f32(8, 8), f32(4), donate=(0,))
    assert program.aliases == (-1, 0)
    assert program.donated == {0}


def test_a_jitted_function_says_what_it_donates_and_what_is_static() -> None:
    def function(a: jax.Array, *, b: jax.Array, times: int = 2) -> tuple[jax.Array, jax.Array]:
        return a + times, b * times

    jitted = jax.jit(function, donate_argnums=0, donate_argnames="b", static_argnames="times")
    program = api.program_of(jitted, f32(8, 8), b=f32(4), times=3)
    assert program.arguments == ("a", "b")
    assert program.donated == {0, 1}
    jitted = jax.jit(lambda a, b: a + b["c"], donate_argnums=(1,))
    assert api.program_of(jitted, f32(4), {"c": f32(4)}).donated == {1}
    assert api.program_of(jitted, f32(4), {"c": f32(4)}, donate=0).donated == {0, 1} - {1}


def test_dead_ops_are_dropped() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jnp.exp(x) ** 2))(x)

    program = api.program_of(f, f32(64))
    assert "reduce" not in kinds(program)


@pytest.mark.parametrize("form", ["text", "locations", "bytecode", "portable"])
def test_files_in_every_form(form: str, tmp_path: pathlib.Path) -> None:
    lowered = jax.jit(mlp).lower(*SHAPES)
    module = lowered.compiler_ir()
    path = tmp_path / "mlp.mlir"
    if form == "text":
        path.write_text(lowered.as_text())
    elif form == "locations":
        path.write_text(lowered.as_text(debug_info=True))
    elif form == "bytecode":
        path.write_bytes(mlir.bytecode(module))
    else:
        path.write_bytes(mlir.portable_artifact(module))
    program = api.program_of(path)
    assert program.ops == api.program_of(mlp, *SHAPES).ops
    named = form != "text"
    assert program.arguments == (("x", "w1", "w2") if named else ("arg0", "arg1", "arg2"))


def test_exported_functions_can_be_planned(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "exported.mlir"
    path.write_bytes(jax.export.export(jax.jit(mlp))(*SHAPES).mlir_module_serialized)
    assert "dot_general" in kinds(api.program_of(path))


def test_reduction_combiners_are_recognised() -> None:
    program = api.program_of(lambda x: (x.sum(0), x.max(0), x.argmax(0)), f32(8, 8))
    found = {s.attribute("combiner") for s in program.signatures if s.kind == "reduce"}
    assert found == {"add", "maximum", "other"}


def test_zoo_models_lower() -> None:
    for name in ("mlp", "attention", "t2b-tiny"):
        assert api.program_of(build(name)).ops
    shapes = build("t2b").arguments[0]
    assert sum(s.size for s in jax.tree.leaves(shapes)) == 2_506_434_560  # Gemma 2B


BAD = {
    "nothing.mlir": (None, r"nothing.mlir: cannot read: No such file or directory"),
    "empty.mlir": (b"", r"empty.mlir: .*public function"),
    "prose.mlir": (b"hello there", r"prose.mlir:1:1: not StableHLO"),
    "cut.mlir": (b"module {\n  func.func public @main(%a: tensor<4xf32>) -> ", r"cut.mlir:2:\d+"),
    "noise.mlir": (bytes(range(128, 256)), r"noise.mlir: not StableHLO"),
    "cut_bytes.mlir": (b"ML\xefR\x06broken", r"cut_bytes.mlir: ?.*not StableHLO"),
    "dynamic.mlir": (
        b"func.func public @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> }",
        r"dynamic.mlir: argument 0: dynamic shape tensor<\?xf32>",
    ),
    "recursive.mlir": (
        b"func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
        b" %0 = func.call @f(%a) : (tensor<4xf32>) -> tensor<4xf32>\n return %0 : tensor<4xf32> }\n"
        b"func.func private @f(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
        b" %0 = func.call @f(%a) : (tensor<4xf32>) -> tensor<4xf32>\n return %0 : tensor<4xf32> }",
        r"recursive.mlir: function @f is recursive",
    ),
    "bounded.mlir": (
        b"func.func public @main(%a: tensor<?xf32, #stablehlo.bounds<8>>) -> tensor<f32> {\n"
        b' %s = stablehlo.get_dimension_size %a, dim = 0 : (tensor<?xf32, #stablehlo.bounds<8>>) -> tensor<i32>\n'
        b" %f = stablehlo.convert %s : (tensor<i32>) -> tensor<f32>\n return %f : tensor<f32> }",
        r"bounded.mlir: argument 0: dynamic shape .* lower the function with concrete sizes",
    ),
    "quantised.mlir": (
        b"func.func public @main(%a: tensor<8x!quant.uniform<i8:f32, 2.0>>) {\n return }",
        r"quantised.mlir:1:\d+: quantised element type !quant.uniform<i8:f32, 2.0>: jaxlib cannot read "
        "it; export the program with integers and their scales",
    ),
    "sparse.mlir": (
        b"#rows = #sparse_tensor.encoding<{map = (i) -> (i : compressed)}>\n"
        b"func.func public @main(%a: tensor<8xf32, #rows>) {\n return }",
        r"sparse.mlir:1:\d+: sparse type #sparse_tensor.encoding<.*>: jaxlib cannot read it; pass dense "
        "arrays, such as the data and the indices of jax.experimental.sparse.BCOO",
    ),
    "foreign.mlir": (
        b"func.func public @main(%a: tensor<8x!mine.number<3>>) {\n return }",
        r"foreign.mlir:1:\d+: type !mine.number<3> is of no dialect of JAX; export plain types",
    ),
    "encoded.mlir": (
        b'func.func public @main(%a: tensor<8xf32, "rows">) -> tensor<8xf32, "rows"> '
        b'{ return %a : tensor<8xf32, "rows"> }',
        'encoded.mlir: argument 0: tensor<8xf32, "rows"> has an encoding, which says how its elements '
        "are stored; export it as a plain tensor",
    ),
    "empty_region.mlir": (
        b"func.func public @main(%a: tensor<8xf32>, %z: tensor<f32>) -> tensor<f32> {\n"
        b' %0 = "stablehlo.reduce"(%a, %z) <{dimensions = array<i64: 0>}> ({\n'
        b" ^bb0(%x: tensor<f32>, %y: tensor<f32>):\n }) : (tensor<8xf32>, tensor<f32>) -> tensor<f32>\n"
        b" return %0 : tensor<f32> }",
        r"empty_region.mlir:2:\d+: not StableHLO: .* non-empty block",
    ),
    "no_region.mlir": (
        b"func.func public @main(%a: tensor<8xf32>) -> tensor<8xf32> {\n"
        b' %0 = "stablehlo.while"(%a) ({}, {}) : (tensor<8xf32>) -> tensor<8xf32>\n'
        b" return %0 : tensor<8xf32> }",
        r"no_region.mlir:2:\d+: not StableHLO: .* region with 1 blocks",
    ),
    "unlike_branches.mlir": (
        b"func.func public @main(%a: tensor<8xf32>, %p: tensor<i32>) -> tensor<8xf32> {\n"
        b' %0 = "stablehlo.case"(%p) ({ stablehlo.return %p : tensor<i32> },\n'
        b" { stablehlo.return %a : tensor<8xf32> }) : (tensor<i32>) -> tensor<8xf32>\n"
        b" return %0 : tensor<8xf32> }",
        r"unlike_branches.mlir:2:\d+: not StableHLO: .*mismatched return types",
    ),
    "tuple.mlir": (
        b"func.func public @main(%a: tensor<8xf32>) -> tuple<tensor<8xf32>> {\n"
        b' %0 = "stablehlo.tuple"(%a) : (tensor<8xf32>) -> tuple<tensor<8xf32>>\n'
        b" return %0 : tuple<tensor<8xf32>> }",
        r"tuple.mlir:3: result 0 is a tuple; return its elements",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_with_the_reason(name: str, tmp_path: pathlib.Path) -> None:
    data, message = BAD[name]
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(TargetError, match=message) as caught:
        api.program_of(tmp_path / name)
    assert "\n" not in str(caught.value)


def read(text: str, tmp_path: pathlib.Path) -> Program:
    (tmp_path / "program.mlir").write_text(text)
    return api.program_of(tmp_path / "program.mlir")


def test_elements_of_a_tuple_are_what_went_in(tmp_path: pathlib.Path) -> None:
    pair = "tuple<tensor<8x4xf32>, tensor<4x8xf32>>"
    program = read(
        "func.func public @main(%a: tensor<8x4xf32>, %b: tensor<4x8xf32>) -> (tensor<8x8xf32>, tensor<8x4xf32>) {\n"
        f'  %t = "stablehlo.tuple"(%a, %b) : (tensor<8x4xf32>, tensor<4x8xf32>) -> {pair}\n'
        f'  %0 = "stablehlo.get_tuple_element"(%t) <{{index = 0 : i32}}> : ({pair}) -> tensor<8x4xf32>\n'
        f'  %1 = "stablehlo.get_tuple_element"(%t) <{{index = 1 : i32}}> : ({pair}) -> tensor<4x8xf32>\n'
        "  %2 = stablehlo.dot %0, %1 : (tensor<8x4xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>\n"
        f"  %c = stablehlo.custom_call @pair(%2) : (tensor<8x8xf32>) -> {pair}\n"
        f'  %3 = "stablehlo.get_tuple_element"(%c) <{{index = 0 : i32}}> : ({pair}) -> tensor<8x4xf32>\n'
        "  return %2, %3 : tensor<8x8xf32>, tensor<8x4xf32>\n}\n",
        tmp_path,
    )
    assert kinds(program)[2:5] == ["dot", "custom_call", "get_tuple_element"]
    assert program.ops[2].operands == program.argument_values
    assert "custom_call @pair" in program.describe(3)
    # It can be planned and written back: the uses of the elements are uses of what went in.
    assert "stablehlo.tuple" in api.plan(program, mesh="d=4", hardware="tpu-v5e").annotated()


def test_named_computations_stand_in_line(tmp_path: pathlib.Path) -> None:
    program = read(
        "func.func public @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {\n"
        '  %0 = sdy.named_computation<"f">(%a) (%b: tensor<8x4xf32>) {\n'
        "    %1 = stablehlo.tanh %b : tensor<8x4xf32>\n    sdy.return %1 : tensor<8x4xf32>\n"
        "  } : (tensor<8x4xf32>) -> tensor<8x4xf32>\n  return %0 : tensor<8x4xf32>\n}\n",
        tmp_path,
    )
    assert kinds(program) == ["argument", "tanh", "return"]


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (
            jax.jit(jnp.tanh).lower(f32(4)).compile(),
            {},
            "Compiled is not a function; pass the function itself",
        ),
        (jnp.tanh, {"donate": ("x",)}, "donate=('x',): use positions of arguments"),
        (7, {}, "int is not a function; pass the function itself"),
    ],
)
def test_what_is_no_function(target: object, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError) as caught:
        api.program_of(target, f32(4), **options)
    assert str(caught.value).endswith(message)


def test_static_arguments_come_by_name_or_by_position() -> None:
    power = jax.jit(lambda x, n: x**n, static_argnames="n")
    assert api.program_of(power, f32(4), 3).arguments == ("x",)
    assert api.program_of(power, f32(4), n=3).arguments == ("x",)


def test_a_plan_takes_static_arguments_by_position() -> None:
    apply = jax.jit(
        lambda x, sizes, f, w: f(x @ w) * sizes[0], static_argnums=(1, -2), donate_argnums=0
    )
    x, w = np.ones((8, 4), np.float32), np.ones((4, 4), np.float32)
    plan = toast.plan(apply, x, (2, "unused"), jnp.sin, w, mesh="d=4", hardware="tpu-v5e")
    assert plan.analysis.program.arguments == ("x", "w")
    assert plan.analysis.program.donated == {0}
    result = plan.jit()(x, (2, "unused"), jnp.sin, w)
    np.testing.assert_allclose(result, 2 * np.sin(x @ w), rtol=1e-6)
    with pytest.raises(PlanError, match="static leaf 1 of its arguments = 2, got 3"):
        plan.jit()(x, (3, "unused"), jnp.sin, w)


def test_functions_that_do_not_trace() -> None:
    def wrong(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y

    with pytest.raises(TargetError, match=r"wrong: JAX cannot trace it: TypeError: dot_general"):
        api.program_of(wrong, f32(4, 4), f32(5, 5))


def test_ops_of_text_have_its_lines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prog.mlir"
    path.write_text(
        "func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {\n"
        "  %b = stablehlo.tanh %a : tensor<4xf32>\n"
        '  %c = stablehlo.tanh %b : tensor<4xf32> loc("model.py":7:1)\n'
        "  return %c : tensor<4xf32>\n"
        "}\n"
    )
    monkeypatch.chdir(tmp_path)
    program = api.program_of(pathlib.Path("prog.mlir"))
    assert program.location(1) == Location(file="prog.mlir", line=2)
    assert program.location(2) == Location(file="model.py", line=7)
    assert program.describe(1) == "tanh f32[4] at prog.mlir:2"


def test_files_below_the_current_folder_are_shown_as_seen_from_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(Location(file=str(tmp_path / "a" / "b.py"), line=3)) == "a/b.py:3"
    assert str(Location(file=f"{tmp_path}x/b.py", line=3)) == f"{tmp_path}x/b.py:3"
    assert str(Location(file="b.py", line=3, path="dot")) == "b.py:3 dot"
