"""Llama 3.1 70B whose weights are sharded over each half of the devices."""

from __future__ import annotations

from toast.models import Model, Strategies
from toast.models import build as model_of

STRATEGIES: Strategies = {
    "FSDP": [("tokens", 0, "all"), ("params['embedding']", 1, "fsdp")],
}  # fmt: skip


def build(batch: int, sequence: int) -> Model:
    """The train step."""
    kept = "query+key+value+attention+attention_output"
    return model_of("llama3.1-70b", batch=batch, sequence=sequence, remat=kept)
