"""What pricing needs to know of a program, gathered once per decision space.

Everything is per class: op classes (:mod:`toast.space`), **slots** (a tensor at a place of an op
class), **value classes** (values defined at one slot and used at the same slots) and **use
classes** (a value class at one of its use slots).  A price is a sum over classes times their
counts; only the memory timeline goes back to single values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy import sparse

from toast.cost.liveness import BARRIERS, EXPENSIVE, SOURCES, Liveness, liveness
from toast.cost.overlap import Windows, windows
from toast.frontend import Program, element_bytes
from toast.space import NONE, PRODUCTS, Space

if TYPE_CHECKING:
    from toast.analysis.rules import SignatureRule

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

#: Ops whose results are in memory already: nothing is written, or only a part.
_IN_PLACE = frozenset({"argument", "carry", "yield", "dynamic_update_slice"})

#: Uses that are no kernel of their own, or read no more than they write.
_READ_NOTHING = frozenset({
    "return", "carry", "yield", "gather", "dynamic_slice", "dynamic_update_slice",
})  # fmt: skip

#: Ops whose sums over many devices XLA does not take in parts.
_SUMMED_WHOLE = frozenset({"gather", "scatter"})

#: Values smaller than this fraction of all memory do not shape the timeline's peak.
NEGLIGIBLE = 1e-6


@dataclasses.dataclass(frozen=True)
class Tables:
    """Static arrays; ``K`` op classes, ``T`` slots, ``C`` value classes, ``U`` use classes."""

    # Slots.
    slot_class: Ints  # [T] op class of each slot
    slot_dim: npt.NDArray[np.int8]  # [T, F + 1] dimension a factor shards; last column: none
    # Op classes.
    count: Ints  # [K] ops in each class
    flops: Floats  # [K] floating-point operations of one op
    peak_dtype: tuple[str, ...]  # [K] element type that decides the peak FLOP/s
    matmul: Bools  # [K]
    tensor_slot: Ints  # [rows] slots of matmul classes, for their roofline
    tensor_class: Ints  # [rows]
    tensor_bytes: Floats  # [rows]
    product_class: Ints  # [P] matmul classes
    product_size: Floats  # [P, 3] rows, columns and depth of one product
    product_group: Ints  # [P, F + 1] what a factor shards of them: 0, 1, 2, or 3 for neither
    #: ``[K, F + 1]`` what a shard along a permutation factor needs of its neighbours, as a fraction
    #: of the result's dimension; infinite for another whole shard, 0 of other factors.
    halo: Floats
    # Value classes.
    value_slot: Ints  # [C] slot that defines it
    value_count: Ints  # [C]
    value_bytes: Floats  # [C] unsharded bytes
    value_sizes: Ints  # [C, R] elements along each dimension, 1 beyond its rank
    value_written: Bools  # [C] its definition is a memory-bound kernel that writes it
    value_merged: (
        Bools  # [C] a product's result that its one consumer takes in, unless it is summed
    )
    value_transcendentals: Floats  # [C] exponentials and the like, of all its values in a step
    summed_whole: Bools  # [C] XLA sums it over many devices whole, even where parts would do
    product_operand: Ints  # [rows] value classes that products take, in order,
    product_result: Ints  # [rows] with the value classes that these make
    product_along: Bools  # [rows, R] dimensions of these that the operand has as well
    reduces: Bools  # [C, F + 1] the defining op reduces over the factor
    # Use classes, those of one value class next to each other.
    use_value: Ints  # [U] value class
    use_slot: Ints  # [U]
    use_first: Ints  # [C'] first use class of each value class that is used
    used_value: Ints  # [C'] that value class
    use_count: Floats  # [U] how often it is used there, as a reshard counts
    use_number: Ints  # [U] uses in the program's text
    use_reads: Floats  # [U] memory-bound kernels that read it there
    use_constant: Floats  # [U] 1 where the value is made of constants: nobody has to send it
    use_share: Floats  # [U] bytes of an element there over those of the value: rounded for products
    #: Sums in parts that are added up before they are summed over devices: rows of a value class,
    #: one that its collective is merged with, and the share of its values that this holds for;
    #: by value class.
    merge_class: Ints
    merge_with: Ints
    merge_share: Floats
    windows: Windows  # which products collectives may run beside
    #: Pairs (later, earlier) of use classes of one value class, by distance 1, 2, ...
    pairs: tuple[tuple[Ints, Ints], ...]
    # Timeline: columns are value classes, use classes, pairs, and thrice value classes.
    event_column: Ints  # [events] in program order
    event_sign: Floats  # [events] +1 allocates, -1 frees
    event_op: Ints  # [events]
    event_value: Ints  # [events] the program's value
    #: ``[moments, columns]`` how each column grows from one local peak of memory to the next.
    growth: sparse.csr_array
    argument_columns: Ints  # [arguments] value class of each argument
    result_columns: Ints  # [results] use class of each result
    # Back to the program.
    value_class: Ints  # [values]
    use_class: Ints  # [uses]
    live: Liveness


def build(space: Space, *, product_operands: str = "") -> Tables:
    """Gather the tables of a decision space.

    ``product_operands`` is what products round float32 operands to.
    """
    analysis = space.analysis
    program, names, classes = analysis.program, analysis.names, space.classes
    factors = classes.divisor.shape[1]
    slots = _Slots(space)
    value_slot = np.array([slots.result(v.op, v.result) for v in program.values], dtype=np.int64)
    use_slot = np.array(
        [
            slots.operand(op, index)
            for op, index in zip(names.use_op.tolist(), names.use_index.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    # Tied ops share their names, so their tensors are those of the op they are tied to.
    for op, other in program.ties:
        if program.ops[op].results:
            value_slot[program.ops[op].results[0]] = slots.result(other, 0)
            tied = slots.operand(other, 0)
        else:
            tied = slots.result(other, 0)
        use_slot[np.searchsorted(names.use_op, op)] = tied
    live = liveness(program, names.use_op, names.use_value)
    grouped = _group_values(program, names.use_op, names.use_value, value_slot, use_slot, live)
    kinds = [program.kind(int(op)) for op in classes.representative]
    matmul = np.array([kind in PRODUCTS for kind in kinds], dtype=bool)
    rules = [analysis.rules[names.signature[op]] for op in classes.representative]
    halo = np.zeros((len(rules), factors + 1))
    reduces = np.zeros((len(rules), factors + 1), dtype=bool)
    for k, rule in enumerate(rules):
        for f, factor in enumerate(rule.factors):
            if factor.permutation:
                halo[k, f] = factor.halo / _extent(program, int(classes.representative[k]), rule, f)
            reduces[k, f] = bool(factor.combiner)
    tensors = [
        (slot, k, _bytes(program, int(classes.representative[k]), place))
        for k in np.flatnonzero(matmul).tolist()
        for slot, place in slots.of_class(k)
    ]
    value_bytes = np.array([
        math.prod(v.type.shape) * element_bytes(v.type.dtype)
        for v in program.values
    ], dtype=np.float64)  # fmt: skip
    representative = grouped.representative
    op_class_of_value = classes.of_op[start_ops(program)[representative]]
    written = live.exists[representative] & ~matmul[op_class_of_value]
    written &= ~np.array([kinds[k] in _IN_PLACE for k in op_class_of_value], dtype=bool)
    summed = np.zeros(len(program.values), dtype=bool)
    summed[
        [v for v, value in enumerate(program.values) if reduces[classes.of_op[value.op]].any()]
    ] = True
    summed_whole = np.array([kinds[k] in _SUMMED_WHOLE for k in op_class_of_value], dtype=bool)
    product_ops = np.flatnonzero(matmul[classes.of_op]).tolist()
    flops = np.array([
        _flops(program, int(op), rule.factors) if m else 0.0
        for op, rule, m in zip(classes.representative, rules, matmul, strict=True)
    ])  # fmt: skip
    work = np.array([flops[classes.of_op[op]] * program.repeats[op] for op in product_ops])
    taken, along = _operands(program, analysis.rules, names.signature, product_ops, grouped)
    products = np.flatnonzero(matmul)
    sizes, groups = _products(program, rules, classes.representative, products, factors)
    merges = _merges(program, names.use_op, names.use_value, summed, grouped)
    events = _events(
        program, names.use_op, names.use_value, grouped, live, value_bytes, summed, taken[:, 0]
    )
    return Tables(
        slot_class=slots.slot_class(),
        slot_dim=slots.slot_dim(factors),
        count=classes.count,
        flops=flops,
        peak_dtype=tuple(_peak_dtype(program, int(op)) for op in classes.representative),
        matmul=matmul,
        tensor_slot=np.array([t[0] for t in tensors], dtype=np.int64),
        tensor_class=np.array([t[1] for t in tensors], dtype=np.int64),
        tensor_bytes=np.array([t[2] for t in tensors], dtype=np.float64),
        product_class=products,
        product_size=sizes,
        product_group=groups,
        halo=halo,
        value_slot=value_slot[representative],
        value_count=grouped.count,
        value_bytes=value_bytes[representative],
        value_sizes=_sizes(program, representative),
        value_written=written,
        product_operand=taken[:, 0],
        product_result=taken[:, 1],
        product_along=along,
        value_merged=matmul[op_class_of_value] & ~live.exists[representative],
        value_transcendentals=_transcendentals(program, grouped),
        summed_whole=summed_whole,
        reduces=reduces[op_class_of_value],
        use_value=grouped.use_value,
        use_slot=grouped.use_slot,
        use_first=grouped.use_first,
        used_value=grouped.used_value,
        use_count=grouped.use_count,
        use_number=np.bincount(grouped.of_use, minlength=len(grouped.use_value)),
        use_reads=grouped.use_reads,
        use_constant=_constant(program)[representative][grouped.use_value].astype(np.float64),
        use_share=_rounded(program, names.use_op, names.use_value, grouped, product_operands),
        merge_class=merges[0],
        merge_with=merges[1],
        merge_share=merges[2],
        windows=windows(
            program,
            names.use_op,
            names.use_value,
            product_ops,
            work,
            grouped.of_value,
            grouped.of_use,
        ),
        pairs=grouped.pairs,
        event_column=events[0],
        event_sign=events[1],
        event_op=events[2],
        event_value=events[3],
        growth=_growth(events, len(representative), grouped),
        result_columns=grouped.of_use[names.use_op >= len(program.ops) - len(program.results)],
        argument_columns=grouped.of_value[list(program.argument_values)],
        value_class=grouped.of_value,
        use_class=grouped.of_use,
        live=live,
    )


def _sizes(program: Program, values: Ints) -> Ints:
    shapes = [program.values[v].type.shape for v in values.tolist()]
    widest = max((len(shape) for shape in shapes), default=0)
    return np.array([(*s, *(1,) * (max(widest, 1) - len(s))) for s in shapes], dtype=np.int64)


def start_ops(program: Program) -> Ints:
    """``[values]`` op that defines each value."""
    return np.array([value.op for value in program.values], dtype=np.int64)


class _Slots:
    """Numbers the tensors of op classes by (class, side, index)."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._class = space.classes.of_op.tolist()
        self._number: dict[tuple[int, int, int], int] = {}

    def result(self, op: int, index: int) -> int:
        return self._number.setdefault((self._class[op], 1, index), len(self._number))

    def operand(self, op: int, index: int) -> int:
        return self._number.setdefault((self._class[op], 0, index), len(self._number))

    def of_class(self, k: int) -> list[tuple[int, tuple[int, int]]]:
        return [(slot, key[1:]) for key, slot in self._number.items() if key[0] == k]

    def slot_class(self) -> Ints:
        return np.array([key[0] for key in self._number], dtype=np.int64)

    def slot_dim(self, factors: int) -> npt.NDArray[np.int8]:
        table = np.full((len(self._number), factors + 1), NONE, dtype=np.int8)
        analysis = self._space.analysis
        for (k, side, index), slot in self._number.items():
            op = int(self._space.classes.representative[k])
            rule = analysis.rules[analysis.names.signature[op]]
            for d, stack in enumerate((rule.results if side else rule.operands)[index]):
                table[slot, stack[0]] = d
        return table


