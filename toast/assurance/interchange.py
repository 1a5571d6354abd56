"""Sharding rules in Shardy's form: annotates modules with TOAST's rules and compares the two."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from toast.analysis.rules import SignatureRule, solve_rules
from toast.errors import PlanError
from toast.frontend import mlir
from toast.frontend.mlir import ModuleSource
from toast.program import Program

#: Factors of each dimension of each tensor, operands then results.
Tensors = tuple[tuple[tuple[str, ...], ...], ...]

#: The same by numbers of factors, for operands or for results.
Places = tuple[tuple[tuple[int, ...], ...], ...]

_RULE = re.compile(
    r"#sdy\.op_sharding_rule<\((.*)\)->\((.*?)\)(?: \{(.*?)\})?((?: \w+=\{[^}]*\})*)(?:, custom)?>"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a rule says about more than one tensor, independent of the names of factors.

    Factors of one element are left out.  So are factors of a single tensor that the op does not
    reduce over: they relate no dimensions, so nothing propagates along them.  Factors are numbered
    in the order of their first occurrence, operands first.
    """

    tensors: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[int, ...]
    reduction: frozenset[int]
    need_replication: frozenset[int]
    permutation: frozenset[int]


def _shape(tensors: Tensors, sizes: dict[str, int], kinds: dict[str, Iterable[str]]) -> Shape:
    number: dict[str, int] = {}
    places = collections.Counter(f for tensor in tensors for f in {*itertools.chain(*tensor)})
    reduced = {*kinds.get("reduction", ())}
    compared = {f for f in places if sizes.get(f, 1) > 1 and (places[f] > 1 or f in reduced)}
    numbered = tuple(
        tuple(
            tuple(number.setdefault(f, len(number)) for f in dim if f in compared) for dim in tensor
        )
        for tensor in tensors
    )

    def of(kind: str) -> frozenset[int]:
        return frozenset(number[f] for f in kinds.get(kind, ()) if f in number)

    return Shape(
        numbered, tuple(sizes[f] for f in number), of("reduction"), of("need_replication"),
        of("permutation"),
    )  # fmt: skip


def parse_shardy(text: str) -> Shape:
    """The shape of a rule of Shardy: ``#sdy.op_sharding_rule<([i, k], ...) ...>``.

    Raises :class:`toast.errors.PlanError` for other texts.
    """
    rule = _RULE.fullmatch(text)
    if rule is None:
        raise PlanError(f"not a Shardy sharding rule: {text}")

    def side(part: str) -> Tensors:
        return tuple(
            tuple(tuple(re.findall(r"[a-z](?:_\d+)?", dim)) for dim in tensor.split(", ") if dim)
            for tensor in re.findall(r"\[([^\]]*)\]", part)
        )

    sizes = {
        name: int(size)
        for name, size in (pair.split("=") for pair in (rule[3] or "").split(", ") if pair)
    }
    kinds: dict[str, Iterable[str]] = {
        kind: names.split(", ") for kind, names in re.findall(r" (\w+)=\{([^}]*)\}", rule[4])
    }
    return _shape(side(rule[1]) + side(rule[2]), sizes, kinds)


def shape_of(rule: SignatureRule) -> Shape:
    """The shape of a rule of TOAST."""
    names = [f"f{i}" for i in range(len(rule.factors))]
    tensors = tuple(
        tuple(tuple(names[f] for f in dim) for dim in tensor)
        for tensor in rule.operands + rule.results
    )
    return _shape(tensors, _sizes(rule, names), _kinds(rule, names))


def _sizes(rule: SignatureRule, names: Sequence[str]) -> dict[str, int]:
    return {name: factor.size for name, factor in zip(names, rule.factors, strict=True)}


def _kinds(rule: SignatureRule, names: Sequence[str]) -> dict[str, Iterable[str]]:
    pairs = list(zip(names, rule.factors, strict=True))
    # Shardy knows no factor that some results have and others are sums over.
    kept = {names[f] for tensor in rule.results for dim in tensor for f in dim}
    return {
        "reduction": [n for n, f in pairs if f.combiner and n not in kept],
        "need_replication": [
            n for n, f in pairs if f.need_replication or (f.combiner and n in kept)
        ],
        "permutation": [n for n, f in pairs if f.permutation],
    }


