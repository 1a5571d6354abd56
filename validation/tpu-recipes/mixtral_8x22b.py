"""Mixtral 8x22B, with the sizes of MaxText's mixtral-8x22b.yml."""

from __future__ import annotations

import dataclasses

from toast.models import Model, Strategies, decoder
from toast.models.language_models import MIXTRAL_8X7B, strategies

SIZES = dataclasses.replace(
    MIXTRAL_8X7B, layers=56, d_model=6144, heads=48, vocabulary=32768, expert_hidden=16384,
    rope_theta=1e6, precision="bf16", remat="full",
    offload="layer_input+query+key+value+attention_output",
)  # fmt: skip
STRATEGIES: Strategies = strategies(SIZES)


def build(batch: int, sequence: int) -> Model:
    """The train step."""
    return decoder.model(
        dataclasses.replace(SIZES, batch=batch, sequence=sequence), "mixtral-8x22b"
    )  # fmt: skip