def _bytes(program: Program, op: int, place: tuple[int, int]) -> float:
    side, index = place
    values = program.ops[op].results if side else program.ops[op].operands
    type_ = program.values[values[index]].type
    return float(np.prod(type_.shape, dtype=np.int64)) * element_bytes(type_.dtype)


def _extent(program: Program, op: int, rule: SignatureRule, factor: int) -> int:
    """Elements of the first result along a factor."""
    shape = program.values[program.ops[op].results[0]].type.shape
    found = (n for n, stack in zip(shape, rule.results[0], strict=True) if stack[0] == factor)
    return max(1, next(found, rule.factors[factor].size))


def _flops(program: Program, op: int, factors: tuple[object, ...]) -> float:
    """Two operations per point of the iteration space of a matrix product or convolution."""
    kind = program.kind(op)
    types = [program.values[v].type for v in program.ops[op].operands]
    result = program.values[program.ops[op].results[0]].type
    points = float(np.prod(result.shape, dtype=np.float64))
    signature = program.signatures[program.ops[op].signature]
    if kind == "convolution":
        features = signature.attribute("kernel_output_feature_dimension")
        kernel = types[1].shape
        out = kernel[features] if isinstance(features, int) else 1
        return 2.0 * points * float(np.prod(kernel, dtype=np.float64)) / max(out, 1)
    contracting = signature.attribute("lhs_contracting_dimensions")
    dims = contracting if isinstance(contracting, tuple) else (len(types[0].shape) - 1,)
    return 2.0 * points * float(np.prod([types[0].shape[int(d)] for d in dims]))


