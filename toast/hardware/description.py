"""What the cost model knows about a device: rates, memory, links and measured collectives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from toast.errors import HardwareError
from toast.hardware.product_prices import ProductPrices

Floats = npt.NDArray[np.float64]

#: Bytes of an element that fills a lane of a TPU.
LANE_BYTES = 4

#: The latency of a hop in the estimates of XLA's partitioner; its scheduler has none.
_HOP_S = 1e-6

#: The rate of all-to-alls by XLA's scheduler for TPUs over that of a link: on one dimension of the
#: torus, and on several.
SCHEDULED_ALL_TO_ALL = (31 / 46.6, 25 / 46.6)


@dataclasses.dataclass(frozen=True)
class Interconnect:
    """How devices are linked: a torus of chips, or nodes of switched devices on a network.

    Rates are achievable ones (datasheet times ``efficiency.link``).
    """

    #: ``"torus"`` or ``"switch"``.
    topology: str
    #: Torus: dimensions; switch: 0.
    dimensions: int
    #: Bytes per second of one link in one direction (torus), or of one device in one direction
    #: inside a node (switch).
    bandwidth_bytes_per_s: float
    #: Seconds of one step of a collective on a torus, or inside a node.
    latency_s: float
    #: Torus: smallest size of a dimension whose ends are linked.  A 3D torus is built of cubes of
    #: this size: the ends are linked only if all dimensions are multiples of it.  Switch: 0.
    wraparound_from: int
    #: Switch: devices that share a node; torus: 0.
    devices_per_node: int
    #: Switch: bytes per second of one device in one direction between nodes; torus: 0.
    network_bandwidth_bytes_per_s: float
    #: Switch: seconds of one step between nodes; torus: 0.
    network_latency_s: float
    #: The rates above divided by those of the datasheet.
    efficiency: float
    #: Torus: the rate of all-to-alls over that of a link, on one dimension and on several; ``None``
    #: for what the links between two halves of a dimension allow.
    all_to_all: tuple[float, float] | None = None
    #: 3D torus: the side of the cubes that it is built of, if it is not :attr:`wraparound_from`.
    cube: int | None = None

    @property
    def sides_of_cubes(self) -> int:
        """3D torus: the side of the cubes of chips that it is built of."""
        return self.wraparound_from if self.cube is None else self.cube


@dataclasses.dataclass(frozen=True)
class Network:
    """A network that joins slices: tori or clusters, each with its own :class:`Interconnect`.

    The mesh axis of this name goes over the slices.
    """

    #: The name of the mesh axis.
    axis: str
    #: The most slices.
    max_slices: int
    #: Achievable bytes per second of one device in one direction.
    bandwidth_bytes_per_s: float
    #: Seconds of one step of a collective.
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measured algorithm of a collective inside a node.

    Its time is linear in the bytes: ``latency_s + steps * step_latency_s + bytes / memory +
    wire_share * bytes / link``.  The number of steps and the share of the bytes that each device
    sends follow from the algorithm and the number of devices
    (:mod:`toast.hardware.collective_prices`).
    """

    #: The name in StableHLO, such as ``all_gather``.
    kind: str
    #: ``ring``, ``recursive doubling``, ``tree``, ``in-switch`` or ``direct``.
    algorithm: str
    #: The variant of the algorithm; empty if there is only one.
    protocol: str
    #: Seconds that it takes however few the bytes.
    latency_s: float
    #: Seconds of each step, in addition.
    step_latency_s: float
    #: Bytes per second that pass through the memory of the device.
    memory_bandwidth_bytes_per_s: float
    #: Bytes per second that a device sends on its links.
    link_bandwidth_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A protocol of a library of collectives, with the library's own estimate of its time.

    The library runs the protocol with the shortest estimate, which is not always the fastest: the
    times of its algorithms are those of :class:`Measured`.  The estimate is ``latency_s + steps *
    step_latency_s + wire_share * bytes / bandwidth``.
    """

    #: The name of the protocol, such as ``LL128``.
    name: str
    #: As in :class:`Measured`.
    algorithm: str
    #: Seconds that it takes however few the bytes, by the library's estimate.
    latency_s: float
    #: Seconds of each step, in addition.
    step_latency_s: float
    #: Bytes per second of a device.
    bandwidth_bytes_per_s: float


Asynchronous = Literal["all_gather", "collective_permute", "reduce_scatter"]
#: Collectives that XLA runs in the background on some hardware by default.  It waits for
#: all-to-alls, and for all-reduces, unless flags say otherwise.
ASYNCHRONOUS: tuple[Asynchronous, ...] = get_args(Asynchronous)


#: Figures by which prices are divided.
_ABOVE_ZERO = (
    "matmul_efficiency", "memory_bytes_per_s", "memory_efficiency", "single_op_share",
    "transcendentals_per_s", "vector_products_per_s", "vector_elements_per_s",
    "integer_operations_per_s", "transposed_elements_per_s", "row_elements_per_s",
    "lane_elements_per_s", "host_bytes_per_s", "allocator_efficiency",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device.  Rates are achievable ones: those of the datasheet times efficiency.

    A device is a JAX device: a chip, or on TPU v3 one of the two cores of a chip.
    """

    #: The name, as ``--hardware`` takes it.
    name: str
    #: One line on the device.
    description: str
    #: Peak FLOP/s of the datasheet by StableHLO element type.
    flops_per_s: Mapping[str, float]
    #: Fraction of the peak that large matrix products reach.
    matmul_efficiency: float
    #: Bytes of memory of the device.
    memory_capacity_bytes: float
    #: Bytes available to one program: its arguments, outputs and temporaries.
    memory_limit_bytes: float
    #: Achievable bytes per second of the device's memory.
    memory_bytes_per_s: float
    #: The links between devices.
    interconnect: Interconnect
    #: The rate above over that of the datasheet.
    memory_efficiency: float = 1.0
    #: The rate of kernels of one op, such as fills and conversions, over that of other kernels.
    single_op_share: float = 1.0
    #: How the time of products depends on their size.
    products: ProductPrices = dataclasses.field(default_factory=ProductPrices)
    #: One dimension of every array in memory is padded to a multiple of this number of elements.
    lanes: int = 1
    #: What XLA gathers well before it is needed: ``operands`` of all groups of a grouped product;
    #: ``all``: also parameters that take longer than the product that needs them; or nothing.
    gathers_ahead: str = ""
    #: The collectives that the compiler runs in the background by default: they start early, and
    #: products run beside them.
    background: tuple[Asynchronous, ...] = ASYNCHRONOUS
    #: The shares of all-gathers that the compiler starts so early that products run beside them: of
    #: arguments, and of values that follow from products.
    early_gathers: tuple[float, float] = (1.0, 1.0)
    #: The element type that float32 operands of products are rounded to before they are stored or
    #: sent; empty if they are not rounded.
    product_operands: str = ""
    #: The same for products of groups of rows.
    grouped_operands: str = ""
    #: Whether each convolution computes its operands again, such as normalized images, rather than
    #: one kernel for all.  If not, it does so for float32 operands alone, which it rounds.
    recomputes_images: bool = False
    #: Exponentials, logarithms and similar functions per second.
    transcendentals_per_s: float = math.inf
    #: Multiplications and additions per second in products of a vector and a matrix for each
    #: element of a batch, which the vector unit computes.
    vector_products_per_s: float = math.inf
    #: Elements per second of memory-bound kernels: the vector unit computes in float32, so that
    #: small element types do not make them faster than that.
    vector_elements_per_s: float = math.inf
    #: Operations per second on integers, such as those of random bits.
    integer_operations_per_s: float = math.inf
    #: Elements per second of kernels that copy an array into tiles along other dimensions.
    transposed_elements_per_s: float = math.inf
    #: Elements per second of kernels that read one row of each tile, such as the next step of
    #: sequences.
    row_elements_per_s: float = math.inf
    #: The same of kernels that read one lane of each tile.
    lane_elements_per_s: float = math.inf
    #: Whether one kernel reads the next rows of two arrays.
    rows_in_pairs: bool = False
    #: Fraction of the peak that kernels of attention reach: products with exponentials between.
    #: ``None`` for that of other products.
    attention_efficiency: float | None = None
    #: Seconds that every product takes besides its work, however small it is.
    product_latency_s: float = 0.0
    #: The same for every memory-bound kernel.
    kernel_latency_s: float = 0.0
    #: The share of a collective's time that products beside it save; they are slower by the rest,
    #: because both use the same cores and the same memory.
    overlap_efficiency: float = 1.0
    #: Achievable bytes per second between a device and the memory of its host, in one direction;
    #: infinite if the file has no ``[host]`` (:attr:`has_host_link`).
    host_bytes_per_s: float = math.inf
    #: Whether it takes time to move arguments into fast memory beside earlier kernels: they share
    #: the rate of the memory with these.
    counts_fetches: bool = dataclasses.field(default=True, repr=False)
    #: Bytes of live values over those that the allocator takes for them, with gaps between.
    allocator_efficiency: float = 1.0
    #: Gaps of the heap beside buffers that live for few ops, as a share of their bytes.
    heap_gaps: float = 0.0
    #: The most watts that the device takes, by its datasheet; ``None`` if that states none.  The
    #: clock that it sustains within them is part of :attr:`matmul_efficiency`.
    power_w: float | None = dataclasses.field(default=None, repr=False)
    #: In one line: what the prices of products stand on; empty if the file does not say it.
    products_basis: str = dataclasses.field(default="", repr=False, compare=False)
    #: The same for collectives.
    collectives_basis: str = dataclasses.field(default="", repr=False, compare=False)
    #: JAX's name of the platform, ``tpu``, ``cuda`` or ``rocm``; empty if unknown.
    platform: str = dataclasses.field(default="", repr=False)
    #: JAX's name of the kind of device, such as ``TPU v5 lite``; empty if unknown.
    device_kind: str = dataclasses.field(default="", repr=False)
    #: Devices of the largest system, as one slice or cluster.
    max_devices: int = 10**6
    #: The networks that join slices, from the innermost to the outermost.
    networks: tuple[Network, ...] = dataclasses.field(default=(), repr=False)
    #: Measured collectives inside a node; the times of other kinds follow from the links.
    measured: tuple[Measured, ...] = ()
    #: The protocols among which the library chooses by size; it has all others at every size.
    protocols: tuple[Protocol, ...] = ()

    def __post_init__(self) -> None:
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) or not value > 0:
                remedy = ", or inf if there is no link" if name == "host_bytes_per_s" else ""
                raise HardwareError(
                    f"hardware {self.name}: {name}={value!r}: use a number above 0{remedy}"
                )

    @property
    def attention_share(self) -> float:
        """The rate of attention over that of other products."""
        if self.attention_efficiency is None:
            return 1.0
        return self.attention_efficiency / self.matmul_efficiency

    @property
    def has_host_link(self) -> bool:
        """Whether the file states the rate of the link to the memory of the host."""
        return math.isfinite(self.host_bytes_per_s)

    @property
    def vector_bytes(self) -> float:
        """Bytes of memory traffic that take as long as the vector unit takes for one element."""
        return self.memory_bytes_per_s / self.vector_elements_per_s

    @property
    def flops_beside_integers(self) -> float:
        """FLOPs of bfloat16 products in the time of one operation on integers; 0 without a rate."""
        return self.peak("bf16") / self.integer_operations_per_s

    @property
    def integers_beside_elements(self) -> float:
        """Operations on integers that take as long as an element of a memory-bound kernel."""
        if math.isinf(self.integer_operations_per_s):
            return 0.0
        return self.integer_operations_per_s / self.vector_elements_per_s

    def fill_bytes_per_s(self, element_bytes: Floats) -> Floats:
        """The rate at which constants are written, for elements of some bytes.

        A TPU takes as long for small elements as for those that fill a lane.
        """
        lane = LANE_BYTES if self.lanes > 1 else 1
        filled = np.clip(element_bytes, 1, lane) / lane
        return np.asarray(self.memory_bytes_per_s * self.single_op_share * filled)

    @property
    def relayout_bytes(self) -> float:
        """The same for an element that changes its place in tiles."""
        rate = min(self.vector_elements_per_s, self.transposed_elements_per_s)
        return self.memory_bytes_per_s / rate

    @property
    def as_compiled_for(self) -> Hardware:
        """The hardware as XLA's partitioner sees it: the ends of all torus dimensions are linked.

        Small slices of the real one lack these links, so that collectives take up to twice as long.
        A step of a collective along a torus takes a microsecond besides.
        """
        return self._as_linked(_HOP_S)

    @property
    def as_scheduled_for(self) -> Hardware:
        """The hardware as XLA's scheduler sees it: the same, and steps along a torus take no time.

        A loop with a small collective in each of its thousand steps takes longer on real devices.
        The scheduler has one rate of all-to-alls, whatever the number of devices, and no time for
        what is moved into fast memory beside other kernels.
        """
        seen = self._as_linked(0.0, all_to_all=SCHEDULED_ALL_TO_ALL)
        return dataclasses.replace(seen, counts_fetches=not seen.products.fast_bytes)

    def _as_linked(
        self, latency_s: float, all_to_all: tuple[float, float] | None = None
    ) -> Hardware:
        if self.interconnect.topology != "torus":
            return self
        links = dataclasses.replace(
            self.interconnect, wraparound_from=1, latency_s=latency_s, all_to_all=all_to_all,
            cube=self.interconnect.sides_of_cubes,
        )  # fmt: skip
        return dataclasses.replace(self, interconnect=links)

    def peak(self, dtype: str) -> float:
        """Achievable FLOP/s of products with element type ``dtype``, such as ``bf16``.

        A type without an entry has the rate of float32.
        """
        peaks = self.flops_per_s
        fallback = peaks.get("f32", max(peaks.values()))
        return peaks.get(dtype, fallback) * self.matmul_efficiency
