"""Gemma 3 12B on several slices: FSDP within each, and gradients that are added up over all."""

from __future__ import annotations

from toast.models import Model, Strategies
from toast.models import build as model_of

STRATEGIES: Strategies = {
    "FSDP in slices": [("tokens", 0, "all"), ("params['embedding']", 1, "last")],
}  # fmt: skip


def build(batch: int, sequence: int) -> Model:
    """The train step."""
    return model_of(
        "gemma3-12b", batch=batch, sequence=sequence, remat="layer_input", loss_parts=16
    )  # fmt: skip
