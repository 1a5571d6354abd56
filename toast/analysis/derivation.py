"""Runs ``rules/`` on the names of a whole program: conflicts, sets, groups, resolution orders.

Names are numbers here, so that atoms are small.  Array joins select the relevant facts: the sites
at which a color occurs twice, and the ops within two uses of an argument.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from toast.analysis.names import Names
from toast.analysis.rules import SignatureRule, stratum
from toast.distinct import distinct_rows
from toast.facts.relations import constant, quoted
from toast.logic import Edges, LogicModel
from toast.program import Program

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
#: Two names; resolution 0 selects the first.
Pair = tuple[int, int]
#: For the first color of each color group: its resolution groups, and its orders with one bit per
#: group.
Orders = Mapping[int, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A conflict for the search: resolution 0 of ``group`` selects ``names[0]``."""

    #: The two names: resolution 0 selects the first, resolution 1 the second.
    names: tuple[int, int]
    #: Compatibility set (3.5) and resolution group (3.6), numbered from 0.
    set: int
    #: The resolution group (3.6), numbered from 0.
    group: int


@dataclasses.dataclass(frozen=True)
class Derived:
    """The results of the rules besides names and colors; the fields are those of ``Analysis``."""

    resolutions: tuple[Resolution, ...]
    orders: Orders
    sites: tuple[tuple[int, int, str, int], ...]
    boxes: tuple[tuple[int, int, int, int, bool], ...]
    inconsistent: int
    argument_group: Ints
    color_group: Ints


def strata_files() -> list[pathlib.Path]:
    """The files of ``rules/`` for whole programs, in the order of the paper."""
    return [
        stratum(name)
        for name in (
            "built_in", "conflicts", "compatibility", "layers", "independent", "arguments",
            "mirroring", "orders",
        )
    ]  # fmt: skip


def derive(
    program: Program, rules: tuple[SignatureRule, ...], names: Names, joined: Edges
) -> Derived:
    """Conflicts, sets, groups and resolution orders; ``joined`` are the edges within colors."""
    color = joined.components
    doubled = _doubled_sites(names, color)
    model = LogicModel()
    model.state_rows(_site_rows(program, rules, names, doubled))
    model.state_rows(_argument_rows(program, names, doubled.uses))
    within = np.zeros(names.count, dtype=bool)
    within[color[doubled.names]] = True
    model.derive(
        strata_files(),
        (
            "conflict/3", "box/4", "crossing/2", "choice_class/3", "compatibility_set/3",
            "inconsistent/1", "isomorphic/2", "argument_group/2", "color_group/2", "bit/3",
            "resolution_order/5",
        ),
        stated=("independent/3",),
        # Paths across boxes stay within colors with conflicts.
        arrays={
            "joins": joined,
            "def_use": Edges(names.count, names.edges[within[color[names.edges[:, 0]]]]),
        },
    )  # fmt: skip
    crossing = set(map(tuple, model.numbers("crossing/2").tolist()))
    boxes = sorted(model.numbers("box/4").tolist())
    sets = _sets(model)
    rows = model.numbers("isomorphic/2").tolist()
    leader = {(name, other): (first, second) for name, other, first, second in rows}
    set_number = {label: number for number, label in enumerate(sets)}
    leaders = dict.fromkeys(leader[label] for label in sets)
    group_number = {label: number for number, label in enumerate(leaders)}
    return Derived(
        resolutions=tuple(
            Resolution(pair, set_number[label], group_number[leader[label]])
            for label, members in sets.items()
            for pair in members
        ),
        orders=_orders(model, "compatible", group_number),
        sites=_sites(names, model.atoms("conflict/3")),
        boxes=tuple(
            (name, other, left, right, (name, right) in crossing or (other, left) in crossing)
            for name, other, left, right in boxes
        ),
        inconsistent=_inconsistent(model),
        argument_group=_argument_groups(program, model),
        color_group=_filled(names.count, model.numbers("color_group/2")),
    )


