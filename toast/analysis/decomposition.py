"""Where the decomposition of a composite can be sharded.

A device runs a composite without a local form of its own as its decomposition on shards.  The rule
of the composite says how its operands and results are sharded.  In the decomposition, every
dimension of the same color is sharded alike.  That needs no communication, or the composite stays
whole along the factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from toast.analysis.names import Ints, Names
from toast.analysis.rules import SignatureRule
from toast.program import Program

#: The ops at the boundary of a manual region.
_BOUNDARY = frozenset({"manual_entry", "manual_exit"})


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """The analysis of a decomposition, for a device-local program.

    Only a mesh tells whether axes divide a dimension: see :meth:`divisors`.
    """

    program: Program
    rules: tuple[SignatureRule, ...]
    names: Names
    #: ``[names]``
    color: Ints

    def factors(self, rule: SignatureRule) -> Ints:
        """``[names]`` the factor of the composite that shards each name; -1 for none.

        ``rule`` is that of the composite.  If dimensions of several factors have a color, it has
        the first of these; :meth:`whole` has all of them.
        """
        factor = np.full(self.names.count, -1, dtype=np.int64)
        for color, number in reversed([*self._colored(rule)]):
            factor[self.color == color] = number
        return factor

    def whole(self, rule: SignatureRule) -> frozenset[int]:
        """The factors of a composite along which the decomposition is not sharded.

        Each factor stands for itself: an axis shards one factor of an op, so factors that can be
        sharded alone can be sharded together.
        """
        program, names = self.program, self.names
        if any(signature.kind in _BOUNDARY for signature in program.signatures):
            return frozenset(range(len(rule.factors)))
        # Exchanges between devices, and results that no sum combines in a linear op.
        whole = {
            number for number, factor in enumerate(rule.factors)
            if factor.permutation or factor.halo
            or (factor.combiner not in ("", "add") and _partial(rule, number))
        }  # fmt: skip
        of_color: dict[int, int] = {}
        for color, number in self._colored(rule):
            if (other := of_color.setdefault(color, number)) != number:
                whole |= {number, other}
        factor = self.factors(rule)
        whole |= {*factor[~names.shardable].tolist()}
        for value, _ in program.condition_reads:
            whole |= {*factor[names.def_name[slice(*names.value_dim[value : value + 2])]].tolist()}
        # Two dimensions of one value, or two factors of one op, would have the same axes.
        for first, rows in (
            (names.value_dim, names.def_name), (names.use_dim, names.use_name),
            (names.first_name, np.arange(names.count)),
        ):  # fmt: skip
            place = np.repeat(np.arange(len(first) - 1), np.diff(first))
            pairs, counts = np.unique(
                np.stack([place, factor[rows]], axis=1), axis=0, return_counts=True
            )
            whole |= {*pairs[counts > 1, 1].tolist()}
        whole |= {
            number for number, of_rule in enumerate(rule.factors)
            if of_rule.combiner == "add" and _partial(rule, number)
            and not self._sums_reach_results(rule, number, factor)
        }  # fmt: skip
        for name in np.flatnonzero(factor >= 0).tolist():
            if self._communicates(name, rule.factors[factor[name]].combiner):
                whole.add(int(factor[name]))
        return frozenset(whole - {-1})

    def divisors(self, rule: SignatureRule) -> tuple[int, ...]:
        """For each factor of a composite, the number that its shards must divide inside."""
        factor = self.factors(rule)
        return tuple(
            math.gcd(own.divisor, *self.names.divisor[factor == number].tolist())
            for number, own in enumerate(rule.factors)
        )

    def _communicates(self, name: int, summed: str) -> bool:
        """Whether a sharded name makes devices communicate.

        A sum stays partial if the composite is a sum over the factor, too: ``summed`` is its
        combiner.
        """
        op = int(self.names.name_op[name])
        number = name - int(self.names.first_name[op])
        rule = self.rules[self.program.ops[op].signature]
        factor = rule.factors[number]
        sums = bool(factor.combiner) and (factor.combiner, summed) != ("add", "add")
        return bool((sums and _partial(rule, number)) or factor.permutation or factor.halo)

    def _sums_reach_results(self, rule: SignatureRule, number: int, factor: Ints) -> bool:
        """Whether exactly the results without a factor are partial sums over it.

        Only linear ops may use partial sums.  ``factor`` is that of each name.
        """
        program, partial = self.program, set[int]()
        for op, used in enumerate(program.ops):
            own = self.rules[used.signature]
            waiting = [index for index, value in enumerate(used.operands) if value in partial]
            if program.kind(op) == "return":
                continue
            if waiting:
                alone = waiting[0] in own.linearity.operands and len(waiting) == 1
                if not (alone or (own.linearity.adds and len(waiting) == len(used.operands))):
                    return False
                partial.update(used.results)
            first = int(self.names.first_name[op])
            for of_op in range(len(own.factors)):
                if factor[first + of_op] == number and own.factors[of_op].combiner:
                    partial.update(
                        value for value, dims in zip(used.results, own.results, strict=True)
                        if of_op not in {f for factors in dims for f in factors}
                    )  # fmt: skip
        return all(
            (value in partial) == (number not in {f for factors in dims for f in factors})
            for value, dims in zip(program.result_values, rule.results, strict=True)
        )

    def _colored(self, rule: SignatureRule) -> Iterator[tuple[int, int]]:
        """The colors of the dimensions of arguments and results, each with the factor there."""
        names = self.names
        for values, tensors in (
            (self.program.argument_values, rule.operands),
            (self.program.result_values, rule.results),
        ):
            for value, dims in zip(values, tensors, strict=True):
                for d, factors in enumerate(dims):
                    name = names.def_name[int(names.value_dim[value]) + d]
                    yield int(self.color[name]), factors[0]


def _partial(rule: SignatureRule, number: int) -> bool:
    """Whether a result of an op does not have a factor."""
    return any(number not in {f for factors in dims for f in factors} for dims in rule.results)


__all__ = ["Decomposition"]
