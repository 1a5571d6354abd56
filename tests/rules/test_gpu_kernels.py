"""The rules of kernels of GPUs: those that JAX lowers on any machine, and calls as others publish them."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.rules.kernels import (
    bf16,
    cost,
    f16,
    gradients,
    i32,
    kernels,
    labels,
    lowered,
    on_gpu,
    spread,
)
from toast.analysis.rules import SignatureRule
from toast.api import program_of

#: Queries times keys of all heads of a batch of two, times the depth.
PRODUCT = 2 * 8 * 1024 * 1024 * 64


def rules_of(f: Any, *arguments: Any, monkeypatch: pytest.MonkeyPatch) -> list[SignatureRule]:
    with on_gpu(monkeypatch):
        return [rule for _, _, rule in kernels(lowered(f, *arguments, platform="cuda"))]


# -- Mosaic -----------------------------------------------------------------------------------


def test_attention_of_mosaic(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as module

    class Versions:
        @staticmethod
        def cuda_runtime_get_version() -> int:
            return 12091

    monkeypatch.setattr(module, "cuda_versions", Versions)
    sizes = module.TuningConfig(
        block_q=64, block_kv=64, max_concurrent_steps=2,
        block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64,
    )  # fmt: skip
    query, key = f16(2, 1024, 8, 64), f16(2, 1024, 2, 64)
    forward, queries, keys = rules_of(
        gradients(lambda q, k, v: module.attention(q, k, v, sizes), 3), query, key, key,
        monkeypatch=monkeypatch,
    )  # fmt: skip
    heads = "kv_headhead_of_group"
    assert forward.einsum().startswith(
        f"([batch(0),time,{heads},depth],[batch(0),source,kv_head,depth],"
        f"[batch(0),source,kv_head,value_depth]) -> ([batch(0),time,{heads},value_depth],"
        f"[batch(0),{heads},time])"
    )
    # Gradients of keys and values are those of each head of queries.
    assert f"-> ([batch(0),source,{heads},depth],[batch(0),source,{heads}" in keys.einsum()
    assert [cost(rule, "flops") / PRODUCT for rule in (forward, queries, keys)] == [4, 6, 8]
    assert all(spread(rule) == {"batch(0)", "kv_head"} for rule in (forward, queries, keys))


def test_products_of_mosaic(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as ragged

    monkeypatch.setattr(hopper, "get_num_sms", lambda: 132)
    sizes = hopper.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    lhs, rhs, added = f16(512, 512), f16(512, 512), f16(512, 512)
    product, addition = (
        rules_of(
            lambda a, b, c=None: hopper.matmul(a, b, c, sizes), *operands, monkeypatch=monkeypatch
        )[0]
        for operands in ((lhs, rhs), (lhs, rhs, added))
    )
    assert product.einsum() == "([m,k],[k,n]) -> ([m,n]) reduction={k}"
    # In shards of k, each device would add the matrix.
    assert addition.einsum() == "([m,k],[k,n],[m,n]) -> ([m,n]) need_replication={k}"
    assert cost(product, "flops") == cost(addition, "flops") == 2 * 512**3
    groups = functools.partial(
        ragged.ragged_dot, block_m=64, block_n=64, block_k=64, max_concurrent_steps=2,
        grid_block_n=2,
    )  # fmt: skip
    (rule,) = rules_of(
        lambda a, b, g: groups(a, b, group_sizes=g), f16(512, 1024), f16(4, 1024, 256), i32(4),
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert "[m,k],[group,k,n]) -> ([m,n]) reduction={k}" in rule.einsum()
    assert cost(rule, "flops") == 2 * 512 * 1024 * 256


def test_a_mosaic_kernel_without_products_is_none_of_them(tmp_path: pathlib.Path) -> None:
    """Three matrices of one shape may also be a sum: the code tells."""
    estimate = json.dumps({"flops": 7}).replace('"', "\\22")
    configs = (
        'module = "\\00stable_mosaic_gpu\\00add_mosaic_gpu\\00"',
        'module = "wgmma\\00product_mosaic_gpu\\00"',
        f'module = "\\00anonymous_mosaic_gpu\\00", cost_estimate_json = "{estimate}"',
    )
    shapes = ["64x64xf16"] * 2, ["64x64xf16"]
    program = program_of(
        module_of(tmp_path / "calls.mlir", [("mosaic_gpu_v2", *shapes, c) for c in configs])
    )
    found = [(name, rule.missing, cost(rule, "flops")) for name, _, rule in kernels(program)]
    assert found == [
        ("add", True, 0), ("product", False, 2 * 64**3), ("mosaic_gpu_v2", True, 7),
    ]  # fmt: skip


# -- Triton -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arrays", [1, 2])
def test_paged_attention_reads_the_pages_of_its_sequences(
    arrays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_gpu(monkeypatch):
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    pages = f16(8, 4096, 16, 64)

    def attend(q: Any, k: Any, table: Any, lengths: Any, v: Any = None) -> Any:
        return paged_attention(q, k, k if v is None else v, table, lengths)

    operands = [f16(4, 128, 64), pages, i32(4, 32), i32(4), *[pages] * (arrays - 1)]
    (rule,) = rules_of(attend, *operands, monkeypatch=monkeypatch)
    assert spread(rule) == {"batch(0)", "kv_head", "head_of_group"}
    # Four sequences of 32 pages with 16 positions, of 4,096 pages.
    positions = 4 * 32 * 16
    assert cost(rule, "flops") == 4 * positions * 128 * 64
    assert cost(rule, "bytes") == arrays * positions * 8 * 64 * 2


# -- cuDNN ------------------------------------------------------------------------------------


def test_attention_of_cudnn_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = functools.partial(
        jax.nn.dot_product_attention, implementation="cudnn", is_causal=True,
        local_window_size=(255, 0),
    )  # fmt: skip
    query, key = bf16(2, 1024, 8, 64), bf16(2, 1024, 2, 64)
    (rule,) = rules_of(attend, query, key, key, monkeypatch=monkeypatch)
    seen = (2 * 256 * 1024 - 256**2) / (2 * 1024**2)
    assert cost(rule, "flops") == seen * 4 * PRODUCT


def test_attention_of_cudnn_on_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.cudnn import fused_attention_stablehlo as module

    tensor = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.float8_e4m3fn)

    def attend(*tensors: Any) -> Any:
        one = jnp.ones((1, 1, 1, 1), jnp.float32)
        return module.dot_product_attention(
            *tensors, scale=1.0, mask_type=module.MaskType.CAUSAL, use_fp8=True,
            fp8_params=dict.fromkeys(module.fp8_params_keys, one),
        )[0]  # fmt: skip

    forward, backward = rules_of(
        lambda q, k, v: jax.vjp(attend, q, k, v)[1](q), tensor, tensor, tensor,
        monkeypatch=monkeypatch,
    )  # fmt: skip
    for rule, flops in ((forward, 4), (backward, 10)):
        assert cost(rule, "flops") == flops * PRODUCT  # half of the pairs, twice the depth
        # The largest elements of results are those of all batches and heads.
        greatest = labels(rule, lambda factor: factor.combiner == "maximum")
        assert spread(rule) == greatest == {"batch(0)", "head"}


# -- calls written by hand --------------------------------------------------------------------

#: Operands and results of cuDNN's norms in the tests of XLA's pass, which makes these calls.
IMAGE, CHANNEL, MOMENT = "48x8x1x1xf32", "8x1x1x1xf32", "48x1x1x1xf32"
#: Operands of TransformerEngine's attention after queries, keys and values.
NOTHING, OFFSETS = ["0xbf16", "0xf32"], ["3xi32", "3xi32", *["0xi32"] * 6]
HEADS, KEYS = "2x64x8x16xbf16", "2x64x2x16xbf16"

CALLS: dict[str, tuple[str, list[str], list[str], str, str, set[str], float]] = {
    "norm": (
        "__cudnn$norm", [IMAGE, CHANNEL, CHANNEL], [IMAGE, "512xui8"], "",
        "([row,first,second,third],[first,second,third,unit],", {"row"}, 0,
    ),
    "norm with statistics": (
        "__cudnn$norm", [IMAGE, CHANNEL, CHANNEL], [IMAGE, MOMENT, MOMENT, "512xui8"], "",
        "[row,own(result(1),1)", {"row"}, 0,
    ),
    "gradients of a norm": (
        "__cudnn$norm", [IMAGE, CHANNEL, IMAGE, MOMENT, MOMENT], [IMAGE, CHANNEL, CHANNEL, "512xui8"],
        "", "reduction={row}", {"row"}, 0,
    ),
    "largest": (
        "__gpu$TopK", ["6x2048xf32"], ["6x8xf32", "6x8xi32"], "",
        "([batch(0),searched]) -> ([batch(0),best],[batch(0),best])", {"batch(0)"}, 0,
    ),
    "largest of TransformerEngine": (
        "te_topk_ffi", ["6x2048xf32", "6xi32"], ["6x8xf32", "6x8xi32", "512xui8"], "",
        "([batch(0),searched],[batch(0)]) -> ([batch(0),best],[batch(0),best],", {"batch(0)"}, 0,
    ),
    "sorted keys": (
        "__cub$DeviceRadixSort", ["4x1000xf32"], ["4x1000xf32", "4096xui8"], "",
        "([batch(0),searched]) -> ([batch(0),searched],[scratch_byte])", {"batch(0)"}, 0,
    ),
    "sorted pairs": (
        "xla.gpu.ext.cub_sort_pairs", ["1000xui32", "1000xf32"], ["1000xui32", "1000xf32", "64xui8"],
        "", "([searched],[searched]) -> ([searched],[searched],[scratch_byte])", set(), 0,
    ),
    "attention of TransformerEngine": (
        "te_fused_attn_forward_ffi",
        [HEADS, KEYS, KEYS, *NOTHING, "1x4xui32", *OFFSETS, "0xi32"],
        [HEADS, "2x8x64x1xf32", "1x4xui32", "512xui8"],
        "mask_type = 2 : i64, window_size_left = 15 : i64",
        "([batch(0),time,kv_headhead_of_group,depth],[batch(0),source,kv_head,depth],", {"kv_head"},
        4 * 2 * 8 * 64 * 64 * 16 * (2 * 16 * 64 - 16**2) / (2 * 64**2),
    ),
    "gradients of it": (
        "te_fused_attn_backward_ffi",
        [HEADS, KEYS, KEYS, *NOTHING, "2x8x64x1xf32", "1x4xui32", HEADS, HEADS, *OFFSETS],
        [HEADS, KEYS, KEYS, *NOTHING, "512xui8"],
        "mask_type = 3 : i64, window_size_left = -1 : i64",
        "-> ([batch(0),time,kv_headhead_of_group,depth],[batch(0),source,kv_head,depth],",
        {"kv_head"}, 10 * 2 * 8 * 64 * 64 * 16 / 2,
    ),
    "product of TransformerEngine": (
        "te_gemm_v2_ffi",
        ["4x64x32xbf16", "0xf32", "32x16xbf16", "0xf32", "0xbf16", "1xf32", "1xf32"],
        ["4x64x16xbf16", "4096xui8"],
        "config = {lhs_axis_boundary = 2 : i64, lhs_transposed = false, rhs_axis_boundary = 1 : i64, "
        "rhs_transposed = false}",
        "([(0,0),(0,1),contracting(0)],", {"(0,0)", "(0,1)", "(2,1)", "contracting(0)"},
        2 * 4 * 64 * 32 * 16,
    ),
    "gradient of its weights": (
        "te_gemm_ffi",
        ["4x64x32xbf16", "0xf32", "4x64x16xbf16", "0xf32", "0xbf16", "0xbf16"],
        ["32x16xbf16", "4096xui8"],
        "lhs_axis_boundary = 2 : i64, lhs_transposed = true, rhs_axis_boundary = 2 : i64, "
        "rhs_transposed = false",
        "", {"(0,2)", "(2,2)", "contracting(0)", "contracting(1)"}, 2 * 4 * 64 * 32 * 16,
    ),
    "products of its groups": (
        "te_grouped_gemm_v2_ffi",
        ["512x64xbf16", "0xf32", "4x64x32xbf16", "0xf32", "f32", "4xi32", *["0xi32"] * 3, "4xi32",
         "0xi32", "4xf32", "4xf32"],
        ["512x32xbf16", "4096xui8", "64xui8", "32xui8"], "rhs_is_trans = false",
        "([m,k],[own(operand(1),0)],[group,k,n],", {"k", "n"}, 2 * 512 * 64 * 32,
    ),
}  # fmt: skip


def module_of(
    path: pathlib.Path, calls: Sequence[tuple[str, list[str], list[str], str]]
) -> pathlib.Path:
    """A program of calls: target, operands, results and configuration of each."""
    lines, arguments, returned = [], [], []
    for number, (target, operands, results, config) in enumerate(calls):
        names = [f"%a{number}_{place}" for place in range(len(operands))]
        types, given = ([f"tensor<{type_}>" for type_ in side] for side in (operands, results))
        arguments += map(": ".join, zip(names, types, strict=True))
        back = [
            f"%{number}#{place}" if len(given) > 1 else f"%{number}" for place in range(len(given))
        ]
        returned += zip(back, given, strict=True)
        count = f":{len(given)}" if len(given) > 1 else ""
        types_of_results = f"({', '.join(given)})" if len(given) > 1 else given[0]
        attributes = f"api_version = 4 : i32, mhlo.backend_config = {{{config}}}" if config else ""
        lines.append(
            f'  %{number}{count} = stablehlo.custom_call @"{target}"({", ".join(names)}) '
            f"{{{attributes}}} : ({', '.join(types)}) -> {types_of_results}"
        )
    values, types = zip(*returned, strict=True)
    path.write_text(
        f"func.func public @main({', '.join(arguments)}) -> ({', '.join(types)}) {{\n"
        + "\n".join(lines)
        + f"\n  return {', '.join(values)} : {', '.join(types)}\n}}\n"
    )
    return path


def test_calls_written_by_hand(tmp_path: pathlib.Path) -> None:
    path = module_of(tmp_path / "calls.mlir", [case[:4] for case in CALLS.values()])
    rules = [rule for _, _, rule in kernels(program_of(path))]
    for (name, (*_, einsum, spreading, flops)), rule in zip(CALLS.items(), rules, strict=True):
        assert not rule.missing, name
        assert einsum in rule.einsum(), name
        assert spread(rule) == spreading, name
        assert cost(rule, "flops") == flops, name


#: Calls with another operand than one of the calls above.
OTHERS = (
    ("attention of TransformerEngine", 3, "1x8x64x64xbf16"),  # a bias
    ("attention of TransformerEngine", 0, "2x64x3x8x16xbf16"),  # packed
    ("product of TransformerEngine", 4, "16xbf16"),
    ("product of TransformerEngine", 2, "48x16xbf16"),
    ("products of its groups", 4, "4x32xbf16"),
    ("products of its groups", 0, "32768xf8E4M3FN"),
    ("norm", 1, "16x1x1x1xf32"),
)


def test_other_forms_have_no_rule(tmp_path: pathlib.Path) -> None:
    calls = []
    for name, operand, shape in OTHERS:
        target, operands, results, config, *_ = CALLS[name]
        operands = [*operands[:operand], shape, *operands[operand + 1 :]]
        calls.append((target, operands, results, config))
    rules = [rule for _, _, rule in kernels(program_of(module_of(tmp_path / "calls.mlir", calls)))]
    assert len(rules) == len(OTHERS)
    assert all(rule.missing for rule in rules)
