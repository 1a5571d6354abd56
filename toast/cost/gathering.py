"""The tables of a program, gathered once per decision space."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from scipy import sparse

from toast.cost.accumulated_sums import sum_runs
from toast.cost.argument_views import argument_views, reshaped, whole_arguments
from toast.cost.attention_scores import (
    gradients_in_products,
    headed_scores,
    score_passes,
    sums_in_products,
)
from toast.cost.constant_values import constant_values, remade_values
from toast.cost.entities import Bools, Dims, Entity, Floats, Ints
from toast.cost.fetched_arguments import fetched_uses
from toast.cost.host_memory import HostMemory, host_memory
from toast.cost.image_tiles import may_be_in_bands, tiles_of_images
from toast.cost.kernel_kinds import of_vectors
from toast.cost.liveness import (
    EXPENSIVE,
    GROUPED,
    MOVING,
    PASSED_ON,
    SUBLANES,
    Lifetimes,
    Liveness,
    LiveRanges,
    added_scatters,
    allocated_only,
    computed_values,
    dimensions_in,
    liveness,
    narrower_scores,
    op_before,
    summed_selections,
    written_wide,
)
from toast.cost.machine import NEGLIGIBLE
from toast.cost.overlap import Windows, windows
from toast.cost.product_layouts import ProductLayouts
from toast.cost.product_reads import (
    RoundedArgument,
    read_by_products,
    read_shares,
    repeated,
    rounded_arguments,
    turned_arguments,
)
from toast.cost.program_loops import LoopOps, loop_ties, loops_around, loops_of
from toast.cost.random_bits import bit_operations
from toast.cost.reshard_runs import reshard_runs
from toast.cost.rounding import (
    carries_rounded,
    lookups_rounded,
    operands_rounded,
    rounded_stacks,
    stored_rounded,
)
from toast.cost.shared_kernels import UPDATING
from toast.cost.stacked_caches import stacked_caches
from toast.cost.step_rows import step_rows
from toast.cost.sum_tables import added_sums, waiting_sums
from toast.cost.tables import (
    Columns,
    CopyPairs,
    Events,
    KernelTensors,
    KernelTerms,
    OpClasses,
    ProductOperands,
    Products,
    ProductTensors,
    Slots,
    Tables,
    UseClasses,
    ValueClasses,
)
from toast.cost.update_kernels import UpdateKernels, update_kernels
from toast.cost.vector_work import stretched
from toast.distinct import distinct_rows
from toast.program import (
    QUANTITIES,
    KernelCost,
    Program,
    Signature,
    element_bytes,
    has_collective,
)
from toast.space import NONE, PRODUCTS, Space

if TYPE_CHECKING:
    from toast.analysis import Analysis
    from toast.analysis.rules import SignatureRule

#: Ops that begin and end the iterations of a loop.
_OF_LOOPS = frozenset({"carry", "yield"})

#: Ops that write nothing or only a part, because their results are in memory already.
_IN_PLACE = PASSED_ON | _OF_LOOPS | {"argument", UPDATING}

#: Ops that are no kernel of their own, or read no more than they write.
_READ_NOTHING = frozenset({
    "return", "carry", "yield", "gather", "dynamic_slice", "dynamic_update_slice",
})  # fmt: skip

#: Ops whose sums over many devices XLA does not compute in parts.
_SUMMED_WHOLE = frozenset({"gather", "scatter"}) | GROUPED

#: The kind of op that may become a loop of products (:mod:`toast.cost.loops`).
_LOOPED = "dot_general"

#: A buffer that lives for at most so many ops is short-lived: the heap has gaps beside it.
#: Fitted, with the share that they take, to the peaks of programs that XLA compiled.
_SHORT_LIVED_OPS = 80

#: The gaps beside images, relative to others: images are few and large.  Fitted to the same peaks.
_GAPS_OF_IMAGES = 2.5

#: Maximum distance of two use classes of a value class that share a copy.
_FARTHEST = 8


class Buffered(Protocol):
    """The part of a term that the tables need."""

    name: str
    scope: Entity
    has_gaps: bool

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes | None:
        """When its buffers are alive; ``None`` for a term without buffers."""


def build(
    space: Space,
    terms: Sequence[Buffered],
    *,
    product_operands: str = "",
    grouped_operands: str = "",
    lanes: int = 1,
    vector_bytes: float = 0.0,
    relayout_bytes: float = 0.0,
    flops_beside: float = 0.0,
    elements_beside: float = 0.0,
    loops: bool = False,
    partitioned: bool = True,
    delays: bool = False,
    recomputes_images: bool = False,
) -> Tables:
    """Gather the tables of a decision space.

    ``terms`` are those of the price: the timeline has a block of columns for each term with
    buffers.  ``product_operands`` is the element type to which products round float32 operands, or
    empty, and ``grouped_operands`` that of products of groups; ``lanes`` are the elements of a row
    of the device's tiles, 1 for none; ``vector_bytes`` and ``relayout_bytes`` are those of
    :func:`toast.cost.vector_work.stretched`, and ``flops_beside`` and ``elements_beside`` those of
    :func:`toast.cost.random_bits.bit_operations`.  With ``loops``, products may be computed shard
    by shard beside permutes.  ``partitioned`` is whether XLA partitions the program, rather than
    compiles that of one device, and ``delays`` and ``recomputes_images`` are those of
    :func:`toast.cost.liveness.liveness`.
    """
    analysis = space.analysis
    program, names, classes = analysis.program, analysis.names, space.classes
    slots = _Slots(space)
    value_slot, use_slot = slots.of_values(), slots.of_uses()
    layouts = ProductLayouts.none(program, len(names.use_op))
    if lanes == 1:
        layouts = ProductLayouts.of(program, names.use_op, names.use_index)
    caches = stacked_caches(program, tiles=lanes > 1)
    live = liveness(
        program, names.use_op, names.use_value, lanes=lanes,
        delays=delays, recomputes_images=recomputes_images, copied=layouts.copied,
        carried_in_place=caches.in_place,
    )  # fmt: skip
    priced = np.array([bool(_working(rule)) for rule in analysis.rules])[names.signature]
    host = host_memory(program)
    remade, constant = remade_values(program), constant_values(program)
    allocated = allocated_only(program) & constant
    value_bytes = np.array(program.value_bytes, dtype=np.float64)
    operand_types = dict.fromkeys(PRODUCTS, product_operands)
    operand_types |= dict.fromkeys(GROUPED, grouped_operands)
    stored, as_operand = np.ones((2, len(program.values)))
    of_products = np.zeros(len(names.use_op), dtype=bool)
    repeats = repeated(program, live) if lanes > 1 else {}
    headed = np.full(len(program.values), -1)
    if lanes > 1:
        of_products = read_by_products(program, live, repeats, names.use_op, names.use_value)
        for value, dim in headed_scores(program, live.kinds, lanes, repeats).items():
            headed[value] = dim
    tiles = tiles_of_images(program, live.kinds) if lanes > 1 else {}
    banded, selected = np.zeros((2, 0), dtype=np.int64)
    added: Sequence[tuple[int, int]] = ()
    if lanes > 1:
        banded = may_be_in_bands(program, live.kinds, constant)
        selected, added = summed_selections(program, live), added_scatters(program, live)
    # Terms of their own count these values, which therefore have classes of their own: images in
    # bands, selections, and products that add scatters.
    marks = np.zeros((4, len(program.values)), dtype=bool)
    marks[0, banded] = marks[1, selected] = True
    marks[2, [program.ops[product].results[0] for product, _ in added]] = True
    marks[3, narrower_scores(program, live)] = True
    if lanes > 1 and product_operands:
        half = element_bytes(product_operands) / element_bytes("f32")
        stored[stored_rounded(program, live)] = half
        as_operand[operands_rounded(program, live, names.use_op, names.use_value)] = half
    written = update_kernels(program, live, lanes)
    *accesses, idle = stretched(
        program, live, names.use_op, names.use_value,
        _accesses(
            program, names.use_op, names.use_index, names.use_value, live, priced, host,
            of_products, written,
        ) + layouts.again,
        _written(program, live, priced, host, allocated),
        value_bytes * stored,
        vector_bytes, relayout_bytes,
    )  # fmt: skip
    if lanes > 1:
        in_products = gradients_in_products(program, live)
        accesses[0][np.isin(names.use_op, [program.makers[value] for value in in_products])] = 0
        accesses[1][in_products] = 0
        read = accesses[0] > 0
        accesses[0] *= score_passes(program, live, names.use_op, names.use_value, read)
    left_out = caches.leave_out(program, names.use_op, names.use_value)
    for accessed, without in zip(accesses, left_out, strict=True):
        accessed[without] = 0.0
    rows = step_rows(program, names.use_op, names.use_index, written.by_product, lanes)
    op_runs = np.array(program.repeats, dtype=np.float64)
    room = _carried_sums(program, live, names.use_op, names.use_value)
    added_reads = accesses[0] * (room > 0) * op_runs[names.use_op]
    accesses[0][room > 0] = 0.0
    # Products read arguments that they round, or kernels before them do.
    rounded: dict[int, RoundedArgument] = {}
    if lanes > 1:
        rounded = rounded_arguments(program, live, names.use_op, names.use_value)
    # Products read transposed arguments as they are.
    accesses[0][turned_arguments(program, live, names.use_op, names.use_value)] = 0.0
    before_products = accesses[0].copy()
    accesses[0][[each.use for each in rounded.values()]] = 0.0
    in_product = np.isin(names.use_op, sums_in_products(program, live) if lanes > 1 else [])
    reads_in_products = accesses[0] * in_product * op_runs[names.use_op]
    runs = reshard_runs(program, names.use_op, names.use_value, partitioned=partitioned)
    sums = sum_runs(program, analysis.rules)
    grouped = _group_values(
        program,
        sums,
        names.use_op,
        names.use_index,
        names.use_value,
        value_slot,
        use_slot,
        live,
        priced,
        host,
        remade,
        stored,
        headed,
        tiles,
        runs,
        marks,
        *accesses,
    )
    slot_table = slots.table(classes.divisor.shape[1])
    op_class_of_value = classes.of_op[[*program.makers]]
    rules = [analysis.rules[names.signature[op]] for op in classes.representative]
    ops, dtypes = _op_classes(space, rules, live.kinds)
    factors = classes.divisor.shape[1]
    reduces = _summed_factors(rules, factors)
    # A result that has a reduced factor as a dimension (a gradient of attention) is no sum over it.
    has = slots.has_factor(factors + 1)[value_slot]
    summed_over: Bools = reduces[op_class_of_value] & ~has
    summed: Bools = np.asarray(summed_over.any(axis=1))
    product_ops = np.flatnonzero(ops.product[classes.of_op]).tolist()
    products = _products(
        space.analysis, classes.representative, np.flatnonzero(ops.product), factors,
        repeats, written_wide(program, live, np.flatnonzero(stored < 1).tolist()), lanes,
    )  # fmt: skip
    kernels = _kernel_terms(rules, factors + 1)
    working = np.flatnonzero((ops.flops > 0)[classes.of_op])
    operands = _operands(program, analysis.rules, names.signature, product_ops, grouped, tiles)
    work = ops.flops[classes.of_op[working]] * np.array(program.repeats)[working]
    scratch = _workspaces(program, rules, op_class_of_value)
    rings: Bools = np.array([bool(rule.rings) for rule in analysis.rules])[names.signature]
    early = _early(program, live, names.use_op, names.use_value, grouped)
    ranges = LiveRanges(
        program, live, names.use_op, names.use_value, grouped.of_value, grouped.of_use,
        len(grouped.use_value), grouped.pairs, operands.value,
        operands.value[operands.images], banded, selected, added, value_bytes,
        NEGLIGIBLE * float(value_bytes.sum()), summed, scratch,
        rings[names.use_op],
        host.inside,
        _rounded_stacks(program, product_operands, grouped),
        early,
        runs,
        caches.turned(names.use_op, names.use_index, names.use_value, grouped.of_use),
    )  # fmt: skip
    around = rings
    if loops:
        around = rings | [kind == _LOOPED for kind in program.kinds]
    open_windows = windows(
        program, names.use_op, names.use_value, working.tolist(), work,
        grouped.of_value, grouped.of_use, around, runs, sums,
    )  # fmt: skip
    free = open_windows.free(Entity.VALUE_CLASS)
    summed_by_op: Bools = reduces[slot_table.op_class[grouped.use_slot]]
    gathered = _gathered(program, rules, op_class_of_value, summed_over)
    looped = _loopable(analysis, grouped, open_windows) if loops else _no_loops(analysis, grouped)
    values = _value_classes(
        program, grouped, live, value_slot, op_class_of_value, ops, summed_over, gathered, free,
        priced, _workspace_terms(rules, factors + 1), scratch, host, looped.results, products,
        rules, ranges.rounded, remade, stored, as_operand, headed, tiles, constant, allocated, sums,
        marks, _kernels(program, grouped, live, priced, allocated, written, rows.updates),
        bit_operations(program, live, ops.flops[classes.of_op], flops_beside, elements_beside),
    )  # fmt: skip

    def of_use_classes(of_use: Floats) -> Floats:
        """``[U]`` sums over the uses of each class."""
        return np.bincount(grouped.of_use, of_use, len(grouped.use_value)).astype(np.float64)

    def most_of_use_classes(of_use: Floats) -> Floats:
        """``[U]`` the largest of the uses of each class."""
        most = np.zeros(len(grouped.use_value))
        np.maximum.at(most, grouped.of_use, of_use)
        return most

    after_products = _after_products(program)
    uses = UseClasses(
        value=grouped.use_value,
        slot=grouped.use_slot,
        count=grouped.use_count,
        number=np.bincount(grouped.of_use, minlength=len(grouped.use_value)),
        runs=of_use_classes(op_runs[names.use_op]),
        reads=grouped.use_reads,
        reads_in_products=of_use_classes(reads_in_products),
        added_reads=of_use_classes(added_reads),
        added_room=most_of_use_classes(room),
        row_moves=of_use_classes(rows.moves),
        row_kernels=of_use_classes(rows.kernels),
        row_pairs=of_use_classes(rows.pairs),
        cache_copies=of_use_classes(caches.of_uses(program, names.use_op, names.use_index)),
        free=open_windows.free(Entity.USE_CLASS),
        share=np.minimum(
            _rounded(
                program,
                live.kinds,
                names.use_op,
                names.use_value,
                grouped,
                operand_types,
            ),
            values.stored[grouped.use_value],
        ),
        looped=looped.operands,
        sums=summed_by_op & np.asarray(looped.operands.any(axis=1))[:, None],
        result_bytes=looped.result_bytes,
        independent_s=np.zeros(len(grouped.use_value)),
        loop=grouped.use_loop,
        early=early,
        overwriting=_overwriting(program, names.use_op, grouped),
        update=_updates(program, names.use_op, names.use_index, grouped),
        lookup=_lookups(program, names.use_op, names.use_index, grouped),
        after_product=of_use_classes(after_products[names.use_value].astype(np.float64)) > 0,
    )
    sizes = {
        Entity.VALUE_CLASS: len(values), Entity.USE_CLASS: len(uses),
        Entity.COPY_PAIR: len(grouped.pairs),
    }  # fmt: skip
    lifetimes = [(term, lives) for term in terms if (lives := term.lifetimes(ranges)) is not None]
    columns = Columns.of([(term.name, sizes[term.scope]) for term, _ in lifetimes])
    events = _events(
        [(columns[term.name].start, lives, term.has_gaps) for term, lives in lifetimes],
        _gaps(program, tiles),
    )
    growth, gap_growth = _growth(events, columns.width)
    return Tables(
        slots=slot_table,
        ops=ops,
        products=products,
        tensors=slots.tensors(
            products.op_class, stored * read_shares(program, repeats),
            # Kernels of convolutions read float32 operands as they are in memory.
            {kind: dtype for kind, dtype in operand_types.items() if kind != "convolution"},
            rounded, before_products, fetched_uses(program, names.use_op, names.use_value), tiles,
            lanes,
        ),
        kernels=kernels,
        kernel_tensors=slots.kernel_tensors(np.unique(kernels.op_class), rules),
        values=values,
        uses=uses,
        pairs=grouped.pairs,
        joint_sums=added_sums(program, names.use_value, summed, grouped.of_value) if partitioned
        else waiting_sums(analysis, summed & ~gathered, grouped.of_value, value_bytes),
        operands=operands,
        windows=open_windows,
        events=events,
        columns=columns,
        growth=growth,
        buffer_growth=growth,
        gap_growth=gap_growth,
        results=grouped.of_use[names.use_op >= len(program.ops) - len(program.results)],
        value_class=grouped.of_value,
        use_class=grouped.of_use,
        idle=idle,
        dtypes=dtypes,
    )  # fmt: skip


def _op_classes(
    space: Space, rules: Sequence[SignatureRule], kinds: Sequence[str]
) -> tuple[OpClasses, tuple[str, ...]]:
    """The op classes, and the element types that determine their peak FLOP/s."""
    program, classes = space.analysis.program, space.classes
    representative = classes.representative.tolist()
    product = np.array([kinds[op] in PRODUCTS for op in representative], dtype=bool)
    dtype = [_peak_dtype(program, op) for op in representative]
    dtypes = tuple(dict.fromkeys(dtype))
    table = OpClasses(
        count=classes.count,
        flops=np.array([
            _flops(program, op) if here else _kernel_flops(rule)
            for op, here, rule in zip(representative, product, rules, strict=True)
        ]),
        dtype=np.array([dtypes.index(name) for name in dtype], dtype=np.int64),
        product=product,
        peak_seconds=np.zeros(len(rules)),
    )  # fmt: skip
    return table, dtypes


def _overwriting(program: Program, use_op: Ints, grouped: _Grouped) -> Ints:
    """``[use classes]`` uses as results that overwrite arguments."""
    uses = np.flatnonzero(use_op >= len(program.ops) - len(program.results))
    overwrites = np.array(program.aliases, dtype=np.int64) >= 0
    return np.bincount(grouped.of_use[uses[overwrites]], minlength=len(grouped.use_value)).astype(
        np.int64
    )


def _early(
    program: Program, live: Liveness, use_op: Ints, use_value: Ints, grouped: _Grouped
) -> Bools:
    """``[use classes]`` whether a product outside loops uses what depends on arguments alone."""
    ready = live.early[[*program.makers]] < len(program.arguments)
    looped = np.zeros(len(program.ops), dtype=bool)
    for loop in loops_of(program):
        looped[loop.begin : loop.end + 1] = True
    product = np.array([kind in PRODUCTS for kind in live.kinds], dtype=bool)
    early = np.ones(len(grouped.use_value), dtype=bool)
    np.logical_and.at(early, grouped.of_use, (ready[use_value] & (product & ~looped)[use_op]))
    return early


def _updates(program: Program, use_op: Ints, use_index: Ints, grouped: _Grouped) -> Bools:
    """``[use classes]`` whether a value is written into a part of another array."""
    updates = np.array([kind == UPDATING for kind in program.kinds], dtype=bool)[use_op]
    update = np.zeros(len(grouped.use_value), dtype=bool)
    update[grouped.of_use[updates & (use_index == 1)]] = True
    return update


def _lookups(program: Program, use_op: Ints, use_index: Ints, grouped: _Grouped) -> Bools:
    """``[use classes]`` whether rows are looked up in a value."""
    looks = np.array([kind == "gather" for kind in program.kinds], dtype=bool)[use_op]
    lookup = np.zeros(len(grouped.use_value), dtype=bool)
    lookup[grouped.of_use[looks & (use_index == 0)]] = True
    return lookup


def _after_products(program: Program) -> Bools:
    """``[values]`` whether a value follows from a product, also in an earlier iteration."""
    followed = set[int]()
    ties = [
        (program.ops[end].operands[0], program.ops[carry].results[0])
        for end, carry in loop_ties(program)
    ]
    again = True
    while again:
        for kind, op in zip(program.kinds, program.ops, strict=True):
            if kind in PRODUCTS or not followed.isdisjoint(op.operands):
                followed.update(op.results)
        carried = {value for end, value in ties if end in followed} - followed
        followed |= carried
        again = bool(carried)
    after = np.zeros(len(program.values), dtype=bool)
    after[[*followed]] = True
    return after


def _summed_factors(rules: Sequence[SignatureRule], factors: int) -> Bools:
    """``[rules, factors + 1]`` whether an op reduces over a factor."""
    reduces = np.zeros((len(rules), factors + 1), dtype=bool)
    for k, rule in enumerate(rules):
        reduces[k, : len(rule.factors)] = [bool(factor.combiner) for factor in rule.factors]
    return reduces


def _gathered(
    program: Program, rules: Sequence[SignatureRule], op_class_of_value: Ints, summed_over: Bools
) -> Bools:
    """``[values]`` whether devices gather partial results, because no collective combines them."""
    gathered = np.zeros(len(program.values), dtype=bool)
    for value in np.flatnonzero(summed_over.any(axis=1)).tolist():
        combiners = {factor.combiner for factor in rules[op_class_of_value[value]].factors} - {""}
        dtype = program.values[value].type.dtype
        gathered[value] = not all(has_collective(combiner, dtype) for combiner in combiners)
    return gathered


def _value_classes(
    program: Program,
    grouped: _Grouped,
    live: Liveness,
    value_slot: Ints,
    op_class_of_value: Ints,
    ops: OpClasses,
    summed_over: Bools,
    gathered: Bools,
    free: Floats,
    priced: Bools,
    workspace: tuple[Floats, Bools],
    scratch: Bools,
    host: HostMemory,
    looped: Bools,
    products: Products,
    rules: Sequence[SignatureRule],
    rounded: Lifetimes,
    remade: Bools,
    stored: Floats,
    as_operand: Floats,
    headed: Ints,
    tiles: Mapping[int, tuple[int, ...]],
    constant: Bools,
    allocated: Bools,
    sums: Sequence[int],
    marks: Bools,
    kernels: Floats,
    bits: Floats,
) -> ValueClasses:
    values = grouped.representative
    maker = np.array(program.makers, dtype=np.int64)[values]
    amount, over = workspace
    sum_kernels, sum_moves = _sum_kernels(program, grouped, live, stored, sums)
    types = [program.values[v].type for v in values.tolist()]
    kinds = [program.kinds[op] for op in maker.tolist()]
    product = ops.product[op_class_of_value[values]]
    rank = program.most_dimensions
    arguments = grouped.of_value[list(program.argument_values)]
    size, group, operands, side = _of_products(
        program, np.where(product, maker, -1), op_class_of_value[values], products, rules
    )
    return ValueClasses(
        slot=value_slot[values],
        count=grouped.count,
        sums=grouped.sums,
        bytes=np.array([program.value_bytes[v] for v in values.tolist()], dtype=np.float64),
        stored=stored[values],
        as_operand=as_operand[values],
        sizes=np.array([
            (*type_.shape, *(1,) * (rank - len(type_.shape))) for type_ in types
        ], dtype=np.int64),
        rank=np.array([len(type_.shape) for type_ in types], dtype=np.int64),
        tiled=np.array([
            [d in tiles.get(v, range(len(type_.shape))) for d in range(rank)]
            for v, type_ in zip(values.tolist(), types, strict=True)
        ], dtype=bool).reshape(len(values), rank),
        written=grouped.written,
        kernels=kernels,
        sum_kernels=sum_kernels,
        sum_moves=sum_moves,
        transfers=np.where(host.moved[values], grouped.count, 0).astype(np.float64),
        fused=~product & ~live.exists[values],
        computed=computed_values(program, live)[values],
        of_picked=live.of_picked[values],
        of_images=np.isin(op_class_of_value[values], products.op_class[products.of_images]),
        banded=marks[0, values],
        selected=marks[1, values],
        adds_scatter=marks[2, values],
        scores=marks[3, values],
        merged=product & ~live.exists[values],
        repeated=np.array([live.repeated.get(v, -1) for v in values.tolist()], dtype=np.int64),
        headed=headed[values],
        transcendentals=_transcendentals(program, grouped),
        bit_operations=np.bincount(
            grouped.of_value, bits, len(grouped.representative)
        ).astype(np.float64),
        summed_whole=np.array([kind in _SUMMED_WHOLE for kind in kinds], dtype=bool),
        grouped=np.array([kind in GROUPED for kind in kinds], dtype=bool),
        reduces=summed_over[values],
        gathered=gathered[values],
        constant=constant[values],
        remade=remade[values],
        free=free,
        arguments=np.bincount(arguments, minlength=len(values)),
        outer=_outer(program, grouped),
        may_pad=np.zeros(len(values), dtype=bool),
        collective=np.full(len(values), -1, dtype=np.int64),
        group=np.zeros(len(values), dtype=np.int64),
        workspace=amount[op_class_of_value[values]] * scratch[values][:, None],
        workspace_over=over[op_class_of_value[values]],
        looped=looped,
        condition_reads=grouped.condition_reads,
        rounded=np.bincount(rounded.entity, minlength=len(values)).astype(np.float64),
        product_size=size,
        product_group=group,
        product_bytes=operands,
        product_side=side,
        independent_s=np.zeros(len(values)),
    )  # fmt: skip


def _outer(program: Program, grouped: _Grouped) -> Bools:
    """``[C]`` arguments, parts of them, and results."""
    outer = np.zeros(len(grouped.representative), dtype=bool)
    outer[grouped.of_value[argument_views(program) > 0]] = True
    outer[grouped.of_value[list(program.result_values)]] = True
    return outer


def _of_products(
    program: Program,
    maker: Ints,
    op_class: Ints,
    products: Products,
    rules: Sequence[SignatureRule],
) -> tuple[Floats, Ints, Floats, Ints]:
    """The ``product_*`` columns of value classes, from the products (or -1) that compute them."""
    values, rank = len(maker), program.most_dimensions
    size, operands = np.ones((values, 4)), np.zeros((values, 2))
    group = np.full((values, products.group.shape[1]), 4, dtype=np.int64)
    side = np.full((values, rank), 4, dtype=np.int64)
    computed = np.flatnonzero(maker >= 0)
    row = np.searchsorted(products.op_class, op_class[computed])
    size[computed], group[computed] = products.size[row], products.group[row]
    for c in computed.tolist():
        for index, value in enumerate(program.ops[maker[c]].operands[:2]):
            operands[c, index] = program.value_bytes[value]
        for d, stack in enumerate(rules[op_class[c]].results[0]):
            side[c, d] = group[c, stack[0]] if stack else 4
    return size, group, operands, side


def _working(rule: SignatureRule) -> tuple[KernelCost, ...]:
    """The costs of a kernel that take time."""
    return tuple(cost for cost in rule.costs if cost.quantity != "workspace")


def _kernel_flops(rule: SignatureRule) -> float:
    return sum(cost.amount for cost in rule.costs if cost.quantity == "flops")


def _kernel_terms(rules: Sequence[SignatureRule], factors: int) -> KernelTerms:
    """The costs of the kernels of op classes, which have at most ``factors`` factors."""
    rows = [(k, cost) for k, rule in enumerate(rules) for cost in _working(rule)]
    return KernelTerms(
        op_class=np.array([k for k, _ in rows], dtype=np.int64),
        quantity=np.array([QUANTITIES.index(cost.quantity) for _, cost in rows], dtype=np.int64),
        amount=np.array([cost.amount for _, cost in rows], dtype=np.float64),
        over=_over([cost for _, cost in rows], factors),
        queries=np.array([
            factors - 1 if cost.queries is None else cost.queries.factor for _, cost in rows
        ], dtype=np.int64),
        most=np.array([
            1.0 if cost.queries is None else cost.queries.most for _, cost in rows
        ], dtype=np.float64),
        early=np.array([
            0.0 if cost.queries is None else cost.queries.early for _, cost in rows
        ], dtype=np.float64),
    )  # fmt: skip


def _over(costs: Sequence[KernelCost], factors: int) -> Bools:
    """``[costs, factors]`` whether sharding a factor divides a cost."""
    over = np.zeros((len(costs), factors), dtype=bool)
    for row, cost in enumerate(costs):
        over[row, list(cost.factors)] = True
    return over


def _workspace_terms(rules: Sequence[SignatureRule], factors: int) -> tuple[Floats, Bools]:
    """Bytes of workspaces by op class and term, ``[K, W]``; factors, ``[K, W, factors]``."""
    terms = [[cost for cost in rule.costs if cost.quantity == "workspace"] for rule in rules]
    most = max(map(len, terms), default=0)
    amount, over = np.zeros((len(rules), most)), np.zeros((len(rules), most, factors), dtype=bool)
    for k, costs in enumerate(terms):
        amount[k, : len(costs)] = [cost.amount for cost in costs]
        over[k, : len(costs)] = _over(costs, factors)
    return amount, over


def _workspaces(program: Program, rules: Sequence[SignatureRule], op_class_of_value: Ints) -> Bools:
    """``[values]`` whether it is the first result of an op with a workspace."""
    first = np.array([value.result == 0 for value in program.values], dtype=bool)
    needs = np.array([len(_working(rule)) < len(rule.costs) for rule in rules], dtype=bool)
    return np.asarray(first & needs[op_class_of_value])


def _kernels(
    program: Program,
    grouped: _Grouped,
    live: Liveness,
    priced: Bools,
    allocated: Bools,
    written: UpdateKernels,
    by_rows: Bools,
) -> Floats:
    """``[C]`` how many memory-bound kernels of a step compute the values of a class.

    A kernel with several results counts as a part of one for each.  Scalars, such as the counters
    of loops, need none; neither do values that are only ``allocated``.  Updates that are written
    ``by_rows`` (``[ops]``) have a term of their own.
    """
    maker = np.array(program.makers, dtype=np.int64)
    kinds = live.kinds
    alone = np.array([
        kind not in PRODUCTS and (kind == UPDATING or kind not in _IN_PLACE) for kind in kinds
    ], dtype=bool) & ~priced & ~by_rows & ~written.by_product  # fmt: skip
    computed = np.flatnonzero(
        live.exists
        & alone[maker]
        & (live.fused_product < 0)
        & ~live.of_picked
        & ~allocated
        & [value.type.shape != () for value in program.values]
    )
    kernel = written.kernel[maker[computed]]
    share = 1 / np.bincount(kernel)[kernel]
    repeats = np.array(program.repeats, dtype=np.float64)[maker[computed]]
    count = len(grouped.representative)
    weights = share * repeats
    counts = np.bincount(grouped.of_value[computed], weights=weights, minlength=count)
    return np.asarray(counts, dtype=np.float64)


def _carried_sums(program: Program, live: Liveness, use_op: Ints, use_value: Ints) -> Floats:
    """``[uses]`` sums that a loop carries, and to which a product of its body adds its result.

    The kernel of the product does it, such as that of the gradient of a weight in each step of a
    recurrence.  They stay in fast memory if there is room for all of a loop: these are the bytes of
    all of them over those of the use's own.  It is 0 for other uses.
    """
    sums: dict[LoopOps | None, list[int]] = defaultdict(list)
    begin = {program.ops[end].operands[0]: carry for end, carry in loop_ties(program)}
    loops = loops_around(program) if begin else []
    for use, (op, value) in enumerate(zip(use_op.tolist(), use_value.tolist(), strict=True)):
        if program.kinds[op] == "add":
            (result,) = program.ops[op].results
            carry = begin.get(result, -1)
            if carry == program.makers[value] and live.fused_product[result] >= 0:
                sums[loops[op]].append(use)
    room = np.zeros(len(use_op))
    size = np.array(program.value_bytes, dtype=np.float64)
    for uses in sums.values():
        own = size[use_value[uses]]
        room[uses] = own.sum() / np.maximum(own, 1.0)
    return room


def _sum_kernels(
    program: Program, grouped: _Grouped, live: Liveness, stored: Floats, sums: Sequence[int]
) -> tuple[Floats, Floats]:
    """Kernels of a step that compute what products fuse, if their results are summed over devices.

    ``[C]`` their number and the bytes that they move, by the value class of the products' results:
    a kernel reads the sum, and writes its own result.  ``sums`` (``[values]``) are those of
    :func:`toast.cost.accumulated_sums.sum_runs`: what is summed after a loop is added up in it.
    """
    number, moves = np.zeros((2, len(grouped.representative)))
    size = np.array(program.value_bytes, dtype=np.float64) * stored
    for value in np.flatnonzero(live.fused_product >= 0).tolist():
        product = int(live.fused_product[value])
        if sums[product] == (runs := program.repeats[program.makers[product]]):
            number[grouped.of_value[product]] += runs
            moves[grouped.of_value[product]] += runs * (size[product] + size[value])
    return number, moves


def _rounded_stacks(program: Program, rounded: str, grouped: _Grouped) -> Lifetimes:
    """Copies of stacked arguments in the element type ``rounded`` of products, if there is one."""
    stacks = rounded_stacks(program) if rounded else []
    value, first, last = np.array(stacks, dtype=np.int64).reshape(-1, 3).T
    return Lifetimes(grouped.of_value[value], first, last, value)


def _image_sizes(
    program: Program, values: Sequence[int], tiles: Mapping[int, tuple[int, ...]]
) -> tuple[Ints, Bools]:
    """Sizes of images among ``values``, and which of their dimensions are in tiles: ``[..., R]``.

    ``tiles`` are those of :func:`toast.cost.image_tiles.tiles_of_images`; other values, and those
    without elements, have none.
    """
    rank = max((len(program.values[v].type.shape) for v in tiles), default=0)
    sizes = np.ones((len(values), rank), dtype=np.int64)
    tiled = np.zeros((len(values), rank), dtype=bool)
    for row, value in enumerate(values):
        shape = program.values[value].type.shape
        if value in tiles and all(shape):
            sizes[row, : len(shape)] = shape
            tiled[row, [*tiles[value]]] = True
    return sizes, tiled


class _TensorRow(NamedTuple):
    """A row of :class:`toast.cost.tables.ProductTensors`."""

    product: int
    slot: int
    bytes: float
    result: bool
    viewed: float
    argument: int = -1
    rounded: int = -1
    reshaped: bool = False
    argument_bytes: float = 0.0
    fetched: float = 0.0
    rounding: float = 0.0
    wide: bool = False


class _Slots:
    """Numbers the tensors of op classes by (class, side, index)."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._class = space.classes.of_op.tolist()
        self._number: dict[tuple[int, int, int], int] = {}
        program, names = space.analysis.program, space.analysis.names
        #: Slots of ``[values]`` and ``[uses]``.
        number, class_of = self._number, self._class
        self._values = [
            number.setdefault((class_of[v.op], 1, v.result), len(number)) for v in program.values
        ]
        self._uses = [
            number.setdefault((class_of[op], 0, index), len(number))
            for op, index in zip(names.use_op.tolist(), names.use_index.tolist(), strict=True)
        ]
        # Tied ops share their names, so their tensors are those of the op they are tied to.
        for op, other in program.ties:
            result = self._of_tensor(other, 1, 0)
            if program.ops[op].results:
                self._values[program.ops[op].results[0]] = result
                result = self._of_tensor(other, 0, 0)
            self._uses[int(np.searchsorted(names.use_op, op))] = result

    def _of_tensor(self, op: int, side: int, index: int) -> int:
        return self._number.setdefault((self._class[op], side, index), len(self._number))

    def of_values(self) -> Ints:
        """``[values]`` the slot that defines each."""
        return np.array(self._values, dtype=np.int64)

    def of_uses(self) -> Ints:
        """``[uses]`` the slot of each."""
        return np.array(self._uses, dtype=np.int64)

    def tensors(
        self,
        products: Ints,
        stored: Floats | None = None,
        operand_types: Mapping[str, str] = MappingProxyType({}),
        rounded: Mapping[int, RoundedArgument] = MappingProxyType({}),
        accesses: Floats | None = None,
        fetched: Bools | None = None,
        tiles: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        lanes: int = 1,
    ) -> ProductTensors:
        """The tensors of op classes, here ``products``.

        ``stored`` (``[values]``) is the share of a value's bytes that is in memory, and
        ``operand_types`` the element type to which each kind of product rounds float32 operands.
        ``rounded`` are those of :func:`toast.cost.product_reads.rounded_arguments`, and
        ``accesses`` (``[uses]``) those by kernels, products left out.  ``fetched`` (``[uses]``) are
        those of :func:`toast.cost.fetched_arguments.fetched_uses`, ``tiles`` those of
        :func:`toast.cost.image_tiles.tiles_of_images`, and ``lanes`` those of the device.
        """
        program, ops = self._space.analysis.program, self._space.classes.representative
        place = {k: number for number, k in enumerate(products.tolist())}
        views, whole = argument_views(program), whole_arguments(program)
        parts = whole_arguments(program, parts=True)
        rounding = self._rounding(rounded)
        ahead = self._shares(np.flatnonzero(fetched)) if fetched is not None else {}
        rows: list[tuple[_TensorRow, int]] = []  # and its value in the representative op
        for (k, side, index), slot in self._number.items():
            if k in place:
                op = program.ops[int(ops[k])]
                value = (op.results if side else op.operands)[index]
                type_ = program.values[value].type
                size = float(math.prod(type_.shape)) * element_bytes(type_.dtype)
                size *= 1.0 if stored is None else float(stored[value])
                if lanes > 1:
                    size *= _score_padding(
                        program.signatures[op.signature], None if side else index, lanes
                    )
                viewed = min(1.0, views[value] / program.repeats[int(ops[k])])
                read_as = operand_types.get(program.kind(int(ops[k])), "")
                rounds, narrow = bool(read_as) and type_.dtype == "f32", False
                if 0 < viewed < 1 and rounds and (stored is None or stored[value] == 1):
                    narrow = True
                    size *= element_bytes(read_as) / element_bytes("f32")
                wide = type_.dtype == "f32" and not narrow
                row = _TensorRow(place[k], slot, size, bool(side), viewed, wide=wide)
                # In loops, copies of parts stay in fast memory.
                source = int((parts if viewed == 1 else whole)[value])
                if not side and value in rounded:
                    source, use, _ = rounded[value]
                    row = row._replace(
                        rounded=self._values[source],
                        argument_bytes=float(math.prod(type_.shape))
                        * element_bytes(program.values[source].type.dtype),
                    )
                    if accesses is not None:
                        # Slices of an argument are parts of one access.
                        part = row.argument_bytes < program.value_bytes[source]
                        once = row.argument_bytes * (
                            max(accesses[use], 1.0) if part else accesses[use]
                        )
                        row = row._replace(rounding=once * rounding.get((k, index), 0.0))
                elif not side and rounds and source >= 0 and viewed == 1:
                    row = row._replace(rounded=self._values[source], argument_bytes=size)
                elif not rounds and source >= 0:
                    row = row._replace(argument=self._values[source])
                if source >= 0:
                    row = row._replace(reshaped=reshaped(program, value))
                if not side:
                    row = row._replace(fetched=ahead.get((k, index), 0.0))
                rows.append((row, value))
        rows.sort()
        columns = [*zip(*(row for row, _ in rows), strict=True)] or [()] * len(_TensorRow._fields)
        types = map(type, _TensorRow(0, 0, 0.0, False, 0.0))
        fields = zip(_TensorRow._fields, columns, types, strict=True)
        sizes, tiled = _image_sizes(program, [value for _, value in rows], tiles)
        return ProductTensors(
            **{name: np.array(column, dtype=type_) for name, column, type_ in fields},
            sizes=sizes,
            tiled=tiled,
        )

    def _shares(self, uses: Ints) -> dict[tuple[int, int], float]:
        """The share of the ops of a class, and of an operand, that are among ``uses``."""
        names, members = self._space.analysis.names, Counter(self._class)
        number = Counter(
            (self._class[op], index)
            for op, index in zip(
                names.use_op[uses].tolist(), names.use_index[uses].tolist(), strict=True
            )
        )
        return {key: count / members[key[0]] for key, count in number.items()}

    def _rounding(self, rounded: Mapping[int, RoundedArgument]) -> dict[tuple[int, int], float]:
        """The share of the ops of a class (and of an operand) before which a kernel rounds it.

        A kernel rounds an argument for all products of a use, before the first of them.
        """
        ops, number = self._space.analysis.program.ops, Counter[tuple[int, int]]()
        members, used = Counter(self._class), set[int]()
        for value, (_, use, first) in rounded.items():
            if value in ops[first].operands and use not in used:
                used.add(use)
                number[self._class[first], ops[first].operands.index(value)] += 1
        return {key: count / members[key[0]] for key, count in number.items()}

    def has_factor(self, width: int) -> Bools:
        """``[slots, width]`` whether a dimension has the factor; the last column: no factor."""
        return np.asarray(self.table(width - 1).dim != NONE)

    def kernel_tensors(self, kernels: Ints, rules: Sequence[SignatureRule]) -> KernelTensors:
        """The tensors of op classes with kernels, which these move as a whole."""
        tensors = self.tensors(kernels)
        in_part = {
            (k, int(cost.tensor < 0), max(cost.tensor, -1 - cost.tensor))
            for k in kernels.tolist()
            for cost in rules[k].costs
            if cost.tensor is not None
        }
        slots = [slot for tensor, slot in self._number.items() if tensor in in_part]
        whole = ~np.isin(tensors.slot, slots)
        op_class = kernels[tensors.product[whole]]
        return KernelTensors(op_class, tensors.slot[whole], tensors.bytes[whole])

    def table(self, factors: int) -> Slots:
        """The table of the slots."""
        dims: Dims = np.full((len(self._number), factors + 1), NONE, dtype=np.int8)
        halo, ring = np.zeros((2, len(self._number), factors + 1))
        analysis = self._space.analysis
        for (k, side, index), slot in self._number.items():
            op = int(self._space.classes.representative[k])
            number = analysis.names.signature[op]
            rule, signature = analysis.rules[number], analysis.program.signatures[number]
            tensor = (rule.results if side else rule.operands)[index]
            for d, stack in enumerate(tensor):
                # Of minor factors, only those of manual regions hold axes.
                dims[slot, list(stack)] = d
            if not side:
                # A halo is as large a part of other operands as of operand 0.
                like = 0 if tensor == rule.operands[0] else index
                for stack, size in zip(tensor, signature.operands[like].shape, strict=True):
                    halo[slot, stack[0]] = _halo(rule, tensor, stack[0]) / max(size, 1)
            for turning in rule.rings:
                if turning.tensor == (-1 - index if side else index):
                    size = rule.factors[turning.factor].size
                    ring[slot, turning.factor] = turning.reach / max(size, 1)
        return Slots(np.array([key[0] for key in self._number], dtype=np.int64), dims, halo, ring)


