"""Measurements of the devices of this machine; those are CPU devices here."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from toast.errors import HardwareError
from toast.evaluation import measure as stage
from toast.evaluation.measure import devices_of, measure
from toast.hardware import Hardware, load
from toast.hardware.measured_tables import MEASURABLE


def cpu() -> Hardware:
    """Four CPU devices of a node, with little memory."""
    machine = load("p100")
    return dataclasses.replace(
        machine,
        name="box",
        platform="cpu",
        device_kind=jax.devices("cpu")[0].device_kind,
        memory_limit_bytes=2.0**24,
        interconnect=dataclasses.replace(machine.interconnect, devices_per_node=4),
    )


def test_products_memory_and_collectives_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_PRODUCTS", ((16, 16, 16), (512, 32, 16)))
    monkeypatch.setattr(stage, "_SIZES", (1024, 4096))
    said: list[str] = []
    found = measure(cpu(), seconds=60, progress=said.append)
    assert found.device_kind == "cpu"
    assert found.memory_bytes_per_s > 0
    assert found.products[["m", "n", "k"]].to_numpy().tolist() == [[16] * 3, [512, 32, 16]] + (
        [[512, 32, 16]] if len(found.products) > 2 else []
    )
    assert (found.products["seconds"] > 0).all()
    assert set(found.collectives["collective"]) == set(MEASURABLE)
    counts = [n for n in (2, 4) if n <= len(jax.devices())]
    assert len(found.collectives) == len(MEASURABLE) * len(counts) * 2
    assert (found.collectives["seconds"] > 0).all()
    assert "measuring memory" in said


def test_devices_must_be_those_of_the_file() -> None:
    with pytest.raises(HardwareError) as error:
        devices_of(load("h100"))
    kinds = f"{len(jax.devices())} {jax.devices()[0].device_kind}"
    assert str(error.value) == (
        f"h100 describes NVIDIA H100 80GB HBM3, but JAX found {kinds} here; run this on a machine "
        "with such devices, with JAX for cuda"
    )
    with pytest.raises(HardwareError) as error:
        devices_of(dataclasses.replace(cpu(), device_kind="NVIDIA A100-SXM4-80GB"))
    assert str(error.value) == (
        f"box describes NVIDIA A100-SXM4-80GB, but JAX found {kinds} here; use the hardware file "
        "of these devices, or a copy with their figures and device_kind"
    )
