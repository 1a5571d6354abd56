"""Recomputation and sharding chosen together, against the policies that people use.

    python benchmarks/memory.py [--models qwen3-8b,...] [--hardware tpu-v5e,...] [--batches 8,16,32]
    python benchmarks/memory.py --compile [--models ...]

For each train step of the zoo, hardware and batch: `remat="auto"`, and presets (none, full, and
policies of MaxText), each with the best sharding that the search finds for it.  A row of
benchmarks/memory.csv has one plan; rows that are there already are not planned again.  The totals
compare the joint plan with the best preset of each case.  Options narrow the cases, and
``--summary`` plans nothing.

``--compile`` plans the joint plan and the two best presets of each case of the table again, and
asks XLA's TPU compiler for their steps and peaks.  That needs libtpu, but no TPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import pathlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cli.elapsed import steps
from toast.errors import TargetError, ToastError
from toast.evaluation.oracle import check, judge
from toast.hardware import load
from toast.models import build

TABLE = pathlib.Path(__file__).resolve().parent / "memory.csv"
COLUMNS = (
    "model", "mesh", "hardware", "batch", "remat", "fits", "step_ms", "peak_gib", "seconds",
    "xla", "xla_step_ms", "xla_peak_gib", "policy",
)  # fmt: skip

#: The policies that are planned.  ``named``, ``save_out_proj`` and the three ``save_dot_...`` of
#: MaxText are left out: they were never the fastest preset on 64 TPU v5e.
POLICIES = (
    "auto", "none", "full", "minimal", "minimal_with_context", "minimal_offloaded",
    "save_qkv_proj", "qkv_proj_offloaded",
)  # fmt: skip

#: How long the compiler may take, in seconds.
COMPILE_S = 1800.0

#: Train steps; the sizes of each; and three batches.
MODELS: Mapping[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "llama3.1-8b": ({"sequence": 4096}, (16, 32, 64)),
    "qwen3-8b": ({"sequence": 4096}, (16, 32, 64)),
    "qwen3-30b-a3b": ({"sequence": 4096}, (16, 32, 64)),
    "vit-h": ({}, (512, 1024, 2048)),
    "unet": ({}, (32, 64, 128)),
}
HARDWARE = {
    "tpu-v5e": "data=16,model=4", "tpu-v5p": "data=8,model=4", "tpu-v6e": "data=8,model=4",
    "h100": "data=4,model=8",
}  # fmt: skip


class Case(NamedTuple):
    """One train step on one mesh."""

    model: str
    hardware: str
    batch: int

    @property
    def mesh(self) -> str:
        """The mesh of the hardware."""
        return HARDWARE[self.hardware]


def measure(case: Case, remat: str, *, compiled: bool = False) -> dict[str, Any]:
    """The row of one plan; a policy that the program cannot have has no step."""
    sizes, _ = MODELS[case.model]
    target = build(case.model, batch=case.batch, **sizes)
    begin = time.perf_counter()
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {**case._asdict(), "mesh": case.mesh, "remat": remat}
    try:
        plan = toast.plan(target, mesh=case.mesh, hardware=case.hardware, remat=remat)
    except TargetError:  # no residual has a name of the preset
        return {**row, "seconds": round(time.perf_counter() - begin, 1)}
    return {
        **row,
        "fits": plan.fits,
        "step_ms": round(plan.after.step_seconds * 1e3, 2),
        "peak_gib": round(plan.after.peak_bytes / 2**30, 2),
        "policy": plan.policy,
        "seconds": round(time.perf_counter() - begin, 1),
        **(verdict_on(plan) if compiled else {}),
    }


def verdict_on(plan: toast.Plan) -> dict[str, Any]:
    """The columns of the compiler."""
    try:
        verdict = judge(
            plan.analysis.program, plan.shardings, plan.hardware, full=True, timeout=COMPILE_S
        )  # fmt: skip
    except ToastError as problem:  # such as a time limit: the next run asks again
        print(f"  {str(problem).splitlines()[0]}", flush=True)
        return {}
    found: dict[str, Any] = {"xla_peak_gib": round(verdict.peak_bytes / 2**30, 2)}
    if verdict.out_of_memory:
        return {**found, "xla": "out of memory"}
    step = {"xla_step_ms": round(verdict.schedule.seconds * 1e3, 2)} if verdict.schedule else {}
    return {**found, **step, "xla": "compiled" if step else "no schedule"}


def key_of(row: Mapping[str, Any]) -> tuple[Case, str]:
    """The case and the policy of a row."""
    return Case(row["model"], row["hardware"], int(row["batch"])), row["remat"]


def best_of(rows: Sequence[Mapping[str, Any]], case: Case) -> list[str]:
    """The joint plan of a case, and the two fastest presets that fit."""
    presets = [
        row for row in rows
        if str(row["fits"]) == "True" and row["remat"] != "auto" and key_of(row)[0] == case
    ]  # fmt: skip
    presets.sort(key=lambda row: float(row["step_ms"]))
    return ["auto", *(row["remat"] for row in presets[:2])] if presets else []


def nameless(rows: Sequence[Mapping[str, Any]], case: Case, remat: str) -> bool:
    """Whether another case of the model shows that no residual has a name of the policy."""
    return any(
        row["step_ms"] == "" and (row["model"], row["remat"]) == (case.model, remat) for row in rows
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The joint plan of each case beside the best preset, in lines."""
    cases: dict[Case, dict[str, tuple[bool, float, float]]] = defaultdict(dict)
    for row in rows:
        if row["step_ms"] != "":
            case = Case(row["model"], row["hardware"], int(row["batch"]))
            fits = str(row["fits"]) == "True"
            cases[case][row["remat"]] = fits, float(row["step_ms"]), float(row["peak_gib"])
    ratios = []
    for case, plans in cases.items():
        if "auto" not in plans or len(plans) < 3:
            continue
        fits, step, peak = plans.pop("auto")
        presets = {name: milliseconds for name, (fits, milliseconds, _) in plans.items() if fits}
        line = f"{' '.join(map(str, case))}: joint {step:.0f} ms, {peak:.1f} GiB"
        line += "" if fits else " (does not fit)"
        if not presets:
            yield f"{line}; no preset fits"
            continue
        best = min(presets, key=presets.__getitem__)
        ratios.append(step / presets[best] if fits else math.inf)
        yield f"{line}; {best} {presets[best]:.0f} ms: {ratios[-1]:.3f}"
    if ratios:
        longer = sum(ratio > 1.0 for ratio in ratios)
        yield (
            f"{len(ratios)} cases: joint over best preset {min(ratios):.3f} to "
            f"{max(ratios):.3f}, longer in {longer}"
        )


