"""Rules say which ops are linear, so that partial sums may pass them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import f32
from tests.rules.kernels import call
from toast.analysis.rules import Linearity, SignatureRule, solve_rules
from toast.api import program_of
from toast.errors import RuleError

MOVES, ADDS = Linearity((0,), moves=True), Linearity(adds=True)
INTEGERS, COMPLEX = (jax.ShapeDtypeStruct((8, 4), dtype) for dtype in (jnp.int32, jnp.complex64))
X, HALF = f32(8, 4), jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)

#: Functions of one array, the array, and the kind of an op with how it is linear.
CASES: dict[str, tuple[Callable[[Any], Any], Any, str, Linearity]] = {
    "sum": (lambda x: x + x, X, "add", ADDS),
    "difference": (lambda x: x - x, INTEGERS, "subtract", ADDS),
    "negative": (lambda x: -x, COMPLEX, "negate", ADDS),
    "product": (lambda x: x * x, X, "multiply", Linearity((0, 1), scales=True)),
    "product_of_integers": (lambda x: x * x, INTEGERS, "multiply", Linearity(scales=True)),
    "quotient": (lambda x: x / x, X, "divide", Linearity(scales=True)),
    "quotient_of_integers": (lambda x: jax.lax.div(x, x), INTEGERS, "divide", Linearity()),
    "widened": (lambda x: x.astype("float32"), HALF, "convert", Linearity((0,))),
    "rounded": (lambda x: x.astype("bfloat16"), X, "convert", Linearity((0,), rounds=True)),
    "of_equal_width": (
        lambda x: x.astype("float16"),
        HALF,
        "convert",
        Linearity((0,), rounds=True),
    ),
    "of_integers": (lambda x: x.astype("float32"), INTEGERS, "convert", Linearity()),
    "dot_general": (lambda x: x @ x.T, X, "dot_general", Linearity((0, 1))),
    "dot_of_integers": (lambda x: x @ x.T, INTEGERS, "dot_general", Linearity()),
    "total": (lambda x: x.sum(0), X, "reduce", Linearity((0,))),
    "largest": (lambda x: x.max(0), X, "reduce", Linearity()),
    "reshape": (lambda x: x.reshape(32), X, "reshape", MOVES),
    "reshape_of_integers": (lambda x: x.reshape(32), INTEGERS, "reshape", Linearity(moves=True)),
    "slice": (lambda x: x[:3], X, "slice", MOVES),
    "transpose": (lambda x: x.T, X, "transpose", MOVES),
    "not_linear": (jnp.tanh, X, "tanh", Linearity()),
}


@pytest.mark.parametrize("name", CASES)
def test_which_ops_are_linear(name: str) -> None:
    function, argument, kind, linearity = CASES[name]
    program = program_of(function, argument)
    rules = zip(program.signatures, solve_rules(program), strict=True)
    assert {rule.linearity for signature, rule in rules if signature.kind == kind} == {linearity}


def rule_of(tmp_path: pathlib.Path, stated: str) -> SignatureRule:
    """The rule of a call of ``mine``."""
    module, path = tmp_path / "program.mlir", tmp_path / "rule.lp"
    module.write_text(call("mine", ["64x32xf32", "8xf32"], ["64x32xf32"]))
    path.write_text(
        """custom_call_rule("mine").
%! mine(Op): a call of it.
mine(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"mine").
factor(Op,(D,Size),T,D) :- mine(Op), tensor_dim(Op,T,D,Size).
"""
        + stated
    )
    program = program_of(module)
    rules = zip(program.signatures, solve_rules(program, [path]), strict=True)
    (rule,) = (rule for signature, rule in rules if signature.kind == "custom_call")
    return rule


@pytest.mark.parametrize(
    ("stated", "linearity"),
    [
        ("", Linearity()),
        ("linear(Op,(0; 1)) :- mine(Op).", Linearity((0, 1))),
        ("moves_elements(Op) :- mine(Op).", MOVES),
        ("linear(Op,0) :- mine(Op). rounds(Op) :- mine(Op).", Linearity((0,), rounds=True)),
    ],
)
def test_the_rule_of_a_custom_call_says_so(
    stated: str, linearity: Linearity, tmp_path: pathlib.Path
) -> None:
    assert rule_of(tmp_path, stated).linearity == linearity


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("linear(Op,2)", r"linear\(Op,2\): the op has no such operand"),
        ("linear(Op,first)", r"linear\(Op,first\): the op has no such operand"),
        ("adds(Op)", r"adds\(Op\): not for custom_call: .* state linear\(Op,I\)"),
        ("scales(Op)", r"scales\(Op\): not for custom_call"),
        (
            "partitioned(Op) :- mine(Op). permutation(Op,(0,64)) :- mine(Op). linear(Op,0)",
            r"linear\(Op,I\): partial sums pass no call whose shards need elements",
        ),
    ],
)
def test_statements_that_cannot_hold_are_refused(
    stated: str, message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(RuleError, match=rf"rule\.lp:1: {message}"):
        rule_of(tmp_path, f"{stated} :- mine(Op).")


def test_a_rule_of_another_kind_has_no_effect(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuleError, match="has no effect, since the file has no rule of sort"):
        rule_of(tmp_path, "linear(Op,0) :- op(Op,sort).")


def test_an_op_adds_or_scales(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rule.lp"
    path.write_text(
        "rule(add).\n"
        "factor(Op,D,T,D) :- op(Op,add), tensor_dim(Op,T,D,_).\n"
        "adds(Op) :- op(Op,add).\n"
        "scales(Op) :- op(Op,add).\n"
    )
    program = program_of(lambda x: x + x, f32(8, 8))
    with pytest.raises(RuleError, match=r"scales\(Op\): the op adds its operands"):
        solve_rules(program, [path])
