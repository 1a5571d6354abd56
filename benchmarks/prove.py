"""Prove every rule on drawn ops of every kind, on the test programs and on small models.

    python benchmarks/prove.py [--count 200] [KIND ...]
    python benchmarks/prove.py --local [--count 50] [KIND ...]

The script prints one row per op kind and writes the rows to rules/proven.csv, for `toast rules
list`.  It exits with code 1 if a rule is wrong.  It takes about a quarter of an hour; KINDs select
op kinds.

With --local, it lowers drawn ops to device-local programs in random shardings, also uneven ones,
and compares their results with those of one device, and their collectives with the predicted ones.
It writes a row per op kind to benchmarks/local_ops.csv; it exits with code 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from tests.rules.test_models import PROGRAMS
from toast import api
from toast.assurance.instances import KINDS
from toast.assurance.local_proofs import prove_local_kind
from toast.assurance.prove import Proof, prove, record, tally
from toast.assurance.random_proofs import prove_kind
from toast.cli.elapsed import steps
from toast.models import ZOO, build
from toast.program import Program
from toast.resources import directory


def show_wrong(program: Program, proofs: tuple[Proof, ...]) -> bool:
    for proof in proofs:
        if proof.wrong:
            print(f"{program.describe(proof.op)}: factor {proof.factor}: {proof.outcome}")
    return any(proof.wrong for proof in proofs)


def drawn(kinds: list[str], count: int) -> bool:
    """Prove drawn ops and write the record; returns whether a rule is wrong."""
    wrong = False
    rows = {kind: tuple(row.values()) for kind, row in record().items() if kind in KINDS}
    print(
        f"{'drawn ops of kind':30s}{'ops':>6s}{'proven':>8s}{'wrong':>7s}{'not run':>9s}  factors"
    )
    for kind in steps(kinds):
        result = prove_kind(kind, count)
        tally = result.tally
        numbers = (tally.instances, tally.proven, tally.wrong, tally.skipped)
        factors = " ".join(result.factors)
        rows[kind] = (kind, *map(str, numbers), factors)
        print(f"{kind:30s}{{:6d}}{{:8d}}{{:7d}}{{:9d}}  {factors}".format(*numbers))
        wrong |= show_wrong(result.program, result.proofs)
    with (directory("rules") / "proven.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kind", "instances", "proven", "wrong", "not_run", "factors"))
        writer.writerows(rows[kind] for kind in sorted(rows))
    return wrong


def of_programs() -> bool:
    """Prove the ops of whole programs; returns whether a rule is wrong."""
    programs = {name: api.program_of(f, *shapes) for name, (f, shapes) in PROGRAMS.items()}
    small = [name for name in ZOO if name != "t2b"]  # the small form of t2b is t2b-tiny
    programs |= {name: api.program_of(build(name, small=True)) for name in small}
    wrong, proofs = False, list[Proof]()
    for name in steps(programs):
        program = programs[name]
        outcomes = prove(program)
        proofs += outcomes
        wrong |= show_wrong(program, outcomes)
    print(
        f"\n{'ops of programs, of kind':30s}{'ops':>6s}{'proven':>8s}{'wrong':>7s}{'not run':>9s}"
    )
    for t in tally(proofs):
        print(f"{t.kind:30s}{t.instances:6d}{t.proven:8d}{t.wrong:7d}{t.skipped:9d}")
    return wrong


LOCAL = pathlib.Path(__file__).resolve().parent / "local_ops.csv"
COLUMNS = (
    "kind", "ops", "runs", "sharded", "whole", "not run", "wrong", "collectives differ", "seconds"
)  # fmt: skip


def local(kinds: list[str], count: int, rounds: int, table: pathlib.Path) -> bool:
    """Prove local forms on drawn ops and write the table; returns whether something is wrong."""
    rows: dict[str, tuple[str, ...]] = {}
    if table.exists():
        with table.open(newline="") as file:
            rows = {row["kind"]: tuple(row.values()) for row in csv.DictReader(file)}
    bad = False
    for kind in steps(kinds):
        begin = time.perf_counter()
        proofs = prove_local_kind(kind, count, rounds=rounds)
        ran = [run for run in proofs.runs if run.mesh]
        row = (
            kind, proofs.instances, len(ran), proofs.count(sharded=True),
            proofs.count(gathered=True), len(proofs.runs) - len(ran), len(proofs.wrong),
            len(proofs.differing), round(time.perf_counter() - begin, 1),
        )  # fmt: skip
        rows[kind] = tuple(map(str, row))
        print(*row, sep=", ", flush=True)
        for run in proofs.wrong:
            print(f"  {run.mesh}: {run.sharding}: {run.outcome}: {run.instance}")
        for text in (*proofs.differing, *sorted({r.outcome for r in proofs.runs if not r.mesh})):
            print(f"  {text}")
        bad |= bool(proofs.wrong or proofs.differing)
        jax.clear_caches()
        with table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows[kind] for kind in KINDS if kind in rows)
    return bad


def main() -> int:
    """Prove all rules; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, help="number of drawn ops of each kind")
    parser.add_argument("--local", action="store_true", help="prove device-local programs")
    parser.add_argument("--rounds", type=int, default=3, help="shardings of each op, for --local")
    parser.add_argument("--table", type=pathlib.Path, default=LOCAL, help="for --local")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    options = parser.parse_args()
    if options.local:
        kinds = options.kinds or list(KINDS)
        return 1 if local(kinds, options.count or 50, options.rounds, options.table) else 0
    wrong = drawn(options.kinds or list(KINDS), options.count or 200)
    if not options.kinds:
        wrong |= of_programs()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
