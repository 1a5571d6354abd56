"""Fits the collectives of a hardware file to measured times."""

from __future__ import annotations

import dataclasses
import decimal
import json
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from toast.boundary.regular_files import read_text
from toast.errors import HardwareError
from toast.hardware.collective_prices import Collectives, sizes_by_protocol, steps, wire_share
from toast.hardware.description import Hardware, Measured, Protocol
from toast.hardware.device_files import load, parse
from toast.hardware.measured_tables import COLUMNS
from toast.hardware.mesh import Mesh
from toast.hardware.sources import MEASURED
from toast.resources import directory

Floats = npt.NDArray[np.float64]

#: The algorithms that are fitted for each collective; NCCL uses these.
_ALGORITHMS = {
    "all_gather": ("ring",), "reduce_scatter": ("ring",), "all_reduce": ("ring", "in-switch"),
    "all_to_all": ("direct",),
}  # fmt: skip

#: Names of the variants of one algorithm, by their number: from small to large sizes.
_PROTOCOLS = {
    1: ("",), 2: ("low latency", "high bandwidth"),
    3: ("low latency", "middle", "high bandwidth"),
}  # fmt: skip

#: Figures of one variant: a fit needs as many sizes, and as many rows for every further variant.
_FIGURES = 4

#: The rows that a second line of a protocol needs.
_MANY = 16

#: Every further variant must reduce the loss by this factor.
_WORTH = 0.95
#: Random starts of a fit.
_STARTS = 24

#: Bytes from which a row weighs 3 and 2: programs move megabytes.
_LARGE, _MIDDLE = 64e6, 1e6
_LARGEST = "64 MB and more"

