"""Measure how much time unused rules add to an analysis.

    python benchmarks/rules.py [--layers 18] [--runs 7]

The script analyzes the train step with all rule files and with only the files that have a rule for
one of its ops, alternately in one process.  It prints the ratio of the median times.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from toast import api
from toast.analysis import analyze_program, rule_entries
from toast.analysis import rules as rules_stage
from toast.cli.elapsed import steps
from toast.models import build
from toast.program import Program


def used_files(program: Program) -> list[pathlib.Path]:
    """The schema, the shared rules, and the files with a rule for an op of ``program``."""
    kinds = {signature.kind for signature in program.signatures}
    used = {entry.file for entry in rule_entries() if entry.kind in kinds}
    shared, ops = rules_stage.factor_files()[:2], rules_stage.factor_files()[2:]
    return [*shared, *(file for file in ops if file in used)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    program = api.program_of(build("t2b", layers=options.layers))
    everything = rules_stage.factor_files()
    sets = {"all rules": everything, "rules of its ops": used_files(program)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sets}
    for _ in steps(range(options.runs), lambda run: f"run {run}"):
        for name, files in sets.items():
            rules_stage.factor_files = functools.partial(list, files)
            begin = time.perf_counter()
            analysis = analyze_program(program)
            whole = time.perf_counter() - begin
            seconds[name].append((whole, analysis.seconds["rules"]))
    print(f"{len(program.ops)} ops, {len(program.signatures)} signatures")
    for name, files in sets.items():
        whole, factors = (statistics.median(column) for column in zip(*seconds[name], strict=True))
        print(
            f"{name:18s} {len(files) - 2:3d} files  analysis {whole:.3f} s  factors {factors:.3f} s"
        )
    one, other = (statistics.median(s for s, _ in seconds[name]) for name in sets)
    print(f"ratio {one / other:.3f}")


if __name__ == "__main__":
    main()
