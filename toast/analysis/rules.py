"""The op rules: the factors of every distinct op signature.

An op rule depends only on the facts of its own op.  Each signature is therefore grounded once, and
array joins repeat the result for its ops.  The program of a transformer has thousands of ops, but
only a few hundred signatures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from toast.distinct import distinct_rows
from toast.errors import PlanError, RuleError
from toast.facts import Relations
from toast.logic import (
    LogicModel,
    LogicText,
    Term,
    check_ends,
    check_heads,
    check_rules,
    derivations,
    kind_line,
    kinds_of_heads,
    read_files,
    rule_line,
    show_term,
    solve,
)
from toast.program import QUANTITIES, CausalQueries, KernelCost, Program, Signature, element_bytes
from toast.resources import directory

Ints = npt.NDArray[np.int64]

#: The predicates of the op rules for a signature, and those from which names follow.
_FACTORS = (
    "op/2", "result/3", "factor/5", "factor_size/3", "reduction/3", "need_replication/2",
    "permutation/2", "halo/3", "excludes/3", "whole_mesh/2", "fixed/3", "without_rule/1",
    "runs_whole/1", "ring/4", "kernel_cost/4", "kernel_cost_over/3", "kernel_share/4",
    "kernel_latest/6", "linear/2", "adds/1", "scales/1", "moves_elements/1", "rounds/1",
    "misplaced/4", "undefined_factor/3",
)  # fmt: skip
#: The predicates that describe the factors of an op.
_FACTOR_PREDICATES = frozenset({
    "factor", "factor_size", "reduction", "need_replication", "permutation", "gathered", "excludes",
    "whole_mesh", "slides", "halo", "ring",
    "kernel_cost", "kernel_cost_over", "kernel_share", "kernel_latest", "partitioned",
    "states_sizes", "linear", "adds", "scales", "moves_elements", "rounds",
})  # fmt: skip
#: The quantity of costs that are elements of a tensor; the term names the tensor.
_ELEMENTS = "elements"
#: The predicates of ``rules/names.lp``.
_NAMES = (
    "annotates/3", "stacked/5", "shardable/1", "kind_of/2", "edge/4", "same_name/2",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Factor:
    """One factor of an op signature, in Shardy's terms."""

    label: str
    #: The number of elements along the factor.
    size: int
    #: The number of shards must divide this number: the size of the factor or, if neighbours
    #: exchange elements, the greatest common divisor of the sizes of its dimensions.
    divisor: int
    #: The combiner of partial results; ``""`` if the op does not reduce over the factor.
    combiner: str
    need_replication: bool
    permutation: bool
    #: The number of elements that a shard needs from its neighbours; infinite if it needs whole
    #: other shards.
    halo: float
    #: Whether it is not the major-most factor of some dimension; sharding it would give devices
    #: strided pieces.
    minor: bool
    #: Whether a mesh axis can shard it.
    shardable: bool
    #: Op kind and label as a number, which an isomorphism of layers preserves.
    kind: int


