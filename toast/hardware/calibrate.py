"""Fits the collectives of a hardware file to measured times."""

from __future__ import annotations

import dataclasses
import decimal
import pathlib
import re
import tomllib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from toast.boundary.regular_files import read_text
from toast.errors import HardwareError
from toast.hardware.collective_prices import Collectives, steps, wire_share
from toast.hardware.description import Hardware, Measured, load, parse
from toast.hardware.mesh import Mesh
from toast.resources import directory

#: Times beyond these are in another unit: seconds at most, and bytes per second at least.
_SLOW, _SLOW_RATE = 1e-2, 1e8

Floats = npt.NDArray[np.float64]

COLUMNS = ("collective", "devices", "bytes", "seconds")

#: What runs each collective on a switch, as NCCL does.
_OFFERED = {
    "all_gather": ("ring",), "reduce_scatter": ("ring",), "all_reduce": ("ring", "in-switch"),
    "all_to_all": ("direct",),
}  # fmt: skip

#: Variants of one algorithm by the bytes that they are made for, as many as are fitted.
_PROTOCOLS = {
    1: ("",), 2: ("low latency", "high bandwidth"),
    3: ("low latency", "middle", "high bandwidth"),
}  # fmt: skip

#: Figures of one variant: so many sizes are needed, and so many rows for every further variant.
_FIGURES = 4

#: Every further variant has to make the fit better by this factor.
_WORTH = 0.95
_STARTS = 24

#: The largest table that is read, in bytes and in rows: each row is looked at in every fit.
_LARGEST_BYTES, _MOST_ROWS = 2**24, 5000

#: Sizes from which errors matter most: programs move megabytes.
_LARGE, _MIDDLE = 64e6, 1e6


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was fitted, and how far it is from the table."""

    hardware: Hardware
    measured: tuple[Measured, ...]
    #: A row per collective, devices and range of sizes: mean and worst relative error.
    errors: pd.DataFrame


def read_table(path: str | pathlib.Path) -> pd.DataFrame:
    """Measured times: columns ``collective, devices, bytes, seconds``; lines with ``#`` are notes.

    Raises :class:`toast.errors.HardwareError` with file and line of the first bad row.
    """
    path = pathlib.Path(path)
    text = read_text(path, HardwareError, most=_LARGEST_BYTES, encoding="utf-8-sig")
    lines = text.splitlines()
    rows: list[tuple[str, int, float, float]] = []
    columns: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip().strip('"') for cell in line.split(",")]
        if not columns:
            columns = cells
            if twice := [c for c in COLUMNS if cells.count(c) > 1]:
                raise HardwareError(f"{path}:{number}: column {twice[0]} occurs twice; remove one")
            if missing := [c for c in COLUMNS if c not in cells]:
                raise HardwareError(
                    f"{path}:{number}: column {missing[0]} is missing; the columns are "
                    f"{','.join(COLUMNS)}"
                )
            continue
        try:
            cell = dict(zip(columns, cells, strict=True))
            row = (
                cell["collective"].replace("-", "_"), int(cell["devices"]),
                float(cell["bytes"]), float(cell["seconds"]),
            )  # fmt: skip
        except ValueError:
            raise HardwareError(
                f"{path}:{number}: '{line}' is not {','.join(COLUMNS)}; write for example "
                "all_gather,8,1048576,1.7e-05"
            ) from None
        if row[0] not in _OFFERED:
            raise HardwareError(
                f"{path}:{number}: unknown collective {row[0]}; known: {', '.join(_OFFERED)}"
            )
        if not (row[1] > 1 and 0 < row[2] < np.inf and 0 < row[3] < np.inf):
            raise HardwareError(
                f"{path}:{number}: '{line}': devices must be at least 2, and bytes and seconds "
                "positive"
            )
        if row[3] > _SLOW + row[2] / _SLOW_RATE:
            raise HardwareError(
                f"{path}:{number}: '{line}': {row[3]:g} s is implausibly slow; use seconds, "
                "not microseconds as in nccl-tests"
            )
        rows.append(row)
        if len(rows) > _MOST_ROWS:
            raise HardwareError(
                f"{path}:{number}: more than {_MOST_ROWS:,} times; keep one for each collective, "
                "number of devices and size"
            )
    if not rows:
        raise HardwareError(f"{path}: no measured times; write rows of {','.join(COLUMNS)}")
    return pd.DataFrame(rows, columns=list(COLUMNS))


def calibrate(
    hardware: Hardware, table: pd.DataFrame, *, progress: Callable[[str], None] | None = None
) -> Calibration:
    """Fit latency and bandwidth of every collective and algorithm to a table of one node.

    Collectives that the table lacks keep what the hardware says of them.  The same table gives the
    same fit.  ``progress`` is told what is fitted.  Raises :class:`toast.errors.HardwareError`
    for a torus, for devices of several nodes, and for too few sizes.
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
    for kind in (kind for kind in _OFFERED if kind in set(table["collective"])):
        if progress:
            progress(f"fitting {kind}")
        fitted += _fitted(hardware, kind, table[table["collective"] == kind])
    kept = [m for m in hardware.measured if m.kind not in set(table["collective"])]
    measured = tuple(kept + fitted)
    machine = dataclasses.replace(hardware, measured=measured)
    return Calibration(machine, measured, errors(machine, table))


