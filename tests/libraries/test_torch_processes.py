"""Plans of PyTorch modules, applied on four processes: results are those of one process."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

from jax import P

import toast
from tests.docs.blocks import ROOT
from tests.pytorch import need_pytorch
from toast import api
from toast.inputs import machine_of

need_pytorch()

import torch

from tests.libraries import torch_processes

#: Megatron's placements; the search completes them, and chooses those of all other values.
COLUMNS = ("*.wq.weight", "*.wk.weight", "*.wv.weight", "*.w1.weight", "*.w3.weight")
ROWS = ("*.wo.weight", "*.w2.weight")
TENSOR_PARALLEL = {
    **dict.fromkeys(COLUMNS, P("model")), **dict.fromkeys(ROWS, P(None, "model")),
    "output.weight": P("model"), "tok_embeddings.weight": P("model"),
}  # fmt: skip
DATA = {"tokens": P("data"), "targets": P("data")}
VIT = {
    "images": P("data"), "labels": P("data"), "mlp.0.weight": P("model"),
    "mlp.2.weight": P(None, "model"), "qkv.weight": P("data"), "patch.weight": P(None, "model"),
}  # fmt: skip

#: Dimensions that take ``model`` in this order: the sequence takes it where the others are not.
SEQUENCE = {
    f"{name}:{dimension}": "model" for name, dimension in {
        "layers.0.feed_forward.w1.weight": 0, "layers.0.attention.wq.weight": 0,
        "layers.0.attention.wk.weight": 0, "output.weight": 0, "tokens": 1,
    }.items()
}  # fmt: skip

#: Module, mesh, pinned arguments (or ``fix``, for dimensions), and how the shardings are applied.
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "searched": ("llama", "data=4", {}, "distribute"),
    "tensor parallel": ("llama", "model=4", TENSOR_PARALLEL, "distribute"),
    "vit on two axes": ("vit", "data=2,model=2", VIT, "distribute"),
    "styles and FSDP": ("llama", "data=2,model=2", TENSOR_PARALLEL | DATA, "parallelize"),
    "vit with styles": ("vit", "data=2,model=2", VIT, "parallelize"),
    "sequence parallel": ("llama", "model=4", SEQUENCE, "parallelize"),
}


def shardings(name: str, mesh: str, pins: dict[str, Any]) -> Any:
    """The shardings of a plan for a train step, for a machine as small as the module."""
    with torch.device("meta"):
        model, loss, batch = torch_processes.make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = torch_processes.TrainStep(model, loss, optimizer)
    # A batch of one leaves the axis to the sequence.
    batch = {key: x[:1] if pins is SEQUENCE else x for key, x in batch.items()}
    analysis = toast.analyze(step, *batch.values())
    on = toast.Mesh.parse(mesh)
    plan = toast.plan(
        analysis, mesh=on, hardware=api.small_scale(analysis, on, machine_of("h100")),
        constraints=toast.Constraints(**{"fix" if pins is SEQUENCE else "pin": pins}),
    )  # fmt: skip
    return plan.to_torch()


def test_results_are_those_of_one_process(tmp_path: pathlib.Path) -> None:
    cases = {
        case: (name, shardings(name, mesh, pins), how)
        for case, (name, mesh, pins, how) in CASES.items()
    }
    (tmp_path / "cases.pickle").write_bytes(pickle.dumps(cases))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.libraries.torch_processes", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == set(CASES)
    for case, result in results.items():
        assert result["loss"] < 5e-6, case  # of about 5.6 and 2.1
        assert result["parameters"] < 1e-6, case
        assert result["sharded"] > 0, case
    styles = cases["styles and FSDP"][1].parallelize_text("model")
    assert styles["layers.*.feed_forward.w1"] == "ColwiseParallel()"
    assert styles["layers.*.feed_forward.w2"] == "RowwiseParallel()"
    assert styles["output"] == "ColwiseParallel(output_layouts=Replicate())"
    styles = cases["sequence parallel"][1].parallelize_text("model")
    assert styles["layers.*.attention_norm"] == (
        "SequenceParallel(sequence_dim=1, use_local_output=True)"
    )
    assert styles["layers.*.attention.wq"] == "ColwiseParallel(input_layouts=Shard(1))"
    assert styles["layers.*.attention.wo"] == "RowwiseParallel(output_layouts=Shard(1))"
    assert styles["output"] == (
        "ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())"
    )
