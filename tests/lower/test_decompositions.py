"""Composites of a user: sharded as far as their decompositions are, and priced so."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import toast
from tests.helpers import f32, random_states
from tests.lower.test_lowering import assert_as_predicted
from toast.analysis import Analysis
from toast.analysis.rules import rule_lines
from toast.cost import CostModel
from toast.frontend.mlir import WITH_LOCAL_FORMS
from toast.hardware import Mesh, load
from toast.lower.attention_forms import COMPOSITES
from toast.models.zoo import build
from toast.plan.shard import lowered_state
from toast.space import Space

Function = Callable[..., Any]

#: Each dimension has a factor.
OWN = """
composite_rule("toast.mine").
factor(Op,D,T,D) :- op(Op,composite), tensor_dim(Op,T,D,_).
"""


@pytest.fixture
def rules(tmp_path: pathlib.Path) -> Callable[[str], list[pathlib.Path]]:
    def written(text: str) -> list[pathlib.Path]:
        path = tmp_path / "mine.lp"
        path.write_text(text)
        return [path]

    return written


def mine(function: Function) -> Function:
    """``function`` as a composite between other ops."""
    composite = jax.lax.composite(function, name="toast.mine")
    return lambda *arguments: jnp.tanh(composite(*(2 * each for each in arguments)))


def rule_of(analysis: Analysis) -> str:
    (number,) = (n for n, s in enumerate(analysis.program.signatures) if s.kind == "composite")
    return analysis.rules[number].einsum()


def assert_runs_as_priced(analysis: Analysis) -> None:
    """States of a mesh whose axes are larger than some dimensions inside."""
    model = CostModel(Space(analysis, Mesh.parse("a=4,b=2")), load("tpu-v5e"))
    for state in random_states(model.space, 3, seed=0):
        assert_as_predicted(model, state, lowered_state(model, state))


def normalized(x: Any) -> Any:
    return x / (1 + jnp.abs(x).sum(1, keepdims=True))


def in_parts(x: Any) -> Any:
    return jnp.tanh(x.reshape(2, 32, 64)).reshape(64, 64)


def until_small(x: Any) -> Any:
    return jax.lax.while_loop(lambda x: x[0, 0] > 0.5, lambda x: x * 0.5, x)


@pytest.mark.parametrize(("function", "whole"), [
    (jnp.tanh, ""),
    (normalized, "1"),
    (lambda x: x + x.T, "0,1"),
    (lambda x: x @ x, "0,1"),
    (lambda x: jnp.roll(x, 3, 0), "0"),
    (lambda x: jnp.cumsum(x, 1), "1"),
    (lambda x: jnp.sort(x, 1), "1"),
    (in_parts, ""),
    (until_small, "0,1"),
    (jax.lax.composite(normalized, name="toast.mine"), "1"),
    (jax.lax.composite(normalized, name="toast.unknown"), "0,1"),
], ids=[
    "elementwise", "sum", "transpose", "product", "roll", "scan", "sort", "parts", "condition",
    "nested", "nested without rule",
])  # fmt: skip
def test_stays_whole_where_the_decomposition_communicates(
    rules: Any, function: Function, whole: str
) -> None:
    analysis = toast.analyze(mine(function), f32(64, 64), rules=rules(OWN), lowering="local")
    assert rule_of(analysis) == "([0,1]) -> ([0,1])" + f" need_replication={{{whole}}}" * bool(
        whole
    )
    assert_runs_as_priced(analysis)


def test_search_prices_the_gather(rules: Any) -> None:
    """The plan is pinned to shard what stays whole: its price has the gather and the slice."""
    plan = toast.plan(
        mine(normalized), f32(64, 64), mesh="a=2,b=2", hardware="tpu-v5e", rules=rules(OWN),
        lowering="local", constraints=toast.Constraints(pin={"arguments[0]": PartitionSpec("a", "b")}),
    )  # fmt: skip
    assert plan.lowered().counts()
    assert_as_predicted(plan.model, plan.state, plan.lowered())


def test_plans_for_xla_gather_along_these_factors_only(rules: Any) -> None:
    both = PartitionSpec("a", "b")
    plan = toast.plan(
        mine(normalized), f32(64, 64), mesh="a=2,b=2", hardware="tpu-v5e", rules=rules(OWN),
        constraints=toast.Constraints(pin={"arguments[0]": both, "result": both}),
    )  # fmt: skip
    assert rule_of(plan.model.space.analysis) == "([0,1]) -> ([0,1])"
    (gathered,) = plan.lowered().gathered
    assert gathered.factors == ("1",)


def test_stated_sums_stay_partial(rules: Any) -> None:
    """A sum over a factor of the rule needs no communication inside."""
    text = """
    composite_rule("toast.mine").
    factor(Op,i,operand(0),0)   :- op(Op,composite).
    factor(Op,k,operand(0),1)   :- op(Op,composite).
    factor(Op,i,result(0),0)    :- op(Op,composite).
    reduction(Op,k,COMBINER)    :- op(Op,composite).
    """
    for combiner, function, whole in (("add", jnp.sum, ""), ("maximum", jnp.max, "k")):
        analysis = toast.analyze(
            mine(lambda x, function=function: function(x, 1)), f32(64, 64),
            rules=rules(text.replace("COMBINER", combiner)), lowering="local",
        )  # fmt: skip
        assert ("need_replication={k}" in rule_of(analysis)) == bool(whole)
        assert_runs_as_priced(analysis)


def test_explanations_cite_the_rule(rules: Any) -> None:
    analysis = toast.analyze(mine(normalized), f32(64, 64), rules=rules(OWN), lowering="local")
    (number,) = (n for n, rule in enumerate(analysis.rules) if rule.file)
    lines = rule_lines(analysis.program, analysis.rules, [number])
    (line,) = lines.need_replication[number, "1"]
    assert line.file == "rules/factors.lp"


def test_parts_divide_the_dimension(rules: Any) -> None:
    """A decomposition with 2 blocks of 32 rows has 2 shards of them at most."""
    analysis = toast.analyze(mine(in_parts), f32(64, 64), rules=rules(OWN), lowering="local")
    (rule,) = (r for r in analysis.rules if r.file)
    assert [factor.divisor for factor in rule.factors] == [2, 64]


def test_decompositions_of_one_signature(rules: Any) -> None:
    """What stays whole in one stays whole in the other, and caches tell them apart."""
    of_rows = mine(lambda x: jnp.roll(x, 3, 0))
    texts = []
    for functions in ((mine(normalized),), (of_rows,), (mine(normalized), of_rows)):

        def step(x: Any, functions: tuple[Function, ...] = functions) -> Any:
            for function in functions:
                x = function(x)
            return x

        analysis = toast.analyze(step, f32(64, 64), rules=rules(OWN), lowering="local")
        texts.append(rule_of(analysis).partition("need_replication=")[2])
        assert_runs_as_priced(analysis)
    assert texts == ["{1}", "{0}", "{0,1}"]


def test_of_a_file(rules: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.mlir"
    path.write_text(jax.jit(mine(normalized)).lower(f32(64, 64)).as_text())
    analysis = toast.analyze(path, rules=rules(OWN), lowering="local")
    assert rule_of(analysis) == "([0,1]) -> ([0,1]) need_replication={1}"
    assert_runs_as_priced(analysis)


def test_plans_for_xla_have_no_such_restriction(rules: Any) -> None:
    analysis = toast.analyze(mine(normalized), f32(64, 64), rules=rules(OWN))
    assert rule_of(analysis) == "([0,1]) -> ([0,1])"


def test_composites_with_local_forms_are_not_decomposed() -> None:
    assert COMPOSITES.keys() == WITH_LOCAL_FORMS
    assert not toast.analyze(build("itx-decode", small=True)).program.decompositions


def test_a_sum_that_is_not_used_linearly_keeps_its_factor_whole(
    rules: Callable[[str], list[pathlib.Path]],
) -> None:
    """The rule states the sum of the second result, but the first one needs the total."""
    text = """
    composite_rule("toast.mine").
    factor(Op,i,T,0) :- op(Op,composite), tensor_dim(Op,T,0,_).
    factor(Op,k,T,1) :- op(Op,composite), tensor_dim(Op,T,1,_).
    reduction(Op,k,"add") :- op(Op,composite).
    """

    def norm(x: Any) -> Any:
        squares = (x * x).sum(1)
        return x * jax.lax.rsqrt(squares + 1)[:, None], squares

    def sums(x: Any) -> Any:
        return x * 2, (x * x).sum(1).reshape(8, 8).sum(1)

    for function, whole in ((norm, True), (sums, False)):
        composite = jax.lax.composite(function, name="toast.mine")

        def step(x: Any, composite: Any = composite) -> Any:
            y, total = composite(2 * x)
            return jnp.tanh(y), jnp.tanh(total)

        own = text
        if not whole:
            own = """
            composite_rule("toast.mine").
            factor(Op,rows,T,0) :- op(Op,composite), tensor_dim(Op,T,0,64).
            factor(Op,few,T,0)  :- op(Op,composite), tensor_dim(Op,T,0,8).
            factor(Op,k,T,1)    :- op(Op,composite), tensor_dim(Op,T,1,_).
            reduction(Op,k,"add")    :- op(Op,composite).
            need_replication(Op,few) :- op(Op,composite).
            need_replication(Op,rows) :- op(Op,composite).
            """
        analysis = toast.analyze(step, f32(64, 64), rules=rules(own), lowering="local")
        assert ("k" in rule_of(analysis).partition("need_replication")[2]) is whole
        assert_runs_as_priced(analysis)


def test_decompositions_that_differ_in_a_condition_are_two(
    rules: Callable[[str], list[pathlib.Path]],
) -> None:
    def loop(stops: Function) -> Function:
        def run(x: Any) -> Any:
            return jax.lax.while_loop(stops, lambda c: (c[0] * 0.5, c[1] + 1), (x, 0.0))[0]

        return mine(run)

    first = loop(lambda c: c[1] < 3.0)
    second = loop(lambda c: (c[1] < 3.0) & (c[0][0, 0] > 0.01))
    analysis = toast.analyze(
        lambda x: second(first(x)), f32(64, 64), rules=rules(OWN), lowering="local"
    )
    assert rule_of(analysis).endswith("need_replication={0,1}")
    assert_runs_as_priced(analysis)
