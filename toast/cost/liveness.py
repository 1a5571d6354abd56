"""Which values are in memory, and for how long (paper, section 4.5: live range analysis).

XLA fuses elementwise ops, broadcasts and the like into their consumers, so most values are never in
memory.  The others are results of ops that fusion stops at, and of fusible ops that such an op, or
the caller, needs in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.host_memory import moved_in_loops, round_trips
from toast.cost.kernel_kinds import kernel_kinds, of_vectors, products_of_vectors
from toast.cost.overwriting import overwriting
from toast.cost.program_loops import loops_of
from toast.cost.shared_kernels import kernels
from toast.cost.tables import CopyPairs, EntityTable
from toast.hardware.description import LANE_BYTES
from toast.program import Program, Signature
from toast.space import BOUNDARY, PRODUCTS

#: Ops that XLA's fusion stops at: their operands and results are in memory.
BARRIERS = PRODUCTS | {
    "scatter", "sort", "custom_call", "fft", "cholesky", "triangular_solve", "while", "case", "if",
    "rng_bit_generator", "rng", "select_and_scatter", "chlo_top_k", "optimization_barrier",
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute", "composite",
    "carry", "yield", "repeat", "spread",
}  # fmt: skip

#: Ops that change the order of elements alone.
_TURNING = frozenset({"transpose", "reshape"})

#: Rows of the tiles in which devices with lanes keep arrays.
SUBLANES = 8

#: Ops that fuse their operands and whose results are in memory.
ROOTS = frozenset({"reduce", "reduce_window", "dynamic_update_slice", "concatenate", "gather"})

#: Ops whose results XLA stores instead of computing them several times.
EXPENSIVE = frozenset({
    "exponential", "exponential_minus_one", "log", "log_plus_one", "tanh", "logistic", "power",
    "sine", "cosine", "tan", "atan2", "chlo_erf", "chlo_erfc", "chlo_erf_inv",
})  # fmt: skip

#: Ops that need their operands in memory: their kernels do not fuse the ops before them.
_NEEDING = (BARRIERS - PRODUCTS) | {"return"}

#: Ops whose results are always in memory.
_STORED = BARRIERS | ROOTS | {"argument"}

#: Products that round their operands, and that XLA may delay.
MATRIX_PRODUCTS = PRODUCTS - {"convolution"}

#: Products of rows in groups, each group with a matrix of its own.
GROUPED = frozenset({"chlo_ragged_dot", "ragged_dot"})

#: Attributes of a scatter: dimensions of its rows, and those that an index determines.
_SCATTERED_DIMS = ("input_batching_dims", "inserted_window_dims")

#: Attributes of a product: the dimensions that it sums over, of each operand.
_CONTRACTED_DIMS = ("lhs_contracting_dimensions", "rhs_contracting_dimensions")

#: Ops whose results are their operands: nothing moves.
PASSED_ON = BOUNDARY | {"optimization_barrier"}

#: Ops that are computed where their results are needed, never in memory.
SOURCES = frozenset({"constant", "iota"})

#: Ops that move or round each element.
MOVING = frozenset({"reshape", "transpose", "convert"})

#: Ops before a product that its kernel computes even if a library computes other products.
_ROUNDING = frozenset({"reshape", "transpose", "convert", "broadcast_in_dim", "slice"})

#: Ops whose results are their operands in another place.
_PLACING = frozenset({
    "reshape", "transpose", "optimization_barrier", "sdy_sharding_constraint", "broadcast_in_dim",
})  # fmt: skip

#: Products that XLA runs before one that only the optimizer needs, where it hides all-gathers
#: behind products.  Fitted to the peaks of programs that XLA compiled; a layer has about as many.
DELAY = 12

#: The same for products of groups where XLA hides all-gathers; elsewhere they wait as long as
#: others would.  Fitted to two programs, of six and of twelve layers.
_GROUPED_DELAY = 150


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Which values are in memory, and between which ops."""

    #: ``[values]`` whether XLA keeps the value in memory (arguments always).
    exists: Bools
    #: ``[values]`` whether the value overwrites a donated argument's buffer.
    aliased: Bools
    #: ``[values]`` the result of a product whose kernel also computes the value, and writes it
    #: meanwhile, unless that result is summed over devices; -1 for none.
    fused_product: Ints
    #: ``[values]`` whether it is the gradient of logits of which a loss picks some.  Products
    #: compute it again, from logits in its element type; the product of the logits writes them
    #: beside those in float32.  The gradient stands for these logits, which take as much memory.
    of_picked: Bools
    #: ``[values]`` op before which the value must have its own memory.
    start: Ints
    #: ``[values]`` whether the value may overwrite an operand that its kernel is the last to read.
    in_place: Bools
    #: ``[values]`` last op whose kernel reads the value, directly or through fused values.
    end: Ints
    #: ``[uses]`` last op whose kernel reads the value through this use.
    use_end: Ints
    #: ``[ops]`` op after which a fusible op could be computed, itself for others.
    early: Ints
    #: ``[ops]`` number of the kernel of an op that is computed early; less than twice the ops.
    kernel: Ints
    #: ``[ops]`` the last kernel that computes an op, if no op is computed early.
    late: Ints
    #: ``[ops]`` their kinds, as kernels have them: what they take time for.
    kinds: Sequence[str]
    #: ``[ops]`` how often the vector unit moves each element of kernels that change tiles; 0 for
    #: others.
    moves: Floats
    #: Values that repeat heads of caches, and the dimension of these heads.
    repeated: Mapping[int, int]
    #: ``[uses]`` the op until which a product's operand waits if the product becomes a loop; 0 for
    #: other uses, and where :attr:`end` has this already.
    delayed: Ints


