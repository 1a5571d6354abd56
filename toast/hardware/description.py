"""Hardware descriptions: TOML files of sourced figures, checked strictly."""

from __future__ import annotations

import dataclasses
import difflib
import math
import pathlib
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from toast.boundary.regular_files import read_text
from toast.errors import HardwareError
from toast.resources import directory


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
    #: Seconds of one step of a collective (torus, or inside a node).
    latency_s: float
    #: Torus: smallest size of a dimension whose ends are linked (of a 3D torus, which is built of
    #: cubes of this size: all its dimensions must be multiples of it); switch: 0.
    wraparound_from: int
    #: Switch: devices that share a node; torus: 0.
    devices_per_node: int
    #: Switch: bytes per second of one device in one direction between nodes; torus: 0.
    network_bandwidth_bytes_per_s: float
    #: Switch: seconds of one step between nodes; torus: 0.
    network_latency_s: float
    #: What the rates above are of those of the datasheet.
    efficiency: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """A collective inside a node as it was measured: a line in the bytes, by devices.

    ``latency_s + steps * step_latency_s + bytes / memory + wire_share * bytes / link``, with the
    steps and the share of the bytes on the wire that the algorithm needs among so many devices.
    """

    #: As StableHLO spells it, such as ``all_gather``.
    kind: str
    #: ``ring``, ``recursive doubling``, ``tree``, ``in-switch`` or ``direct``.
    algorithm: str
    #: Which of several variants of the algorithm.
    protocol: str
    latency_s: float
    step_latency_s: float
    memory_bandwidth_bytes_per_s: float
    link_bandwidth_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device; rates are achievable ones (datasheet times efficiency).

    A device is what JAX calls one: a chip, or on TPU v3 one of the two cores of a chip.
    """

    name: str
    description: str
    #: Peak FLOP/s by StableHLO element type, as in the datasheet.
    flops_per_s: Mapping[str, float]
    #: Fraction of the peak that large matrix products reach.
    matmul_efficiency: float
    memory_capacity_bytes: float
    #: Bytes that a program may use of the capacity: arguments, outputs and temporaries.
    memory_limit_bytes: float
    #: Achievable bytes per second of the device's memory.
    memory_bytes_per_s: float
    interconnect: Interconnect
    #: Rows, columns and depth of the pieces that the matrix unit takes; smaller ones are padded.
    tile: tuple[int, int, int] = (1, 1, 1)
    #: Elements that one dimension of every array in memory is padded to a multiple of.
    lanes: int = 1
    #: What products round float32 operands to before they keep or send them; empty for nothing.
    product_operands: str = ""
    #: Exponentials, logarithms and their like per second.
    transcendentals_per_s: float = math.inf
    #: The largest system that is built of it, as one slice or cluster.
    max_devices: int = 10**6
    #: Collectives inside a node as measured; those of other kinds follow from the links.
    measured: tuple[Measured, ...] = ()

    def peak(self, dtype: str) -> float:
        """Achievable FLOP/s for products of ``dtype``; of float32 where it has no entry."""
        known = self.flops_per_s
        fallback = known.get("f32", max(known.values()))
        return known.get(dtype, fallback) * self.matmul_efficiency


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a figure may be: the range catches wrong units, such as 16 for 16e9 bytes."""

    types: tuple[type, ...]
    low: float
    high: float
    words: str

    def accepts(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, self.types):
            return False
        if isinstance(value, str):
            return bool(value.strip()) and value.isprintable()  # no control characters
        return isinstance(value, int | float) and self.low <= value <= self.high  # no NaN


_TEXT = _Kind((str,), 0, 0, "a printable text")
_COUNT = _Kind((int,), 1, 1e6, "a whole number from 1 to 1000000")
_DIMENSIONS = _Kind((int,), 2, 3, "2 or 3")
_FLOPS_PER_S = _Kind((int, float), 1e9, 1e18, "FLOP/s, for example 197e12")
_BYTES = _Kind((int, float), 1e6, 1e15, "bytes, for example 16e9")
_BYTES_PER_S = _Kind((int, float), 1e6, 1e15, "bytes per second, for example 819e9")
_SECONDS = _Kind((int, float), 0, 0.1, "seconds, for example 1e-6")
_FRACTION = _Kind((int, float), 0.001, 1, "a fraction from 0.001 to 1")

