"""The named dimension analysis of a program, as one immutable record."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from toast.analysis.decomposition import Decomposition
from toast.analysis.derivation import Orders, Resolution, derive, derive_independent
from toast.analysis.dimensions import Dimension
from toast.analysis.evidence import Chain, Conflict
from toast.analysis.names import Ints, Names, instantiate
from toast.analysis.query import Vocabulary, evaluate, prepare
from toast.analysis.rules import (
    Lowering,
    RuleFiles,
    SignatureRule,
    Signatures,
    rule_texts,
    solve_signatures,
)
from toast.boundary import apart
from toast.errors import TargetError
from toast.facts import Relations
from toast.logic import Edges
from toast.program import Program
from toast.records import Record, late

if TYPE_CHECKING:
    import pandas as pd

#: Called at the beginning of each stage: ``progress("rules")``.
Progress = Callable[[str], None]


def silent(_stage: str) -> None:
    """Ignore the stage."""


@dataclasses.dataclass(frozen=True)
class Analysis(Record):
    """Names, colors, conflicts and groups of a program (paper, section 3).

    Arrays serve the search; every relation is also a DataFrame for audits.
    """

    #: The program.
    program: Program
    #: The rule that each signature of an op gets.
    rules: tuple[SignatureRule, ...]
    #: The named dimensions (3.1), as arrays.
    names: Names
    #: ``[names]`` the color of each name: the smallest name of its connected component.
    color: Ints
    #: Every conflict once, oriented, with its set and group.
    resolutions: tuple[Resolution, ...]
    #: ``conflict(name, other, site)`` of the rules; sites are ("def", value) or ("use", use).
    sites: tuple[tuple[int, int, str, int], ...]
    #: ``(name, other, left, right, crossed)`` of every box.
    boxes: tuple[tuple[int, int, int, int, bool], ...]
    #: The number of conflicts in inconsistent classes, which are split.
    inconsistent: int
    #: ``[arguments]`` the first argument of each argument's group.
    argument_group: Ints
    #: ``[names]`` for each color, the first color of its group of mirrored colors (4.4).
    color_group: Ints
    #: The resolution orders of each color group (4.2), by its first color.
    orders: Orders
    #: The seconds of each stage: facts and rules, names, conflicts ...
    seconds: dict[str, float] = dataclasses.field(compare=False)
    #: What partitions the program: XLA, or :mod:`toast.lower`.
    lowering: Lowering = "xla"

    def __repr__(self) -> str:
        return (
            f"<Analysis of {self.program.name}: {len(self.program.ops):,} ops, "
            f"{self.names.count:,} names, {len(np.unique(self.color)):,} colors, "
            f"{len(self.resolutions):,} conflicts in {self.set_count:,} compatibility sets>"
        )

    @property
    def rule_files(self) -> tuple[pathlib.Path, ...]:
        """The users' files with rules of this program."""
        return tuple(sorted({rule.file for rule in self.rules if rule.file is not None}))

    @property
    def set_count(self) -> int:
        """The number of compatibility sets."""
        return len({r.set for r in self.resolutions})

    @property
    def group_count(self) -> int:
        """The number of resolution groups: the bits of the resolution order."""
        return len({r.group for r in self.resolutions})

    @functools.cached_property
    def independent(self) -> tuple[tuple[Resolution, ...], Orders]:
        """The conflicts with one resolution group each, and their resolution orders.

        This ignores compatibility (3.5); conflicts of repeated layers still share a group (3.6).
        """
        fields = (self.names, self.color, self.color_group, self.resolutions, self.sites)
        if not self.program.foreign:
            return derive_independent(self.program, *fields)
        result: tuple[tuple[Resolution, ...], Orders] = _apart(
            self.program, "toast.analysis.derivation:derive_independent", *fields
        )
        return result

    @functools.cached_property
    def without_rule(self) -> tuple[int, ...]:
        """The ops without a rule; their dimensions are not sharded."""
        missing = np.array([rule.missing for rule in self.rules])
        return tuple(np.flatnonzero(missing[self.names.signature]).tolist())

    def counts(self) -> dict[str, int]:
        """The numbers of ops, names, colors, conflicts ..., as printed by ``toast analyze``."""
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

    def name_label(self, name: int) -> str:
        """The label of a name: ``dot_general#12:lhs(0)``, or ``x:0`` for an argument."""
        op = int(self.names.name_op[name])
        factor = self.rules[self.names.signature[op]].factors[name - self.names.first_name[op]]
        return self.label(op, factor.label)

    def label(self, op: int, factor: str) -> str:
        """The label of a factor of an op."""
        if op < len(self.program.arguments):
            return f"{self.program.arguments[op]}:{factor}"
        return f"{self.program.kind(op)}#{op}:{factor}"

    # -- queries -----------------------------------------------------------------------------

    @functools.cached_property
    @late
    def vocabulary(self) -> Vocabulary:
        """The relations for queries."""
        raise NotImplementedError

    def query(
        self, body: str | pathlib.Path, *, rules: Sequence[str | pathlib.Path] = ()
    ) -> pd.DataFrame:
        """Evaluate a query over the relations; returns a DataFrame with one column per variable.

        ``body`` is a rule body; rules with heads, the last of which is the answer; the name of an
        audit in ``rules/queries``; or the path of a file.  The predicates are those of
        ``facts/schema.lp`` and ``rules/queries/vocabulary.lp``, and those of the files ``rules``.
        Rows are distinct and sorted; names of dimensions are labels as in :meth:`name_label`.
        Raises :class:`toast.errors.QueryError` for invalid queries and exceeded limits.

        >>> import jax, jax.numpy as jnp, toast
        >>> x = jax.ShapeDtypeStruct((32, 4), jnp.float32)
        >>> analysis = toast.analyze(lambda x: x @ x.T, x)
        >>> analysis.query("color(D,C), dim(D,V,_,Size), argument(V,_), Size > 8")
             D    C  V  Size
        0  x:0  x:0  0    32
        """
        return evaluate(prepare(body, rules), self.vocabulary.relations, self.label)

    # -- explanations ------------------------------------------------------------------------

    @late
    def explain(self, one: str | Dimension, other: str | Dimension) -> Chain:
        """Explain why two dimensions have one color, or what separates them (3.1, 3.2).

        Dimensions are written ``params['layers'][0]['wq']:0``, ``params.layers[0].wq:0``,
        ``result[0]:1`` or ``%12:-1``.  Raises :class:`toast.errors.ExplainError` if there is no
        such value or dimension.

        >>> import jax, jax.numpy as jnp, toast
        >>> x = jax.ShapeDtypeStruct((32, 4), jnp.float32)
        >>> chain = toast.analyze(lambda x: x @ x.T, x).explain("x:0", "result:1")
        >>> [step.kind for step in chain.steps]
        ['def_use', 'identity', 'def_use', 'identity']
        """
        raise NotImplementedError

    @late
    def explain_conflict(self, number: int) -> Conflict:
        """Explain where and why two names of one color meet (3.4).

        ``number`` is a row of :attr:`conflict`.  :func:`toast.explain.resolutions` prices both
        resolutions.  Raises :class:`toast.errors.ExplainError` if there is no such conflict.
        """
        raise NotImplementedError

    # -- relations ---------------------------------------------------------------------------

    @functools.cached_property
    def facts(self) -> Relations:
        """The relations of the program: ``op``, ``operand``, ``result``, ``dim`` ..."""
        return Relations(self.program)

    @functools.cached_property
    @late
    def name(self) -> pd.DataFrame:
        """``name, op, factor, size, combiner, shardable, color``: one row per name."""
        raise NotImplementedError

    @functools.cached_property
    @late
    def annotates(self) -> pd.DataFrame:
        """``site, number, d, name``: the name of each dimension at definitions and uses."""
        raise NotImplementedError

    @functools.cached_property
    @late
    def def_use(self) -> pd.DataFrame:
        """``name, use_name``: the dimension graph M."""
        raise NotImplementedError

    @functools.cached_property
    @late
    def conflict(self) -> pd.DataFrame:
        """``name, other, set, group``: each conflict once, oriented as resolution 0 picks."""
        raise NotImplementedError

    @functools.cached_property
    @late
    def box(self) -> pd.DataFrame:
        """``name, other, left, right, crossed``: boxes between conflicts (Figure 6)."""
        raise NotImplementedError

    @functools.cached_property
    @late
    def arguments(self) -> pd.DataFrame:
        """``argument, value, shape, dtype, donated, group``: arguments and their groups (4.4)."""
        raise NotImplementedError


