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
