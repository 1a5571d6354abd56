"""Hardware descriptions: TOML files of sourced figures, checked strictly."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from toast.errors import HardwareError
from toast.resources import directory


@dataclasses.dataclass(frozen=True)
class Interconnect:
    """How devices are linked: a torus of chips, or nodes of switched devices on a network."""

    #: ``"torus"`` or ``"switch"``.
    topology: str
    #: Torus: dimensions; switch: 0.
    dimensions: int
    #: Bytes per second of one link in one direction (torus), or of one device in one direction
    #: inside a node (switch).
    bandwidth_bytes_per_s: float
    #: Seconds of one step of a collective (torus, or inside a node).
    latency_s: float
    #: Torus: smallest size of a dimension whose ends are linked; switch: 0.
    wraparound_from: int
    #: Switch: devices that share a node; torus: 0.
    devices_per_node: int
    #: Switch: as above between nodes; torus: 0.
    network_bandwidth_bytes_per_s: float
    network_latency_s: float


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device; rates are achievable ones (datasheet times efficiency)."""

    name: str
    description: str
    #: Peak FLOP/s by StableHLO element type, as in the datasheet.
    flops_per_s: Mapping[str, float]
    matmul_efficiency: float
    memory_capacity_bytes: float
    #: What a program may use of it.
    memory_limit_bytes: float
    #: Achievable bytes per second of the device's memory.
    memory_bytes_per_s: float
    interconnect: Interconnect

    def peak(self, dtype: str) -> float:
        """Achievable FLOP/s for products of ``dtype``; of float32 where it has no entry."""
        known = self.flops_per_s
        fallback = known.get("f32", max(known.values()))
        return known.get(dtype, fallback) * self.matmul_efficiency


_NUMBER = (int, float)
_TABLES: dict[str, dict[str, Any]] = {
    "": {"name": str, "description": str},
    "flops_per_s": {},
    "memory": dict.fromkeys(("capacity_bytes", "limit_bytes", "bandwidth_bytes_per_s"), _NUMBER),
    "efficiency": dict.fromkeys(("matmul", "memory", "link"), _NUMBER),
}
_INTERCONNECT = {
    "torus": {
        "topology": str, "dimensions": int, "link_bandwidth_bytes_per_s": _NUMBER,
        "latency_s": _NUMBER, "wraparound_from": int,
    },
    "switch": {
        "topology": str, "devices_per_node": int, "node_bandwidth_bytes_per_s": _NUMBER,
        "node_latency_s": _NUMBER, "network_bandwidth_bytes_per_s": _NUMBER,
        "network_latency_s": _NUMBER,
    },
}  # fmt: skip


def names() -> list[str]:
    """The devices that ship with TOAST."""
    return sorted(path.stem for path in directory("hardware").glob("*.toml"))


def load(name_or_path: str) -> Hardware:
    """A shipped device by name, or a user's ``.toml`` file by path.

    Raises :class:`toast.errors.HardwareError`: unknown names with a suggestion, and files with
    the line and the reason.
    """
    path = pathlib.Path(name_or_path)
    if path.suffix != ".toml":
        if name_or_path not in names():
            near = difflib.get_close_matches(name_or_path.lower(), names(), 1, 0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise HardwareError(
                f"no hardware called {name_or_path}; {hint}known: {', '.join(names())}; "
                "or give the path of a .toml file"
            )
        path = directory("hardware") / f"{name_or_path}.toml"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise HardwareError(f"{path}: cannot read: {reason}; check the path") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        line = found.group(1) if found else "1"
        reason = re.sub(r" \(at .*\)$", "", str(error))
        raise HardwareError(f"{path}:{line}: not TOML: {reason}") from None
    return _Checked(path, text, data).hardware()


class _Checked:
    """A parsed file whose every key and value is looked at once."""

    def __init__(self, path: pathlib.Path, text: str, data: dict[str, Any]) -> None:
        self._path, self._lines, self._data = path, text.splitlines(), data

    def hardware(self) -> Hardware:
        tables = {**_TABLES, "interconnect": self._interconnect_keys()}
        for table in self._data:
            if isinstance(self._data[table], dict) and table not in tables:
                self._fail(table, "", "unknown table", f"known: {', '.join(filter(None, tables))}")
        for table, keys in tables.items():
            self._check_table(table, keys)
        data = self._data
        memory, link, efficiency = data["memory"], data["interconnect"], data["efficiency"]
        for name, fraction in efficiency.items():
            if fraction > 1:
                self._fail("efficiency", name, f"{fraction} is more than all", "use 0 to 1")
        if memory["limit_bytes"] > memory["capacity_bytes"]:
            self._fail("memory", "limit_bytes", "more than capacity_bytes", "lower it")
        torus = link["topology"] == "torus"
        key = "link_bandwidth_bytes_per_s" if torus else "node_bandwidth_bytes_per_s"
        if link[key] > memory["bandwidth_bytes_per_s"]:
            self._fail(
                "interconnect", key, "a link faster than the device's memory", "check the unit"
            )
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
                bandwidth_bytes_per_s=link[key] * rate,
                latency_s=link["latency_s" if torus else "node_latency_s"],
                wraparound_from=link.get("wraparound_from", 0),
                devices_per_node=link.get("devices_per_node", 0),
                network_bandwidth_bytes_per_s=link.get("network_bandwidth_bytes_per_s", 0.0) * rate,
                network_latency_s=link.get("network_latency_s", 0.0),
            ),
        )

    def _interconnect_keys(self) -> dict[str, Any]:
        table = self._data.get("interconnect")
        topology = table.get("topology") if isinstance(table, dict) else None
        if topology not in _INTERCONNECT:
            self._fail(
                "interconnect", "topology", f"topology is {topology!r}", "use torus or switch"
            )
        return _INTERCONNECT[str(topology)]

    def _check_table(self, table: str, keys: dict[str, Any]) -> None:
        data = self._data if not table else self._data.get(table)
        if not isinstance(data, dict):
            raise self._error(table, "", "missing table", f"add [{table}]")
        entries = {k: v for k, v in data.items() if not isinstance(v, dict)}
        if table == "flops_per_s":
            keys = dict.fromkeys(entries, _NUMBER)
            if not entries:
                self._fail(table, "", "no element type", "add for example bf16 = 1e14")
        for key in entries:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, 1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(keys)}"
                self._fail(table, key, f"unknown key {key}", hint)
        for key, kind in keys.items():
            if key not in entries:
                self._fail(table, "", f"missing key {key}", "add it, with its source")
            value = entries[key]
            if isinstance(value, bool) or not isinstance(value, kind):
                self._fail(table, key, f"{key} is {value!r}", "write a number" if kind is not str
                           else "write a text")  # fmt: skip
            if kind is not str and value <= 0:
                self._fail(table, key, f"{key} is {value}", "write a positive number")

    def _fail(self, table: str, key: str, reason: str, remedy: str) -> None:
        raise self._error(table, key, reason, remedy)

    def _error(self, table: str, key: str, reason: str, remedy: str) -> HardwareError:
        return HardwareError(f"{self._path}:{self._line(table, key)}: {reason}; {remedy}")

    def _line(self, table: str, key: str) -> int:
        """The line of a key in its table, of the table if it has none, else the first."""
        current, table_line = "", 1
        for number, line in enumerate(self._lines, 1):
            if found := re.match(r"\s*\[([\w.]+)\]", line):
                current = found.group(1)
                table_line = number if current == table else table_line
            elif key and current == table and re.match(rf"\s*{re.escape(key)}\s*=", line):
                return number
        return table_line