def _halo(rule: SignatureRule, operand: tuple[tuple[int, ...], ...], factor: int) -> float:
    """The elements that a shard of an operand needs from its neighbours along a factor.

    Operands with other factors than the first one move only as whole shards.
    """
    halo = rule.factors[factor].halo
    return halo if operand == rule.operands[0] or halo == math.inf else 0.0


def _flops(program: Program, op: int) -> float:
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
    types = [program.values[v].type for v in operands]
    if program.kind(op) in ("custom_call", "composite"):
        # Numbers for the scalar core, masks and statistics are smaller than what is multiplied.
        types.sort(key=lambda type_: -math.prod(type_.shape))
    return types[0].dtype if types else "f32"


@dataclasses.dataclass(frozen=True)
class _Grouped:
    of_value: Ints
    of_use: Ints
    representative: Ints
    count: Ints
    sums: Ints
    use_value: Ints
    use_slot: Ints
    use_count: Floats
    use_reads: Floats
    use_loop: Ints
    pairs: CopyPairs
    condition_reads: Floats
    written: Floats


def _group_values(
    program: Program,
    sums: Sequence[int],
    use_op: Ints,
    use_index: Ints,
    use_of: Ints,
    value_slot: Ints,
    use_slot: Ints,
    live: Liveness,
    priced: Bools,
    host: HostMemory,
    remade: Bools,
    stored: Floats,
    headed: Ints,
    tiles: Mapping[int, tuple[int, ...]],
    runs: Ints,
    marks: Bools,
    accesses: Floats,
    written: Floats,
) -> _Grouped:
    """Value classes: values with equal slots, repetitions, accesses and behaviour in memory.

    ``accesses`` (``[uses]``) and ``written`` (``[values]``) are those by memory-bound kernels, and
    ``stored`` (``[values]``) is the share of a value's bytes that is in memory.  ``headed``
    (``[values]``) are the dimensions of :func:`toast.cost.attention_scores.headed_scores`, -1 for
    none, ``tiles`` those of :func:`toast.cost.image_tiles.tiles_of_images`, and ``runs``
    (``[uses]``) those of :func:`toast.cost.reshard_runs.reshard_runs`.  Values with different
    ``marks`` (``[kinds, values]``) are in different classes.
    """
    # For each value and use slot: the number of reshards, and of reads by kernels.
    # The body of a loop makes its own copy of a value that it does not change.
    repeats = np.array(program.repeats, dtype=np.int64)
    loop = np.array([each.last_carry if each else -1 for each in loops_around(program)])
    place = _places(use_of, loop[use_op])  # numbers of loops, by value
    reads = _Reads.of(use_of, use_slot, place, runs, repeats[use_op] * accesses)
    runs_of_value, summed = repeats[[*program.makers]], np.array(sums, dtype=np.int64)
    tests = np.zeros(len(program.values), dtype=np.int64)
    for number, carry in program.condition_reads:
        tests[number] += program.condition_runs(carry)
    repeated_heads = np.full(len(program.values), -1)
    repeated_heads[[*live.repeated]] = [*live.repeated.values()]
    layouts = {layout: number for number, layout in enumerate({*tiles.values()})}
    tiled = np.full(len(program.values), -1)
    tiled[[*tiles]] = [layouts[layout] for layout in tiles.values()]
    columns = [
        value_slot, live.exists, live.aliased, host.inside, host.moved, runs_of_value, summed,
        tests, remade, stored, written, repeated_heads, headed, tiled, *marks,
    ]  # fmt: skip
    different = [column for column in columns if (column != column[:1]).any()]
    alike = distinct_rows(
        np.array(different, dtype=np.float64).reshape(-1, len(program.values)).T
    ).label
    # The uses of equal values have the same order.
    begin, kind = np.searchsorted(reads.value, np.arange(len(program.values) + 1)), reads.kind
    numbers: dict[tuple[int, ...], int] = {}
    of_value = np.array([
        numbers.setdefault((label, *kind[one:two]), len(numbers))
        for label, (one, two) in zip(
            alike.tolist(), itertools.pairwise(begin.tolist()), strict=True
        )
    ], dtype=np.int64)  # fmt: skip
    _, representative, members = np.unique(of_value, return_index=True, return_counts=True)
    count, sum_count = members * runs_of_value[representative], members * summed[representative]
    rows_of = (begin[1:] - begin[:-1])[representative]
    first = np.cumsum(rows_of) - rows_of
    use_value = np.repeat(np.arange(len(representative)), rows_of)
    rows = np.arange(len(use_value)) + np.repeat(begin[:-1][representative] - first, rows_of)
    slots, loop_of = reads.slot[rows], reads.place[rows]
    of_use = first[of_value[use_of]] + reads.of_use - begin[use_of]
    pairs = np.zeros((3, 0), dtype=np.int64)
    for distance in range(1, _FARTHEST + 1):
        later = np.arange(distance, len(use_value))
        alike = use_value[later] == use_value[later - distance]
        later = later[alike & (loop_of[later] == loop_of[later - distance])]
        step = np.stack([later, later - distance, np.full(len(later), distance)])
        pairs = np.concatenate([pairs, step], axis=1)
    return _Grouped(
        of_value, of_use, representative, count, sum_count, use_value, slots,
        (members[use_value] * reads.most[rows]).astype(np.float64),
        members[use_value] * reads.read[rows], loop_of, CopyPairs(*pairs),
        members * tests.astype(np.float64)[representative], written[representative],
    )  # fmt: skip


