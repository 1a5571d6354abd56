"""Rates of products fitted to measured times."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pandas as pd
import pytest

from toast.errors import HardwareError
from toast.hardware import load
from toast.hardware.calibrate import file_text
from toast.hardware.measured_tables import read_products, table_text
from toast.hardware.product_fit import calibrate_products, product_seconds
from toast.hardware.sources import MEASURED, figure_sources

HEADER = "m,n,k,dtype,seconds\n"


def table(name: str = "h100", noise: float = 0.0) -> pd.DataFrame:
    """What a device would measure that is exactly as its file says, give or take."""
    random = np.random.default_rng(0)
    rows = pd.DataFrame(2 ** random.integers(5, 15, (300, 3)), columns=list("mnk"))
    rows["dtype"] = ["bf16", "f32"] * 150
    rows["seconds"] = product_seconds(load(name), rows) * np.exp(noise * random.normal(size=300))
    return rows


def test_a_fit_finds_what_made_the_table() -> None:
    other = dataclasses.replace(load("h100"), matmul_efficiency=0.5, product_latency_s=2e-5)
    found = calibrate_products(other, table(noise=0.02))
    made = load("h100")
    assert found.hardware.matmul_efficiency == pytest.approx(made.matmul_efficiency, rel=0.03)
    assert found.hardware.product_latency_s == pytest.approx(made.product_latency_s, rel=0.1)
    assert found.hardware.products.ramp == pytest.approx(made.products.ramp, rel=0.2)
    assert found.errors["mean"].max() < 0.03


def test_a_device_with_one_tile_has_a_rate_and_a_latency() -> None:
    found = calibrate_products(load("tpu-v5e"), table("tpu-v5e"))
    assert set(found.figures) == {("efficiency", "matmul"), ("", "product_latency_s")}
    assert found.hardware.products == load("tpu-v5e").products


def test_files_are_written_and_read_back(tmp_path: pathlib.Path) -> None:
    found = calibrate_products(load("h100"), table(noise=0.02))
    path = tmp_path / "mine.toml"
    path.write_text(file_text("h100", None, "our box", found.figures))
    machine = load(path)
    assert machine.matmul_efficiency == found.hardware.matmul_efficiency
    assert machine.products.ramp == found.hardware.products.ramp
    share = found.hardware.products.memory_share
    assert machine.products.memory_share == pytest.approx(share)
    assert machine.measured == load("h100").measured
    assert f"matmul = {machine.matmul_efficiency:.4g}  # Measured: our box" in path.read_text()
    assert "[sustained] 720" not in path.read_text()


def test_new_figures_go_to_their_table(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(file_text("p100", None, "our box", {("", "product_latency_s"): 3e-6}))
    assert load(path) == dataclasses.replace(load("p100"), product_latency_s=3e-6)


def test_tables_are_read_back(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "products.csv"
    path.write_text(table_text(table(), "our box"))
    read = read_products(path)
    np.testing.assert_allclose(read["seconds"], table()["seconds"], rtol=1e-5)
    path.write_text("m,n,k,dtype,tflops_per_s\n1000,1000,1000,bf16,100\n")
    assert read_products(path)["seconds"].tolist() == pytest.approx([2e-5])


@pytest.mark.parametrize(("text", "message"), [
    ("", "no products; write rows of m,n,k,dtype,seconds"),
    ("m,n,k,seconds\n", ":1: column dtype is missing; the columns are m,n,k,dtype,seconds"),
    ("m,n,n,k,dtype,seconds\n", ":1: column n occurs twice; remove one"),
    (HEADER + "1,2,3\n", ":2: '1,2,3' is not m,n,k,dtype,seconds; write for example "
     "8192,4096,4096,bf16,0.00036"),
    (HEADER + "8,8,8,bfloat16,1e-6\n", ":2: bfloat16 is not an element type; write for example bf16"),
    (HEADER + "8,0,8,bf16,1e-6\n", ":2: '8,0,8,bf16,1e-6': all figures must be positive"),
    (HEADER + "8,8,8,bf16,nan\n", "all figures must be positive"),
    (HEADER + "8192,8192,8192,bf16,1e-9\n", "1.1e+21 FLOP/s is implausible; check the unit"),
])  # fmt: skip
def test_bad_tables(text: str, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "products.csv"
    path.write_text(text)
    with pytest.raises(HardwareError) as error:
        read_products(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(HardwareError, match="has 3 products, but a fit needs 8"):
        calibrate_products(load("h100"), table()[:3])
    fast = table()
    fast.loc[7, "seconds"] = 1e-12
    with pytest.raises(HardwareError, match=r"times the peak of h100; check the unit"):
        calibrate_products(load("h100"), fast)
    for unit in (1e3, 1e6):
        slow = table()
        slow["seconds"] *= unit
        with pytest.raises(HardwareError, match=r"off in the mean .* check the unit \(seconds\)"):
            calibrate_products(load("h100"), slow)


def test_fitted_figures_are_measured_whatever_their_source(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    for note in ("our box", "Measured on our box"):
        path.write_text(file_text("h100", None, note, {("", "product_latency_s"): 3e-6}))
        assert figure_sources(str(path)).cited["", "product_latency_s"] == (MEASURED,)