@dataclasses.dataclass(frozen=True)
class Lifetimes(EntityTable):
    """Buffers of entities: alive from before op ``start`` to before op ``end``."""

    entity: Ints
    start: Ints
    end: Ints
    value: Ints  # in the program

    @staticmethod
    def joined(parts: Sequence[Lifetimes]) -> Lifetimes:
        """The rows of all parts, in order."""
        empty = np.zeros((4, 0), dtype=np.int64)
        rows = [np.stack([p.entity, p.start, p.end, p.value]) for p in parts]
        return Lifetimes(*np.concatenate([empty, *rows], axis=1))


@dataclasses.dataclass(frozen=True)
class LiveRanges:
    """What a term needs to determine the lifetimes of its buffers."""

    program: Program
    live: Liveness
    use_op: Ints  # [uses]
    use_value: Ints  # [uses]
    value_class: Ints  # [values]
    use_class: Ints  # [uses]
    use_classes: int
    pairs: CopyPairs
    operands: Ints  # value classes of the operands of products
    images: Ints  # those of images that gradients of kernels sum over
    banded: Ints  # values: :func:`toast.cost.image_tiles.may_be_in_bands`
    selected: Ints  # values: :func:`summed_selections`
    added: Sequence[tuple[int, int]]  # :func:`added_scatters`
    size: Floats  # [values] bytes
    floor: float  # bytes up to which a value does not affect the peak
    reduces: Bools  # [values] whether the defining op reduces
    scratch: Bools  # [values] whether the defining op has a workspace, counted with this result
    around: Bools  # [uses] whether operands of the op may go around the devices
    host: Bools  # [values] whether the value is in the memory of the host
    rounded: Lifetimes  # rounded copies of stacked arguments, by value class
    early: Bools  # [use classes] as :attr:`toast.cost.tables.UseClasses.early`
    reshard_runs: Ints  # [uses] as :func:`toast.cost.reshard_runs.reshard_runs`
    caches: Lifetimes  # of caches in another layout, by use class

    @functools.cached_property
    def maker(self) -> Ints:
        """``[values]`` op that defines each value."""
        return np.array(self.program.makers, dtype=np.int64)

    @functools.cached_property
    def stored(self) -> Ints:
        """Values besides arguments that have memory of their own."""
        own = self.live.exists & ~self.live.aliased & (self.size > self.floor) & ~self.host
        own[list(self.program.argument_values)] = False
        return np.flatnonzero(own)

    @functools.cached_property
    def of_products(self) -> Ints:
        """Uses by products."""
        return np.flatnonzero(self.product[self.use_op])

    @functools.cached_property
    def product(self) -> Bools:
        """``[ops]`` whether they are products."""
        return np.array([kind in PRODUCTS for kind in self.live.kinds], dtype=bool)

    def is_computed(self, value: int) -> bool:
        """Whether a value that is not in memory is more than one that is, moved."""
        return bool(self._computed[value])

    @functools.cached_property
    def _computed(self) -> Bools:
        return computed_values(self.program, self.live)

    @functools.cached_property
    def expensive(self) -> Bools:
        """``[values]`` whether the kernels that read the value compute an expensive op again."""
        again = np.zeros(len(self.program.values), dtype=bool)
        for value in np.flatnonzero(~self.live.exists).tolist():
            op = self.program.makers[value]
            again[value] = self.program.kinds[op] in EXPENSIVE or any(
                again[operand] for operand in self.program.ops[op].operands
            )
        return again

    def picked_beside(self, value: int) -> list[int]:
        """Values that one kernel writes together with ``value``, if ``value`` is in memory.

        A gather picks single elements from them, and they follow from the same value in memory: the
        logarithms of a loss's probabilities, beside the gradient of its logits.
        """
        shape, sources = self.program.values[value].type.shape, self._sources(value)
        return sorted({
            other for source in sources for other in self._picked.get(source, ())
            if self.maker[other] < self.maker[value]
            and self.program.values[other].type.shape == shape
        })  # fmt: skip

    @functools.cached_property
    def _picked(self) -> Mapping[int, Sequence[int]]:
        """By source: values of elementwise kernels that are in memory because a gather picks them.

        The sources are those of :meth:`_sources`.
        """
        kinds, picked = [*self.live.kinds], defaultdict[int, list[int]](list)
        for value in sorted(_picked_from(self.program, kinds)):
            if self.live.exists[value] and kinds[self.maker[value]] not in _STORED:
                for source in self._sources(value):
                    picked[source].append(value)
        return picked

    def _sources(self, value: int) -> set[int]:
        """The values in memory, at least half as large, from which a kernel computes a value."""
        seen, pending = {value}, [value]
        while pending:
            operands = {*self.program.ops[self.maker[pending.pop()]].operands} - seen
            seen |= operands
            pending.extend(v for v in operands if not self.live.exists[v])
        return {
            v for v in seen - {value}
            if self.live.exists[v] and 2 * self.size[v] >= self.size[value]
        }  # fmt: skip

    @functools.cached_property
    def summed(self) -> Ints:
        """Values that may be sums over devices."""
        return np.flatnonzero(self.reduces & (self.size > self.floor))

    @functools.cached_property
    def copies(self) -> Lifetimes:
        """One copy of each value for each of its use classes, ordered by value."""
        large = np.flatnonzero(
            (self.size > self.floor)[self.use_value] & ~self.host[self.use_value]
        )
        key = self.use_value[large] * self.use_classes + self.use_class[large]
        unique, copy = np.unique(key, return_inverse=True)
        start = np.full(len(unique), len(self.program.ops), dtype=np.int64)
        end = np.zeros(len(unique), dtype=np.int64)
        # A use may be part of an earlier kernel.
        first = np.minimum(self.use_op[large], self.live.use_end[large])
        last = self.live.use_end[large]
        ends = np.array([kind == "yield" for kind in self.program.kinds], dtype=bool)
        for loop in loops_of(self.program):  # one copy before the loop, if its value stays the same
            inside = (self.use_op[large] > loop.last_carry) & (self.use_op[large] <= loop.end)
            same = self.reshard_runs[large] <= self.program.repeats[loop.begin]
            kept = inside & same & ~ends[self.use_op[large]]
            first[kept], last[kept] = loop.begin, loop.end
        np.minimum.at(start, copy, first)
        np.maximum.at(end, copy, last + 1)
        value, use_class = np.divmod(unique, max(self.use_classes, 1))
        return Lifetimes(use_class, start, end, value)


