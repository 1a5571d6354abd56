"""Shardy's propagation of argument shardings, as states that TOAST's cost model can price.

A search over shardings of arguments (AutoMap) leaves the rest of the program to the compiler's
propagation, here that of Shardy in jaxlib.  Propagation gives every value a sharding.  For each op
and mesh axis, the state then has the factor for which the least data moves between the shardings of
its operands and results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast.errors import PlanError
from toast.frontend import mlir, stablehlo
from toast.frontend.mlir import ModuleSource, Propagated
from toast.program import Spec, element_bytes
from toast.space import NONE, Space, States

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: Ops that correspond to one result of an MLIR operation: that with the number of their operand.
_ONE_OF_MANY = frozenset({
    "carry", "yield", "join", "optimization_barrier", "manual_exit",
})  # fmt: skip

#: Ops that compute nothing: their state follows from their result alone.
_STORED = frozenset({"carry"})

#: Maximum length of chains of ops on constants, which Shardy merges or copies.
_CHAIN = 16


class Sharded(NamedTuple):
    """The result of propagation."""

    #: ``[ops, axes]`` in a space that is not collapsed.
    state: States
    #: The sharding of each argument.
    arguments: tuple[Spec, ...]
    #: The sharding of every operation, from which a further action can start.
    propagated: Propagated


class Propagator:
    """Runs Shardy's propagation on a program and converts the result into a state."""

    def __init__(self, space: Space) -> None:
        """Prepare the module of a program.

        ``space`` must have one class per op: ``Space(analysis, mesh, collapse=False)``.  Raises
        :class:`toast.errors.PlanError` if the program is a fact base.
        """
        program, names = space.analysis.program, space.analysis.names
        if not isinstance(program.source, ModuleSource):
            raise PlanError(f"{program.name} is a fact base; propagation needs a program")
        self.space, self._program, self._names = space, program, names
        self._axis = {name: a for a, name in enumerate(space.mesh.names)}
        module = mlir.clone(program.source.module)
        # The copy is the same program, so its operations correspond to the program's ops.
        source: ModuleSource = stablehlo.from_module(module, name=program.name).source
        operations = list(dict.fromkeys(o for o in source.operations if o is not None))
        number = {operation: i for i, operation in enumerate(operations)}
        self._ops_of: list[list[int]] = [[] for _ in operations]
        self._result_of: dict[int, int] = {}  # for ops with one of an operation's results
        for op, operation in enumerate(source.operations):
            # The value in a region has no sharding of its own: it follows from its uses.
            entry = program.kind(op) == "manual_entry"
            if operation is not None and program.ops[op].results and not entry:
                self._ops_of[number[operation]].append(op)
                if program.kind(op) in _ONE_OF_MANY:
                    self._result_of[op] = source.operand_sites[op, 0][1]
        self._shardy = mlir.Propagation(
            module, space.mesh.axes, operations, dict(space.resolved.regions.matched)
        )
        self._single = np.array([
            ops[0] if len(ops) == 1 and ops[0] not in self._result_of else -1
            for ops in self._ops_of
        ], dtype=np.int64)  # fmt: skip
        self._prepare()

    def _prepare(self) -> None:
        """Tables of rows: the dimensions of all definitions, then those of all uses."""
        program, names = self._program, self._names
        ranks = np.diff(names.value_dim)
        value = np.repeat(np.arange(len(ranks)), ranks)
        use = np.repeat(np.arange(len(names.use_op)), np.diff(names.use_dim))
        place = np.arange(len(use)) - names.use_dim[use]
        #: ``[uses]`` the row of the definition.
        self._seen: Ints = names.value_dim[names.use_value[use]] + place
        self._use = use
        self._row_name: Ints = np.concatenate([names.def_name, names.use_name])
        #: ``[rows]`` the tensor of each row: all values at their definition, then all uses.
        self._row_tensor: Ints = np.concatenate([value, len(ranks) + use])
        self._row_size: Ints = np.concatenate([names.dim_size, names.dim_size[self._seen]])
        self._tensor_op: Ints = np.concatenate([names.value_op, names.use_op])
        size = np.array([
            float(np.prod(v.type.shape, dtype=np.float64)) * element_bytes(v.type.dtype)
            for v in program.values
        ])  # fmt: skip
        self._tensor_bytes: Floats = np.concatenate([size, size[names.use_value]])
        self._operand: Bools = np.arange(len(self._tensor_op)) >= len(ranks)
        stored = np.array([program.kind(op) in _STORED for op in range(len(program.ops))])
        self._no_say: Bools = (stored[self._tensor_op] & self._operand)[self._row_tensor]
        self._first_row: Ints = np.array(
            [names.value_dim[op.results[0]] if op.results else 0 for op in program.ops],
            dtype=np.int64,
        )
        self._rows_of: Ints = np.array([
            sum(len(program.values[v].type.shape) for v in op.results) for op in program.ops
        ], dtype=np.int64)  # fmt: skip
        first_return = len(program.ops) - len(program.results)
        self._returned = np.flatnonzero(names.use_op[use] >= first_return)
        self._sizes = self.space.axis_sizes

    def run(self, arguments: Mapping[int, Spec], before: Sharded | None = None) -> Sharded:
        """Propagate shardings of arguments, given by number, optionally from an earlier result.

        Propagation keeps the shardings of ``before``, so earlier actions have priority.  A result
        that overwrites an argument has the argument's sharding.
        """
        program = self._program
        wanted: list[Spec] = list(before.arguments) if before else [()] * len(program.arguments)
        for argument, spec in arguments.items():
            wanted[argument] = spec
        results: list[Spec] = [wanted[alias] if alias >= 0 else () for alias in program.aliases]
        propagated = self._shardy.run(wanted, results, before.propagated if before else None)
        specs = tuple(
            spec if spec is not None else ((),) * len(program.values[v].type.shape)
            for spec, v in zip(propagated.arguments, program.argument_values, strict=True)
        )
        return Sharded(self._state(propagated, specs), specs, propagated)

    # -- from shardings of values to a state ---------------------------------------------------

    def _state(self, propagated: Propagated, arguments: Sequence[Spec]) -> States:
        defined, lost = self._defined(propagated, arguments)
        rows = np.concatenate([defined, defined[self._seen]])
        rows[len(defined) + self._returned] = self._result_rows(propagated)
        rows &= (self._row_size > 1)[:, None]
        state = self.space.initial.copy()
        for axis in range(len(self._sizes)):
            if self._sizes[axis] > 1:
                self._choose(state, rows, axis)
        return self.space.within(self._follow_uses(state, lost))

    def _block(self, specs: Sequence[Spec]) -> Bools:
        """``[dimensions, axes]`` whether an axis shards a dimension of the tensors."""
        dims = [axes for spec in specs for axes in spec]
        block = np.zeros((len(dims), len(self._sizes)), dtype=bool)
        for d, axes in enumerate(dims):
            block[d, [self._axis[a] for a in axes]] = True
        return block

    def _defined(self, propagated: Propagated, arguments: Sequence[Spec]) -> tuple[Bools, Ints]:
        """``[rows, axes]`` of all definitions, and the ops that occur zero or several times."""
        names = self._names
        defined = np.zeros((len(names.def_name), len(self._sizes)), dtype=bool)
        numbers, kind_of = (
            np.array(a, dtype=np.int64) for a in (propagated.numbers, propagated.kind_of)
        )
        single = self._single[numbers]
        for kind, specs in enumerate(propagated.kinds):
            block = self._block(specs)
            ops = single[(kind_of == kind) & (single >= 0)]
            ops = ops[self._rows_of[ops] == len(block)]
            defined[self._first_row[ops][:, None] + np.arange(len(block))] = block
        several = (single < 0) & (kind_of >= 0)
        for number, kind in zip(numbers[several].tolist(), kind_of[several].tolist(), strict=True):
            for op in self._ops_of[number]:
                part = propagated.kinds[kind]
                if op in self._result_of:
                    part = part[self._result_of[op] : self._result_of[op] + 1]
                block = self._block(part)
                if len(block) == self._rows_of[op]:
                    first = self._first_row[op]
                    defined[first : first + len(block)] = block
        # The first ops, values and rows are those of the arguments.
        block = self._block(arguments)
        defined[: len(block)] = block
        times = np.bincount(numbers, minlength=len(self._single))
        lost = self._single[(times != 1) & (self._single >= 0)]
        for op in lost.tolist():
            defined[self._first_row[op] : self._first_row[op] + self._rows_of[op]] = False
        return defined, lost

    def _result_rows(self, propagated: Propagated) -> Bools:
        program = self._program
        return self._block(
            [
                spec if spec is not None else ((),) * len(program.values[v].type.shape)
                for spec, v in zip(propagated.results, program.result_values, strict=True)
            ]
        )

    def _choose(self, state: States, rows: Bools, axis: int) -> None:
        """Give ``axis`` in each op to the factor that moves the least data.

        An operand is gathered if it does not have the factor, and exchanged if the axis shards
        another dimension; so is a result.  If the factor is reduced, the result is summed, and
        scattered if it is sharded.
        """
        names, size = self._names, int(self._sizes[axis])
        here = rows[:, axis]
        if not here.any():
            return
        tensors = len(self._tensor_op)
        others = np.where(np.delete(rows, axis, axis=1), np.delete(self._sizes, axis), 1)
        shards = np.ones(tensors)
        np.multiply.at(shards, self._row_tensor, others.prod(axis=1))
        moved = self._tensor_bytes / shards
        held = np.bincount(self._row_tensor[here], minlength=tensors) > 0
        # Bytes to move for each tensor without the factor: an operand is gathered, a result is
        # summed (twice the bytes, or once if it is scattered).  Then the change for tensors with
        # the factor.
        without = np.where(self._operand, held * 1.0, np.where(held, 1.0, 2.0)) * moved
        base = np.bincount(self._tensor_op, without, minlength=len(names.signature))
        tensor = self._row_tensor
        elsewhere = held[tensor] & ~here
        having = np.where(
            elsewhere, 1.0 / size, np.where(held[tensor] | self._operand[tensor], 0.0, 1.0)
        )
        change = having * moved[tensor] - without[tensor]
        cost = base[names.name_op] + np.bincount(self._row_name, change, minlength=names.count)
        asked = np.zeros(names.count, dtype=bool)
        asked[self._row_name[here & ~self._no_say]] = True
        in_result = np.zeros(names.count, dtype=bool)
        in_result[self._row_name[here & ~self._operand[tensor]]] = True
        factor = np.arange(names.count) - names.first_name[names.name_op]
        divisor = self.space.classes.divisor[names.name_op, factor]
        used = np.where(state[names.name_op] == factor[:, None], self._sizes, 1).prod(axis=1)
        fits = names.shardable & (divisor % (used * size) == 0)
        chosen = np.flatnonzero(asked & fits)
        # The least data first; of equal factors, those of the result.
        order = np.lexsort((~in_result[chosen], cost[chosen], names.name_op[chosen]))
        chosen = chosen[order]
        first = np.r_[True, np.diff(names.name_op[chosen]) > 0] if len(chosen) else []
        chosen = chosen[first]
        state[names.name_op[chosen], axis] = factor[chosen]

    def _follow_uses(self, state: States, lost: Ints) -> States:
        """Shard ops on constants, which Shardy copies for each use, as all their uses agree."""
        names = self._names
        mine = np.zeros(len(names.signature), dtype=bool)
        mine[lost] = True
        rows = np.flatnonzero(mine[names.value_op[names.use_value[self._use]]])
        if not len(rows):
            return state
        seen = self._seen[rows]
        user = names.use_op[self._use[rows]]
        factor = names.use_name[rows] - names.first_name[user]
        definer = names.value_op[names.use_value[self._use[rows]]]
        target = names.def_name[seen] - names.first_name[definer]
        divisor = self.space.classes.divisor
        uses = np.bincount(seen, minlength=len(names.def_name))
        for _ in range(_CHAIN):
            before = state.copy()
            for axis, size in enumerate(self._sizes.tolist()):
                if size == 1:
                    continue
                state[lost, axis] = NONE
                wanted = state[user, axis] == factor
                count = np.bincount(seen[wanted], minlength=len(names.def_name))
                agreed = wanted & (count[seen] == uses[seen])
                shards = np.where(state[definer] == target[:, None], self._sizes, 1).prod(axis=1)
                agreed &= names.shardable[names.def_name[seen]]
                agreed &= divisor[definer, target] % (shards * size) == 0
                state[definer[agreed], axis] = target[agreed]
            if (state == before).all():
                break
        return state