def errors(hardware: Hardware, table: pd.DataFrame) -> pd.DataFrame:
    """Relative errors of predicted times, by collective, devices and range of sizes."""
    found = table.copy()
    on = {n: Collectives(hardware, Mesh((("x", int(n)),))) for n in table["devices"].unique()}
    found["error"] = [
        abs(on[n].cheapest(kind, size, ["x"]).seconds(size) / seconds - 1)
        for kind, n, size, seconds in table[list(COLUMNS)].itertuples(index=False)
    ]
    sizes = [0, _MIDDLE, _LARGE, np.inf]
    labels = ["below 1 MB", "1 to 64 MB", "64 MB and more"]
    found["size"] = pd.cut(found["bytes"], sizes, right=False, labels=labels)
    grouped = found.groupby(["collective", "devices", "size"], observed=True)["error"]
    return grouped.agg(["mean", "max", "size"]).rename(columns={"size": "rows"}).reset_index()


def _fitted(hardware: Hardware, kind: str, rows: pd.DataFrame) -> list[Measured]:
    """As few lines as describe the rows well."""
    best: tuple[float, list[Measured]] | None = None
    for extra in _OFFERED[kind]:
        for count in _PROTOCOLS:
            names = [_OFFERED[kind][0]] * count
            names += [extra] if extra not in names else []
            if len(names) > 1 and _FIGURES * len(names) > len(rows):
                continue
            loss, found = _fit(hardware, kind, rows, names)
            loss /= _WORTH ** len(names)
            if best is None or loss < best[0]:
                best = (loss, found)
    assert best is not None
    return best[1]


def _fit(
    hardware: Hardware, kind: str, rows: pd.DataFrame, names: list[str]
) -> tuple[float, list[Measured]]:
    """Least squares of log times; rows that stand alone weigh less."""
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
        found = least_squares(residuals, guess, bounds=bounds, loss="soft_l1", f_scale=0.3)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    made = []
    for name, (base, each, memory, wire) in zip(
        names, np.exp(best.x.reshape(len(names), 4)).tolist(), strict=True
    ):
        made.append(Measured(
            kind, name, "", _figure(base), _figure(each),
            _figure(1 / memory, 1 / fastest[2]), _figure(1 / wire, 1 / fastest[3]),
        ))  # fmt: skip
    return float(best.cost), _named(made)


def _figure(value: float, most: float = np.inf) -> float:
    """``value`` with four digits, at most ``most``: a rate above the datasheet's is refused."""
    rounded = float(f"{value:.4g}")
    if rounded <= most * (1 + 1e-12):
        return rounded
    down = decimal.Context(prec=4, rounding=decimal.ROUND_DOWN)
    return float(down.create_decimal_from_float(float(most)))


def _named(lines: list[Measured]) -> list[Measured]:
    """Variants of one algorithm, told apart by what they are good for."""
    found = []
    for name in dict.fromkeys(line.algorithm for line in lines):
        same = sorted((m for m in lines if m.algorithm == name), key=lambda m: m.latency_s)
        for line, protocol in zip(same, _PROTOCOLS[len(same)], strict=True):
            found.append(dataclasses.replace(line, protocol=protocol))
    return found


def file_text(name_or_path: str, calibration: Calibration, note: str) -> str:
    """The hardware file of ``name_or_path`` with the fitted collectives instead of its own.

    ``note`` is the source that every fitted figure is marked with.  Collectives that were not
    fitted stay as they stand.  Raises :class:`toast.errors.HardwareError` where the text would not
    load.
    """
    if "\n" in note or "\r" in note:
        raise HardwareError("the source of fitted figures must be one line")
    path = pathlib.Path(name_or_path)
    if path.suffix != ".toml":
        path = directory("hardware") / f"{name_or_path}.toml"
    load(str(path))
    fitted = set(calibration.errors["collective"])
    rest, kept = _collective_blocks(read_text(path, HardwareError, encoding="utf-8-sig"))
    blocks = [block for kind, block in kept if kind not in fitted]
    for m in (m for m in calibration.measured if m.kind in fitted):
        of = calibration.errors[calibration.errors["collective"] == m.kind]
        large = of[of["size"] == "64 MB and more"]["mean"]
        error = f", mean error {large.mean():.1%} from 64 MB" if len(large) else ""
        blocks.append(
            f"[[collective]]  # {note}: fitted{error}\n"
            + "".join(
                f"{key} = {_toml(value)}" + ("" if isinstance(value, str) else f"  # {note}") + "\n"
                for key, value in dataclasses.asdict(m).items()
                if value != ""
            )
        )
    text = rest.rstrip("\n") + "\n\n" + "\n".join(blocks)
    parse(path, text)
    return text


def _collective_blocks(text: str) -> tuple[str, list[tuple[str, str]]]:
    """A hardware file without its collectives, and these: the kind and the text of each."""
    rest: list[str] = []
    blocks: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            inside = bool(re.match(r"\s*\[\[\s*collective\s*\]\]", line))
            if inside:
                blocks.append([])
        (blocks[-1] if inside else rest).append(line)
    found = []
    for block in blocks:
        (entry,) = tomllib.loads("\n".join(block))["collective"]
        found.append((str(entry["kind"]), "\n".join(block).rstrip("\n") + "\n"))
    return "\n".join(rest), found


def _toml(value: str | float) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:.4g}"