def _places(value: Ints, loop: Ints) -> Ints:
    """``[uses]`` the number of the loop of each use, from 0 on, among those that use its value."""
    if not len(value) or (loop == loop[0]).all():
        return np.zeros(len(value), dtype=np.int64)
    rows, first, label, _ = distinct_rows(np.stack([value, loop], axis=1))
    order = np.lexsort([first, rows[:, 0]])
    place = np.empty(len(rows), dtype=np.int64)
    place[order] = np.arange(len(rows)) - np.searchsorted(rows[:, 0], rows[:, 0])
    return place[label]


@dataclasses.dataclass(frozen=True)
class _Reads:
    """Uses of values with the same slot and place, by value, in the order of their first uses."""

    value: Ints
    slot: Ints
    place: Ints
    #: How often a step reshards the value, and how often kernels read it.
    most: Ints
    read: Floats
    #: Numbers that are equal if all of these are, but for the value.
    kind: list[int]
    #: ``[uses]`` the row of each use.
    of_use: Ints

    @staticmethod
    def of(value: Ints, slot: Ints, place: Ints, runs: Ints, read: Floats) -> _Reads:
        """The rows of uses (``[uses]``)."""
        wide, long = int(place.max(initial=0)) + 1, int(slot.max(initial=0)) + 1
        key = (value * long + slot) * wide + place
        _, first, label = np.unique(key, return_index=True, return_inverse=True)
        order = np.lexsort([first, value[first]])
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        of_use, first = number[label], first[order]
        most = np.zeros(len(order), dtype=np.int64)
        np.maximum.at(most, of_use, runs)
        reads: Floats = np.bincount(of_use, read, len(order)).astype(np.float64)
        kind = distinct_rows(np.stack([slot[first], place[first], most, reads], axis=1)).label
        return _Reads(value[first], slot[first], place[first], most, reads, kind.tolist(), of_use)


