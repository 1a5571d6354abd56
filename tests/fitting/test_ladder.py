"""The grid of sizes, and how few plans find the largest that fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from toast.fitting.ladder import MOST_FINER, Ladder, Need, finer_rung, highest_rung


def searched(
    ladder: Ladder, bytes_of: Callable[[int], float], limit: float, fixed: float = 0.0
) -> tuple[int | None, list[int]]:
    """The value of the highest rung, and the values that were planned for it."""
    tried = []

    def need(rung: int) -> Need | None:
        value = ladder.value(rung)
        assert value is not None
        tried.append(value)
        return Need(bytes_of(value) <= limit, bytes_of(value), fixed)

    rung = highest_rung(ladder, need, limit)
    return None if rung is None else ladder.value(rung), tried


@pytest.mark.parametrize("slope", [0.03, 1.0, 7.7, 40.0, 900.0])
@pytest.mark.parametrize("fixed", [0.0, 500.0])
def test_few_plans_of_a_linear_need_suffice(slope: float, fixed: float) -> None:
    found, tried = searched(Ladder(16), lambda size: fixed + slope * size, 1000.0, fixed)
    powers = [2**n for n in range(24) if fixed + slope * 2**n <= 1000.0]
    assert found == (max(powers) if powers else None)
    assert len(tried) == len({*tried}) <= 5


@pytest.mark.parametrize("limit", [3.0, 100.0, 12345.0])
def test_needs_that_are_not_linear(limit: float) -> None:
    found, tried = searched(Ladder(64), lambda size: size**1.7 + 2.0, limit)
    powers = [2**n for n in range(24) if 2**n**1.7 + 2.0 <= limit]
    powers = [n for n in (2**k for k in range(24)) if n**1.7 + 2.0 <= limit]
    assert found == (max(powers) if powers else None)
    assert len(tried) <= 8


@pytest.mark.parametrize("first", [1000, 999, 7, 3 * 2**20, 2**20])
@pytest.mark.parametrize("parts", [1, 8, 6, 48])
@pytest.mark.parametrize("most", [1, 5, 64, 700])
def test_sizes_that_are_odd_somewhere_are_halved_down_to_one(
    first: int, parts: int, most: int
) -> None:
    ladder = Ladder(first, parts=parts)
    rungs = [ladder.value(-rung) for rung in range(first.bit_length())]
    assert rungs[-1] == 1
    assert all(a is not None and b is not None and a > b for a, b in itertools.pairwise(rungs))
    assert all(n is not None and (n < parts or n % parts == 0) for n in rungs[1:])
    found, tried = searched(ladder, float, most)
    every = [n for n in (*rungs, first * 2**9) if n is not None and n <= most]
    assert found is not None
    assert found == max(every) if most < first else found <= most
    assert len(tried) <= 9


def test_the_climb_has_no_end_below_the_largest_value() -> None:
    found, tried = searched(Ladder(7), lambda size: 500.0 + size / 2**18, 1000.0)
    assert found == 7 * 2**24
    assert len(tried) <= 9
    found, tried = searched(Ladder(7), lambda _: 1.0, 1000.0)  # memory does not grow
    assert found == 7 * 2**27
    assert len(tried) <= 10


def test_the_fewest_devices() -> None:
    ladder = Ladder(8, falling=True, most=256)
    assert searched(ladder, lambda devices: 5000.0 / devices, 100.0)[0] == 64
    assert searched(ladder, lambda devices: 50.0 / devices, 100.0)[0] == 1
    assert searched(ladder, lambda devices: 1e6 / devices, 100.0)[0] is None


def test_sizes_that_are_impossible_count_as_too_large() -> None:
    def need(rung: int) -> Need | None:
        return Need(True, 1.0, 0.0) if rung <= 2 else None

    assert highest_rung(Ladder(4), need, 10.0) == 2
    assert highest_rung(Ladder(4), lambda _: None, 10.0) is None


def test_sizes_between_whole_numbers_and_beyond_the_ends_have_no_value() -> None:
    ladder = Ladder(5, most=20)
    assert [ladder.value(rung) for rung in (-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3)] == [
        None, 1, 2, None, 5, None, 10, 20, None
    ]  # fmt: skip
    assert Ladder(8, falling=True).value(0.5) is None


def refined(
    ladder: Ladder, bytes_of: Callable[[int], float], limit: float, low: int, unit: int = 1
) -> tuple[int | None, list[int]]:
    """The value of the finer rung, and the values between two rungs that were planned for it."""
    tried = []

    def need(rung: float) -> Need:
        value = ladder.value(rung)
        assert value is not None
        if rung not in (low, low + 1):
            tried.append(value)
        return Need(bytes_of(value) <= limit, bytes_of(value), 0.0)

    return ladder.value(finer_rung(ladder, need, limit, low, unit)), tried


@pytest.mark.parametrize("first", [32, 48, 4096])
@pytest.mark.parametrize("power", [0.3, 1.0, 1.7])
def test_the_largest_size_between_rungs_is_found_to_a_sixteenth(first: int, power: float) -> None:
    most = 0
    for largest in range(first, 2 * first, max(1, first // 61)):
        found, tried = refined(
            Ladder(first), lambda size: 7.0 + size**power, 7.0 + largest**power, 0
        )
        assert found is not None
        assert found <= largest < found + max(1, first // 16)
        assert len(tried) == len({*tried}) <= MOST_FINER
        most = max(most, len(tried))
    if power == 1.0:
        assert most <= 3


def test_a_need_that_jumps_is_found_as_well() -> None:
    for largest in range(256, 512, 16):
        found, tried = refined(Ladder(256), lambda size: 1.0 if size <= largest else 1e9, 2.0, 0)  # noqa: B023
        assert found == largest
        assert len(tried) <= MOST_FINER


def test_sizes_between_rungs_are_multiples() -> None:
    assert refined(Ladder(16), float, 29.0, 0, unit=4)[0] == 28
    assert refined(Ladder(16), float, 29.0, 0, unit=8)[0] == 24
    assert refined(Ladder(4), float, 30.0, 2, unit=4)[0] == 28
    assert refined(Ladder(16), float, 29.0, 0, unit=16) == (16, [])
    assert refined(Ladder(1), float, 1.0, 0) == (1, [])
    assert refined(Ladder(8, falling=True), lambda devices: 1.0 / devices, 0.2, 0) == (8, [])


def test_rungs_of_sizes() -> None:
    for first, value in ((64, 208), (12, 21), (7, 1000003), (4096, 5)):
        ladder = Ladder(first)
        assert ladder.value(ladder.rung(value)) == value
    ladder = Ladder(1000, parts=8)
    for value in range(1, 2100):
        assert ladder.value(ladder.rung(value)) == value
        assert ladder.rung(value) < ladder.rung(value + 1)
        assert ladder.highest_within(value) == int(ladder.rung(value) // 1)
