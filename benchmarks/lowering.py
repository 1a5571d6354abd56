"""Device-local programs and annotated ones by XLA's TPU compiler: peak memory and step.

    python benchmarks/lowering.py [--programs mlp,convnet] [--plans 6] [--memory]

This needs libtpu, but no TPU.  Every plan is compiled twice: as annotations that XLA partitions,
and as the program of one device that TOAST writes.  The script writes a row per plan to
benchmarks/lowering.csv and prints the totals; rows that are there already are not compiled again.
``--memory`` ends each compilation after buffer assignment, so that there are no steps.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import fidelity
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cost import CostModel
from toast.errors import ToastError
from toast.evaluation.oracle import Verdict, judge
from toast.evaluation.validate import states_to_compare
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.plan.prediction import Prediction
from toast.plan.shard import lowered_state, shardings_of
from toast.space import Space, States

HARDWARE = "tpu-v5e"
TABLE = pathlib.Path(__file__).resolve().parent / "lowering.csv"
COLUMNS = (
    "program", "mesh", "plan", "equal", "whole", "predicted GiB", "xla GiB", "local GiB",
    "predicted ms", "xla ms", "local ms",
)  # fmt: skip

#: Models of the zoo, with the options that make them small enough to compile often.
MODELS: dict[str, dict[str, Any]] = {
    "t2b": {"layers": 1},
    "t2b-scan": {"layers": 2},
    "gns": {"layers": 2},
    "itx": {"layers": 1},
    "itx-decode": {"layers": 1},
    "moe": {"layers": 2, "experts": 16},
    "unet": {"channels": 64, "blocks": 1, "image": 512, "batch": 8, "heads": 4},
    "llama3.1-8b": {"layers": 1},
    "mamba2-1.3b": {"layers": 1},
    "vit-l": {"layers": 1},
    "resnet50": {},
}
MESHES: dict[str, tuple[str, ...]] = dict.fromkeys(MODELS, ("data=4,model=4",)) | {
    "residual MLP": fidelity.MESHES,
    "convnet": fidelity.MESHES,
}

#: Differences of steps below this share are ties.
TIE = 0.03


def program_of(name: str) -> toast.Analysis:
    """The analysis of a program of this benchmark."""
    if name in MODELS:
        return toast.analyze(build(name, **MODELS[name]))
    return fidelity.programs()[name]


def verdicts(model: CostModel, state: States, *, full: bool) -> tuple[Verdict, Verdict, bool, int]:
    """XLA's results, whether collectives are as predicted, and the number of ops that run whole."""
    program, shardings = model.space.analysis.program, shardings_of(model, state)
    local = lowered_state(model, state)
    xla = judge(program, shardings, model.hardware, full=full)
    ours = judge(program, shardings, model.hardware, local=local.module, full=full)
    return xla, ours, local.counts() == model.local_collectives(state), len(local.gathered)


def measure(name: str, mesh: str, plans: int, *, full: bool) -> Iterator[dict[str, object]]:
    """The rows of a program on a mesh."""
    analysis = program_of(name)
    model = CostModel(Space(analysis, Mesh.parse(mesh)), load(HARDWARE))
    strategies = ZOO[name].strategies if name in ZOO else {}
    for plan, state in states_to_compare(model, plans=plans, strategies=strategies):
        predicted = Prediction.of(model.price(state[None]))
        try:
            xla, ours, equal, whole = verdicts(model, state, full=full)
        except ToastError as error:
            print(f"{name} on {mesh}, {plan}: {error}", file=sys.stderr)
            continue
        steps = [v.schedule.seconds if v.schedule else float("nan") for v in (xla, ours)]
        peaks = [predicted.peak_bytes, xla.peak_bytes, ours.peak_bytes]
        fits = [not v.out_of_memory for v in (xla, ours)]
        numbers = (
            *(f"{peak / 2**30:.3f}" for peak in peaks),
            *(f"{1e3 * t:.3f}" for t in (predicted.step_seconds, *steps)),
        )
        row = (name, mesh, plan, int(equal), whole, *numbers)
        yield dict(zip(COLUMNS, row, strict=True)) | (
            {}
            if all(fits)
            else {"xla ms": fits[0] or "does not fit", "local ms": fits[1] or "does not fit"}
        )


def totals(rows: list[dict[str, object]]) -> str:
    """The figures of the table."""

    def number(row: dict[str, object], column: str) -> float:
        try:
            return float(str(row[column]))
        except ValueError:
            return float("nan")

    equal = sum(int(str(row["equal"])) for row in rows)
    text = [f"{len(rows)} plans; collectives as predicted: {equal}"]
    ratios = np.array([number(r, "local ms") / number(r, "xla ms") for r in rows])
    ratios = ratios[np.isfinite(ratios)]
    if ratios.size:
        text.append(
            f"step of the local program over the annotated one: median {np.median(ratios):.3f}, "
            f"not longer in {np.mean(ratios <= 1 + TIE):.0%} and shorter in "
            f"{np.mean(ratios < 1 - TIE):.0%} of {ratios.size} (ties: {TIE:.0%})"
        )
    for form in ("xla", "local"):
        errors = np.array([
            number(r, "predicted GiB") / number(r, f"{form} GiB") - 1
            for r in rows if "fit" not in f"{r['xla ms']}{r['local ms']}"
        ])  # fmt: skip
        errors = np.abs(errors[np.isfinite(errors)])
        if errors.size:
            text.append(
                f"peak of the {form} program: median error {np.median(errors):.1%}, "
                f"90th percentile {np.quantile(errors, 0.9):.1%}"
            )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", default=",".join(MESHES), help="separated by commas")
    parser.add_argument("--plans", type=int, default=6, help="others than TOAST's and experts'")
    parser.add_argument("--memory", action="store_true", help="memory only, which is faster")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    done = {(row["program"], row["mesh"]) for row in rows}
    for name in options.programs.split(","):
        for mesh in MESHES[name]:
            if (name, mesh) in done:
                continue
            for row in measure(name, mesh, options.plans, full=not options.memory):
                rows.append(row)
                print(*row.values(), flush=True)
            with TABLE.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
    print(totals(rows))


if __name__ == "__main__":
    main()
