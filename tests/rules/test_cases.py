"""Tiny fact bases of one op each, with the factors they must have.

A case opens with what it shows, then ``% expect:`` and an einsum: for each operand and result its
dimensions, for each dimension its factors (one letter each) from the major-most, then the sizes of
factors where they matter, and the factors that are not simply passed through.  ``reduction={k}`` is a
sum, ``reduction={k:maximum}`` another combiner.  ``halo={x:2}`` are elements that neighbours exchange.
``excludes={x:o}`` are factors that are not sharded together.
"""

from __future__ import annotations

import pathlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from toast.analysis.rules import factor_files, rule_entries
from toast.logic import Term, show_term, solve

CASES = sorted((pathlib.Path(__file__).parent / "cases").glob("*.lp"))

#: Places of a tensor, and for each dimension its factors.
Tensors = Mapping[Any, Sequence[Sequence[Any]]]

EXPECT = re.compile(r"^% expect: \((.*)\) -> \((.*?)\)(?: \{(.*?)\})?((?: \w+=\{[^}]*\})*)$", re.M)
KINDS = ("need_replication", "permutation", "gathered", "whole_mesh")


def canonical(
    tensors: Tensors,
    sizes: Mapping[Any, int],
    combiners: Mapping[Any, str],
    marked: Mapping[str, set[Any]],
    halos: Mapping[Any, int],
    excluded: set[tuple[Any, Any]],
) -> dict[str, Any]:
    """What a rule says, its factors numbered as they appear."""
    number: dict[Any, int] = {}
    placed = {
        place: [[number.setdefault(factor, len(number)) for factor in dim] for dim in dims]
        for place, dims in sorted(tensors.items())
    }
    return {
        "tensors": placed,
        "sizes": {number[factor]: size for factor, size in sizes.items()},
        "reduction": {number[factor]: combiner for factor, combiner in combiners.items()},
        **{kind: {number[factor] for factor in marked[kind]} for kind in KINDS},
        "halo": {number[factor]: count for factor, count in halos.items()},
        "excludes": {frozenset((number[one], number[other])) for one, other in excluded},
    }


def expected(text: str) -> dict[str, Any]:
    found = EXPECT.search(text)
    assert found, "a case needs a line '% expect: ([i,k],[k,j]) -> ([i,j]) reduction={k}'"
    operands, results, sizes, kinds = found.groups()
    tensors = {
        (side, index): [list(dim) for dim in tensor.split(",") if dim]
        for side, part in (("operand", operands), ("result", results))
        for index, tensor in enumerate(re.findall(r"\[(.*?)\]", part))
    }
    named = {kind: names.split(",") for kind, names in re.findall(r" (\w+)=\{(.*?)\}", kinds)}
    assert set(named) <= {"reduction", "halo", "excludes", *KINDS}, named
    pairs = [name.partition(":") for name in named.get("reduction", [])]
    halos = [name.partition(":") for name in named.get("halo", [])]
    excluded = [name.partition(":") for name in named.get("excludes", [])]
    return canonical(
        tensors,
        {pair[0]: int(pair[2:]) for pair in (sizes or "").split(",") if pair},
        {name: combiner or "add" for name, _, combiner in pairs},
        {kind: set(named.get(kind, ())) for kind in KINDS},
        {name: int(count) for name, _, count in halos},
        {(one, other) for one, _, other in excluded},
    )


def actual(path: pathlib.Path) -> dict[str, Any]:
    shown = ("factor/5", "factor_size/3", "reduction/3", *(f"{kind}/2" for kind in KINDS))
    atoms = solve([*factor_files(), path], "", (*shown, "tensor/3", "halo/3", "excludes/3"))
    stacks: dict[tuple[Term, Term], dict[Term, Term]] = defaultdict(dict)
    for _, factor, tensor, d, position in atoms["factor/5"]:
        assert position not in stacks[tensor, d], "two factors at one position"
        stacks[tensor, d][position] = factor
    dims: dict[Any, list[list[Term]]] = {tensor: [] for _, tensor, _ in atoms["tensor/3"]}
    for (tensor, d), stack in sorted(stacks.items(), key=lambda item: str(item[0])):
        assert len(dims[tensor]) == d, f"{show_term(tensor)} has a dimension without factors"
        dims[tensor].append([stack[position] for position in sorted(stack, key=str)])
    return canonical(
        dims,
        {factor: int(str(size)) for _, factor, size in atoms["factor_size/3"]},
        {factor: str(combiner) for _, factor, combiner in atoms["reduction/3"]},
        {kind: {factor for _, factor in atoms[f"{kind}/2"]} for kind in KINDS},
        {factor: int(str(count)) for _, factor, count in atoms["halo/3"]},
        {(one, other) for _, one, other in atoms["excludes/3"]},
    )


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_factors(path: pathlib.Path) -> None:
    want, got = expected(path.read_text()), actual(path)
    for optional in ("sizes", "halo"):
        if not want[optional]:
            del want[optional], got[optional]
    assert got == want


def test_every_family_has_a_case() -> None:
    """A rule file without a case is not documented by one."""
    kinds = {re.search(r"op\(y,(\w+)\)", path.read_text())[1] for path in CASES}  # type: ignore[index]
    without, entries = set(), rule_entries()
    for path in factor_files()[2:]:
        known = {entry.kind for entry in entries if entry.file == path and not entry.custom_call}
        if known and not known & kinds:
            without.add(path.stem)
    assert without == {"function"}, "the boundary of a program is no op to look at alone"
