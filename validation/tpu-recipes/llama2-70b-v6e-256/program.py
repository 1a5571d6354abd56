"""Llama 2 70B, which is no model of the zoo: Llama 3.1 70B with another vocabulary."""

from __future__ import annotations

import dataclasses

from toast.models import Model, Strategies
from toast.models.decoder import model
from toast.models.language_models import LLAMA31_70B

CONFIG = dataclasses.replace(
    LLAMA31_70B, vocabulary=32000, rope_theta=10_000.0, remat="full", offload="query+key+value"
)

#: MaxText's rules give ``fsdp_transpose`` to the hidden dimension of MLPs, and to the width of the
#: model where that is not there.
STRATEGIES: Strategies = {
    "FSDP": [
        ("tokens", 0, "all"),
        ("params['layers']*['gate']", -1, "all"),
        ("params['embedding']", 1, "all"),
    ]
}


def build(batch: int, sequence: int) -> Model:
    """The train step."""
    return model(dataclasses.replace(CONFIG, batch=batch, sequence=sequence), "llama2-70b")