def _accesses(
    program: Program,
    use_op: Ints,
    use_index: Ints,
    use_of: Ints,
    live: Liveness,
    priced: Bools,
    host: HostMemory,
    of_products: Bools,
    written: UpdateKernels,
) -> Ints:
    """``[uses]`` how often memory-bound kernels access the value of a use.

    They do not if it is ``of_products`` (``[uses]``): then the kernel of a product reads it.
    """
    kinds, accesses = live.kinds, np.zeros(len(use_op), dtype=np.int64)
    first = np.array([op.results[0] if op.results else -1 for op in program.ops], dtype=np.int64)
    result, maker = first[use_op], np.array(program.makers, dtype=np.int64)[use_of]
    # Matmuls and priced kernels have a roofline of their own; a gather reads as much as it writes;
    # the caller and loops read nothing.
    reading = np.array([kind not in PRODUCTS | _READ_NOTHING for kind in kinds], dtype=bool)
    counted = (reading & ~priced)[use_op] & ~of_products
    # A value in memory crosses a barrier or the boundary of a region where it is.
    passed_on = np.array([kind in PASSED_ON for kind in kinds], dtype=bool)[use_op]
    counted &= live.exists[use_of] & ~(passed_on & live.exists[result])
    # Transfers read the memory of the device or of the host at the rate of the link.
    counted &= ~host.inside[use_of] & ~((result >= 0) & host.moved[result])
    # A kernel reads a value once, and its own results not at all.
    kernel = live.kernel[use_op]
    counted &= (maker == kernel) | (live.kernel[maker] != kernel)
    uses = np.flatnonzero(counted)
    once = distinct_rows(np.stack([use_of[uses], kernel[uses]], axis=1)).first
    accesses[uses[once]] = 1
    # An update is written into its buffer, as much as is read.
    updating = np.array([kind == UPDATING for kind in kinds], dtype=np.int64) + written.again
    return np.asarray(accesses + updating[use_op] * (use_index == 1))


