"""Values whose shardings follow from those around them, so that no constraint has to state them.

XLA merges, moves and removes elementwise ops, broadcasts, reshapes and transposes before its
partitioner runs, but not across a constraint.  With one after each op, a group norm computes in the
tiles of its groups, which takes up to three times the memory and twice the time.

Shardy's propagation gives such an op's result the sharding of the plan if all ops use it as it is
stored: then the shardings of all dimensions that ops tie to one another agree, and no neighbour
adds an axis.  (If an op uses an operand in another sharding, a constraint states that.)  An axis
that no operand has, as of a constant, comes from the ops that use the result, if they are such ops,
too.
"""

from __future__ import annotations

from toast.frontend import mlir
from toast.program import Program, Shardings, Spec
from toast.space import BOUNDARY

#: Ops that XLA simplifies before its partitioner runs.
_SIMPLIFIED = frozenset({
    "abs", "add", "and", "atan2", "broadcast_in_dim", "cbrt", "ceil", "chlo_erf", "chlo_erf_inv",
    "chlo_erfc", "chlo_square", "clamp", "compare", "complex", "convert", "cosine", "divide",
    "exponential", "exponential_minus_one", "floor", "imag", "is_finite", "log", "log_plus_one",
    "logistic", "maximum", "minimum", "multiply", "negate", "or", "power", "real",
    "reduce_precision", "remainder", "reshape", "round_nearest_afz", "round_nearest_even", "rsqrt",
    "select", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "sqrt",
    "stablehlo_not", "subtract", "tan", "tanh", "transpose", "xor",
})  # fmt: skip

#: Ops at the boundary of loops, branches, manual regions and the program.
_BOUNDARIES = BOUNDARY | mlir.OF_REGIONS


def implied_values(program: Program, shardings: Shardings) -> frozenset[int]:
    """The values whose shardings follow from those of the ops around them."""
    stated = {program.ops[op].operands[index] for op, index in shardings.uses}
    stated |= {*shardings.sums}
    used_by_others = set()
    for number, op in enumerate(program.ops):
        if program.kind(number) in _BOUNDARIES:
            stated |= {*op.operands}
        if program.kind(number) not in _SIMPLIFIED:
            used_by_others |= {*op.operands}
        for result in op.results:
            if result in shardings.sums:
                # Propagation would scatter, as the sum, what the op adds to.
                scattered = _axes(shardings.of(program, result)) - _axes(shardings.sums[result])
                for operand in op.operands:
                    if scattered - _axes(shardings.of(program, operand)):
                        stated.add(operand)
    implied = set()
    for number, op in enumerate(program.ops):
        if program.kind(number) not in _SIMPLIFIED or len(op.results) != 1:
            continue
        (value,) = op.results
        axes = _axes(shardings.of(program, value))
        for index in range(len(op.operands)):
            axes -= _axes(shardings.at(program, number, index))
        # Not every op shards operands as its result.
        if value not in stated and not (axes and value in used_by_others):
            implied.add(value)
    return frozenset(implied)


def _axes(spec: Spec) -> set[str]:
    return {axis for axes in spec for axis in axes}
