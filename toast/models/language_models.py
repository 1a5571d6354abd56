"""Open language models, as their authors published them, in the forms of :mod:`decoder`."""

from __future__ import annotations

import dataclasses
from typing import Any

from toast.models import decoder
from toast.models.decoder import DecoderConfig
from toast.models.registry import Entry, Strategies, entry

LLAMA31_8B = DecoderConfig(
    layers=32, d_model=4096, hidden=14336, heads=32, kv_heads=8, key_size=128, vocabulary=128256
)
LLAMA31_70B = dataclasses.replace(LLAMA31_8B, layers=80, d_model=8192, hidden=28672, heads=64)
LLAMA31_405B = dataclasses.replace(LLAMA31_8B, layers=126, d_model=16384, hidden=53248, heads=128)
LLAMA2_7B = dataclasses.replace(
    LLAMA31_8B, hidden=11008, kv_heads=32, vocabulary=32000, rope_theta=10_000.0, sequence=4096
)
MISTRAL_7B = dataclasses.replace(LLAMA31_8B, vocabulary=32000, rope_theta=1e6)

QWEN3_8B = dataclasses.replace(
    LLAMA31_8B, layers=36, hidden=12288, vocabulary=151936, rope_theta=1e6, qk_norm=True
)
QWEN3_30B_A3B = dataclasses.replace(
    QWEN3_8B, layers=48, d_model=2048, hidden=0, kv_heads=4,
    experts=128, chosen=8, expert_hidden=768, balance=0.001,
)  # fmt: skip

MIXTRAL_8X7B = dataclasses.replace(
    MISTRAL_7B, hidden=0, experts=8, chosen=2, expert_hidden=14336, balance=0.02
)

DEEPSEEK_V2_LITE = DecoderConfig(
    layers=27, d_model=2048, hidden=10944, heads=16, kv_heads=16, vocabulary=102400,
    key_size=192, value_size=128, rotary_size=64, latent=512, rope_theta=10_000.0,
    experts=64, chosen=6, shared=2, expert_hidden=1408, dense_layers=1, balance=0.001,
    sequence=4096,
)  # fmt: skip
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK_V2_LITE, layers=61, d_model=7168, hidden=18432, heads=128, kv_heads=128,
    vocabulary=129280, query_latent=1536,
    experts=256, chosen=8, shared=1, expert_hidden=2048, dense_layers=3, balance=0.0001,
)  # fmt: skip

GEMMA3_4B = DecoderConfig(
    layers=34, d_model=2560, hidden=10240, heads=8, kv_heads=4, key_size=256, vocabulary=262144,
    activation="gelu", tied=True, scale_embedding=True, norm_offset=1.0, qk_norm=True,
    post_norms=True, rope_theta=1e6, window=1024,
)  # fmt: skip
GEMMA3_12B = dataclasses.replace(
    GEMMA3_4B, layers=48, d_model=3840, hidden=15360, heads=16, kv_heads=8
)
GEMMA3_27B = dataclasses.replace(
    GEMMA3_4B, layers=62, d_model=5376, hidden=21504, heads=32, kv_heads=16, key_size=128
)


def tiny(config: DecoderConfig) -> DecoderConfig:
    """A form of ``config`` that is small enough to run on CPU devices in a test.

    It has the parts of ``config`` and two layers, or a few periods of layers.
    """
    c = config
    sizes = {
        "layers": max(2, c.dense_layers and 3, bool(c.window) and 5), "period": 2, "window": 4,
        "d_model": 32, "hidden": 64, "heads": 8, "kv_heads": 4, "key_size": 8, "value_size": 4,
        "rotary_size": 4, "latent": 16, "query_latent": 16, "vocabulary": 64,
        # No expert drops a token, so that decoding and a prompt give the same logits.
        "experts": 8, "chosen": 2, "expert_hidden": 32, "dense_layers": 1, "capacity": 4.0,
    }  # fmt: skip
    changes: dict[str, Any] = {name: size for name, size in sizes.items() if getattr(c, name)}
    if c.latent:
        changes["kv_heads"] = changes["heads"]
    return dataclasses.replace(
        c, **changes, batch=8, sequence=16, loss_parts=2, page=4, precision="f32"
    )


