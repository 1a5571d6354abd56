"""The rows of the paper's grid where no sharding fits, with recomputation and offload as well.

    python benchmarks/grid_memory.py [--only MODEL] [--write]

For each model, device and mesh of Figures 8 and 9, the script plans shardings alone.  Where the
plan does not fit, it plans again with ``remat="auto"``.  ``--write`` puts the rows into
docs/memory.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator

from evaluation import HARDWARE, MESHES, MODELS, ROOT, versions, write_section

import toast
from toast.cli.elapsed import steps
from toast.models import build
from toast.units import size_text, time_text

PAGE = ROOT / "docs" / "memory.md"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row where no sharding fits: the plan of shardings, and the plan with a memory policy."""

    model: str
    hardware: str
    mesh: str
    sharding: toast.Plan
    joint: toast.Plan
    #: Seconds of planning jointly, with lowering and analysis.
    seconds: float

    def __str__(self) -> str:
        sharding, joint = self.sharding.after, self.joint.after
        cells = (
            self.model, self.hardware, self.mesh,
            time_text(sharding.step_seconds), size_text(sharding.peak_bytes),
            time_text(joint.step_seconds) if self.joint.fits else "does not fit",
            size_text(joint.peak_bytes), size_text(self.joint.memory_bytes),
            time_text(self.seconds),
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


def rows(models: tuple[str, ...]) -> Iterator[Row | None]:
    """The rows of these models; None for one where shardings alone fit."""
    places = [(m, h, mesh) for m in models for h in HARDWARE for mesh in MESHES]
    for model, hardware, mesh in steps(places, " ".join):
        target = build(model)
        sharding = toast.plan(target, mesh=mesh, hardware=hardware)
        if sharding.fits:
            yield None
            continue
        begin = time.perf_counter()
        joint = toast.plan(target, mesh=mesh, hardware=hardware, remat="auto")
        yield Row(model, hardware, mesh, sharding, joint, time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MODELS, action="append", help="repeatable")
    parser.add_argument("--write", action="store_true", help="write docs/memory.md")
    options = parser.parse_args()
    models = tuple(options.only or MODELS)
    every = list(rows(models))
    unfit = [row for row in every if row is not None]
    only = "".join(f" --only {model}" for model in options.only or ())
    text = (
        f"Written by `benchmarks/grid_memory.py{only} --write` with {versions()}. Shardings alone "
        f"fit in {len(every) - len(unfit)} of {len(every)} rows of {', '.join(models)}. "
        "In the others:\n\n"
        "| model | hardware | mesh | shardings alone | peak | with a policy | peak | limit "
        "| planning |\n| --- | --- | --- |" + " ---: |" * 6 + "\n" + "\n".join(map(str, unfit))
    )  # fmt: skip
    print(text)
    if options.write:
        write_section(PAGE, "grid", text)


if __name__ == "__main__":
    main()
