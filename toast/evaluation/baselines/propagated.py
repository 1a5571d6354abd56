"""Shardy's own propagation of argument shardings, as states that TOAST's cost model can price.

Searches over shardings of arguments (AutoMap's) leave the rest of the program to the compiler's
propagation.  Here it is Shardy's, as it stands in jaxlib.  It gives every value a sharding; what
each op computes in is then the factor, for each mesh axis, for which least has to be moved between
the shardings of its operands and results.
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

#: Ops of which one result of the MLIR operation is theirs: the one that their operand stands at.
_ONE_OF_MANY = frozenset({"carry", "yield", "join", "optimization_barrier"})

#: Ops that compute nothing: their state is the sharding of what they define, whatever they take.
_STORED = frozenset({"carry"})

#: Ops on constants that stand behind one another at most, where Shardy merged or copied them.
_CHAIN = 16


class Sharded(NamedTuple):
    """What Shardy made of shardings of arguments."""

    #: ``[ops, axes]`` in a space that is not collapsed.
    state: States
    #: Sharding of each argument.
    arguments: tuple[Spec, ...]
    #: Sharding of every operation, for a further action to start from.
    propagated: Propagated


class Propagator:
    """Runs Shardy's propagation on a program and reads the result as a state of a space."""

    def __init__(self, space: Space) -> None:
        """Write the module once.

        ``space`` must have a class per op: ``Space(analysis, mesh, collapse=False)``.  Raises
        :class:`toast.errors.PlanError` when the program is a fact base and has no module.
        """
        program, names = space.analysis.program, space.analysis.names
        if not isinstance(program.source, ModuleSource):
            raise PlanError(f"{program.name} is a fact base and has no program to propagate in")
        self.space, self._program, self._names = space, program, names
        self._axis = {name: a for a, name in enumerate(space.mesh.names)}
        module = mlir.clone(program.source.module)
        # The copy reads as the same program, so its operations are those of the program's ops.
        source: ModuleSource = stablehlo.from_module(module, name=program.name).source
        operations = list(dict.fromkeys(o for o in source.operations if o is not None))
        number = {operation: i for i, operation in enumerate(operations)}
        self._ops_of: list[list[int]] = [[] for _ in operations]
        self._result_of: dict[int, int] = {}  # of ops that have one of an operation's results
        for op, operation in enumerate(source.operations):
            if operation is not None and program.ops[op].results:
                self._ops_of[number[operation]].append(op)
                if program.kind(op) in _ONE_OF_MANY:
                    self._result_of[op] = source.operand_sites[op, 0][1]
        self._shardy = mlir.Propagation(module, space.mesh.axes, operations)
        self._single = np.array([
            ops[0] if len(ops) == 1 and ops[0] not in self._result_of else -1
            for ops in self._ops_of
        ], dtype=np.int64)  # fmt: skip
        self._prepare()

    def _prepare(self) -> None:
        """Rows: the dimensions of all definitions, then those of all uses."""
        program, names = self._program, self._names
        ranks = np.diff(names.value_dim)
        value = np.repeat(np.arange(len(ranks)), ranks)
        use = np.repeat(np.arange(len(names.use_op)), np.diff(names.use_dim))
        place = np.arange(len(use)) - names.use_dim[use]
        #: Definition row that each use row sees.
        self._seen: Ints = names.value_dim[names.use_value[use]] + place
        self._use = use
        self._row_name: Ints = np.concatenate([names.def_name, names.use_name])
        #: Tensors: all values as defined, then all uses.
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
        """Propagate shardings of arguments, by number, from nothing or from ``before``.

        Propagation never takes back what was decided ``before``: so actions have priority in their
        order.  A result that overwrites an argument is sharded as it is.
        """
        program = self._program
        given: list[Spec] = list(before.arguments) if before else [()] * len(program.arguments)
        for argument, spec in arguments.items():
            given[argument] = spec
        results: list[Spec] = [given[alias] if alias >= 0 else () for alias in program.aliases]
        found = self._shardy.run(given, results, before.propagated if before else None)
        specs = tuple(
            spec if spec is not None else ((),) * len(program.values[v].type.shape)
            for spec, v in zip(found.arguments, program.argument_values, strict=True)
        )
        return Sharded(self._state(found, specs), specs, found)

    # -- from shardings of values to a state ---------------------------------------------------

    def _state(self, found: Propagated, arguments: Sequence[Spec]) -> States:
        defined, lost = self._defined(found, arguments)
        rows = np.concatenate([defined, defined[self._seen]])
        rows[len(defined) + self._returned] = self._result_rows(found)
        rows &= (self._row_size > 1)[:, None]
        state = self.space.initial.copy()
        for axis in range(len(self._sizes)):
            if self._sizes[axis] > 1:
                self._choose(state, rows, axis)
        return self._follow_uses(state, lost)

    def _block(self, specs: Sequence[Spec]) -> Bools:
        """``[dimensions, axes]`` of some tensors."""
        dims = [axes for spec in specs for axes in spec]
        block = np.zeros((len(dims), len(self._sizes)), dtype=bool)
        for d, axes in enumerate(dims):
            block[d, [self._axis[a] for a in axes]] = True
        return block

    def _defined(self, found: Propagated, arguments: Sequence[Spec]) -> tuple[Bools, Ints]:
        """Axes of each dimension of each value, and the ops that are not there just once."""
        names = self._names
        defined = np.zeros((len(names.def_name), len(self._sizes)), dtype=bool)
        numbers, kind_of = (np.array(a, dtype=np.int64) for a in (found.numbers, found.kind_of))
        single = self._single[numbers]
        for kind, specs in enumerate(found.kinds):
            block = self._block(specs)
            ops = single[(kind_of == kind) & (single >= 0)]
            ops = ops[self._rows_of[ops] == len(block)]
            defined[self._first_row[ops][:, None] + np.arange(len(block))] = block
        several = (single < 0) & (kind_of >= 0)
        for number, kind in zip(numbers[several].tolist(), kind_of[several].tolist(), strict=True):
            for op in self._ops_of[number]:
                part = found.kinds[kind]
                if op in self._result_of:
                    part = part[self._result_of[op] : self._result_of[op] + 1]
                block = self._block(part)
                if len(block) == self._rows_of[op]:
                    first = self._first_row[op]
                    defined[first : first + len(block)] = block
        # The first ops are the arguments, the first values and rows theirs.
        block = self._block(arguments)
        defined[: len(block)] = block
        times = np.bincount(numbers, minlength=len(self._single))
        lost = self._single[(times != 1) & (self._single >= 0)]
        for op in lost.tolist():
            defined[self._first_row[op] : self._first_row[op] + self._rows_of[op]] = False
        return defined, lost

    def _result_rows(self, found: Propagated) -> Bools:
        program = self._program
        return self._block(
            [
                spec if spec is not None else ((),) * len(program.values[v].type.shape)
                for spec, v in zip(found.results, program.result_values, strict=True)
            ]
        )

    def _choose(self, state: States, rows: Bools, axis: int) -> None:
        """Give ``axis`` in each op to the factor for which least has to be moved.

        An operand is gathered if it does not have the factor, exchanged if the axis is elsewhere on
        it; so is a result, which is summed, in parts if it is sharded, where the factor is reduced.
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
        # Bytes to move for each tensor if it does not have the factor: an operand is gathered, a
        # result summed (twice the bytes, or once in parts).  Then what changes where it does.
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
        # Least moved first; among equals what the result has.
        order = np.lexsort((~in_result[chosen], cost[chosen], names.name_op[chosen]))
        chosen = chosen[order]
        first = np.r_[True, np.diff(names.name_op[chosen]) > 0] if len(chosen) else []
        chosen = chosen[first]
        state[names.name_op[chosen], axis] = factor[chosen]

    def _follow_uses(self, state: States, lost: Ints) -> States:
        """Ops on constants, which Shardy copies for each use, as all their uses want them."""
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
