"""Fits the rates of matrix products of a hardware file to measured times."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from toast.errors import HardwareError
from toast.hardware.description import Hardware

Floats = npt.NDArray[np.float64]

#: Rows that a fit uses at most: others are drawn.
_MOST_ROWS = 4000
#: Rows that a fit needs, and those that it needs to tell how rates depend on the size.
_LEAST_ROWS, _MANY_ROWS = 8, 24
#: FLOPs from which a row weighs 1 and 3; smaller products weigh 0.1.
_MIDDLE, _LARGE = 1e9, 1e11
#: The least and the most of each figure: share of the peak, seconds, elements, share of the memory.
_LEAST = np.array([0.001, 1e-8, 1.0, 0.01])
_MOST = np.array([1.0, 1e-2, 1e4, 1.0])
#: Random starts of a fit.
_STARTS = 4
#: The mean relative error above which times are not those of the device.
_OFF = 0.6

#: Ranges of FLOPs for which errors are reported.
_EDGES = (0, 1e9, 1e10, 1e11, 1e12, np.inf)
_LABELS = ("below 1e9", "1e9 to 1e10", "1e10 to 1e11", "1e11 to 1e12", "1e12 and more")


@dataclasses.dataclass(frozen=True)
class ProductCalibration:
    """A device with fitted rates of products, and the errors of the fit."""

    hardware: Hardware
    #: The fitted figures of the hardware file, by table (empty for the top level) and key.
    figures: dict[tuple[str, str], float]
    #: One row per element type and range of FLOPs: ``mean``, ``max`` and ``rows``.
    errors: pd.DataFrame


def product_seconds(hardware: Hardware, table: pd.DataFrame) -> Floats:
    """Predicted seconds of each product of a table with the columns ``m, n, k, dtype``."""
    m, n, k = (table[c].to_numpy(np.float64) for c in "mnk")
    peak = np.array([hardware.peak(dtype) for dtype in table["dtype"]])
    size = np.stack([m, n, k, np.ones_like(m)], axis=-1)
    element = table["dtype"].map({dtype: _bytes(dtype) for dtype in table["dtype"].unique()})
    moved = element.to_numpy(np.float64) * (m * k + n * k + m * n)
    prices, rate = hardware.products, hardware.memory_bytes_per_s
    computing = prices.seconds(size, 2 * m * n * k / peak, rate)
    moving = prices.moving_seconds(moved, rate)
    return np.asarray(np.maximum(computing, moving) + hardware.product_latency_s)


def calibrate_products(hardware: Hardware, table: pd.DataFrame) -> ProductCalibration:
    """Fits the rate of products, their latency, and how both depend on their size.

    The share of the peak is that of the measured run: a run of some seconds does not reach the
    power limit that a training step does.  A table without large products leaves it as it is, and
    one with few products leaves what depends on their size.  Units and tiles are those of the
    hardware.

    :param table: the times, as :func:`toast.hardware.measured_tables.read_products` returns them.
    :raises toast.errors.HardwareError: for few rows, for rates above the peak, and for times that
        no rate fits.
    """
    if len(table) < _LEAST_ROWS:
        raise HardwareError(
            f"the table has {len(table)} products, but a fit needs {_LEAST_ROWS} or more, small "
            "and large; add rows"
        )
    _check_peaks(hardware, table)
    random = np.random.default_rng(0)
    rows = table
    if len(rows) > _MOST_ROWS:
        rows = table.iloc[np.sort(random.choice(len(table), _MOST_ROWS, replace=False))]
    flops = 2.0 * rows["m"] * rows["n"] * rows["k"]
    weight = np.where(flops >= _LARGE, 3.0, np.where(flops >= _MIDDLE, 1.0, 0.1))
    measured = np.log(rows["seconds"].to_numpy(np.float64))
    several = hardware.products.units > 1 and len(rows) >= _MANY_ROWS
    # Small products say nothing about the share of the peak.
    free = np.array([bool((flops >= _LARGE).any()), True, several, several])
    start = np.array([
        hardware.matmul_efficiency, max(hardware.product_latency_s, 1e-6),
        max(hardware.products.ramp, 64.0), 0.8,
    ])  # fmt: skip

    def machine(logs: Floats) -> Hardware:
        figures = start.copy()
        figures[free] = np.exp(logs)
        return _with(hardware, figures, several)

    def residuals(logs: Floats) -> Floats:
        predicted = np.log(product_seconds(machine(logs), rows))
        return np.asarray((predicted - measured) * weight)

    bounds = np.log(_LEAST[free]), np.log(_MOST[free])
    best = None
    for number in range(_STARTS):
        guess = np.log(start[free]) + random.normal(0, 0.4 if number else 0.0, free.sum())
        guess = np.clip(guess, bounds[0] + 1e-6, bounds[1] - 1e-6)
        fit = least_squares(residuals, guess, bounds=bounds, loss="soft_l1", f_scale=0.1)
        if best is None or fit.cost < best.cost:
            best = fit
    assert best is not None
    found = np.array([float(f"{value:.3g}") for value in np.exp(best.x)])
    keys = [("efficiency", "matmul"), ("", "product_latency_s"), ("products", "ramp"),
            ("products", "memory")]  # fmt: skip
    figures = dict(zip((key for key, use in zip(keys, free, strict=True) if use), found.tolist(),
                       strict=True))  # fmt: skip
    all_figures = start.copy()
    all_figures[free] = found
    fitted = _with(hardware, all_figures, several)
    off = float(np.mean(np.abs(product_seconds(fitted, table) / table["seconds"] - 1.0)))
    if off > _OFF:
        raise HardwareError(
            f"the times of products are {off:.0%} off in the mean from all rates that "
            f"{hardware.name} may have; check the unit (seconds), and that it is this device"
        )
    return ProductCalibration(fitted, figures, product_errors(fitted, table))


def product_errors(hardware: Hardware, table: pd.DataFrame) -> pd.DataFrame:
    """Relative errors of predicted times, by element type and range of FLOPs."""
    rows = table.copy()
    rows["error"] = np.abs(product_seconds(hardware, table) / rows["seconds"] - 1)
    flops = 2.0 * rows["m"] * rows["n"] * rows["k"]
    rows["flops"] = pd.cut(flops, _EDGES, right=False, labels=_LABELS)
    grouped = rows.groupby(["dtype", "flops"], observed=True)["error"]
    return grouped.agg(["mean", "max", "size"]).rename(columns={"size": "rows"}).reset_index()


def _with(hardware: Hardware, figures: Floats, several: bool) -> Hardware:
    matmul, latency, ramp, memory = figures.tolist()
    products = hardware.products
    if several:
        share = memory / hardware.memory_efficiency
        products = dataclasses.replace(products, ramp=ramp, memory_share=share)
    return dataclasses.replace(
        hardware, matmul_efficiency=matmul, product_latency_s=latency, products=products
    )


def _check_peaks(hardware: Hardware, table: pd.DataFrame) -> None:
    """Raise :class:`HardwareError` if a product is faster than the datasheet."""
    flops = 2.0 * table["m"] * table["n"] * table["k"]
    peak = table["dtype"].map(
        {dtype: hardware.peak(dtype) for dtype in table["dtype"].unique()}
    ) / hardware.matmul_efficiency  # fmt: skip
    share = (flops / table["seconds"] / peak).to_numpy(np.float64)
    worst = int(share.argmax())
    if share[worst] > 1:
        product = ",".join(str(table[c].iloc[worst]) for c in ("m", "n", "k", "dtype"))
        raise HardwareError(
            f"{product}: {share[worst]:.2f} times the peak of {hardware.name}; check the unit, or "
            "the flops_per_s of the hardware file"
        )


def _bytes(dtype: str) -> float:
    """The bytes of an element."""
    if dtype == "bf16":
        return 2.0
    number = re.match(r"[a-z]+(\d+)", dtype)
    assert number is not None
    return int(number[1]) / 8
