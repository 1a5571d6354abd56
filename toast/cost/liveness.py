"""What exists in memory, and for how long (paper, section 4.5: live range analysis).

XLA fuses elementwise ops, broadcasts and the like into their consumers, so most values never
exist.  What remains are the results of ops that fusion stops at, and of fusible ops that such an
op, or the caller, needs in memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from toast.frontend import Program

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Ops that XLA's fusion stops at: their operands and results are in memory.
MATMULS = frozenset({"dot_general", "dot", "convolution"})
BARRIERS = MATMULS | {
    "scatter", "sort", "custom_call", "fft", "cholesky", "triangular_solve", "while", "case", "if",
    "rng_bit_generator", "rng", "select_and_scatter", "chlo_top_k", "optimization_barrier",
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute", "composite",
    "carry", "yield",
}  # fmt: skip

#: Fusible, but recomputing them in every consumer costs more than keeping them.
_EXPENSIVE = frozenset({
    "exponential", "exponential_minus_one", "log", "log_plus_one", "tanh", "logistic", "power",
    "divide", "sine", "cosine", "tan", "sqrt", "rsqrt", "cbrt", "atan2", "chlo_erf", "reduce",
    "reduce_window", "gather", "concatenate", "dynamic_update_slice", "pad",
})  # fmt: skip

#: Made where they are needed; they never exist.
_SOURCES = frozenset({"constant", "iota"})

#: Fused into the reductions' and other consumers' loops: a reduce's result exists.
_ROOTS = frozenset({"reduce", "reduce_window", "dynamic_update_slice", "concatenate", "gather"})


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Which values exist and the program points at which they do."""

    #: ``[values]`` whether XLA keeps the value in memory (arguments always).
    exists: Bools
    #: ``[values]`` whether the value overwrites a donated argument's buffer.
    aliased: Bools
    #: ``[values]`` op that defines the value.
    start: Ints
    #: ``[values]`` last op whose kernel reads the value, looking through values that are fused.
    end: Ints
    #: ``[uses]`` last op whose kernel reads the value through this use.
    use_end: Ints


def liveness(program: Program, use_op: Ints, use_value: Ints) -> Liveness:
    """Live ranges of a program whose uses are ``(use_op[i], use_value[i])`` in program order."""
    count = len(program.values)
    kinds = [signature.kind for signature in program.signatures]
    kind_of_op = [kinds[op.signature] for op in program.ops]
    uses: list[list[int]] = [[] for _ in range(count)]
    for op, value in zip(use_op.tolist(), use_value.tolist(), strict=True):
        uses[value].append(op)
    exists = np.zeros(count, dtype=bool)
    for number, value in enumerate(program.values):
        kind = kind_of_op[value.op]
        users = uses[number]
        if kind in _SOURCES:
            continue
        needed = any(kind_of_op[u] in BARRIERS or kind_of_op[u] == "return" for u in users)
        kept = len(set(users)) > 1 and kind in _EXPENSIVE
        root = kind in BARRIERS or kind in _ROOTS or kind == "argument"
        exists[number] = root or needed or kept
    start = np.array([value.op for value in program.values], dtype=np.int64)
    last = len(program.ops)
    aliased = np.zeros(count, dtype=bool)
    end = start.copy()
    for result, alias in zip(program.result_values, program.aliases, strict=True):
        if alias >= 0:
            aliased[result] = True
        else:
            end[result] = last
    _share_loop_buffers(program, kind_of_op, aliased)
    # A fused value is read where its consumers are computed: in reverse order, each op's kernel
    # ends with the last of those that it is fused into.
    kernel_end = _kernel_ends(program, uses, exists)
    use_end = kernel_end[use_op]
    np.maximum.at(end, use_value, use_end)
    _extend_shared(program, kind_of_op, aliased, end)
    return Liveness(exists, aliased, start, end, use_end)


def _share_loop_buffers(program: Program, kinds: list[str], aliased: Bools) -> None:
    """Mark what XLA computes in place: results of loops, and updates of a part of a value."""
    for number, op in enumerate(program.ops):
        if kinds[number] == "yield" or (
            kinds[number] == "dynamic_update_slice"
            and kinds[program.values[op.operands[0]].op] != "argument"
        ):
            aliased[op.results[0]] = True


def _extend_shared(program: Program, kinds: list[str], aliased: Bools, end: Ints) -> None:
    """A buffer lives as long as the last value that is kept in it."""
    carry_of = {op: other for op, other in program.ties if kinds[op] == "yield"}
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        if number in carry_of:
            buffer = program.ops[carry_of[number]].results[0]
            end[buffer] = max(end[buffer], number, end[op.results[0]])
        elif kinds[number] == "dynamic_update_slice" and aliased[op.results[0]]:
            end[op.operands[0]] = max(end[op.operands[0]], end[op.results[0]])


def _kernel_ends(program: Program, uses: list[list[int]], exists: Bools) -> Ints:
    ends: Any = list(range(len(program.ops)))
    for number in range(len(program.ops) - 1, -1, -1):
        results = program.ops[number].results
        if results and not exists[results[0]]:
            for value in results:
                for user in uses[value]:
                    if ends[user] > ends[number]:
                        ends[number] = ends[user]
    return np.array(ends, dtype=np.int64)
