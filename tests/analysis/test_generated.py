"""TOAST's evaluation of the rules equals pure logic, on programs drawn at random.

Names, edges and colors are compared with what plain clingo says of the whole program.  All that
follows is compared exactly, names as numbers, with ``closure.lp`` in place of ``built_in.lp`` and
without any choice of what can matter.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import numpy as np
import pytest

import toast
from tests.analysis.generated import drawn, program
from tests.analysis.test_closure import RULES, partition
from toast.analysis.rules import stratum
from toast.logic import Term, show_term, solve

SEEDS = range(28)


@functools.cache
def analysis_of(seed: int) -> toast.Analysis:
    return toast.analyze(program(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_names_are_those_of_pure_logic(seed: int) -> None:
    """One op per signature, and one use per pair of them, say all of every op and every use."""
    analysis = analysis_of(seed)
    names = analysis.names
    shown = (
        "annotates/3",
        "def_use/2",
        "same_name/2",
        "shardable/1",
        "color/2",
        "need_replication/2",
    )
    logic = solve(RULES, analysis.facts.to_lp(), shown)
    number = {
        (op, factor.label): int(names.first_name[op]) + index
        for op in range(len(analysis.program.ops))
        for index, factor in enumerate(analysis.rules[names.signature[op]].factors)
    }

    def name(term: Term) -> int:
        _, op, factor = term  # type: ignore[misc, str-unpack]
        return number[op, show_term(factor)]  # type: ignore[index]

    places = set()
    for term, site, d in logic["annotates/3"]:
        if site[0] == "def":  # type: ignore[index]
            row = names.value_dim[site[1]]  # type: ignore[index]
            assert names.def_name[row + d] == name(term)  # type: ignore[operator]
        places.add((site, d))
    assert len(places) == len(names.def_name) + len(names.use_name)
    assert {(name(a), name(b)) for a, b in logic["def_use/2"]} == pairs_of(names.edges)
    annotated = {name(term) for term, _, _ in logic["annotates/3"]}
    tied = {pair for pair in pairs_of(names.tied) if pair[0] in annotated}
    assert {(name(a), name(b)) for a, b in logic["same_name/2"]} == tied
    shardable = {name(term) for (term,) in logic["shardable/1"]} & annotated
    assert shardable == set(np.flatnonzero(names.shardable).tolist()) & annotated
    assert partition([(name(n), name(c)) for n, c in logic["color/2"]]) == partition(
        [(n, c) for n, c in enumerate(analysis.color.tolist()) if n in annotated]
    )


def pairs_of(rows: toast.analysis.names.Ints) -> set[tuple[int, int]]:
    return {(one, other) for one, other in rows.tolist()}


@functools.cache
def pure(seed: int) -> dict[str, list[tuple[Term, ...]]]:
    """What pure logic derives from the names of a program."""
    analysis = analysis_of(seed)
    names, program_ = analysis.names, analysis.program
    kinds = {
        n: analysis.rules[s].factors[f].kind
        for n, (s, f) in enumerate(
            (int(names.signature[op]), n - int(names.first_name[op]))
            for n, op in enumerate(names.name_op.tolist())
        )
    }
    facts = [f"node({n}). kind_of({n},{kind})." for n, kind in kinds.items()]
    facts += [
        f"signature_of({n},({names.signature[op]},{n - names.first_name[op]}))."
        for n, op in enumerate(names.name_op.tolist())
    ]
    facts += [f"shardable({n})." for n in np.flatnonzero(names.shardable).tolist()]
    facts += [f"def_use({a},{b}). joins({a},{b})." for a, b in names.edges.tolist()]
    facts += [f"joins({a},{b})." for a, b in names.tied.tolist()]
    for value in range(len(program_.values)):
        first, last = names.value_dim[value : value + 2]
        facts += [
            f"annotates({names.def_name[r]},def({value}),{r - first})." for r in range(first, last)
        ]
        facts.append(f"magnitude({value},{math.prod(program_.values[value].type.shape)}).")
    for use, (op, index) in enumerate(zip(names.use_op, names.use_index, strict=True)):
        first, last = names.use_dim[use : use + 2]
        facts += [
            f"annotates({names.use_name[r]},use({op},{index}),{r - first})."
            for r in range(first, last)
        ]
    listed = [line for line in analysis.facts.to_lp().splitlines() if not line.startswith("tied(")]
    strata = (
        "conflicts", "compatibility", "layers", "independent", "arguments", "mirroring", "orders",
        "closure",
    )  # fmt: skip
    shown = (
        "conflict/3", "box/4", "crossing/2", "compatibility_set/3", "inconsistent/1",
        "isomorphic/2", "independent/3", "argument_group/2", "color_group/2", "bit/3",
        "resolution_order/5", "choice_class/3", "color/2",
    )  # fmt: skip
    text = "\n".join([*facts, *listed]).replace("rank(", "its_rank(")
    return solve([*RULES[:1], *map(stratum, strata)], text, shown)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_that_follows_is_that_of_pure_logic(seed: int) -> None:
    analysis, logic = analysis_of(seed), pure(seed)
    names = analysis.names
    assert dict(logic["color/2"]) == dict(enumerate(analysis.color.tolist()))
    site = {
        ("use", op, index): number
        for number, (op, index) in enumerate(
            zip(names.use_op.tolist(), names.use_index.tolist(), strict=True)
        )
    }
    assert {
        (n, o, at[0], at[1] if at[0] == "def" else site[at])  # type: ignore[index]
        for n, o, at in logic["conflict/3"]
    } == set(analysis.sites)
    assert set(logic["box/4"]) == {tuple(corners) for *corners, _ in analysis.boxes}
    crossing = set(logic["crossing/2"])
    for n, o, left, right, crossed in analysis.boxes:
        assert crossed is bool({(n, right), (o, left)} & crossing)
    broken = {label for (label,) in logic["inconsistent/1"]}
    assert analysis.inconsistent == sum(
        label in broken
        for n, o, label in logic["choice_class/3"]
        if n < o  # type: ignore[operator]
    )
    # Sets and groups, oriented and numbered.
    sets = {(n, o): label for n, o, label in logic["compatibility_set/3"]}
    groups = dict(logic["isomorphic/2"])
    assert [r.names for r in analysis.resolutions] == sorted(
        sets, key=lambda pair: (sets[pair], pair)
    )
    assert [r.set for r in analysis.resolutions] == numbered(
        [sets[r.names] for r in analysis.resolutions]
    )
    labels = [groups[sets[r.names]] for r in analysis.resolutions]
    assert [r.group for r in analysis.resolutions] == [sorted(set(labels)).index(g) for g in labels]
    alone = {(n, o): label for n, o, label in logic["independent/3"]}
    independent, independent_orders = analysis.independent
    labels = [alone[r.names] for r in independent]
    assert [r.group for r in independent] == [sorted(set(labels)).index(g) for g in labels]
    # Arguments, and mirrored colors.
    values = analysis.program.argument_values
    leaders = {values[i]: values[g] for i, g in enumerate(analysis.argument_group.tolist())}
    assert dict(logic["argument_group/2"]) == leaders
    colors = np.unique(analysis.color).tolist()
    assert dict(logic["color_group/2"]) == {c: int(analysis.color_group[c]) for c in colors}
    # Resolution orders.
    for how, orders, of in (
        ("compatible", analysis.orders, groups.values()),
        ("independent", independent_orders, alone.values()),
    ):
        listed = sorted(set(of))  # type: ignore[type-var]
        bits = {(c, listed.index(g)) for way, c, g in logic["bit/3"] if way == how}
        assert {(c, g) for c, (its, _) in orders.items() for g in its} == bits
        rows: dict[tuple[Term, Term], dict[int, Term]] = {}
        for way, color, order, group, bit in logic["resolution_order/5"]:
            if way == how:
                rows.setdefault((color, order), {})[listed.index(group)] = bit
        found = Counter((color, tuple(sorted(row.items()))) for (color, _), row in rows.items())
        assert found == Counter(
            (color, tuple(zip(its, order, strict=True)))
            for color, (its, offered) in orders.items()
            for order in offered
        )


def numbered(labels: list[Term]) -> list[int]:
    """Labels in their order, as numbers from 0."""
    order: dict[Term, int] = {}
    return [order.setdefault(label, len(order)) for label in labels]


def test_the_programs_have_what_is_hard() -> None:
    """Loops, donation, layers, and conflicts of every kind; else equality would say little."""
    analyses = [analysis_of(seed) for seed in SEEDS]
    kinds = [{s.kind for s in a.program.signatures} for a in analyses]
    assert sum(drawn(seed).gradient for seed in SEEDS) >= 4, "gradients"
    assert sum("carry" in k for k in kinds) >= 3, "loops"
    assert sum("join" in k for k in kinds) >= 3, "branches"
    assert sum(bool(a.program.donated) for a in analyses) >= 5, "donation"
    assert sum(a.inconsistent > 0 for a in analyses) >= 5, "inconsistent conflicts"
    assert sum(any(crossed for *_, crossed in a.boxes) for a in analyses) >= 5, "crossed boxes"
    assert sum(a.group_count < a.set_count for a in analyses) >= 3, "isomorphic sets"
    assert sum(a.counts()["argument_groups"] < len(a.program.arguments) for a in analyses) >= 5
    assert sum(
        any(int(g) != c for c, g in enumerate(a.color_group.tolist())) for a in analyses
    ) >= 3, "mirrored colors"  # fmt: skip
    widest = [len(bits) for a in analyses for bits, _ in a.independent[1].values()]
    assert sum(width > 4 for width in widest) >= 5, "more conflicts than are enumerated"