def derive_independent(
    program: Program,
    names: Names,
    color: Ints,
    color_group: Ints,
    compatible: Sequence[Resolution],
    at: Sequence[tuple[int, int, str, int]],
) -> tuple[tuple[Resolution, ...], Orders]:
    """The conflicts with one group each, for ``--resolution independent``, and their orders."""
    sets: dict[int, Pair] = {}
    groups: dict[int, Pair] = {}
    for resolution in compatible:
        first = sets.get(resolution.set, resolution.names)
        sets[resolution.set] = min(first, resolution.names)
    for resolution in compatible:
        groups.setdefault(resolution.group, sets[resolution.set])
    involved = sorted({name for r in compatible for name in r.names})
    inside = np.zeros(names.count, dtype=bool)
    inside[involved] = True
    inner = names.edges[inside[names.edges].all(axis=1)]
    op = names.name_op[involved]
    look = zip(
        involved, names.signature[op].tolist(), (involved - names.first_name[op]).tolist(),
        strict=True,
    )  # fmt: skip
    values = [_value_of(names, where, number) for _, _, where, number in at]
    model = LogicModel()
    model.state_rows({
        "compatibility_set/3": [
            f"({r.names[0]},{r.names[1]},{sets[r.set]})" for r in compatible
        ],
        "isomorphic/2": list({
            f"({sets[r.set]},{groups[r.group]})": None for r in compatible
        }),
        "def_use/2": _written(inner),
        "signature_of/2": [f"({name},({s},{f}))" for name, s, f in look],
        "stands_at/3": [
            f"({n},{o},{v})" for (n, o, _, _), v in zip(at, values, strict=True)
        ],
        "magnitude/2": _magnitudes(program, values),
        "color/2": [f"({n},{c})" for n, c in zip(involved, color[involved].tolist(), strict=True)],
        "color_group/2": [
            f"({c},{color_group[c]})" for c in np.unique(color[involved]).tolist()
        ],
    })  # fmt: skip
    model.derive(strata_files(), ("independent/3", "bit/3", "resolution_order/5"))
    group = {(n, o): _pair(g) for n, o, g in model.atoms("independent/3")}
    number = {g: i for i, g in enumerate(sorted(set(group.values())))}
    resolutions = tuple(dataclasses.replace(r, group=number[group[r.names]]) for r in compatible)
    return resolutions, _orders(model, "independent", number)


# -- facts for the rules --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Doubled:
    """The sites at which a color occurs twice; only these can have conflicts."""

    site: Ints  # [rows] values, then uses, numbered after all values
    d: Ints  # [rows] dimension
    names: Ints  # [rows]
    uses: Ints  # the uses among the sites


def _doubled_sites(names: Names, color: Ints) -> _Doubled:
    values = len(names.value_op)
    defined = np.repeat(np.arange(values), np.diff(names.value_dim))
    used = np.repeat(np.arange(len(names.use_op)), np.diff(names.use_dim))
    site = np.concatenate([defined, used + values])
    d = np.concatenate([
        np.arange(len(defined)) - names.value_dim[defined],
        np.arange(len(used)) - names.use_dim[used],
    ])  # fmt: skip
    name = np.concatenate([names.def_name, names.use_name])
    keep = np.flatnonzero(names.shardable[name])
    keep = keep[_occur_twice(site[keep] * names.count + color[name[keep]])]
    site = site[keep]
    return _Doubled(site, d[keep], name[keep], np.unique(site[site >= values]) - values)


def _occur_twice(keys: Ints) -> Bools:
    _, inverse, count = np.unique(keys, return_inverse=True, return_counts=True)
    return np.asarray(count[inverse] > 1, dtype=bool)


def _site_rows(
    program: Program, rules: tuple[SignatureRule, ...], names: Names, doubled: _Doubled
) -> dict[str, list[str]]:
    """Facts about the names at doubled sites, their edges, and the names of arguments."""
    values, arguments = len(names.value_op), len(program.arguments)
    argument_dims = names.value_dim[arguments]
    value = np.repeat(np.arange(arguments), np.diff(names.value_dim[: arguments + 1]))
    site = np.concatenate([doubled.site, value])
    d = np.concatenate([doubled.d, np.arange(argument_dims) - names.value_dim[value]])
    name = np.concatenate([doubled.names, names.def_name[:argument_dims]])
    rows = distinct_rows(np.stack([site, d, name], axis=1)).rows.tolist()
    use_op, use_index = names.use_op.tolist(), names.use_index.tolist()
    listed = np.unique(doubled.names)
    involved = np.zeros(names.count, dtype=bool)
    involved[listed] = True
    op = names.name_op[listed]
    kinds = [
        rules[s].factors[f].kind
        for s, f in zip(
            names.signature[op].tolist(), (listed - names.first_name[op]).tolist(), strict=True
        )
    ]
    every = np.unique(name)
    sites = {*doubled.site[doubled.site < values].tolist()}
    return {
        "annotates/3": [
            f"({n},def({s}),{e})" if s < values
            else f"({n},use({use_op[s - values]},{use_index[s - values]}),{e})"
            for s, e, n in rows
        ],
        "def_use/2": _written(names.edges[involved[names.edges].all(axis=1)]),
        "node/1": [f"({n},)" for n in every.tolist()],
        "shardable/1": [f"({n},)" for n in every[names.shardable[every]].tolist()],
        "kind_of/2": [f"({n},{k})" for n, k in zip(listed.tolist(), kinds, strict=True)],
        "magnitude/2": _magnitudes(
            program, sorted({*sites, *names.use_value[doubled.uses].tolist()})
        ),
    }  # fmt: skip


