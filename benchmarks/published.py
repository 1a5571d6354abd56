"""Compare predicted training steps with published ones: a table of docs/fidelity.md.

    python benchmarks/published.py

Every run is FSDP over all devices.  The options are those of the zoo's models that describe it.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.evaluation.baselines import manual
from toast.hardware import load
from toast.models import ZOO, build

#: Pages with the configurations and the measured times.
SOURCES = {
    "toolbox": "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/README.md",
    "recipes": "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium",
    "maxtext": "https://github.com/AI-Hypercomputer/maxtext/blob/main/docs/guides/"
    "monitoring_and_debugging/understand_logs_and_metrics.md",
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3_h100_202412_torchtitan.md",
}

#: What MaxText's recipes for TPUs keep in the memory of the host.
_OFFLOADED = {"remat": "full", "offload": "layer_input+query+key+value+attention_output"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run: a model, its options, and what was measured."""

    model: str
    hardware: str
    devices: int
    options: Mapping[str, Any]
    seconds: float
    source: str
    #: Published bytes at the peak, if they are.
    peak_bytes: float = 0.0


RUNS = (
    Run("llama2-7b", "h100", 8, {
        "batch": 16, "sequence": 4096, "unroll": 1, "loss_parts": 1,
        "remat": "query+key+value+attention+attention_output+gate+up",
    }, 0.721, "toolbox"),
    Run("llama3.1-8b", "h100-96gb-500w", 8, {
        "batch": 16, "remat": "query+value+attention+gate", "loss": "materialised",
        "gradients": "f32",
    }, 16384 / 6667, "torchtitan", 77.0 * 2**30),
    Run("llama3.1-8b", "tpu-v6e", 8, {"batch": 24, **_OFFLOADED}, 3.443, "recipes"),
    Run("llama3.1-8b", "tpu-v6e", 32, {"batch": 96, **_OFFLOADED}, 3.495, "recipes"),
    Run("llama3.1-8b", "tpu-v6e", 128, {"batch": 512, **_OFFLOADED}, 4.602, "recipes"),
    Run("mistral-7b", "tpu-v6e", 8, {"batch": 48, **_OFFLOADED}, 6.320, "recipes"),
    Run("mixtral-8x7b", "tpu-v6e", 256, {
        "batch": 3072, "sequence": 4096, **_OFFLOADED,
    }, 13.484, "recipes"),
    Run("gemma3-12b", "tpu-v6e", 256, {
        "batch": 256, "sequence": 32768, "remat": "layer_input", "loss_parts": 16,
    }, 7.318, "recipes"),
    Run("deepseek-v2-lite", "tpu-v5p", 4, {
        "batch": 96, "sequence": 2048, "remat": "full",
    }, 5.667, "maxtext", 44.5e9 + 55.9e9),
)  # fmt: skip


def main() -> None:
    print(
        "| model | hardware | tokens per device | published step | predicted | ratio | "
        "published peak | predicted | source |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    ratios = []
    for run in RUNS:
        model = build(run.model, **run.options)
        analysis = toast.analyze(model, platform=load(run.hardware).platform)
        plan = manual(
            analysis, f"fsdp={run.devices}", run.hardware,
            {"FSDP": ZOO[run.model].strategies["FSDP"]}, memory_bytes=2.0**50,
        )  # fmt: skip
        tokens = math.prod(model.arguments[-1].shape) // run.devices
        predicted = plan.after.step_seconds
        ratios.append(predicted / run.seconds)
        peak = f"{run.peak_bytes / 2**30:.1f} GiB" if run.peak_bytes else "-"
        print(
            f"| {run.model} | {run.devices} {run.hardware} | {tokens} | {run.seconds:.3g} s | "
            f"{predicted:.3g} s | {ratios[-1]:.2f} | {peak} | "
            f"{plan.after.peak_bytes / 2**30:.1f} GiB | [{run.source}]({SOURCES[run.source]}) |",
            flush=True,
        )
    print(f"\nMedian of the ratios: {statistics.median(ratios):.2f}.")


if __name__ == "__main__":
    main()
