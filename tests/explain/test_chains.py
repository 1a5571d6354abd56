"""Chains between dimensions: valid, shortest, there if and only if colors are equal; with the rules' lines."""

from __future__ import annotations

import functools
import itertools
import pathlib
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import toast
from tests.helpers import f32, same_for_any_jax
from toast import api, report
from toast.analysis import Chain, ChainStep, Place
from toast.analysis.dimensions import dimension_of
from toast.errors import RuleError
from toast.models import build
from toast.resources import directory

ROOT = directory("rules").parent


@functools.cache
def fact_base(name: str) -> toast.Analysis:
    return toast.analyze(directory("facts") / f"{name}.lp")


@functools.cache
def small(name: str) -> toast.Analysis:
    return toast.analyze(build(name, small=True))


def scan(ws: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]


@functools.cache
def scanned() -> toast.Analysis:
    return toast.analyze(scan, f32(6, 8, 8), f32(4, 8))


def analysis_of(name: str) -> toast.Analysis:
    if name == "scan":
        return scanned()
    return fact_base(name) if (directory("facts") / f"{name}.lp").exists() else small(name)


# -- what a chain is, from the arrays of the analysis alone --------------------------------------


def name_at(analysis: toast.Analysis, place: Place) -> int:
    """The name of a dimension where an op has it."""
    names, op = analysis.names, analysis.program.ops[place.op]
    side, index = place.tensor.rstrip(")").split("(")
    if side == "result":
        value = op.results[int(index)]
        assert value == place.dimension.value
        return int(names.def_name[names.value_dim[value] + place.dimension.d])
    assert op.operands[int(index)] == place.dimension.value
    (use,) = (
        u for u in range(len(names.use_op))
        if names.use_op[u] == place.op and names.use_index[u] == int(index)
    )  # fmt: skip
    return int(names.use_name[names.use_dim[use] + place.dimension.d])


def check_step(analysis: toast.Analysis, step: ChainStep) -> None:
    """A step is what it says that it is."""
    one, other = name_at(analysis, step.one), name_at(analysis, step.other)
    names, ties = analysis.names, set(analysis.program.ties)
    for name, place in ((one, step.one), (other, step.other)):
        rule = analysis.rules[names.signature[place.op]]
        assert names.name_op[name] == place.op
        assert rule.factors[name - names.first_name[place.op]].label == place.factor
    if step.kind == "def_use":
        assert step.one.dimension == step.other.dimension
        edges = set(map(tuple, names.edges.tolist()))
        assert {(one, other), (other, one)} & edges
    elif step.kind in ("identity", "apart"):
        assert step.one.op == step.other.op
        assert (one == other) is (step.kind == "identity")
        assert bool(step.reason) is (step.kind == "apart")
    else:
        ends = step.one.op, step.other.op
        assert {ends, ends[::-1]} & ties
        assert step.one.factor == step.other.factor
        assert ("return" in (step.one.op_kind, step.other.op_kind)) is (step.kind == "donation")
    assert step.rules


def check_chain(analysis: toast.Analysis, chain: Chain) -> None:
    """Every step holds, each begins where the last one ends, and colors agree with the answer."""
    names = analysis.names
    ends = [names.def_name[names.value_dim[d.value] + d.d] for d in (chain.one, chain.other)]
    assert chain.tied is bool(analysis.color[ends[0]] == analysis.color[ends[1]])
    assert chain.tied is (not chain.apart and (bool(chain.steps) or chain.one == chain.other))
    for step in chain.steps:
        check_step(analysis, step)
    for before, after in itertools.pairwise(chain.steps):
        assert before.other == after.one
    if chain.steps:
        assert (chain.steps[0].one.dimension, chain.steps[-1].other.dimension) == (
            chain.one, chain.other,
        )  # fmt: skip
        assert chain.steps[0].one.tensor.startswith("result")
        assert chain.steps[-1].other.tensor.startswith("result")


