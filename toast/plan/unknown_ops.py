"""Shardings of ops that a plan does not know, from those around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from toast.space import NONE, PRODUCTS, Space

#: Ops that may sum over devices.
_SUMMING = PRODUCTS | {"reduce", "gather", "scatter"}

#: How often unknown ops look at known ones around them.
_ROUNDS = 4


def follow(op_state: npt.NDArray[np.int8], known: npt.NDArray[np.bool_], space: Space) -> None:
    """Shards unknown ops as the next user of their value, or as their operands; known from then.

    Of several operands, it is that with the most axes: masks are not sharded over the batch.  JAX
    rounds, names, stacks and moves the values that a policy keeps.
    """
    program, analysis = space.analysis.program, space.analysis
    rules = [analysis.rules[number] for number in analysis.names.signature.tolist()]

    def row(own: Sequence[Sequence[int]], other: int, its: Sequence[Any]) -> list[int]:
        dims = {factor: d for d, stack in enumerate(its) for factor in stack}
        places = [dims.get(factor, -1) for factor in op_state[other].tolist()]
        return [own[d][0] if 0 <= d < len(own) and own[d] else NONE for d in places]

    def forward(*, sums: bool) -> None:
        for number in np.flatnonzero(~known).tolist():
            rows = []
            for index, value in enumerate(program.ops[number].operands):
                made = program.values[value]
                # A sum may be scattered as its users need it.
                waits = not sums and program.kind(made.op) in _SUMMING
                if known[made.op] and made.type.shape and not waits:
                    its = rules[made.op].results[made.result]
                    rows.append(row(rules[number].operands[index], made.op, its))
            if rows:
                op_state[number] = max(rows, key=lambda each: sum(f != NONE for f in each))
                known[number] = True

    for _ in range(_ROUNDS):
        forward(sums=False)
        for number in np.flatnonzero(~known).tolist()[::-1]:
            for value in program.ops[number].results[:1]:
                user = next(iter(program.users[value]), -1)
                index = program.ops[user].operands.index(value) if user >= 0 else 0
                if user >= 0 and known[user] and index < len(rules[user].operands):
                    its = rules[user].operands[index]
                    op_state[number] = row(rules[number].results[0], user, its)
                    known[number] = True
    forward(sums=True)


__all__ = ["follow"]