def _peak_dtype(program: Program, op: int) -> str:
    operands = program.ops[op].operands or program.ops[op].results
    return program.values[operands[0]].type.dtype if operands else "f32"


@dataclasses.dataclass(frozen=True)
class _Grouped:
    of_value: Ints
    of_use: Ints
    representative: Ints
    count: Ints
    use_value: Ints
    use_slot: Ints
    use_first: Ints
    used_value: Ints
    use_count: Floats
    use_reads: Floats
    pairs: tuple[tuple[Ints, Ints], ...]


def _group_values(
    program: Program, use_op: Ints, use_of: Ints, value_slot: Ints, use_slot: Ints, live: Liveness
) -> _Grouped:
    """Value classes: defined at one slot, used at the same slots equally often, alike in memory."""
    kinds = [program.kind(op) for op in range(len(program.ops))]
    # Per value and use slot: how often it is resharded for it, and how often kernels read it.
    reads: list[dict[int, tuple[int, int]]] = [{} for _ in program.values]
    kernels: set[tuple[int, int]] = set()  # that have read a value already
    for op, value, slot in zip(use_op.tolist(), use_of.tolist(), use_slot.tolist(), strict=True):
        # Matmuls have a roofline of their own; a gather reads as much as it writes; the caller
        # and loops read nothing.
        counted = kinds[op] not in PRODUCTS and kinds[op] not in _READ_NOTHING
        times = program.repeats[op]
        most, read = reads[value].get(slot, (0, 0))
        # One kernel reads a value once, and what it makes itself not at all.
        kernel = int(live.early[op])
        made = program.values[value].op
        counted &= bool(live.exists[value]) and (value, kernel) not in kernels
        counted &= made == kernel or int(live.early[made]) != kernel
        if counted:
            kernels.add((value, kernel))
        reads[value][slot] = (max(most, times), read + times * counted)
    repeats = [program.repeats[value.op] for value in program.values]
    numbers: dict[object, int] = {}
    of_value = np.array([
        numbers.setdefault(
            (slot, bool(exists), bool(aliased), times, tuple(items.items())), len(numbers)
        )
        for slot, exists, aliased, times, items in zip(
            value_slot.tolist(), live.exists, live.aliased, repeats, reads, strict=True
        )
    ], dtype=np.int64)  # fmt: skip
    _, representative, members = np.unique(of_value, return_index=True, return_counts=True)
    count = members * np.array(repeats, dtype=np.int64)[representative]
    rows = [
        (c, slot, members[c] * most, members[c] * read)
        for c, value in enumerate(representative.tolist())
        for slot, (most, read) in reads[value].items()
    ]
    use_value = np.array([r[0] for r in rows], dtype=np.int64)
    slots = np.array([r[1] for r in rows], dtype=np.int64)
    lookup = {(r[0], r[1]): u for u, r in enumerate(rows)}
    of_use = np.array([
        lookup[of_value[v], s] for v, s in zip(use_of.tolist(), use_slot.tolist(), strict=True)
    ], dtype=np.int64)  # fmt: skip
    first = np.flatnonzero(np.diff(use_value, prepend=-1))
    pairs = []
    for distance in range(1, 9):
        later = np.arange(distance, len(use_value))
        later = later[use_value[later] == use_value[later - distance]]
        if len(later):
            pairs.append((later, later - distance))
    return _Grouped(
        of_value, of_use, representative, count, use_value, slots, first, use_value[first],
        np.array([r[2] for r in rows], dtype=np.float64),
        np.array([r[3] for r in rows], dtype=np.float64), tuple(pairs),
    )  # fmt: skip


