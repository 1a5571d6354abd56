"""The relations of a program and its analysis for queries, as terms; computed on first use.

The predicates are those of ``facts/schema.lp`` and of section 1 of ``rules/queries/vocabulary.lp``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from toast.analysis.analysis import Analysis
from toast.analysis.query import Columns, Relations
from toast.facts.relations import constant, quoted, written
from toast.logic import LARGEST, as_term
from toast.program import element_bytes


class AnalysisVocabulary:
    """The relations of one analysis, for queries."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.program = analysis.program

    @functools.cached_property
    def relations(self) -> Relations:
        """The relations by predicate and arity."""
        return {
            ("op", 2): self._ops,
            ("operand", 3): lambda: self._frame("operand", "op", "index", "value"),
            ("result", 3): lambda: self._frame("result", "op", "index", "value"),
            ("dtype", 2): self._dtypes,
            ("rank", 2): lambda: self._frame("value", "value", "rank"),
            ("dim", 3): lambda: self._frame("dim", "value", "d", "size"),
            ("attribute", 3): lambda: self._attributes(arrays=False),
            ("attribute", 4): lambda: self._attributes(arrays=True),
            ("tied", 2): lambda: turned(self.program.ties, 2),
            ("repeats", 2): self._repeats,
            ("factor", 5): self._factors,
            ("factor_size", 3): lambda: self._of_factors(lambda f: f.size, lambda f: True),
            ("reduction", 3): lambda: self._of_factors(
                lambda f: quoted(f.combiner), lambda f: f.combiner
            ),
            ("need_replication", 2): lambda: self._of_factors(None, lambda f: f.need_replication),
            ("permutation", 2): lambda: self._of_factors(None, lambda f: f.permutation),
            ("halo", 3): lambda: self._of_factors(
                lambda f: int(f.halo), lambda f: (f.permutation or f.halo) and np.isfinite(f.halo)
            ),
            ("without_rule", 1): lambda: [self.analysis.without_rule],
            ("manual", 2): self._manual,
            ("fixed", 3): self._fixed,
            ("annotates", 3): self._annotates,
            ("def_use", 2): lambda: [self._named(c) for c in self.analysis.names.edges.T],
            ("shardable", 1): lambda: [
                self._named(np.flatnonzero(self.analysis.names.shardable))
            ],
            ("color", 2): lambda: [self.names, self._named(self.analysis.color)],
            ("conflict", 3): self._conflicts,
            ("box", 4): lambda: self._boxes(crossed=False),
            ("compatibility_set", 3): self._sets,
            ("isomorphic", 2): self._isomorphic,
            ("argument_group", 2): self._argument_groups,
            ("color_group", 2): self._color_groups,
            ("same_name", 2): lambda: [self._named(c) for c in self.analysis.names.tied.T],
            ("dim", 4): self._dims,
            ("label", 2): lambda: [
                self.names,
                [quoted(self.analysis.name_label(n)) for n in range(len(self.names))],
            ],
            ("divisor", 2): lambda: [self.names, self.analysis.names.divisor.tolist()],
            ("argument", 2): lambda: [
                self.program.argument_values, map(quoted, self.program.arguments)
            ],
            ("donated", 1): lambda: [
                [self.program.argument_values[a] for a in sorted(self.program.donated)]
            ],
            ("source", 3): self._sources,
            ("primitive", 2): self._primitives,
            ("at", 2): self._at,
            ("kib", 2): self._kib,
            ("extent", 3): self._extents,
            ("crossed", 4): lambda: self._boxes(crossed=True),
        }  # fmt: skip

    # -- the program -------------------------------------------------------------------------

    def _frame(self, relation: str, *columns: str) -> Columns:
        frame = getattr(self.analysis.facts, relation)
        return [frame[column].tolist() for column in columns]

    def _ops(self) -> Columns:
        kinds = [constant(signature.kind) for signature in self.program.signatures]
        return [range(len(self.program.ops)), [kinds[op.signature] for op in self.program.ops]]

    def _dtypes(self) -> Columns:
        values = self.program.values
        return [range(len(values)), [quoted(value.type.dtype) for value in values]]

    def _attributes(self, *, arrays: bool) -> Columns:
        """``attribute(op, name, term)``, or with arrays ``attribute(op, name, index, term)``."""
        of_signature: list[list[tuple[Any, ...]]] = []
        for signature in self.program.signatures:
            rows: list[tuple[Any, ...]] = []
            for name, term in signature.attributes:
                if arrays and isinstance(term, tuple):
                    rows += [(constant(name), i, written(item)) for i, item in enumerate(term)]
                elif not arrays and not isinstance(term, tuple):
                    rows.append((constant(name), written(term)))
            of_signature.append(rows)
        rows_by_op = [
            (number, *row)
            for number, op in enumerate(self.program.ops) for row in of_signature[op.signature]
        ]  # fmt: skip
        return turned(rows_by_op, 3 + arrays)

    def _manual(self) -> Columns:
        axes = [signature.attribute("manual") for signature in self.program.signatures]
        rows = [
            (number, quoted(str(axis)))
            for number, op in enumerate(self.program.ops)
            if isinstance(taken := axes[op.signature], tuple)
            for axis in taken
        ]
        return turned(rows, 2)

    def _fixed(self) -> Columns:
        labels = [[*of_signature, "none"] for of_signature in self._labels]
        rows = [
            (number, quoted(axis), labels[op.signature][factor])
            for number, op in enumerate(self.program.ops)
            for axis, factor in self.analysis.rules[op.signature].fixed
        ]
        return turned(rows, 3)

    def _repeats(self) -> Columns:
        rows = [(op, count) for op, count in enumerate(self.program.repeats) if count != 1]
        return turned(rows, 2)

    def _located(self) -> list[tuple[int, Any]]:
        return [(op, self.program.location(op)) for op in range(len(self.program.ops))]

    def _sources(self) -> Columns:
        rows = [(op, quoted(at.file), at.line) for op, at in self._located() if at.file]
        return turned(rows, 3)

    def _primitives(self) -> Columns:
        return turned([(op, quoted(at.path)) for op, at in self._located() if at.path], 2)

    def _kib(self) -> Columns:
        sizes = [kib(value_bytes(value.type)) for value in self.program.values]
        return [range(len(sizes)), sizes]

    # -- factors -----------------------------------------------------------------------------

    @functools.cached_property
    def _labels(self) -> list[list[str]]:
        """The factor labels of each signature, as terms."""
        term = functools.cache(as_term)
        return [[term(factor.label) for factor in rule.factors] for rule in self.analysis.rules]

    def _of_factors(
        self, shown: Callable[[Any], Any] | None, chosen: Callable[[Any], Any]
    ) -> Columns:
        """Rows (op, factor) of the ``chosen`` factors, with the value of ``shown``."""
        of_signature = [
            [
                (label, *([shown(factor)] if shown else []))
                for label, factor in zip(labels, rule.factors, strict=True) if chosen(factor)
            ]
            for labels, rule in zip(self._labels, self.analysis.rules, strict=True)
        ]  # fmt: skip
        rows_by_op = [
            (number, *row)
            for number, op in enumerate(self.program.ops) for row in of_signature[op.signature]
        ]  # fmt: skip
        return turned(rows_by_op, 3 if shown else 2)

    def _factors(self) -> Columns:
        of_signature: list[list[tuple[Any, ...]]] = []
        for labels, rule in zip(self._labels, self.analysis.rules, strict=True):
            rows: list[tuple[Any, ...]] = []
            for side, tensors in (("operand", rule.operands), ("result", rule.results)):
                for index, dims in enumerate(tensors):
                    rows += [
                        (labels[factor], f"{side}({index})", d, position)
                        for d, factors in enumerate(dims) for position, factor in enumerate(factors)
                    ]  # fmt: skip
            of_signature.append(rows)
        rows_by_op = [
            (number, *row)
            for number, op in enumerate(self.program.ops) for row in of_signature[op.signature]
        ]  # fmt: skip
        return turned(rows_by_op, 5)

    # -- names -------------------------------------------------------------------------------

    @functools.cached_property
    def names(self) -> list[str]:
        """All names as terms: ``name(12,lhs(0))``."""
        labels = (label for op in self.program.ops for label in self._labels[op.signature])
        ops = self.analysis.names.name_op.tolist()
        return [f"name({op},{label})" for op, label in zip(ops, labels, strict=True)]

    def _named(self, numbers: Any) -> list[str]:
        names = self.names
        return [names[number] for number in np.asarray(numbers).tolist()]

    def _rows(self) -> tuple[Any, Any]:
        """The value and the dimension of each row of ``def_name``."""
        first = self.analysis.names.value_dim
        value = np.repeat(np.arange(len(first) - 1), np.diff(first))
        return value, np.arange(len(value)) - first[value]

    def _dims(self) -> Columns:
        names = self.analysis.names
        value, d = self._rows()
        return [self._named(names.def_name), value.tolist(), d.tolist(), names.dim_size.tolist()]

    def _annotates(self) -> Columns:
        names = self.analysis.names
        value, d = self._rows()
        first = names.use_dim
        use = np.repeat(np.arange(len(first) - 1), np.diff(first))
        defined = [f"def({v})" for v in value.tolist()]
        sites = [
            f"use({op},{index})"
            for op, index in zip(names.use_op.tolist(), names.use_index.tolist(), strict=True)
        ]
        return [
            self._named(np.concatenate([names.def_name, names.use_name])),
            defined + [sites[u] for u in use.tolist()],
            d.tolist() + (np.arange(len(use)) - first[use]).tolist(),
        ]

    def _at(self) -> Columns:
        names = self.analysis.names
        uses = zip(names.use_op.tolist(), names.use_index.tolist(), strict=True)
        sites = [f"def({v})" for v in range(len(names.value_op))]
        sites += [f"use({op},{index})" for op, index in uses]
        return [sites, names.value_op.tolist() + names.use_op.tolist()]

    def _conflicts(self) -> Columns:
        names, rows = self.analysis.names, []
        for name, other, where, number in self.analysis.sites:
            place = f"def({number})"
            if where == "use":
                place = f"use({names.use_op[number]},{names.use_index[number]})"
            rows.append((self.names[name], self.names[other], place))
        return turned(rows, 3)

    def _boxes(self, *, crossed: bool) -> Columns:
        rows = [corners for *corners, across in self.analysis.boxes if across or not crossed]
        return [self._named(column) for column in turned(rows, 4)]

    def _set_terms(self) -> dict[int, str]:
        """The term of each compatibility set: its smallest conflict."""
        smallest: dict[int, tuple[int, int]] = {}
        for resolution in self.analysis.resolutions:
            known = smallest.get(resolution.set, resolution.names)
            smallest[resolution.set] = min(known, resolution.names)
        return {s: f"({self.names[n]},{self.names[o]})" for s, (n, o) in smallest.items()}

    def _sets(self) -> Columns:
        terms = self._set_terms()
        rows = [
            (self.names[r.names[0]], self.names[r.names[1]], terms[r.set])
            for r in self.analysis.resolutions
        ]
        return turned(rows, 3)

    def _isomorphic(self) -> Columns:
        terms = self._set_terms()
        leaders: dict[int, int] = {}
        group = {r.set: r.group for r in self.analysis.resolutions}
        for number in sorted(group):
            leaders.setdefault(group[number], number)
        return turned([(terms[s], terms[leaders[group[s]]]) for s in sorted(group)], 2)

    def _argument_groups(self) -> Columns:
        values = self.program.argument_values
        return [values, [values[leader] for leader in self.analysis.argument_group.tolist()]]

    def _color_groups(self) -> Columns:
        colors = np.unique(self.analysis.color)
        return [self._named(colors), self._named(self.analysis.color_group[colors])]

    def _extents(self) -> Columns:
        analysis = self.analysis
        of_row = analysis.color[np.concatenate([analysis.names.def_name, analysis.names.use_name])]
        colors = np.unique(analysis.color)
        count = np.bincount(of_row, minlength=analysis.names.count)[colors]
        largest = np.zeros(analysis.names.count, dtype=np.int64)
        size = np.array(
            [f.size for op in self.program.ops for f in analysis.rules[op.signature].factors]
        )
        shardable = analysis.names.shardable
        np.maximum.at(largest, analysis.color[shardable], size[shardable])
        return [self._named(colors), count.tolist(), largest[colors].tolist()]


def turned(rows: Iterable[Sequence[Any]], width: int) -> Columns:
    """The columns of rows with ``width`` cells."""
    return list(zip(*rows, strict=True)) or [()] * width


def kib(size: float) -> int:
    """Bytes as KiB, rounded up; ``LARGEST`` stands for all larger values (2 TiB)."""
    return min(int(-(-size // 1024)), LARGEST)


def value_bytes(type_: Any) -> int:
    """The bytes of a whole value."""
    return int(np.prod(type_.shape, dtype=object)) * element_bytes(type_.dtype)
