"""Plans in PyTorch's words, as text: no PyTorch is needed."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import P

import toast
from toast.errors import PlanError, TargetError
from toast.hardware import Mesh
from toast.plan.torch_shardings import TorchShardings


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_placements_of_a_plan_for_jax() -> None:
    def twice(params: Any, x: Any) -> Any:
        return [w * 2 for w in params["layers"]], x * 2

    pins = {"params*": P(None, "model"), "x": P(("data", "model"))}
    plan = toast.plan(
        twice, {"layers": [f32(64, 64)] * 3}, f32(8, 64), mesh="data=2,model=2",
        hardware="tpu-v5e", constraints=toast.Constraints(pin=pins),
    )  # fmt: skip
    shardings = plan.to_torch()
    assert shardings.axes == ("data", "model")
    assert shardings.text["params['layers'][1]"] == ("Replicate()", "Shard(1)")
    assert shardings.folded_text == {
        "params['layers'][*]": ("Replicate()", "Shard(1)"), "x": ("Shard(0)", "Shard(0)"),
    }  # fmt: skip
    assert str(shardings).splitlines() == [
        "DTensor placements on data=2, model=2",
        "params['layers'][*]: [Replicate(), Shard(1)]", "x: [Shard(0), Shard(0)]",
    ]  # fmt: skip
    with pytest.raises(PlanError, match="the plan is not of a PyTorch module"):
        shardings.parallelize_text("model")


def test_the_order_of_axes_is_that_of_the_shards() -> None:
    plan = toast.plan(
        lambda x: x * 2, f32(8), mesh="data=2,model=4", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"x": P(("model", "data"))}),
    )  # fmt: skip
    shardings = plan.to_torch()
    assert shardings.axes == ("model", "data")
    assert shardings.text == {"x": ("Shard(0)", "Shard(0)")}
    # On a DeviceMesh in the other order, each of two shards of data has a part of four.
    swapped = dataclasses.replace(shardings, axes=("data", "model"))
    assert swapped.text == {"x": ("_StridedShard(0, split_factor=4)", "Shard(0)")}


COLUMN, ROW, WHOLE = (("model",), ()), ((), ("model",)), ((), ())
OWNERS = {
    "layers.0.up.weight": ("Linear", COLUMN), "layers.0.up.bias": ("Linear", (("model",),)),
    "layers.0.down.weight": ("Linear", ROW), "layers.0.down.bias": ("Linear", ((),)),
    "layers.0.norm.weight": ("RMSNorm", ((),)),
    "layers.1.up.weight": ("Linear", COLUMN), "layers.1.up.bias": ("Linear", ((),)),
    "layers.1.down.weight": ("Linear", ROW), "layers.1.down.bias": ("Linear", ((),)),
    "layers.1.norm.weight": ("RMSNorm", (("model",),)),
    "embed.weight": ("Embedding", COLUMN), "table.weight": ("Embedding", ROW),
    "head.weight": ("Linear", COLUMN), "gate.weight": ("Linear", COLUMN),
    "other.weight": ("Linear", WHOLE), "tied.weight": ("Linear", COLUMN),
    "twin.weight": ("Linear", COLUMN),
}  # fmt: skip
MODULE = TorchShardings(
    mesh=Mesh.parse("model=2"),
    axes=("model",),
    specs={name: spec for name, (_, spec) in OWNERS.items()},
    owners={name: kind for name, (kind, _) in OWNERS.items()},
    tied={"twin.weight": "tied.weight"},
    state_specs={f"optimizer.{name}.exp_avg": ROW for name in ("a.0.b", "a.1.b")},
    pairs=frozenset(("model", f"layers.{n}.up", f"layers.{n}.down") for n in (0, 1)),
    gathered=frozenset([("model", "gate")]),
)


def test_parallel_styles() -> None:
    assert MODULE.parallelize_text("model") == {
        "layers.*.up": "ColwiseParallel()",
        "layers.*.down": "RowwiseParallel()",
        "embed": "RowwiseParallel(input_layouts=Replicate())",
        "table": "ColwiseParallel(output_layouts=Replicate())",
        "head": "ColwiseParallel(output_layouts=Replicate())",
    }


def test_what_styles_cannot_express() -> None:
    on = "the plan shards it on model, and"
    assert MODULE.parallelize_notes("model") == (
        "layers.1.up.bias: the plan does not shard it on model, unlike the style of its weight",
        f"layers.1.norm.weight: {on} PyTorch has no style for RMSNorm; use distribute()",
        f"gate.weight: {on} gathers it before use; use fully_shard or distribute()",
        f"tied.weight: {on} a style would untie it; use distribute()",
        f"twin.weight: {on} a style would untie it; use distribute()",
    )
    assert MODULE.notes == (
        "optimizer.a.*.b.exp_avg: the plan shards it as dimension 1 on model, but an optimizer of "
        "DTensors shards its states as their parameters",
    )
    with pytest.raises(PlanError, match="the plan has no axis data; use one of model"):
        MODULE.parallelize_notes("data")


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("placements", "device_mesh"):
        with pytest.raises(TargetError, match=r"pip install 'toast-partitioner\[torch\]'"):
            getattr(MODULE, name)("cpu")
