"""Conditions of loops that use values from outside of the loop, and loops that change nothing."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import f32
from tests.lower.test_lowering import assert_as_predicted
from toast.apply.verify import _reference, random_arguments
from toast.cost import CostModel
from toast.errors import TargetError
from toast.hardware import Mesh, load
from toast.lower import LocalProgram
from toast.plan.shard import lowered_state
from toast.space import Space
from toast.uneven import padded_program

#: The condition uses ``%more`` itself and in a branch, an empty slice of it, and a carried value.
CAPTURED = """
func.func public @main(%x: tensor<ROWSx8xf32>, %limit: tensor<ROWSxf32>) -> tensor<ROWSx8xf32> {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %more = stablehlo.exponential %limit : tensor<ROWSxf32>
  %none = stablehlo.slice %more [2:2] : (tensor<ROWSxf32>) -> tensor<0xf32>
  %r:2 = stablehlo.while(%i = %zero, %y = %x) : tensor<f32>, tensor<ROWSx8xf32>
  cond {
    %sum = stablehlo.reduce(%more init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<ROWSxf32>, tensor<f32>) -> tensor<f32>
    %nothing = stablehlo.reduce(%none init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<0xf32>, tensor<f32>) -> tensor<f32>
    %large = stablehlo.compare GT, %sum, %zero : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %most = "stablehlo.if"(%large) ({
      %m = stablehlo.reduce(%more init: %nothing) applies stablehlo.maximum across dimensions = [0]
        : (tensor<ROWSxf32>, tensor<f32>) -> tensor<f32>
      stablehlo.return %m : tensor<f32>
    }, {
      stablehlo.return %one : tensor<f32>
    }) : (tensor<i1>) -> tensor<f32>
    %end = stablehlo.add %most, %sum : tensor<f32>
    %p = stablehlo.compare LT, %i, %end : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %n = stablehlo.add %i, %one : tensor<f32>
    %b = stablehlo.broadcast_in_dim %more, dims = [0] : (tensor<ROWSxf32>) -> tensor<ROWSx8xf32>
    %u = stablehlo.add %y, %b : tensor<ROWSx8xf32>
    stablehlo.return %n, %u : tensor<f32>, tensor<ROWSx8xf32>
  }
  return %r#1 : tensor<ROWSx8xf32>
}
"""


def captured(folder: pathlib.Path, rows: int) -> Any:
    path = folder / "captured.mlir"
    path.write_text(CAPTURED.replace("ROWS", str(rows)))
    return toast.analyze(path, lowering="local")


def assert_states_run_as_priced(analysis: Any, mesh: str) -> list[LocalProgram]:
    """Lowers the state after each action of the search."""
    model = CostModel(Space(analysis, Mesh.parse(mesh)), load("tpu-v5e"))
    lowered = []
    for action in model.space.actions:
        state = model.space.apply(model.space.initial, action)
        lowered.append(lowered_state(model, state))
        assert_as_predicted(model, state, lowered[-1])
    return lowered


def test_conditions_gather_what_they_capture(tmp_path: pathlib.Path) -> None:
    lowered = assert_states_run_as_priced(captured(tmp_path, 16), "data=4")
    # The condition of a loop without a trip count runs twice.
    assert [local.counts()["all_gather", ("data",), 64.0] for local in lowered] == [2, 0]


def test_conditions_capture_no_padding(tmp_path: pathlib.Path) -> None:
    analysis = captured(tmp_path, 7)
    padded = padded_program(analysis, Mesh.parse("data=4"), 1.0)
    assert padded is not None
    arguments = random_arguments(padded.program, 0)
    results = _reference(padded.program, padded.program.source)(*arguments)
    expected = _reference(analysis.program, analysis.program.source)(*arguments)
    np.testing.assert_allclose(results, expected, rtol=1e-5)


def test_loops_without_values_read_no_arrays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "empty.mlir"
    path.write_text("""
    func.func public @main(%x: tensor<16xi1>) -> tensor<16xi1> {
      "stablehlo.while"() ({
        %p = stablehlo.slice %x [0:1] : (tensor<16xi1>) -> tensor<1xi1>
        %q = stablehlo.reshape %p : (tensor<1xi1>) -> tensor<i1>
        stablehlo.return %q : tensor<i1>
      }, {
        stablehlo.return
      }) : () -> ()
      return %x : tensor<16xi1>
    }
    """)
    with pytest.raises(TargetError, match=r"reads an array \(i1\[16\]\); remove the loop"):
        toast.analyze(path)


def test_loops_that_change_nothing() -> None:
    """Their conditions are false at once."""

    def same(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y.sum() > 1e9, lambda y: y, x * 2)

    def two(x: jax.Array, n: jax.Array) -> Any:
        return jax.lax.while_loop(
            lambda s: (s[0] > 100) & (s[1].sum() > 1e9), lambda s: s, (n, jnp.sin(x))
        )

    assert_states_run_as_priced(toast.analyze(same, f32(16, 32), lowering="local"), "data=4")
    assert_states_run_as_priced(toast.analyze(two, f32(16, 8), f32(), lowering="local"), "data=4")