def _written(
    program: Program, live: Liveness, priced: Bools, host: HostMemory, allocated: Bools
) -> Bools:
    """``[values]`` whether a memory-bound kernel writes a value."""
    maker = np.array(program.makers, dtype=np.int64)
    kinds = [live.kinds[op] for op in maker.tolist()]
    elsewhere = np.array([kind in PRODUCTS or kind in _IN_PLACE for kind in kinds], dtype=bool)
    return np.asarray(
        live.exists & (live.fused_product < 0) & ~elsewhere & ~priced[maker] & ~host.inside
        & ~host.moved & ~allocated & ~live.of_picked
    )  # fmt: skip


def _products(
    analysis: Analysis,
    representative: Ints,
    products: Ints,
    factors: int,
    repeated_operands: Collection[int],
    wide: Collection[int],
    lanes: int,
) -> Products:
    """Rows, columns, depth and batch of products, and which of them each factor belongs to.

    Factors of the left operand alone are rows, of the right operand columns; summed factors (and
    the window of a convolution) are depth; factors of both operands and the result are a batch.
    """
    sizes = np.ones((len(products), 4))
    groups = np.full((len(products), factors + 1), 4, dtype=np.int64)
    vector = np.zeros(len(products), dtype=bool)
    tile = np.ones((len(products), 2), dtype=np.int64)
    tile_factor = np.full((len(products), 2), factors, dtype=np.int64)
    images = np.zeros(len(products), dtype=np.int64)
    image_factor, feature_factor = np.full((2, len(products)), -1, dtype=np.int64)
    features = np.zeros_like(images)
    back, of_images, sums_images, keeps = np.zeros((4, len(products)), dtype=bool)
    grouped, depthwise, of_grouped = np.zeros((3, len(products)), dtype=bool)
    padding = np.ones(len(products))
    for row, k in enumerate(products.tolist()):
        number = analysis.names.signature[representative[k]]
        rule, signature = analysis.rules[number], analysis.program.signatures[number]
        left, right, result = (
            {factor for stack in tensor for factor in stack}
            for tensor in (rule.operands[0], rule.operands[1], rule.results[0])
        )
        # A convolution has the positions of its result, and the places of its whole window.
        extent = {
            stack[0]: size
            for tensor, type_ in zip(
                (rule.operands[1], rule.results[0]), (signature.operands[1], signature.results[0]),
                strict=True,
            )
            for stack, size in zip(tensor, type_.shape, strict=True) if len(stack) == 1
        }  # fmt: skip
        for f, factor in enumerate(rule.factors):
            group = {
                (True, False, True): 0, (False, True, True): 1, (True, True, False): 2,
                (False, True, False): 2,  # the window of a convolution
                (True, True, True): 3,
            }.get((f in left, f in right, f in result), 4)  # fmt: skip
            groups[row, f] = group
            if group < 4:
                sizes[row, group] *= extent.get(f, factor.size)
        vector[row] = signature.kind == "dot_general" and of_vectors(signature)
        if lanes > 1:
            padding[row] = _score_padding(signature, None, lanes)
        larger = max((0, 1), key=lambda n: math.prod(signature.operands[n].shape))
        keeps[row] = _keeps(analysis.program, representative[k], larger)
        stacks = rule.operands[larger][-2:]
        # What a kernel repeats as it reads it is in tiles of another array.
        plain = analysis.program.ops[representative[k]].operands[larger] not in repeated_operands
        product = signature.kind == "dot_general"  # shards may be products of vectors
        if product and plain and all(len(stack) == 1 for stack in stacks):
            last = [stack[0] for stack in stacks]
            if last[0] in left & right & result:
                tile[row], tile_factor[row] = signature.operands[larger].shape[-2:], last
        if signature.kind == "convolution":
            dim = _image_dimension(signature)
            images[row] = signature.operands[0].shape[dim]
            if len(stack := rule.operands[0][dim]) == 1:
                image_factor[row] = stack[0]
            feature = int(str(signature.attribute("input_feature_dimension")))
            of_images[row] = len(signature.operands[0].shape) > _SEQUENCE
            sums_images[row] = of_images[row] and dim == feature
            groups_of_features = _groups(signature)
            grouped[row] = groups_of_features > 1
            depthwise[row] = grouped[row] and groups_of_features == _features(signature)
            of_grouped[row] = grouped[row] and dim == feature
            if of_images[row] and dim != feature and not grouped[row]:
                features[row] = signature.operands[0].shape[feature]
                if len(own := rule.operands[0][feature]) == 1:
                    feature_factor[row] = own[0]
                back[row] = _is_reversed(analysis.program, representative[k])
    return Products(
        products, sizes, groups, vector, tile, tile_factor, images, image_factor,
        features, feature_factor, back, of_images, sums_images, grouped, depthwise, of_grouped,
        keeps,
        np.array([
            analysis.program.ops[representative[k]].results[0] in wide for k in products.tolist()
        ], dtype=bool),
        padding,
    )  # fmt: skip