def _argument_rows(program: Program, names: Names, uses: Ints) -> dict[str, list[str]]:
    """Facts about arguments, the ops within two uses of them, and the operands of ``uses``."""
    arguments = len(program.arguments)
    near = np.zeros(len(program.ops), dtype=bool)
    near[names.use_op[names.use_value < arguments]] = True
    near[names.use_op[near[names.value_op[names.use_value]]]] = True
    near[:arguments] = True
    wanted = near[names.use_op]
    wanted[uses] = True
    listed = np.flatnonzero(near).tolist()
    kinds = {s: constant(program.signatures[s].kind) for s in set(names.signature[near].tolist())}
    types = [(v, program.values[v].type) for v in program.argument_values]
    operands = np.stack([names.use_op, names.use_index, names.use_value], axis=1)[wanted]
    return {
        "op/2": [f"({n},{kinds[program.ops[n].signature]})" for n in listed],
        "operand/3": _written(operands),
        "result/3": _written(
            (n, i, v) for n in listed for i, v in enumerate(program.ops[n].results)
        ),
        "dim/3": _written((v, d, size) for v, t in types for d, size in enumerate(t.shape)),
        "dtype/2": [f"({v},{quoted(t.dtype)})" for v, t in types],
    }


def _written(rows: Iterable[Sequence[int]] | Ints) -> list[str]:
    """Rows of at least two numbers, as terms."""
    listed = rows.tolist() if isinstance(rows, np.ndarray) else rows
    return [f"({','.join(map(str, row))})" for row in listed]


def _magnitudes(program: Program, values: Iterable[int]) -> list[str]:
    """The rank of each value by its size; numbers of elements may exceed 32 bits."""
    count = {v: math.prod(program.values[v].type.shape) for v in values}
    place = {elements: i for i, elements in enumerate(sorted({*count.values()}))}
    return [f"({v},{place[elements]})" for v, elements in sorted(count.items())]


def _value_of(names: Names, where: str, number: int) -> int:
    return number if where == "def" else int(names.use_value[number])


# -- results of the rules -----------------------------------------------------------------------


def _pair(term: Any) -> Pair:
    """The conflict that names a set or group: clingo's ``(3,7)``."""
    _, one, other = term
    return one, other


def _sets(model: LogicModel) -> dict[Pair, list[Pair]]:
    """The oriented conflicts of each compatibility set, by the name of the set."""
    sets: dict[Pair, list[Pair]] = defaultdict(list)
    for one, other, *label in model.numbers("compatibility_set/3").tolist():
        sets[label[0], label[1]].append((one, other))
    return {s: sorted(members) for s, members in sorted(sets.items())}


def _inconsistent(model: LogicModel) -> int:
    """The number of conflicts in inconsistent classes."""
    broken = {label for (label,) in model.atoms("inconsistent/1")}
    if not broken:
        return 0
    choices = model.atoms("choice_class/3")
    return sum(label in broken for one, other, label in choices if one < other)


def _sites(names: Names, atoms: Iterable[tuple[Any, ...]]) -> tuple[tuple[int, int, str, int], ...]:
    first_use = np.searchsorted(names.use_op, np.arange(len(names.signature) + 1)).tolist()
    sites = []
    for one, other, site in atoms:
        where, number, *index = site
        if where == "use":
            number = first_use[number] + index[0]
        sites.append((one, other, where, number))
    return tuple(sorted(sites, key=lambda s: (s[2], s[3], s[0])))


def _argument_groups(program: Program, model: LogicModel) -> Ints:
    """``[arguments]`` the first argument of each argument's group."""
    number = {value: index for index, value in enumerate(program.argument_values)}
    first = np.arange(len(program.arguments), dtype=np.int64)
    for value, leader in model.numbers("argument_group/2").tolist():
        first[number[value]] = number[leader]
    return first


def _filled(count: int, pairs: Ints) -> Ints:
    """``[count]`` the second element of each pair at its first; other elements are themselves."""
    filled = np.arange(count, dtype=np.int64)
    if len(pairs):
        filled[pairs[:, 0]] = pairs[:, 1]
    return filled


def _orders(model: LogicModel, how: str, number: Mapping[Pair, int]) -> Orders:
    """The resolution orders of every color with conflicts."""
    groups: dict[int, list[int]] = defaultdict(list)
    for color, *group in model.numbers("bit/3", first=how).tolist():
        groups[color].append(number[group[0], group[1]])
    offered: dict[int, dict[tuple[int, ...], dict[int, int]]] = defaultdict(dict)
    for color, *order, one, other, bit in model.numbers("resolution_order/5", first=how).tolist():
        offered[color].setdefault(tuple(order), {})[number[one, other]] = bit
    orders_of = {}
    for color, unsorted in sorted(groups.items()):
        listed = sorted(unsorted)
        rows = (offered[color][order] for order in sorted(offered[color]))
        orders_of[color] = tuple(listed), tuple(tuple([row[g] for g in listed]) for row in rows)
    return orders_of
