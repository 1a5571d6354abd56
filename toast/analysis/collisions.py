"""Conflicts explained: where two names of one color meet, why, and what is resolved with them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from toast.analysis import notebook
from toast.analysis.chains import Chain, Places, Step, between
from toast.analysis.dimensions import Dimension
from toast.errors import ExplainError
from toast.frontend import Location

if TYPE_CHECKING:
    from toast.analysis.analysis import Analysis


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two names of a conflict: a factor of an op."""

    name: int
    op: int
    op_kind: str
    location: Location
    factor: str
    #: As :meth:`toast.Analysis.name_label` writes it.
    label: str


@dataclasses.dataclass(frozen=True)
class Site:
    """A tensor that both names annotate: one mesh axis cannot shard it along both."""

    #: ``def`` where ``op`` defines it, ``use`` where ``op`` uses it.
    kind: str
    op: int
    op_kind: str
    location: Location
    #: Its dimensions under the names, in the order of the conflict's.
    dimensions: tuple[Dimension, Dimension]


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A conflict at the other end of a box (3.5, Figure 6)."""

    number: int
    #: Names that edges join: the first of each pair is one of the conflict's, and choosing it goes
    #: with choosing the second, one of the neighbour's.
    pairs: tuple[tuple[str, str], tuple[str, str]]
    #: Whether a path leads across, so that the two conflicts are not compatible.
    crossed: bool


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Two names of one color that annotate one tensor (paper, sections 3.3 to 3.6)."""

    #: Row of :attr:`toast.Analysis.conflict`.
    number: int
    #: Resolution 0 picks the first, resolution 1 the second.
    sides: tuple[Side, Side]
    sites: tuple[Site, ...]
    #: What makes the two one dimension: from the first dimension of the first site to the second.
    chain: Chain
    #: The dimension on the chain from which two flows lead to the ends of it, and so to the first
    #: site: the earliest in the program that two ops of the chain use.  None, and no flows, where
    #: the chain leaves the site by its uses only.
    source: Dimension | None
    flows: tuple[tuple[Step, ...], ...]
    neighbours: tuple[Neighbour, ...]
    #: Compatibility set, and the conflicts in it (this one among them): all are resolved alike.
    set: int
    set_members: tuple[int, ...]
    #: Resolution group: sets of repeated layers, which are resolved alike too.
    group: int
    group_sets: tuple[int, ...]

    def __repr__(self) -> str:
        one, other = self.sides
        return (
            f"<Conflict {self.number}: {one.label} and {other.label}, at {len(self.sites)} "
            f"tensors, {len(self.set_members)} resolved alike>"
        )

    def _repr_html_(self) -> str:
        """How notebooks show it."""
        return notebook.conflict_html(self)


def collision(analysis: Analysis, number: int) -> Conflict:
    """Conflict ``number``, explained; as :meth:`toast.Analysis.explain_conflict`."""
    count = len(analysis.resolutions)
    if not isinstance(number, int | np.integer) or isinstance(number, bool):
        raise ExplainError(f"conflict {number!r}: no number of a conflict; give a whole number")
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
    alike = [i for i, r in enumerate(analysis.resolutions) if r.set == resolution.set]
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
        set_members=tuple(alike),
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
    """The places (:mod:`toast.analysis.chains`) that a pair of names annotates at a site."""
    names = analysis.names
    if kind == "def":
        first, last = names.value_dim[number : number + 2].tolist()
        found, before = names.def_name[first:last].tolist(), first
    else:
        first, last = names.use_dim[number : number + 2].tolist()
        found, before = names.use_name[first:last].tolist(), first + len(names.def_name)
    return before + found.index(pair[0]), before + found.index(pair[1])


def _site(places: Places, one: int, other: int) -> Site:
    ends = places.place(one), places.place(other)
    return Site(
        kind="use" if ends[0].tensor.startswith("operand") else "def",
        op=ends[0].op,
        op_kind=ends[0].op_kind,
        location=ends[0].location,
        dimensions=(ends[0].dimension, ends[1].dimension),
    )


def _flows(chain: Chain) -> tuple[Dimension | None, tuple[tuple[Step, ...], ...]]:
    """The dimension from which two flows lead to the ends of a chain, and the steps of both."""
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
    """The conflicts that form a box with one."""
    number = {frozenset(r.names): i for i, r in enumerate(analysis.resolutions)}
    found: dict[tuple[int, frozenset[tuple[str, str]]], Neighbour] = {}
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
                found.setdefault(key, Neighbour(key[0], (one, two), crossed))
    return tuple(sorted(found.values(), key=lambda n: (n.number, n.pairs)))