def _score_padding(signature: Signature, operand: int | None, lanes: int) -> float:
    """The bytes of attention's scores in tiles over those without; 1 for other tensors.

    Scores are operands of products of batches, or results (``None``).  Their two sequences are in
    the rows and the lanes.
    """
    if signature.kind != "dot_general":
        return 1.0
    side = "lhs" if operand in (None, 0) else "rhs"
    batch = dimensions_in(signature, f"{side}_batching_dimensions")
    if operand is None:  # the batch leads in results
        sizes = signature.results[0].shape[len(batch) :]
    else:
        shape = signature.operands[operand].shape
        sizes = tuple(size for d, size in enumerate(shape) if d not in batch)
    if not batch or len(sizes) < _MATRIX or sorted(sizes)[-_MATRIX] < lanes:
        return 1.0
    rows, columns = sorted(sizes)[-_MATRIX:]
    return min(
        math.ceil(size / lanes) * lanes / size * math.ceil(other / SUBLANES) * SUBLANES / other
        for size, other in ((rows, columns), (columns, rows))
    )


#: Dimensions of a matrix.
_MATRIX = 2


def _keeps(program: Program, op: int, operand: int) -> bool:
    """Whether an op is in a loop before which its operand was computed.

    XLA rounds and transposes such operands before the loop, too.
    """
    maker = op_before(program, program.makers[program.ops[op].operands[operand]], MOVING)
    return program.kinds[maker] != "carry" and program.repeats[maker] < program.repeats[op]


