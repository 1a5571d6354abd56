"""Explanations of conflicts: where two names of one color meet, and why."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from toast.analysis.analysis import Analysis
from toast.analysis.dimensions import Dimension
from toast.analysis.evidence import Chain, ChainStep, Conflict, Neighbour, Side, Site
from toast.errors import ExplainError
from toast.explain.chains import Places, between


def collision(analysis: Analysis, number: int) -> Conflict:
    """The implementation of :meth:`toast.Analysis.explain_conflict`."""
    count = len(analysis.resolutions)
    if not isinstance(number, int | np.integer) or isinstance(number, bool):
        raise ExplainError(f"conflict {number!r}: not a conflict number; use a whole number")
    if not 0 <= number < count:
        known = f"conflicts 0 to {count - 1}" if count > 1 else "only conflict 0"
        what = f"conflict {number}: {analysis.program.name} has"
        if not count:
            raise ExplainError(f"{what} no conflicts")
        raise ExplainError(
            f"{what} {known}; Analysis.conflict lists them", shell="--conflicts lists them"
        )
    resolution = analysis.resolutions[number]
    rows = [
        _rows(analysis, kind, at, resolution.names)
        for name, other, kind, at in analysis.sites
        if {name, other} == set(resolution.names)
    ]
    places, chain = Places(analysis), between(analysis, *rows[0])
    source, flows = _flows(chain)
    members = [i for i, r in enumerate(analysis.resolutions) if r.set == resolution.set]
    sets = {r.set for r in analysis.resolutions if r.group == resolution.group}
    return Conflict(
        number=number,
        sides=(_side(analysis, resolution.names[0]), _side(analysis, resolution.names[1])),
        sites=tuple(_site(places, *pair) for pair in rows),
        chain=chain,
        source=source,
        flows=flows,
        neighbours=_neighbours(analysis, resolution.names),
        set=resolution.set,
        set_members=tuple(members),
        group=resolution.group,
        group_sets=tuple(sorted(sets)),
    )


def _side(analysis: Analysis, name: int) -> Side:
    op = int(analysis.names.name_op[name])
    rule = analysis.rules[analysis.program.ops[op].signature]
    return Side(
        name=name,
        op=op,
        op_kind=analysis.program.kind(op),
        location=analysis.program.location(op),
        factor=rule.factors[name - int(analysis.names.first_name[op])].label,
        label=analysis.name_label(name),
    )


def _rows(analysis: Analysis, kind: str, number: int, pair: tuple[int, int]) -> tuple[int, int]:
    """The places (:mod:`toast.explain.chains`) of a pair of names at a site."""
    names = analysis.names
    if kind == "def":
        first, last = names.value_dim[number : number + 2].tolist()
        site_names, before = names.def_name[first:last].tolist(), first
    else:
        first, last = names.use_dim[number : number + 2].tolist()
        site_names, before = names.use_name[first:last].tolist(), first + len(names.def_name)
    return before + site_names.index(pair[0]), before + site_names.index(pair[1])


def _site(places: Places, one: int, other: int) -> Site:
    ends = places.place(one), places.place(other)
    return Site(
        kind="use" if ends[0].tensor.startswith("operand") else "def",
        op=ends[0].op,
        op_kind=ends[0].op_kind,
        location=ends[0].location,
        dimensions=(ends[0].dimension, ends[1].dimension),
    )


def _flows(chain: Chain) -> tuple[Dimension | None, tuple[tuple[ChainStep, ...], ...]]:
    """The dimension where a chain divides into two flows, and the steps of both."""
    turns = [
        (step.one.op, number)
        for number, (before, step) in enumerate(itertools.pairwise(chain.steps), 1)
        if before.kind == step.kind == "def_use" and step.one.tensor.startswith("result")
    ]
    if not turns:
        return None, ()
    _, at = min(turns)
    back = tuple(
        dataclasses.replace(step, one=step.other, other=step.one, rules=step.rules[::-1])
        for step in reversed(chain.steps[:at])
    )
    return chain.steps[at].one.dimension, (back, chain.steps[at:])


def _neighbours(analysis: Analysis, pair: tuple[int, int]) -> tuple[Neighbour, ...]:
    """The conflicts that form a box with the conflict of ``pair``."""
    number = {frozenset(r.names): i for i, r in enumerate(analysis.resolutions)}
    neighbours: dict[tuple[int, frozenset[tuple[str, str]]], Neighbour] = {}
    for name, other, left, right, crossed in analysis.boxes:
        for mine, theirs in (((name, other), (left, right)), ((left, right), (name, other))):
            if set(mine) == set(pair):
                turned = mine if mine == pair else mine[::-1]
                opposite = theirs if mine == pair else theirs[::-1]
                one, two = (
                    (analysis.name_label(a), analysis.name_label(b))
                    for a, b in zip(turned, opposite, strict=True)
                )
                key = number[frozenset(theirs)], frozenset((one, two))
                neighbours.setdefault(key, Neighbour(key[0], (one, two), crossed))
    return tuple(sorted(neighbours.values(), key=lambda n: (n.number, n.pairs)))
