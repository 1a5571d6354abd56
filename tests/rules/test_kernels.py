"""The rules of kernels, on calls that JAX lowers for TPUs, and on calls written by hand."""

from __future__ import annotations

import pathlib

import pytest

from tests.rules.kernels import (
    GROUPED,
    SHARED,
    Q,
    bf16,
    call,
    cost,
    flash,
    flash_segments,
    gradients,
    kernels,
    labels,
    lowered,
    splash,
    splash_gradient,
    splash_segments,
    spread,
)
from toast.api import program_of
from toast.errors import RuleError

#: Queries times keys of all heads of a batch of two, times the depth.
PRODUCT = 2 * 8 * 1024 * 1024 * 128


def test_flash_attention_is_an_einsum() -> None:
    ((_, signature, rule),) = kernels(lowered(flash, Q, Q, Q))
    assert rule.einsum() == (
        "([batch(0),head,time,depth],[batch(0),head,source,depth],"
        "[batch(0),head,source,value_depth]) -> ([batch(0),head,time,value_depth]) "
        "need_replication={time,value_depth,depth,source}"
    )
    # The call states its own estimate, which includes the softmax.
    assert cost(rule, "flops") == 4 * PRODUCT
    assert cost(rule, "flops") == pytest.approx(signature.attribute("flops"), rel=0.01)
    assert cost(rule, "transcendentals") == signature.attribute("transcendentals")


def test_gradients_of_flash_attention() -> None:
    forward, keys, queries = kernels(lowered(gradients(flash, 3), Q, Q, Q))
    assert [name for name, _, _ in (forward, keys, queries)] == [
        "_flash_attention_kernel", "_flash_attention_dkv_kernel", "_flash_attention_dq_kernel",
    ]  # fmt: skip
    assert [cost(rule, "flops") / PRODUCT for _, _, rule in (forward, keys, queries)] == [4, 8, 6]
    for _, _, rule in (forward, keys, queries):
        assert spread(rule) == {"batch(0)", "head"}
        assert not labels(rule, lambda factor: bool(factor.combiner))


def test_a_bias_and_segments_are_found_by_shape() -> None:
    program = lowered(
        gradients(flash, 4), Q, Q, Q, bf16(2, 8, 1024, 1024), flash_segments()
    )  # fmt: skip
    forward, keys, queries = (rule.einsum() for _, _, rule in kernels(program))
    segments = "[batch(0),time,lane],[batch(0),sublane,source]"
    for einsum in (forward, keys, queries):
        assert f"[batch(0),head,time,source],{segments}" in einsum
    assert "-> ([batch(0),head,time,depth],[batch(0),head,time,source])" in queries


@pytest.mark.parametrize("residuals", [False, True])
def test_splash_attention_shards_groups_of_heads(residuals: bool) -> None:
    ((name, _, rule),) = kernels(lowered(splash(residuals=residuals), Q, GROUPED, GROUPED))
    assert name == f"splash_mha_fwd_{'' if residuals else 'no_'}residuals"
    assert "[batch(0),kv_headhead_of_group,time,depth],[batch(0),kv_head,source,depth]" in (
        rule.einsum()
    )
    assert spread(rule) == {"batch(0)", "kv_head"}
    sizes = {factor.label: factor.size for factor in rule.factors}
    assert (sizes["kv_head"], sizes["head_of_group"]) == (2, 4)
    # In blocks of 512, a causal mask of 1,024 leaves three of four.
    assert cost(rule, "flops") == 3 / 4 * 4 * PRODUCT


def test_gradients_of_splash_attention() -> None:
    rules = [rule for _, _, rule in kernels(splash_gradient())]
    assert [cost(rule, "flops") / PRODUCT for rule in rules] == [3, 6, 4.5]
    assert all(spread(rule) == {"batch(0)", "kv_head"} for rule in rules)
    _, (name, _, fused) = kernels(splash_gradient(fused=True))
    assert (name, cost(fused, "flops") / PRODUCT) == ("splash_mha_dkv_no_residuals", 7.5)
    assert "[batch(0),part,kv_headhead_of_group,time,depth]" in fused.einsum()


def test_heads_that_share_keys_sum_their_gradients() -> None:
    _, (_, _, keys), (_, _, queries) = kernels(splash_gradient(shared=True))
    assert labels(keys, lambda factor: factor.combiner == "add") == {"head"}
    assert not labels(queries, lambda factor: bool(factor.combiner))
    assert spread(keys) == spread(queries) == {"batch(0)", "head"}


def test_segments_of_splash_attention() -> None:
    program = lowered(splash(), Q, SHARED_HEADS, SHARED_HEADS, splash_segments())
    ((name, _, rule),) = kernels(program)
    assert name == "splash_mha_fwd_segmented_no_residuals"
    assert "[batch(0),time,lane],[batch(0),sublane,source]" in rule.einsum()


#: Keys and values with a dimension for their only head.
SHARED_HEADS = bf16(2, 1, *SHARED.shape[1:])