def _products(
    program: Program, rules: list[SignatureRule], representative: Ints, products: Ints, factors: int
) -> tuple[Floats, Ints]:
    """Rows, columns and depth of products, and which of them each factor belongs to.

    Rows come from the left operand alone, columns from the right, and the depth is summed over
    (in a convolution the window, too); what both operands and the result have is a batch of
    products.
    """
    sizes = np.ones((len(products), 3))
    groups = np.full((len(products), factors + 1), 3, dtype=np.int64)
    for row, k in enumerate(products.tolist()):
        rule = rules[k]
        left, right, out = (
            {f for stack in tensor for f in stack}
            for tensor in (rule.operands[0], rule.operands[1], rule.results[0])
        )
        for f, factor in enumerate(rule.factors):
            inside = (f in left, f in right, f in out)
            group = {
                (True, False, True): 0, (False, True, True): 1, (True, True, False): 2,
                (False, True, False): 2,  # the window of a convolution
            }.get(inside, 3)  # fmt: skip
            groups[row, f] = group
            if group < 3:
                sizes[row, group] *= factor.size
    return sizes, groups


def _operands(
    program: Program,
    rules: Sequence[SignatureRule],
    signature: Ints,
    products: list[int],
    grouped: _Grouped,
) -> tuple[Ints, Bools]:
    """Value classes that products take, with those they make: ``[rows, 2]``.

    And for each dimension of what they make, whether it is one of the operand: ``[rows, R]``.
    """
    widest = max((len(value.type.shape) for value in program.values), default=0)
    found: dict[tuple[int, int], Bools] = {}
    for op in products:
        rule, result = rules[signature[op]], program.ops[op].results[0]
        for tensor, operand in zip(rule.operands, program.ops[op].operands, strict=True):
            factors = {factor for stack in tensor for factor in stack}
            key = int(grouped.of_value[operand]), int(grouped.of_value[result])
            row = found.setdefault(key, np.zeros(max(widest, 1), dtype=bool))
            for d, stack in enumerate(rule.results[0]):
                row[d] |= not factors.isdisjoint(stack)
    rows = sorted(found)
    along = np.array([found[row] for row in rows], dtype=bool).reshape(-1, max(widest, 1))
    return np.array(rows, dtype=np.int64).reshape(-1, 2), along


