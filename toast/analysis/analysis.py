"""The named dimension analysis of a program, as one immutable object of relations."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from toast import lazy
from toast.analysis import chains, closure, collisions
from toast.analysis.chains import Chain
from toast.analysis.collisions import Conflict
from toast.analysis.dimensions import Dimension
from toast.analysis.names import Bools, Ints, Names, instantiate, tied_names
from toast.analysis.notebook import analysis_html
from toast.analysis.query import evaluate, prepare
from toast.analysis.rules import SignatureRule, solve_rules, strata
from toast.analysis.vocabulary import Vocabulary
from toast.facts import Relations
from toast.frontend import Program
from toast.graphs import components
from toast.logic import Term, solve

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy.module("pandas")

#: Told about each stage as it begins: ``progress("rules")``.
Progress = Callable[[str], None]


def silent(_stage: str) -> None:
    """Tell nobody."""


@dataclasses.dataclass(frozen=True)
class Resolution:
    """One conflict as the search sees it: resolution 0 of ``group`` picks ``names[0]``."""

    names: tuple[int, int]
    #: Compatibility set (3.5) and resolution group (3.6), numbered from 0.
    set: int
    group: int


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Names, colors, conflicts and groups of a program (paper, section 3).

    Arrays serve the search; every relation is also a DataFrame for audits.
    """

    program: Program
    rules: tuple[SignatureRule, ...]
    names: Names
    #: ``[names]`` color of each name: the smallest name of its connected component.
    color: Ints
    #: Every conflict once, oriented, with its set and group.
    resolutions: tuple[Resolution, ...]
    #: ``conflict(name, other, site)`` of the rules, sites as ("def", value) or ("use", use).
    sites: tuple[tuple[int, int, str, int], ...]
    #: ``(name, other, left, right, crossed)`` of every box.
    boxes: tuple[tuple[int, int, int, int, bool], ...]
    #: Conflicts whose class was inconsistent and broken up.
    inconsistent: int
    #: ``[arguments]`` first argument of each argument's group.
    argument_group: Ints
    #: Seconds per stage: facts and rules, names, conflicts ...
    seconds: dict[str, float] = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return (
            f"<Analysis of {self.program.name}: {len(self.program.ops):,} ops, "
            f"{self.names.count:,} names, {len(np.unique(self.color)):,} colors, "
            f"{len(self.resolutions):,} conflicts in {self.set_count:,} compatibility sets>"
        )

    @property
    def set_count(self) -> int:
        """Number of compatibility sets."""
        return len({r.set for r in self.resolutions})

    @property
    def group_count(self) -> int:
        """Number of resolution groups: bits of the resolution order."""
        return len({r.group for r in self.resolutions})

    @functools.cached_property
    def independent(self) -> tuple[Resolution, ...]:
        """The conflicts, each a resolution group of its own, whatever is compatible (3.5).

        Conflicts of repeated layers are still resolved alike (3.6): those that no walk along the
        edges and conflicts of their sets tells apart, by the signatures of ops.
        """
        sets: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for resolution in self.resolutions:
            sets[resolution.set, 0].append(resolution.names)
        kinds = {}
        for name in {n for r in self.resolutions for n in r.names}:
            op = int(self.names.name_op[name])
            kinds[name] = (int(self.names.signature[op]), name - int(self.names.first_name[op]))
        groups = closure.isomorphic_conflicts(sets, map(tuple, self.names.edges.tolist()), kinds)
        number = {g: i for i, g in enumerate(dict.fromkeys(groups.values()))}
        return tuple(
            dataclasses.replace(r, group=number[groups[r.names]]) for r in self.resolutions
        )

    @functools.cached_property
    def without_rule(self) -> tuple[int, ...]:
        """Ops that no rule knows; their dimensions stay whole."""
        missing = np.array([rule.missing for rule in self.rules])
        return tuple(np.flatnonzero(missing[self.names.signature]).tolist())

    @functools.cached_property
    def uncounted_loops(self) -> tuple[int, ...]:
        """Ops ``carry`` of loops whose trip count is not known; their bodies count once."""
        unknown = np.array([
            s.kind == "carry" and s.attribute("trip_count") == -1 for s in self.program.signatures
        ])  # fmt: skip
        return tuple(np.flatnonzero(unknown[self.names.signature]).tolist())

    def counts(self) -> dict[str, int]:
        """What ``toast analyze`` prints."""
        shardable = self.names.shardable
        return {
            "ops": len(self.program.ops),
            "signatures": len(self.program.signatures),
            "values": len(self.program.values),
            "names": self.names.count,
            "def_use_edges": len(self.names.edges),
            "colors": len(np.unique(self.color)),
            "shardable_colors": len(np.unique(self.color[shardable])),
            "conflicts": len(self.resolutions),
            "boxes": len(self.boxes),
            "crossed_boxes": sum(crossed for *_, crossed in self.boxes),
            "compatibility_sets": self.set_count,
            "inconsistent_conflicts": self.inconsistent,
            "resolution_groups": self.group_count,
            "arguments": len(self.program.arguments),
            "argument_groups": len(np.unique(self.argument_group)),
            "ops_without_rule": len(self.without_rule),
        }

    def _repr_html_(self) -> str:
        """How notebooks show it."""
        return analysis_html(self)

    def name_label(self, name: int) -> str:
        """A name for people: ``dot_general#12:lhs(0)``, or ``x:0`` for an argument."""
        op = int(self.names.name_op[name])
        factor = self.rules[self.names.signature[op]].factors[name - self.names.first_name[op]]
        return self.label(op, factor.label)

    def label(self, op: int, factor: str) -> str:
        """The name of a factor of an op for people."""
        if op < len(self.program.arguments):
            return f"{self.program.arguments[op]}:{factor}"
        return f"{self.program.kind(op)}#{op}:{factor}"

    # -- queries -----------------------------------------------------------------------------

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """What queries are given."""
        return Vocabulary(self)

    def query(
        self, body: str | pathlib.Path, *, rules: Sequence[str | pathlib.Path] = ()
    ) -> pd.DataFrame:
        """The answer to a rule body over the solved relations: a column per variable.

        ``body`` may also be rules with heads, of which the last is the answer; the name of an audit
        of ``rules/queries``; or the path of a file of one's own.  Predicates are those of
        ``facts/schema.lp`` and ``rules/queries/vocabulary.lp``, and those that the files ``rules``
        define.  Rows are distinct and sorted; dimension names are called as :meth:`name_label`
        calls them.  Raises :class:`toast.errors.QueryError`.

        >>> import jax, jax.numpy as jnp, toast
        >>> x = jax.ShapeDtypeStruct((32, 4), jnp.float32)
        >>> analysis = toast.analyze(lambda x: x @ x.T, x)
        >>> analysis.query("color(D,C), dim(D,V,_,Size), argument(V,_), Size > 8")
             D    C  V  Size
        0  x:0  x:0  0    32
        """
        return evaluate(prepare(body, rules), self.vocabulary.relations, self.label)

    # -- explanations ------------------------------------------------------------------------

    def explain(self, one: str | Dimension, other: str | Dimension) -> Chain:
        """Why two dimensions are one, step by step, or what keeps them apart (3.1, 3.2).

        Dimensions are named as ``params['layers'][0]['wq']:0``, ``params.layers[0].wq:0``,
        ``result[0]:1`` or ``%12:-1``.  Raises :class:`toast.errors.ExplainError` where there is no
        such value or dimension.

        >>> import jax, jax.numpy as jnp, toast
        >>> x = jax.ShapeDtypeStruct((32, 4), jnp.float32)
        >>> chain = toast.analyze(lambda x: x @ x.T, x).explain("x:0", "result:1")
        >>> [step.kind for step in chain.steps]
        ['def_use', 'identity', 'def_use', 'identity']
        """
        return chains.chain(self, one, other)

    def explain_conflict(self, number: int) -> Conflict:
        """Where and why two names of one color meet: conflict ``number`` of :attr:`conflict` (3.4).

        :func:`toast.explain.resolutions` prices both ways to resolve it.  Raises
        :class:`toast.errors.ExplainError` where there are not so many conflicts.
        """
        return collisions.collision(self, number)

    # -- relations ---------------------------------------------------------------------------

    @functools.cached_property
    def facts(self) -> Relations:
        """The program's own relations: ``op``, ``operand``, ``result``, ``dim`` ..."""
        return Relations(self.program)

    @functools.cached_property
    def name(self) -> pd.DataFrame:
        """``name, op, factor, size, shardable, color``: one row per name."""
        names = self.names
        factors = [factor for op in self.program.ops for factor in self.rules[op.signature].factors]
        return pd.DataFrame(
            {
                "name": np.arange(names.count),
                "op": names.name_op,
                "factor": [f.label for f in factors],
                "size": [f.size for f in factors],
                "combiner": [f.combiner for f in factors],
                "shardable": names.shardable,
                "color": self.color,
            }
        )

    @functools.cached_property
    def annotates(self) -> pd.DataFrame:
        """``site, number, d, name``: the name of each dimension at definitions and uses."""
        names = self.names
        values = np.repeat(np.arange(len(names.value_op)), np.diff(names.value_dim))
        uses = np.repeat(np.arange(len(names.use_op)), np.diff(names.use_dim))
        return pd.DataFrame(
            {
                "site": ["def"] * len(values) + ["use"] * len(uses),
                "number": np.concatenate([values, uses]),
                "d": np.concatenate(
                    [
                        np.arange(len(values)) - names.value_dim[values],
                        np.arange(len(uses)) - names.use_dim[uses],
                    ]
                ),
                "name": np.concatenate([names.def_name, names.use_name]),
            }
        )

    @functools.cached_property
    def def_use(self) -> pd.DataFrame:
        """``name, use_name``: the dimension graph M."""
        return pd.DataFrame(self.names.edges, columns=["name", "use_name"])

    @functools.cached_property
    def conflict(self) -> pd.DataFrame:
        """``name, other, set, group``: each conflict once, oriented as resolution 0 picks."""
        return pd.DataFrame(
            [(*r.names, r.set, r.group) for r in self.resolutions],
            columns=["name", "other", "set", "group"],
            dtype=np.int64,
        )

    @functools.cached_property
    def box(self) -> pd.DataFrame:
        """``name, other, left, right, crossed``: boxes between conflicts (Figure 6)."""
        return pd.DataFrame(list(self.boxes), columns=["name", "other", "left", "right", "crossed"])

    @functools.cached_property
    def arguments(self) -> pd.DataFrame:
        """``argument, value, shape, dtype, donated, group``: arguments and their groups (4.4)."""
        return self.facts.argument.assign(group=self.argument_group)


