"""Measure the planning times of the production forms in the zoo; a table of docs/comparison.md.

    python benchmarks/production.py [--write] [--seed 0] [MODEL ...]

Every model is planned once, in a process of its own and without caches, as a new user plans it.
Llama 3.1 405B is planned for 512 devices, with its layers in a scan and unrolled.  Seconds are CPU
seconds of all threads, which depend less on other work on the machine than the last column, the
elapsed seconds, which the page leaves out.  States and cost depend only on the seed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import subprocess
import sys
import time
from typing import NamedTuple

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP))

import jax
import numpy as np

import toast
from toast.cli.elapsed import steps
from toast.models import build
from toast.search import Round

PAGE = TOP / "docs" / "comparison.md"
BEGIN, END = "<!-- production: begin -->\n", "<!-- production: end -->\n"
HARDWARE = "tpu-v5p"

#: Seconds that analysis and search may take: in a scan, and for 405B in a scan and unrolled.
LIMITS = 5.0, 10.0, 60.0


class Row(NamedTuple):
    """One plan, computed in a process of its own."""

    model: str
    mesh: str = "data=8,model=8"
    unroll: bool = False
    limit: float = LIMITS[0]


ROWS = (
    *map(Row, (
        "llama3.1-8b", "llama3.1-70b", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b",
        "deepseek-v2-lite", "deepseek-v3", "gemma3-12b", "vit-h", "dit-xl", "whisper-large",
        "mamba2-1.3b", "resnet50",
    )),
    Row("llama3.1-405b", "data=64,model=8", limit=LIMITS[1]),
    Row("llama3.1-405b", "data=64,model=8", unroll=True, limit=LIMITS[2]),
)  # fmt: skip

HEADER = """\
| model | mesh | ops | lowering | analysis | search | both | elapsed | states | cost |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""

#: The columns that the limits are for, and that the page leaves out.
PLANNING, ELAPSED = 7, 8


def one(row: Row, seed: int) -> str:
    """Plan in this process; returns a line of the table."""
    begun: dict[str, tuple[float, float]] = {}

    def note(stage: str | Round) -> None:
        if isinstance(stage, str):
            begun[stage] = time.process_time(), time.perf_counter()

    model = build(row.model, unroll=1) if row.unroll else build(row.model)
    plan = toast.plan(
        model, mesh=row.mesh, hardware=HARDWARE, settings=toast.Settings(seed=seed), progress=note
    )
    note("end")
    lowering, analysis, *_ = begun.values()
    search, end = begun["search"], begun["end"]
    cpu = [lowering[0], analysis[0], search[0], end[0]]
    name = row.model + (", unrolled" if row.unroll else "")
    seconds = [*np.diff(cpu), cpu[-1] - cpu[1], end[1] - analysis[1]]
    return (
        f"| {name} | {row.mesh} | {len(plan.analysis.program.ops):,} | "
        + " | ".join(f"{each:.1f}" for each in seconds)
        + f" | {plan.states:,} | {plan.cost:.5f} |"
    )


def measured(number: int, seed: int) -> str:
    """The line of a row, from a new process; prints it."""
    command = [sys.executable, __file__, "--one", str(number), "--seed", str(seed)]
    environment = {**os.environ, "TOAST_CACHE": "off", "JAX_PLATFORMS": "cpu"}
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    line = text.strip().splitlines()[-1]
    late = float(line.split("|")[PLANNING]) > ROWS[number].limit
    print(line + (f"  more than {ROWS[number].limit:.0f} s" if late else ""), flush=True)
    return line


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("models", nargs="*", metavar="MODEL")
    options.add_argument("--write", action="store_true", help="replace the table of the page")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--one", type=int, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.one is not None:
        print(one(ROWS[chosen.one], chosen.seed))
        return
    print(HEADER, end="")
    wanted = [n for n, row in enumerate(ROWS) if not chosen.models or row.model in chosen.models]
    shown = steps(wanted, lambda number: f"{ROWS[number].model} {ROWS[number].mesh}")
    lines = [measured(number, chosen.seed) for number in shown]
    if chosen.write:
        write(lines, chosen.seed)


def write(lines: list[str], seed: int) -> None:
    """Replace the table of the page by these lines, without elapsed seconds."""
    rows = [*HEADER.splitlines(), *lines]
    cells = [row.split("|") for row in rows]
    table = ["|".join(row[:ELAPSED] + row[ELAPSED + 1 :]) for row in cells]
    note = (
        f"Python {platform.python_version()}, JAX {jax.__version__}, {HARDWARE}, seed {seed}, "
        f"{os.cpu_count()} cores; CPU seconds:\n"
    )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join([note, *table, ""]) + END + after)


if __name__ == "__main__":
    main()