def _without_ones(rule: SignatureRule, tensors: Places) -> Places:
    """The factors without those of size 1 beside others in a dimension, which Shardy refuses."""

    def longer(dim: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(f for f in dim if rule.factors[f].size != 1) or dim[:1]

    return tuple(tuple(map(longer, dims)) for dims in tensors)


def shardy_text(rule: SignatureRule, *, custom: bool = False) -> str:
    """A rule of TOAST in Shardy's notation, with factors i, j, ..., z, z_1, z_2, ...

    ``custom`` marks a rule that Shardy must not replace (for custom calls).
    """
    operands, results = (_without_ones(rule, tensors) for tensors in (rule.operands, rule.results))
    used = {f for tensor in (*operands, *results) for dim in tensor for f in dim}
    letters = (chr(ord("i") + n) if n < 18 else f"z_{n - 17}" for n in itertools.count())
    names = {f: next(letters) for f in range(len(rule.factors)) if f in used}

    def side(tensors: Places) -> str:
        return ", ".join(
            "[" + ", ".join("".join(names[f] for f in dim) for dim in dims) + "]"
            for dims in tensors
        )

    text = f"#sdy.op_sharding_rule<({side(operands)})->({side(results)})"
    if names:
        sizes = ", ".join(f"{name}={rule.factors[f].size}" for f, name in names.items())
        text += f" {{{sizes}}}"
    every = [names.get(f, "") for f in range(len(rule.factors))]
    for kind, factors in _kinds(rule, every).items():
        chosen = [name for name in factors if name]
        text += f" {kind}={{{', '.join(chosen)}}}" if chosen else ""
    return text + (", custom>" if custom else ">")


def shardy_rules(program: Program) -> dict[int, str]:
    """Shardy's own rule for each op that it has one for, as text."""
    source = _source(program)
    module = mlir.clone(source.module)
    mlir.run_passes(module, "builtin.module(func.func(sdy-populate-op-sharding-rules))")
    numbered = mlir.attribute_texts(module, "sdy.sharding_rule")
    places = {place: op for op, place in _ops_with_results(program).items()}
    return {places[place]: text for place, text in numbered.items() if place in places}


#: Kinds of which several ops belong to one operation of the module.
IN_PARTS = frozenset({
    "carry", "yield", "join", "optimization_barrier", "manual_entry", "manual_exit",
})  # fmt: skip


def _ops_with_results(program: Program) -> dict[int, int]:
    """The position of the operation of each op in a walk over the module, without IN_PARTS."""
    source = _source(program)
    order = mlir.walk_order(source.module)
    return {
        op: order[operation]
        for op, operation in enumerate(source.operations)
        if operation is not None and program.kind(op) not in IN_PARTS
    }


def _source(program: Program) -> ModuleSource:
    if not isinstance(program.source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no module to annotate or compare")
    return program.source


@dataclasses.dataclass(frozen=True)
class RuleDifference:
    """An op whose rules in TOAST and Shardy differ."""

    op: int
    kind: str
    place: str
    ours: str
    shardys: str


def differences(
    program: Program, rules: Sequence[Any] = ()
) -> tuple[int, tuple[RuleDifference, ...]]:
    """Compares the rules of TOAST and Shardy.

    :param program: the program whose ops are compared.
    :param rules: further rule files, or folders of rule files.
    :returns: the number of ops with a rule in both, and those whose rules differ.
    :raises toast.errors.PlanError: for a fact base, which has no module.
    """
    solved = solve_rules(program, rules)
    different, compared = [], 0
    for op, text in shardy_rules(program).items():
        rule = solved[program.ops[op].signature]
        if rule.missing:
            continue
        compared += 1
        if shape_of(rule) != parse_shardy(text):
            different.append(
                RuleDifference(
                    op, program.kind(op), str(program.location(op)), shardy_text(rule), text
                )
            )
    return compared, tuple(different)


def annotated(program: Program, rules: Sequence[Any] = ()) -> tuple[str, int]:
    """The inlined module with TOAST's rules as attributes of ops, and the number of rules.

    Shardy's propagation uses these attributes, also those of custom calls.  ``rules`` lists further
    rule files.  Raises :class:`toast.errors.PlanError` for a fact base.
    """
    return annotated_together([program], rules)


def annotated_together(programs: Sequence[Program], rules: Sequence[Any] = ()) -> tuple[str, int]:
    """As :func:`annotated`, for the functions of one module (``stablehlo.functions_of``)."""
    module = mlir.clone(_source(programs[0]).module)
    texts = {}
    for program in programs:
        solved = solve_rules(program, rules)
        for op, place in _ops_with_results(program).items():
            rule = solved[program.ops[op].signature]
            # Shardy has rules only for ops with operands.
            if program.ops[op].operands and program.ops[op].results and not rule.missing:
                custom = program.kind(op) == "custom_call"
                texts[place] = shardy_text(rule, custom=custom)
    mlir.set_attributes(module, "sdy.sharding_rule", texts)
    return str(module.operation.get_asm(enable_debug_info=True)), len(texts)
