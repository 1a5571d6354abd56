"""Small PyTorch modules, well-behaved and not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Tagger(nn.Module):
    """A tied table, a buffer that changes, one that does not, a plain tensor, a frozen parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 3.0))
        self.plain = torch.full((8,), 2.0)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale * self.plain * self.frozen
        return self.head(self.drop(self.norm(x)))


def loss(model: nn.Module, tokens: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens), tags)


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # BRANCH
            return x
        return -x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Gate()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


class Linear(nn.Linear):
    """Of four elements, with another forward pass."""

    def __init__(self, call: Any = None) -> None:
        super().__init__(4, 4)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if self.call is None else self.call(y)


def tagger() -> Any:
    """A model for the command line."""
    from toast.frontend.torch import TrainStep
    from toast.models import Model

    with torch.device("meta"):
        model, tokens = Tagger(), torch.empty(32, dtype=torch.long)
    return Model("tagger", TrainStep(model, loss), (tokens, tokens), learned=())