def test_another_kernel_of_the_same_name_has_no_rule(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other.mlir"
    for operands in (["8x4xf32"], ["2x8x64x32xbf16", "2x8x64x32xbf16", "2x8x64x16xbf16"]):
        path.write_text(
            call("tpu_custom_call", operands, ["8x4xf32"], kernel="_flash_attention_kernel")
        )
        ((_, _, rule),) = kernels(program_of(path))
        assert rule.missing
        assert not rule.costs


# -- partitioning -----------------------------------------------------------------------------


def test_xla_runs_a_kernel_whole(tmp_path: pathlib.Path) -> None:
    program = lowered(splash(), Q, GROUPED, GROUPED)
    ((_, _, rule),) = kernels(program, partitioned=False)
    assert rule.runs_whole
    assert not spread(rule)
    assert cost(rule, "flops") == 3 * PRODUCT


OWN = """custom_call_rule("mine").
%! mine(Op): a call of it.
mine(Op) :- op(Op,custom_call), attribute(Op,kernel_name,"mine").
factor(Op,i,operand(0),0) :- mine(Op).
factor(Op,k,operand(0),1) :- mine(Op).
factor(Op,k,operand(1),0) :- mine(Op).
factor(Op,j,operand(1),1) :- mine(Op).
factor(Op,i,result(0),0)  :- mine(Op).
factor(Op,j,result(0),1)  :- mine(Op).
reduction(Op,k,"add")     :- mine(Op).
"""
COST = """kernel_cost(Op,flops,2,product)        :- mine(Op).
kernel_cost_over(Op,product,(i; j; k)) :- mine(Op).
kernel_share(Op,product,1,4)           :- mine(Op).
"""
ESTIMATE = {"custom_call_config": {"cost_estimate": {"flops": 5 * 2**40, "bytes_accessed": 4096}}}


@pytest.fixture
def product(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "product.mlir"
    operands, results = ["64x16xf32", "16x32xf32"], ["64x32xf32"]
    path.write_text(call("tpu_custom_call", operands, results, kernel="mine", config=ESTIMATE))
    return path


def test_a_rule_of_ones_own_finds_the_kernel_by_name(
    product: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    ((_, _, before),) = kernels(program_of(product))
    assert before.missing
    # More bytes than the operands and results have, and numbers beyond 32 bits.
    assert {c.quantity: c.amount for c in before.costs} == {"flops": 5 * 2**40}
    path = tmp_path / "own.lp"
    path.write_text(OWN + COST)
    ((_, _, whole),) = kernels(program_of(product), [path], partitioned=False)
    assert (whole.runs_whole, spread(whole)) == (True, set())
    assert not labels(whole, lambda factor: bool(factor.combiner))
    path.write_text(OWN + COST + "partitioned(Op) :- mine(Op).\n")
    ((_, _, own),) = kernels(program_of(product), [path], partitioned=False)
    assert own.einsum() == "([i,k],[k,j]) -> ([i,j]) reduction={k}"
    assert [(c.quantity, c.amount, len(c.factors)) for c in own.costs] == [
        ("flops", 2 * 64 * 16 * 32 / 4, 3)
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("factor(Op,i,operand(1),0) :- mine(Op).", "own.lp:1: .* two factors at position 0"),
        (
            OWN.replace("factor(Op,k,operand(1),0)", "factor(Op,i,operand(1),0)"),
            "own.lp:1: .*factor i maps dimensions of different size",
        ),
        ("kernel_cost(Op,watts,2,x) :- mine(Op).", "own.lp:1: .*not a quantity; use one of flops"),
        ("kernel_cost(Op,flops,-2,x) :- mine(Op).", "own.lp:1: .*no whole number from 0 on"),
        ("kernel_cost_over(Op,x,i) :- mine(Op).", "own.lp:1: .*term x has no kernel_cost"),
        (f"{COST}kernel_cost_over(Op,product,l) :- mine(Op).", "own.lp:1: .*kernel_cost_over of l"),
        (f"{COST}kernel_share(Op,product,1,2) :- mine(Op).", "own.lp:1: .*has another share"),
        (COST.replace("1,4", "5,4"), "own.lp:1: .*not a part of a whole"),
    ],
)
def test_wrong_rules_are_refused(
    text: str, message: str, product: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "own.lp"
    path.write_text(text if text.startswith("custom_call_rule") else OWN + text + "\n")
    with pytest.raises(RuleError, match=message):
        kernels(program_of(product), [path], partitioned=False)


# -- rules that calls state -------------------------------------------------------------------

STATED = (
    "sdy.sharding_rule = #sdy.op_sharding_rule<([i, jk], [k])->([i, l]) "
    "{i=8, j=2, k=4, l=16} reduction={k} need_replication={l}, custom>"
)


def test_a_stated_rule_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "stated.mlir"
    path.write_text(
        call("CustomSPMDPartitioning", ["8x8xf32", "4xf32"], ["8x16xf32"], attributes=STATED)
    )
    ((_, _, rule),) = kernels(program_of(path), partitioned=False)
    assert rule.einsum() == "([0,12],[2]) -> ([0,3]) reduction={2} need_replication={3}"
    assert not rule.runs_whole
    own = tmp_path / "own.lp"
    own.write_text(
        'custom_call_rule("CustomSPMDPartitioning").\n'
        "factor(Op,(T,D),T,D) :- op(Op,custom_call), tensor_dim(Op,T,D,_).\n"
    )
    ((_, _, explicit),) = kernels(program_of(path), [own], partitioned=False)
    assert len(explicit.factors) == 5
    assert not explicit.runs_whole
