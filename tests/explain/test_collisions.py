"""Conflicts explained: where names meet, by which flows, and what is resolved with them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

import toast
from tests.explain.test_chains import ROOT, analysis_of, check_step, fact_base, small
from tests.helpers import f32, same_for_any_jax
from toast import report
from toast.analysis import Conflict
from toast.errors import ExplainError


@pytest.mark.parametrize(
    "name", ["x_xt", "attention", "box_compatible", "box_crossed_n_r", "box_crossed_o_l"]
)
def test_conflicts_are_as_they_were(name: str, golden: Callable[[str, str], None]) -> None:
    """Those of the paper's figures; pytest --regenerate writes them."""
    analysis = fact_base(name)
    found = [analysis.explain_conflict(k) for k in range(len(analysis.resolutions))]
    for conflict in found:
        check(analysis, conflict)
    golden(f"conflicts_{name}.txt", "\n\n\n".join(map(report.conflict_text, found)) + "\n")


def test_a_conflict_of_a_train_step(
    golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = report.conflict_text(small("t2b").explain_conflict(5))
    golden("conflict_t2b.txt", same_for_any_jax(text) + "\n")


def check(analysis: toast.Analysis, conflict: Conflict) -> None:
    """Everything said of a conflict is so in the relations of the analysis."""
    row = analysis.conflict.iloc[conflict.number]
    pair = (row["name"], row["other"])
    assert tuple(side.name for side in conflict.sides) == pair
    assert (conflict.set, conflict.group) == (row["set"], row["group"])
    assert [s.label for s in conflict.sides] == [analysis.name_label(n) for n in pair]
    members = analysis.conflict.index[analysis.conflict["set"] == row["set"]]
    assert conflict.set_members == tuple(members)
    assert conflict.number in conflict.set_members
    assert conflict.set in conflict.group_sets
    sites = [site for site in analysis.sites if set(site[:2]) == set(pair)]
    assert len(conflict.sites) == len(sites) > 0
    first = conflict.sites[0]
    assert first.dimensions == (conflict.chain.one, conflict.chain.other)
    assert conflict.chain.tied
    for step in conflict.chain.steps:
        check_step(analysis, step)
    if conflict.source is not None:
        assert sum(map(len, conflict.flows)) == len(conflict.chain.steps)
        for flow, end in zip(conflict.flows, first.dimensions, strict=True):
            assert flow[0].one.dimension == conflict.source
            assert flow[-1].other.dimension == end
            for before, after in itertools.pairwise(flow):
                assert before.other == after.one
            for step in flow:
                check_step(analysis, step)
    boxes = {frozenset((n, o)) for n, o, *_ in analysis.boxes} | {
        frozenset((x, y)) for _, _, x, y, _ in analysis.boxes
    }
    assert bool(conflict.neighbours) is (frozenset(pair) in boxes)
    for neighbour in conflict.neighbours:
        theirs = analysis.resolutions[neighbour.number].names
        labels = {analysis.name_label(n) for n in theirs}
        assert {other for _, other in neighbour.pairs} == labels
        assert [mine for mine, _ in neighbour.pairs] == [s.label for s in conflict.sides]
        if not neighbour.crossed:
            assert neighbour.number in conflict.set_members
            # Oriented alike: resolution 0 picks what goes together.
            assert [other for _, other in neighbour.pairs] == [
                analysis.name_label(n) for n in theirs
            ]


@pytest.mark.parametrize("name", ["t2b", "t2b-scan", "moe"])
def test_conflicts_of_models_hold(name: str) -> None:
    analysis = analysis_of(name)
    rng = random.Random(0)
    for number in rng.sample(range(len(analysis.resolutions)), 5):
        check(analysis, analysis.explain_conflict(number))


def test_two_flows_of_one_value() -> None:
    """x and transpose(x) (3.3): x goes to one dimension as it is, to the other turned."""
    conflict = fact_base("x_xt").explain_conflict(0)
    assert conflict.source is not None
    assert conflict.source.label == "x:0"
    kinds = [[step.other.op_kind for step in flow] for flow in conflict.flows]
    assert kinds == [
        ["dot_general", "dot_general"],
        ["transpose", "transpose", "dot_general", "dot_general"],
    ]
    assert [site.dimensions[0].label for site in conflict.sites] == ["z:0"]


def test_flows_that_only_begin_at_the_site() -> None:
    """x + transpose(x): the names meet where x is defined, and its uses make them one."""
    analysis = toast.analyze(lambda x: x + x.T, f32(8, 8))
    conflict = analysis.explain_conflict(0)
    check(analysis, conflict)
    text = report.conflict_text(conflict)
    assert (conflict.source is None) is ("Flow 1" not in text)
    assert conflict.chain.steps


def test_conflicts_that_do_not_exist() -> None:
    def message(name: str, number: object) -> str:
        with pytest.raises(ExplainError) as caught:
            fact_base(name).explain_conflict(number)  # type: ignore[arg-type]
        return str(caught.value)

    more = "; Analysis.conflict lists them"
    assert message("mlp", 0) == "conflict 0: mlp has no conflicts"
    assert message("x_xt", 1) == f"conflict 1: x_xt has only conflict 0{more}"
    for number in ("0", None, 0.0, True):
        what = f"conflict {number!r}: not a conflict number; use a whole number"
        assert message("attention", number) == what
    assert message("attention", -1) == f"conflict -1: attention has conflicts 0 to 4{more}"
