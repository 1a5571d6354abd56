"""The time of products by size."""

import numpy as np
import pytest

from toast.hardware import ProductPrices, load, names


def seconds(prices, *sizes, memory_bytes_per_s=np.inf):
    """Seconds of products whose FLOPs would take a second each at the rate of endless products."""
    return prices.seconds(np.array(sizes, dtype=float), np.ones(len(sizes)), memory_bytes_per_s)


def test_one_unit_pads_to_its_tile():
    prices = ProductPrices(tiles=((8, 128),), depth=128)
    assert seconds(prices, (8, 128, 128, 1), (9, 129, 129, 7)) == pytest.approx(
        [1, 16 * 256 * 256 / (9 * 129 * 129)]
    )


def test_a_last_wave_that_is_not_full_takes_as_long_as_a_full_one():
    prices = ProductPrices(tiles=((128, 128),), units=10)
    full, one_more = seconds(prices, (1280, 128, 512, 1), (1408, 128, 512, 1))
    assert full == pytest.approx(1)
    # The second product has 11 tiles, and takes the time of 20.
    assert one_more == pytest.approx(20 / 11)


def test_products_of_a_batch_fill_waves_together():
    prices = ProductPrices(tiles=((128, 128),), units=10)
    assert seconds(prices, (128, 128, 512, 10), (128, 128, 512, 1)) == pytest.approx([1, 10])


def test_small_tiles_win_where_large_ones_leave_units_idle():
    large = ProductPrices(tiles=((128, 256),), units=10)
    both = ProductPrices(tiles=((128, 256), (64, 64)), units=10)
    assert seconds(large, (128, 256, 512, 1)) == pytest.approx(10)
    assert seconds(both, (128, 256, 512, 1)) == pytest.approx(10 / 8)


def test_tiles_lie_either_way_round():
    prices = ProductPrices(tiles=((128, 256),), units=10)
    assert seconds(prices, (256, 1280, 64, 1)) == pytest.approx(seconds(prices, (1280, 256, 64, 1)))


def test_each_wave_has_a_ramp():
    prices = ProductPrices(tiles=((128, 128),), units=10, ramp=100.0)
    assert seconds(prices, (1280, 128, 400, 1), (1280, 128, 10**6, 1)) == pytest.approx(
        [1.25, 1.0001]
    )


def test_parts_of_a_deep_product_run_at_once_and_are_added_up():
    prices = ProductPrices(tiles=((128, 128),), units=10, parts=(1, 4))
    whole = ProductPrices(tiles=((128, 128),), units=10)
    size = (128, 128, 10**5, 2)
    assert seconds(whole, size) == pytest.approx(5)
    assert seconds(prices, size) == pytest.approx(10 / 8)
    adding = 4 * 8 * 128 * 128 * 2 / 1e6
    assert seconds(prices, size, memory_bytes_per_s=1e6) == pytest.approx(10 / 8 + adding)
    assert seconds(prices, size, memory_bytes_per_s=1e4) == pytest.approx(5)


def test_products_bound_by_memory_have_a_rate_of_their_own():
    assert ProductPrices(memory_share=0.5).moving_seconds(np.array([8.0]), 4.0) == 4


@pytest.mark.parametrize("name", names())
def test_a_product_is_never_faster_than_its_flops(name):
    random = np.random.default_rng(0)
    size = np.concatenate(
        [random.integers(1, 5000, (200, 3)), random.integers(1, 9, (200, 1))], axis=1
    )
    assert (seconds(load(name).products, *size) >= 1 - 1e-12).all()


@pytest.mark.parametrize("name", ["a100", "a100-80gb", "b200", "h100", "h100-96gb-500w", "h200"])
def test_large_products_reach_almost_the_rate_of_endless_ones(name):
    (large,) = seconds(load(name).products, (16384, 16384, 16384, 1))
    assert 1 < large < 1.05


def test_products_read_large_float32_operands_again() -> None:
    prices = ProductPrices(fast_bytes=128.0, reloading=0.4)
    shares = prices.reloading_share(np.array([1.0, 16.0, 16 * 2**0.5, 32.0, 1e9]))
    assert shares == pytest.approx([0, 0, 0.2, 0.4, 0.4])
    assert ProductPrices(fast_bytes=128.0).reloading_share(np.ones(1)) == 0
    assert ProductPrices(reloading=0.4).reloading_share(np.ones(1)) == 0, "no fast memory"


def test_kernels_compute_store_and_move_at_once_but_not_wholly() -> None:
    prices = ProductPrices(results_per_s=100.0, window_bytes=20.0, order=3.0)
    one = np.ones(1)

    def seconds(computing: float, stored: float, moved: float, count: float = 1.0) -> float:
        parts = computing * one, stored * one, moved * one, count * one
        return float(prices.kernel_seconds(*parts, 10.0)[0])

    assert seconds(5, 0, 0) == 5
    assert seconds(5, 500, 0) == pytest.approx(5 * 2 ** (1 / 3))
    assert seconds(0, 0, 10) == pytest.approx(1 + 1), "a kernel of one window only waits for it"
    assert seconds(0, 0, 1000) == pytest.approx(100 + 2)
    assert seconds(0, 0, 1000, count=10) == pytest.approx(100 + 20)
    assert seconds(0, 0, 0) == 0
    # More bytes never take less time.
    times = [seconds(5, 300, moved) for moved in (0, 1, 10, 100, 1000)]
    assert times == sorted(times)


def test_small_operands_and_results_stay_in_fast_memory() -> None:
    prices = ProductPrices(fast_bytes=100.0)
    assert prices.moved_bytes(np.array([10.0, 25.0, 50.0, 75.0, 100.0])).tolist() == [
        0, 0, 25, 75, 100,
    ]  # fmt: skip
    assert ProductPrices().moved_bytes(np.array([10.0])).tolist() == [10]
    some, every = prices.moved_results(np.array([8.0, 8.0]), np.array([0.0, 1.0]))
    assert 0 < some < every == 8