_TABLES: dict[str, dict[str, _Kind]] = {
    "": {
        "name": _TEXT, "description": _TEXT, "max_devices": _COUNT, "product_operands": _TEXT,
        "transcendentals_per_s": _FLOPS_PER_S,
    },
    "flops_per_s": {},  # any element types
    "memory": {
        "capacity_bytes": _BYTES, "limit_bytes": _BYTES, "bandwidth_bytes_per_s": _BYTES_PER_S,
        "lanes": _COUNT,
    },
    "tile": {"m": _COUNT, "n": _COUNT, "k": _COUNT},
    "efficiency": {"matmul": _FRACTION, "memory": _FRACTION, "link": _FRACTION},
}  # fmt: skip
_INTERCONNECT: dict[str, dict[str, _Kind]] = {
    "torus": {
        "topology": _TEXT, "dimensions": _DIMENSIONS, "wraparound_from": _COUNT,
        "link_bandwidth_bytes_per_s": _BYTES_PER_S, "latency_s": _SECONDS,
    },
    "switch": {
        "topology": _TEXT, "devices_per_node": _COUNT,
        "node_bandwidth_bytes_per_s": _BYTES_PER_S, "node_latency_s": _SECONDS,
        "network_bandwidth_bytes_per_s": _BYTES_PER_S, "network_latency_s": _SECONDS,
    },
}  # fmt: skip
#: What may follow as often as wanted, as ``[[collective]]``.
_COLLECTIVE: dict[str, _Kind] = {
    "kind": _TEXT, "algorithm": _TEXT, "protocol": _TEXT, "latency_s": _SECONDS,
    "step_latency_s": _SECONDS, "memory_bandwidth_bytes_per_s": _BYTES_PER_S,
    "link_bandwidth_bytes_per_s": _BYTES_PER_S,
}  # fmt: skip
#: Of what may be left out.
_DEFAULTS: dict[str, Any] = {
    "max_devices": 10**6, "protocol": "", "product_operands": "",
    "transcendentals_per_s": math.inf, "tile": {"m": 1, "n": 1, "k": 1}, "lanes": 1,
}  # fmt: skip
#: FLOP per byte of memory traffic that no device has: known ones have some hundred.
_INTENSITY = 1e4
#: Of the memory, what a program may use at least.
_LEAST_LIMIT = 0.01
#: The largest file that is read.
_LARGEST_BYTES = 2**20
#: Characters of a bad value that messages repeat.
_SHOWN = 60
#: Collectives that can be measured, and what runs them.
_ALGORITHMS = {
    "all_gather": ("ring", "recursive doubling"),
    "all_reduce": ("ring", "recursive doubling", "tree", "in-switch"),
    "reduce_scatter": ("ring", "recursive doubling"),
    "all_to_all": ("direct",),
}
#: What products may round float32 operands to.
_ROUNDED = ("bf16", "f16")
#: StableHLO element types as the program representation writes them.
_ELEMENT_TYPE = re.compile(r"bf16|f16|f32|f64|u?i(2|4|8|16|32|64)|c64|c128|f[468]e\dm\d\w*")


def names() -> list[str]:
    """The devices that ship with TOAST, in alphabetical order."""
    return sorted(path.stem for path in directory("hardware").glob("*.toml"))


