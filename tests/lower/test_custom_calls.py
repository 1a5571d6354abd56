"""Custom calls with a rule run on shards along batch-like factors, without a partitioner."""

from __future__ import annotations

import pathlib

import jax
import pytest
from jax.sharding import PartitionSpec

import toast
from tests.rules.kernels import call
from toast.analysis.rules import SignatureRule, solve_signatures
from toast.api import program_of
from toast.apply import verify

MODULE = """func.func public @main(%x: tensor<64x32xf32>, %w: tensor<32x32xf32>) -> tensor<64x32xf32> {
  %0 = stablehlo.dot %x, %w : (tensor<64x32xf32>, tensor<32x32xf32>) -> tensor<64x32xf32>
  %1 = stablehlo.custom_call @mine(%0) : (tensor<64x32xf32>) -> tensor<64x32xf32>
  %2 = stablehlo.dot %1, %w : (tensor<64x32xf32>, tensor<32x32xf32>) -> tensor<64x32xf32>
  return %2 : tensor<64x32xf32>
}
"""
HEAD = """custom_call_rule("mine").
%! mine(Op): a call of it.
mine(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"mine").
"""
RULE = f"""{HEAD}factor(Op,D,T,D)       :- mine(Op), tensor_dim(Op,T,D,_).
need_replication(Op,1) :- mine(Op).
"""
ROWS = toast.Constraints(pin={"arg0": PartitionSpec("data")})


