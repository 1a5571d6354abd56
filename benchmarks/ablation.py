"""Measure each stage of the search: alone, and the search without it.

    python benchmarks/ablation.py [--models t2b,gns] [--seeds 0,1,2] [--quick] [--write]

Each measurement is one search of one model with one seed and a selection of stages.  ``--write``
updates the tables of docs/search.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import resource
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import toast
from toast.cli.elapsed import steps
from toast.cost import CostModel
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.search import (
    DEFAULT_STAGES,
    Settings,
    Shortening,
    Stage,
    TreeSearch,
    WhenImproved,
    find,
)
from toast.space import Space

PAGE = ROOT / "docs" / "search.md"
BEGIN, END = "<!-- ablation: begin -->", "<!-- ablation: end -->"

#: Models whose searches take at most a second.
QUICK = ("t2b", "llama3-8b", "gns", "itx", "itx-decode", "attention", "mlp")
MESH, HARDWARE = "data=4,model=4", "tpu-v5e"
#: Costs with a smaller relative difference count as equal.
SAME = 5e-4


def kind(stage: Stage) -> str:
    """The name of a stage in the tables."""
    if isinstance(stage, Shortening):
        return "shortening"
    if not isinstance(stage, TreeSearch):
        return "polishing"
    return f"tree: {stage.changes}"


def flat(stages: Sequence[Stage]) -> list[Stage]:
    """All stages in one list, including those that run only after an improvement."""
    return [
        each
        for stage in stages
        for each in (flat(stage.stages) if isinstance(stage, WhenImproved) else [stage])
    ]


def keep(stages: Sequence[Stage], kinds: set[str]) -> tuple[Stage, ...]:
    """The stages of the given kinds, in their order."""
    chosen: list[Stage] = []
    for stage in stages:
        if isinstance(stage, WhenImproved):
            chosen.append(dataclasses.replace(stage, stages=keep(stage.stages, kinds)))
        elif kind(stage) in kinds:
            chosen.append(stage)
    return tuple(chosen)


def variants() -> dict[str, tuple[Stage, ...]]:
    """For each row of the tables, its stages."""
    kinds = list(dict.fromkeys(map(kind, flat(DEFAULT_STAGES))))
    alone = {f"{one} alone": keep(DEFAULT_STAGES, {one}) for one in kinds}
    without = {f"without {one}": keep(DEFAULT_STAGES, {*kinds} - {one}) for one in kinds}
    refining = {k for k in kinds if k.startswith("tree")}
    return {
        "all stages": DEFAULT_STAGES,
        **without,
        "without any tree": keep(DEFAULT_STAGES, {*kinds} - refining),
        **{name: stages for name, stages in alone.items() if name != "polishing alone"},
    }


class Row(NamedTuple):
    """One search."""

    cost: float
    fits: bool
    states: int
    seconds: float


def search(model: CostModel, limit: float, stages: Sequence[Stage], seed: int) -> Row:
    """Run one search and measure its user CPU seconds."""
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    result = find(model, memory_bytes=limit, settings=Settings(seed=seed), stages=stages)
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - begin
    peak = float(model.price(result.state[None]).peak_bytes[0])
    return Row(result.cost, peak <= limit, result.states, seconds)


def measured(models: Sequence[str], seeds: Sequence[int]) -> dict[str, dict[str, list[Row]]]:
    """For each variant and model, one row per seed."""
    rows: dict[str, dict[str, list[Row]]] = {name: {} for name in variants()}
    machine = load(HARDWARE)
    limit = machine.memory_limit_bytes
    for name in steps(models):
        space = Space(toast.analyze(build(name)), Mesh.parse(MESH))
        model = CostModel(space, machine)
        search(model, limit, DEFAULT_STAGES, 0)  # warms up what all searches share
        for variant, stages in variants().items():
            rows[variant][name] = [search(model, limit, stages, seed) for seed in seeds]
            print(name, variant, *rows[variant][name], flush=True)
    return rows


def tables(rows: dict[str, dict[str, list[Row]]]) -> str:
    """Two Markdown tables: sums over the models, and the costs of each model."""

    def median(part: list[Row], field: str) -> float:
        return float(statistics.median(getattr(row, field) for row in part))

    whole = rows["all stages"]
    lines = [
        "| stages | models worse | cost, geometric mean | states | seconds |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for variant, models in rows.items():
        worse = sum(
            median(part, "cost") > median(whole[name], "cost") * (1 + SAME)
            for name, part in models.items()
        )
        ratios = [median(p, "cost") / median(whole[n], "cost") for n, p in models.items()]
        states = sum(median(part, "states") for part in models.values())
        seconds = sum(median(part, "seconds") for part in models.values())
        mean = statistics.geometric_mean(ratios)
        lines.append(
            f"| {variant} | {worse} of {len(models)} | {mean:.3f} | {states:,.0f} | {seconds:.1f} |"
        )
    shown = ["all stages", *(v for v in rows if v.startswith("without"))]
    heads = ["all", *(v.removeprefix("without ") for v in shown[1:])]
    lines += [
        "",
        "Costs relative to all stages (median over the seeds). The first column is the cost,",
        "with half the relative range over the seeds:",
        "",
        "| model | " + " | ".join(["all", *(f"no {head}" for head in heads[1:])]) + " |",
        "| --- |" + " ---: |" * len(shown),
    ]
    for name, part in whole.items():
        costs = [row.cost for row in part]
        cells = [f"{median(part, 'cost'):.5f} (±{(max(costs) / min(costs) - 1) * 50:.2f} %)"]
        cells += [f"{median(rows[v][name], 'cost') / median(part, 'cost'):.3f}" for v in shown[1:]]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(ZOO), help="model names, separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small models only, one seed")
    parser.add_argument("--write", action="store_true", help="update the tables of docs/search.md")
    options = parser.parse_args()
    models = QUICK if options.quick else options.models.split(",")
    seeds = [0] if options.quick else [int(seed) for seed in options.seeds.split(",")]
    text = tables(measured(models, seeds))
    print(text)
    if options.write:
        page = PAGE.read_text()
        first, last = page.index(BEGIN) + len(BEGIN), page.index(END)
        PAGE.write_text(f"{page[:first]}\n{text}\n{page[last:]}")


if __name__ == "__main__":
    main()
