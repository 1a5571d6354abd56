"""The tables from which states are priced: one per entity, each a record of arrays.

An entity is an **op class** (:mod:`toast.space`), a class of **products**, a **slot** (a tensor at
a place of an op class), a **value class** (values defined at one slot and used at the same slots)
or a **use class** (a value class at one of its use slots).  A price is a sum over entities; only
the memory timeline distinguishes single values.  ``table.take(rows)`` selects rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy import sparse

from toast.cost.entities import Bools, Dims, Entity, Floats, Ints
from toast.cost.overlap import Windows


@dataclasses.dataclass(frozen=True)
class EntityTable:
    """Arrays whose leading axis counts entities."""

    def __len__(self) -> int:
        return len(getattr(self, dataclasses.fields(self)[0].name))

    def take(self, rows: npt.NDArray[np.generic] | slice) -> Self:
        """The table with these rows, in this order; row numbers of other tables do not change."""
        fields = (field.name for field in dataclasses.fields(self))
        return type(self)(**{name: getattr(self, name)[rows] for name in fields})


@dataclasses.dataclass(frozen=True)
class Slots(EntityTable):
    """``[T]`` tensors at places of op classes, which have ``F`` factors at most."""

    op_class: Ints
    dim: Dims  # [T, F + 1] dimension that a factor shards, or -1; the last column: no factor
    #: ``[T, F + 1]`` what a shard along a factor needs from its neighbours, as a fraction of the
    #: dimension; infinite for another whole shard, 0 for no exchange.
    halo: Floats
    #: ``[T, F + 1]`` how far shards along a factor go around the devices, as a fraction of the
    #: dimension; 0 if they do not.
    ring: Floats


@dataclasses.dataclass(frozen=True)
class OpClasses(EntityTable):
    """``[K]`` classes of ops."""

    count: Ints  # ops in a step
    flops: Floats  # floating-point operations of a product or a custom call
    dtype: Ints  # element type that decides the peak FLOP/s: index into ``Tables.dtypes``
    product: Bools  # whether they are matrix products or convolutions
    peak_seconds: Floats  # of one op on one device; 0 before :meth:`Tables.on_hardware`


@dataclasses.dataclass(frozen=True)
class Products(EntityTable):
    """``[P]`` op classes that are matrix products or convolutions."""

    op_class: Ints
    size: Floats  # [P, 4] rows, columns and depth of one product, and products in a batch
    group: Ints  # [P, F + 1] which of these a factor shards: 0 to 3, or 4 for none
    vector: Bools  # a batch of products of a vector and a matrix
    #: Of the larger operand of such a product: its last two dimensions, and their factors.
    tile: Ints  # [P, 2], 1 without such a product
    tile_factor: Ints  # [P, 2], F without such a product or if the product sums over the rows
    images: Ints  # of a convolution, 0 for other products
    image_factor: Ints  # the factor of the images; -1 if there are none, or several
    #: Features of an image that a convolution sums at every position of its window, and their
    #: factor, -1 for several.  0 if it sums over images (the gradient of a kernel), over groups of
    #: features, or along sequences.
    features: Ints
    feature_factor: Ints
    reversed: Bools  # whether the kernel is reversed, as for the gradient of images
    of_images: Bools  # a convolution along two dimensions or more
    sums_images: Bools  # such a one that sums over images: the gradient of a kernel
    grouped: Bools  # a convolution whose features are in groups, or a gradient of it
    depthwise: Bools  # such a one whose groups have one feature
    of_grouped: Bools  # the gradient of the kernel of such a one
    keeps: Bools  # whether it is in a loop in which its larger operand does not change
    wide: Bools  # :func:`toast.cost.liveness.written_wide`
    padding: Floats  # bytes of the result in tiles over those without, if it has attention's scores


@dataclasses.dataclass(frozen=True)
class ProductTensors(EntityTable):
    """Operands and results of products, grouped by class."""

    product: Ints
    slot: Ints
    bytes: Floats
    result: Bools  # whether it is a result
    viewed: Floats  # share of the runs that read a copy of an argument, or of a part, from memory
    #: Slot of the argument that it is, or of which it is a part, in the element type that products
    #: read; and of one that products round as they read it.  -1 for none.
    argument: Ints
    rounded: Ints
    reshaped: Bools  # whether its dimensions are not those of this argument
    argument_bytes: Floats  # as they are in an argument that products round
    fetched: Floats  # share of its ops for which it may be an argument in fast memory
    rounding: Floats  # bytes that kernels before it access to round the argument, if they do
    wide: Bools  # whether its kernel reads or writes float32 elements
    sizes: Ints  # [rows, R] elements of images along each dimension, 1 for other tensors
    tiled: Bools  # [rows, R] the dimensions in tiles of images, none for other tensors

    @functools.cached_property
    def images(self) -> Ints:
        """The rows of images."""
        return np.flatnonzero(self.tiled.any(axis=1))


@dataclasses.dataclass(frozen=True)
class KernelTerms(EntityTable):
    """Terms of the costs of custom calls, grouped by op class."""

    op_class: Ints
    quantity: Ints  # index into :data:`toast.program.QUANTITIES`
    amount: Floats  # of one unsharded call
    over: Bools  # [rows, F + 1] whether sharding a factor divides it
    #: The factor of causal queries, ``F`` for none; for each query, the most keys that it sees, and
    #: the early queries, which see fewer.
    queries: Ints
    most: Floats
    early: Floats


@dataclasses.dataclass(frozen=True)
class KernelTensors(EntityTable):
    """Operands and results that custom calls with costs move as a whole, grouped by op class."""

    op_class: Ints
    slot: Ints
    bytes: Floats


@dataclasses.dataclass(frozen=True)
class ValueClasses(EntityTable):
    """``[C]`` classes of values."""

    slot: Ints  # that defines it
    count: Ints  # values in a step
    sums: Ints  # all-reduces of them in a step, if they are summed whole over devices
    bytes: Floats  # of one unsharded value
    stored: Floats  # share of these that is in memory, unless the value is summed over devices
    as_operand: Floats  # bytes of the operand of a loop over those of a value that kernels compute
    sizes: Ints  # [C, R] elements along each dimension, 1 beyond its rank
    rank: Ints  # number of dimensions
    tiled: Bools  # [C, R] dimensions that may be in its tiles
    written: Floats  # accesses of a memory-bound kernel that writes it; 0 if none does
    kernels: Floats  # memory-bound kernels in a step that compute its values
    sum_kernels: Floats  # the same for what products fuse, if their results are summed
    sum_moves: Floats  # bytes that these kernels move in a step
    transfers: Floats  # to the memory of the host or back, of all its values in a step
    fused: Bools  # not in memory: the kernels of ops that use them compute its values
    computed: Bools  # not in memory, and more than a value that is, moved
    of_picked: Bools  # the gradient of logits (:attr:`toast.cost.liveness.Liveness.of_picked`)
    of_images: Bools  # of a convolution along two dimensions or more
    banded: Bools  # an image of :func:`toast.cost.image_tiles.may_be_in_bands`
    selected: Bools  # :func:`toast.cost.liveness.summed_selections`
    adds_scatter: Bools  # a product of :func:`toast.cost.liveness.added_scatters`
    scores: Bools  # exponentials of :func:`toast.cost.liveness.narrower_scores`
    merged: Bools  # a product's result, fused with its only consumer unless summed
    repeated: Ints  # the dimension of heads that it repeats, if it is in memory for several; or -1
    headed: Ints  # the dimension of heads that may be in the lanes of its tiles; or -1
    transcendentals: Floats  # exponentials and the like, of all its values in a step
    bit_operations: Floats  # of random bits, of all its values in a step
    summed_whole: Bools  # XLA sums it whole over many devices, even if parts suffice
    grouped: Bools  # the product of groups of rows, which a kernel of its own writes to memory
    reduces: Bools  # [C, F + 1] the defining op reduces over the factor
    gathered: Bools  # devices gather its partial results, because no collective combines them
    constant: Bools  # computed from constants alone: XLA sends it to no device
    remade: Bools  # a device-local program computes it anew in another sharding
    free: Floats  # share of products that may run beside its sums
    arguments: Ints  # number of the program's arguments in it
    outer: Bools  # arguments, parts of them and results, which are in memory whatever their size
    may_pad: Bools  # some sharding pads it to lanes; false before :meth:`Tables.on_hardware`
    #: The kind of collective of a manual region that computes it: index into
    #: ``toast.hardware.COLLECTIVES``, -1 for none; and its axes, axis ``a`` is bit ``a``.  None
    #: before :meth:`Tables.on_hardware`.
    collective: Ints
    group: Ints
    workspace: Floats  # [C, W] bytes that the kernel which computes it needs meanwhile, by term
    workspace_over: Bools  # [C, W, F + 1] whether sharding a factor divides such a term
    looped: Bools  # [C, R] dimensions of a product whose parts may be summed around the devices
    condition_reads: Floats  # by conditions of loops, of all its values in a step
    rounded: Floats  # rounded copies of stacked arguments, of all its values in a step
    #: Of a product that computes it: sizes, and which of them a factor shards, as in
    #: :class:`Products`; bytes of the two operands; which of the sizes has each dimension.
    product_size: Floats  # [C, 4], 1 without a product
    product_group: Ints  # [C, F + 1], 4 without a product
    product_bytes: Floats  # [C, 2], 0 without a product
    product_side: Ints  # [C, R], 4 without a product
    #: Seconds of independent products that may run beside its sums, if all devices share products
    #: evenly; 0 before :meth:`Tables.on_hardware`.
    independent_s: Floats

    @property
    def element(self) -> Floats:
        """``[C]`` bytes of an element; 0 for empty values."""
        return np.asarray(self.bytes / np.maximum(self.sizes.prod(axis=1), 1))


@dataclasses.dataclass(frozen=True)
class UseClasses(EntityTable):
    """``[U]`` value classes at a use slot, grouped by value class."""

    value: Ints  # value class
    slot: Ints
    count: Floats  # how often a reshard for it runs in a step
    number: Ints  # uses in the program, without repetition
    runs: Floats  # runs in a step of the ops that use it
    reads: Floats  # by memory-bound kernels in a step, and writes of updates into buffers
    #: Those of them for sums that the kernel of a product computes
    #: (:func:`toast.cost.attention_scores.sums_in_products`), unless it stores narrower scores.
    reads_in_products: Floats
    added_reads: Floats  # by products in loops, which add to it, in a step
    added_room: Floats  # bytes of all such sums of the loop, over those of this one
    row_moves: Floats  # by loops that move all its rows, one after the other, in a step
    row_kernels: Floats  # kernels of a step that do it, one for each array
    row_pairs: Floats  # the same, one for two arrays
    cache_copies: Floats  # :class:`toast.cost.stacked_caches.CacheCopy`, in a step
    free: Floats  # share of products that may run beside a reshard
    share: Floats  # bytes of an element at the use over those of the value's element
    looped: Bools  # [U, R] dimensions of which a product may use one shard after the other
    sums: Bools  # [U, F + 1] factors over which such a product sums
    result_bytes: Floats  # of such a product, unsharded
    independent_s: Floats  # as of :class:`ValueClasses`, for a reshard
    loop: Ints  # in whose body it is: loops that use the value, numbered from 0
    early: Bools  # whether a product outside loops uses a value that depends on arguments alone
    overwriting: Ints  # uses as results that overwrite arguments
    update: Bools  # whether a value is written into a part of another array
    lookup: Bools  # whether rows are looked up in it
    after_product: Bools  # whether it follows from a product

    @functools.cached_property
    def first(self) -> Ints:
        """``[C']`` the first use class of each value class that is used."""
        return np.flatnonzero(np.diff(self.value, prepend=-1))


@dataclasses.dataclass(frozen=True)
class CopyPairs(EntityTable):
    """``[Q]`` pairs of use classes of one value class, by distance: they may share a copy."""

    later: Ints
    earlier: Ints
    distance: Ints

    @functools.cached_property
    def steps(self) -> list[slice]:
        """Pairs of one distance: each use class is the later one of at most one."""
        ends = [*np.flatnonzero(np.diff(self.distance, append=-1)) + 1]
        return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]