def analyze_program(
    program: Program,
    *,
    rules: RuleFiles = (),
    progress: Progress = silent,
    lowering: Lowering = "xla",
) -> Analysis:
    """Run the analysis of section 3.

    ``rules`` has additional rule files; ``progress`` is called at the beginning of each stage;
    ``lowering`` is what will partition the program.  An untrusted program is analyzed in a separate
    process, with limits of time and memory.  Raises :class:`toast.errors.RuleError` for invalid
    rules, and :class:`toast.errors.TargetError` for a program without ops or beyond the limits.
    """
    if not program.ops:
        raise TargetError(f"{program.name}: has no ops, so there is nothing to shard")
    if not program.foreign:
        return computed(program, rules, progress, lowering)
    progress("rules")
    texts = rule_texts(rules)
    analysis: Analysis = _apart(
        program, "toast.analysis.analysis:computed", texts, silent, lowering
    )
    return dataclasses.replace(analysis, program=program)


def _apart(program: Program, function: str, *arguments: Any) -> Any:
    """The result of a function of an untrusted program and ``arguments``, from another process."""
    try:
        return apart.call(function, dataclasses.replace(program, source=None), *arguments)
    except apart.Limit as limit:
        raise TargetError(f"{program.name}: analyzing it {limit}; use a smaller program") from None