def _transcendentals(program: Program, grouped: _Grouped) -> Floats:
    """``[C]`` elements of exponentials, logarithms and their like."""
    found = np.zeros(len(grouped.representative))
    for number, value in enumerate(program.values):
        if program.kind(value.op) in EXPENSIVE:
            elements = float(math.prod(value.type.shape))
            found[grouped.of_value[number]] += elements * program.repeats[value.op]
    return found


def _constant(program: Program) -> Bools:
    """``[values]`` whether a value is made of constants alone, by ops that cost next to nothing."""
    made_of = np.zeros(len(program.values), dtype=bool)
    for number, value in enumerate(program.values):
        operands = program.ops[value.op].operands
        kind = program.kind(value.op)
        known = kind in SOURCES if not operands else all(made_of[v] for v in operands)
        made_of[number] = known and kind not in BARRIERS
    return made_of


def _rounded(
    program: Program, use_op: Ints, use_of: Ints, grouped: _Grouped, product_operands: str
) -> Floats:
    """``[U]`` bytes of an element as products keep and receive it, over those of the value."""
    found = np.ones(len(grouped.use_value))
    if not product_operands:
        return found
    share = element_bytes(product_operands) / element_bytes("f32")
    for use, (op, value) in enumerate(zip(use_op.tolist(), use_of.tolist(), strict=True)):
        if program.kind(op) in PRODUCTS and program.values[value].type.dtype == "f32":
            found[grouped.of_use[use]] = share
    return found


