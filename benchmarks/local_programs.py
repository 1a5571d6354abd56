"""Device-local programs of the zoo: collectives against the prediction, numbers against one device.

    python benchmarks/local_programs.py [--models mlp,gns] [--states 10] [--seed 0]

For the small form of each model and each mesh: the plan that the search finds, and random states.
It writes one row per program and mesh to benchmarks/local_programs.csv and prints the totals.  Rows
that are there already are not run again; remove the file to begin anew.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np

import toast
from toast.apply import verify
from toast.cost import CostModel
from toast.errors import ToastError
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.plan.shard import lowered_state
from toast.space import Space, States

MESHES = ("data=2", "data=8", "data=2,model=2", "data=2,model=4", "data=4,model=2", "a=2,b=2,c=2")
TABLE = pathlib.Path(__file__).resolve().parent / "local_programs.csv"
COLUMNS = (
    "model",
    "mesh",
    "states",
    "wrong",
    "collectives differ",
    "ops whole",
    "errors",
    "seconds",
)


def random_states(space: Space, count: int, random: np.random.Generator) -> list[States]:
    """States after up to five random actions."""
    states = []
    for _ in range(count):
        state = space.initial
        most = min(len(space.actions), 5)
        for number in random.choice(len(space.actions), size=most, replace=False):
            state = space.apply(state, space.actions[number])
        states.append(state)
    return states


def measure(name: str, mesh: str, count: int, seed: int) -> dict[str, object]:
    """The row of a model and a mesh."""
    begin = time.perf_counter()
    analysis = toast.analyze(build(name, small=True))
    hardware = toast.api.small_scale(analysis, Mesh.parse(mesh), load("tpu-v5e"))
    plan = toast.plan(
        analysis, mesh=mesh, hardware=hardware, settings=toast.Settings(budget=5, seed=seed)
    )
    model = CostModel(Space(analysis, Mesh.parse(mesh)), hardware)
    states = random_states(model.space, count, np.random.default_rng(seed))
    wrong = differ = whole = errors = 0
    for state in (None, *states):
        try:
            if state is None:
                local, predicted = plan.lowered(), plan.model.local_collectives(plan.state)
            else:
                local = lowered_state(model, state)
                predicted = model.local_collectives(state)
            check = verify(
                analysis.program, local.shardings, module_of=lambda *_, m=local.module: m
            )
        except ToastError as error:
            errors += 1
            print(f"{name} on {mesh}: {error}", file=sys.stderr)
            continue
        wrong += not check.equal
        differ += local.counts() != predicted
        whole += len(local.gathered)
        jax.clear_caches()
    seconds = round(time.perf_counter() - begin, 1)
    row = (name, mesh, 1 + len(states), wrong, differ, whole, errors, seconds)
    return dict(zip(COLUMNS, row, strict=True))


def main() -> None:
    """Measures what the table lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(ZOO), help="names, separated by commas")
    parser.add_argument("--states", type=int, default=10, help="random states of each mesh")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    if TABLE.exists():
        with TABLE.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    there = {(row["model"], row["mesh"]) for row in rows}
    for name in options.models.split(","):
        for mesh in MESHES:
            if (name, mesh) in there:
                continue
            row = measure(name, mesh, options.states, options.seed)
            rows.append(row)
            print(*row.values(), flush=True)
            with TABLE.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
    total = {column: sum(int(str(row[column])) for row in rows) for column in COLUMNS[2:-1]}
    print(", ".join(f"{column}: {number}" for column, number in total.items()))


if __name__ == "__main__":
    main()
