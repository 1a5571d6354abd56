"""A small sample of drawn hostile inputs; ``benchmarks/hostile.py`` runs many."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import hostile

#: Cases of the sample, and seconds after which no further one begins.
COUNT, SECONDS = 10, 60.0


def test_a_sample_ends_well() -> None:
    outcomes = hostile.campaign(COUNT, 19, 2, SECONDS)
    bad = [o for o in outcomes if o.kind not in ("result", "one line")]
    assert outcomes
    assert not bad, bad


def test_cases_depend_on_the_seed_alone(tmp_path: pathlib.Path) -> None:
    drawn = []
    for name in ("a", "b"):
        top = tmp_path / name
        (top / "cache").mkdir(parents=True)
        seeds = hostile.Seeds('{"version": 2, "arguments": {}}', 'name = "x"')
        cases = hostile.cases(30, 3, seeds, top)
        drawn.append([(case.grammar, case.arguments, case.streams) for case in cases])
    assert drawn[0] == drawn[1]