def analyze_program(
    program: Program,
    *,
    rules: Sequence[str | pathlib.Path] = (),
    progress: Progress = silent,
) -> Analysis:
    """Run the whole analysis of section 3 on ``program``; ``rules`` adds user rule files."""
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        if name:
            progress(name)
        if stages:
            seconds[stages[-1]] = now - clock
        stages.append(name)
        clock = now

    stages: list[str] = []
    stage("rules")
    solved = solve_rules(program, rules)
    stage("names")
    names = instantiate(program, solved)
    tied = tied_names(program, solved, names)
    color = components(names.count, np.concatenate([names.edges, tied]))
    stage("conflicts")
    sites, pairs, boxes = _conflicts(names, color)
    stage("compatibility")
    crossing = set(closure.crossings(_edges_within(names, color, pairs), boxes))
    crossed = [(n, o, x, y, (n, y) in crossing or (o, x) in crossing) for n, o, x, y in boxes]
    compatible_sets, inconsistent = _compatibility(pairs, boxes, crossing)
    groups = closure.isomorphic_sets(
        compatible_sets, map(tuple, names.edges.tolist()), _kinds(program, solved, names, pairs)
    )
    stage("argument groups")
    argument_group = _argument_groups(program)
    stage("")
    set_number = {s: i for i, s in enumerate(compatible_sets)}
    group_number = {g: i for i, g in enumerate(dict.fromkeys(groups.values()))}
    return Analysis(
        program=program,
        rules=solved,
        names=names,
        color=color,
        resolutions=tuple(
            Resolution(pair, set_number[s], group_number[groups[s]])
            for s, members in compatible_sets.items()
            for pair in members
        ),
        sites=tuple(sites),
        boxes=tuple(crossed),
        inconsistent=inconsistent,
        argument_group=argument_group,
        seconds=seconds,
    )


