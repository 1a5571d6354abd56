"""Values whose shardings follow from those around them, so that no constraint has to state them.

XLA merges, moves and removes elementwise ops, broadcasts, reshapes and transposes before its
partitioner runs, but not across a constraint.  With one after each op, a group norm computes in the
tiles of its groups, which takes up to three times the memory and twice the time.

Shardy's propagation gives such an op's result the sharding of the plan if all ops use it as it is
stored: then the shardings of all dimensions that ops tie to one another agree, and no neighbour
adds an axis.  (If an op uses an operand in another sharding, a constraint states that.)  An axis
that no op before decides, as of a constant, comes from an op that uses the value.  If that is
an op of another kind, it may not tie that axis to the value, and a constraint states it.
"""

from __future__ import annotations

from toast.cost.liveness import SOURCES
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
    # Ops of other kinds do not shard all their operands as they shard their results.
    of_others = set[int]()
    for number, op in enumerate(program.ops):
        if program.kind(number) in _BOUNDARIES:
            stated |= {*op.operands}
        if program.kind(number) not in _SIMPLIFIED:
            of_others |= {*op.operands}
    # By value, the axes that ops before it, or constraints, decide; and those of them that do not
    # come through a broadcast: propagation may shard the operands of a sum along others before it
    # reaches what a broadcast says.
    known, certain = dict[int, set[str]](), dict[int, set[str]]()
    implied = set[int]()
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        for value in op.results:
            axes = _axes(shardings.of(program, value))
            if value in shardings.sums:
                # Propagation would scatter, as the sum, what the op adds to.
                scattered = axes - _axes(shardings.sums[value])
                implied -= {v for v in op.operands if scattered - certain[v]}
            if kind in SOURCES:  # never stated
                known[value] = certain[value] = set()
                continue
            known[value] = certain[value] = axes
            if kind not in _SIMPLIFIED or len(op.results) != 1 or value in stated:
                continue
            before, surely = set[str](), set[str]()
            for index, operand in enumerate(op.operands):
                used = _axes(shardings.at(program, number, index))
                resharded = (number, index) in shardings.uses
                before |= used if resharded else used & known[operand]
                surely |= used if resharded else used & certain[operand]
            if not (axes - before and value in of_others):
                implied.add(value)
                known[value] = axes & before
                certain[value] = axes & surely if kind != "broadcast_in_dim" else set()
    return frozenset(implied)


def _axes(spec: Spec) -> set[str]:
    return {axis for axes in spec for axis in axes}
