"""Proves rules on random ops of their kinds."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from toast.analysis.rules import SignatureRule, known_rules, solve_rules, user_files
from toast.assurance import instances
from toast.assurance.prove import Proof, Tally, prove, tally
from toast.logic import kind_line
from toast.program import Program


@dataclasses.dataclass(frozen=True)
class KindProofs:
    """The proofs of an op kind."""

    tally: Tally
    #: The kinds of factors of its rule.
    factors: tuple[str, ...]
    program: Program
    proofs: tuple[Proof, ...]


def prove_kind(kind: str, count: int, rules: Sequence[Any] = (), *, seed: int = 0) -> KindProofs:
    """Proves the rule of an op kind on random ops (:mod:`toast.assurance.instances`).

    :param kind: the op kind, or ``custom_call TARGET``.
    :param count: the number of different ops; there may be fewer.
    :param rules: further rule files, or folders of rule files.
    :param seed: the seed of the ops and of their operands.
    """
    drawn = instances.draw(kind, count, seed)
    program = instances.program_of(drawn, kind)
    words = {word for rule in solve_rules(program, rules) for word in _words(rule)}
    proofs = prove(program, rules, seed=seed)
    (row,) = tally(proofs) or (Tally(kind, 0, 0, 0, 0),)
    row = dataclasses.replace(row, instances=len(set(drawn)))
    order = ("pass-through", "reduction", "permutation", "need-replication")
    return KindProofs(row, tuple(w for w in order if w in words), program, proofs)


def drawable(files: Sequence[pathlib.Path]) -> tuple[list[str], list[str]]:
    """The kinds in rule files for which random ops can be drawn, and notes on other kinds.

    Without ``files``, the kinds of the shipped rules.
    """
    if not files:
        return list(instances.KINDS), []
    kinds, notes = [], []
    for file in user_files(files):
        for kind, custom in sorted(known_rules(file)):
            name = f"custom_call {kind}" if custom else kind
            if name in instances.KINDS:
                kinds.append(name)
            else:
                notes.append(
                    f"{file}:{kind_line(file, kind)}: no ops of {kind} can be drawn; "
                    "prove it on a program: toast rules prove TARGET --rules"
                )
    return kinds, notes


def _words(rule: SignatureRule) -> Iterator[str]:
    for factor in rule.factors:
        plain = not (factor.combiner or factor.permutation or factor.need_replication)
        named = {
            "pass-through": plain, "reduction": factor.combiner, "permutation": factor.permutation,
            "need-replication": factor.need_replication,
        }  # fmt: skip
        yield from (word for word, holds in named.items() if holds)
