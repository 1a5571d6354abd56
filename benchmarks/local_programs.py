"""Device-local programs of the zoo: collectives against the prediction, numbers against one device.

    python benchmarks/local_programs.py [--models mlp,gns] [--states 10] [--seed 0]

For the small form of each model and each mesh: the plan that the search finds, and random states.
With --run N, only the first N of these are run; of the others, the collectives are compared.
It writes one row per model and mesh to benchmarks/local_programs.csv and prints the totals.  Models
with the same small form share what was measured.  Rows that are there already are not run again;
remove the file to begin anew.
"""

from __future__ import annotations

import argparse
import collections
import csv
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import TypeAlias

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

import toast
from tests.helpers import random_states
from toast import api
from toast.apply.verify import UnshardedRun, Verification
from toast.cli.elapsed import steps
from toast.cost import CostModel
from toast.errors import ToastError
from toast.hardware import Mesh, load
from toast.lower import LocalProgram
from toast.models import ZOO, build
from toast.plan.shard import lowered_state
from toast.space import Space

#: Collectives of a step by kind, axes and bytes.
Collectives: TypeAlias = "collections.Counter[tuple[str, tuple[str, ...], float]]"

MESHES = ("data=2", "data=8", "data=2,model=2", "data=2,model=4", "data=4,model=2", "a=2,b=2,c=2")
TABLE = pathlib.Path(__file__).resolve().parent / "local_programs.csv"
COLUMNS = (
    "model",
    "mesh",
    "states",
    "run",
    "wrong",
    "collectives differ",
    "ops whole",
    "errors",
    "seconds",
)


def findings(
    local: LocalProgram, predicted: Collectives, check: Verification | None
) -> Iterator[str]:
    """What is wrong with a program, in lines, and which of its ops run whole."""
    for output in check.outputs if check else ():
        if not output.equal:
            yield f"{output.path} is wrong by {output.relative_error:.3g}"
    if local.counts() != predicted:
        more, fewer = local.counts() - predicted, predicted - local.counts()
        yield f"emits besides {dict(more)}; lacks {dict(fewer)}"
    for gathered in local.gathered:
        op = local.program.describe(gathered.op)
        yield f"{op} runs whole along {', '.join(gathered.factors)}"


def measure(
    reference: UnshardedRun, mesh: str, name: str, *, count: int, run: int, seed: int
) -> dict[str, object]:
    """The row of a model and a mesh: the plan and ``count`` states; the first ``run`` are run."""
    begin = time.perf_counter()
    analysis = toast.analyze(reference.program, lowering="local")
    hardware = api.small_scale(analysis, Mesh.parse(mesh), load("tpu-v5e"))
    plan = toast.plan(
        analysis, mesh=mesh, hardware=hardware, settings=toast.Settings(budget=5, seed=seed)
    )
    model = CostModel(Space(analysis, Mesh.parse(mesh)), hardware)
    states = random_states(model.space, count, seed)
    wrong = differ = whole = errors = 0
    for number, state in enumerate((None, *states)):
        where = f"{name} on {mesh}, {f'random state {number}' if number else 'the found plan'}"
        ran = time.perf_counter()
        try:
            if state is None:
                local, predicted = plan.lowered(), plan.model.local_collectives(plan.state)
            else:
                local = lowered_state(model, state)
                predicted = model.local_collectives(state)
            lowered = time.perf_counter()
            check = None
            if number < run:
                own = reference
                if local.program is not reference.program:  # a padded plan has its own
                    own = UnshardedRun.of(local.program)
                check = own.verify(
                    local.shardings, module_of=lambda *_, m=local.module: m, count=False
                )
        except ToastError as error:
            errors += 1
            print(f"{where}: {error}", file=sys.stderr, flush=True)
            continue
        wrong += check is not None and not check.equal
        differ += local.counts() != predicted
        whole += len(local.gathered)
        wall = time.perf_counter()
        lines = [
            f"{lowered - ran:.1f} s + {wall - lowered:.1f} s",
            *findings(local, predicted, check),
        ]
        print(*(f"{where}: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
        jax.clear_caches()
    seconds = round(time.perf_counter() - begin, 1)
    row = (
        name,
        mesh,
        1 + len(states),
        min(run, 1 + len(states)),
        wrong,
        differ,
        whole,
        errors,
        seconds,
    )
    return dict(zip(COLUMNS, row, strict=True))


def main() -> None:
    """Measures what the table lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(ZOO), help="names, separated by commas")
    parser.add_argument("--states", type=int, default=10, help="random states of each mesh")
    parser.add_argument(
        "--meshes", default=";".join(MESHES), help="meshes, separated by semicolons"
    )
    parser.add_argument("--run", type=int, default=11, help="programs to run, not only to lower")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=pathlib.Path, default=TABLE, help="the file of the rows")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    if options.table.exists():
        with options.table.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    there = {(row["model"], row["mesh"]): row for row in rows}
    alike: dict[str, str] = {}
    for name in steps(options.models.split(",")):
        left = [mesh for mesh in options.meshes.split(";") if (name, mesh) not in there]
        program = api.program_of(build(name, small=True))
        same = alike.setdefault(program.digest, name)
        reference = None
        for mesh in left:
            if (same, mesh) in there:
                row = {**there[same, mesh], "model": name}
            else:
                reference = reference or UnshardedRun.of(program)
                row = measure(
                    reference, mesh, name, count=options.states, run=options.run, seed=options.seed
                )
            there[name, mesh] = row
            rows.append(row)
            print(*row.values(), flush=True)
            with options.table.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
    total = {column: sum(int(str(row[column])) for row in rows) for column in COLUMNS[2:-1]}
    print(", ".join(f"{column}: {number}" for column, number in total.items()))


if __name__ == "__main__":
    main()
