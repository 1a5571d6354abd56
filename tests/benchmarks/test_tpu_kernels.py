"""The products of `benchmarks/tpu_kernels.py` have TOAST's own prices, and its fit finds figures."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import toast
from tests.benchmarks.test_evaluation import loaded
from toast.cost import CostModel
from toast.hardware import load
from toast.space import Space

script = loaded("tpu_kernels")


@pytest.fixture(scope="module")
def models() -> list[CostModel]:
    """Of five products of different kinds."""
    kernels = {kernel.name: kernel for kernel in script.all_kernels()}
    names = ("4096x4096x1024", "300x700x900", "16x4096x4096", "32x16x128x2048", "4096x512x1024")
    hardware = load("tpu-v5e")
    # The script says what other kernels move into fast memory; prices find it out themselves.
    products = dataclasses.replace(hardware.products, fast_bytes=0.0)
    hardware = dataclasses.replace(hardware, products=products)
    return [
        CostModel(Space(toast.analyze(k.function, *k.arguments, platform="tpu"), script.MESH), hardware)
        for k in map(kernels.__getitem__, names)
    ]  # fmt: skip


def test_products_are_priced_as_by_the_cost_model(models: list[CostModel]) -> None:
    found = script.product_seconds(models[0].hardware, [m.tables for m in models], np.zeros(5))
    np.testing.assert_allclose(found, [model.initial_seconds for model in models])


def test_moves_that_other_kernels_hide_take_no_time(models: list[CostModel]) -> None:
    tables = [model.tables for model in models]
    whole = script.product_seconds(load("tpu-v5e"), tables, np.zeros(5))
    assert (script.product_seconds(load("tpu-v5e"), tables, np.full(5, 1e5)) < whole).all()


def test_figures_are_keys_of_the_hardware_file() -> None:
    figures = np.array([guess for guess, _, _ in script.FIGURES.values()])
    hardware = script.with_figures(load("tpu-v5e"), figures)
    assert hardware.matmul_efficiency == figures[0]
    memory = hardware.products.memory_share * hardware.memory_efficiency
    assert memory == pytest.approx(script.FIGURES["tile.memory"][0])
    assert hardware.products.order == load("tpu-v5e").products.order == script.ORDER


def test_drawn_products_are_the_same_each_time() -> None:
    first, again = list(script.drawn()), list(script.drawn())
    assert [kernel.name for kernel in first] == [kernel.name for kernel in again]
    assert len({kernel.name for kernel in first}) == len(first) == 48


def test_drawn_convolutions_have_gradients_of_their_shapes() -> None:
    kernels = list(script.convolutions(2))
    assert [kernel.name for kernel in kernels] == [k.name for k in script.convolutions(2)]
    for one, of_images, of_kernel in zip(*(kernels[i::3] for i in range(3)), strict=True):
        images, weights = one.arguments
        assert jax.eval_shape(of_images.function, *of_images.arguments) == images
        assert jax.eval_shape(of_kernel.function, *of_kernel.arguments) == weights
