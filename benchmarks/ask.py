"""Measure questions about the 18-layer train step: cached analysis, queries, audits, explanations.

    python benchmarks/ask.py [--model t2b] [--layers 18] [--runs 5]

The script prints wall time and CPU time in seconds, including those of the process that answers
(the minimum of several runs), and the ratio of computing an analysis to loading it from the cache.
Then it measures whole commands, including Python's start: with an empty cache (one run), and
repeated.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import toast
from toast import api
from toast.analysis import analyze_program, query
from toast.cli.elapsed import elapsed
from toast.hardware import Mesh
from toast.models import build
from toast.space import Space
from toast.space.mesh_relations import relations as on_mesh

EXAMPLE = "color(D,C), dim(D,V,_,Size), Size > 4096"
MESH = "data=4,model=4"


def processors() -> float:
    """CPU seconds so far, of this process and of finished child processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def best(work: Callable[[], Any], runs: int) -> tuple[float, float, Any]:
    """The minimum wall and CPU seconds of some runs, and the result of the last run."""
    wall, cpu, result = float("inf"), float("inf"), None
    for _ in range(runs):
        begin, before = time.perf_counter(), processors()
        result = work()
        wall = min(wall, time.perf_counter() - begin)
        cpu = min(cpu, processors() - before)
    return wall, cpu, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="t2b")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    program = api.program_of(build(options.model, layers=options.layers))
    print(f"{options.model}, {options.layers} layers: {len(program.ops)} ops")
    print(f"{'':38}{'wall':>8}{'CPU':>8}")

    def row(what: str, work: Callable[[], Any], runs: int = options.runs) -> tuple[float, Any]:
        with elapsed() as show:
            show(what)
            return timed(what, work, runs)

    def timed(what: str, work: Callable[[], Any], runs: int) -> tuple[float, Any]:
        wall, cpu, answer = best(work, runs)
        count = f"{len(answer):8,} rows" if hasattr(answer, "columns") else ""
        print(f"{what:38}{wall:8.3f}{cpu:8.3f}{count}", flush=True)
        return cpu, answer

    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(XDG_CACHE_HOME=cache, TOAST_CACHE="")
        computed, _ = row("analysis, computed", lambda: analyze_program(program))
        toast.analyze(program)
        loaded, analysis = row("analysis, cached", lambda: toast.analyze(program))
    print(f"loading is {computed / loaded:.1f} times faster than computing")

    row("the example", lambda: analysis.query(EXAMPLE))
    mesh = Mesh.parse(MESH)
    plan = toast.plan(analysis, mesh=mesh, hardware="tpu-v5e")
    relations = {
        1: analysis.vocabulary.relations,
        2: {**analysis.vocabulary.relations, **on_mesh(Space(analysis, mesh))},
        3: plan.vocabulary,
    }
    for name in query.audits():
        audit = query.prepare(name)
        required = relations[query.needs(audit)]
        row(name, lambda: query.evaluate(audit, required, analysis.label))  # noqa: B023
    first, last = (analysis.program.arguments[i] + ":0" for i in (0, -1))
    row("explain two dimensions", lambda: analysis.explain(first, last))
    if analysis.resolutions:
        row("explain a conflict", lambda: analysis.explain_conflict(0))
    commands = {
        "toast --help": ["--help"],
        "toast query, the example": ["query", EXAMPLE],
        "toast query idle_colors --mesh": ["query", "idle_colors", "--mesh", MESH],
        "toast explain, two dimensions": ["explain", first, last],
        "toast explain --conflict 0": ["explain", "--conflict", "0"],
        "toast explain --conflict 0 --mesh": ["explain", "--conflict", "0", "--mesh", MESH],
    }
    of_plan = {
        "toast query PLAN reshards": ["query", "reshards"],
        "toast explain PLAN --argument": ["explain", "--argument", first.removesuffix(":0")],
        "toast explain PLAN --collective 1": ["explain", "--collective", "1"],
    }
    print(f"{'whole commands':38}{'wall':>8}{'CPU':>8}")
    for what, (command, *asked) in {**commands, **of_plan}.items():
        target = [options.model, "--layers", str(options.layers)] if asked else []

        with tempfile.TemporaryDirectory() as cache:
            if what in of_plan:
                path = pathlib.Path(cache) / "plan.json"
                words = ["plan", *target, "--mesh", MESH, "--json", str(path)]
                subprocess.run(
                    [sys.executable, "-m", "toast", *words],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, cwd=ROOT,
                )  # fmt: skip
                target = [str(path)]

            def run(command: str = command, words: tuple[str, ...] = (*target, *asked)) -> None:
                subprocess.run(
                    [sys.executable, "-m", "toast", command, *words],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=True,
                    cwd=ROOT,
                )

            os.environ.update(XDG_CACHE_HOME=cache, TOAST_CACHE="")
            if asked:
                row(f"{what}, first", run, 1)
            row(what, run)


if __name__ == "__main__":
    main()
