"""Recomputation and sharding chosen together, against the policies that people use.

    python benchmarks/memory.py [--models qwen3-8b,...] [--hardware tpu-v5e,...] [--batches 8,16,32]

For each train step of the zoo, hardware and batch: `remat="auto"`, and every preset (none, full,
and the policies of MaxText), each with the best sharding that the search finds for it.  A row of
benchmarks/memory.csv has one plan; rows that are there already are not planned again.  The totals
compare the joint plan with the best preset of each case.  Options narrow the cases, and
``--summary`` plans nothing.
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
from toast.errors import TargetError
from toast.models import build
from toast.program import PRESETS

TABLE = pathlib.Path(__file__).resolve().parent / "memory.csv"
COLUMNS = (
    "model", "mesh", "hardware", "batch", "remat", "fits", "step_ms", "peak_gib", "seconds",
    "policy",
)  # fmt: skip

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


def measure(case: Case, remat: str) -> dict[str, Any]:
    """The row of one plan; a policy that the program cannot have has no step."""
    sizes, _ = MODELS[case.model]
    target = build(case.model, batch=case.batch, **sizes)
    begin = time.perf_counter()
    row = {
        "model": case.model, "mesh": case.mesh, "hardware": case.hardware, "batch": case.batch,
        "remat": remat, "fits": "", "step_ms": "", "peak_gib": "", "policy": "",
    }  # fmt: skip
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
    }


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


def main() -> None:
    """Plans what the table lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--hardware", default=",".join(HARDWARE))
    parser.add_argument("--batches", default="", help="of the three, separated by commas")
    parser.add_argument("--remat", default=",".join(("auto", *PRESETS)))
    parser.add_argument("--table", type=pathlib.Path, default=TABLE)
    parser.add_argument("--summary", action="store_true", help="plan nothing")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.table.exists():
        with options.table.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    known = {(r["model"], r["hardware"], int(r["batch"]), r["remat"]) for r in rows}
    wanted = {int(size) for size in options.batches.split(",") if size}
    cases = [
        Case(model, hardware, batch)
        for model in options.models.split(",")
        for hardware in options.hardware.split(",")
        for batch in MODELS[model][1]
        if batch in wanted or not wanted
    ]
    left = [
        (case, remat)
        for case in cases
        for remat in options.remat.split(",")
        if (*case, remat) not in known and not options.summary
    ]
    for case, remat in steps(left, lambda own: " ".join(map(str, (*own[0], own[1])))):
        row = measure(case, remat)
        rows.append(row)
        print(*(row[column] for column in COLUMNS[:-1]), flush=True)
        with options.table.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
