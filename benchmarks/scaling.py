"""Measure how planning scales with depth and devices, and the largest models.

    python benchmarks/scaling.py [--joint]

The script prints the seconds of JAX's lowering and of the rest, the states and the memory.  The
last lines are ratios within one run; unlike the times of single rows, they do not depend on the
machine.
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cli.elapsed import steps
from toast.models import build


class Row(NamedTuple):
    """One plan, computed in a separate process to measure its memory."""

    model: str
    options: tuple[tuple[str, int], ...]
    mesh: str
    hardware: str
    #: A memory policy, such as ``auto``; empty for shardings alone.
    remat: str = ""

    @property
    def words(self) -> list[str]:
        """As command line arguments."""
        options = ",".join(f"{name}={value}" for name, value in self.options)
        return [self.model, options, self.mesh, self.hardware, self.remat]


DEPTH = [Row("t7b", (("layers", n),), "data=4,model=4", "tpu-v5p") for n in (2, 7, 14, 28)]
DEVICES = [
    Row("t2b", (("batch", 2048),), f"data={data},model={model}", "tpu-v5p")
    for data, model in ((4, 4), (16, 8), (32, 16), (64, 32))
]
LARGE = [
    Row("t7b-scan", (), "data=4,model=4", "tpu-v5p"),
    Row("llama3-8b", (), "data=8,model=8", "tpu-v5p"),
    Row("llama3-8b", (), "data=4,model=4,x=4", "tpu-v5p"),
    Row("moe-scan", (("layers", 36), ("experts", 128)), "expert=128", "tpu-v3"),
    Row("moe-scan", (("layers", 36), ("experts", 2048)), "expert=2048", "tpu-v3"),
]
JOINT = [
    Row("llama3-8b", (("layers", n), ("batch", 64)), "data=8,model=8", "tpu-v5p", "auto")
    for n in (2, 8, 32)
]


class Measured(NamedTuple):
    """The times, the memory and the result of one plan."""

    lowering: float
    rest: float
    search: float
    states: int
    gib: float
    step: float
    peak_gib: float
    fits: bool
    collectives: str


def measure(row: Row) -> Measured:
    """Plan ``row`` in a new process."""
    text = subprocess.run(
        [sys.executable, __file__, "--one", *row.words], capture_output=True, text=True, check=True
    ).stdout
    fields = text.strip().splitlines()[-1].split("\t")
    numbers = [float(field) for field in fields[:7]]
    return Measured(
        numbers[0], numbers[1], numbers[2], int(numbers[3]), numbers[4], numbers[5], numbers[6],
        fits=fields[7] == "True", collectives=fields[8],
    )  # fmt: skip


class _Lowering:
    """Adds up the seconds of JAX's lowering, from events of progress; a joint plan has several."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin: float | None = None

    def __call__(self, event: Any) -> None:
        now = time.perf_counter()
        if self._begin is not None:
            self.seconds += now - self._begin
        self._begin = now if event == "lowering" else None


def one(model: str, options: str, mesh: str, hardware: str, remat: str) -> None:
    """Plan in this process and print the measurements."""
    sizes: dict[str, Any] = {
        name: int(size) for name, _, size in (o.partition("=") for o in options.split(",") if o)
    }
    program = build(model, **sizes)
    begin, lowering = time.perf_counter(), _Lowering()
    plan = toast.plan(
        program, mesh=mesh, hardware=hardware, cache=False, remat=remat or None, progress=lowering
    )
    whole = time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    kinds = " ".join(f"{c.count} {c.kind}" for c in plan.after.collectives if c.count)
    fields = (
        lowering.seconds, whole - lowering.seconds, plan.seconds["search"], plan.states, memory,
        plan.after.step_seconds, plan.after.peak_bytes / 2**30, plan.fits, kinds,
    )  # fmt: skip
    print(*fields, sep="\t")


def table(rows: list[Row]) -> list[Measured]:
    """Measure and print ``rows``."""
    measurements = []
    for row in steps(rows, lambda row: f"{row.model} {row.mesh}"):
        m = measure(row)
        measurements.append(m)
        options = [f"{n}={v}" for n, v in row.options]
        name = " ".join([row.model, *options, *([f"remat={row.remat}"] if row.remat else [])])
        print(
            f"{name:40} {row.mesh:20} {row.hardware:8} lowering {m.lowering:5.1f} s, rest "
            f"{m.rest:5.2f} s (search {m.search:5.2f} s, {m.states:5d} states), {m.gib:4.2f} GiB; "
            f"step {m.step:7.4f} s, {m.peak_gib:5.1f} GiB{'' if m.fits else ' (does not fit)'}",
            flush=True,
        )
        if "all_to_all" in m.collectives:
            print(f"{'':40} {m.collectives}")
    return measurements


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--joint", action="store_true", help="only shardings with memory policies")
    only_joint = parser.parse_args().joint
    joint = table(JOINT)
    ratio = joint[-1].rest / joint[0].rest
    print(f"joint plan, 32 layers over 2:     {ratio:.2f} (at most 2)\n")
    if only_joint:
        return
    depth, devices, large = table(DEPTH), table(DEVICES), table(LARGE)
    print()
    print(f"search, 28 layers over 2:         {depth[-1].search / depth[0].search:.2f} (at most 2)")
    ratio = devices[-1].search / devices[0].search
    print(f"search, 2048 devices over 16:     {ratio:.2f} (at most 2)")
    print(f"llama3-8b, three axes over two:   {large[2].rest / large[1].rest:.2f} (at most 1.5)")
    ratio = large[4].step / large[3].step
    print(f"MoE step, 2048E over 128E:        {ratio:.2f} (GShard measured 1.7)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
    else:
        main()
