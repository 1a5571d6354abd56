"""Our rule for every op instance against Shardy's own, up to the names of factors."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.helpers import f32
from toast import api
from toast.analysis.rules import solve_rules
from toast.assurance.interchange import annotated, differences, shardy_rules
from toast.models import build
from toast.program import Program


class Justified(NamedTuple):
    """Why our rule for a kind of op is not Shardy's, and the versions of jax for which this holds."""

    reason: str
    since: tuple[int, int] = (0, 10)
    before: tuple[int, int] = (99, 0)


#: Kinds on which we differ on purpose; the rule file says why.
JUSTIFIED = {
    "reshape": Justified("sizes without a common divisor share no factor: nothing divides both", (0, 11)),
    "dynamic_update_slice": Justified("a permutation, as in later versions", before=(0, 11)),
    "pad": Justified("elements that move inside a dimension of the same size, as in later versions", before=(0, 11)),
}  # fmt: skip
#: Those that hold for the jax that is installed.
DELIBERATE = {
    kind for kind, why in JUSTIFIED.items() if why.since <= jax.__version_info__ < why.before
}


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def compare(program: Program) -> int:
    """The number of instances compared; fails on the first that differs and should not."""
    compared, found = differences(program)
    wrong = [d for d in found if d.kind not in DELIBERATE]
    assert not wrong, f"{wrong[0].place}\n ours    {wrong[0].ours}\n Shardy's {wrong[0].shardys}"
    return compared