def _conflicts(
    names: Names, color: Ints
) -> tuple[list[tuple[int, int, str, int]], list[tuple[int, int]], list[tuple[int, int, int, int]]]:
    """Conflict sites, conflicts and boxes, by ``rules/conflicts.lp``.

    The rules are given only the sites where a color occurs twice: no other can hold a conflict.
    """
    defined = np.repeat(np.arange(len(names.value_op)), np.diff(names.value_dim))
    used = np.repeat(np.arange(len(names.use_op)), np.diff(names.use_dim))
    values = len(names.value_op)
    site = np.concatenate([defined, used + values])
    d = np.concatenate(
        [
            np.arange(len(defined)) - names.value_dim[defined],
            np.arange(len(used)) - names.use_dim[used],
        ]
    )
    name = np.concatenate([names.def_name, names.use_name])
    keep = names.shardable[name]
    site, d, name = site[keep], d[keep], name[keep]
    doubled = _occur_twice(site * names.count + color[name])
    if not doubled.any():
        return [], [], []
    site, d, name = site[doubled], d[doubled], name[doubled]
    involved = np.zeros(names.count, dtype=bool)
    involved[name] = True
    # One site stands for all sites with the same names: repeated uses add no conflict.
    facts = [
        f"annotates({n},site({s}),{e})."
        for s, e, n in zip(site.tolist(), d.tolist(), name.tolist(), strict=True)
    ]
    inner = names.edges[involved[names.edges].all(axis=1)]
    facts += [f"def_use({n},{m})." for n, m in inner.tolist()]
    listed = np.flatnonzero(involved).tolist()
    facts += [
        f"color({n},{c}). shardable({n})." for n, c in zip(listed, color[listed], strict=True)
    ]
    atoms = solve(strata("conflicts"), "\n".join(facts), ("conflict/3", "box/4"))
    sites = []
    for n, o, place in atoms["conflict/3"]:
        number = int(place[1])  # type: ignore[index, arg-type]
        where = ("def", number) if number < values else ("use", number - values)
        sites.append((_int(n), _int(o), *where))
    pairs = sorted({(min(n, o), max(n, o)) for n, o, *_ in sites})
    boxes = sorted((_int(n), _int(o), _int(x), _int(y)) for n, o, x, y in atoms["box/4"])
    return sorted(sites, key=lambda s: (s[2], s[3], s[0])), pairs, boxes