def computed(
    program: Program,
    rules: RuleFiles = (),
    progress: Progress = silent,
    lowering: Lowering = "xla",
) -> Analysis:
    """:func:`analyze_program`, in this process."""
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
    signatures = _solved(program, rules, lowering)
    stage("names")
    names = instantiate(program, signatures)
    joined = Edges(names.count, np.concatenate([names.edges, names.tied]))
    color = joined.components
    stage("conflicts")
    derived = derive(program, signatures.rules, names, joined)
    stage("")
    return Analysis(
        program=program,
        rules=signatures.rules,
        names=names,
        color=color,
        **{field.name: getattr(derived, field.name) for field in dataclasses.fields(derived)},
        seconds=seconds,
        lowering=lowering,
    )


def _solved(program: Program, rules: RuleFiles, lowering: Lowering) -> Signatures:
    """The rules of the signatures of a program.

    In a device-local program, composites are sharded as far as all their decompositions are.
    """
    signatures = solve_signatures(program, rules, lowering=lowering)
    if lowering != "local" or not program.decompositions:
        return signatures
    # The rules that the decompositions are lowered with.
    used = {rule.file for rule in signatures.rules}
    files = [file for file in rule_texts(rules) if file.path in used]
    whole: dict[int, list[str]] = {}
    divisors: dict[int, list[tuple[int, ...]]] = {}
    for number, (signature, rule) in enumerate(
        zip(program.signatures, signatures.rules, strict=True)
    ):
        if not any(factor.shardable for factor in rule.factors):
            continue
        for body in program.decompositions.get(signature, ()):
            decomposition = _decomposition(body, files)
            labels = [rule.factors[factor].label for factor in sorted(decomposition.whole(rule))]
            whole.setdefault(number, []).extend(labels)
            divisors.setdefault(number, []).append(decomposition.divisors(rule))
    if any(whole.values()):
        signatures = solve_signatures(program, rules, lowering=lowering, whole=whole)
    solved = [*signatures.rules]
    for number, numbers in divisors.items():
        factors = zip(solved[number].factors, *numbers, strict=True)
        divided = tuple(
            dataclasses.replace(factor, divisor=math.gcd(*of_factor))
            for factor, *of_factor in factors
        )
        solved[number] = dataclasses.replace(solved[number], factors=divided)
    return dataclasses.replace(signatures, rules=tuple(solved))


def _decomposition(body: Program, rules: RuleFiles) -> Decomposition:
    signatures = _solved(body, rules, "local")
    names = instantiate(body, signatures)
    color = Edges(names.count, np.concatenate([names.edges, names.tied])).components
    return Decomposition(body, signatures.rules, names, color)
