"""DTensors of a module, in a group of one process."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pytorch import need_pytorch
from toast.errors import PlanError
from toast.hardware import Mesh
from toast.plan.torch_shardings import TorchShardings

need_pytorch()

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.frontend.torch_samples import Tagger


@pytest.fixture(autouse=True)
def group(tmp_path: pathlib.Path) -> Iterator[None]:
    place = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", place, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shardings(model: Any, mesh: str = "data=1,model=1") -> TorchShardings:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    specs = {name: ((),) * tensor.ndim for name, tensor in tensors.items()}
    table = ((), ("model",))
    return TorchShardings(
        mesh=Mesh.parse(mesh), axes=("model", "data"),
        specs=specs | {"embed.weight": table, "head.weight": table, "plain": ((),)},
        owners={}, tied={"head.weight": "embed.weight"}, state_specs={}, pairs=frozenset(),
        gathered=frozenset(),
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modules_are_distributed(device: str) -> None:
    with torch.device(device):
        model = Tagger()
    plan = shardings(model)
    mesh = plan.device_mesh("cpu")
    assert mesh.mesh_dim_names == ("model", "data")
    assert plan.distribute(model, mesh) is model
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.placements == plan.placements["embed.weight"]
    assert plan.placements["embed.weight"] == (Shard(1), Replicate())
    assert isinstance(model.plain, DTensor)
    assert isinstance(model.norm.running_mean, DTensor)
    assert not model.frozen.requires_grad
    assert {p.device.type for p in model.parameters()} == {device}


def test_another_mesh() -> None:
    model = Tagger()
    own = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    plan = shardings(model)
    plan.distribute(model, own)  # in another order
    assert model.embed.weight.placements == (Replicate(), Shard(1))
    with pytest.raises(PlanError, match="the DeviceMesh has the axes"):
        plan.distribute(Tagger(), init_device_mesh("cpu", (1,), mesh_dim_names=("data",)))
    with pytest.raises(PlanError, match="the plan is for 4 devices, and there are 1 processes"):
        shardings(model, "data=2,model=2").device_mesh("cpu")


def test_another_module() -> None:
    plan = shardings(Tagger())
    less = dataclasses.replace(plan, specs={k: v for k, v in plan.specs.items() if k != "scale"})
    with pytest.raises(PlanError, match="scale: the plan has no such tensor"):
        less.distribute(Tagger(), plan.device_mesh("cpu"))
