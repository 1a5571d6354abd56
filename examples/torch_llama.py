"""A Llama in PyTorch, planned by TOAST, and trained with the plan's DTensor placements.

Plan the shape of Llama 3 8B; no weight is allocated:

    python examples/torch_llama.py --size 8b --mesh data=8,model=4 --hardware h100

Plan a small form, and train it on CPU processes, which must agree with one process:

    python examples/torch_llama.py --size small --mesh data=2,model=2 --hardware h100 --run
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import toast
from toast.frontend.torch import TrainStep


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
    "small": Config(256, 64, 2, 4, 2, 128, 8, 32, torch.float32),
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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # The number of heads comes from the shape: a tensor-parallel device has some of them.
        q, k, v = (w(x).unflatten(-1, (-1, self.size)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q = q.unflatten(2, (-1, self.group))
        scores = torch.einsum("bqngd,bknd->bngqk", q, k) / self.size**0.5
        places = torch.arange(x.shape[1], device=x.device)
        future = places[None, :] > places[:, None]
        weights = (scores + future * -1e9).softmax(-1)
        return self.wo(torch.einsum("bngqk,bknd->bqngd", weights, v).flatten(2))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        half = config.width // config.heads // 2
        frequencies = 500_000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.sequence), frequencies)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
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
        names = ("tokens", "targets")
        batch = [
            distribute_tensor(tensor, mesh, sharded.placements[name])
            for tensor, name in zip(batch, names, strict=True)
        ]
    step = train_step(model)
    losses = [step(*batch) for _ in range(steps)]
    return [float(value.full_tensor() if sharded else value) for value in losses]


def work(rank: int, config: Config, sharded: Any, losses: Any) -> None:
    """One process of the mesh."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29513"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=sharded.mesh.devices)
    result = train(config, 3, sharded)
    if rank == 0:
        losses.put(result)
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", choices=CONFIGS, default="small")
    parser.add_argument("--mesh", default="data=2,model=2")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--run", action="store_true", help="train on CPU processes")
    options = parser.parse_args()
    config = CONFIGS[options.size]
    sharded = plan(config, options.mesh, options.hardware).to_torch()
    print(sharded)
    if options.run:
        processes = multiprocessing.get_context("spawn")
        losses = processes.Queue()
        started = [
            processes.Process(target=work, args=(rank, config, sharded, losses))
            for rank in range(sharded.mesh.devices)
        ]
        for process in started:
            process.start()
        print("one process:", *(f"{value:.6f}" for value in train(config, 3)))
        print("the mesh:   ", *(f"{value:.6f}" for value in losses.get()))
        for process in started:
            process.join()


if __name__ == "__main__":
    main()