_BATCH, _SEQUENCE, _WIDTH = ("tokens", 0), ("tokens", 1), ("params['embedding']", 1)
_HIDDEN = ("params['layers']*['gate']", -1)
_VOCABULARY = (("params['embedding']", 0), ("params['output']", 1))
_EXPERTS = ("params['layers']*['expert_up']", -3)
_EXPERT_HIDDEN = ("params['layers']*['expert_up']", -1)


def strategies(config: DecoderConfig) -> Strategies:
    """The expert strategies of a decoder: FSDP, tensor and expert parallelism."""
    # The key and value heads; latent attention has one for each query head.
    heads = ("params['layers']*['wq']", -2 if config.latent else -3)
    dense = () if config.experts and not config.shared else (_HIDDEN,)
    tensor = (*dense, heads, *_VOCABULARY)
    batch, last = (*_BATCH, "first"), tuple((*place, "last") for place in tensor)
    every: dict[str, list[tuple[str, int, str]]] = {
        "data parallel": [(*_BATCH, "all")],
        "FSDP": [(*_BATCH, "all"), (*_WIDTH, "all")],
        "Megatron": [batch, *last],
        "FSDP + Megatron": [batch, *last, (*_WIDTH, "first")],
        "FSDP + Megatron + sequence": [batch, *last, (*_WIDTH, "first"), (*_SEQUENCE, "last")],
        "tensor parallel": [(*place, "all") for place in tensor],
    }
    if config.experts:
        every |= {
            "expert parallel": [(*_EXPERTS, "all"), (*_BATCH, "all")],
            "FSDP + expert parallel": [
                batch, (*_EXPERTS, "last"), (*_BATCH, "last"), (*_WIDTH, "first"),
            ],
            "FSDP + experts' width": [batch, (*_EXPERT_HIDDEN, "last"), (*_WIDTH, "first")],
        }  # fmt: skip
    return every


#: The options of every decoder.
OPTIONS = (
    "layers", "sequence", "batch", "step", "unroll", "remat", "offload", "precision", "gradients",
    "loss", "loss_parts", "ring",
)  # fmt: skip


def _entry(name: str, summary: str, config: DecoderConfig, changes: dict[str, Any]) -> Entry:
    config = dataclasses.replace(config, **changes)
    options = (*OPTIONS, "experts") if config.experts else OPTIONS
    return entry(decoder.model, name, summary, (config, tiny(config)), options, strategies(config))


_LARGE: dict[str, Any] = {"remat": "full", "batch": 512}

ENTRIES: dict[str, Entry] = {
    name: _entry(name, summary, config, changes)
    for name, summary, config, changes in (
        ("llama3.1-8b", "Llama 3.1 8B", LLAMA31_8B, {}),
        ("llama3.1-70b", "Llama 3.1 70B", LLAMA31_70B, {"batch": 64}),
        ("llama3.1-405b", "Llama 3.1 405B", LLAMA31_405B, _LARGE),
        ("llama2-7b", "Llama 2 7B", LLAMA2_7B, {}),
        ("mistral-7b", "Mistral 7B", MISTRAL_7B, {}),
        ("qwen3-8b", "Qwen3 8B: norms of queries and keys", QWEN3_8B, {}),
        ("qwen3-30b-a3b", "Qwen3 30B-A3B: 128 experts", QWEN3_30B_A3B, {}),
        ("mixtral-8x7b", "Mixtral 8x7B: 8 experts", MIXTRAL_8X7B, {}),
        (
            "deepseek-v2-lite", "DeepSeek-V2 Lite: latent attention, routed and shared experts",
            DEEPSEEK_V2_LITE, {},
        ),
        (
            "deepseek-v3", "DeepSeek-V3: 256 experts, without multi-token prediction",
            DEEPSEEK_V3, _LARGE,
        ),
        ("gemma3-4b", "Gemma 3 4B, text: local and global layers", GEMMA3_4B, {}),
        ("gemma3-12b", "Gemma 3 12B, text", GEMMA3_12B, {}),
        ("gemma3-27b", "Gemma 3 27B, text", GEMMA3_27B, {}),
    )
}  # fmt: skip
