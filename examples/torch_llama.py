"""A Llama in PyTorch, planned by TOAST, and trained with the plan's DTensor placements.

Plan the shape of Llama 3 8B; no weight is allocated:

    python examples/torch_llama.py --size 8b --mesh data=8,model=4 --hardware h100

Plan a small form, and train it on CPU processes, which must agree with one process:

    python examples/torch_llama.py --size small --mesh data=4 --hardware h100 --run
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import toast
from toast.frontend.torch import TrainStep

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    batch: int
    sequence: int
    dtype: torch.dtype


CONFIGS = {
    "small": Config(256, 64, 2, 8, 4, 128, 8, 32, torch.float32),
    "8b": Config(128_256, 4096, 32, 32, 8, 14_336, 32, 4096, torch.bfloat16),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.group = config.heads // config.key_heads
        self.wq = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.wk = nn.Linear(config.width, config.key_heads * self.size, bias=False)
        self.wv = nn.Linear(config.width, config.key_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, config.width, bias=False)

    def forward(self, x: torch.Tensor, angles: Angles, mask: torch.Tensor) -> torch.Tensor:
        # The number of heads comes from the shape: a tensor-parallel device has some of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.size)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, angles), rotated(k, angles)
        q = q.unflatten(2, (-1, self.group))
        scores = torch.einsum("bqngd,bknd->bngqk", q, k) / self.size**0.5
        weights = (scores + mask).softmax(-1)
        return self.wo(torch.einsum("bngqk,bknd->bqngd", weights, v).flatten(2))


def rotated(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, angles: Angles, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        half = config.width // config.heads // 2
        frequencies = 500_000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.sequence), frequencies)[:, None]
        mask = torch.full((config.sequence, config.sequence), -1e9).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin), self.mask)
        return self.output(self.norm(x))


def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train_step(model: nn.Module) -> TrainStep:
    return TrainStep(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3))


def plan(config: Config, mesh: str, hardware: str, **options: Any) -> toast.Plan:
    """Plan a train step on the meta device."""
    with torch.device("meta"):
        model = Llama(config).to(config.dtype)
        tokens = torch.empty(config.batch, config.sequence, dtype=torch.long)
    return toast.plan(train_step(model), tokens, tokens, mesh=mesh, hardware=hardware, **options)


def train(config: Config, steps: int, sharded: Any = None) -> list[float]:
    """Train some steps, in one process or with the placements of a plan; the losses."""
    torch.manual_seed(0)
    model = Llama(config).to(config.dtype)
    tokens = torch.randint(config.vocabulary, (config.batch, config.sequence))
    batch = [tokens, tokens.roll(-1, 1)]
    if sharded:
        from torch.distributed.tensor import distribute_tensor

        mesh = sharded.device_mesh("cpu")
        sharded.distribute(model, mesh)
        placements = sharded.placements
        batch = [
            distribute_tensor(tensor, mesh, placements[name])
            for tensor, name in zip(batch, ("tokens", "targets"), strict=True)
        ]
    step = train_step(model)  # the optimizer updates the sharded parameters
    losses = [step(*batch) for _ in range(steps)]
    return [float(loss.full_tensor() if sharded else loss) for loss in losses]


def work(rank: int, config: Config, sharded: Any, folder: str) -> None:
    """One process of the mesh."""
    place = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", place, rank=rank, world_size=sharded.mesh.devices)
    losses = train(config, 3, sharded)
    if rank == 0:
        pathlib.Path(folder, "losses").write_text(shown(losses))
    torch.distributed.destroy_process_group()


def shown(losses: list[float]) -> str:
    return " ".join(f"{value:.5f}" for value in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", choices=CONFIGS, default="small")
    parser.add_argument("--mesh", default="data=4")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--memory", type=float, help="the limit in bytes per device")
    parser.add_argument("--run", action="store_true", help="train on CPU processes")
    options = parser.parse_args()
    config = CONFIGS[options.size]
    made = plan(config, options.mesh, options.hardware, memory_bytes=options.memory)
    sharded = made.to_torch()
    print(made, sharded, sep="\n")
    if options.run:
        with tempfile.TemporaryDirectory() as folder:
            arguments = config, sharded, folder
            torch.multiprocessing.spawn(work, arguments, nprocs=sharded.mesh.devices)
            losses = pathlib.Path(folder, "losses").read_text()
        print("losses of the mesh:   ", losses)
        print("losses of one process:", shown(train(config, 3)))


if __name__ == "__main__":
    main()
