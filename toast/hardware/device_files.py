"""Hardware files: TOML, checked against types and for consistency, with file and line in errors."""

from __future__ import annotations

import dataclasses
import difflib
import math
import pathlib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from toast.boundary.regular_files import read_text
from toast.boundary.typed import Misfit, checked
from toast.errors import HardwareError
from toast.hardware.description import (
    ASYNCHRONOUS,
    Asynchronous,
    Hardware,
    Interconnect,
    Measured,
    Network,
    Protocol,
)
from toast.hardware.mesh import AXIS_NAME
from toast.hardware.product_prices import ProductPrices
from toast.resources import directory

# The range of a figure catches a wrong unit, such as 16 for 16e9 bytes.  Titles go into messages.
Text = Annotated[str, Meta(pattern=r"\S", title="a printable text")]
Count = Annotated[int, Meta(ge=1, le=10**6, title="a whole number from 1 to 1000000")]
FlopsPerS = Annotated[float, Meta(ge=1e9, le=1e18, title="FLOP/s, for example 197e12")]
UnitElementsPerS = Annotated[
    float, Meta(ge=1e6, le=1e18, title="elements per second, for example 1e11")
]
ElementsPerS = Annotated[float, Meta(ge=1e6, le=1e15, title="elements/s, for example 1e10")]
Bytes = Annotated[float, Meta(ge=1e6, le=1e15, title="bytes, for example 16e9")]
BytesPerS = Annotated[float, Meta(ge=1e6, le=1e15, title="bytes per second, for example 819e9")]
Seconds = Annotated[float, Meta(ge=0, le=0.1, title="seconds, for example 1e-6")]
Share = Annotated[float, Meta(ge=0, le=1, title="a share from 0 to 1")]
Watts = Annotated[float, Meta(ge=1, le=1e5, title="watts, for example 700")]
Fraction = Annotated[float, Meta(ge=0.001, le=1, title="a fraction from 0.001 to 1")]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table with these keys and no others."""


class MemoryTable(_Table, frozen=True, kw_only=True):
    """``[memory]``, of one JAX device."""

    capacity_bytes: Bytes
    limit_bytes: Bytes
    bandwidth_bytes_per_s: BytesPerS
    lanes: Count = 1
    fast_bytes: Bytes | None = None
    heap_gaps: Annotated[float, Meta(ge=0, le=1, title="a fraction from 0 to 1")] = 0.0


class HostTable(_Table, frozen=True, kw_only=True):
    """``[host]``: the link between a device and the memory of its host, in one direction."""

    bandwidth_bytes_per_s: BytesPerS


class TileTable(_Table, frozen=True, kw_only=True):
    """``[tile]``: rows, columns and depth of the pieces that the matrix unit takes."""

    m: Count
    n: Count
    k: Count
    results_per_s: UnitElementsPerS | None = None
    weights_per_s: UnitElementsPerS | None = None
    depthwise_per_s: UnitElementsPerS | None = None
    depthwise_sums_per_s: UnitElementsPerS | None = None
    reloading: Annotated[float, Meta(ge=0, le=10, title="a share, for example 0.4")] = 0.0
    window_bytes: Annotated[float, Meta(ge=0, le=10**9, title="bytes, for example 2e6")] = 0.0
    memory: Fraction | None = None


class ProductsTable(_Table, frozen=True, kw_only=True):
    """``[products]``: the time of products by size, on devices with several matrix units."""

    units: Count
    tiles: Annotated[tuple[tuple[Count, Count], ...], Meta(min_length=1, max_length=16,
        title="pairs of rows and columns, for example [[128, 256], [128, 128]]")]  # fmt: skip
    ramp: Annotated[float, Meta(ge=0, le=10**5, title="elements, for example 128")]
    parts: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=8,
        title="numbers of parts, for example [1, 4]")] = (1,)  # fmt: skip
    memory: Fraction | None = None


class EfficiencyTable(_Table, frozen=True, kw_only=True):
    """``[efficiency]``: the fractions of the datasheet's figures that programs reach."""

    matmul: Fraction
    memory: Fraction
    single_op: Fraction | None = None
    link: Fraction
    attention: Fraction | None = None
    overlap: Fraction = 1.0
    allocator: Fraction = 1.0
    host: Fraction = 1.0


