"""Strategies of ops, as Alpa enumerates them, and the ops that follow others.

Ops that do real work are **leaders**: each chooses, for every mesh axis, the factor that holds it
or none, and the dimension along which a sum over devices stays scattered.  All other ops follow the
leader of their operands, through the dimensions of the values between; constants, broadcasts and
ops on these alone follow their user.  A state of the program is thus one number per leader.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast.cost.liveness import BARRIERS, SOURCES
from toast.space import FREE, NONE, Space, States

if TYPE_CHECKING:
    from toast.analysis.rules import SignatureRule

Ints = npt.NDArray[np.int64]

#: Kinds of leaders: products, ops that sum over devices, ops without operands to follow.
LEADERS = (BARRIERS - {"yield", "optimization_barrier"}) | {
    "argument", "reduce", "reduce_window", "gather", "scatter",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Strategies:
    """Choices of ``L`` leaders, at most ``S`` each, and what they mean for ``K`` op classes."""

    leader: Ints  # [K] the leader of each op class
    sizes: Ints  # [L] choices of each leader
    factors: States  # [S, K, A] factor that holds each axis under each choice of the leader
    #: ``[S, K, A]`` dimension of the result along which a summed axis stays scattered, or NONE.
    scattered: States

    def state(self, choice: Ints) -> States:
        """The state in which leader ``l`` makes choice ``choice[l]``: ``[K, A]``."""
        return np.asarray(self.factors[choice[self.leader], np.arange(len(self.leader))])


def enumerate_strategies(space: Space) -> Strategies:
    """The strategies of all op classes of a space."""
    return _Enumeration(space).run()


class _Enumeration:
    def __init__(self, space: Space) -> None:
        self._space = space
        self._program = space.analysis.program
        self._names = space.analysis.names
        self._sizes = tuple(space.axis_sizes.tolist())
        classes = space.classes
        self._ops: list[int] = classes.representative.tolist()
        self._class: list[int] = classes.of_op.tolist()
        #: ``[K]`` whether constraints apply to a class; such classes do not follow others.
        self._constrained = (space.fixed != FREE).any(axis=1)
        # The last column stands for no factor: every number of devices divides its 0.
        self._divisor = np.pad(classes.divisor, ((0, 0), (0, 1)), constant_values=0)
        self._none = classes.divisor.shape[1]
        self._first_use = np.searchsorted(self._names.use_op, np.arange(len(self._program.ops)))
        count = len(self._ops)
        self._leader = np.full(count, -1, dtype=np.int64)
        self._factors: list[States] = [np.empty(0, dtype=np.int8)] * count
        self._scattered: dict[int, States] = {}
        self._number = 0
        #: Ops on the longest path to each class.
        self._depth = [0] * count

    def run(self) -> Strategies:
        pliant = self._pliant()
        ties = dict(self._program.ties)
        for op_class, op in enumerate(self._ops):
            if op in ties:
                self._same(op_class, op, ties[op])
            elif not pliant[op]:
                self._decide(op_class, op, pliant)
        users = self._first_users()
        for op_class in range(len(self._ops) - 1, -1, -1):
            if self._leader[op_class] < 0:
                self._precede(op_class, self._ops[op_class], users)
        sizes = np.zeros(self._number, dtype=np.int64)
        for op_class, rows in enumerate(self._factors):
            sizes[self._leader[op_class]] = len(rows)
        shape = (int(sizes.max(initial=1)), len(self._ops), len(self._sizes))
        factors, scattered = np.full((2, *shape), NONE, dtype=np.int8)
        for op_class, rows in enumerate(self._factors):
            factors[: len(rows), op_class] = np.where(rows == self._none, NONE, rows)
        for op_class, rows in self._scattered.items():
            scattered[: len(rows), op_class] = rows
        return Strategies(self._leader, sizes, factors, scattered)

    def _pliant(self) -> list[bool]:
        """``[ops]`` whether an op follows its user: constants, broadcasts, and ops on these alone.

        Resharding a small value before its broadcast costs less than resharding the large result.
        """
        program = self._program
        pliant: list[bool] = []
        for number, op in enumerate(program.ops):
            kind = program.kind(number)
            follows = kind in SOURCES and not self._constrained[self._class[number]]
            if op.operands and kind not in LEADERS | {"return"}:
                follows = all(pliant[program.values[v].op] for v in op.operands)
                follows |= kind == "broadcast_in_dim" and self._elements(
                    op.results[0]
                ) > self._elements(op.operands[0])
                follows &= not self._constrained[self._class[number]]
            pliant.append(follows)
        return pliant

    def _elements(self, value: int) -> int:
        return math.prod(self._program.values[value].type.shape)

    def _first_users(self) -> dict[int, tuple[int, int]]:
        """The first use of each op's first result: op and operand number."""
        users: dict[int, tuple[int, int]] = {}
        for number, op in enumerate(self._program.ops):
            for index, value in enumerate(op.operands):
                users.setdefault(self._program.values[value].op, (number, index))
        return users

    # -- leaders -----------------------------------------------------------------------------

    def _decide(self, op_class: int, op: int, pliant: Sequence[bool]) -> None:
        """Lead, or follow the largest operand; of equal ones, that with the longest path to it."""
        operands = self._program.ops[op].operands
        makers = [self._program.values[v].op for v in operands]
        depth = [self._depth[self._class[maker]] for maker in makers]
        self._depth[op_class] = 1 + max(depth, default=0)
        candidates = [
            (self._elements(value), depth[index], -index)
            for index, value in enumerate(operands)
            if self._leader[self._class[makers[index]]] >= 0 and not pliant[makers[index]]
        ]
        if self._program.kind(op) in LEADERS or not candidates or self._constrained[op_class]:
            self._lead(op_class, op)
        else:
            self._follow(op_class, op, -max(candidates)[2])

    def _lead(self, op_class: int, op: int) -> None:
        rows = self._space.choices_of(op_class)
        rows = np.where(rows == NONE, self._none, rows).astype(np.int8)
        if self._space.products[op_class]:
            # Actions on whole colors shard images along space.  With these choices, the program of
            # a U-Net is a third larger, and the plan from its proposals costs 2 % more.
            factors = self._rule(op).factors
            halo = np.array([factor.halo > 0 for factor in factors], dtype=bool)
            rows = rows[~np.pad(halo, (0, self._none + 1 - len(halo)))[rows].any(axis=1)]
        self._leader[op_class] = self._number
        self._number += 1
        self._factors[op_class], scattered = self._with_sums(op_class, op, rows)
        if (scattered != NONE).any():
            self._scattered[op_class] = scattered

    def _with_sums(self, op_class: int, op: int, rows: States) -> tuple[States, States]:
        """The choices, and copies of them with sums scattered along each dimension that fits.

        Alpa turns all-reduces into reduce-scatters after it solves its program; here the program
        decides.
        """
        none = np.full_like(rows, NONE)
        results = self._program.ops[op].results
        rule = self._space.analysis.rules[self._names.signature[op]]
        combined = np.array([bool(f.combiner) for f in rule.factors] or [False])
        summed = np.pad(combined, (0, self._none + 1 - len(combined)))[rows]
        if len(results) != 1 or not summed.any():
            return rows, none
        sizes = np.array(self._sizes)
        shape = self._program.values[results[0]].type.shape
        factor = self._defined(results[0])
        choices, scattered = [rows], [none]
        for d, extent in enumerate(shape):
            here = summed | (rows == factor[d])
            fits = extent % np.where(here, sizes, 1).prod(axis=1) == 0
            chosen = fits & summed.any(axis=1)
            choices.append(rows[chosen])
            scattered.append(np.where(summed[chosen], d, NONE).astype(np.int8))
        return np.concatenate(choices), np.concatenate(scattered)

    # -- followers ---------------------------------------------------------------------------

    def _follow(self, op_class: int, op: int, index: int) -> None:
        """Shard the dimensions that are sharded in the operand."""
        value = self._program.ops[op].operands[index]
        parent = self._class[self._program.values[value].op]
        dims = self._dims(self._factors[parent], self._stacks_defined(value))
        if parent in self._scattered:
            dims = np.where(self._scattered[parent] == NONE, dims, self._scattered[parent])
        self._take(op_class, parent, dims, self._used(op, index))

    def _precede(self, op_class: int, op: int, users: dict[int, tuple[int, int]]) -> None:
        """Shard the result as its first user requires it."""
        user, index = users.get(op, (-1, 0))
        parent = self._class[user] if user >= 0 else op_class
        if self._leader[parent] < 0:
            self._lead(op_class, op)
            return
        dims = self._dims(self._factors[parent], self._rule(user).operands[index])
        self._take(op_class, parent, dims, self._defined(self._program.ops[user].operands[index]))

    def _same(self, op_class: int, op: int, other: int) -> None:
        """Shard the dimensions that are sharded in the tied op."""
        parent = self._class[other]
        result = self._program.ops[other].results[0]
        dims = self._dims(self._factors[parent], self._stacks_defined(result))
        self._take(op_class, parent, dims, self._used(op, 0))

    def _take(self, op_class: int, parent: int, dims: States, factor: Ints) -> None:
        """Follow class ``parent``: give each axis to the factor of the dimension that it shards."""
        self._leader[op_class] = self._leader[parent]
        self._factors[op_class] = self._fitted(
            op_class, np.append(factor, self._none)[dims].astype(np.int8)
        )

    def _fitted(self, op_class: int, rows: States) -> States:
        """``rows`` without the axes whose sizes do not divide the rest of their factors."""
        rows = rows.copy()
        taken = np.ones((len(rows), self._none + 1), dtype=np.int64)
        number = np.arange(len(rows))
        for axis, size in enumerate(self._sizes):
            factor = rows[:, axis].astype(np.int64)
            shards = taken[number, factor] * size
            fits = self._divisor[op_class][factor] % shards == 0
            taken[number, factor] = np.where(fits, shards, taken[number, factor])
            rows[:, axis] = np.where(fits, factor, self._none)
        return rows

    def _dims(self, rows: States, stacks: Sequence[Sequence[int]]) -> States:
        """The dimension that each axis shards, of a tensor whose dimensions have these factors."""
        table = np.full(self._none + 1, NONE, dtype=np.int8)
        for d, stack in enumerate(stacks):
            table[list(stack)] = d
        return table[rows]

    def _rule(self, op: int) -> SignatureRule:
        rule: SignatureRule = self._space.analysis.rules[self._names.signature[op]]
        return rule

    def _stacks_defined(self, value: int) -> Sequence[Sequence[int]]:
        """The factors of each dimension of a value where it is defined."""
        definition = self._program.values[value]
        return self._rule(definition.op).results[definition.result]

    def _defined(self, value: int) -> Ints:
        """The factor of each dimension of a value where it is defined."""
        names = self._names
        rows = slice(names.value_dim[value], names.value_dim[value + 1])
        return np.asarray(names.def_name[rows] - names.first_name[self._program.values[value].op])

    def _used(self, op: int, index: int) -> Ints:
        """The factor of each dimension of an operand."""
        names, use = self._names, int(self._first_use[op]) + index
        rows = slice(names.use_dim[use], names.use_dim[use + 1])
        return np.asarray(names.use_name[rows] - names.first_name[op])