@dataclasses.dataclass(frozen=True)
class TensorRing:
    """A tensor whose shards along a factor go around the devices (``ring/4``)."""

    factor: int
    #: The number of an operand; results are -1, -2 and so on.
    tensor: int
    #: The elements before its own ones that a device needs.
    reach: int

    def passes(self, size: int, shards: int) -> int:
        """How often each of ``shards`` of a dimension of this size is passed on."""
        return min(shards - 1, -(-self.reach * shards // size))


class Linearity(NamedTuple):
    """In which operands an op is linear: partial sums pass it if these are some."""

    #: The operands, each alone (``linear/2``).
    operands: tuple[int, ...] = ()
    #: Whether it is linear in all operands together.
    adds: bool = False
    #: Whether it is linear in operand 0 if operand 1 is a number.
    scales: bool = False
    #: Whether it moves elements of operand 0, and computes nothing.
    moves: bool = False
    #: Whether only those partial sums pass of which all parts but one are zero, at each element.
    rounds: bool = False


#: No partial sums pass.
_NOT_LINEAR = Linearity()


@dataclasses.dataclass(frozen=True)
class SignatureRule:
    """The solved sharding rule of one signature."""

    factors: tuple[Factor, ...]
    #: For each operand or result and each dimension: its factors, major to minor.
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    #: Whether there is no rule for the op.
    missing: bool
    #: The user's rule file with the rule; None for TOAST's own rules.
    file: pathlib.Path | None = None
    #: Axes of the program's mesh that manual regions take, each with the factor that it shards in
    #: every plan; -1 for none.
    fixed: tuple[tuple[str, int], ...] = ()
    #: What the kernel costs of a custom call, or of a composite with a rule.
    costs: tuple[KernelCost, ...] = ()
    #: Whether every device runs the custom call whole although it has a rule.
    runs_whole: bool = False
    #: Pairs of factors that no plan shards together.
    excludes: tuple[tuple[int, int], ...] = ()
    #: Factors that are sharded only if every axis of the mesh shards the op.
    whole_mesh: tuple[int, ...] = ()
    #: Tensors whose shards go around.
    rings: tuple[TensorRing, ...] = ()
    #: Which partial sums pass the op.
    linearity: Linearity = _NOT_LINEAR

    @functools.cached_property
    def sums(self) -> bool:
        """Whether devices may each compute a part of the sum that the op computes, and no other."""
        return {factor.combiner for factor in self.factors} - {""} == {"add"}

    def einsum(self) -> str:
        """The rule on one line, in Shardy's form: ``([i,k],[k,j]) -> ([i,j]) reduction={k}``."""

        def side(tensors: tuple[tuple[tuple[int, ...], ...], ...]) -> str:
            return ",".join(
                "[" + ",".join("".join(self.factors[f].label for f in d) for d in dims) + "]"
                for dims in tensors
            )

        text = f"({side(self.operands)}) -> ({side(self.results)})"
        for word, chosen in (
            ("reduction", [f.label for f in self.factors if f.combiner]),
            ("need_replication", [f.label for f in self.factors if f.need_replication]),
            ("permutation", [f.label for f in self.factors if f.permutation]),
        ):
            text += f" {word}={{{','.join(chosen)}}}" if chosen else ""
        return text


def factor_files() -> list[pathlib.Path]:
    """TOAST's files that derive factors: the schema, the shared rules, then the op rules."""
    rules = directory("rules")
    ops = sorted((rules / "ops").glob("*.lp"))
    return [directory("facts") / "schema.lp", rules / "factors.lp", *ops]


#: Rule files as users name them, or as they were read.
RuleFiles = Sequence[str | pathlib.Path | LogicText]

#: What partitions a program: XLA, or :mod:`toast.lower`.
Lowering: TypeAlias = Literal["xla", "local"]


def lowering_of(lowering: Any) -> Lowering:
    """``lowering``, or a :class:`toast.errors.PlanError` if there is none of this name."""
    if lowering not in get_args(Lowering):
        raise PlanError(f"lowering {lowering!r}: use {' or '.join(get_args(Lowering))}")
    return cast(Lowering, lowering)


def rule_texts(paths: RuleFiles) -> list[LogicText]:
    """The ``.lp`` files among ``paths`` (files or folders), read, and not yet checked."""
    listed = isinstance(paths, Sequence) and not isinstance(paths, str)
    if not listed or not all(isinstance(path, str | pathlib.Path | LogicText) for path in paths):
        raise RuleError(f"rules {paths!r}: use a list of paths, such as rules=['mine.lp']")
    files: list[pathlib.Path | LogicText] = []
    for path in paths:
        if isinstance(path, LogicText):
            files.append(path)
            continue
        place = pathlib.Path(path)
        if not os.path.exists(place):
            raise RuleError(f"{place}: no such rule file or folder; check the path")
        files += sorted(place.glob("*.lp")) if place.is_dir() else [place]
    return read_files(files)


def user_files(paths: RuleFiles) -> list[LogicText]:
    """The texts of :func:`rule_texts`, after checks that they are safe data and have an effect."""
    files = [check_rules(text) for text in rule_texts(paths)]
    for file in files:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # solving all rules will repeat them
            check_heads(file)
            known = {kind for kind, _ in known_rules(file)}
            known |= {"composite"} if _composites(file) else set()
        for line, kind in kinds_of_heads(file, _FACTOR_PREDICATES):
            if kind not in known | {"custom_call"}:
                raise RuleError(
                    f"{file}:{line}: has no effect, since the file has no rule of {kind}; "
                    f"add rule({kind})"
                )
    return files


@dataclasses.dataclass(frozen=True, eq=False)
class Signatures:
    """The solved rules of the signatures of a program, and of its pairs of signatures.

    Factors are numbered as in :class:`SignatureRule`.  A link connects two signatures if an op of
    the second uses a value that an op of the first defines.
    """

    rules: tuple[SignatureRule, ...]
    #: ``[links, 4]`` defining signature and result, using signature and operand; sorted.
    links: Ints
    #: ``[edges, 3]`` link, factor at the definition, factor at the use; sorted.
    edges: Ints
    #: ``[pairs, 4]`` two signatures of tied ops, and a factor of each with the same name.
    same_names: Ints


def solve_rules(
    program: Program, rules: RuleFiles = (), *, typical: bool = False, partitioned: bool = False
) -> tuple[SignatureRule, ...]:
    """The rule of each of ``program.signatures``; see :func:`solve_signatures`."""
    return solve_signatures(program, rules, typical=typical, partitioned=partitioned).rules


def solve_signatures(
    program: Program,
    rules: RuleFiles = (),
    *,
    typical: bool = False,
    partitioned: bool = False,
    lowering: Lowering = "xla",
    whole: Mapping[int, Iterable[str]] | None = None,
) -> Signatures:
    """The factors and names of each of ``program.signatures``, and the edges of their uses.

    ``rules`` has paths of additional rule files or folders; the rule of a later file replaces all
    earlier rules for the same kind.  Raises :class:`toast.errors.RuleError` for an invalid rule: a
    factor with dimensions of different sizes, or a dimension without a factor.  If the program is
    ``typical`` of its op kinds, a rule is also invalid if it states a property of a factor that no
    op has.  If ``partitioned``, every custom call counts as partitioned, so that its rule alone
    decides.  Rules know the ``lowering``, and state where XLA computes wrong results.  ``whole``
    has the labels of factors along which the decompositions of composites are not sharded, by
    signature.
    """
    relations = Relations(program)
    stated = {
        number: "".join(f"decomposition_whole({number},{label}).\n" for label in labels)
        for number, labels in (whole or {}).items()
    }
    model, files = _derive_factors(
        program, relations, user_files(rules), partitioned, _facts(program, lowering), stated
    )
    links = _links(program)
    first = relations.first_values
    width = np.array([len(s.operands) for s in program.signatures], dtype=np.int64)
    defined = (first[:-1] + width)[links[:, 0]] + links[:, 1]
    ties = sorted({(program.ops[a].signature, program.ops[b].signature) for a, b in program.ties})
    model.state_rows({
        "operand/3": [
            f"({s},{i},{v})"
            for (_, _, s, i), v in zip(links.tolist(), defined.tolist(), strict=True)
        ],
        "tied/2": [f"({one},{other})" for one, other in ties],
    })  # fmt: skip
    model.derive([stratum("names")], _NAMES, stated=("need_replication/2", "factor_size/3"))
    _check_factors(program, model, files, typical=typical)
    solved = _signature_rules(program, first.tolist(), model, files)
    number = [{f.label: n for n, f in enumerate(rule.factors)} for rule in solved]

    def factor(name: Any) -> int:
        _, signature, label = name
        at: int = number[signature][show_term(label)]
        return at

    link_of = {
        (value, s, i): link
        for link, ((_, _, s, i), value) in enumerate(
            zip(links.tolist(), defined.tolist(), strict=True)
        )
    }
    edges = sorted(
        (link_of[value, site[1], site[2]], factor(name), factor(use_name))
        for value, site, name, use_name in model.atoms("edge/4")
    )
    same_names = sorted(
        (one[1], other[1], factor(one), factor(other)) for one, other in model.atoms("same_name/2")
    )
    return Signatures(
        solved,
        links,
        np.array(edges, dtype=np.int64).reshape(-1, 3),
        np.array(same_names, dtype=np.int64).reshape(-1, 4),
    )


def _links(program: Program) -> Ints:
    """``[links, 4]`` as in :class:`Signatures`."""
    signatures = program.signatures
    signature = np.array([op.signature for op in program.ops], dtype=np.int64)
    result = np.array([value.result for value in program.values], dtype=np.int64)
    defining_op = np.array([value.op for value in program.values], dtype=np.int64)
    used = np.array([v for op in program.ops for v in op.operands], dtype=np.int64)
    counts = np.array([len(s.operands) for s in signatures], dtype=np.int64)[signature]
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = signature[defining_op[used]], result[used], np.repeat(signature, counts), index
    return distinct_rows(np.stack(columns, axis=1)).rows


def _signature_rules(
    program: Program,
    first: list[int],
    model: LogicModel,
    files: Mapping[int, pathlib.Path],
) -> tuple[SignatureRule, ...]:
    """The rule of each signature, from the atoms of a model."""
    places: dict[Term, list[tuple[Term, ...]]] = defaultdict(list)
    for (_, op, factor), site, d in model.atoms("annotates/3"):
        if site[0] == "use":
            tensor: Term = ("operand", site[2])
        else:
            own = program.signatures[op]
            tensor = ("result", site[1] - first[op] - len(own.operands))
        places[op].append((factor, tensor, d, 0))
    for op, factor, tensor, d, position in model.atoms("stacked/5"):
        places[op].append((factor, tensor, d, position))
    sizes: dict[Term, dict[Term, set[Term]]] = defaultdict(lambda: defaultdict(set))
    for op, factor, size in model.atoms("factor_size/3"):
        sizes[op][factor].add(size)
    # A permutation needs whole other shards, unless its halo is known.
    halos = dict.fromkeys(model.atoms("permutation/2"), math.inf)
    halos |= {(op, f): float(count) for op, f, count in model.atoms("halo/3")}
    numbers: dict[Term, int] = {}
    facts = _FactorFacts(
        combiners={(op, f): str(combiner) for op, f, combiner in model.atoms("reduction/3")},
        replicated=set(model.atoms("need_replication/2")),
        permuted=set(model.atoms("permutation/2")),
        halos=halos,
        shardable={(op, f) for ((_, op, f),) in model.atoms("shardable/1")},
        kinds={
            (op, f): numbers.setdefault(kind, len(numbers))
            for (_, op, f), kind in model.atoms("kind_of/2")
        },
    )
    missing = {op for (op,) in model.atoms("without_rule/1")}
    fixed: dict[Term, list[tuple[str, Term]]] = defaultdict(list)
    for op, axis, factor in model.atoms("fixed/3"):
        fixed[op].append((str(axis), factor))
    whole = {op for (op,) in model.atoms("runs_whole/1")}
    costs = _kernel_costs(model)
    excludes: dict[Term, set[tuple[str, str]]] = defaultdict(set)
    for op, factor, other in model.atoms("excludes/3"):
        excludes[op].add((show_term(factor), show_term(other)))
    mesh = {(op, show_term(factor)) for op, factor in model.atoms("whole_mesh/2")}
    rings: dict[Term, list[tuple[Term, Term, Term]]] = defaultdict(list)
    for op, *ring in model.atoms("ring/4"):
        rings[op].append((ring[0], ring[1], ring[2]))
    linear = _LinearFacts.of(model)
    solved = []
    for number, signature in enumerate(program.signatures):
        try:
            rule = _signature_rule(
                signature, number, places[number], sizes[number], facts, number in missing,
                files.get(number), fixed[number],
            )  # fmt: skip
            if signature.kind == "custom_call" or number in costs:
                rule = dataclasses.replace(
                    rule,
                    costs=_costs(signature, rule, costs.get(number, {})),
                    runs_whole=number in whole,
                )
            index = {factor.label: n for n, factor in enumerate(rule.factors)}
            ends = [(index[f], index[g]) for f, g in excludes[number]]
            pairs = {(min(end), max(end)) for end in ends}
            solved.append(dataclasses.replace(
                rule,
                excludes=tuple(sorted(pairs)),
                whole_mesh=tuple(n for label, n in index.items() if (number, label) in mesh),
                rings=_rings(signature, index, rings[number]),
                linearity=linear.linearity(signature, number, rule),
            ))  # fmt: skip
        except RuleError as error:
            raise RuleError(f"{_place(signature, files.get(number))}: {error}") from None
    return tuple(solved)


def _rings(
    signature: Signature, index: Mapping[str, int], rings: Sequence[tuple[Term, Term, Term]]
) -> tuple[TensorRing, ...]:
    """The tensors of an op that go around, by factor; ``index`` has the numbers of its factors."""
    placed = []
    for label, term, reach in rings:
        factor = show_term(label)
        shown = f"ring(Op,{factor},{show_term(term)},{show_term(reach)})"
        tensor = _tensor_number(signature, term)
        if tensor is None or factor not in index:
            raise RuleError(f"{shown}: no tensor of the op; use operand(I) or result(I)")
        if not isinstance(reach, int) or reach < 0:
            raise RuleError(f"{shown}: the reach is not a whole number from 0 on")
        placed.append(TensorRing(index[factor], tensor, reach))
    return tuple(sorted(placed, key=lambda ring: (ring.factor, -ring.tensor)))


@dataclasses.dataclass(frozen=True)
class _LinearFacts:
    """The linear operands of signatures, and the signatures with other facts about partial sums."""

    operands: Mapping[Term, Set[Term]]
    stated: Mapping[str, Set[Term]]

    @classmethod
    def of(cls, model: LogicModel) -> _LinearFacts:
        """The facts of a model."""
        operands: dict[Term, set[Term]] = defaultdict(set)
        for op, index in model.atoms("linear/2"):
            operands[op].add(index)
        predicates = ("adds", "scales", "moves_elements", "rounds")
        return cls(operands, {p: {op for (op,) in model.atoms(f"{p}/1")} for p in predicates})

    def linearity(self, signature: Signature, number: int, rule: SignatureRule) -> Linearity:
        """Which partial sums pass a signature; raises :class:`RuleError` if none can."""
        indices = self.operands.get(number, frozenset())
        for index in indices:
            if index not in range(len(signature.operands)):
                shown = f"linear(Op,{show_term(index)})"
                raise RuleError(f"{shown}: the op has no such operand; use the number of one")
        stated = [predicate for predicate, ops in self.stated.items() if number in ops]
        adds, scales, moves, rounds = (predicate in stated for predicate in self.stated)
        if signature.kind == "composite" and (stated or indices):
            shown = f"{stated[0]}(Op)" if stated else "linear(Op,I)"
            raise RuleError(f"{shown}: partial sums pass no composite; remove it")
        if adds and scales:
            raise RuleError("scales(Op): the op adds its operands (adds(Op)); state one of the two")
        for predicate, least, holds in (("adds", 1, adds), ("scales", 2, scales)):
            sides = {*rule.operands, *rule.results}
            elementwise = len(sides) == 1 and len(signature.operands) >= least
            if holds and (signature.kind in _OPAQUE or not elementwise):
                raise RuleError(
                    f"{predicate}(Op): not for {signature.kind}: it is for elementwise ops of "
                    "StableHLO; state linear(Op,I) for each operand in which the op is linear"
                )
        if moves and not signature.operands:
            raise RuleError("moves_elements(Op): the op has no operand; remove it")
        exchanged = any(factor.permutation or factor.halo for factor in rule.factors)
        if indices and signature.kind == "custom_call" and exchanged:
            raise RuleError(
                "linear(Op,I): partial sums pass no call whose shards need elements of their "
                "neighbours; remove it, or the permutation"
            )
        return Linearity(tuple(sorted(map(int, indices))), adds, scales, moves, rounds)  # type: ignore[arg-type]


#: Ops that are computed outside StableHLO, or by a decomposition.
_OPAQUE = frozenset({"composite", "custom_call"})


@dataclasses.dataclass
class _CostTerm:
    """A term of the costs of a kernel, with the labels of its factors."""

    amounts: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    factors: set[str] = dataclasses.field(default_factory=set)
    share: float = 1.0
    #: The queries of causal attention: their factor and number, the most keys, the early queries.
    latest: tuple[str, int, int, int] | None = None

    def queries(self, number: Mapping[str, int]) -> CausalQueries | None:
        """The queries of causal attention; ``number`` has the numbers of factors."""
        if self.latest is None:
            return None
        factor, count, most, early = self.latest
        return CausalQueries(number[factor], most / count, early / count)


def _kernel_costs(model: LogicModel) -> dict[Term, dict[Term, _CostTerm]]:
    """The declared costs of kernels, by signature and term."""
    terms: dict[Term, dict[Term, _CostTerm]] = defaultdict(lambda: defaultdict(_CostTerm))
    for op, quantity, coefficient, term in model.atoms("kernel_cost/4"):
        assert isinstance(coefficient, int)
        terms[op][term].amounts.append((str(quantity), coefficient))
    for op, term, factor in model.atoms("kernel_cost_over/3"):
        terms[op][term].factors.add(show_term(factor))
    for op, term, part, whole in model.atoms("kernel_share/4"):
        assert isinstance(part, int)
        assert isinstance(whole, int)
        terms[op][term].share = part / whole
    for op, term, factor, *numbers in model.atoms("kernel_latest/6"):
        count, most, early = (int(str(number)) for number in numbers)
        terms[op][term].latest = show_term(factor), count, most, early
    return terms


def _costs(
    signature: Signature, rule: SignatureRule, terms: Mapping[Term, _CostTerm]
) -> tuple[KernelCost, ...]:
    """The costs that the rule of an op declares, or else those that a custom call estimates."""
    number = {factor.label: n for n, factor in enumerate(rule.factors)}
    costs = []
    for label, term in terms.items():
        factors = tuple(sorted(number[label] for label in term.factors))
        size = math.prod(float(rule.factors[factor].size) for factor in factors)
        for quantity, coefficient in sorted(term.amounts):
            amount = coefficient * size * term.share
            if quantity == _ELEMENTS:
                tensor, element = _tensor(signature, label)
                costs.append(KernelCost("bytes", amount * element, factors, tensor))
            else:
                costs.append(KernelCost(quantity, amount, factors, None, term.queries(number)))
    return tuple(costs) or _estimated(signature, rule)


def _tensor(signature: Signature, term: Term) -> tuple[int, float]:
    """The number of the operand or result that a term names, and the bytes of an element."""
    number = _tensor_number(signature, term)
    if number is None:
        raise RuleError(
            f"kernel_cost(Op,{_ELEMENTS},_,{show_term(term)}): the term is no tensor of the op; "
            "use operand(I) or result(I)"
        )
    type_ = signature.results[-1 - number] if number < 0 else signature.operands[number]
    return number, float(element_bytes(type_.dtype))


def _tensor_number(signature: Signature, term: Term) -> int | None:
    """The number of an operand ``operand(I)``; -1 for ``result(0)``, -2 for ``result(1)``."""
    side, index = term if isinstance(term, tuple) and len(term) == 2 else ("", None)
    types = {"operand": signature.operands, "result": signature.results}.get(str(side), ())
    if not isinstance(index, int) or index not in range(len(types)):
        return None
    return index if side == "operand" else -1 - index


def _estimated(signature: Signature, rule: SignatureRule) -> tuple[KernelCost, ...]:
    """The costs that a custom call estimates; sharding any factor of it divides them.

    Its bytes include operands and results, which are read and written anyway.
    """
    types = (*signature.operands, *signature.results)
    known = sum(math.prod(t.shape) * float(element_bytes(t.dtype)) for t in types)
    amounts = {
        "flops": _stated(signature, "flops"),
        "transcendentals": _stated(signature, "transcendentals"),
        "bytes": _stated(signature, "bytes_accessed") - known,
    }
    every = tuple(range(len(rule.factors)))
    return tuple(KernelCost(q, amount, every) for q, amount in amounts.items() if amount > 0)


def _stated(signature: Signature, name: str) -> float:
    """A number that a custom call states, which may be a string in a fact base; 0 for none."""
    stated = signature.attribute(name)
    if isinstance(stated, str) and stated.strip('"').isdecimal():
        stated = int(stated.strip('"'))
    return float(stated) if isinstance(stated, int) else 0.0


#: The combiners of partial results; ``other`` and ``replace`` are not sums.
_COMBINERS = frozenset({
    "add", "multiply", "maximum", "minimum", "and", "or", "xor", "other", "replace",
})  # fmt: skip


def _check_factors(
    program: Program, model: LogicModel, files: Mapping[int, pathlib.Path], *, typical: bool
) -> None:
    """Raise :class:`toast.errors.RuleError` for factors that no op can have, with ``file:line``."""

    def error(op: Term, text: str) -> RuleError:
        number = int(op)  # type: ignore[arg-type]
        signature = program.signatures[number]
        return RuleError(
            f"{_place(signature, files.get(number))}: rule of {signature.kind}: {text}"
        )

    for op, factor, tensor, d in model.atoms("misplaced/4"):
        place = f"{show_term(tensor)} has no dimension {show_term(d)}"
        raise error(op, f"factor {show_term(factor)}: {place}; use a dimension from tensor_dim")
    kinds = [_keys(signature) for signature in program.signatures]
    defined = {(kinds[op], factor) for op, factor, *_ in model.atoms("factor/5")}
    for op, factor, predicate in model.atoms("undefined_factor/3"):
        costs = predicate == "kernel_cost_over"
        if not costs and (not typical or (kinds[op], factor) in defined):
            continue  # another op of the kind may have the factor
        raise error(
            op, f"{show_term(predicate)} of {show_term(factor)}: no dimension has this factor; "
            "add factor(Op,F,T,D)",
        )  # fmt: skip
    for predicate in ("factor_size", "halo"):
        for op, factor, count in model.atoms(f"{predicate}/3"):
            if not isinstance(count, int) or count < 0:
                shown = f"{predicate}(Op,{show_term(factor)},{show_term(count)})"
                raise error(op, f"{shown}: not a whole number from 0 on")
    for op, factor, combiner in model.atoms("reduction/3"):
        if combiner not in _COMBINERS:
            shown = f"reduction(Op,{show_term(factor)},{show_term(combiner)})"
            raise error(op, f"{shown}: not a combiner; use one of {', '.join(sorted(_COMBINERS))}")
    _check_costs(model, error)


def _check_costs(model: LogicModel, error: Callable[[Term, str], RuleError]) -> None:
    """Raise an ``error`` for costs of kernels that are no costs."""
    terms = set()
    for op, quantity, coefficient, term in model.atoms("kernel_cost/4"):
        terms.add((op, term))
        shown = ",".join(["Op", *map(show_term, (quantity, coefficient, term))])
        if quantity not in (*QUANTITIES, _ELEMENTS):
            known = ", ".join((*QUANTITIES, _ELEMENTS))
            raise error(op, f"kernel_cost({shown}): not a quantity; use one of {known}")
        if not isinstance(coefficient, int) or coefficient < 0:
            raise error(op, f"kernel_cost({shown}): the coefficient is no whole number from 0 on")
    shared: dict[tuple[Term, Term], Term] = {}
    for op, term, part, whole in model.atoms("kernel_share/4"):
        shown = ",".join(["Op", *map(show_term, (term, part, whole))])
        fits = isinstance(part, int) and isinstance(whole, int) and 0 <= part <= whole
        if not fits or whole == 0:
            raise error(op, f"kernel_share({shown}): not a part of a whole, such as 1, 2")
        if (op, term) in shared:
            raise error(op, f"kernel_share({shown}): the term has another share; state one")
        shared[op, term] = part
    others = {(op, term) for op, term, _ in model.atoms("kernel_cost_over/3")} | shared.keys()
    for op, term, factor, count, most, early in model.atoms("kernel_latest/6"):
        others.add((op, term))
        numbers = all(isinstance(number, int) for number in (count, most, early))
        if not numbers or not (0 <= early <= count and early <= most and count and most):
            shown = ",".join(["Op", *map(show_term, (term, factor, count, most, early))])
            raise error(
                op, f"kernel_latest({shown}): not numbers of queries, keys and early queries"
            )
    for op, term in sorted(others - terms, key=str):
        raise error(op, f"term {show_term(term)} has no kernel_cost; add kernel_cost(Op,...)")


@dataclasses.dataclass(frozen=True)
class _FactorFacts:
    """Properties of factors from the rules, by signature and factor."""

    combiners: Mapping[tuple[Term, ...], str]
    replicated: Set[tuple[Term, ...]]
    permuted: Set[tuple[Term, ...]]
    halos: Mapping[tuple[Term, ...], float]
    shardable: Set[tuple[Term, ...]]
    kinds: Mapping[tuple[Term, ...], int]


def _keys(signature: Signature) -> tuple[tuple[str, bool], ...]:
    """The keys that a rule of a signature may have, the first that has a rule counts.

    They are its kind, the name of a composite before that, or the kernel and the target of a custom
    call (True).
    """
    if signature.kind == "composite":
        return ((str(signature.attribute("name")), False), ("composite", False))
    if signature.kind != "custom_call":
        return ((signature.kind, False),)
    names = (signature.attribute(name) for name in ("kernel_name", "call_target_name"))
    return tuple((str(name), True) for name in names if name is not None)


def _place(signature: Signature, file: pathlib.Path | None) -> str:
    """The place of the rule of a signature: ``file:line``."""
    keys = _keys(signature)
    if file is None:
        shipped = factor_files()
        file = next((f for f in shipped[2:] for k in keys if k in known_rules(f)), shipped[1])
    line = max((kind_line(file, name) for name, _ in keys), default=1)
    return f"{file}:{line}"


def _facts(program: Program, lowering: Lowering) -> str:
    """What rules know of the whole program."""
    platform = f"platform({program.platform}).\n" if program.platform else ""
    return f"lowering({lowering}).\n{platform}"


def _derive_factors(
    program: Program,
    relations: Relations,
    files: Sequence[LogicText],
    partitioned: bool,
    stated: str,
    of_signatures: Mapping[int, str],
) -> tuple[LogicModel, dict[int, pathlib.Path]]:
    """The factors of every signature, and the user's file of each signature that has one.

    ``stated`` are facts besides those of the signatures, ``of_signatures`` further ones of some.
    """
    shipped = factor_files()
    owner = {key: file for file in files for key in known_rules(file)}
    owner |= {(name, False): file for file in files for name in _composites(file)}
    numbers: dict[LogicText | None, list[int]] = {None: []}
    for number, signature in enumerate(program.signatures):
        ruled = next((owner[key] for key in _keys(signature) if key in owner), None)
        numbers.setdefault(ruled, []).append(number)
    model = LogicModel()
    for file, chosen in numbers.items():
        used = read_files(shipped if file is None else [*shipped[:2], file])
        facts = relations.signatures_to_lp(chosen) + stated
        facts += "".join(of_signatures.get(n, "") for n in chosen)
        if partitioned:
            calls = (n for n in chosen if program.signatures[n].kind == "custom_call")
            facts += "".join(f"partitioned({n}).\n" for n in calls)
        doubted = file or (program.name if program.foreign else None)
        if doubted is not None:
            check_ends(used, facts, doubted)
        part = model if file is None else LogicModel()
        part.state(facts, ())
        part.load(used, _FACTORS)
        if file is not None:
            model.take(part, _FACTORS)
    return model, {n: file.path for file, chosen in numbers.items() if file for n in chosen}


def _whole(file: pathlib.Path | LogicText) -> set[str]:
    return {show_term(kind) for (kind,) in _declared(file, "stays_whole/1")}


def _composites(file: pathlib.Path | LogicText) -> set[str]:
    """The names of composites with a rule in a file.

    Raises :class:`toast.errors.RuleError` for names that no composite of a program can have.
    """
    names = {name for (name,) in _declared(file, "composite_rule/1")}
    for name in sorted(names, key=str):
        if not (isinstance(name, str) and name.startswith("toast.")):
            shown = show_term(name)
            raise RuleError(
                f"{file}:{kind_line(file, shown)}: composite_rule of {shown} names no op: only "
                'composites whose name begins with "toast." stay one op; '
                'write composite_rule("toast.NAME")'
            )
    return {show_term(name) for name in names}


def _declared(file: pathlib.Path | LogicText, predicate: str) -> list[tuple[Term, ...]]:
    """The atoms of a predicate (``name/arity``) that a file states without any program."""
    doubted = file if isinstance(file, LogicText) else None
    files = [directory("facts") / "schema.lp", file]
    return solve(files, "", (predicate,), doubted=doubted)[predicate]


def known_rules(file: pathlib.Path | LogicText) -> set[tuple[str, bool]]:
    """The op kinds, and the targets of custom calls (True), with a rule in a file."""
    shown = ("rule/1", "elementwise/1", "stays_whole/1", "custom_call_rule/1")
    files = [directory("facts") / "schema.lp", file]
    # The shipped ones are named by their paths.
    doubted = file if isinstance(file, LogicText) else None
    *kinds, targets = solve(files, "", shown, doubted=doubted).values()
    return {(show_term(kind), False) for atoms in kinds for (kind,) in atoms} | {
        (show_term(target), True) for (target,) in targets
    }


def _signature_rule(
    signature: Signature,
    number: int,
    places: list[tuple[Term, ...]],
    sizes: dict[Term, set[Term]],
    facts: _FactorFacts,
    missing: bool,
    file: pathlib.Path | None,
    fixed: list[tuple[str, Term]],
) -> SignatureRule:
    slots: dict[tuple[str, int, int], dict[int, Term]] = defaultdict(dict)
    for factor, tensor, d, position in places:
        where = (str(tensor[0]), int(tensor[1]), int(d))  # type: ignore[index, arg-type]
        if position in slots[where]:
            raise RuleError(
                f"rule of {signature.kind}: {tensor[0]}({tensor[1]}) dimension {d} has two "  # type: ignore[index]
                f"factors at position {position}: {show_term(slots[where][position])} and "
                f"{show_term(factor)}; give each dimension one factor, or several positions"
            )
        slots[where][position] = factor  # type: ignore[index]
    order: dict[Term, int] = {}
    sides: dict[str, list[tuple[tuple[int, ...], ...]]] = {"result": [], "operand": []}
    divisors: dict[Term, int] = {}
    blocked: set[Term] = set()
    for side, types in (("result", signature.results), ("operand", signature.operands)):
        for index, type_ in enumerate(types):
            dims: list[tuple[int, ...]] = []
            for d, size in enumerate(type_.shape):
                stack = slots.get((side, index, d), {})
                if not stack:
                    raise RuleError(
                        f"rule of {signature.kind}: {side}({index}) dimension {d} of {type_} has "
                        "no factor; map it, or give it a separate factor with need_replication"
                    )
                listed = [stack[p] for p in sorted(stack)]
                # Only the major-most factor of a dimension can be sharded in place: a minor one
                # would give every device strided pieces.
                blocked.update(listed[1:])
                major = listed[0]
                extent = size if len(listed) == 1 else min(map(int, sizes[major]))  # type: ignore[arg-type]
                divisors[major] = math.gcd(divisors.get(major, extent), extent)
                dims.append(tuple(order.setdefault(f, len(order)) for f in listed))
            sides[side].append(tuple(dims))
    factors = []
    for factor in order:
        factor_sizes = sizes.get(factor, set())
        size = max((int(s) for s in factor_sizes), default=1)  # type: ignore[arg-type]
        permutation = (number, factor) in facts.permuted
        whole = (number, factor) in facts.replicated
        halo = facts.halos.get((number, factor), 0.0)
        equal = divisors.get(factor, size) == size
        if not (equal or permutation or halo or whole or factor in blocked):
            raise RuleError(
                f"rule of {signature.kind}: factor {show_term(factor)} maps dimensions of "
                f"different size ({size} and others); split it, or mark it permutation"
            )
        factors.append(
            Factor(
                label=show_term(factor),
                size=size,
                divisor=divisors.get(factor, size),
                # What stays whole is neither summed nor exchanged.
                combiner="" if whole else facts.combiners.get((number, factor), ""),
                need_replication=whole,
                permutation=permutation and not whole,
                halo=0.0 if whole else halo,
                minor=factor in blocked,
                shardable=(number, factor) in facts.shardable,
                kind=facts.kinds.get((number, factor), -1),
            )
        )
    operands, results = tuple(sides["operand"]), tuple(sides["result"])
    taken = tuple(sorted((axis, order.get(factor, -1)) for axis, factor in fixed))
    return SignatureRule(tuple(factors), operands, results, missing, file, taken)


@dataclasses.dataclass(frozen=True)
class RuleLine:
    """The place of a rule: TOAST's files as ``rules/ops/dot.lp``, a user's file by its path."""

    #: The file.
    file: str
    #: The line, from 1.
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _rule_line(file: pathlib.Path, line: int) -> RuleLine:
    top = directory("rules").parent
    return RuleLine(str(file.relative_to(top) if file.is_relative_to(top) else file), line)


@functools.cache
def stratum_line(stratum: str, predicate: str, using: str = "") -> RuleLine:
    """The first rule for ``predicate`` (``name/arity``) in a stratum, with ``using`` in it."""
    file = directory("rules") / f"{stratum}.lp"
    name, arity = predicate.split("/")
    return _rule_line(file, rule_line(file, (name, int(arity)), using))


@dataclasses.dataclass(frozen=True)
class RuleLines:
    """The rules behind the factors of some signatures."""

    #: By signature, tensor (``operand(0)``), dimension and the label of its factor.
    factor: Mapping[tuple[int, str, int, str], tuple[RuleLine, ...]]
    #: By signature and label of a factor that needs replication.
    need_replication: Mapping[tuple[int, str], tuple[RuleLine, ...]]
    #: The user's file of each signature, or None.
    file: Mapping[int, pathlib.Path | None]

    def of(self, signature: int, tensor: str, d: int, factor: str) -> tuple[RuleLine, ...]:
        """The rules that give dimension ``d`` of a tensor this factor.

        Raises :class:`toast.errors.RuleError` if no rule derives it any more.
        """
        lines = self.factor.get((signature, tensor, d, factor))
        if lines is None:
            file = self.file[signature] or directory("rules")
            raise RuleError(
                f"{file}: factor {factor} of {tensor} dimension {d} is not derived by any rule: "
                "the file has changed since the analysis; run the analysis again"
            )
        return lines


def rule_lines(
    program: Program, rules: Sequence[SignatureRule], signatures: Iterable[int]
) -> RuleLines:
    """The rules behind the factors of ``signatures`` (numbers), by grounding them again.

    Raises :class:`toast.errors.RuleError` if a rule file of the user is missing or invalid.
    """
    by_file: dict[pathlib.Path | None, list[int]] = defaultdict(list)
    for number in sorted(set(signatures)):
        by_file[rules[number].file].append(number)
    shipped, relations = factor_files(), Relations(program)
    factor: dict[tuple[int, str, int, str], tuple[RuleLine, ...]] = {}
    whole: dict[tuple[int, str], tuple[RuleLine, ...]] = {}
    for file, numbers in by_file.items():
        used = read_files(shipped if file is None else shipped[:2])
        used += user_files([file] if file else [])
        facts = relations.signatures_to_lp(numbers)
        derived = derivations(used, facts, ("factor/4", "factor/5", "need_replication/2"))
        # factor/5 also follows from factor/4, whose rule is more specific.
        for shown in ("factor/5", "factor/4"):
            for (op, label, tensor, d, *_), lines in derived[shown].items():
                key = (_number(op), show_term(tensor), _number(d), show_term(label))
                factor[key] = tuple(_rule_line(*line) for line in lines)
        for (op, label), lines in derived["need_replication/2"].items():
            whole[_number(op), show_term(label)] = tuple(_rule_line(*line) for line in lines)
        for number in numbers:
            if program.signatures[number].kind == "composite":
                line = stratum_line("factors", "need_replication/2", "decomposition_whole")
                for each in rules[number].factors:
                    if each.need_replication:
                        whole.setdefault((number, each.label), (line,))
    owner = {number: file for file, numbers in by_file.items() for number in numbers}
    return RuleLines(factor, whole, owner)


def _number(term: Term) -> int:
    assert isinstance(term, int)
    return term


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """An op kind (or the target of a custom call, or the name of a kernel) with a rule."""

    kind: str
    file: pathlib.Path
    custom_call: bool
    #: Whether the rule allows any sharding.
    shards: bool
    #: Whether the rule is for a kernel: only for calls whose shapes fit.
    kernel: bool = False

    @property
    def shipped(self) -> bool:
        """Whether the rule is one of TOAST's own rules."""
        return self.file.is_relative_to(directory("rules"))


def rule_entries(rules: Sequence[str | pathlib.Path] = ()) -> tuple[RuleEntry, ...]:
    """All op kinds with a rule in TOAST's files or in ``rules``, sorted, with their files.

    Kernels come last.

    Raises :class:`toast.errors.RuleError` if two files of ``rules`` have a rule for one kind.
    """
    _, _, *shipped = factor_files()
    files_by_key = {key: file for file in shipped for key in known_rules(file)}
    users: dict[tuple[str, bool], LogicText] = {}
    for text in user_files(rules):
        for key in sorted(known_rules(text)):
            if key in users:
                raise RuleError(
                    f"{text}:{kind_line(text, key[0])}: duplicate rule for {key[0]}, which "
                    f"{users[key]} already has; keep one of them"
                )
            users[key] = text
    entries: dict[tuple[str, bool], pathlib.Path | LogicText] = {**files_by_key, **users}
    whole = {(kind, file) for file in {*entries.values()} for kind in _whole(file)}
    files: set[pathlib.Path | LogicText] = {*shipped, *users.values()}
    kernels = [
        (show_term(name), file) for file in files for (name,) in _declared(file, "kernel_rule/1")
    ]
    return (
        *(
            RuleEntry(kind, _path(file), custom, (kind, file) not in whole)
            for (kind, custom), file in sorted(entries.items())
        ),
        *(
            RuleEntry(kernel, _path(file), custom_call=True, shards=True, kernel=True)
            for kernel, file in sorted(kernels, key=lambda entry: entry[0])
        ),
    )


def _path(file: pathlib.Path | LogicText) -> pathlib.Path:
    return file.path if isinstance(file, LogicText) else file


def stratum(name: str) -> pathlib.Path:
    """The path of a file of ``rules/``."""
    return directory("rules") / f"{name}.lp"