CASES: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "take rows": (lambda x, i: x[i], (f32(64, 32), i32(16, 8))),
    "take columns": (lambda x, i: x[:, i], (f32(64, 32), i32(16))),
    "take along": (lambda x, i: jnp.take_along_axis(x, i, axis=1), (f32(64, 32), i32(64, 4))),
    "gather windows": (
        lambda x, i: jax.vmap(lambda j: lax.dynamic_slice(x, (j, 0), (8, 32)))(i),
        (f32(64, 32), i32(16)),
    ),
    "scatter add": (lambda x, i, u: x.at[i].add(u), (f32(64, 32), i32(16, 8), f32(16, 8, 32))),
    "scatter max": (lambda x, i, u: x.at[i].max(u), (f32(64, 32), i32(16), f32(16, 32))),
    "scatter set": (lambda x, i, u: x.at[i].set(u), (f32(64, 32), i32(16), f32(16, 32))),
    "batched scatter": (
        lambda x, i, u: jax.vmap(lambda a, b, c: a.at[b].add(c))(x, i, u),
        (f32(8, 64, 32), i32(8, 4), f32(8, 4, 32)),
    ),
    "segment sum": (lambda x, i: jax.ops.segment_sum(x, i, 64), (f32(128, 32), i32(128))),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (8, 32)), (f32(64, 32), i32())),
    "dynamic update": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        (f32(64, 32), f32(8, 32), i32()),
    ),
    "slice": (lambda x: x[::2, 3:9], (f32(64, 32),)),
    "pad": (lambda x: jnp.pad(x, ((1, 1), (0, 0))), (f32(64, 32),)),
    "reverse": (lambda x: x[::-1], (f32(64, 32),)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y]), (f32(4, 8), f32(6, 8))),
    "concatenate slices": (
        lambda x, y: jnp.concatenate([x[2:6], y[:, :8][:2]]), (f32(8, 8), f32(6, 16)),
    ),
    "roll": (lambda x: jnp.roll(x, 2, axis=0), (f32(8, 4),)),
    "wrap": (lambda x: jnp.concatenate([x[-2:], x, x[:2]]), (f32(8, 4),)),
    "arg max": (lambda x: jnp.argmax(x, axis=1), (f32(64, 32),)),
    "softmax": (lambda x: jax.nn.softmax(x), (f32(64, 32),)),
    "clip": (lambda x: jnp.clip(x, 0.0, 1.0), (f32(4, 8),)),
    "where": (lambda x: jnp.where(x > 0, x, -x), (f32(4, 8),)),
    "sort": (lambda x: jnp.sort(x, axis=1), (f32(64, 32),)),
    "sort pairs": (lambda x: jnp.argsort(x, axis=0), (f32(64, 32),)),
    "pad and cut": (lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), (f32(64, 32),)),
    "convolution": (lambda x, k: convolve(x, k), (f32(8, 16, 32, 32), f32(64, 16, 3, 3))),
    "strided convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (2, 2), "SAME"),
        (f32(8, 16, 32, 32), f32(64, 16, 3, 3)),
    ),
    "gradient of a convolution": (
        jax.grad(lambda k, x: lax.conv_general_dilated(x, k, (2, 2), "SAME").sum()),
        (f32(64, 16, 3, 3), f32(8, 16, 32, 32)),
    ),
    "convolution of a large window": (
        lambda x, k: lax.conv_general_dilated(x, k, (8, 8), "VALID"),
        (f32(8, 16, 32, 32), f32(64, 16, 8, 8)),
    ),
    "convolution of groups": (
        lambda x, k: convolve(x, k, feature_group_count=4), (f32(8, 16, 32, 32), f32(64, 4, 3, 3)),
    ),
    "fft": (lambda x: jnp.fft.fft(x), (f32(4, 8),)),
    "fft of matrices": (lambda x: jnp.fft.fft2(x), (f32(4, 8, 16),)),
    "cumulative sum": (lambda x: jnp.cumsum(x, axis=1), (f32(64, 32),)),
    "max pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (f32(8, 32, 32, 16),),
    ),
    "gradient of max pool": (
        jax.grad(
            lambda x: lax.reduce_window(
                x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
            ).sum()
        ),
        (f32(8, 32, 32, 16),),
    ),
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (f32(4, 8, 8),)),
    "outer": (lambda x, y: jnp.outer(x, y), (f32(4), f32(8))),
    "attention": (
        lambda q, k: jnp.einsum("bshd,bthd->bhst", q, k), (f32(2, 16, 4, 8), f32(2, 24, 4, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ops_of_small_functions(case: str) -> None:
    function, shapes = CASES[case]
    assert compare(api.program_of(function, *shapes)) >= 1


@pytest.mark.parametrize(("left", "shape"), [("true", "4x8x6"), ("false", "4x6x8")])
def test_triangular_solve(left: str, shape: str, tmp_path: pathlib.Path) -> None:
    types = f"tensor<4x8x8xf32>, tensor<{shape}xf32>"
    (tmp_path / "solve.mlir").write_text(
        f"func.func public @main(%a: tensor<4x8x8xf32>, %b: tensor<{shape}xf32>) "
        f"-> tensor<{shape}xf32> {{\n"
        f'  %0 = "stablehlo.triangular_solve"(%a, %b) <{{left_side = {left}, lower = true, '
        "unit_diagonal = false, transpose_a = #stablehlo<transpose NO_TRANSPOSE>}> : "
        f"({types}) -> tensor<{shape}xf32>\n  return %0 : tensor<{shape}xf32>\n}}\n"
    )
    assert compare(api.program_of(tmp_path / "solve.mlir")) == 1


def einsum_of(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> list[str]:
    program = api.program_of(function, *shapes)
    rules = solve_rules(program)
    return [
        rules[op.signature].einsum()
        for op in program.ops
        if program.signatures[op.signature].kind == "convolution"
    ]


def convolve(x: jax.Array, k: jax.Array, **options: Any) -> jax.Array:
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", **options)


def test_convolutions() -> None:
    """Written out."""
    assert einsum_of(convolve, f32(8, 16, 32, 32), f32(64, 16, 3, 3)) == [
        "([batch,input,space(0),space(1)],[output,input,window(0),window(1)]) -> "
        "([batch,output,space(0),space(1)]) reduction={input} "
        "need_replication={window(0),window(1)} permutation={space(0),space(1)}"
    ]
    grouped = functools.partial(convolve, feature_group_count=4)
    assert einsum_of(grouped, f32(8, 16, 32, 32), f32(64, 4, 3, 3)) == [
        "([batch,groupinput,space(0),space(1)],[groupoutput,input,window(0),window(1)]) -> "
        "([batch,groupoutput,space(0),space(1)]) reduction={input} "
        "need_replication={window(0),window(1)} permutation={space(0),space(1)}"
    ]
    (depthwise,) = einsum_of(
        functools.partial(convolve, feature_group_count=16), f32(8, 16, 32, 32), f32(16, 1, 3, 3)
    )
    assert depthwise.startswith("([batch,groupinput,space(0),space(1)]")


CALLS = {
    "all_gather": """
  %0:2 = "stablehlo.all_gather"(%a, %b) {all_gather_dim = 1 : i64,
    replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    channel_handle = #stablehlo.channel_handle<handle = 0, type = 0>
  } : (tensor<4x4xf32>, tensor<4x4xf32>) -> (tensor<4x8xf32>, tensor<4x8xf32>)""",
    "all_to_all": """
  %0:2 = "stablehlo.all_to_all"(%a, %b) {split_dimension = 1 : i64, concat_dimension = 0 : i64,
    split_count = 2 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
  } : (tensor<4x4xf32>, tensor<4x4xf32>) -> (tensor<8x2xf32>, tensor<8x2xf32>)""",
    "reduce_scatter": """
  %0 = "stablehlo.reduce_scatter"(%a) ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %1 = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %1 : tensor<f32>
  }) {scatter_dimension = 1 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
    channel_handle = #stablehlo.channel_handle<handle = 0, type = 0>
  } : (tensor<4x4xf32>) -> tensor<4x2xf32>""",
    "Qr": """
  %0:2 = stablehlo.custom_call @Qr(%a)
    : (tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4xf32>)""",
    "householder": """
  %0 = stablehlo.custom_call @ProductOfElementaryHouseholderReflectors(%c, %a)
    : (tensor<4x5x6xf32>, tensor<4x4xf32>) -> tensor<4x5x6xf32>""",
    "state of random numbers": """
  %c0 = stablehlo.constant dense<[1, 2]> : tensor<2xui32>
  %1 = stablehlo.custom_call @X64Combine(%c0, %c0)
    : (tensor<2xui32>, tensor<2xui32>) -> tensor<2xui64>
  %0:2 = "stablehlo.rng_bit_generator"(%1) <{rng_algorithm = #stablehlo<rng_algorithm DEFAULT>}>
    : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4x4xui32>)""",
    "Eigh": """
  %0:2 = stablehlo.custom_call @Eigh(%a)
    : (tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4xf32>)""",
    "CompactWyHelper": """
  %0 = stablehlo.custom_call @CompactWyHelper(%a) : (tensor<4x4xf32>) -> tensor<4x4xf32>""",
    "ApproxTopK": """
  %c0 = stablehlo.constant dense<0.0> : tensor<f32>
  %0:2 = stablehlo.custom_call @ApproxTopK(%a, %b, %c0, %c0)
    : (tensor<4x4xf32>, tensor<4x4xf32>, tensor<f32>, tensor<f32>) -> (tensor<4x2xf32>, tensor<4x2xf32>)""",
    "mhlo.topk": """
  %0:2 = stablehlo.custom_call @mhlo.topk(%a)
    : (tensor<4x4xf32>) -> (tensor<4x2xf32>, tensor<4x2xi32>)""",
}


@pytest.mark.parametrize("call", CALLS)
def test_collectives_and_calls(call: str, tmp_path: pathlib.Path) -> None:
    """Ops of Shardy's own tests that JAX writes on other machines."""
    results = CALLS[call].rpartition("-> ")[2].strip("()")
    names = ", ".join(f"%0#{i}" for i in range(results.count("tensor")))
    (tmp_path / "call.mlir").write_text(
        "func.func public @main(%a: tensor<4x4xf32>, %b: tensor<4x4xf32>, "
        f"%c: tensor<4x5x6xf32>) -> ({results}) {{{CALLS[call]}\n  return {names} : {results}\n}}\n"
    )
    assert compare(api.program_of(tmp_path / "call.mlir")) >= 1


def test_every_op_of_the_transformer() -> None:
    assert compare(api.program_of(build("t2b", layers=1))) > 600


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_dot_general(data: st.DataObject) -> None:
    batch, contract, free_l, free_r = (
        data.draw(st.lists(st.sampled_from([2, 3, 5, 7]), max_size=2)) for _ in range(4)
    )
    lhs = data.draw(st.permutations([*((("b", i), s) for i, s in enumerate(batch)),
                                     *((("k", i), s) for i, s in enumerate(contract)),
                                     *((("l", i), s) for i, s in enumerate(free_l))]))  # fmt: skip
    rhs = data.draw(st.permutations([*((("b", i), s) for i, s in enumerate(batch)),
                                     *((("k", i), s) for i, s in enumerate(contract)),
                                     *((("r", i), s) for i, s in enumerate(free_r))]))  # fmt: skip

    def places(side: list[Any], role: str, count: int) -> tuple[int, ...]:
        names = [name for name, _ in side]
        return tuple(names.index((role, i)) for i in range(count))

    numbers = (
        (places(lhs, "k", len(contract)), places(rhs, "k", len(contract))),
        (places(lhs, "b", len(batch)), places(rhs, "b", len(batch))),
    )
    shapes = f32(*(s for _, s in lhs)), f32(*(s for _, s in rhs))
    assert compare(api.program_of(lambda x, y: lax.dot_general(x, y, numbers), *shapes)) >= 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_reshapes_that_divide(shape: list[int], data: st.DataObject) -> None:
    """Merging and splitting dimensions, where one side always divides the other."""
    total = 1
    for size in shape:
        total *= size
    target: list[int] = []
    left = total
    while left > 1:
        target.append(data.draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
        left //= target[-1]
    program = api.program_of(lambda x: lax.reshape(x, tuple(target)), f32(*shape))
    compare(program)


def test_annotated_modules_hold_our_rules(tmp_path: pathlib.Path) -> None:
    program = api.program_of(build("t2b-tiny", layers=1))
    text, count = annotated(program)
    assert text.count("sdy.sharding_rule") == count > 300
    path = tmp_path / "rules.mlir"
    path.write_text(text)
    again = api.program_of(path)
    assert again.ops == program.ops
    # Shardy keeps the rules that it finds.
    assert len(shardy_rules(again)) >= count


@pytest.mark.parametrize("groups", [{"feature_group_count": 16}, {"batch_group_count": 8}])
def test_groups_of_one_element_can_be_written(groups: dict[str, int]) -> None:
    """Shardy refuses a factor of size 1 beside others in one dimension."""
    kernel = f32(16, 1 if "feature_group_count" in groups else 16, 3, 3)
    program = api.program_of(functools.partial(convolve, **groups), f32(8, 16, 32, 32), kernel)
    text, count = annotated(program)
    assert count == text.count("sdy.sharding_rule") >= 1


def test_users_rules_for_custom_calls_reach_shardy(tmp_path: pathlib.Path) -> None:
    (tmp_path / "program.mlir").write_text(
        "func.func public @main(%a: tensor<64x32xf32>) -> tensor<64x32xf32> {\n"
        "  %0 = stablehlo.custom_call @mine(%a) : (tensor<64x32xf32>) -> tensor<64x32xf32>\n"
        "  return %0 : tensor<64x32xf32>\n}\n"
    )
    (tmp_path / "mine.lp").write_text(
        'custom_call_rule("mine").\n'
        "%! mine(Op): a call of mine.\n"
        'mine(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"mine").\n'
        "factor(Op,D,T,D)       :- mine(Op), tensor_dim(Op,T,D,_).\n"
        "need_replication(Op,1) :- mine(Op).\n"
        "partitioned(Op)        :- mine(Op).\n"
    )
    program = api.program_of(tmp_path / "program.mlir")
    assert annotated(program)[1] == 0
    text, count = annotated(program, [tmp_path / "mine.lp"])
    assert count == 1
    assert "([i, j])->([i, j]) {i=64, j=32} need_replication={j}, custom>" in text
