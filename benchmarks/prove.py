"""Prove every rule on drawn ops of every kind, on the test programs and on small models.

    python benchmarks/prove.py [--count 200] [KIND ...]

The script prints one row per op kind and writes the rows to rules/proven.csv, for `toast rules
list`.  It exits with code 1 if a rule is wrong.  It takes about a quarter of an hour; KINDs select
op kinds.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.rules.test_models import PROGRAMS
from toast import api
from toast.assurance.instances import KINDS
from toast.assurance.prove import Proof, prove, record, tally
from toast.assurance.random_proofs import prove_kind
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
    begin = time.perf_counter()
    print(
        f"{'drawn ops of kind':30s}{'ops':>6s}{'proven':>8s}{'wrong':>7s}{'not run':>9s}  factors"
    )
    for number, kind in enumerate(kinds):
        result = prove_kind(kind, count)
        tally = result.tally
        numbers = (tally.instances, tally.proven, tally.wrong, tally.skipped)
        factors = " ".join(result.factors)
        rows[kind] = (kind, *map(str, numbers), factors)
        print(f"{kind:30s}{{:6d}}{{:8d}}{{:7d}}{{:9d}}  {factors}".format(*numbers))
        print(f"[{number + 1}/{len(kinds)}] {time.perf_counter() - begin:.0f} s", file=sys.stderr)
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
    for number, (name, program) in enumerate(programs.items()):
        print(f"[{number + 1}/{len(programs)}] {name}", file=sys.stderr)
        outcomes = prove(program)
        proofs += outcomes
        wrong |= show_wrong(program, outcomes)
    print(
        f"\n{'ops of programs, of kind':30s}{'ops':>6s}{'proven':>8s}{'wrong':>7s}{'not run':>9s}"
    )
    for t in tally(proofs):
        print(f"{t.kind:30s}{t.instances:6d}{t.proven:8d}{t.wrong:7d}{t.skipped:9d}")
    return wrong


def main() -> int:
    """Prove all rules; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="number of drawn ops of each kind")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    options = parser.parse_args()
    wrong = drawn(options.kinds or list(KINDS), options.count)
    if not options.kinds:
        wrong |= of_programs()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
