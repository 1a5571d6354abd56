"""The built-in closures equal the pure logic of rules/closure.lp, and plain clingo agrees."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

import toast
from toast.logic import solve
from toast.resources import directory

BASES = sorted(p for p in directory("facts").glob("*.lp") if p.name != "schema.lp")
RULES = [
    directory("facts") / "schema.lp",
    *sorted(directory("rules").glob("*.lp")),
    *sorted((directory("rules") / "ops").glob("*.lp")),
]
SHOW = (
    "annotates/3", "def_use/2", "color/2", "in_conflict/2", "box/4", "compatible/4",
    "compatibility_set/3", "isomorphic/2", "argument_group/2", "inconsistent/1",
)  # fmt: skip


def partition(pairs: list[tuple[object, object]]) -> set[frozenset[object]]:
    groups: dict[object, set[object]] = {}
    for member, group in pairs:
        groups.setdefault(group, set()).add(member)
    return {frozenset(members) for members in groups.values()}


@pytest.mark.parametrize("base", BASES, ids=lambda p: p.stem)
def test_built_in_closures_equal_the_logic(base: pathlib.Path) -> None:
    analysis = toast.analyze(base)
    # The analysis numbers ops in program order; export it so that both speak of the same terms.
    logic = solve(RULES, analysis.facts.to_lp(), SHOW)
    names = analysis.names
    number = {}
    for op in range(len(analysis.program.ops)):
        rule = analysis.rules[names.signature[op]]
        for index, factor in enumerate(rule.factors):
            number[op, factor.label] = int(names.first_name[op]) + index

    def name(term: object) -> int:
        assert isinstance(term, tuple)
        _, op, factor = term
        from toast.logic import show_term

        return number[op, show_term(factor)]

    assert {(name(a), name(b)) for a, b in logic["def_use/2"]} == set(
        map(tuple, names.edges.tolist())
    )
    assert partition([(name(n), name(c)) for n, c in logic["color/2"]]) == partition(
        list(enumerate(analysis.color.tolist()))
    )
    both = {(a, b) for r in analysis.resolutions for a, b in (r.names, r.names[::-1])}
    assert {(name(a), name(b)) for a, b in logic["in_conflict/2"]} == both
    assert {tuple(map(name, box)) for box in logic["box/4"]} == {box[:4] for box in analysis.boxes}
    unoriented = [
        (frozenset((name(a), name(b))), repr(s)) for a, b, s in logic["compatibility_set/3"]
    ]
    assert partition(unoriented) == partition(
        [(frozenset(r.names), r.set) for r in analysis.resolutions]
    )
    groups = {repr(s): repr(g) for s, g in logic["isomorphic/2"]}
    assert partition([(pair, groups[s]) for pair, s in unoriented]) == partition(
        [(frozenset(r.names), r.group) for r in analysis.resolutions]
    )
    arguments = [analysis.program.argument_values.index(v) for v, _ in logic["argument_group/2"]]
    leaders = [g for _, g in logic["argument_group/2"]]
    assert partition(list(zip(arguments, leaders, strict=True))) == partition(
        list(enumerate(analysis.argument_group.tolist()))
    )


def test_plain_clingo_reproduces_figure_5_without_python() -> None:
    """The line the README shows."""
    root = directory("rules").parent
    files = ["facts/attention.lp", "facts/schema.lp"]
    files += [str(p.relative_to(root)) for p in sorted((root / "rules").glob("*.lp"))]
    files += [str(p.relative_to(root)) for p in sorted((root / "rules" / "ops").glob("*.lp"))]
    done = subprocess.run(
        [sys.executable, "-m", "clingo", *files, "--warn=all", "--outf=1"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "info" not in done.stderr
    assert "error" not in done.stderr
    answer = next(line for line in done.stdout.splitlines() if "compatibility_set(" in line)
    atoms = answer.split()
    sets = [a for a in atoms if a.startswith("compatibility_set(")]
    assert len(sets) == 5
    assert len({a.rsplit(",(", 1)[1] for a in sets}) == 1