def load(name_or_path: str | pathlib.Path) -> Hardware:
    """A shipped device by name, or a user's ``.toml`` file by path.

    Raises :class:`toast.errors.HardwareError`: for an unknown name with the nearest known one, for
    a file as one line ``file:line: reason; what to do``.
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
    return parse(path, read_text(path, HardwareError, most=_LARGEST_BYTES, encoding="utf-8-sig"))


def parse(path: pathlib.Path, text: str) -> Hardware:
    """The hardware that ``text`` describes; ``path`` is for messages.  Raises as :func:`load`."""
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise HardwareError(f"{path}: not TOML: nested too deeply; write plain tables") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at (?:line (\d+).*|end of document)\)$", str(error))
        line = (found and found[1]) or max(1, len(text.splitlines()))
        reason = str(error)[: found.start()] if found else str(error)
        raise HardwareError(f"{path}:{line}: not TOML: {reason}; correct the line") from None
    except ValueError:  # Python reads no number of so many digits
        long = (n for n, line in enumerate(text.splitlines(), 1) if re.search(r"[\d_]{4000}", line))
        raise HardwareError(
            f"{path}:{next(long, 1)}: a number has thousands of digits; correct the line"
        ) from None
    return _Checked(path, text, data).hardware()


class _Checked:
    """A parsed file whose every key and value is looked at once."""

    def __init__(self, path: pathlib.Path, text: str, data: dict[str, Any]) -> None:
        self._path, self._lines, self._data = path, text.splitlines(), data

    def hardware(self) -> Hardware:
        known = [*filter(None, _TABLES), "interconnect"]
        for table, content in self._data.items():
            if isinstance(content, dict | list) and table not in (*known, "collective"):
                self._fail(table, "", f"unknown table {table}", _hint(table, known))
        self._data.setdefault("tile", _DEFAULTS["tile"])
        for table in known:
            if not isinstance(self._data.get(table), dict):
                self._fail("", table, f"missing table {table}", f"add [{table}]")
        for table, keys in {**_TABLES, "interconnect": self._interconnect_keys()}.items():
            self._check_table(table, keys)
        measured = self._measured()
        self._check_plausible()
        data = self._data
        memory, link, efficiency = data["memory"], data["interconnect"], data["efficiency"]
        torus = link["topology"] == "torus"
        rate = efficiency["link"]
        return Hardware(
            name=data["name"],
            description=data["description"],
            flops_per_s=dict(data["flops_per_s"]),
            matmul_efficiency=efficiency["matmul"],
            memory_capacity_bytes=memory["capacity_bytes"],
            memory_limit_bytes=memory["limit_bytes"],
            memory_bytes_per_s=memory["bandwidth_bytes_per_s"] * efficiency["memory"],
            interconnect=Interconnect(
                topology=link["topology"],
                dimensions=link.get("dimensions", 0),
                bandwidth_bytes_per_s=rate
                * link["link_bandwidth_bytes_per_s" if torus else "node_bandwidth_bytes_per_s"],
                latency_s=link["latency_s" if torus else "node_latency_s"],
                wraparound_from=link.get("wraparound_from", 0),
                devices_per_node=link.get("devices_per_node", 0),
                network_bandwidth_bytes_per_s=link.get("network_bandwidth_bytes_per_s", 0.0) * rate,
                network_latency_s=link.get("network_latency_s", 0.0),
                efficiency=rate,
            ),
            lanes=memory.get("lanes", _DEFAULTS["lanes"]),
            tile=(data["tile"]["m"], data["tile"]["n"], data["tile"]["k"]),
            **{
                key: data.get(key, _DEFAULTS[key])
                for key in ("max_devices", "product_operands", "transcendentals_per_s")
            },
            measured=measured,
        )

    def _measured(self) -> tuple[Measured, ...]:
        entries = self._data.get("collective", [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            self._fail(
                "", "collective", "collective is not a list of tables", "write [[collective]]"
            )
        if entries and self._data["interconnect"]["topology"] != "switch":
            self._fail(
                "collective#0", "", "a torus cannot have measured collectives", "remove them"
            )
        memory = self._data["memory"]["bandwidth_bytes_per_s"]
        seen: set[tuple[str, str, str]] = set()
        for number, entry in enumerate(entries):
            table = f"collective#{number}"
            self._check_entries(table, entry, _COLLECTIVE)
            kind = entry["kind"]
            if kind not in _ALGORITHMS:
                self._fail(
                    table, "kind", f"kind is {_shown(kind)}", f"write {_one_of(_ALGORITHMS)}"
                )
            if (algorithm := entry["algorithm"]) not in (known := _ALGORITHMS[kind]):
                reason = f"algorithm of {kind} is {_shown(algorithm)}"
                self._fail(table, "algorithm", reason, f"write {_one_of(known)}")
            name = kind, algorithm, entry.get("protocol", "")
            if name in seen:
                reason = f"duplicate {' '.join(filter(None, name))}"
                self._fail(table, "", reason, "remove it, or set another protocol")
            seen.add(name)
            for key in ("memory_bandwidth_bytes_per_s", "link_bandwidth_bytes_per_s"):
                if entry[key] > memory:
                    self._fail(table, key, f"{key} exceeds that of the memory", "check the unit")
        return tuple(Measured(**{"protocol": _DEFAULTS["protocol"], **entry}) for entry in entries)

    def _interconnect_keys(self) -> dict[str, _Kind]:
        table = self._data["interconnect"]
        topology = table.get("topology")
        if not isinstance(topology, str) or topology not in _INTERCONNECT:
            reason = (
                f"topology is {_shown(topology)}" if "topology" in table else "missing key topology"
            )
            self._fail("interconnect", "topology", reason, 'write "torus" or "switch"')
        return _INTERCONNECT[topology]

    def _check_table(self, table: str, keys: dict[str, _Kind]) -> None:
        entries = self._data[table] if table else self._data
        if not table:
            entries = {
                key: value for key, value in entries.items()
                if not isinstance(value, dict) and key != "collective"
            }  # fmt: skip
        if table == "flops_per_s":
            for key in entries:
                if not _ELEMENT_TYPE.fullmatch(key):
                    self._fail(
                        table, key, f"{key} is not an element type", "write for example bf16"
                    )
            keys = dict.fromkeys(entries, _FLOPS_PER_S)
            if not entries:
                self._fail(
                    table, "", "no figure for any element type", "add for example bf16 = 197e12"
                )
        self._check_entries(table, entries, keys)

    def _check_entries(self, table: str, entries: dict[str, Any], keys: dict[str, _Kind]) -> None:
        for key in entries:
            if key not in keys:
                self._fail(table, key, f"unknown key {key}", _hint(key, keys))
        for key, kind in keys.items():
            if key not in entries and key in _DEFAULTS:
                continue
            if key not in entries:
                self._fail(table, "", f"missing key {key}", f"add it: {kind.words}")
            if not kind.accepts(entries[key]):
                self._fail(table, key, f"{key} is {_shown(entries[key])}", f"write {kind.words}")

    def _check_plausible(self) -> None:
        """Figures that are each in range but cannot be together: a wrong unit or prefix."""
        rounded = self._data.get("product_operands")
        if rounded is not None and rounded not in _ROUNDED:
            reason = f"product_operands is {_shown(rounded)}"
            self._fail("", "product_operands", reason, f"write {_one_of(_ROUNDED)}")
        memory, link, flops = (self._data[t] for t in ("memory", "interconnect", "flops_per_s"))
        bandwidth = memory["bandwidth_bytes_per_s"]
        if memory["limit_bytes"] > memory["capacity_bytes"]:
            self._fail("memory", "limit_bytes", "limit_bytes exceeds capacity_bytes", "lower it")
        if memory["limit_bytes"] < _LEAST_LIMIT * memory["capacity_bytes"]:
            reason = "limit_bytes is less than a hundredth of capacity_bytes"
            self._fail(
                "memory", "limit_bytes", reason, "check the unit; use --memory to limit a plan"
            )
        for key in link:
            if key.endswith("bytes_per_s") and link[key] > bandwidth:
                self._fail(
                    "interconnect", key, f"{key} exceeds that of the memory", "check the unit"
                )
        network = "network_bandwidth_bytes_per_s"
        if link.get(network, 0) > link.get("node_bandwidth_bytes_per_s", math.inf):
            reason = f"{network} exceeds that of the links inside a node"
            self._fail("interconnect", network, reason, "check the unit")
        best = max(flops, key=lambda dtype: float(flops[dtype]))
        if flops[best] < bandwidth:
            self._fail(
                "flops_per_s", best, f"{best} is less than the memory's bytes/s", "check the unit"
            )
        if flops[best] > _INTENSITY * bandwidth:
            reason = f"{best} exceeds {_INTENSITY:.0f} FLOP per byte of memory traffic"
            self._fail("flops_per_s", best, reason, "check the units of both")
        if self._data.get("transcendentals_per_s", 0) > flops[best]:
            reason = "transcendentals_per_s exceeds the peak of matrix products"
            self._fail("", "transcendentals_per_s", reason, "check the unit")

    def _fail(self, table: str, key: str, reason: str, remedy: str) -> NoReturn:
        raise HardwareError(f"{self._path}:{self._line(table, key)}: {reason}; {remedy}")

    def _line(self, table: str, key: str) -> int:
        """The line of a key, or of its table if it has none (or is inside braces), else 1."""
        wanted = f"{table}.{key}" if table and key else key
        current, table_line, seen = "", 1, 0
        for number, line in enumerate(self._lines, 1):
            plain = re.sub(r"[\s\"']", "", line.split("#")[0])
            if plain == "[[collective]]":
                current, seen = f"collective#{seen}", seen + 1
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
    """A bad value for a message, cut where it is long."""
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
