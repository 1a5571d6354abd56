"""Count the plans of the zoo that a small change of one argument's sharding improves.

    python benchmarks/optimality.py [--quick] [--only MODEL] [--before FOLDER] [--most N] [--write]

For each plan, the script tries other shardings of single arguments: no axis, one axis, or two axes
on one or two dimensions, for the first arguments of the largest groups.  It pins each sharding and
searches from there, like ``toast explain PLAN.json --why-not``.  It counts the alternatives that
end in a plan that fits and costs less by more than a thousandth.  ``--before`` is another checkout
of TOAST that runs the same searches; times are user CPU seconds, the minimum of three runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # use this checkout, not an installed version

import toast
from toast.cli.elapsed import steps
from toast.models import ZOO, build
from toast.paths import folded
from toast.plan import spec_text

HARDWARE = "tpu-v5e"
MESHES = ("data=4,model=4", "data=8,model=2")
QUICK = ("t2b-tiny", "itx-scan", "mlp", "attention")

#: The number of argument groups (the largest), and the maximum number of alternatives per plan.
GROUPS, MOST = 8, 64

#: A plan whose cost is lower by at most this share counts as equal.
AS_GOOD = 1e-3

PAGE = ROOT / "docs" / "search.md"
BEGIN, END = "<!-- optimality: begin -->", "<!-- optimality: end -->"

#: Measures a search in a separate process, with the checkout of the working directory.
TIMED = """
import os, sys, toast
from toast.models import build
analysis = toast.analyze(build(sys.argv[1]))
seconds = []
for _ in range(3):
    begin = os.times().user
    plan = toast.plan(analysis, mesh=sys.argv[2], hardware=sys.argv[3])
    seconds.append(os.times().user - begin)
print(min(seconds), plan.cost)
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of the alternatives of one plan."""

    model: str
    mesh: str
    cost: float
    alternatives: int
    #: Better alternatives, best first: argument, sharding, saved share of the cost.
    better: tuple[tuple[str, str, float], ...]
    seconds: float
    seconds_before: float
    cost_before: float


def alternatives(plan: toast.Plan) -> Iterator[tuple[str, str]]:
    """Pairs of an argument and another sharding, alternating between the groups."""
    program, analysis = plan.analysis.program, plan.analysis
    size: dict[int, float] = {}
    first: dict[int, int] = {}
    for number, group in enumerate(analysis.argument_group.tolist()):
        type_ = program.values[program.argument_values[number]].type
        count = 1.0
        for length in type_.shape:
            count *= length
        size[group] = size.get(group, 0.0) + count
        if type_.shape:
            first.setdefault(group, number)
    groups = sorted(first, key=lambda group: -size[group])[:GROUPS]
    offered = [
        [(folded(program.arguments[first[g]]), spec) for spec in specs(plan, first[g])]
        for g in groups
    ]
    for several in itertools.zip_longest(*offered):
        yield from (each for each in several if each is not None)


def specs(plan: toast.Plan, argument: int) -> list[str]:
    """Every other sharding of an argument along some of the axes, if sizes divide."""
    program, sizes = plan.analysis.program, dict(plan.mesh.axes)
    shape = program.values[program.argument_values[argument]].type.shape
    own = plan.arguments[program.arguments[argument]]
    texts = []
    for places in itertools.product((None, *range(len(shape))), repeat=len(sizes)):
        axes = [
            tuple(axis for axis, at in zip(sizes, places, strict=True) if at == dimension)
            for dimension in range(len(shape))
        ]
        shards = [1] * len(shape)
        for dimension, held in enumerate(axes):
            for axis in held:
                shards[dimension] *= sizes[axis]
        divides = all(n % s == 0 for n, s in zip(shape, shards, strict=True))
        if divides and [*map(set, axes)] != [*map(set, own)]:
            texts.append(spec_text(tuple(axes)))
    return texts


def measured(model: str, mesh: str, most: int, before: str) -> Row:
    """Measure the alternatives of the plan of a model on a mesh."""
    plan = toast.plan(build(model), mesh=mesh, hardware=HARDWARE)
    asked, better = 0, []
    for argument, spec in itertools.islice(alternatives(plan), most):
        alternative = plan.why_not(argument, spec, budget=None)
        if alternative.impossible:
            continue
        asked += 1
        for other in (alternative.pinned, alternative.searched):
            saved = 1 - other.plan.cost / plan.cost if other else 0.0
            if other and (other.fits or not plan.fits) and saved > AS_GOOD:
                better.append((saved, argument, spec))
                break
    seconds, _ = timed(model, mesh, str(ROOT))
    seconds_before, cost_before = timed(model, mesh, before) if before else (0.0, 0.0)
    return Row(
        model, mesh, plan.cost, asked,
        tuple((a, s, saved) for saved, a, s in sorted(better, reverse=True)),
        seconds, seconds_before, cost_before,
    )  # fmt: skip


def timed(model: str, mesh: str, checkout: str) -> tuple[float, float]:
    """User CPU seconds of a search with a checkout of TOAST, and the cost of its plan."""
    python = pathlib.Path(checkout, ".venv", "bin", "python")
    command = [str(python if python.exists() else sys.executable), "-c", TIMED, model, mesh]
    done = subprocess.run(
        [*command, HARDWARE], cwd=checkout, env={**os.environ, "PYTHONPATH": checkout},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, cost = map(float, done.stdout.split())
    return seconds, cost


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    compared = any(row.cost_before for row in rows)
    columns = ["model", "mesh", "alternatives", "better by > 0.1 %", "best gain", "search, s"]
    columns += ["before, s", "cost over before"] if compared else []
    lines = [columns, ["---", "---", *["--:"] * (len(columns) - 2)]]
    for row in rows:
        gain = f"{100 * row.better[0][2]:.2f} %" if row.better else "-"
        line = [row.model, row.mesh, str(row.alternatives), str(len(row.better)), gain]
        line.append(f"{row.seconds:.2f}")
        if compared:
            line += [f"{row.seconds_before:.2f}", f"{row.cost / row.cost_before:.4f}"]
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models only")
    parser.add_argument("--only", action="append", help="a model; repeatable")
    parser.add_argument("--mesh", action="append", help="a mesh; repeatable")
    parser.add_argument("--before", default="", help="another checkout that runs the same searches")
    parser.add_argument(
        "--most", type=int, default=MOST, help="maximum number of alternatives per plan"
    )
    parser.add_argument("--json", type=pathlib.Path, help="output file for the rows")
    parser.add_argument("--write", action="store_true", help="write the table of docs/search.md")
    options = parser.parse_args()
    rows = []
    models = options.only or (QUICK if options.quick else ZOO)
    cases = [(model, mesh) for model in models for mesh in options.mesh or MESHES]
    for model, mesh in steps(cases, " ".join):
        row = measured(model, mesh, options.most, options.before)
        rows.append(row)
        print(table([row]).splitlines()[-1], *row.better[:3], flush=True)
        if options.json:
            records = [dataclasses.asdict(row) for row in rows]
            options.json.write_text(json.dumps(records, indent=1))
    print(table(rows))
    if options.write:
        page = PAGE.read_text()
        first, last = page.index(BEGIN) + len(BEGIN), page.index(END)
        PAGE.write_text(f"{page[:first]}\n{table(rows)}\n{page[last:]}")


if __name__ == "__main__":
    main()