@dataclasses.dataclass(frozen=True)
class JointSums(EntityTable):
    """Partial sums that wait before they are summed over devices, by value class."""

    value: Ints
    other: Ints  # value class that its collective is merged with, or that is summed instead
    share: Floats  # of its values, those with such a sum
    smaller: Bools  # whether the other one is a smaller value that follows from it
    passed: Bools  # whether it is a value between these


@dataclasses.dataclass(frozen=True)
class ProductOperands(EntityTable):
    """Value classes of the operands of products, in order."""

    value: Ints
    result: Ints  # value class of the products' results
    along: Bools  # [rows, R] dimensions of the result that the operand has, too
    images: Bools  # whether the operand consists of images, and the product sums over them
    last: Ints  # the dimension of a dot product's result that is the operand's last one, or -1
    last_of_other: Ints  # the same of the other operand
    contracted: Bools  # [rows, R] the contracting dimensions of the operand of a dot product
    left: Bools  # whether it is the left-hand side


@dataclasses.dataclass(frozen=True)
class Events(EntityTable):
    """Allocations and frees in program order; frees come first at every op."""

    op: Ints
    column: Ints
    sign: Floats  # +1 allocates, -1 frees
    value: Ints  # the program's value
    gaps: Floats  # beside a short-lived buffer, relative to those of most; 0 beside others


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of the memory timeline: a named block for each term with buffers."""

    names: tuple[str, ...]
    ends: Ints  # [blocks]

    @staticmethod
    def of(sizes: Sequence[tuple[str, int]]) -> Columns:
        """From the name and the number of columns of each block, in order."""
        ends = np.cumsum([size for _, size in sizes], dtype=np.int64)
        return Columns(tuple(name for name, _ in sizes), ends)

    @property
    def width(self) -> int:
        """Columns of all blocks."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, name: str) -> slice:
        number = self.names.index(name)
        first = self.ends[number - 1] if number else 0
        return slice(int(first), int(self.ends[number]))

    def block_of(self, column: int) -> tuple[str, int]:
        """The block of a column, and the column's place in it."""
        name = self.names[int(np.searchsorted(self.ends, column, side="right"))]
        return name, column - self[name].start


