"""Programs that call well-known kernels, lowered for TPUs and GPUs on any machine."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from toast.analysis.rules import SignatureRule, solve_rules
from toast.api import program_of
from toast.program import Program, Signature


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float16)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def gradients(f: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The gradient of the sum of ``f`` by its first ``number`` arguments."""

    def scalar(*arguments: Any) -> Any:
        return f(*arguments).astype(jnp.float32).sum()

    return jax.grad(scalar, tuple(range(number)))


def lowered(f: Callable[..., Any], *arguments: Any, platform: str = "tpu") -> Program:
    return program_of(f, *arguments, platform=platform)


def kernels(
    program: Program, rules: Sequence[Any] = (), *, partitioned: bool = True
) -> list[tuple[str, Signature, SignatureRule]]:
    """The distinct calls of kernels with their rules, in program order."""
    solved = solve_rules(program, rules, partitioned=partitioned)
    return [
        (str(s.attribute("kernel_name") or s.attribute("call_target_name")), s, rule)
        for s, rule in zip(program.signatures, solved, strict=True)
        if s.kind == "custom_call" and s.attribute("call_target_name") != "Sharding"
    ]


def cost(rule: SignatureRule, quantity: str) -> float:
    return sum(c.amount for c in rule.costs if c.quantity == quantity)


def labels(rule: SignatureRule, chosen: Callable[[Any], bool]) -> set[str]:
    return {factor.label for factor in rule.factors if chosen(factor)}


def spread(rule: SignatureRule) -> set[str]:
    """The factors that a mesh axis may shard."""
    return labels(rule, lambda factor: factor.shardable)


# -- TPU --------------------------------------------------------------------------------------

#: Two sequences of 1,024 queries and keys, 8 heads of 128.
Q = bf16(2, 8, 1024, 128)
#: The same with two heads of keys, and with one for all.
GROUPED, SHARED = bf16(2, 2, 1024, 128), bf16(2, 1024, 128)


def splash(*, shared: bool = False, fused: bool = False, residuals: bool = False) -> Any:
    """Causal splash attention of a batch, in blocks of 512."""
    from jax.experimental.pallas.ops.tpu import splash_attention as module

    sizes = module.BlockSizes(
        block_q=512, block_kv=512, block_kv_compute=512,
        block_q_dkv=512, block_kv_dkv=512, block_kv_dkv_compute=512,
        block_q_dq=None if fused else 512, block_kv_dq=None if fused else 512,
        use_fused_bwd_kernel=fused,
    )  # fmt: skip
    mask = module.MultiHeadMask([module.CausalMask((1024, 1024))] * 8)
    make = module.make_splash_mqa_single_device if shared else module.make_splash_mha_single_device
    return jax.vmap(make(mask=mask, block_sizes=sizes, save_residuals=residuals))


def splash_segments() -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as module

    return module.SegmentIds(i32(2, 1024), i32(2, 1024))


def flash(*arguments: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return flash_attention(*arguments, causal=True)


def flash_segments() -> Any:
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds

    return SegmentIds(i32(2, 1024), i32(2, 1024))


@functools.cache
def splash_gradient(*, shared: bool = False, fused: bool = False) -> Program:
    keys = SHARED if shared else GROUPED
    return lowered(gradients(splash(shared=shared, fused=fused), 3), Q, keys, keys)


# -- GPU --------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are lowered for an H100, with cuDNN, although there is none."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with warnings.catch_warnings(), jax.sharding.use_abstract_mesh(mesh):
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


# -- StableHLO by hand --------------------------------------------------------------------------


def call(
    target: str,
    operands: Sequence[str],
    results: Sequence[str],
    *,
    kernel: str = "",
    config: Any = None,
    attributes: str = "",
) -> str:
    """A module with one custom call; types such as ``8x4xf32``."""
    named = [f"%a{i}: tensor<{type_}>" for i, type_ in enumerate(operands)]
    types = ", ".join(f"tensor<{type_}>" for type_ in operands)
    given = ", ".join(f"tensor<{type_}>" for type_ in results)
    count = len(results)
    back = f"({given})" if count != 1 else given
    stated = [attributes] if attributes else []
    if kernel:
        stated.append(f'kernel_name = "{kernel}"')
    if config is not None:
        text = json.dumps(config).replace('"', "\\22")
        stated.append(f'backend_config = "{text}"')
    values = ", ".join(f"%0#{i}" if count != 1 else "%0" for i in range(count))
    return (
        f"func.func public @main({', '.join(named)}) -> {back} {{\n"
        f"  %0{f':{count}' if count != 1 else ''} = stablehlo.custom_call @{target}"
        f"({', '.join(f'%a{i}' for i in range(len(operands)))}) {{{', '.join(stated)}}}"
        f" : ({types}) -> {back}\n"
        f"  return {values} : {given}\n}}\n"
    )
