"""GShard's tables for its mixture of experts, from device-local programs: writes docs/gshard.md.

    python benchmarks/gshard.py [--experts 128,512,2048]

For each number of experts, on as many TPU v3 cores: a train step with 36 layers, with parameters
sharded as in GShard and as TOAST chooses, and the program of one device (arXiv 2006.16668,
section 3, Figures 7 and 8, section 5.3).
"""

from __future__ import annotations

import argparse
import collections
import math
import pathlib
import sys
import time
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jax.sharding import PartitionSpec

import toast
from toast.cli.elapsed import steps
from toast.lower import LocalProgram
from toast.models import build

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "gshard.md"
HARDWARE = "tpu-v3"
LAYERS = 36


class Row(NamedTuple):
    """A plan for one number of experts, and its program."""

    experts: int
    plan: toast.Plan
    local: LocalProgram
    #: Of the lowering to the program of one device.
    seconds: float

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        program = self.plan.analysis.program
        return sum(
            math.prod(program.values[value].type.shape)
            for name, value in zip(program.arguments, program.argument_values, strict=True)
            if name.startswith("params")
        )

    def collective_seconds(self, kind: str) -> float:
        """The predicted seconds of a kind of collective."""
        return sum(c.seconds for c in self.plan.after.collectives if c.kind == kind)


def lowered(experts: int, plan: toast.Plan) -> Row:
    """The plan with its device-local program."""
    begin = time.perf_counter()
    local = plan.lowered()
    return Row(experts, plan, local, time.perf_counter() - begin)


def scaling(rows: list[Row]) -> str:
    """The table of sizes, memory and times of a device."""
    lines = [
        "| experts, devices | parameters | arguments | peak | products | all-to-alls | "
        "all-reduces | step | lowered in | collectives as predicted |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        after = row.plan.after
        equal = row.local.counts() == row.plan.model.local_collectives(row.plan.state)
        lines.append(
            f"| {row.experts} | {row.parameters / 1e9:.0f}B | "
            f"{after.argument_bytes / 2**30:.2f} GiB | {after.peak_bytes / 2**30:.2f} GiB | "
            f"{after.matmul_seconds:.3f} s | {row.collective_seconds('all_to_all'):.3f} s | "
            f"{row.collective_seconds('all_reduce'):.3f} s | {after.step_seconds:.3f} s | "
            f"{row.seconds:.2f} s | {'all' if equal and not row.local.gathered else 'no'} |"
        )
    return "\n".join(lines)


def collectives(row: Row) -> str:
    """The table of the collectives of a program, by kind and by the part of the model."""
    program = row.plan.analysis.program
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    total: collections.Counter[tuple[str, str]] = collections.Counter()
    for each in row.local.collectives:
        path = program.location(each.op).path
        equation = next((part for part in path.split("/") if "->" in part), "")
        place = f"`{equation}`" if equation else "other ops, such as gradients of whole parameters"
        counts[each.kind, place] += each.repeats
        total[each.kind, place] += int(each.repeats * each.bytes)
    lines = ["| kind | for | per step | MiB per step |", "| --- | --- | ---: | ---: |"]
    for (kind, place), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        lines.append(f"| {kind} | {place} | {count} | {total[kind, place] / 2**20:,.1f} |")
    return "\n".join(lines)


def rewrite(**tables: str) -> None:
    """Writes tables between the marks of the page: ``<!-- NAME -->`` and ``<!-- end -->``."""
    text = PAGE.read_text()
    for name, table in tables.items():
        head, rest = text.split(f"<!-- {name} -->\n")
        text = f"{head}<!-- {name} -->\n{table}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experts", default="128,512,2048")
    experts, found = [], []
    counts = [int(count) for count in parser.parse_args().experts.split(",")]
    for count in steps(counts, lambda count: f"{count} experts"):
        analysis = toast.analyze(build("moe-scan", experts=count, layers=LAYERS))
        whole = toast.Constraints(pin={
            name: PartitionSpec() for name in analysis.program.arguments if "params" in name
            and not name.endswith(("experts']['up']", "experts']['down']"))
        })  # fmt: skip
        options: dict[str, Any] = {"mesh": f"expert={count}", "hardware": HARDWARE}
        experts.append(lowered(count, toast.plan(analysis, constraints=whole, **options)))
        found.append(lowered(count, toast.plan(analysis, **options)))
    tables = scaling(experts), collectives(experts[-1]), scaling(found)
    print(*tables, sep="\n\n")
    rewrite(shardings=tables[0], collectives=tables[1], plans=tables[2])


if __name__ == "__main__":
    main()
