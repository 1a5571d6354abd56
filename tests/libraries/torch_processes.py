"""Trains modules with the shardings of plans on four processes: ``torch_processes.py FOLDER``.

``cases.pickle`` in the folder has, for each case, the name of the module, the shardings, and how
they are applied; ``results.json`` gets the largest differences from one process.  Processes are
forked once PyTorch is imported, which takes most of the time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import sys
import traceback
from typing import Any

import torch
import torch._dynamo
import torch.distributed.tensor.parallel
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from examples import torch_llama
from tests.frontend import torch_samples
from toast.frontend.torch import TrainStep

PROCESSES = 4
LLAMA = dataclasses.replace(torch_llama.CONFIGS["small"], layers=1)


def make(name: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A module, its loss, and a batch."""
    if name == "llama":
        model: Any = torch_llama.Llama(LLAMA)
        tokens = torch.randint(LLAMA.vocabulary, (LLAMA.batch, LLAMA.sequence))
        return model, torch_llama.loss, {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    images, labels = torch.randn(8, 3, 8, 8), torch.randint(8, (8,))
    batch = {"images": images, "labels": labels}
    return torch_samples.ViT(), torch_samples.classification_loss, batch


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(name: str, shardings: Any, how: str) -> dict[str, float]:
    """Train two steps with shardings and in one process; the largest differences."""
    torch.manual_seed(0)
    model, loss, batch = make(name)
    alone, _, _ = make(name)
    alone.load_state_dict(model.state_dict())
    mesh = shardings.device_mesh("cpu")
    mine = list(batch.values())
    if how == "distribute":
        shardings.distribute(model, mesh)
        placements = shardings.placements
        mine = [distribute_tensor(x, mesh, placements[key]) for key, x in batch.items()]
    else:
        parallelize_module(model, mesh["model"], shardings.parallelize_plan("model"))
        if "data" in shardings.axes:
            for layer in getattr(model, "layers", ()):
                fully_shard(layer, mesh=mesh["data"])
            fully_shard(model, mesh=mesh["data"])
            rank = mesh["data"].get_local_rank()
            mine = [x.chunk(mesh["data"].size())[rank] for x in batch.values()]
    result = {"loss": 0.0, "parameters": 0.0, "sharded": 0.0}
    steps = [
        TrainStep(m, loss, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
        for m in (model, alone)
    ]
    for _ in range(2):
        losses = [whole(step(*x)) for step, x in zip(steps, (mine, batch.values()), strict=True)]
        if how != "distribute" and "data" in shardings.axes:
            torch.distributed.all_reduce(losses[0], torch.distributed.ReduceOp.AVG)
        result["loss"] = max(result["loss"], abs(float(losses[0] - losses[1])))
    for (key, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        difference = float((whole(parameter) - other).detach().abs().max())
        result["parameters"] = max(result["parameters"], difference)
        sharded = isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)
        result["sharded"] += sharded
        if how == "distribute":
            assert parameter.placements == placements[key], key
    return result


def work(rank: int, folder: pathlib.Path) -> None:
    """One process."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES
    )
    cases = pickle.loads((folder / "cases.pickle").read_bytes())
    results = {}
    for name, case in cases.items():
        results[name] = compare(*case)
        if rank == 0:
            print(name, results[name], file=sys.stderr, flush=True)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    children = []
    for rank in range(PROCESSES):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(rank, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