class TorusTable(_Table, frozen=True, kw_only=True, tag_field="topology", tag="torus"):
    """``[interconnect]`` of chips that are linked to their neighbours."""

    dimensions: Annotated[int, Meta(ge=2, le=3, title="2 or 3")]
    wraparound_from: Count
    link_bandwidth_bytes_per_s: BytesPerS
    latency_s: Seconds


class SwitchTable(_Table, frozen=True, kw_only=True, tag_field="topology", tag="switch"):
    """``[interconnect]`` of nodes of fully connected devices on a network."""

    devices_per_node: Count
    node_bandwidth_bytes_per_s: BytesPerS
    node_latency_s: Seconds
    network_bandwidth_bytes_per_s: BytesPerS
    network_latency_s: Seconds


class CollectiveTable(_Table, frozen=True, kw_only=True):
    """``[[collective]]``: one measured algorithm of one collective inside a node."""

    kind: Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
    algorithm: Text
    protocol: Text = ""
    latency_s: Seconds
    step_latency_s: Seconds
    memory_bandwidth_bytes_per_s: BytesPerS
    link_bandwidth_bytes_per_s: BytesPerS


class NetworkTable(_Table, frozen=True, kw_only=True):
    """``[[network]]``: a network that joins slices, along the mesh axis of this name."""

    axis: Text
    max_slices: Count
    bandwidth_bytes_per_s: BytesPerS
    latency_s: Seconds


class ProtocolTable(_Table, frozen=True, kw_only=True):
    """``[[protocol]]``: the library's estimate of the time of one of its protocols."""

    name: Text
    algorithm: Literal["ring", "recursive doubling", "tree", "in-switch", "direct"]
    latency_s: Seconds
    step_latency_s: Seconds
    bandwidth_bytes_per_s: BytesPerS


class BasisTable(_Table, frozen=True, kw_only=True):
    """``[basis]``: what prices stand on, in one line each, for plans and reports."""

    products: Text = ""
    collectives: Text = ""


class DeviceFile(_Table, frozen=True, kw_only=True):
    """A hardware file."""

    name: Text
    description: Text
    platform: Literal["cpu", "cuda", "rocm", "tpu"] | None = None
    device_kind: Text | None = None
    max_devices: Count = 10**6
    power_w: Watts | None = None
    product_operands: Literal["bf16", "f16"] | None = None
    grouped_operands: Literal["bf16", "f16", "f32"] | None = None
    recomputes_images: bool = False
    transcendentals_per_s: FlopsPerS = math.inf
    gathers_ahead: Literal["operands", "all"] | None = None
    background: tuple[Asynchronous, ...] = ASYNCHRONOUS
    early_gathers: tuple[Share, Share] = (1.0, 1.0)
    vector_products_per_s: FlopsPerS = math.inf
    vector_elements_per_s: FlopsPerS = math.inf
    integer_operations_per_s: FlopsPerS = math.inf
    transposed_elements_per_s: FlopsPerS = math.inf
    row_elements_per_s: ElementsPerS = math.inf
    lane_elements_per_s: ElementsPerS | None = None
    rows_in_pairs: bool = False
    product_latency_s: Seconds = 0.0
    kernel_latency_s: Seconds = 0.0
    flops_per_s: dict[str, FlopsPerS]
    memory: MemoryTable
    tile: TileTable | None = None
    products: ProductsTable | None = None
    interconnect: TorusTable | SwitchTable
    host: HostTable | None = None
    efficiency: EfficiencyTable
    basis: BasisTable = BasisTable()
    collective: tuple[CollectiveTable, ...] = ()
    protocol: tuple[ProtocolTable, ...] = ()
    network: tuple[NetworkTable, ...] = ()


