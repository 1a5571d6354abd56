"""The rules of kernels, on calls that JAX lowers for TPUs, and on calls written by hand."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import pytest

from tests.helpers import f32
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
    i32,
    kernels,
    labels,
    lowered,
    on_gpu,
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


# -- decoding, products of groups, and GPUs ------------------------------------------------------


@pytest.mark.parametrize(("heads", "shared", "query"), [(32, 4, "sequence,kv_headhead_of_group,")])
def test_paged_attention_shards_sequences_and_heads(heads: int, shared: int, query: str) -> None:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    pages = bf16(shared, 256, 16, 128)
    program = lowered(
        functools.partial(paged_attention, pages_per_compute_block=4),
        f32(16, heads, 128), pages, pages, i32(16), i32(16, 64),
    )  # fmt: skip
    ((_, _, rule),) = kernels(program)
    assert rule.einsum().startswith("([sequence],[sequencepage_of_sequence],")
    assert f"[{query}depth],[kv_head,page,slot,depth]" in rule.einsum()
    assert spread(rule) == {"sequence", "kv_head"}
    positions = 16 * 64 * 16
    assert cost(rule, "flops") == 4 * positions * heads * 128
    assert cost(rule, "bytes") == 2 * positions * shared * 128 * 2


def test_ragged_paged_attention_reads_the_pages_of_its_sequences() -> None:
    """Each of 512 tokens belongs to one of 8 sequences of 32 pages with 16 positions."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    device = jax.sharding.AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        program = lowered(
            functools.partial(
                ragged_paged_attention, num_kv_pages_per_block=8, num_queries_per_block=32
            ),
            bf16(512, 32, 128), bf16(1024, 16, 16, 128), i32(8), i32(8, 32), i32(9), i32(1),
        )  # fmt: skip
    ((_, _, rule),) = kernels(program)
    assert spread(rule) == {"kv_head"}
    assert cost(rule, "flops") == 4 * 512 * 32 * 16 * 32 * 128
    # Keys and values take turns in the third dimension of the pages.
    assert cost(rule, "bytes") == 8 * 32 * 16 * 16 * 128 * 2


def test_products_of_groups_and_their_gradients() -> None:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    arguments = bf16(1024, 512), bf16(8, 512, 256), i32(8)
    _, rows, groups = (
        rule for program in (lowered(gmm, *arguments), lowered(gradients(gmm, 2), *arguments))
        for _, _, rule in kernels(program)[-2:]
    )  # fmt: skip
    ((_, signature, forward),) = kernels(lowered(gmm, *arguments))
    for rule, einsum in (
        (forward, "[m,k],[group,k,n]) -> ([m,n]) reduction={k}"),
        (rows, "[m,k],[group,n,k]) -> ([m,n]) reduction={k}"),
        (groups, "[m,k],[m,n]) -> ([group,k,n])"),
    ):
        assert einsum in rule.einsum()
        assert spread(rule) == {"k", "n"}
        assert cost(rule, "flops") == signature.attribute("flops")


def test_a_square_group_may_be_transposed_or_not() -> None:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    ((_, signature, rule),) = kernels(lowered(gmm, bf16(1024, 512), bf16(8, 512, 512), i32(8)))
    assert rule.missing
    assert cost(rule, "flops") == signature.attribute("flops")


def test_attention_of_pallas_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_gpu(monkeypatch):
        from jax.experimental.pallas.ops.gpu.attention import mha

        tensor = bf16(2, 1024, 8, 64)
        attend = functools.partial(mha, segment_ids=None, causal=True)
        program = lowered(gradients(attend, 3), tensor, tensor, tensor, platform="cuda")
    rules = {name: rule for name, _, rule in kernels(program)}
    assert (
        rules["mha_forward"]
        .einsum()
        .startswith(
            "([batch(0),time,head,depth],[batch(0),source,head,depth],"
            "[batch(0),source,head,value_depth]) -> ([batch(0),time,head,value_depth]"
        )
    )
    assert "-> ([batch(0),head,time])" in rules["mha_preprocess_backward"].einsum()
    product = 2 * 8 * 1024 * 1024 * 64
    assert cost(rules["mha_backward"], "flops") == 14 * product
    assert all(spread(rule) == {"batch(0)", "head"} for rule in rules.values())


def test_norms_of_pallas_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_gpu(monkeypatch):
        from jax.experimental.pallas.ops.gpu.rms_norm import rms_norm

        program = lowered(rms_norm, f32(64, 128, 256), f32(256), f32(256), platform="cuda")
    ((_, _, rule),) = kernels(program)
    assert rule.einsum() == (
        "([batch(0),batch(1),feature],[feature],[feature]) -> ([batch(0),batch(1),feature]) "
        "need_replication={feature}"
    )