def dimensions(analysis: toast.Analysis) -> list[toast.analysis.Dimension]:
    return [
        dimension_of(analysis.program, number, d)
        for number, value in enumerate(analysis.program.values)
        for d in range(len(value.type.shape))
    ]


# -- golden --------------------------------------------------------------------------------------

CHAINS = {
    "mlp": ["x:0 w:0", "w1:1 w2:0", "x:0 w2:1", "x:1 w:1"],
    "x_xt": ["x:0 z:0", "x:0 z:1", "z:0 z:1", "x:0 x:1"],
    "attention": ["x:0 d:1", "wq:0 wv:0", "wq:1 wk:1", "wv:1 wk:1", "b:0 z:0"],
    "box_compatible": ["w:0 w:1"],
    "box_crossed_n_r": ["w:0 w:1"],
    "box_crossed_o_l": ["w:0 w:1"],
    "scan": ["x:1 result:1", "ws:2 x:1", "ws:0 x:0"],
    "t2b": [
        "params.layers[0].wq:0 params.layers[1].wo:2",
        "params.layers[0].gate:1 params.layers[1].gate:1",
        "tokens:0 result[0].embedding:0",
    ],
    "t2b-scan": ["params.layers.wq:1 result[0].layers.wo:3", "params.layers.wq:0 tokens:1"],
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_as_they_were(
    name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures' programs, layers of a train step, and loops; pytest --regenerate writes them."""
    monkeypatch.chdir(ROOT)
    analysis, parts = analysis_of(name), []
    for pair in CHAINS[name]:
        chain = analysis.explain(*pair.split())
        check_chain(analysis, chain)
        parts.append(report.chain_text(chain))
    text = "\n\n".join(parts)
    # Numbers in a traced program, lines of models and of tests move; those of rules are what this is about.
    golden(f"chains_{name}.txt", (same_for_any_jax(text) if ".py" in text else text) + "\n")


def test_a_transpose_and_a_product_tie_both_dimensions() -> None:
    """The paper's x and transpose(x): two ways to z, and so a conflict (3.3)."""
    chain = fact_base("x_xt").explain("z:0", "z:1")
    assert [step.kind for step in chain.steps] == [
        "identity", "def_use", "def_use", "identity", "def_use", "identity",
    ]  # fmt: skip
    assert [str(step.rules[0]) for step in chain.steps][::3] == [
        "rules/ops/dot.lp:38", "rules/ops/shape.lp:31",
    ]  # fmt: skip


# -- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "box_crossed_n_r", "scan", "donated"])
def test_no_chain_is_shorter(name: str) -> None:
    """Pairs of dimensions, against a breadth-first search over places."""
    analysis = donated() if name == "donated" else analysis_of(name)
    near = neighbours(analysis)
    apart = crossings(analysis)
    every = dimensions(analysis)
    rng = random.Random(0)
    for one in rng.sample(every, min(10, len(every))):
        steps = distances(near, ("result", one.value, one.d))
        for other in rng.sample(every, min(8, len(every))):
            chain = analysis.explain(one, other)
            check_chain(analysis, chain)
            there = ("result", other.value, other.d)
            assert chain.tied is (there in steps)
            if chain.tied:
                assert len(chain.steps) == steps[there]
            else:
                color = [
                    int(analysis.color[analysis.names.def_name[
                        analysis.names.value_dim[d.value] + d.d
                    ]])
                    for d in (one, other)
                ]  # fmt: skip
                fewest = distances(apart, color[0])
                assert len(chain.apart) == fewest.get(color[1], 0)


@functools.cache
def donated() -> toast.Analysis:
    step = api.program_of(
        lambda w, x: (w - x.T @ (x @ w), x @ w), f32(8, 4), f32(16, 8), donate=(0,)
    )
    assert step.ties
    return toast.analyze(step)


def neighbours(analysis: toast.Analysis) -> dict[object, set[object]]:
    """Places joined by an identity, an edge of M, or a tie; from the program and its rules."""
    program, found = analysis.program, defaultdict(set)
    by_name: dict[tuple[int, str], list[object]] = defaultdict(list)
    partner = dict(program.ties)
    for number, op in enumerate(program.ops):
        rule = analysis.rules[op.signature]
        for side, values, tensors in (
            ("operand", op.operands, rule.operands), ("result", op.results, rule.results),
        ):  # fmt: skip
            for index, (value, dims) in enumerate(zip(values, tensors, strict=True)):
                for d, factors in enumerate(dims):
                    place = ("result", value, d) if side == "result" else (number, index, d)
                    label = rule.factors[factors[0]].label
                    by_name[partner.get(number, number), label].append(place)
                    if side == "operand":
                        found[place].add(("result", value, d))
                        found["result", value, d].add(place)
    for places in by_name.values():
        for one, other in itertools.permutations(places, 2):
            found[one].add(other)
    return found


def crossings(analysis: toast.Analysis) -> dict[object, set[object]]:
    """Colors that meet in one op of several tensors."""
    names, found = analysis.names, defaultdict(set)
    for op, used in enumerate(analysis.program.ops):
        if len(used.operands) + len(used.results) > 1:
            rule = analysis.rules[used.signature]
            majors = {dim[0] for t in (*rule.operands, *rule.results) for dim in t}
            colors = {int(analysis.color[names.first_name[op] + f]) for f in majors}
            for color in colors:
                found[color] |= colors - {color}
    return found


def distances(near: dict[object, set[object]], start: object) -> dict[object, int]:
    found, queue = {start: 0}, deque([start])
    while queue:
        at = queue.popleft()
        for following in near[at] - found.keys():
            found[following] = found[at] + 1
            queue.append(following)
    return found


@given(data=st.data())
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("name", ["t2b", "t2b-scan", "moe", "gns"])
def test_chains_hold_in_whole_models(name: str, data: st.DataObject) -> None:
    """Random dimensions, half of them of one color."""
    analysis = small(name)
    every = dimensions(analysis)
    one = data.draw(st.sampled_from(every))
    others = every
    if data.draw(st.booleans()):
        names = analysis.names
        color = analysis.color[names.def_name]
        alike = color == color[names.value_dim[one.value] + one.d]
        others = [d for d, same in zip(every, alike, strict=True) if same]
    check_chain(analysis, analysis.explain(one, data.draw(st.sampled_from(others))))


def test_a_result_in_a_donated_argument_is_tied_to_it() -> None:
    program = api.program_of(lambda w, x: x * 2.0, f32(8, 4), f32(8, 4), donate=(0,))
    chain = toast.analyze(program).explain("w:0", "result:0")
    assert [step.kind for step in chain.steps] == ["donation", "def_use"]
    text = report.chain_text(chain)
    assert re.search(
        r"1  same  return#\d overwrites the donated argument w  \[rules/names.lp:26\]", text
    )


# -- what keeps dimensions apart -----------------------------------------------------------------


def only(chain: Chain) -> ChainStep:
    (step,) = chain.apart
    return step


def test_a_minor_factor_of_a_reshape_is_told() -> None:
    analysis = toast.analyze(lambda x: x.reshape(8, 4) * 2.0, f32(32))
    assert analysis.explain("x:0", "result:0").tied
    step = only(analysis.explain("x:0", "result:1"))
    assert step.one.op_kind == "reshape"
    assert "operand 0 dimension 0 consists of factors" in step.reason
    assert all(rule.file == "rules/ops/reshape.lp" for rule in step.rules)


def test_need_replication_is_explained() -> None:
    analysis = toast.analyze(lambda x, i: lax.dynamic_slice(x, (i,), (4,)), f32(16), jnp.int32(0))
    chain = analysis.explain("x:0", "result:0")
    # One factor, so one dimension: but no axis can be put on it.
    assert chain.tied
    assert {s.one.role for s in chain.steps if s.kind == "identity"} == {"need_replication"}
    text = report.chain_text(chain)
    assert "not shardable" in text
    analysis = toast.analyze(lambda x: x.reshape(8), f32(1, 8))
    step = only(analysis.explain("x:0", "result:0"))
    assert step.reason == "operand 0 dimension 0 cannot be sharded"
    assert len(step.rules) == 3


def test_ops_without_a_rule_are_told(tmp_path: pathlib.Path) -> None:
    analysis = mystery(tmp_path)
    step = only(analysis.explain("arg0:0", "result[0]:0"))
    assert step.reason == "this op has no rule, so its dimensions are not sharded"
    assert {rule.file for rule in step.rules} == {"rules/factors.lp"}


MYSTERY = """func.func public @main(%a: tensor<64xf32>) -> tensor<64xf32> {
  %0 = stablehlo.custom_call @mystery(%a) : (tensor<64xf32>) -> tensor<64xf32>
  %1 = stablehlo.add %0, %0 : tensor<64xf32>
  return %1 : tensor<64xf32>
}"""


def mystery(folder: pathlib.Path, *rules: pathlib.Path) -> toast.Analysis:
    (folder / "mystery.mlir").write_text(MYSTERY)
    return toast.analyze(folder / "mystery.mlir", rules=rules)


def test_nothing_may_lead_there() -> None:
    analysis = toast.analyze(lambda x, y: (x * 2.0, y * 2.0), f32(4), f32(4))
    chain = analysis.explain("x:0", "y:0")
    assert (chain.tied, chain.steps) == (False, ())
    assert "no chain of ops connects them" in report.chain_text(chain)


def test_a_dimension_is_itself() -> None:
    chain = fact_base("mlp").explain("x:0", "x:-2")
    assert (chain.tied, chain.steps) == (True, ())
    assert report.chain_text(chain) == "x:0 f32[256,32] is a single dimension"


# -- the rules' lines ----------------------------------------------------------------------------


def test_cited_lines_are_rules_that_say_it() -> None:
    """At the line of every cited rule stands a rule whose head is what is claimed."""
    rng = random.Random(0)
    for name in ("t2b", "moe", "t2b-scan"):
        analysis = small(name)
        every = dimensions(analysis)
        for _ in range(8):
            for step in analysis.explain(*rng.sample(every, 2)).steps:
                heads = [
                    (ROOT / rule.file).read_text().splitlines()[rule.line - 1]
                    for rule in step.rules
                ]  # fmt: skip
                if step.kind == "def_use":
                    assert heads == ["edge(Value,use(Op,Index),Name,UseName) :-"]
                elif step.kind in ("loop", "donation"):
                    assert heads == ["same_name(name(Op,F),name(Other,F)) :-"]
                else:
                    assert all(re.match(r"(factor|need_replication)\(", h) for h in heads), heads


MINE = """custom_call_rule("mystery").
%! mine(Op): a call of mystery.
mine(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"mystery").

factor(Op,D,T,D) :-
    mine(Op), tensor_dim(Op,T,D,_).
"""


def test_rules_of_users_are_cited_with_their_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "mine.lp"
    file.write_text(MINE)
    analysis = mystery(tmp_path, file)
    chain = analysis.explain("arg0:0", "result[0]:0")
    cited = [str(rule) for step in chain.steps for rule in step.rules if step.kind == "identity"]
    assert cited[0] == f"{file}:5"
    assert cited[1].startswith("rules/factors.lp:")
    file.unlink()
    with pytest.raises(RuleError, match=r"mine\.lp: no such rule file or folder; check the path"):
        analysis.explain("arg0:0", "result[0]:0")
    file.write_text(MINE.replace("factor(Op,D,T,D)", "factor(Op,other(D),T,D)"))
    with pytest.raises(
        RuleError, match=r"mine\.lp: .* has changed since the analysis; run the analysis again"
    ):
        analysis.explain("arg0:0", "result[0]:0")
