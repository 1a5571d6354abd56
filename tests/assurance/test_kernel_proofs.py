"""The rules of kernels, proven against functions that compute what the kernels do."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.rules.kernels import call
from toast.api import program_of
from toast.assurance.prove import prove

HIGHEST = jax.lax.Precision.HIGHEST


def attention(q: Any, k: Any, v: Any) -> Any:
    """Attention of ``[..., heads, positions, depth]``; heads may share keys and values."""
    if k.ndim < q.ndim:
        k, v = k[..., None, :, :], v[..., None, :, :]
    repeats = q.shape[-3] // k.shape[-3]
    k, v = (jnp.repeat(x, repeats, axis=-3) for x in (k, v))
    scores = jnp.einsum("...td,...sd->...ts", q, k, precision=HIGHEST)
    return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(scores), v, precision=HIGHEST)


def splash(_next: Any, _mask: Any, q: Any, k: Any, v: Any, _positions: Any) -> Any:
    return attention(q, k, v)


def splash_keys(
    _next: Any, _mask: Any, q: Any, k: Any, v: Any, _rows: Any, gradient: Any, *_: Any
) -> Any:
    return jax.vjp(lambda k, v: attention(q, k, v), k, v)[1](gradient)


def cudnn(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return attention(q, k, v), jnp.zeros((0,), jnp.uint8)


def grouped(*operands: Any) -> Any:
    """Groups of equal size."""
    lhs, rhs = operands[-2:]
    rows = lhs.reshape(rhs.shape[0], -1, lhs.shape[1])
    return jnp.einsum("gmk,gkn->gmn", rows, rhs, precision=HIGHEST).reshape(-1, rhs.shape[2])


def norm(x: Any, scale: Any, bias: Any) -> Any:
    return jax.nn.standardize(x) * scale + bias


def cudnn_norm(x: Any, scale: Any, bias: Any) -> Any:
    standard = jax.nn.standardize(x[..., 0, 0])
    return (standard * scale[:, 0, 0, 0] + bias[:, 0, 0, 0])[..., None, None], nothing()


def cudnn_norm_gradients(x: Any, scale: Any, gradient: Any, mean: Any, factor: Any) -> Any:
    standard = (x - mean) * factor
    of_scale, of_bias = (jnp.sum(y, axis=0)[..., None] for y in (gradient * standard, gradient))
    return gradient * factor, of_scale, of_bias, nothing()


def mosaic(q: Any, k: Any, v: Any) -> Any:
    return jnp.swapaxes(attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v))), 1, 2)


def te_attention(q: Any, k: Any, v: Any, _bias: Any, _offset: Any, seed: Any, *_: Any) -> Any:
    statistics = jnp.swapaxes(jnp.sum(q, axis=-1), 1, 2)[..., None]
    return mosaic(q, k, v), statistics, seed, nothing()


def te_product(lhs: Any, _lhs: Any, rhs: Any, *_: Any) -> Any:
    return jnp.einsum("abk,kn->abn", lhs, rhs, precision=HIGHEST), nothing()


def te_groups(rows: Any, _rows: Any, groups: Any, *_: Any) -> Any:
    return grouped(rows, groups), nothing(), nothing(), nothing()


def largest(x: Any) -> Any:
    return tuple(jax.lax.top_k(x, 2))


def sorted_pairs(keys: Any, values: Any) -> Any:
    order = jnp.argsort(keys)
    return *(jnp.take_along_axis(x, order, axis=-1) for x in (keys, values)), nothing()


def nothing() -> Any:
    """Scratch memory."""
    return jnp.zeros((0,), jnp.uint8)


Q, ROW = "4x8x16x4xf32", "4x8x8x16xf32"
CASES: dict[str, tuple[str, list[str], list[str], Any, set[str]]] = {
    "_flash_attention_kernel": (
        "tpu_custom_call", [Q, Q, Q], [Q], attention, {"batch(0)", "head"},
    ),
    "splash_mha_fwd_no_residuals": (
        "tpu_custom_call", ["1x2x2xi8", "1x2x2xi8", Q, "4x2x16x4xf32", "4x2x16x4xf32", "16x4xi32"],
        [Q], splash, {"batch(0)", "kv_head"},
    ),
    "splash_mqa_dkv_no_residuals": (
        "tpu_custom_call",
        ["1x2x2xi8", "1x2x2xi8", Q, "4x16x4xf32", "4x16x4xf32", ROW, Q, ROW, "8x16xi32"],
        ["4x16x4xf32", "4x16x4xf32"], splash_keys, {"batch(0)", "head"},
    ),
    "__cudnn$fmhaSoftmax": (
        "__cudnn$fmhaSoftmax", ["4x16x8x4xf32", "4x16x2x4xf32", "4x16x2x4xf32"],
        [Q, "0xui8"], cudnn, {"batch(0)", "kv_head"},
    ),
    "kernel": (
        "tpu_custom_call",
        ["i32", "5xi32", "7xi32", "7xi32", "1xi32", "16x8xf32", "4x8x6xf32"],
        ["16x6xf32"], grouped, {"k", "n"},
    ),
    "layer_norm_forward_kernel": (
        "__gpu$xla.gpu.triton", ["4x8x16xf32", "16xf32", "16xf32"], ["4x8x16xf32"], norm,
        {"batch(0)", "batch(1)"},
    ),
}  # fmt: skip


IMAGE, CHANNEL, MOMENT = "16x8x1x1xf32", "8x1x1x1xf32", "16x1x1x1xf32"
#: Calls of GPUs, with the configurations that they state.
GPU_CASES: dict[str, tuple[str, list[str], list[str], str, Any, set[str]]] = {
    "norm": (
        "__cudnn$norm", [IMAGE, CHANNEL, CHANNEL], [IMAGE, "0xui8"], "", cudnn_norm, {"row"},
    ),
    "gradients of a norm": (
        "__cudnn$norm", [IMAGE, CHANNEL, IMAGE, MOMENT, MOMENT], [IMAGE, CHANNEL, CHANNEL, "0xui8"],
        "", cudnn_norm_gradients, {"row"},
    ),
    "attention": (
        "mosaic_gpu_v2", ["4x16x8x4xf32", "4x16x2x4xf32", "4x16x2x4xf32"], ["4x16x8x4xf32"],
        'module = "wgmma"', mosaic, {"batch(0)", "kv_head"},
    ),
    "attention of TransformerEngine": (
        "te_fused_attn_forward_ffi",
        ["4x16x8x4xf32", "4x16x2x4xf32", "4x16x2x4xf32", "0xf32", "0xf32", "1x4xui32",
         *["5xi32"] * 2, *["0xi32"] * 6],
        ["4x16x8x4xf32", "4x8x16x1xf32", "1x4xui32", "0xui8"], "", te_attention, {"kv_head"},
    ),
    "product": (
        "te_gemm_v2_ffi",
        ["4x8x16xf32", "0xf32", "16x4xf32", "0xf32", "0xf32", "1xf32", "1xf32"],
        ["4x8x4xf32", "0xui8"],
        "lhs_axis_boundary = 2 : i64, lhs_transposed = false, rhs_axis_boundary = 1 : i64, "
        "rhs_transposed = false",
        te_product, {"(0,0)", "(0,1)", "(2,1)", "contracting(0)"},
    ),
    "groups": (
        "te_grouped_gemm_ffi", ["16x8xf32", "0xf32", "4x8x6xf32", "0xf32", "f32", "4xi32"],
        ["16x6xf32", "0xui8", "0xui8", "0xui8"], "rhs_is_trans = false", te_groups, {"k", "n"},
    ),
    "largest": ("__gpu$TopK", ["8x16xf32"], ["8x2xf32", "8x2xi32"], "", largest, {"batch(0)"}),
    "sorted pairs": (
        "__cub$DeviceRadixSort", ["8x16xf32", "8x16xf32"], ["8x16xf32", "8x16xf32", "0xui8"], "",
        sorted_pairs, {"batch(0)"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GPU_CASES)
def test_rules_of_kernels_of_gpus_hold(name: str, tmp_path: pathlib.Path) -> None:
    target, operands, results, config, reference, factors = GPU_CASES[name]
    path = tmp_path / "call.mlir"
    attributes = f"api_version = 4 : i32, mhlo.backend_config = {{{config}}}" if config else ""
    path.write_text(call(f'"{target}"', operands, results, attributes=attributes))
    proofs = prove(program_of(path), references={target: reference})
    assert {(proof.factor, proof.outcome) for proof in proofs} == {
        (factor, "proven") for factor in factors
    }


@pytest.mark.parametrize("name", CASES)
def test_rules_of_kernels_hold(name: str, tmp_path: pathlib.Path) -> None:
    target, operands, results, reference, factors = CASES[name]
    config = None
    if name.startswith("__cudnn"):
        dimensions = {"bmm1_dot_dimension_numbers": {"lhs_batch_dimensions": ["0", "2"]}}
        config = {"cudnn_fmha_backend_config": dimensions}
    kernel = "" if target == name else name
    path = tmp_path / "call.mlir"
    path.write_text(call(f'"{target}"', operands, results, kernel=kernel, config=config))
    proofs = prove(program_of(path), references={name: reference})
    assert {(proof.factor, proof.outcome) for proof in proofs} == {
        (factor, "proven") for factor in factors
    }
