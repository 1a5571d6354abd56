"""``toast export --to torch``, of a module that no PyTorch traces: a program with its names."""

from __future__ import annotations

import ast
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.export.small_plan import plan
from toast.errors import PlanError
from toast.export import export_file
from toast.frontend.jax import from_function
from toast.frontend.torch_modules import renamed
from toast.plan import Plan, read

OWNERS = {f"layers.{n}.{name}.weight": "Linear" for n in range(1) for name in ("up", "down")}


@functools.cache
def module_plan() -> Plan:
    def forward(*arguments: Any) -> Any:
        *weights, x = arguments
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + jax.nn.relu(x @ up.T) @ down.T
        return x

    shapes = (*[(8192, 2048), (2048, 8192)], (512, 2048))
    program = from_function(forward, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    calling = {"owners": OWNERS, "states": {}}
    program = renamed(program, [*OWNERS, "x"], (), calling)
    fix = {"layers.0.up.weight:0": "model", "x:0": "data"}
    return toast.plan(
        program, mesh="data=2,model=4", hardware="tpu-v5e",
        settings=toast.Settings(budget=0), constraints=toast.Constraints(fix=fix),
    )  # fmt: skip


def test_placements_and_styles() -> None:
    text = module_plan().export("torch")
    ast.parse(text)
    assert "AXES = {'data': 2, 'model': 4}\n" in text
    assert "    'layers.*.up.weight': (Replicate(), Shard(0)),\n" in text
    assert "    'x': (Shard(0), Replicate()),\n" in text
    assert (
        "    'model': {\n        'layers.*.up': ColwiseParallel(),\n"
        "        'layers.*.down': RowwiseParallel(),\n    },\n"
    ) in text
    assert "# cannot be said by styles on data: the plan shards no product of a layer on it" in text
    assert "_StridedShard" not in text


def test_other_plans(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match="export to torch: the plan is not of a PyTorch module"):
        plan().export("torch")
    plan().to_json(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="the file has no modules; add the program"):
        export_file(read(tmp_path / "plan.json"), "torch")
    with pytest.raises(PlanError, match="it has no logical axes to name"):
        module_plan().export("torch", names={"x:0": "batch"})