@dataclasses.dataclass(frozen=True)
class Tables:
    """Everything that pricing states of a program needs."""

    slots: Slots
    ops: OpClasses
    products: Products
    tensors: ProductTensors
    kernels: KernelTerms
    kernel_tensors: KernelTensors
    values: ValueClasses
    uses: UseClasses
    pairs: CopyPairs
    joint_sums: JointSums
    operands: ProductOperands
    windows: Windows  # products that collectives may run beside
    events: Events
    columns: Columns
    #: ``[moments, columns]`` growth of each column from one local peak of memory to the next.
    #: With the gaps beside short-lived buffers, after :meth:`on_hardware`.
    growth: sparse.csr_array
    #: ``[moments, columns]`` without gaps, and gaps alone, relative to those of most values.
    buffer_growth: sparse.csr_array
    gap_growth: sparse.csr_array
    results: Ints  # [results] use class of each result
    value_class: Ints  # [values of the program]
    use_class: Ints  # [uses of the program]
    idle: Floats  # [values of the program] share that its kernel can write while it computes
    dtypes: tuple[str, ...]

    def size(self, entity: Entity) -> int:
        """The number of entities of a kind."""
        return len({
            Entity.OP_CLASS: self.ops, Entity.PRODUCT: self.products,
            Entity.VALUE_CLASS: self.values, Entity.USE_CLASS: self.uses,
            Entity.COPY_PAIR: self.pairs,
        }[entity])  # fmt: skip

    def op_class(self, entity: Entity) -> Ints:
        """``[entities]`` op class of each: of a value, its definition's; of a use, its user's."""
        if entity is Entity.OP_CLASS:
            return np.arange(len(self.ops))
        if entity is Entity.PRODUCT:
            return self.products.op_class
        if entity is Entity.VALUE_CLASS:
            return np.asarray(self.slots.op_class[self.values.slot])
        slots = self.slots.op_class[self.uses.slot]
        return np.asarray(slots if entity is Entity.USE_CLASS else slots[self.pairs.later])

    def on_hardware(
        self,
        peaks: Floats,
        devices: float,
        gaps: float,
        may_pad: Bools,
        collective: Ints,
        group: Ints,
    ) -> Tables:
        """With the columns that depend on hardware and mesh.

        ``peaks`` (``[dtypes]``) are in FLOP/s, ``devices`` are those of the mesh, and ``gaps`` is
        the share of their bytes that short-lived buffers take besides; the others are columns of
        :class:`ValueClasses`.
        """
        seconds = np.where(self.ops.product, self.ops.flops / peaks[self.ops.dtype], 0.0)
        even = float((seconds * self.ops.count).sum()) / devices
        return dataclasses.replace(
            self,
            ops=dataclasses.replace(self.ops, peak_seconds=seconds),
            values=dataclasses.replace(
                self.values, may_pad=may_pad, collective=collective, group=group,
                independent_s=self.values.free * even,
            ),
            uses=dataclasses.replace(self.uses, independent_s=self.uses.free * even),
            growth=self.buffer_growth + gaps * self.gap_growth if gaps else self.buffer_growth,
        )  # fmt: skip