def _int(term: Term) -> int:
    assert isinstance(term, int)
    return term


def _occur_twice(keys: Ints) -> Bools:
    _, inverse, count = np.unique(keys, return_inverse=True, return_counts=True)
    return np.asarray(count[inverse] > 1, dtype=bool)


def _edges_within(names: Names, color: Ints, pairs: list[tuple[int, int]]) -> Ints:
    """Edges of the colors that have conflicts: paths across boxes stay within a color."""
    wanted = np.zeros(names.count, dtype=bool)
    wanted[color[[n for n, _ in pairs]]] = True
    return np.asarray(names.edges[wanted[color[names.edges[:, 0]]]], dtype=np.int64)


def _compatibility(
    pairs: list[tuple[int, int]],
    boxes: Iterable[tuple[int, int, int, int]],
    crossing: set[tuple[int, int]],
) -> tuple[dict[tuple[int, int], list[tuple[int, int]]], int]:
    """Compatibility sets and how many conflicts are inconsistent, by ``rules/compatibility.lp``."""
    if not pairs:
        return {}, 0
    facts = [f"box({n},{o},{x},{y})." for n, o, x, y in boxes]
    facts += [f"crossing({n},{m})." for n, m in crossing]
    found = solve(strata("compatibility"), "\n".join(facts), ("compatible/4",))["compatible/4"]
    compatible = [(_int(n), _int(o), _int(x), _int(y)) for n, o, x, y in found]
    classes = closure.choice_classes(pairs, compatible)
    facts = [f"choice_class({n},{o},({a},{b}))." for (n, o), (a, b) in classes.items()]
    atoms = solve(
        strata("compatibility"), "\n".join(facts), ("compatibility_set/3", "inconsistent/1")
    )
    sets: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for n, o, label in atoms["compatibility_set/3"]:
        sets[tuple(label[1:])].append((_int(n), _int(o)))  # type: ignore[index]
    broken = {tuple(label[1:]) for (label,) in atoms["inconsistent/1"]}  # type: ignore[index]
    inconsistent = sum(1 for n, o in pairs if classes[n, o] in broken)
    return {s: sorted(members) for s, members in sorted(sets.items())}, inconsistent


def _kinds(
    program: Program,
    rules: tuple[SignatureRule, ...],
    names: Names,
    pairs: list[tuple[int, int]],
) -> dict[int, tuple[str, str]]:
    """``kind_of``: what an isomorphism must preserve, for the names in conflicts."""
    found = {}
    for name in {n for pair in pairs for n in pair}:
        op = int(names.name_op[name])
        factor = rules[names.signature[op]].factors[name - names.first_name[op]]
        found[name] = (program.kind(op), factor.label)
    return found


def _argument_groups(program: Program) -> Ints:
    """Groups of arguments with equal keys, by ``rules/groups.lp``."""
    count = len(program.arguments)
    users: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, op in enumerate(program.ops):
        for index, value in enumerate(op.operands):
            users[value].append((number, index))
    # The rules look two uses ahead: only those ops are given to them.
    near = {op for value in program.argument_values for op, _ in users[value]}
    near |= {op for first in list(near) for v in program.ops[first].results for op, _ in users[v]}
    lines = []
    for number in {*near, *range(count)}:
        op_ = program.ops[number]
        lines.append(f"op({number},{program.kind(number)}).")
        lines += [f"operand({number},{i},{v})." for i, v in enumerate(op_.operands)]
        lines += [f"result({number},{i},{v})." for i, v in enumerate(op_.results)]
    atoms = solve(strata("groups"), "\n".join(lines), ("argument_use/3",))
    uses: dict[int, set[tuple[Term, ...]]] = {v: set() for v in program.argument_values}
    for argument, use, following in atoms["argument_use/3"]:
        uses[_int(argument)].add((use, following))
    keys = {
        index: (program.values[value].type, frozenset(uses[value]))
        for index, value in enumerate(program.argument_values)
    }
    groups = closure.key_groups(keys)
    return np.array([groups[index] for index in range(count)], dtype=np.int64)