def computed_values(program: Program, live: Liveness) -> Bools:
    """``[values]`` whether a value that is not in memory is more than one that is, moved."""
    more = np.zeros(len(program.values), dtype=bool)
    for value, op in enumerate(program.makers):
        operands = program.ops[op].operands
        if live.kinds[op] not in SOURCES and not live.exists[value]:
            moved = live.kinds[op] in _PLACING and len(operands) < 2
            more[value] = not moved or (len(operands) == 1 and more[operands[0]])
    return more


def liveness(
    program: Program,
    use_op: Ints,
    use_value: Ints,
    *,
    lanes: int = 1,
    delays: bool = False,
    recomputes_images: bool = False,
    copied: Bools | None = None,
    carried_in_place: Collection[int] = (),
) -> Liveness:
    """The live ranges of a program with uses ``(use_op[i], use_value[i])``, in program order.

    Values that are ``copied`` (``[values]``) never overwrite another.  Those ``carried_in_place``
    are in the buffers of donated arguments.

    ``lanes`` are the elements of a row of the tiles of a device, 1 for none.  XLA ``delays``
    products to hide all-gathers behind them, in loops until the iteration ends; on tiles, it delays
    those of groups anyway.  ``recomputes_images`` is
    :attr:`toast.hardware.Hardware.recomputes_images`.
    """
    count = len(program.values)
    kind_of_op = [*program.kinds]
    if lanes > 1:
        for number in _selecting_scatters(program, kind_of_op):
            kind_of_op[number] = "select"
        for number in spreading(program):
            kind_of_op[number] = "spread"
    repeated = _repeated(program, kind_of_op, lanes) if lanes > 1 else {}
    for value in repeated:
        kind_of_op[program.values[value].op] = "repeat"
    early = _earliest(program, kind_of_op)
    softmaxes = _softmaxes(program, kind_of_op) if lanes > 1 else []
    picked = _picked_from(program, kind_of_op) if lanes > 1 else frozenset()
    needed = picked if lanes > 1 else _of_libraries(program, kind_of_op)
    needed |= _sliced_for_loops(program, kind_of_op)
    of_vector_unit: frozenset[int] = frozenset()
    if lanes > 1:
        of_vector_unit = _products_of_vectors(program, kind_of_op)
        needed |= _vectors(program, kind_of_op, of_vector_unit)
    exists, merged, of_picked = _existing(
        program, kind_of_op, early, softmaxes, needed, picked, of_vector_unit,
        by_libraries=lanes == 1, recomputes_images=recomputes_images,
    )  # fmt: skip
    place = np.arange(len(program.ops))
    place[[*merged]] = early[[*merged]]
    last = len(program.ops)
    aliased = np.zeros(count, dtype=bool)
    for result, alias in zip(program.result_values, program.aliases, strict=True):
        if alias >= 0:
            aliased[result] = True
            # An argument is overwritten as soon as its new value can be computed.
            op = program.values[result].op
            place[op] = early[op]
    # The kernels of its consumers read a fused value: in reverse order, each op's kernel is the
    # last of those that the op is fused into.
    kernel_end = _kernel_ends(program, kind_of_op, exists, place)
    use_end = kernel_end[use_op]
    alone = np.array([kind not in _STORED for kind in kind_of_op])
    alone[[*merged]] = False
    maker = np.array(program.makers, dtype=np.int64)
    last_read = maker.copy()
    np.maximum.at(last_read, use_value, use_end)
    in_place = overwriting(program, kind_of_op, exists, alone[maker], last_read)
    start = place[maker] + in_place
    end = start.copy()
    for result, alias in zip(program.result_values, program.aliases, strict=True):
        if alias < 0:
            end[result] = last
            if lanes > 1:  # XLA for TPUs keeps results apart from temporaries
                start[result] = 0
                in_place[result] = False
    _share_loop_buffers(program, kind_of_op, aliased)
    aliased[[*carried_in_place]] = True
    if copied is not None:
        aliased &= ~copied
    # A loop starts in the buffer of its initial value, if nothing else needs it.
    initial = np.array([kind == "carry" for kind in kind_of_op], dtype=bool)[use_op]
    use_end[initial] -= 1
    delayed = np.zeros(len(use_op), dtype=np.int64)
    if lanes > 1:
        delayed = _delays(program, kind_of_op, use_op, all_gathers=True)
        extended = delayed
        if not delays:
            extended = _delays(program, kind_of_op, use_op, all_gathers=False)
        _extend_delayed(program, exists, use_op, use_value, use_end, extended)
        is_float32 = np.array([value.type.dtype == "f32" for value in program.values], dtype=bool)
        # The live ranges of these operands have the delay already.
        delayed[(extended > 0) & (exists | ~is_float32)[use_value]] = 0
        if delays:
            delayed = np.maximum(delayed, _delays_in_loops(program, kind_of_op, use_op))
    if lanes > 1:  # XLA moves a value to the host late, just before it moves it back
        for sent, fetched in round_trips(program):
            use_end[use_op == sent] = fetched
    np.maximum.at(end, use_value, use_end)
    if lanes > 1:
        for value, begin, until in moved_in_loops(program):
            start[value], end[value] = min(start[value], begin), max(end[value], until)
    for value in repeated:  # as late as possible
        start[value] = end[value]
    # What a loop reads from outside stays until its last iteration.
    made = maker[use_value]
    for begin, _, stop in loops_of(program):
        read = (use_end >= begin) & (use_end <= stop) & (made < begin) & ~initial
        np.maximum.at(end, use_value[read], stop)
    _extend_shared(program, kind_of_op, aliased, end)
    _share_passed_on(program, kind_of_op, exists, aliased, end, use_op, use_end)
    late = _kernel_ends(program, kind_of_op, exists, np.arange(len(program.ops)))
    fused_product = np.full(count, -1)
    if lanes > 1:
        for number, product in merged.items():
            fused_product[[*program.ops[number].results]] = product
    return Liveness(
        exists,
        aliased,
        fused_product,
        np.isin(np.arange(count), [*of_picked]),
        start,
        in_place,
        end,
        use_end,
        early,
        kernels(program, kind_of_op, exists, early) if lanes > 1 else early,
        late,
        kernel_kinds(program, lanes),
        _moves(program, repeated, lanes),
        repeated,
        delayed,
    )


