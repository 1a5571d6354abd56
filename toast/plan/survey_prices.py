"""Prices of the programs that memory policies make of a survey (:mod:`toast.cost.policy_programs`).

Such a program is not traced, and its dimensions are not analysed: its ops have the rules and the
shardings that they have in the survey.  What JAX adds is sharded as in a plan that begins with the
shardings of the survey.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from toast.analysis.names import joined
from toast.analysis.rules import SignatureRule, solve_signatures
from toast.cost import Choices, CostModel, Residuals
from toast.cost.policy_programs import PolicyPrograms
from toast.cost.prices import Prices
from toast.distinct import distinct_rows
from toast.plan.unknown_ops import follow
from toast.program import Program, Signature
from toast.program.program import Builder
from toast.records import uncached_copy
from toast.space import NONE, Space, States
from toast.space.classes import numbered


class PolicyPrices:
    """Prices of one state of a survey under policies."""

    def __init__(self, model: CostModel, state: States) -> None:
        self._model, self._state = model, state
        self._programs = PolicyPrograms(model.space.analysis.program)
        self._rules: dict[Signature, SignatureRule] = {}
        self._prices: dict[bytes, Prices] = {}
        #: The last program, which is often the one that is traced.
        self._last: tuple[bytes, tuple[Space, States]] | None = None

    def price(self, residuals: Residuals, choices: Choices) -> Prices:
        """The price of one policy.

        :raises toast.cost.policy_programs.NotWritten: if its program is not written.
        """
        key = _key(residuals, choices)
        if key not in self._prices:
            space, state = self.sharded(residuals, choices)
            self._prices[key] = self._model.of_program(space).price(state[None])
        return self._prices[key]

    def sharded(self, residuals: Residuals, choices: Choices) -> tuple[Space, States]:
        """The decision space of a program, and the state with the shardings of the survey.

        :raises toast.cost.policy_programs.NotWritten: if the program is not written.
        """
        key = _key(residuals, choices)
        if self._last is None or self._last[0] != key:
            self._last = key, self._sharded(residuals, choices)
        return self._last[1]

    def _sharded(self, residuals: Residuals, choices: Choices) -> tuple[Space, States]:
        written = self._programs.under(residuals, choices)
        space, program = self._model.space, written.program
        analysis = space.analysis
        rules = self._rules_of(program)
        nothing = np.zeros((0, 2), dtype=np.int64)
        names = joined(program, rules, nothing, nothing)
        known = written.origin >= 0
        op_state = np.full((len(program.ops), self._state.shape[1]), NONE, dtype=np.int8)
        op_state[known] = space.of_ops(self._state)[written.origin[known]]
        of_op = np.full(len(program.ops), -1, dtype=np.int64)
        of_op[known] = space.classes.of_op[written.origin[known]]
        other = uncached_copy(space)
        other.analysis = dataclasses.replace(analysis, program=program, rules=rules, names=names)
        follow(op_state, known.copy(), other)
        label = distinct_rows(np.column_stack([names.signature, of_op, op_state])).label
        other.classes = numbered(label, names, program.repeats, label)
        return other, op_state[other.classes.representative]

    def _rules_of(self, program: Program) -> tuple[SignatureRule, ...]:
        """The rules of all signatures; those of the survey are known."""
        analysis = self._model.space.analysis
        known = dict(zip(analysis.program.signatures, analysis.rules, strict=True)) | self._rules
        new = [signature for signature in program.signatures if signature not in known]
        if new:
            some = _one_of_each(new, program.platform)
            solved = solve_signatures(some, [*analysis.rule_files], lowering=analysis.lowering)
            self._rules.update(zip(some.signatures, solved.rules, strict=True))
            known |= self._rules
        return tuple(known[signature] for signature in program.signatures)


def _key(residuals: Residuals, choices: Choices) -> bytes:
    """What one policy decides."""
    (key,) = choices.keys()
    return key + " ".join(residuals.blocks).encode()


def _one_of_each(signatures: Sequence[Signature], platform: str) -> Program:
    """A program with one op of each signature."""
    builder = Builder()
    given = [type_ for signature in signatures for type_ in signature.operands]
    values = iter([value for type_ in given for value in builder.add("argument", (), (type_,))])
    for signature in signatures:
        builder.add(
            signature.kind, [next(values) for _ in signature.operands], signature.results,
            signature.attributes,
        )  # fmt: skip
    names = [f"x{number}" for number in range(len(given))]
    return dataclasses.replace(builder.build("policy", names, [], []), platform=platform)


__all__ = ["PolicyPrices"]