#: The tables of which a file may have several.
_LISTS = {"collective": CollectiveTable, "protocol": ProtocolTable, "network": NetworkTable}
#: The other tables of a file; the keys of two of them depend on the file.
_TABLES = {
    "flops_per_s": _Table, "memory": MemoryTable, "tile": TileTable, "efficiency": EfficiencyTable,
    "interconnect": _Table, "host": HostTable, "products": ProductsTable, "basis": BasisTable,
}  # fmt: skip
#: Those that a file may lack.
_OPTIONAL = ("tile", "host", "products", "basis")
#: The algorithms that can be measured, by collective.
_ALGORITHMS = {
    "all_gather": ("ring", "recursive doubling"),
    "all_reduce": ("ring", "recursive doubling", "tree", "in-switch"),
    "reduce_scatter": ("ring", "recursive doubling"),
    "all_to_all": ("direct",),
}
#: More FLOP per byte of memory traffic than any device has: real devices have some hundred.
_MOST_FLOPS_PER_BYTE = 1e4
#: The order of the norm of a product's times (:class:`ProductPrices`), fitted to XLA on TPUs.
_PARTS_AT_ONCE = 3.0
#: The least fraction of the memory that a program may use.
_LEAST_LIMIT = 0.01
#: The size of the largest file that is read.
LARGEST_BYTES = 2**20
#: The number of characters of a wrong value that messages repeat.
_SHOWN = 60
#: StableHLO element types as the program representation writes them.
ELEMENT_TYPE = re.compile(r"bf16|f16|f32|f64|u?i(2|4|8|16|32|64)|c64|c128|f[468]e\dm\d\w*")


def names() -> list[str]:
    """The devices that ship with TOAST, in alphabetical order."""
    return sorted(path.stem for path in directory("hardware").glob("*.toml"))


def load(name_or_path: str | pathlib.Path) -> Hardware:
    """A shipped device by name, or a user's ``.toml`` file by path.

    Raises :class:`toast.errors.HardwareError`: for an unknown name with the nearest known one, for
    a file as one line ``file:line: reason; what to do``.
    """
    path = file_of(name_or_path)
    return parse(path, read_text(path, HardwareError, most=LARGEST_BYTES, encoding="utf-8-sig"))