#: The rank of sequences, whose convolutions slide along one dimension.
_SEQUENCE = 3


def _sums_images(signature: Signature) -> bool:
    """Whether an op is a convolution that sums over images: the gradient of a kernel."""
    return signature.kind == "convolution" and _image_dimension(signature) == int(
        str(signature.attribute("input_feature_dimension"))
    )


def _groups(signature: Signature) -> int:
    """Groups of features of a convolution, or of the one whose gradient it is; 1 for none."""
    counts = ("feature_group_count", "batch_group_count")
    return max(int(str(signature.attribute(name) or 1)) for name in counts)


def _features(signature: Signature) -> int:
    """Features of the images of a convolution in groups, or of the one whose gradient it is.

    The gradient of a kernel has the features where others have their batch.
    """
    of_batch = int(str(signature.attribute("batch_group_count") or 1)) > 1
    name = "input_batch_dimension" if of_batch else "input_feature_dimension"
    return signature.operands[0].shape[int(str(signature.attribute(name)))]


def _is_reversed(program: Program, op: int) -> bool:
    """Whether a convolution has a reversed kernel, as the gradient of images has."""
    kernel = op_before(program, program.makers[program.ops[op].operands[1]], MOVING)
    return program.kinds[kernel] == "reverse"


def _image_dimension(signature: Signature) -> int:
    """The dimension of a convolution's input that counts images.

    It is the batch, or, in the gradient of a kernel, whose features are the images, the features:
    the leading one of the two, because images lead in all common layouts.
    """
    names = ("input_batch_dimension", "input_feature_dimension")
    return min(int(str(signature.attribute(name))) for name in names)


@dataclasses.dataclass(frozen=True)
class _Looped:
    """The dimensions along which products may be computed shard by shard, beside permutes."""

    operands: Bools  # [U, R] of use classes
    result_bytes: Floats  # [U] of the products that use them
    results: Bools  # [C, R] of value classes


def _no_loops(analysis: Analysis, grouped: _Grouped) -> _Looped:
    rank, uses = analysis.program.most_dimensions, len(grouped.use_value)
    of_values = np.zeros((len(grouped.representative), rank), dtype=bool)
    return _Looped(np.zeros((uses, rank), dtype=bool), np.zeros(uses), of_values)