def test_attention_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, bias = bf16(2, 1024, 8, 64), bf16(2, 1024, 2, 64), bf16(1, 8, 1024, 1024)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    with on_gpu(monkeypatch):
        biased = lowered(
            gradients(functools.partial(attend, is_causal=True), 4),
            query, keys, keys, bias, platform="cuda",
        )  # fmt: skip
        lengths = lowered(
            lambda q, k, v, a, b: attend(q, k, v, query_seq_lengths=a, key_value_seq_lengths=b),
            query, keys, keys, i32(2), i32(2), platform="cuda",
        )  # fmt: skip
    (_, _, forward), (name, _, backward) = kernels(biased)
    assert name == "__cudnn$fmhaScaleBiasSoftmaxBackward"
    heads = "kv_headhead_of_group"
    assert f"([batch(0),time,{heads},depth],[batch(0),source,kv_head,depth]" in forward.einsum()
    assert f"-> ([batch(0),{heads},time,value_depth],[batch(0),{heads},time]" in forward.einsum()
    # A bias without a batch has a gradient that is summed over the batch; the others are not.
    assert labels(backward, lambda factor: factor.combiner == "add") == {"batch(0)"}
    product = 2 * 8 * 1024 * 1024 * 64
    assert cost(forward, "flops") == 4 * product / 2  # causal
    assert cost(backward, "flops") == 10 * product / 2
    assert cost(backward, "workspace") == 4 * 2 * 8 * 1024 * 64
    ((_, _, padded),) = kernels(lengths)
    assert "value_depth],[batch(0)],[batch(0)]) ->" in padded.einsum()
    assert cost(padded, "flops") == 4 * product


@pytest.mark.parametrize(
    ("target", "operands", "results", "config", "einsum"),
    [
        (
            "__cublas$lt$matmul$f8", ["4x64x32xf8E4M3FN", "4x16x32xf8E4M3FN", "f32", "f32"],
            ["4x64x16xbf16", "1024xi8"],
            {"gemm_backend_config": {"dot_dimension_numbers": {
                "lhs_contracting_dimensions": ["2"], "rhs_contracting_dimensions": ["2"],
                "lhs_batch_dimensions": ["0"], "rhs_batch_dimensions": ["0"],
            }}},
            "([batching(0),lhs(1),contracting(0)],[batching(0),rhs(1),contracting(0)],[],[]) -> "
            "([batching(0),lhs(1),rhs(1)],[own(result(1),0)]) reduction={contracting(0)} "
            "need_replication={own(result(1),0)}",
        ),
        (
            "__op$block_scaled_dot",
            ["4x64x32xf8E4M3FN", "4x16x32xf8E4M3FN", "4x64x2xf8E8M0FNU", "4x16x2xf8E8M0FNU"],
            ["4x64x16xbf16"], None,
            "([batch(0),m,k],[batch(0),n,k],[batch(0),m,k_block],[batch(0),n,k_block]) -> "
            "([batch(0),m,n]) need_replication={k,k_block}",
        ),
        (
            "te_norm_backward_ffi",
            ["8x64x32xbf16", "8x64x32xbf16", "8x64xf32", "8x64xf32", "32xbf16"],
            ["8x64x32xbf16", "32xbf16", "32xbf16", "4096xui8"], None,
            "([batch(0),batch(1),feature],[batch(0),batch(1),feature],[batch(0),batch(1)],"
            "[batch(0),batch(1)],[feature]) -> "
            "([batch(0),batch(1),feature],[feature],[feature],[scratch_byte]) "
            "reduction={batch(0),batch(1)} need_replication={feature,scratch_byte}",
        ),
    ],
)  # fmt: skip
def test_calls_written_by_hand(
    target: str,
    operands: list[str],
    results: list[str],
    config: dict[str, Any] | None,
    einsum: str,
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "call.mlir"
    path.write_text(call(f'"{target}"', operands, results, config=config))
    ((_, _, rule),) = kernels(program_of(path))
    assert rule.einsum() == einsum
    if "batch" in target or "cublas" in target or "scaled_dot" in target:
        assert cost(rule, "flops") == 2 * 4 * 64 * 32 * 16


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
        (
            "kernel_cost(Op,elements,1,operand(2)) :- mine(Op).",
            "own.lp:1: .*is no tensor of the op",
        ),
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


def test_a_rule_that_another_call_states_does_not_partition_it(tmp_path: pathlib.Path) -> None:
    """Shardy propagates by it; XLA knows a partitioner for custom_partitioning only."""
    path = tmp_path / "stated.mlir"
    path.write_text(call("mine", ["8x8xf32", "4xf32"], ["8x16xf32"], attributes=STATED))
    ((_, _, rule),) = kernels(program_of(path), partitioned=False)
    assert (rule.missing, rule.runs_whole, spread(rule)) == (False, True, set())