#: The mean error of the largest sizes, from which a table cannot be of the device.
_OTHER_DEVICE = 0.5


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A device with fitted collectives, and the errors of the fit."""

    hardware: Hardware
    measured: tuple[Measured, ...]
    #: One row per collective, number of devices and range of sizes; see :func:`errors`.
    errors: pd.DataFrame


def calibrate(
    hardware: Hardware, table: pd.DataFrame, *, progress: Callable[[str], None] | None = None
) -> Calibration:
    """Fits latency and bandwidth of every collective and algorithm to measured times of one node.

    :param hardware: the device; its figures limit the fitted rates.
    :param table: the times, as :func:`toast.hardware.measured_tables.read_table` returns them.
    :param progress: a function that is called with a text before each fit.
    :returns: the device with the fitted collectives.  Collectives without rows keep their figures.
        The same table gives the same result.
    :raises toast.errors.HardwareError: for a torus, for more devices than a node has, for too few
        sizes, and for large collectives that no rate within the device's links can fit: those of
        another device.
    """
    if hardware.interconnect.topology != "switch":
        raise HardwareError(
            f"{hardware.name} is a torus, and its collectives are computed from its links; "
            "calibrate only switched devices, and set efficiency.link of a torus"
        )
    most = int(table["devices"].max())
    if most > hardware.interconnect.devices_per_node:
        raise HardwareError(
            f"{hardware.name} has {hardware.interconnect.devices_per_node} devices per node, the "
            f"table {most}; remove rows for several nodes"
        )
    for kind, sizes in table.groupby("collective")["bytes"].nunique().items():
        if sizes < _FIGURES:
            raise HardwareError(
                f"the table has {sizes} size{'s' if sizes > 1 else ''} of {kind}, but a fit needs "
                f"{_FIGURES} or more, small and large; add rows, or remove those of {kind} to "
                f"keep the figures of {hardware.name}"
            )
    fitted: list[Measured] = []
    for kind in (kind for kind in _ALGORITHMS if kind in set(table["collective"])):
        if progress:
            progress(f"fitting {kind}")
        fitted += _fitted(hardware, kind, table[table["collective"] == kind])
    others = [m for m in hardware.measured if m.kind not in set(table["collective"])]
    measured = tuple(others + fitted)
    machine = dataclasses.replace(hardware, measured=measured)
    found = errors(machine, table)
    large = found[(found["size"] == _LARGEST) & (found["mean"] > _OTHER_DEVICE)]
    for worst in large.sort_values("mean").tail(1).to_dict("records"):
        raise HardwareError(
            f"no figures within the links of {hardware.name} fit {worst['collective']} over "
            f"{worst['devices']} devices: the mean error from 64 MB on is {worst['mean']:.0%}; if "
            "the table is of another device, take the file of that device, otherwise correct "
            "[interconnect] and [memory] of this one"
        )
    return Calibration(machine, measured, found)


def errors(hardware: Hardware, table: pd.DataFrame) -> pd.DataFrame:
    """Relative errors of predicted times.

    One row per collective, number of devices and range of sizes, with the columns ``mean``, ``max``
    and ``rows``.
    """
    rows = table.copy()
    costs = {n: Collectives(hardware, Mesh((("x", int(n)),))) for n in table["devices"].unique()}
    rows["error"] = [
        abs(costs[n].cheapest(kind, size, ["x"]).seconds(size) / seconds - 1)
        for kind, n, size, seconds in table[list(COLUMNS)].itertuples(index=False)
    ]
    sizes = [0, _MIDDLE, _LARGE, np.inf]
    labels = ["below 1 MB", "1 to 64 MB", _LARGEST]
    rows["size"] = pd.cut(rows["bytes"], sizes, right=False, labels=labels)
    grouped = rows.groupby(["collective", "devices", "size"], observed=True)["error"]
    return grouped.agg(["mean", "max", "size"]).rename(columns={"size": "rows"}).reset_index()


def _fitted(hardware: Hardware, kind: str, rows: pd.DataFrame) -> list[Measured]:
    """The fit with the fewest variants that describes the rows well.

    If the library chooses among protocols, each is fitted to the rows for which it is chosen.
    """
    protocols = [p for p in hardware.protocols if p.algorithm in _ALGORITHMS[kind]]
    if protocols:
        return list(_by_protocol(hardware, kind, rows, protocols))
    best: tuple[float, list[Measured]] | None = None
    for extra in _ALGORITHMS[kind]:
        for count in _PROTOCOLS:
            names = [_ALGORITHMS[kind][0]] * count
            names += [extra] if extra not in names else []
            if len(names) > 1 and _FIGURES * len(names) > len(rows):
                continue
            loss, variants = _fit(hardware, kind, rows, names)
            loss /= _WORTH ** len(names)
            if best is None or loss < best[0]:
                best = (loss, variants)
    assert best is not None
    return best[1]


def _by_protocol(
    hardware: Hardware, kind: str, rows: pd.DataFrame, protocols: list[Protocol]
) -> Iterator[Measured]:
    """The lines of each protocol, one or two."""
    for protocol in protocols:
        chosen = np.zeros(len(rows), dtype=bool)
        for devices in rows["devices"].unique():
            sizes = sizes_by_protocol(kind, int(devices), protocols)
            least, most = sizes.get(protocol, (np.inf, np.inf))
            size = rows["bytes"].to_numpy()
            chosen |= (rows["devices"].to_numpy() == devices) & (least <= size) & (size < most)
        here = rows[chosen]
        fits = [
            _fit(hardware, kind, here, [protocol.algorithm] * count)
            for count in (1, 2)
            if len(here) >= (1 if count == 1 else _MANY)
        ]
        if fits:
            losses = [loss / _WORTH**count for count, (loss, _) in enumerate(fits, 1)]
            for line in fits[int(np.argmin(losses))][1]:
                yield dataclasses.replace(line, protocol=protocol.name)


def _fit(
    hardware: Hardware, kind: str, rows: pd.DataFrame, names: list[str]
) -> tuple[float, list[Measured]]:
    """A robust least-squares fit of log times: one line per name, each row on the lowest line."""
    devices, size, seconds = (rows[c].to_numpy(np.float64) for c in COLUMNS[1:])
    step = np.array([[steps(kind, name, int(n)) for n in devices] for name in names])
    share = np.array([[wire_share(kind, name, int(n)) for n in devices] for name in names])
    weight = np.where(size >= _LARGE, 3.0, np.where(size >= _MIDDLE, 2.0, 1.0))
    link = hardware.interconnect
    # Nothing is faster than the datasheet.
    fastest = np.array([
        1e-7, 1e-9, 1 / hardware.memory_bytes_per_s, link.efficiency / link.bandwidth_bytes_per_s
    ])  # fmt: skip
    slowest = np.maximum([1e-3, 1e-3, 1e-9, 1e-9], 100 * fastest)
    bounds = np.log(np.tile(fastest, len(names))), np.log(np.tile(slowest, len(names)))

    def residuals(parameters: Floats) -> Floats:
        base, each, memory, wire = np.exp(parameters.reshape(len(names), 4)).T[:, :, None]
        lines = base + each * step + size * (memory + wire * share)
        return np.asarray(np.log(lines.min(axis=0) / seconds) * weight)

    random = np.random.default_rng(0)
    best = None
    for _ in range(_STARTS):
        order = np.arange(len(names))[::-1]
        start = np.stack([
            5e-6 * 3.0 ** order[::-1], 1e-6 * np.ones(len(names)),
            fastest[2] * 20.0**order, fastest[3] * 5.0**order,
        ], axis=1)  # fmt: skip
        guess = np.log(start).ravel() + random.normal(0, 0.6, start.size)
        guess = np.clip(guess, bounds[0] + 1e-9, bounds[1] - 1e-9)
        fit = least_squares(residuals, guess, bounds=bounds, loss="soft_l1", f_scale=0.3)
        if best is None or fit.cost < best.cost:
            best = fit
    assert best is not None
    variants = []
    for name, (base, each, memory, wire) in zip(
        names, np.exp(best.x.reshape(len(names), 4)).tolist(), strict=True
    ):
        variants.append(Measured(
            kind, name, "", _figure(base), _figure(each),
            _figure(1 / memory, 1 / fastest[2]), _figure(1 / wire, 1 / fastest[3]),
        ))  # fmt: skip
    return float(best.cost), _named(variants)


def _figure(value: float, most: float = np.inf) -> float:
    """``value`` with four digits, at most ``most``: files with rates above it do not load."""
    rounded = float(f"{value:.4g}")
    if rounded <= most * (1 + 1e-12):
        return rounded
    down = decimal.Context(prec=4, rounding=decimal.ROUND_DOWN)
    return float(down.create_decimal_from_float(float(most)))


def _named(lines: list[Measured]) -> list[Measured]:
    """The lines with the names of their variants, by latency."""
    variants = []
    for name in dict.fromkeys(line.algorithm for line in lines):
        same = sorted((m for m in lines if m.algorithm == name), key=lambda m: m.latency_s)
        for line, protocol in zip(same, _PROTOCOLS[len(same)], strict=True):
            variants.append(dataclasses.replace(line, protocol=protocol))
    return variants


def file_text(
    name_or_path: str,
    calibration: Calibration | None,
    note: str,
    figures: Mapping[tuple[str, str], float] | None = None,
) -> str:
    """The text of a hardware file in which the fitted collectives replace the old ones.

    :param name_or_path: the device whose file is changed.
    :param calibration: the fit.  The text of other collectives stays as it is.
    :param note: the source, written beside every fitted figure, which says that it is measured.
    :param figures: other fitted figures, by table (empty for the top level) and key.
    :raises toast.errors.HardwareError: if the note has several lines, or the text would not load.
    """
    if "\n" in note or "\r" in note:
        raise HardwareError("the source of fitted figures must be one line")
    if not note.lower().startswith(MEASURED):
        note = f"{MEASURED.capitalize()}: {note}"
    path = pathlib.Path(name_or_path)
    if path.suffix != ".toml":
        path = directory("hardware") / f"{name_or_path}.toml"
    load(str(path))
    text = read_text(path, HardwareError, encoding="utf-8-sig")
    for (table, key), value in (figures or {}).items():
        text = _with_figure(text, table, key, f"{key} = {value:.4g}  # {note}")
    if calibration is not None:
        text = _with_collectives(text, calibration, note)
    return _with_basis(path, text, note, calibration, products=bool(figures))


#: What :func:`_with_basis` writes: the fitted kinds of collectives, and what the others stand on.
_FITTED = re.compile(r".* \(inside a node: ([\w, ]+)\)(?:; all else: (.*))?")


def _with_basis(
    path: pathlib.Path, text: str, note: str, calibration: Calibration | None, *, products: bool
) -> str:
    """``text`` in which ``[basis]`` says what the new figures stand on."""
    if products:
        text = _with_figure(text, "basis", "products", f"products = {_toml(note)}")
    if calibration is not None:
        fitted = set(calibration.errors["collective"])
        basis = f"{note} (inside a node: {', '.join(sorted(fitted))})"
        before = parse(path, text).collectives_basis
        earlier = _FITTED.fullmatch(before)
        if earlier and fitted >= {*earlier[1].split(", ")}:
            before = earlier[2] or ""
        if before:
            basis += f"; all else: {before}"
        text = _with_figure(text, "basis", "collectives", f"collectives = {_toml(basis)}")
    parse(path, text)
    return text


def _with_collectives(text: str, calibration: Calibration, note: str) -> str:
    fitted = set(calibration.errors["collective"])
    rest, old_blocks = _collective_blocks(text)
    blocks = [block for kind, block in old_blocks if kind not in fitted]
    for m in (m for m in calibration.measured if m.kind in fitted):
        rows = calibration.errors[calibration.errors["collective"] == m.kind]
        large = rows[rows["size"] == "64 MB and more"]["mean"]
        error = f", mean error {large.mean():.1%} from 64 MB" if len(large) else ""
        blocks.append(
            f"[[collective]]  # {note}: fitted{error}\n"
            + "".join(
                f"{key} = {_toml(value)}" + ("" if isinstance(value, str) else f"  # {note}") + "\n"
                for key, value in dataclasses.asdict(m).items()
                if value != ""
            )
        )
    return rest.rstrip("\n") + "\n\n" + "\n".join(blocks)


def _with_figure(text: str, table: str, key: str, line: str) -> str:
    """``text`` with the line of a key of a table (of the top level if it is empty).

    The comment above the old line goes: it is the source of the old figure.
    """
    lines, current, first = text.splitlines(), "", None
    for number, old in enumerate(lines):
        plain = re.sub(r"[\s\"']", "", old.split("#")[0])
        if header := re.fullmatch(r"\[+([^\[\]=]+)\]+", plain):
            if first is None and not table:
                first = number - 1 if not lines[number - 1].strip() else number
            current = header[1]
            if current == table:
                first = number + 1
        elif current == table and plain.startswith(f"{key}="):
            start = number
            while start and lines[start - 1].startswith("#"):
                start -= 1
            return "\n".join([*lines[:start], line, *lines[number + 1 :]]) + "\n"
    if first is None:
        return f"{text.rstrip(chr(10))}\n\n[{table}]\n{line}\n"
    return "\n".join([*lines[:first], line, *lines[first:]]) + "\n"


def _collective_blocks(text: str) -> tuple[str, list[tuple[str, str]]]:
    """A hardware file without its collectives, and the kind and the text of each collective."""
    rest: list[str] = []
    blocks: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            inside = bool(re.match(r"\s*\[\[\s*collective\s*\]\]", line))
            if inside:
                blocks.append([])
        (blocks[-1] if inside else rest).append(line)
    collectives = []
    for block in blocks:
        (entry,) = tomllib.loads("\n".join(block))["collective"]
        collectives.append((str(entry["kind"]), "\n".join(block).rstrip("\n") + "\n"))
    return "\n".join(rest), collectives


def _toml(value: str | float) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else f"{value:.4g}"
