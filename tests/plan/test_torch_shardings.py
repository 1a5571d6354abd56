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
from toast.frontend.jax import from_function
from toast.frontend.torch_modules import renamed
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
    "gate.bias": ("Linear", (("model",),)),
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


def test_styles_of_a_sequence_in_shards() -> None:
    layouts = {
        "layers.0.up": (1, None), "layers.0.down": (None, 1), "layers.0.norm": (1, 1),
        "layers.1.norm": (1, 1), "embed": (None, 1), "table": (None, 1), "gate": (2, 2),
        "head": (1, None), "tied": (1, None), "twin": (None, 1),
    }  # fmt: skip
    module = dataclasses.replace(
        MODULE, layouts={("model", path): own for path, own in layouts.items()}
    )
    prepared = "=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)"
    assert module.parallelize_text("model") == {
        "layers.0.up": "ColwiseParallel(input_layouts=Shard(1))",
        "layers.0.down": "RowwiseParallel(output_layouts=Shard(1))",
        "layers.*.norm": "SequenceParallel(sequence_dim=1, use_local_output=True)",
        "layers.1.up": "ColwiseParallel()",
        "layers.1.down": "RowwiseParallel()",
        "embed": "RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))",
        "table": "ColwiseParallel(output_layouts=Shard(1))",
        "head": "ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())",
        "gate": "SequenceParallel(sequence_dim=2, use_local_output=True)",
        "tied": f"PrepareModuleInput(input_layouts{prepared}",
        "twin": "PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))",
    }
    assert module.parallelize_notes("model")[1] == (
        "layers.1.norm.weight: the plan shards it on model, and SequenceParallel replicates it"
    )


@pytest.mark.parametrize("positions", [False, True])
def test_layouts_of_a_plan(positions: bool) -> None:
    def step(norm: Any, up: Any, scale: Any, down: Any, head: Any, position: Any, x: Any) -> Any:
        if positions:
            x = x + position
        heads = ((x * norm) @ up.T).reshape(2, 512, 4, 2048) * scale
        x = x + heads.reshape(2, 512, 8192) @ down.T
        return (x * norm) @ head.T

    shapes = (2048,), (8192, 2048), (2048,), (2048, 8192), (32768, 2048), (512, 2048)
    owners = {
        "norm.weight": "RMSNorm", "a.up.weight": "Linear", "a.scale.weight": "LayerNorm",
        "a.down.weight": "Linear", "head.weight": "Linear", "position": "Model",
    }  # fmt: skip
    program = from_function(step, *(f32(*shape) for shape in (*shapes, (2, 512, 2048))))
    program = renamed(program, [*owners, "x"], (), {"owners": owners})
    fix = dict.fromkeys(("a.up.weight:0", "head.weight:0", "x:1"), "model")
    plan = toast.plan(
        program, mesh="model=4", hardware="tpu-v5e", settings=toast.Settings(budget=0),
        constraints=toast.Constraints(fix=fix),
    )  # fmt: skip
    of = {path: own for (_, path), own in plan.to_torch().layouts.items()}
    between = {"norm": (1, 1), "a.up": (1, None), "a.down": (None, 1), "head": (1, None)}
    # A table of positions of the module itself has no shards.
    assert of == {"a.scale": (2, 2)} | ({} if positions else between)


def test_a_model_that_is_one_layer() -> None:
    program = from_function(lambda w, x: x @ w.T, f32(16, 8), f32(64, 8))
    program = renamed(program, ["weight", "x"], (), {"owners": {"weight": "Linear"}})
    plan = toast.plan(
        program, mesh="model=4", hardware="tpu-v5e", settings=toast.Settings(budget=0),
        constraints=toast.Constraints(fix={"weight:0": "model"}, pin={"x": "P()"}),
    )  # fmt: skip
    assert plan.to_torch().text["weight"] == ("Shard(0)",)
    assert plan.to_torch().parallelize_text("model") == {
        "": "ColwiseParallel(output_layouts=Replicate())"
    }


def test_what_styles_cannot_express() -> None:
    on = "the plan shards it on model, and"
    assert MODULE.parallelize_notes("model") == (
        "layers.1.up.bias: the plan does not shard it on model, unlike the style of its weight",
        f"layers.1.norm.weight: {on} PyTorch has no style for RMSNorm; use distribute()",
        f"gate.weight: {on} gathers it before use; use fully_shard or distribute()",
        f"gate.bias: {on} gathers it before use; use fully_shard or distribute()",
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