def _delays(program: Program, kinds: list[str], use_op: Ints, *, all_gathers: bool) -> Ints:
    """``[uses]`` the op until which XLA delays a product that only the optimizer needs, or 0.

    XLA delays such products of the backward pass to hide collectives behind them: all-gathers, if
    ``all_gathers``, and permutes.  It delays products of groups in any case.  Products inside loops
    run in their iteration.
    """
    until = np.zeros(len(use_op), dtype=np.int64)
    looped = np.zeros(len(program.ops), dtype=bool)
    for begin, _, end in loops_of(program):
        looped[begin : end + 1] = True
    backward = np.array([each in ("backward", "recomputed") for each in program.passes], dtype=bool)
    grouped = np.array([kind in GROUPED for kind in kinds], dtype=bool)
    any_product = np.array([kind in PRODUCTS for kind in kinds], dtype=bool) | grouped
    product = grouped.copy()
    if all_gathers:
        product |= np.array([kind in MATRIX_PRODUCTS for kind in kinds], dtype=bool)
    if not product.any():
        return until
    needed = _needed_by(program, any_product | looped)
    run = np.flatnonzero(any_product & backward & ~looped)
    delayed = np.flatnonzero((product & backward & ~looped & ~needed)[use_op])
    if len(delayed):
        delay = np.where(grouped[use_op[delayed]] & all_gathers, _GROUPED_DELAY, DELAY)
        later = np.searchsorted(run, use_op[delayed]) + delay
        until[delayed] = run[np.minimum(later, len(run) - 1)]
    return until


def _needed_by(program: Program, some: Bools) -> Bools:
    """``[ops]`` the ops of which ``some`` others (``[ops]``) need the results."""
    needs, needed, makers = some.tolist(), [False] * len(program.ops), program.makers
    for number in range(len(program.ops) - 1, -1, -1):
        if needs[number]:
            for value in program.ops[number].operands:
                needs[makers[value]] = needed[makers[value]] = True
    return np.array(needed, dtype=bool)


def _delays_in_loops(program: Program, kinds: list[str], use_op: Ints) -> Ints:
    """``[uses]`` the last product of an iteration, if that of the use may run beside it; or 0.

    No other product of the iteration needs its result, as that of the gradient of a weight.
    """
    until, loops = np.zeros(len(use_op), dtype=np.int64), loops_of(program)
    backward = np.array([each in ("backward", "recomputed") for each in program.passes], dtype=bool)
    any_product = np.array([kind in PRODUCTS | GROUPED for kind in kinds], dtype=bool)
    product = np.array([kind in MATRIX_PRODUCTS for kind in kinds], dtype=bool)
    for begin, _, end in loops:
        here = np.zeros(len(program.ops), dtype=bool)
        here[begin : end + 1] = True
        needs = any_product & here
        for inner in loops:
            if begin < inner.begin and inner.end <= end:
                here[inner.begin : inner.end + 1] = False
                needs[inner.begin : inner.end + 1] = True
        run = np.flatnonzero(any_product & backward & here)
        if not len(run):
            continue
        needed = np.zeros(len(program.ops), dtype=bool)
        for number in range(end, begin - 1, -1):
            users = [user for value in program.ops[number].results for user in program.users[value]]
            needed[number] = any(begin <= user <= end and needs[user] for user in users)
            needs[number] |= needed[number]
        until[(product & backward & here & ~needed)[use_op]] = run[-1]
    return until


def _extend_delayed(
    program: Program, exists: Bools, use_op: Ints, use_value: Ints, use_end: Ints, until: Ints
) -> None:
    """Extend uses to the ops until which their products are delayed: ``until`` (``[uses]``, or 0).

    If the kernel of a product computes an operand that is not float32, what it computes it from
    waits.
    """
    np.maximum(use_end, until, out=use_end)
    pending = [
        (int(use_value[use]), int(until[use])) for use in np.flatnonzero(until)
        if program.values[use_value[use]].type.dtype != "f32"
    ]  # fmt: skip
    while pending:
        value, stop = pending.pop()
        if not exists[value]:
            op = program.makers[value]
            for use in range(*np.searchsorted(use_op, [op, op + 1]).tolist()):
                if use_end[use] < stop:
                    use_end[use] = stop
                    pending.append((int(use_value[use]), stop))


def narrower_scores(program: Program, live: Liveness) -> Ints:
    """Exponentials of attention's scores, twice as wide as the product of queries and keys.

    If a device has one sequence, head, group of heads or query of a group, XLA drops this dimension
    behind the product, which therefore does not compute the exponentials.  The scores are in memory
    instead.  The product is one of batches, and the last two dimensions are the sequences'.
    """
    batched = [bool(dimensions_in(each, "lhs_batching_dimensions")) for each in program.signatures]
    width = program.element_bytes
    return np.array([
        value for value, product in enumerate(live.fused_product.tolist())
        if product >= 0 and 2 * width[product] == width[value]
        and batched[program.ops[program.makers[product]].signature]
        and program.kinds[program.makers[value]] == "exponential"
    ], dtype=np.int64)  # fmt: skip