@pytest.fixture
def module(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "program.mlir"
    path.write_text(MODULE)
    return path


def plan_of(module: pathlib.Path, rule: str) -> toast.Plan:
    path = module.with_name("rule.lp")
    path.write_text(rule)
    return toast.plan(
        module, mesh="data=4", hardware="tpu-v5e", rules=[path], constraints=ROWS, lowering="local"
    )


def rule_of(path: pathlib.Path, *rules: pathlib.Path, lowering: str = "local") -> SignatureRule:
    program = program_of(path)
    solved = solve_signatures(program, rules, lowering=lowering).rules  # type: ignore[arg-type]
    (rule,) = (
        rule
        for rule, signature in zip(solved, program.signatures, strict=True)
        if signature.kind == "custom_call"
    )
    return rule


def shardable(rule: SignatureRule) -> set[str]:
    return {factor.label for factor in rule.factors if not factor.need_replication}


def test_a_call_with_a_batch_like_rule_runs_on_shards(module: pathlib.Path) -> None:
    plan = plan_of(module, RULE)
    local = plan.lowered()
    assert "custom_call @mine(%1) : (tensor<16x32xf32>) -> tensor<16x32xf32>" in local.text
    assert not local.collectives
    assert not local.gathered
    assert "whole" not in plan.note


@pytest.mark.parametrize(
    "stated",
    ["states_sizes(Op) :- mine(Op).", "need_replication(Op,0) :- mine(Op), lowering(local)."],
)
def test_a_rule_can_say_that_it_runs_whole(stated: str, module: pathlib.Path) -> None:
    plan = plan_of(module, f"{RULE}{stated}\n")
    local = plan.lowered()
    assert "custom_call @mine(%2) : (tensor<64x32xf32>) -> tensor<64x32xf32>" in local.text
    assert [c.kind for c in local.collectives] == ["all_gather"]
    assert local.counts() == plan.model.local_collectives(plan.state)
    assert not local.gathered
    note = (
        "every device runs mine whole, because the call states the sizes of whole operands; wrap "
        "it in jax.shard_map"
    )
    assert (note in plan.note) == stated.startswith("states_sizes")


def test_xla_runs_it_whole(module: pathlib.Path) -> None:
    path = module.with_name("rule.lp")
    path.write_text(RULE)
    assert rule_of(module, path, lowering="xla").runs_whole
    rule = rule_of(module, path)
    assert not rule.runs_whole
    assert shardable(rule) == {"0"}


@pytest.mark.parametrize(
    ("line", "sharded"),
    [
        ('reduction(Op,rows,"add")', {"rows"}),
        ('reduction(Op,rows,"maximum")', {"rows"}),
        ('reduction(Op,rows,"other")', set()),
        ("gathered(Op,rows)", set()),
        ("halo(Op,rows,1)", set()),
        ("permutation(Op,rows)", set()),
        ('reduction(Op,rows,"add") :- mine(Op). states_sizes(Op)', set()),
        ("partitioned(Op)", {"rows"}),
        ("mine(Op)", set()),
    ],
)
def test_factors_that_are_not_batch_like_stay_whole(
    line: str, sharded: set[str], tmp_path: pathlib.Path
) -> None:
    program, path = tmp_path / "program.mlir", tmp_path / "rule.lp"
    program.write_text(call("mine", ["64x32xf32"], ["32xf32"]))
    path.write_text(
        f"{HEAD}factor(Op,rows,operand(0),0) :- mine(Op).\n"
        "factor(Op,columns,operand(0),1) :- mine(Op).\n"
        "factor(Op,columns,result(0),0) :- mine(Op).\n"
        f"need_replication(Op,columns) :- mine(Op).\n{line} :- mine(Op).\n"
    )
    assert shardable(rule_of(program, path)) == sharded


def test_parts_of_dimensions_and_new_dimensions_stay_whole(tmp_path: pathlib.Path) -> None:
    program, path = tmp_path / "program.mlir", tmp_path / "rule.lp"
    program.write_text(call("mine", ["64x8xf32", "8xf32"], ["8x8x8x4xf32"]))
    path.write_text(
        f"{HEAD}factor(Op,high,operand(0),0,0) :- mine(Op).\n"
        "factor(Op,low,operand(0),0,1) :- mine(Op).\n"
        "factor_size(Op,(high; low),8) :- mine(Op).\n"
        "factor(Op,high,result(0),0) :- mine(Op).\n"
        "factor(Op,low,result(0),1) :- mine(Op).\n"
        "factor(Op,batch,operand(0),1) :- mine(Op).\n"
        "factor(Op,batch,operand(1),0) :- mine(Op).\n"
        "factor(Op,batch,result(0),2) :- mine(Op).\n"
        "factor(Op,new,result(0),3) :- mine(Op).\n"
    )
    assert shardable(rule_of(program, path)) == {"batch"}


def test_partial_results_stay_partial(module: pathlib.Path) -> None:
    """``mine`` adds up its rows: a device adds up its own, and the sums meet afterwards."""
    module.write_text(
        "func.func public @main(%x: tensor<64x32xf32>) -> tensor<32xf32> {\n"
        "  %0 = stablehlo.custom_call @mine(%x) : (tensor<64x32xf32>) -> tensor<32xf32>\n"
        "  return %0 : tensor<32xf32>\n}\n"
    )
    plan = plan_of(
        module,
        f"{HEAD}factor(Op,rows,operand(0),0) :- mine(Op).\n"
        "factor(Op,columns,operand(0),1) :- mine(Op).\n"
        "factor(Op,columns,result(0),0) :- mine(Op).\n"
        'reduction(Op,rows,"add") :- mine(Op).\nneed_replication(Op,columns) :- mine(Op).\n',
    )
    local = plan.lowered()
    assert "custom_call @mine(%arg1) : (tensor<16x32xf32>) -> tensor<32xf32>" in local.text
    assert [(c.kind, c.bytes) for c in local.collectives] == [("reduce_scatter", 128.0)]
    assert local.counts() == plan.model.local_collectives(plan.state)


CHOLESKY = """func.func public @main(%x: tensor<8x4x4xf32>) -> (tensor<8x4x4xf32>, tensor<8xi32>) {
  %0 = stablehlo.transpose %x, dims = [0, 2, 1] : (tensor<8x4x4xf32>) -> tensor<8x4x4xf32>
  %1 = stablehlo.dot_general %x, %0, batching_dims = [0] x [0], contracting_dims = [2] x [1]
    : (tensor<8x4x4xf32>, tensor<8x4x4xf32>) -> tensor<8x4x4xf32>
  %2:2 = stablehlo.custom_call @lapack_spotrf_ffi(%1) {
    mhlo.backend_config = {uplo = 76 : ui8},
    operand_layouts = [dense<[1, 2, 0]> : tensor<3xindex>],
    result_layouts = [dense<[1, 2, 0]> : tensor<3xindex>, dense<0> : tensor<1xindex>],
    sdy.sharding_rule = #sdy.op_sharding_rule<
      ([i, j, k])->([i, l, m], [i]) {i=8, j=4, k=4, l=4, m=4}, custom>}
    : (tensor<8x4x4xf32>) -> (tensor<8x4x4xf32>, tensor<8xi32>)
  return %2#0, %2#1 : tensor<8x4x4xf32>, tensor<8xi32>
}
"""


def test_a_call_with_a_stated_rule_computes_the_same_on_shards(module: pathlib.Path) -> None:
    jax.jit(jax.numpy.linalg.cholesky)(jax.numpy.eye(2))  # registers the target
    module.write_text(CHOLESKY)
    plan = toast.plan(module, mesh="data=4", hardware="tpu-v5e", lowering="local", constraints=ROWS)
    local = plan.lowered()
    assert "(tensor<2x4x4xf32>) -> (tensor<2x4x4xf32>, tensor<2xi32>)" in local.text
    assert "sharding_rule" not in local.text  # it states whole sizes
    assert not local.collectives
    check = verify(local.program, local.shardings, module_of=lambda *_: local.module)
    assert check.equal, [output for output in check.outputs if not output.equal]


@pytest.mark.parametrize(
    ("target", "operands", "results", "sharded"),
    [
        ("te_scaled_softmax_forward_ffi", ["2x4x8x16xbf16"], ["2x4x8x16xbf16"], 3),
        ('"__gpu$TopK"', ["16x32xf32"], ["16x4xf32", "16x4xi32"], 1),
        # Scratch memory for whole operands.
        ("te_topk_ffi", ["4x32xf32", "4xi32"], ["4x8xf32", "4x8xi32", "64xui8"], 0),
        # Strides of whole operands.
        ('"__cublas$gemm"', ["64x32xf32", "32x16xf32"], ["64x16xf32", "64xi8"], 0),
    ],
)
def test_well_known_kernels_run_on_shards_if_their_calls_state_no_sizes(
    target: str, operands: list[str], results: list[str], sharded: int, tmp_path: pathlib.Path
) -> None:
    program = tmp_path / "program.mlir"
    dims = {"lhs_contracting_dimensions": ["1"], "rhs_contracting_dimensions": ["0"]}
    config = (
        {"gemm_backend_config": {"dot_dimension_numbers": dims}} if "cublas" in target else None
    )
    program.write_text(call(target, operands, results, config=config))
    rule = rule_of(program)
    assert not rule.missing
    assert rule.runs_whole == (not sharded)
    assert len(shardable(rule)) == sharded


@pytest.mark.parametrize("target", ["tpu_custom_call", '"__gpu$xla.gpu.triton"', "mosaic_gpu_v2"])
def test_compiled_kernels_run_whole(target: str, tmp_path: pathlib.Path) -> None:
    """Their grid and blocks are those of the whole operands."""
    program, path = tmp_path / "program.mlir", tmp_path / "rule.lp"
    path.write_text(RULE.replace("call_target_name", "kernel_name"))
    program.write_text(call(target, ["64x32xf32"], ["64x32xf32"], kernel="mine"))
    assert rule_of(program, path).runs_whole
    path.write_text(path.read_text() + "partitioned(Op) :- mine(Op).\n")
    assert shardable(rule_of(program, path)) == {"0"}
