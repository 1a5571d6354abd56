"""Which products could run beside a collective: those that it neither waits for nor feeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toast.frontend import Program

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def independent_work(
    program: Program, use_op: Ints, use_value: Ints, products: Sequence[int], work: Floats
) -> tuple[Floats, Floats]:
    """Shares of all products' work that are independent of each definition and of each use.

    ``products`` are ops and ``work`` what each costs.  Work counts as independent of what happens
    to a value between its definition and a use if it is no ancestor of the value and no descendant
    of the use.  Returns ``[values]`` (from the definition to its first descendants) and ``[uses]``.
    """
    bit = {op: 1 << number for number, op in enumerate(products)}
    above = [0] * len(program.values)  # products that a value needs
    for number, op in enumerate(program.ops):
        found = bit.get(number, 0)
        for value in op.operands:
            found |= above[value]
        for value in op.results:
            above[value] = found
    # Products that need what an op makes, the op included.
    below = [0] * len(program.ops)
    reached = [0] * len(program.values)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        found = bit.get(number, 0)
        for value in op.results:
            found |= reached[value]
        below[number] = found
        for value in op.operands:
            reached[value] |= found
    of_value = [above[v] | reached[v] for v in range(len(program.values))]
    of_use = [
        above[value] | below[op]
        for op, value in zip(use_op.tolist(), use_value.tolist(), strict=True)
    ]
    share = _weighed([*of_value, *of_use], work)
    return 1 - share[: len(of_value)], 1 - share[len(of_value) :]


def _weighed(sets: list[int], work: Floats) -> Floats:
    """The share of ``work`` in each set of bits."""
    distinct: dict[int, int] = {}
    index = [distinct.setdefault(s, len(distinct)) for s in sets]
    width = max(1, (len(work) + 7) // 8)
    packed = b"".join(s.to_bytes(width, "little") for s in distinct)
    bits = np.unpackbits(
        np.frombuffer(packed, dtype=np.uint8).reshape(-1, width), axis=1, bitorder="little"
    )[:, : len(work)]
    total = float(work.sum())
    weighed = bits @ work / total if total else np.ones(len(bits))
    return np.asarray(weighed[index])