def written_wide(program: Program, live: Liveness, narrower: Collection[int]) -> frozenset[int]:
    """Results of products whose kernels write nothing but elements of 32 bits.

    Kernels pack narrower elements before they write them.  XLA widens a result before it writes it
    if all that read it do, as for logits, but not in backward passes.  ``narrower`` are values of
    which half of the bits are stored.
    """
    width = [*program.element_bytes]
    for value in narrower:
        width[value] //= 2
    written: dict[int, list[int]] = {}
    for value, product in enumerate(live.fused_product.tolist()):
        if product >= 0 and live.exists[value]:
            written.setdefault(product, []).append(width[value])
    for number, op in enumerate(program.ops):
        if live.kinds[number] == "dot_general" and live.exists[op.results[0]]:
            (result,) = op.results
            users = program.users[result] if program.passes[number] != "backward" else ()
            widened = {
                width[program.ops[user].results[0]] if program.kinds[user] == "convert" else 0
                for user in users
            }
            written.setdefault(result, []).append(
                LANE_BYTES if widened == {LANE_BYTES} else width[result]
            )
    return frozenset(
        result for result, widths in written.items() if all(each == LANE_BYTES for each in widths)
    )


def spreading(program: Program) -> list[int]:
    """Slices that skip rows or lanes of tiles, and pads between elements: kernels of their own.

    Associative scans have them in the forward and the backward pass.  XLA's schedule has no time
    for such kernels.
    """
    spreads = [_spreads(signature) for signature in program.signatures]
    return [
        number for number, op in enumerate(program.ops)
        if spreads[op.signature] and program.kinds[program.makers[op.operands[0]]] not in SOURCES
    ]  # fmt: skip


def _spreads(signature: Signature) -> bool:
    """Whether an op skips elements of the last two dimensions, or puts others between elements.

    Kernels fuse slices along other dimensions, but no pads.
    """
    if signature.kind == "slice":
        apart, sizes = dimensions_in(signature, "strides"), signature.results[0].shape
        skips = [step > 1 and size > 1 for step, size in zip(apart, sizes, strict=False)][-2:]
    elif signature.kind == "pad":
        apart, sizes = dimensions_in(signature, "interior_padding"), signature.operands[0].shape
        skips = [step > 0 and size > 1 for step, size in zip(apart, sizes, strict=False)]
    else:
        return False
    return any(skips) and 0 not in sizes


def _repeated(program: Program, kinds: list[str], lanes: int) -> dict[int, int]:
    """Values that repeat heads for products of vectors, and the dimension of these heads.

    A token attends to a cache ``[batch, keys, heads, size]``, of which several queries share each
    head.  Joining the heads with their copies changes tiles, so that a kernel of its own repeats
    them, unless a device has one head.  If heads are no whole rows of tiles, the keys are in the
    lanes: a product that does not sum over them repeats heads as it reads.
    """
    found, multiplies = {}, products_of_vectors(program)
    for number, op in enumerate(program.ops):
        if not multiplies[op.signature] or kinds[number] != "dot_general":
            continue
        for value, name in zip(op.operands, _CONTRACTED_DIMS, strict=True):
            rank = len(program.values[value].type.shape)
            summed = dimensions_in(program.signatures[op.signature], name)
            sums_keys = bool(summed) and rank - 1 not in summed
            while kinds[program.values[value].op] in MOVING:
                (value,) = program.ops[program.values[value].op].operands
            made = program.ops[program.values[value].op]
            if kinds[program.values[value].op] == "broadcast_in_dim":
                signature = program.signatures[made.signature]
                size, before = signature.results[0].shape, signature.operands[0].shape
                kept = {
                    d for d, elements in zip(
                        dimensions_in(signature, "broadcast_dimensions"), before, strict=True
                    ) if elements > 1
                }  # fmt: skip
                new = [d for d in range(len(size)) if size[d] > 1 and d not in kept]
                apart = sums_keys or size[-1] % lanes == 0
                if len(new) == 1 and 0 < new[0] < len(size) - 1 and apart:
                    found[value] = new[0] - 1
    return found


def _moves(program: Program, repeated: Mapping[int, int], lanes: int) -> Floats:
    """``[ops]`` how often the vector unit moves each element of kernels that change tiles.

    Repeated heads are in tiles of as many rows as there are copies of each, unless keys are in the
    lanes: moves of two rows take as long as those of eight.
    """
    moves = np.zeros(len(program.ops))
    for value, heads in repeated.items():
        shape = program.values[value].type.shape
        rows = shape[heads + 1] if shape[-1] % lanes == 0 else SUBLANES
        moves[program.values[value].op] = max(1.0, SUBLANES / rows)
    return moves


def _selecting_scatters(program: Program, kinds: list[str]) -> list[int]:
    """Scatters that XLA computes as an elementwise op: select(position == index, update, operand).

    Each row has one index, and the index one element: the gradient of the logits of the labels.
    """
    found = []
    for number, op in enumerate(program.ops):
        if kinds[number] != "scatter" or len(op.results) > 1:
            continue
        signature = program.signatures[op.signature]
        shape, updates = signature.results[0].shape, math.prod(signature.operands[2].shape)
        batch, inserted = (dimensions_in(signature, name) for name in _SCATTERED_DIMS)
        rows = math.prod(shape[d] for d in batch)
        if len(batch) + len(inserted) == len(shape) and updates == rows:
            found.append(number)
    return found


def summed_selections(program: Program, live: Liveness) -> Ints:
    """The results of scatters that kernels compute as selections, and that a kernel sums.

    They are gradients of picked logits, summed by that of a softmax.
    """
    selected, seen = list[int](), set[int]()
    for number, op in enumerate(program.ops):
        value = op.operands[0] if program.kinds[number] == "reduce" else -1
        while value >= 0 and value not in seen and not live.exists[value]:
            seen.add(value)
            maker = program.values[value].op
            if program.kinds[maker] == "scatter":
                selected.append(value)
            operands = program.ops[maker].operands
            value = operands[0] if len(operands) == 1 else -1
    return np.array(sorted(selected), dtype=np.int64)