def file_of(name_or_path: str | pathlib.Path) -> pathlib.Path:
    """The file of a shipped device, or the user's.

    Raises :class:`toast.errors.HardwareError` for an unknown name.
    """
    if not isinstance(name_or_path, str | pathlib.Path):
        raise HardwareError(
            f"hardware {name_or_path!r}: use a device name or the path of a .toml file"
        )
    path = pathlib.Path(name_or_path)
    if path.suffix != ".toml":
        if str(name_or_path) not in names():
            near = difflib.get_close_matches(str(name_or_path).lower(), names(), 1, 0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise HardwareError(
                f"no hardware named {name_or_path}; {hint}known: {', '.join(names())}; "
                "or use the path of a .toml file"
            )
        path = directory("hardware") / f"{name_or_path}.toml"
    return path


def parse(path: pathlib.Path, text: str) -> Hardware:
    """The hardware that ``text`` describes; ``path`` is for messages.

    Raises :class:`toast.errors.HardwareError` as :func:`load` does.
    """
    file = _checked(_toml(path, text))
    if isinstance(file, _Fault):
        line = _line(text.splitlines(), file.table, file.key)
        raise HardwareError(f"{path}:{line}: {file.reason}; {file.remedy}")
    return _hardware(file)


def _checked(data: dict[str, Any]) -> DeviceFile | _Fault:
    """The file, or the first fault in it."""
    for fault in _table_faults(data):
        return fault
    try:
        file = checked(data, DeviceFile)
    except Misfit as misfit:
        return _fault(misfit, data)
    return next(_faults(file), file)


def _toml(path: pathlib.Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise HardwareError(f"{path}: not TOML: nested too deeply; write plain tables") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at (?:line (\d+).*|end of document)\)$", str(error))
        line = (place and place[1]) or max(1, len(text.splitlines()))
        reason = str(error)[: place.start()] if place else str(error)
        raise HardwareError(f"{path}:{line}: not TOML: {reason}; correct the line") from None
    except ValueError:  # Python does not read numbers of so many digits
        long = (n for n, line in enumerate(text.splitlines(), 1) if re.search(r"[\d_]{4000}", line))
        raise HardwareError(
            f"{path}:{next(long, 1)}: a number has thousands of digits; correct the line"
        ) from None


def _hardware(file: DeviceFile) -> Hardware:
    """The figures of a file, with rates times their efficiency."""
    link, efficiency = file.interconnect, file.efficiency.link
    if isinstance(link, TorusTable):
        interconnect = Interconnect(
            topology="torus",
            dimensions=link.dimensions,
            bandwidth_bytes_per_s=efficiency * link.link_bandwidth_bytes_per_s,
            latency_s=link.latency_s,
            wraparound_from=link.wraparound_from,
            devices_per_node=0,
            network_bandwidth_bytes_per_s=0.0,
            network_latency_s=0.0,
            efficiency=efficiency,
        )
    else:
        interconnect = Interconnect(
            topology="switch",
            dimensions=0,
            bandwidth_bytes_per_s=efficiency * link.node_bandwidth_bytes_per_s,
            latency_s=link.node_latency_s,
            wraparound_from=0,
            devices_per_node=link.devices_per_node,
            network_bandwidth_bytes_per_s=link.network_bandwidth_bytes_per_s * efficiency,
            network_latency_s=link.network_latency_s,
            efficiency=efficiency,
        )
    return Hardware(
        name=file.name,
        description=file.description,
        flops_per_s=dict(file.flops_per_s),
        matmul_efficiency=file.efficiency.matmul,
        attention_efficiency=file.efficiency.attention,
        overlap_efficiency=file.efficiency.overlap,
        allocator_efficiency=file.efficiency.allocator,
        heap_gaps=file.memory.heap_gaps,
        host_bytes_per_s=file.host.bandwidth_bytes_per_s * file.efficiency.host
        if file.host
        else math.inf,
        product_latency_s=file.product_latency_s,
        kernel_latency_s=file.kernel_latency_s,
        memory_capacity_bytes=file.memory.capacity_bytes,
        memory_limit_bytes=file.memory.limit_bytes,
        memory_bytes_per_s=file.memory.bandwidth_bytes_per_s * file.efficiency.memory,
        interconnect=interconnect,
        memory_efficiency=file.efficiency.memory,
        single_op_share=(file.efficiency.single_op or file.efficiency.memory)
        / file.efficiency.memory,
        products=_products(file),
        lanes=file.memory.lanes,
        gathers_ahead=file.gathers_ahead or "",
        background=tuple(sorted({*file.background})),
        early_gathers=file.early_gathers,
        product_operands=file.product_operands or "",
        grouped_operands=file.grouped_operands or file.product_operands or "",
        recomputes_images=file.recomputes_images,
        transcendentals_per_s=file.transcendentals_per_s,
        vector_products_per_s=file.vector_products_per_s,
        vector_elements_per_s=file.vector_elements_per_s,
        integer_operations_per_s=file.integer_operations_per_s,
        transposed_elements_per_s=file.transposed_elements_per_s,
        row_elements_per_s=file.row_elements_per_s,
        lane_elements_per_s=file.lane_elements_per_s or file.row_elements_per_s,
        rows_in_pairs=file.rows_in_pairs,
        max_devices=file.max_devices,
        power_w=file.power_w,
        products_basis=file.basis.products,
        collectives_basis=file.basis.collectives,
        platform=file.platform or "",
        device_kind=file.device_kind or "",
        networks=tuple(
            Network(
                entry.axis,
                entry.max_slices,
                efficiency * entry.bandwidth_bytes_per_s,
                entry.latency_s,
            )
            for entry in file.network
        ),
        measured=tuple(Measured(**msgspec.structs.asdict(entry)) for entry in file.collective),
        protocols=tuple(Protocol(**msgspec.structs.asdict(entry)) for entry in file.protocol),
    )


def _products(file: DeviceFile) -> ProductPrices:
    """The prices of products: by waves of tiles, or padded to the tile of one unit."""
    if (table := file.products) is not None:
        return ProductPrices(
            tiles=table.tiles,
            units=table.units,
            ramp=table.ramp,
            parts=table.parts,
            memory_share=(table.memory or file.efficiency.memory) / file.efficiency.memory,
        )
    if (tile := file.tile) is not None:
        prices = ProductPrices(
            tiles=((tile.m, tile.n),), depth=tile.k, window_bytes=tile.window_bytes,
            reloading=tile.reloading,
            fast_bytes=file.memory.fast_bytes or 0.0,
            weights_per_s=tile.weights_per_s or math.inf,
            depthwise_per_s=tile.depthwise_per_s or 0.0,
            depthwise_sums_per_s=tile.depthwise_sums_per_s or tile.depthwise_per_s or 0.0,
            memory_share=(tile.memory or file.efficiency.memory) / file.efficiency.memory,
        )  # fmt: skip
        if tile.results_per_s is None:
            return prices
        return dataclasses.replace(prices, results_per_s=tile.results_per_s, order=_PARTS_AT_ONCE)
    return ProductPrices()


class _Fault(NamedTuple):
    """What is wrong in a file, where, and what to do."""

    #: ``memory``; ``collective#2`` for the third ``[[collective]]``; empty for the top level.
    table: str
    #: Empty for the whole table.
    key: str
    reason: str
    remedy: str


def _table_faults(data: Mapping[str, Any]) -> Iterator[_Fault]:
    """Wrong tables: they come first, as the keys of a table without header belong to another."""
    for name, value in data.items():
        tables = [value] if isinstance(value, dict) else value if isinstance(value, list) else ()
        if any(isinstance(v, dict) for v in tables) and name not in (*_TABLES, *_LISTS):
            yield _Fault(name, "", f"unknown table {name}", _hint(name, _TABLES))
    for name in _TABLES:
        if not isinstance(data.get(name, {} if name in _OPTIONAL else None), dict):
            yield _Fault("", name, f"missing table {name}", f"add [{name}]")
    for name in _LISTS:
        entries = data.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            yield _Fault("", name, f"{name} is not a list of tables", f"write [[{name}]]")


def _fault(misfit: Misfit, data: Mapping[str, Any]) -> _Fault:
    """A misfit in the words of hardware files."""
    if key := misfit.missing_key:
        expected = _expected(misfit.place, key, data)
        remedy = f"write {expected}" if key == "topology" else f"add it: {expected}"
        return _Fault(_table_name(misfit.place), "", f"missing key {key}", remedy)
    if key := misfit.unknown_key:
        known = [name for name in _keys(misfit.place, data) if misfit.place or name not in _TABLES]
        return _Fault(_table_name(misfit.place), key, f"unknown key {key}", _hint(key, known))
    # The value of a key is wrong as a whole, also if it is a list.
    of_key = misfit.place[:2] if misfit.place[0] in _TABLES else misfit.place
    *place, key = map(str, of_key)
    value: Any = data
    for step in of_key:
        value = value[step]
    remedy = f"write {_expected(of_key[:-1], key, data)}"
    return _Fault(_table_name(place), key, f"{key} is {_shown(value)}", remedy)


def _faults(file: DeviceFile) -> Iterator[_Fault]:
    """What types cannot say: figures that are in range but contradict each other."""
    for key in file.flops_per_s:
        if not ELEMENT_TYPE.fullmatch(key):
            reason = f"{key} is not an element type"
            yield _Fault("flops_per_s", key, reason, "write for example bf16")
    if not file.flops_per_s:
        reason, remedy = "no figure for any element type", "add for example bf16 = 197e12"
        yield _Fault("flops_per_s", "", reason, remedy)
    for table, key, text in (
        ("", "name", file.name), ("", "description", file.description),
        ("basis", "products", file.basis.products),
        ("basis", "collectives", file.basis.collectives),
    ):  # fmt: skip
        if not text.isprintable():
            yield _Fault(table, key, f"{key} is {_shown(text)}", "write a printable text")
    if file.tile is not None and file.products is not None:
        yield _Fault("tile", "", "[tile] and [products] are both there", "remove [tile]")
    yield from _collective_faults(file)
    yield from _network_faults(file)
    memory, link, flops = file.memory, file.interconnect, file.flops_per_s
    if memory.limit_bytes > memory.capacity_bytes:
        yield _Fault("memory", "limit_bytes", "limit_bytes exceeds capacity_bytes", "lower it")
    if memory.limit_bytes < _LEAST_LIMIT * memory.capacity_bytes:
        reason = "limit_bytes is less than a hundredth of capacity_bytes"
        remedy = "check the unit; use --memory to limit a plan"
        yield _Fault("memory", "limit_bytes", reason, remedy)
    for key in link.__struct_fields__:
        if key.endswith("bytes_per_s") and getattr(link, key) > memory.bandwidth_bytes_per_s:
            reason = f"{key} exceeds that of the memory"
            yield _Fault("interconnect", key, reason, "check the unit")
    if isinstance(link, SwitchTable):
        key = "network_bandwidth_bytes_per_s"
        if link.network_bandwidth_bytes_per_s > link.node_bandwidth_bytes_per_s:
            reason = f"{key} exceeds that of the links inside a node"
            yield _Fault("interconnect", key, reason, "check the unit")
    best = max(flops, key=flops.__getitem__)
    if flops[best] < memory.bandwidth_bytes_per_s:
        reason = f"{best} is less than the memory's bytes/s"
        yield _Fault("flops_per_s", best, reason, "check the unit")
    if flops[best] > _MOST_FLOPS_PER_BYTE * memory.bandwidth_bytes_per_s:
        reason = f"{best} exceeds {_MOST_FLOPS_PER_BYTE:.0f} FLOP per byte of memory traffic"
        yield _Fault("flops_per_s", best, reason, "check the units of both")
    for key in (
        "transcendentals_per_s", "vector_products_per_s", "vector_elements_per_s",
        "integer_operations_per_s", "transposed_elements_per_s", "row_elements_per_s",
        "lane_elements_per_s",
    ):  # fmt: skip
        if flops[best] < (getattr(file, key) or 0.0) < math.inf:
            reason = f"{key} exceeds the peak of matrix products"
            yield _Fault("", key, reason, "check the unit")


def _network_faults(file: DeviceFile) -> Iterator[_Fault]:
    axes: set[str] = set()
    for number, entry in enumerate(file.network):
        table = f"network#{number}"
        if not AXIS_NAME.fullmatch(entry.axis):
            yield _Fault(
                table, "axis", f"axis is {_shown(entry.axis)}",
                "write the name of a mesh axis, for example slice",
            )  # fmt: skip
        if entry.axis in axes:
            yield _Fault(table, "axis", f"axis {entry.axis} occurs twice", "rename one")
        axes.add(entry.axis)
        if entry.bandwidth_bytes_per_s > file.memory.bandwidth_bytes_per_s:
            reason = "bandwidth_bytes_per_s exceeds that of the memory"
            yield _Fault(table, "bandwidth_bytes_per_s", reason, "check the unit")


def _collective_faults(file: DeviceFile) -> Iterator[_Fault]:
    if file.collective and isinstance(file.interconnect, TorusTable):
        reason = "a torus cannot have measured collectives"
        yield _Fault("collective#0", "", reason, "remove them")
    chosen: set[tuple[str, str]] = set()
    for number, protocol in enumerate(file.protocol):
        if (protocol.algorithm, protocol.name) in chosen:
            reason = f"duplicate {protocol.algorithm} {protocol.name}"
            yield _Fault(f"protocol#{number}", "", reason, "remove it, or set another name")
        chosen.add((protocol.algorithm, protocol.name))
    earlier: set[tuple[str, str, str]] = set()
    for number, entry in enumerate(file.collective):
        table = f"collective#{number}"
        known = _ALGORITHMS[entry.kind]
        if entry.algorithm not in known:
            reason = f"algorithm of {entry.kind} is {_shown(entry.algorithm)}"
            yield _Fault(table, "algorithm", reason, f"write {_one_of(known)}")
        if not entry.protocol.isprintable():
            reason = f"protocol is {_shown(entry.protocol)}"
            yield _Fault(table, "protocol", reason, "write a printable text")
        variant = entry.kind, entry.algorithm, entry.protocol
        # Several lines may describe the time of a protocol that is chosen by its estimate.
        if variant in earlier and variant[1:] not in chosen:
            reason = f"duplicate {' '.join(filter(None, variant))}"
            yield _Fault(table, "", reason, "remove it, or set another protocol")
        earlier.add(variant)
        for key in ("memory_bandwidth_bytes_per_s", "link_bandwidth_bytes_per_s"):
            if getattr(entry, key) > file.memory.bandwidth_bytes_per_s:
                reason = f"{key} exceeds that of the memory"
                yield _Fault(table, key, reason, "check the unit")


def _keys(place: Sequence[str | int], data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the table at ``place`` with their types."""
    if not place:
        hints = get_type_hints(DeviceFile, include_extras=True)
        return {key: hint for key, hint in hints.items() if key not in _LISTS}
    if place[0] != "interconnect":
        tables = {**_TABLES, **_LISTS}
        return get_type_hints(tables[str(place[0])], include_extras=True)
    topology = str(data["interconnect"].get("topology"))
    table = {"torus": TorusTable, "switch": SwitchTable}.get(topology, _Table)
    hints = get_type_hints(table, include_extras=True)
    return {"topology": Literal["torus", "switch"], **hints}


def _expected(place: Sequence[str | int], key: str, data: Mapping[str, Any]) -> str:
    """What to write for a key, such as ``bytes, for example 16e9``."""
    hint = FlopsPerS if place == ("flops_per_s",) else _keys(place, data)[key]
    for part in (hint, *get_args(hint)):
        if choices := [choice for choice in get_args(part) if isinstance(choice, str)]:
            return _one_of(choices)
        for meta in getattr(part, "__metadata__", ()):
            return str(meta.title)
    raise AssertionError(key)


def _table_name(place: Sequence[str | int]) -> str:
    return "#".join(map(str, place))


def _line(lines: list[str], table: str, key: str) -> int:
    """The line of a key, or of its table if it has none (or is inside braces), else 1."""
    wanted = f"{table}.{key}" if table and key else key
    current, table_line = "", 1
    entries = dict.fromkeys(_LISTS, 0)
    for number, line in enumerate(lines, 1):
        plain = re.sub(r"[\s\"']", "", line.split("#")[0])
        entry = re.fullmatch(r"\[\[(\w+)\]\]", plain)
        if entry and entry[1] in entries:
            current = f"{entry[1]}#{entries[entry[1]]}"
            entries[entry[1]] += 1
            table_line = number if current == table else table_line
            if wanted == current:
                return number
        elif header := re.fullmatch(r"\[([^\[\]=]+)\]", plain):
            current = header[1]
            table_line = number if current == table else table_line
            if wanted == current:
                return number
        elif assigned := re.match(r"([^=]+)=", plain):
            name = f"{current}.{assigned[1]}" if current else assigned[1]
            if wanted == name:
                return number
            table_line = number if name == table else table_line
    return table_line


def _shown(value: object) -> str:
    """A wrong value for a message, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits, written as 0x...
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _one_of(choices: Collection[str]) -> str:
    *most, last = (f'"{choice}"' for choice in choices)
    return f"{', '.join(most)} or {last}" if most else last


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