def _growth(
    events: tuple[Ints, Floats, Ints, Ints], values: int, grouped: _Grouped
) -> sparse.csr_array:
    """Events summed up between the moments that memory shrinks after."""
    column, sign, _at, _ = events
    pairs = sum(len(later) for later, _ in grouped.pairs)
    width = 4 * values + len(grouped.use_value) + pairs
    shrinks = np.zeros(len(sign), dtype=bool)
    if len(sign):
        # Frees come first at every op, so memory peaks before those that allocations went before.
        shrinks[1:] = (sign[1:] < 0) & (sign[:-1] > 0)
    moment = np.cumsum(shrinks)
    rows = int(moment[-1]) + 1 if len(moment) else 0
    return sparse.csr_array((sign, (moment, column)), shape=(rows, width))


#: Ops that a sum over devices may be taken behind as well as before.
_LINEAR = frozenset({"convert", "transpose", "reshape"})


def _merges(
    program: Program, use_op: Ints, use_of: Ints, summed: Bools, grouped: _Grouped
) -> tuple[Ints, Ints, Floats]:
    """Values that are summed over devices only after they were added to another such value.

    XLA turns a sum of all-reduces into the all-reduce of a sum, where nothing else needs the parts.
    """
    single = np.bincount(use_of, minlength=len(program.values)) == 1
    # The first of what each value is a sum of that could wait: a value with a reduction of its own.
    # The others wait for it already.
    first: list[int] = [-1] * len(program.values)
    found: dict[tuple[int, int], int] = {}
    members = np.bincount(grouped.of_value)
    for number, value in enumerate(program.values):
        op = program.ops[value.op]
        kind = program.kind(value.op)
        if summed[number]:
            first[number] = number
            continue
        waiting = [first[v] for v in op.operands if single[v] and first[v] >= 0]
        if kind in _LINEAR and waiting:
            first[number] = waiting[0]
        elif kind == "add" and len(waiting) == 2:
            key = int(grouped.of_value[waiting[1]]), int(grouped.of_value[waiting[0]])
            found[key] = found.get(key, 0) + 1
            first[number] = waiting[0]
    rows = sorted((c, other, count / members[c]) for (c, other), count in found.items())
    later, earlier, share = zip(*rows, strict=True) if rows else ((), (), ())
    return np.array(later, dtype=np.int64), np.array(earlier, dtype=np.int64), np.array(share)


