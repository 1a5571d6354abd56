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


class ViT(nn.Module):
    """A vision transformer with one block, on images of 8 by 8 pixels."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patch = nn.Linear(3 * 4 * 4, width)
        self.position = nn.Parameter(torch.zeros(4, width))
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = images.unflatten(3, (2, 4)).unflatten(2, (2, 4)).permute(0, 2, 4, 1, 3, 5)
        x = self.patch(patches.flatten(3).flatten(1, 2)) + self.position
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x.mean(1))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def classification_loss(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    return functional.cross_entropy(model(images), labels)