def added_scatters(program: Program, live: Liveness) -> list[tuple[int, int]]:
    """Products and scatters whose results one op adds: the op of the product, and of the scatter.

    Nothing but the order of their elements changes before; the scatter is a kernel of its own.
    """
    pairs = []
    for number, op in enumerate(program.ops):
        if program.kinds[number] != "add":
            continue
        makers = []
        for value in op.operands:
            maker = program.values[value].op
            while program.kinds[maker] in _TURNING:
                maker = program.values[program.ops[maker].operands[0]].op
            makers.append(maker)
        pairs += [
            (one, other) for one, other in (makers, makers[::-1])
            if program.kinds[one] in MATRIX_PRODUCTS and program.kinds[other] == "scatter"
            and live.exists[program.ops[other].results[0]]
        ]  # fmt: skip
    return pairs


def _picked_from(program: Program, kinds: list[str]) -> frozenset[int]:
    """Values of which a gather picks single elements, one of each row: they are in memory.

    The kernel of such a gather, as that of the probabilities of labels, fuses no other op.
    """
    return frozenset(
        op.operands[0] for number, op in enumerate(program.ops)
        if kinds[number] == "gather"
        and math.prod(dimensions_in(program.signatures[op.signature], "slice_sizes")) == 1
        and kinds[program.values[op.operands[0]].op] not in SOURCES
    )  # fmt: skip


def dimensions_in(signature: Signature, name: str) -> tuple[int, ...]:
    """The dimensions in an attribute."""
    dims = signature.attribute(name)
    return tuple(int(d) for d in dims) if isinstance(dims, tuple) else ()