def _events(
    program: Program,
    use_op: Ints,
    use_of: Ints,
    grouped: _Grouped,
    live: Liveness,
    size: Floats,
    summed: Bools,
    operands: Ints,
) -> tuple[Ints, Floats, Ints, Ints]:
    """Allocations and frees in program order: column, sign, op and value of each.

    ``summed`` says which values reduce, ``operands`` are the value classes that products take.

    Columns are value classes (the value itself), use classes (its resharded copy), pairs of use
    classes (the copy is shared: it stays alive from the end of the earlier use to the later one;
    where they overlap it counts once), and value classes three times again: what a sum over
    devices is more before it is cut to the part that is kept, sums of products that would
    otherwise be taken in by what uses them, and what cannot overwrite what it is made of.
    """
    values, uses = len(grouped.representative), len(grouped.use_value)
    ops = len(program.ops)
    floor = NEGLIGIBLE * float(size.sum())
    rows: list[tuple[Ints, Ints, Ints, Ints]] = []  # column, start, end, value

    def add(column: Ints, start: Ints, end: Ints, value: Ints) -> None:
        rows.append((column, start, end, value))

    stays = live.exists & ~live.aliased & (size > floor)
    stays[list(program.argument_values)] = False
    kept = np.flatnonzero(stays)
    start, end = live.start[kept], live.end[kept] + 1
    add(grouped.of_value[kept], start, end, kept)
    # One copy per (value, use slot): from its first to its last use.
    big = np.flatnonzero(size[use_of] > floor)
    key = use_of[big] * uses + grouped.of_use[big]
    unique, inverse = np.unique(key, return_inverse=True)
    begin = np.full(len(unique), ops, dtype=np.int64)
    finish = np.zeros(len(unique), dtype=np.int64)
    # A use may be part of an earlier kernel.
    np.minimum.at(begin, inverse, np.minimum(use_op[big], live.use_end[big]))
    np.maximum.at(finish, inverse, live.use_end[big] + 1)
    value, use_class = unique // uses, unique % uses
    seen = ~(live.aliased[value] & (finish > ops - len(program.results)))
    add(values + use_class[seen], begin[seen], finish[seen], value[seen])
    place = {
        (v, u): i for i, (v, u) in enumerate(zip(value.tolist(), use_class.tolist(), strict=True))
    }
    offset = values + uses
    for later, earlier in grouped.pairs:
        number = {u: i for i, u in enumerate(later.tolist())}
        shared = [
            (offset + number[u], place[v, u], place[v, int(earlier[number[u]])])
            for (v, u) in place
            if u in number and (v, int(earlier[number[u]])) in place
        ]
        if shared:
            table = np.array(shared, dtype=np.int64)
            column, i, j = table[:, 0], table[:, 2], table[:, 1]
            add(column, np.minimum(finish[i], finish[j]), np.maximum(begin[i], begin[j]), value[i])
        offset += len(later)
    # XLA sums whole what it could sum in parts, and cuts it up where the kernel is that uses it.
    made = start_ops(program)
    last, late = np.zeros((2, len(program.values)), dtype=np.int64)
    np.maximum.at(last, use_of, use_op)
    np.maximum.at(late, use_of, live.late[use_op])
    large = np.flatnonzero(summed & (size > floor))
    add(offset + grouped.of_value[large], made[large], late[large] + 1, large)
    merged = large[~live.exists[large]]
    offset += values
    add(offset + grouped.of_value[merged], made[merged], last[merged] + 1, merged)
    offset += values
    into_product = np.isin(grouped.of_value, operands)
    beside = kept[live.in_place[kept] & into_product[kept]]
    add(offset + grouped.of_value[beside], live.start[beside] - 1, live.start[beside], beside)
    column = np.concatenate([np.concatenate([c, c]) for c, *_ in rows])
    sign = np.concatenate([np.repeat([1.0, -1.0], len(c)) for c, *_ in rows])
    at = np.concatenate([np.concatenate([s, e]) for _, s, e, _ in rows])
    of = np.concatenate([np.concatenate([v, v]) for *_, v in rows])
    order = np.lexsort((sign, at))  # frees come before allocations of the same op
    return column[order], sign[order], at[order], of[order]