def _loopable(analysis: Analysis, grouped: _Grouped, windows: Windows) -> _Looped:
    """Dimensions that one operand and the result have in common (GShard, 3.3.2).

    Of a product's operands, only one may be looped over: the one beside whose gather fewer other
    products may run, or the larger one.
    """
    program, names = analysis.program, analysis.names
    looped = _no_loops(analysis, grouped)
    free, excluded = windows.free(Entity.USE_CLASS), np.zeros(len(looped.operands), dtype=bool)
    first = np.searchsorted(names.use_op, np.arange(len(program.ops)))
    for number, op in enumerate(program.ops):
        if program.kinds[number] != _LOOPED:
            continue
        rule = analysis.rules[names.signature[number]]
        result = {f: d for d, factors in enumerate(rule.results[0]) for f in factors}
        own = [{f for factors in operand for f in factors} for operand in rule.operands]
        uses = grouped.of_use[first[number] : first[number] + 2].tolist()
        size = [math.prod(program.values[v].type.shape) for v in op.operands]
        _, _, chosen = min((free[u], -size[index], index) for index, u in enumerate(uses))
        excluded[uses[1 - chosen]] = True
        type_ = program.values[op.results[0]].type
        looped.result_bytes[uses[chosen]] = math.prod(type_.shape) * element_bytes(type_.dtype)
        for d, factors in enumerate(rule.operands[chosen]):
            if all(f in result and f not in own[1 - chosen] for f in factors):
                looped.operands[uses[chosen], d] = True
        looped.results[grouped.of_value[op.results[0]], list(result.values())] = True
    looped.operands[excluded] = False
    return looped


#: Ops between a product and the result that XLA computes for it.
_MOVED = frozenset({"convert", "transpose"})


def _operands(
    program: Program,
    rules: Sequence[SignatureRule],
    signature: Ints,
    products: list[int],
    grouped: _Grouped,
    tiles: Mapping[int, tuple[int, ...]],
) -> ProductOperands:
    """Pairs of value classes: an operand of products, and their result."""
    rank = program.most_dimensions
    along: dict[tuple[int, int], Bools] = {}
    images: set[tuple[int, int]] = set()
    places: dict[tuple[int, int], tuple[int, int, bool]] = {}
    contracted: dict[tuple[int, int], Bools] = {}
    for op in products:
        rule, result = rules[signature[op]], program.ops[op].results[0]
        dot = program.kind(op) == "dot_general"
        last = [_last_in_result(rule, side) if dot else -1 for side in (0, 1)]
        left = _left_side(program, rule, result) if dot else -1
        kept = {factor for stack in rule.results[0] for factor in stack}
        for index, (tensor, operand) in enumerate(
            zip(rule.operands, program.ops[op].operands, strict=True)
        ):
            factors = {factor for stack in tensor for factor in stack}
            key = int(grouped.of_value[operand]), int(grouped.of_value[result])
            row = along.setdefault(key, np.zeros(rank, dtype=bool))
            if operand in tiles and _sums_images(program.signatures[program.ops[op].signature]):
                images.add(key)
            for d, stack in enumerate(rule.results[0]):
                row[d] |= not factors.isdisjoint(stack)
            if dot and operand not in tiles:
                summed = np.zeros(rank, dtype=bool)
                summed[: len(tensor)] = [kept.isdisjoint(stack) for stack in tensor]
                contracted.setdefault(key, summed)
                places.setdefault(key, (last[index], last[1 - index], index == left))
    keys = sorted(along)
    value, result_class = np.array(keys, dtype=np.int64).reshape(-1, 2).T
    places_of_keys = [places.get(key, (-1, -1, False)) for key in keys]
    own, other, leading = np.array(places_of_keys, dtype=np.int64).reshape(-1, 3).T
    none = np.zeros(rank, dtype=bool)
    return ProductOperands(
        value,
        result_class,
        np.array([along[key] for key in keys], dtype=bool).reshape(-1, rank),
        np.array([key in images for key in keys], dtype=bool),
        own,
        other,
        np.array([contracted.get(key, none) for key in keys], dtype=bool).reshape(-1, rank),
        leading.astype(bool),
    )


def _last_in_result(rule: SignatureRule, side: int) -> int:
    """The dimension of a product's result that is the last one of an operand; -1 for none."""
    factors = {*rule.operands[side][-1]} if rule.operands[side] else set[int]()
    return max(
        (d for d, stack in enumerate(rule.results[0]) if not factors.isdisjoint(stack)), default=-1
    )


def _left_side(program: Program, rule: SignatureRule, result: int) -> int:
    """The operand whose dimensions lead in a product's result, after transposes of it."""
    order = list(range(len(rule.results[0])))
    passed = result
    while len(users := program.users[passed]) == 1 and program.kind(users[0]) in _MOVED:
        op = program.ops[users[0]]
        if program.kind(users[0]) == "transpose":
            permutation = dimensions_in(program.signatures[op.signature], "permutation")
            order = [order[d] for d in permutation]
        passed = op.results[0]
    sides = [{f for stack in tensor for f in stack} for tensor in rule.operands]
    for d in order:
        having = [n for n, side in enumerate(sides) if not side.isdisjoint(rule.results[0][d])]
        if len(having) == 1:
            return having[0]
    return 0


def _transcendentals(program: Program, grouped: _Grouped) -> Floats:
    """``[C]`` elements of exponentials, logarithms and the like."""
    elements = np.zeros(len(grouped.representative))
    for number, op in enumerate(program.makers):
        if program.kinds[op] in EXPENSIVE:
            once = float(program.elements[number])
            elements[grouped.of_value[number]] += once * program.repeats[op]
    return elements


def _rounded(
    program: Program,
    kinds: Sequence[str],
    use_op: Ints,
    use_of: Ints,
    grouped: _Grouped,
    operands: Mapping[str, str],
) -> Floats:
    """``[U]`` bytes of an element as products receive it, over those of the value's element.

    ``operands`` are the element types to which kinds of products round theirs, or empty.
    """
    share = np.ones(len(grouped.use_value))
    rounded = {
        kind: element_bytes(dtype) / element_bytes("f32")
        for kind, dtype in operands.items()
        if dtype
    }
    if not rounded:
        return share
    for use, (op, value) in enumerate(zip(use_op.tolist(), use_of.tolist(), strict=True)):
        if kinds[op] in rounded and program.values[value].type.dtype == "f32":
            share[grouped.of_use[use]] = rounded[kinds[op]]
    tables = lookups_rounded(program)
    carries = carries_rounded(
        program, {kind: element_bytes(dtype) for kind, dtype in operands.items() if dtype}
    )
    for use, (op, value) in enumerate(zip(use_op.tolist(), use_of.tolist(), strict=True)):
        if value in tables and kinds[op] == "gather":
            share[grouped.of_use[use]] = tables[value]
        elif op in carries:
            share[grouped.of_use[use]] = carries[op]
    return share


def _gaps(program: Program, tiles: Mapping[int, tuple[int, ...]]) -> Floats:
    """``[values]`` the gaps beside a short-lived buffer of each, relative to those of most values.

    What a loop carries is in one buffer from before the loop until after it, without gaps.
    ``tiles`` are those of :func:`toast.cost.image_tiles.tiles_of_images`.
    """
    gaps = np.ones(len(program.values))
    gaps[[*tiles]] = _GAPS_OF_IMAGES
    for number, op in enumerate(program.ops):
        if program.kinds[number] in _OF_LOOPS:
            gaps[[*op.operands, *op.results]] = 0.0
    return gaps


def _events(lifetimes: Sequence[tuple[int, Lifetimes, bool]], gaps: Floats) -> Events:
    """Allocations and frees in program order.

    Lifetimes come with their block's first column, and with whether it has gaps; ``gaps`` are those
    of :func:`_gaps`.
    """
    empty = np.zeros(0, dtype=np.int64)
    column = [empty, *(np.tile(first + lives.entity, 2) for first, lives, _ in lifetimes)]
    sign = [np.zeros(0), *(np.repeat([1.0, -1.0], len(lives)) for _, lives, _ in lifetimes)]
    op = [empty, *(np.concatenate([lives.start, lives.end]) for _, lives, _ in lifetimes)]
    value = [empty, *(np.tile(lives.value, 2) for _, lives, _ in lifetimes)]
    beside = [np.zeros(0)]
    for _, lives, has_gaps in lifetimes:
        short = (lives.end - lives.start <= _SHORT_LIVED_OPS) & has_gaps
        beside.append(np.tile(gaps[lives.value] * short, 2))
    events = Events(*map(np.concatenate, (op, column, sign, value, beside)))
    return events.take(np.lexsort((events.sign, events.op)))


def _growth(events: Events, width: int) -> tuple[sparse.csr_array, sparse.csr_array]:
    """``[moments, columns]`` events, summed up from one local peak of memory to the next.

    Those of all buffers, and of the gaps beside short-lived ones.
    """
    shrinks = np.zeros(len(events), dtype=bool)
    if len(events):
        # Frees come first at every op, so memory peaks before a free that follows an allocation.
        shrinks[1:] = (events.sign[1:] < 0) & (events.sign[:-1] > 0)
    moment = np.cumsum(shrinks)
    rows = int(moment[-1]) + 1 if len(moment) else 0
    every, gaps = (
        sparse.csr_array((sign, (moment, events.column)), shape=(rows, width))
        for sign in (events.sign, events.sign * events.gaps)
    )
    gaps.eliminate_zeros()
    return every, gaps
