"""Our rule for every op instance against Shardy's own, up to the names of factors."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.helpers import f32
from toast import api
from toast.analysis.rules import SignatureRule, solve_rules
from toast.frontend import Program, mlir
from toast.models import build

#: Kinds on which we differ on purpose; the rule file says why.
DELIBERATE = {
    "reshape": "a minor factor would leave strided pieces; sizes without a common divisor",
    "convolution": "spatial dimensions stay whole: XLA shards them wrongly beside features",
    "custom_call": "matrices behind a batch stay whole in place, where Shardy drops their dimension",
    "rng_bit_generator": "numbers must not depend on the mesh",
    "batch_norm_training": "partial variances do not add up",
    "batch_norm_grad": "partial variances do not add up",
}

Shape = tuple[tuple[tuple[str, ...], ...], ...]


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def shardy_rules(program: Program) -> Iterator[tuple[int, str]]:
    """Shardy's rule of each op that it has one for, as text."""
    module = mlir.clone(program.source.module)
    mlir.run_passes(module, "builtin.module(func.func(sdy-populate-op-sharding-rules))")
    function = mlir.main_function(module, "module")
    first = len(program.arguments)
    for number, op in enumerate(function.operation.regions[0].blocks[0].operations):
        attributes = op.operation.attributes
        if "sdy.sharding_rule" in attributes:
            yield first + number, str(attributes["sdy.sharding_rule"])


def parse(text: str) -> tuple[Shape, Shape, dict[str, int], dict[str, set[str]]]:
    """``<([i, jk])->([i]) {i=4, j=2, k=3} reduction={j}>`` as data."""
    found = re.fullmatch(
        r"#sdy.op_sharding_rule<\((.*)\)->\((.*?)\)(?: \{(.*?)\})?((?: \w+=\{[^}]*\})*)(?:, custom)?>",
        text,
    )
    assert found, text

    def side(part: str) -> Shape:
        tensors = re.findall(r"\[([^\]]*)\]", part)
        return tuple(
            tuple(tuple(re.findall(r"[a-z](?:_\d+)?", dim)) for dim in tensor.split(", ") if dim)
            for tensor in tensors
        )

    sizes = {
        name: int(size)
        for name, size in (pair.split("=") for pair in (found[3] or "").split(", ") if pair)
    }
    kinds = {
        kind: set(names.split(", ")) for kind, names in re.findall(r" (\w+)=\{([^}]*)\}", found[4])
    }
    return side(found[1]), side(found[2]), sizes, kinds


def shardys_shape(text: str) -> Any:
    operands, results, sizes, kinds = parse(text)
    return canonical(operands + results, sizes, kinds)


def our_shape(rule: SignatureRule) -> Any:
    labels = [f"f{i}" for i in range(len(rule.factors))]
    tensors = tuple(
        tuple(tuple(labels[f] for f in dim) for dim in tensor)
        for tensor in rule.operands + rule.results
    )
    sizes = {labels[i]: f.size for i, f in enumerate(rule.factors)}
    kinds = {
        "reduction": {labels[i] for i, f in enumerate(rule.factors) if f.combiner},
        "need_replication": {labels[i] for i, f in enumerate(rule.factors) if f.need_replication},
        "permutation": {labels[i] for i, f in enumerate(rule.factors) if f.permutation},
    }
    return canonical(tensors, sizes, kinds)


def canonical(tensors: Shape, sizes: dict[str, int], kinds: dict[str, set[str]]) -> Any:
    """Factors numbered by first appearance; those of size 1 left out."""
    number: dict[str, int] = {}
    kept = tuple(
        tuple(
            tuple(number.setdefault(f, len(number)) for f in dim if sizes.get(f, 1) > 1)
            for dim in tensor
        )
        for tensor in tensors
    )
    return (
        kept,
        {number[f]: sizes[f] for f in number},
        {
            kind: {number[f] for f in kinds.get(kind, ()) if f in number}
            for kind in ("reduction", "need_replication", "permutation")
        },
    )


def compare(program: Program) -> int:
    """The number of instances compared; fails on the first that differs."""
    rules = solve_rules(program)
    compared = 0
    for op, text in shardy_rules(program):
        kind = program.kind(op)
        rule = rules[program.ops[op].signature]
        if rule.missing or kind in DELIBERATE:
            continue
        assert our_shape(rule) == shardys_shape(text), (
            f"{program.describe(op)}\n ours    {rule.einsum()}\n Shardy's {text}"
        )
        compared += 1
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
    "arg max": (lambda x: jnp.argmax(x, axis=1), (f32(64, 32),)),
    "softmax": (lambda x: jax.nn.softmax(x), (f32(64, 32),)),
    "clip": (lambda x: jnp.clip(x, 0.0, 1.0), (f32(4, 8),)),
    "where": (lambda x: jnp.where(x > 0, x, -x), (f32(4, 8),)),
    "sort": (lambda x: jnp.sort(x, axis=1), (f32(64, 32),)),
    "sort pairs": (lambda x: jnp.argsort(x, axis=0), (f32(64, 32),)),
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
    """Where we differ from Shardy: written out."""
    assert einsum_of(convolve, f32(8, 16, 32, 32), f32(64, 16, 3, 3)) == [
        "([batch,input,space(0),space(1)],[output,input,window(0),window(1)]) -> "
        "([batch,output,space(0),space(1)]) reduction={input} "
        "need_replication={space(0),space(1),window(0),window(1)}"
    ]
    grouped = functools.partial(convolve, feature_group_count=4)
    assert einsum_of(grouped, f32(8, 16, 32, 32), f32(64, 4, 3, 3)) == [
        "([batch,groupinput,space(0),space(1)],[groupoutput,input,window(0),window(1)]) -> "
        "([batch,groupoutput,space(0),space(1)]) reduction={input} "
        "need_replication={output,space(0),space(1),input,window(0),window(1)}"
    ]
    (depthwise,) = einsum_of(
        functools.partial(convolve, feature_group_count=16), f32(8, 16, 32, 32), f32(16, 1, 3, 3)
    )
    assert depthwise.startswith("([batch,groupinput,space(0),space(1)]")


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


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
def test_reshapes_agree_on_major_factors(shape: list[int], data: st.DataObject) -> None:
    """Where both name the major-most factor of a dimension, they name the same one."""
    total = 1
    for size in shape:
        total *= size
    target: list[int] = []
    left = total
    while left > 1:
        divisors = [d for d in range(2, left + 1) if left % d == 0]
        target.append(data.draw(st.sampled_from(divisors)))
        left //= target[-1]
    program = api.program_of(lambda x: lax.reshape(x, tuple(target)), f32(*shape))
    rules = solve_rules(program)
    for op, text in shardy_rules(program):
        rule = rules[program.ops[op].signature]
        operands, results, sizes, _ = parse(text)
        theirs = dict(enumerate((operands + results)[0])), dict(enumerate(results[0]))
        for d, stack in enumerate(rule.operands[0]):
            factor = rule.factors[stack[0]]
            if not factor.shardable:
                continue
            major = next(f for f in theirs[0][d] if sizes[f] > 1)
            assert sizes[major] == factor.size or sizes[major] % factor.size == 0
            (mine,) = [e for e, other in enumerate(rule.results[0]) if other[:1] == stack[:1]]
            assert next(f for f in theirs[1][mine] if sizes[f] > 1) == major
