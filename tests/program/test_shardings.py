"""Shardings made by hand, on programs of every kind that can be applied."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import f32, mlp
from toast.apply import (
    Runnable,
    annotate,
    collectives_in,
    in_shardings,
    out_shardings,
    verify,
)
from toast.apply.verify import check_output
from toast.errors import PlanError
from toast.frontend import stablehlo
from toast.frontend.jax import from_function
from toast.hardware import Mesh
from toast.program import Program, Shardings, Spec

ROWS: Spec = (("d",), ())
COLUMNS: Spec = ((), ("d",))
WHOLE: Spec = ((), ())


def by_size(program: Program, axes: Mapping[int, str]) -> dict[int, Spec]:
    """Every dimension of a size that ``axes`` has, sharded by its axis."""
    return {
        v: tuple((axes[n],) if n in axes else () for n in value.type.shape)
        for v, value in enumerate(program.values)
    }


def everywhere(program: Program, spec: Spec, mesh: str = "d=8") -> Shardings:
    """All values of rank 2, and the results, sharded alike."""
    ranked = [v for v, value in enumerate(program.values) if len(value.type.shape) == 2]
    return Shardings(Mesh.parse(mesh), dict.fromkeys(ranked, spec), {}, (spec,))


def from_text(tmp_path: pathlib.Path, text: str) -> Program:
    path = tmp_path / "program.mlir"
    path.write_text(text)
    return stablehlo.from_file(path)


def test_megatron_is_one_all_reduce() -> None:
    program = from_function(mlp, f32(64, 32), f32(32, 48), f32(48, 16))
    shardings = Shardings(Mesh.parse("d=2,m=4"), by_size(program, {48: "m"}), {}, (WHOLE,))
    found = verify(program, shardings)
    assert found.equal
    assert found.collectives == {"all_reduce": 1}


def test_fsdp_gathers_each_weight_at_its_use() -> None:
    program = from_function(mlp, f32(64, 32), f32(32, 48), f32(48, 16))
    values = by_size(program, {64: "d"})
    for weight in program.argument_values[1:]:
        values[weight] = ROWS
    products = [op for op in range(len(program.ops)) if program.kind(op) == "dot_general"]
    uses = {(op, 1): WHOLE for op in products}
    found = verify(program, Shardings(Mesh.parse("d=8"), values, uses, (ROWS,)))
    assert found.equal
    assert found.collectives == {"all_gather": 2}


def test_one_op_sees_a_value_in_two_ways() -> None:
    program = from_function(lambda x: x * x, f32(64, 64))
    (product,) = [op for op in range(len(program.ops)) if program.kind(op) == "multiply"]
    values: dict[int, Spec] = {0: ROWS, program.ops[product].results[0]: COLUMNS}
    uses = {(product, 0): COLUMNS, (product, 1): COLUMNS}
    shardings = Shardings(Mesh.parse("d=8"), values, uses, (COLUMNS,))
    assert str(annotate(program, shardings)).count("sdy.sharding_constraint %arg0") == 1
    assert verify(program, shardings).collectives == {"all_to_all": 1}


def test_donated_buffers_are_reused() -> None:
    program = from_function(lambda a, b: a + b, f32(64, 32), f32(64, 32), donate=(0,))
    runnable = Runnable(program, everywhere(program, ROWS))
    sharding = jax.sharding.NamedSharding(runnable.mesh, jax.sharding.PartitionSpec("d"))
    a, b = (jax.device_put(jnp.ones((64, 32)), sharding) for _ in range(2))
    runnable(a, b)
    assert a.is_deleted()
    assert not b.is_deleted()


def test_random_keys_are_arguments_and_results() -> None:
    def noisy(key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.random.uniform(key, x.shape) + x, jax.random.split(key)

    key, x = jax.random.key(3), jnp.ones((64, 8))
    program = from_function(noisy, key, x)
    values = {program.argument_values[1]: ROWS}
    shardings = Shardings(Mesh.parse("d=8"), values, {}, (ROWS, WHOLE))
    actual, keys = Runnable(program, shardings)(key, x)
    expected, expected_keys = noisy(key, x)
    np.testing.assert_allclose(actual, expected)
    assert keys.dtype == key.dtype
    assert (jax.random.key_data(keys) == jax.random.key_data(expected_keys)).all()
    # A key has no dimension for its words: so have its specs.
    P = jax.sharding.PartitionSpec
    assert in_shardings(program, shardings) == (P(), P("d", None))
    assert out_shardings(program, shardings) == (P("d", None), P(None))


def test_files_keep_their_64_bits(tmp_path: pathlib.Path) -> None:
    program = from_text(
        tmp_path,
        """func.func public @main(%x: tensor<8x4xf64>, %i: tensor<8xi64>)
             -> (tensor<8x4xf64>, tensor<8xi64>) {
          %0 = stablehlo.add %x, %x : tensor<8x4xf64>
          %1 = stablehlo.add %i, %i : tensor<8xi64>
          return %0, %1 : tensor<8x4xf64>, tensor<8xi64>
        }""",
    )
    shardings = Shardings(Mesh.parse("d=8"), {0: ROWS}, {}, (ROWS, ((),)))
    assert verify(program, shardings).equal
    x, i = np.full((8, 4), 1 / 3), np.full(8, 2**40)
    twice_x, twice_i = Runnable(program, shardings)(x, i)
    np.testing.assert_array_equal(twice_x, 2 * x, strict=True)
    np.testing.assert_array_equal(twice_i, 2 * i, strict=True)


def test_the_entry_may_have_any_name(tmp_path: pathlib.Path) -> None:
    program = from_text(
        tmp_path,
        "func.func public @step(%a: tensor<8x4xf32>) -> tensor<8x4xf32> "
        "{ return %a : tensor<8x4xf32> }",
    )
    shardings = everywhere(program, ROWS)
    assert verify(program, shardings).equal
    assert "@step" in str(annotate(program, shardings))


#: Shardings on every kind of op, in regions too, for a mesh that the plan replaces.
SHARDED = """module {
  sdy.mesh @old = <["q"=2, "r"=4]>
  func.func public @main(%a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@old, [{"q"}, {}]>})
      -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@old, [{}, {"q"}]>}) {
    sdy.sharding_group %a group_id=0 : tensor<8x4xf32>
    %0 = stablehlo.add %a, %a {sdy.sharding = #sdy.sharding_per_value<[<@old, [{"q"}, {}]>]>} : tensor<8x4xf32>
    %1 = sdy.sharding_constraint %0 <@old, [{"r"}, {}]> : tensor<8x4xf32>
    %2 = sdy.reshard %1 <@old, [{"q"}, {}]> : tensor<8x4xf32>
    %z = stablehlo.constant dense<0> : tensor<i32>
    %n = stablehlo.constant dense<3> : tensor<i32>
    %o = stablehlo.constant dense<1> : tensor<i32>
    %3:2 = stablehlo.while(%i = %z, %x = %2) : tensor<i32>, tensor<8x4xf32>
        attributes {sdy.sharding = #sdy.sharding_per_value<[<@old, []>, <@old, [{"q"}, {}]>]>}
      cond {
        %p = stablehlo.compare LT, %i, %n {sdy.sharding = #sdy.sharding_per_value<[<@old, []>]>} : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      } do {
        %j = stablehlo.add %i, %o : tensor<i32>
        %y = stablehlo.add %x, %x {sdy.sharding = #sdy.sharding_per_value<[<@old, [{"q"}, {}]>]>} : tensor<8x4xf32>
        stablehlo.return %j, %y : tensor<i32>, tensor<8x4xf32>
      }
    return %3#1 : tensor<8x4xf32>
  }
}"""


def test_shardings_of_the_input_are_replaced(tmp_path: pathlib.Path) -> None:
    program = from_text(tmp_path, SHARDED)
    shardings = everywhere(program, ROWS)
    text = str(annotate(program, shardings))
    assert "@old" not in text
    assert "sdy.sharding_group" not in text
    assert "sdy.reshard" not in text
    found = verify(program, shardings)
    assert found.equal
    assert found.collectives == {}


def test_gspmd_shardings_do_not_turn_shardy_off(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = from_text(
        tmp_path,
        """func.func public @main(%a: tensor<8x4xf32> {mhlo.sharding = "{devices=[2,1]<=[2]}"})
             -> tensor<8x4xf32> {
          %0 = stablehlo.custom_call @Sharding(%a) {mhlo.sharding = "{devices=[2,1]<=[2]}"}
             : (tensor<8x4xf32>) -> tensor<8x4xf32>
          return %0 : tensor<8x4xf32>
        }""",
    )
    shardings = everywhere(program, ROWS)
    assert "mhlo.sharding" not in str(annotate(program, shardings))
    assert verify(program, shardings).equal
    assert "Disabling Shardy" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("values", "uses", "results", "message"),
    [
        ({}, {}, (), "mlp has 1 results, but the plan shards 0"),
        ({999: WHOLE}, {}, (WHOLE,), "mlp has no value 999 to shard"),
        ({}, {(3, 2): WHOLE}, (WHOLE,), "mlp has no operand 2 of op 3 to shard"),
        ({}, {}, (((), ("d",)),), r"value \d+ .* as a result: 8 shards along d do not divide 12"),
        ({}, {(3, 0): (("d", "d"), ())}, (WHOLE,), "as operand 0 of dot_general: axis d shards"),
    ],
)
def test_shardings_of_another_program(values: Any, uses: Any, results: Any, message: str) -> None:
    program = from_function(mlp, f32(64, 32), f32(32, 48), f32(48, 12))
    with pytest.raises(PlanError, match=message):
        annotate(program, Shardings(Mesh.parse("d=8"), values, uses, results))


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (np.ones((3, 3), np.float32), r"float32\[3, 3\]"),
        (np.ones((64, 32), np.int32), r"int32\[64, 32\]"),
    ],
)
def test_arguments_other_than_planned(x: Any, got: str) -> None:
    program = from_function(mlp, f32(64, 32), f32(32, 48), f32(48, 16))
    runnable = Runnable(program, Shardings(Mesh.parse("d=8"), {}, {}, (WHOLE,)))
    message = rf"mlp: argument x was planned as f32\[64,32\], got {got}; pass the planned type"
    with pytest.raises(PlanError, match=message):
        runnable(x, np.ones((32, 48), np.float32), np.ones((48, 16), np.float32))


def test_unequal_outputs_are_found(tmp_path: pathlib.Path) -> None:
    """Each device draws numbers of its own: the sharded program is another one."""
    program = from_text(
        tmp_path,
        """func.func public @main(%x: tensor<8x512xf32>) -> tensor<8x512xf32> {
          %a = stablehlo.constant dense<0.0> : tensor<f32>
          %b = stablehlo.constant dense<1.0> : tensor<f32>
          %s = stablehlo.constant dense<[8, 512]> : tensor<2xi64>
          %0 = stablehlo.rng %a, %b, %s, distribution = UNIFORM
             : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> tensor<8x512xf32>
          %1 = stablehlo.add %0, %x : tensor<8x512xf32>
          return %1 : tensor<8x512xf32>
        }""",
    )
    assert not verify(program, everywhere(program, ROWS)).equal


@pytest.mark.parametrize(
    ("actual", "expected", "equal"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([np.inf, 1.0], [np.inf, 1.0], True),
        ([np.nan, 1.0], [np.nan, 1.0], True),
        ([np.inf, 1.0], [-np.inf, 1.0], False),
        ([np.nan, 1.0], [np.inf, 1.0], False),
        ([np.nan, 1.0], [1.0, 1.0], False),
    ],
)
def test_what_is_equal(actual: list[float], expected: list[float], equal: bool) -> None:
    assert check_output("x", np.array(actual), np.array(expected), 1e-5).equal == equal


def test_collectives_are_counted_once() -> None:
    text = """
%fused { %all-gather.9 = f32[8] all-gather(%p), channel_id=1, dimensions={0}
}
  %s = (f32[2], f32[8]) all-gather-start(%x), channel_id=1, dimensions={0}
  %d = f32[8] all-gather-done(%s)
  %g = f32[8] all-gather(%y), channel_id=2, dimensions={0}
  ROOT %r = f32[8] all-reduce(%g), to_apply=%add
  %q = f32[8] all-reduce(%g), to_apply=%add
  %m = f32[8] fusion(%all-to-all), calls=%f
"""
    assert collectives_in(text) == {"all_gather": 2, "all_reduce": 2}