def _earliest(program: Program, kinds: list[str]) -> Ints:
    """``[ops]`` the op after which a fusible op could be computed, itself for others."""
    makers, alone = program.makers, _STORED | _NEEDING
    early = [*range(len(program.ops))]
    for number, op in enumerate(program.ops):
        if kinds[number] not in alone:
            operands = op.operands
            if len(operands) == 1:
                early[number] = early[makers[operands[0]]]
            else:
                early[number] = max([early[makers[v]] for v in operands], default=0)
    return np.array(early, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class _Softmax:
    """Scores of attention, of which XLA's kernel for TPUs writes only the exponentials."""

    product: int
    #: Values between the product and the exponential, both excluded.
    between: frozenset[int]
    exponential: int


def _softmaxes(program: Program, kinds: list[str]) -> list[_Softmax]:
    """Products whose kernel also computes ``exp(x - max(x))`` of its rows.

    Nothing else may need the scores: they go through elementwise ops to the exponential and to the
    maximum that is subtracted.
    """
    found = []
    for number, value in enumerate(program.values):
        if kinds[value.op] != "exponential":
            continue
        difference = program.ops[value.op].operands[0]
        if kinds[program.values[difference].op] != "subtract":
            continue
        chain: list[int] = []
        here = difference
        while kinds[program.values[here].op] not in _STORED:
            chain.append(here)
            same = [
                v for v in program.ops[program.values[here].op].operands
                if _scores(program, kinds, v, math.prod(value.type.shape))
            ]  # fmt: skip
            if len(same) != 1:
                break
            here = same[0]
        product = program.ops[program.values[here].op]
        if kinds[program.values[here].op] not in PRODUCTS or of_vectors(
            program.signatures[product.signature]
        ):
            continue
        inside = {program.values[v].op for v in chain} | {value.op}
        users = {user for v in (here, *chain) for user in program.users[v]} - inside
        if users and all(kinds[user] == "reduce" for user in users):
            found.append(_Softmax(here, frozenset(chain), number))
    return found


def _scores(program: Program, kinds: list[str], value: int, size: int) -> bool:
    """Whether a value of so many elements follows from a product by elementwise ops."""
    while math.prod(program.values[value].type.shape) == size:
        kind = kinds[program.values[value].op]
        if kind in _STORED | SOURCES:
            return kind in PRODUCTS
        operands = program.ops[program.values[value].op].operands
        # select(mask, scores, constant): the mask is another value.
        wide = [v for v in operands if program.values[v].type.dtype != "i1"]
        value = next((v for v in wide if math.prod(program.values[v].type.shape) == size), value)
        if value not in wide:
            return False
    return False


def _of_libraries(program: Program, kinds: list[str]) -> frozenset[int]:
    """Operands of products that a kernel computes first, where libraries compute the products.

    XLA generates kernels for products of which operands are only moved or rounded before: what is
    moved or rounded is in memory.
    """
    needed: set[int] = set()
    for number, op in enumerate(program.ops):
        for value in op.operands if kinds[number] in PRODUCTS else ():
            while kinds[program.values[value].op] in _ROUNDING:
                value = program.ops[program.values[value].op].operands[0]
            needed.add(value)
    return frozenset(needed)


def _vectors(program: Program, kinds: list[str], products: frozenset[int]) -> frozenset[int]:
    """Vectors that ``products`` multiply with matrices, but for constants: they are in memory.

    The kernel of such a product reads the vector for each column of the matrix, so that a kernel of
    its own computes it, unless it is another value in memory in another shape.
    """
    found = set()
    for number in products:
        operands = program.ops[number].operands
        value = same = min(operands, key=lambda v: math.prod(program.values[v].type.shape))
        while kinds[program.values[same].op] in _PLACING - {"transpose"}:
            (same,) = program.ops[program.values[same].op].operands
        kind, placed = kinds[program.values[same].op], kinds[program.values[value].op]
        viewed = kind in SOURCES or (kind in _STORED and placed != "broadcast_in_dim")
        if same == value or not viewed:
            found.add(value)
    return frozenset(found)


def _products_of_vectors(program: Program, kinds: list[str]) -> frozenset[int]:
    """The ops that are batches of products of a vector and a matrix."""
    multiplies = products_of_vectors(program)
    return frozenset(
        number for number, op in enumerate(program.ops)
        if multiplies[op.signature] and kinds[number] == "dot_general"
    )  # fmt: skip


def _sliced_for_loops(program: Program, kinds: list[str]) -> frozenset[int]:
    """Slices from outside of loops that read them: a loop has complete arrays, so that XLA copies.

    Such are the stacked weights of a scan over some of the layers.
    """
    loops = loops_of(program)
    return frozenset(
        number for number, value in enumerate(program.values)
        if kinds[value.op] == "slice"
        and any(
            value.op < loop.begin <= op <= loop.end
            for op in program.users[number] for loop in loops
        )
    )  # fmt: skip


def _existing(
    program: Program,
    kinds: list[str],
    early: Ints,
    softmaxes: Sequence[_Softmax] = (),
    needed: frozenset[int] = frozenset(),
    logits: frozenset[int] = frozenset(),
    alone: frozenset[int] = frozenset(),
    *,
    by_libraries: bool = False,
    recomputes_images: bool = False,
) -> tuple[Bools, dict[int, int], set[int]]:
    """Which values are in memory; ops that a product's kernel computes, and this product's result.

    The third result is :attr:`Liveness.of_picked`.

    Kernels of libraries (``by_libraries``) compute nothing but products, and round their results.
    Those of the products that are ``alone`` (of vectors) compute nothing else at all.

    The kernels of all consumers, products included, compute a fusible op again.  A value is stored
    instead if it depends on several large values, which several kernels would keep alive longer, or
    on expensive ops that several products need and that no product can compute with its result.
    """
    values, makers = program.values, program.makers
    size = program.value_bytes
    elements = program.elements
    users = program.users
    needing = {
        value for number, op in enumerate(program.ops) if kinds[number] in _NEEDING
        for value in op.operands
    } | needed  # fmt: skip
    exists = [
        kinds[op] not in SOURCES and (kinds[op] in _STORED or number in needing)
        for number, op in enumerate(makers)
    ]
    inside: set[int] = set()
    for softmax in softmaxes:
        exists[softmax.product], exists[softmax.exponential] = False, True
        inside |= {softmax.product, *softmax.between}
    # Large values that each value depends on, from the first op to the last.
    inputs: list[frozenset[int]] = [frozenset()] * len(values)
    parts = [*inputs]  # of what follows from each value: itself if it is in memory, or its inputs
    picked, costly = [False] * len(values), [False] * len(values)
    for number, op in enumerate(makers):
        if kinds[op] in EXPENSIVE:
            difference = of_difference(program, kinds, op)
            picked[number] = difference in logits
            costly[number] = difference is None or difference in needed
    of_picked = set[int]()
    for number, op in enumerate(makers):
        operands = program.ops[op].operands
        inputs[number] = _joined([parts[v] for v in operands])
        parts[number] = frozenset([number]) if exists[number] else inputs[number]
        for v in operands:
            if not exists[v]:
                costly[number] |= costly[v]
                picked[number] |= picked[v]
    # Kernels that compute each value, from the last op to the first.
    kernels: list[frozenset[int]] = [frozenset()] * len(values)
    of_several = set[int]()  # stored only because they follow from several large values
    merged = {values[softmax.exponential].op: softmax.product for softmax in softmaxes}
    alone_in = [frozenset([number]) for number in range(len(program.ops))]
    first = [op.results[0] if op.results else -1 for op in program.ops]
    for number in range(len(values) - 1, -1, -1):
        computed_in = kernels[number] = _joined([
            alone_in[user] if first[user] < 0 or exists[first[user]] else kernels[first[user]]
            for user in users[number]
        ])  # fmt: skip
        kind = kinds[makers[number]]
        if number in inside or (exists[number] and kind not in PRODUCTS):
            continue
        if kind in PRODUCTS and len(computed_in) == 1:
            # A product fuses its only consumer, an elementwise kernel whose other operands are
            # ready, and whose result is no larger.
            (kernel,) = computed_in
            fuses = not by_libraries or kinds[kernel] == "convert"
            fuses &= kinds[kernel] not in _STORED | _NEEDING
            fuses &= kernel not in merged and values[number].op not in alone
            fuses &= bool(early[kernel] == values[number].op)
            if fuses and elements[program.ops[kernel].results[0]] <= elements[number]:
                merged[kernel] = number
                exists[number] = False
        elif not exists[number] and kind not in SOURCES and len(computed_in) > 1:
            large = [v for v in inputs[number] if 2 * size[v] >= size[number]]
            # Convolutions compute operands again: float32 ones, to round them, or all.
            is_float32 = values[number].type.dtype == "f32"
            several = MATRIX_PRODUCTS if is_float32 or recomputes_images else PRODUCTS
            products = sum(kinds[kernel] in several for kernel in computed_in)
            if picked[number]:  # also those of which the kernel computes a new weight
                products += sum(kernel in merged for kernel in computed_in)
            again = costly[number] and products > 1
            again &= kinds[early[values[number].op]] not in PRODUCTS
            stored = len(large) > 1 or (again and len(large) > 0)
            # What follows cheaply from one other value, no larger, is computed again.
            sources = {
                v for v in program.ops[values[number].op].operands
                if any(2 * size[m] >= size[number] for m in ({v} if exists[v] else inputs[v]))
            }  # fmt: skip
            cheap = kind not in EXPENSIVE and sum(size[v] for v in sources) <= size[number]
            # Group norms compute in groups of features; convolutions read their results whole.
            joined = kind == "reshape" and not by_libraries
            joined &= any(kinds[kernel] == "convolution" for kernel in computed_in)
            if joined:
                (grouped,) = program.ops[makers[number]].operands
                joined = len(values[number].type.shape) < len(values[grouped].type.shape)
                joined &= len(users[grouped]) == 1 and not exists[grouped]
            cheap &= not joined
            exists[number] = stored and not (len(sources) == 1 and cheap)
            if exists[number] and again and picked[number] and kind not in EXPENSIVE:
                of_picked.add(number)
            if exists[number] and (is_float32 or joined) and not again:
                of_several.add(number)
    # Some of these follow from a single value, now that values between are stored.  Convolutions,
    # and kernels without a product, compute them again.  What the kernel of a product writes stays.
    for number in sorted(of_several):
        computed_alone = makers[number] not in merged
        if computed_alone and not any(kinds[k] in MATRIX_PRODUCTS for k in kernels[number]):
            sources = _stored_before(program, exists, number)
            exists[number] = sum(2 * size[v] >= size[number] for v in sources) > 1
    return np.array(exists, dtype=bool), merged, of_picked


def _stored_before(program: Program, exists: Sequence[bool], value: int) -> set[int]:
    """The values in memory from which a value follows, by others that are not in memory."""
    stored, seen, pending = set[int](), set[int](), [value]
    while pending:
        for operand in program.ops[program.makers[pending.pop()]].operands:
            if exists[operand]:
                stored.add(operand)
            elif operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return stored


def op_before(program: Program, op: int, kinds: Collection[str]) -> int:
    """``op``, or the op before a chain of ops of some kinds, along their first operands."""
    while program.kinds[op] in kinds:
        op = program.makers[program.ops[op].operands[0]]
    return op


def of_difference(program: Program, kinds: Sequence[str], op: int) -> int | None:
    """What an op subtracts from, if it is the exponential of a difference, as in a softmax.

    Products compute such exponentials again.
    """
    if kinds[op] != "exponential":
        return None
    maker = program.makers[program.ops[op].operands[0]]
    return program.ops[maker].operands[0] if kinds[maker] == "subtract" else None


def _joined(sets: Sequence[frozenset[int]]) -> frozenset[int]:
    if len(sets) == 1:
        return sets[0]
    if len(sets) == 2:  # mostly, one is a part of the other
        one, other = sets
        return one if one is other or one >= other else other if other >= one else one | other
    return frozenset().union(*sets)


def _writes(program: Program, exists: Bools) -> Bools:
    """``[ops]`` whether the first result is in memory (``exists``: ``[values]``), or none is."""
    stored = exists.tolist()
    return np.array([not op.results or stored[op.results[0]] for op in program.ops], dtype=bool)


def _share_loop_buffers(program: Program, kinds: list[str], aliased: Bools) -> None:
    """Mark values that XLA computes in place: results of loops, and updates of a part."""
    for number, op in enumerate(program.ops):
        if kinds[number] == "yield" or (
            kinds[number] == "dynamic_update_slice"
            and kinds[program.values[op.operands[0]].op] != "argument"
        ):
            aliased[op.results[0]] = True


def allocated_only(program: Program) -> Bools:
    """``[values]`` whether it is the first value of a stack that a loop fills from its beginning.

    XLA only allocates such a buffer if its value is constant.  It does not see that a loop which
    runs backward (its index is a difference) fills a stack, too, and writes the first value.
    """
    difference = [False] * len(program.values)
    forward, backward = set[int](), set[int]()
    for kind, op in zip(program.kinds, program.ops, strict=True):
        if kind != "carry":
            found = kind == "subtract" or any(difference[value] for value in op.operands)
            for value in op.results:
                difference[value] = found
        if kind == "dynamic_update_slice":
            carry = program.makers[op.operands[0]]
            if program.kinds[carry] == "carry":
                backwards = any(difference[value] for value in op.operands[2:])
                (backward if backwards else forward).update(program.ops[carry].operands)
    allocated = np.zeros(len(program.values), dtype=bool)
    allocated[[*(forward - backward)]] = True
    return allocated


def _extend_shared(program: Program, kinds: list[str], aliased: Bools, end: Ints) -> None:
    """Extend each buffer to the end of the last value in it."""
    carry_of = {op: other for op, other in program.ties if kinds[op] == "yield"}
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        if number in carry_of:
            buffer = program.ops[carry_of[number]].results[0]
            end[buffer] = max(end[buffer], number, end[op.results[0]])
        elif kinds[number] == "dynamic_update_slice" and aliased[op.results[0]]:
            end[op.operands[0]] = max(end[op.operands[0]], end[op.results[0]])


def _share_passed_on(
    program: Program,
    kinds: list[str],
    exists: Bools,
    aliased: Bools,
    end: Ints,
    use_op: Ints,
    use_end: Ints,
) -> None:
    """Values that cross a barrier or the boundary of a manual region stay in their buffers."""
    if PASSED_ON.isdisjoint(kinds):
        return
    use_of = {op: use for use, op in enumerate(use_op.tolist()) if kinds[op] in PASSED_ON}
    for op in sorted(use_of, reverse=True):
        (operand,), (result,) = program.ops[op].operands, program.ops[op].results
        if exists[result] and not aliased[result]:
            aliased[result] = True
            use_end[use_of[op]] = max(use_end[use_of[op]], end[result])
            end[operand] = max(end[operand], end[result])


def _kernel_ends(program: Program, kinds: list[str], exists: Bools, place: Ints) -> Ints:
    """``[ops]`` the last kernel that computes each op."""
    ends, users = place.tolist(), program.users
    fused = np.array([kind not in PRODUCTS for kind in kinds], dtype=bool)
    fused &= ~_writes(program, exists)
    for number in np.flatnonzero(fused)[::-1].tolist():
        reading = [ends[user] for value in program.ops[number].results for user in users[value]]
        if reading:
            ends[number] = max(reading)
    return np.array(ends, dtype=np.int64)