def compiled_summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The joint plans by the compiler's schedule, beside the best presets that it compiled."""
    cases: dict[Case, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row.get("xla"):
            case, remat = key_of(row)
            cases[case][remat] = row
    ratios = []
    for case, by_policy in cases.items():
        steps_ms = {
            remat: float(row["xla_step_ms"])
            for remat, row in by_policy.items()
            if row["xla"] == "compiled"
        }
        line = f"{' '.join(map(str, case))}, by XLA's schedule:"
        for remat, row in by_policy.items():
            line += f" {remat} "
            if remat in steps_ms:
                line += f"{steps_ms[remat]:.0f} ms, {float(row['xla_peak_gib']):.1f} GiB;"
            else:
                line += f"{row['xla']};"
        presets = [milliseconds for remat, milliseconds in steps_ms.items() if remat != "auto"]
        if "auto" in steps_ms and presets:
            ratios.append(steps_ms["auto"] / min(presets))
            line += f" ratio {ratios[-1]:.3f}"
        yield line
    if ratios:
        yield (
            f"{len(ratios)} cases compiled: joint over best preset {min(ratios):.3f} to "
            f"{max(ratios):.3f}, above 1.02 in {sum(ratio > 1.02 for ratio in ratios)}"
        )


def main() -> None:
    """Plans what the table lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--hardware", default=",".join(HARDWARE))
    parser.add_argument("--batches", default="", help="of the three, separated by commas")
    parser.add_argument("--remat", default=",".join(POLICIES))
    parser.add_argument("--table", type=pathlib.Path, default=TABLE)
    parser.add_argument("--summary", action="store_true", help="plan nothing")
    parser.add_argument("--compile", action="store_true", help="ask XLA about the best plans")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.table.exists():
        with options.table.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    wanted = {int(size) for size in options.batches.split(",") if size}
    cases = [
        Case(model, hardware, batch)
        for model in options.models.split(",")
        for hardware in options.hardware.split(",")
        for batch in MODELS[model][1]
        if batch in wanted or not wanted
    ]
    if options.summary:
        cases = []
    if options.compile:
        cases = [case for case in cases if load(case.hardware).platform == "tpu"]
        check(load("tpu-v5e"))  # whether there is a compiler
        left = [(case, remat) for case in cases for remat in best_of(rows, case)]
    else:
        left = [(case, remat) for case in cases for remat in options.remat.split(",")]
    numbers = {key_of(row): number for number, row in enumerate(rows)}
    left = [
        key for key in left
        if key not in numbers or (options.compile and not rows[numbers[key]].get("xla"))
    ]  # fmt: skip
    for case, remat in steps(left, lambda own: " ".join(map(str, (*own[0], own[1])))):
        if nameless(rows, case, remat):
            row = {**case._asdict(), "mesh": case.mesh, "remat": remat, "step_ms": ""}
        else:
            row = measure(case, remat, compiled=options.compile)
        if (case, remat) in numbers:
            rows[numbers[case, remat]] = row
        else:
            rows.append(row)
        print(*(row.get(column, "") for column in COLUMNS[:-1]), flush=True)
        with options.table.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            writer.writeheader()
            writer.writerows(rows)
    print(*summary(rows), sep="\n")
    print(*compiled_summary(rows), sep="\n")


if __name__ == "__main__":
    main()
