"""Error bars: distributions of what XLA needs over what is predicted."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import analyzed
from toast.cost import CostModel, ErrorBars, Memo, Prices
from toast.cost.error_bars import MADE_OF, SURE, at_ratio, laws
from toast.hardware import Mesh, load
from toast.space import Space

GIB = 2.0**30

shares = st.floats(0, 1)
made = st.fixed_dictionaries({name: shares for name in MADE_OF if name != "exposed"})
odds = st.floats(0.01, 0.99)
sizes = st.floats(0, 100 * GIB)
platforms = st.sampled_from(["tpu", "cuda", ""])


@given(made, platforms, st.lists(odds, min_size=2, max_size=2, unique=True))
def test_higher_odds_ask_for_more_memory(
    made: dict[str, float], platform: str, levels: list[float]
) -> None:
    bars = ErrorBars.of(made, platform)
    low, high = sorted(levels)
    assert bars.memory.ratio(low) <= bars.memory.ratio(high)
    assert 1.0 <= bars.factor(low) <= bars.factor(high)
    assert bars.factor(None) == 1.0
    # The allowed peak of a plan with 1 GiB of arguments under a limit of 16 GiB.
    peaks = np.linspace(GIB, 16 * GIB, 200)
    allowed = [peaks[at_ratio(GIB, peaks, bars.factor(level)) <= 16 * GIB] for level in (low, high)]
    assert allowed[0].max(initial=0.0) >= allowed[1].max(initial=0.0)


@given(made, platforms, sizes, sizes, st.floats(1, 100 * GIB), st.floats(1, 2))
def test_larger_peaks_fit_less_surely(
    made: dict[str, float], platform: str, arguments: float, more: float, limit: float, times: float
) -> None:
    bars = ErrorBars.of(made, platform)
    one = bars.fit_probability(arguments, arguments + more, limit)
    two = bars.fit_probability(arguments, arguments + times * more, limit)
    assert 0.0 <= two <= one <= 1.0
    assert bars.fit_probability(arguments, arguments + more, times * limit) >= one
    assert arguments <= limit or one == 0.0


@given(made, platforms, st.floats(0, 10 * GIB), st.floats(1, 10 * GIB), st.floats(0.05, 0.95))
def test_a_plan_that_needs_no_more_than_its_safety_allows_fits_with_these_odds(
    made: dict[str, float], platform: str, arguments: float, more: float, safety: float
) -> None:
    bars = ErrorBars.of(made, platform)
    needed = at_ratio(arguments, arguments + more, bars.factor(safety))
    assert needed >= arguments + more
    assert bars.fit_probability(arguments, arguments + more, needed * (1 + 1e-9)) >= safety - 1e-6


@given(made, platforms, sizes, sizes, odds, st.floats(0, 1))
def test_intervals_are_nested_and_never_below_the_arguments(
    made: dict[str, float],
    platform: str,
    arguments: float,
    more: float,
    level: float,
    exposed: float,
) -> None:
    bars = ErrorBars.of(made, platform)
    inner = bars.peak_interval(arguments, arguments + more, level / 2)
    outer = bars.peak_interval(arguments, arguments + more, level)
    assert arguments <= outer.low <= inner.low <= arguments + more <= inner.high <= outer.high
    inner = bars.step_interval(1.0, exposed, level / 2)
    outer = bars.step_interval(1.0, exposed, level)
    assert 0.0 < outer.low <= inner.low <= 1.0 <= inner.high <= outer.high


@given(made, st.floats(0.001, 0.999))
def test_odds_and_ratios_are_inverse(made: dict[str, float], level: float) -> None:
    spread = ErrorBars.of(made, "tpu").memory
    assert spread.odds(spread.ratio(level)) == pytest.approx(level, abs=1e-6)
    assert spread.odds(0.0) == 0.0
    assert spread.odds(1e300) > 0.999


def test_intervals_of_other_platforms_are_wider_and_say_so() -> None:
    made = dict.fromkeys(MADE_OF, 0.5)
    known, other = ErrorBars.of(made, "tpu"), ErrorBars.of(made, "cuda")
    assert (known.borrowed, other.borrowed) == (False, True)
    assert known.basis == f"{laws().programs} programs compiled for TPUs"
    assert other.basis.endswith("1.5 times as wide for another platform")
    (low, high), (lower, higher) = (b.peak_interval(GIB, 2 * GIB) for b in (known, other))
    assert lower < low
    assert high < higher


def test_features_beyond_the_corpus_count_as_its_last_ones() -> None:
    law = laws().memory
    assert law.features
    for name, feature in law.features.items():
        made = dict.fromkeys(MADE_OF, 0.5)
        at_end, beyond = ({**made, name: feature.most + more} for more in (0.0, 1.0))
        assert law.of(at_end).ratio(0.9) == law.of(beyond).ratio(0.9)
        assert name in MADE_OF


def test_the_data_file_has_increasing_quantiles() -> None:
    for law in (laws().memory, laws().step):
        assert list(law.levels) == sorted(law.levels)
        assert (np.diff(law.quantiles) > 0).all()
        assert {*law.features} <= {*MADE_OF}
        assert all(math.isfinite(v) for f in law.features.values() for v in dataclasses.astuple(f))


def test_a_safety_is_one_factor_of_all_prices() -> None:
    space = Space(analyzed("mlp"), Mesh.parse("data=4"))
    model = CostModel(space, load("tpu-v5e"))
    safe = CostModel(space, load("tpu-v5e"), safety=SURE)
    states = np.stack([space.initial, *(space.apply(space.initial, a) for a in space.actions)])
    prices, worth = model.price(states), Memo(safe).price(states)
    assert (model.needed_bytes(prices.argument_bytes, prices.peak_bytes) == prices.peak_bytes).all()
    needed = safe.needed_bytes(prices.argument_bytes, prices.peak_bytes)
    assert (needed > prices.peak_bytes).all()
    np.testing.assert_allclose(worth.argument_bytes, prices.argument_bytes)
    np.testing.assert_allclose(safe.needed_bytes(worth.argument_bytes, worth.peak_bytes), needed)
    limit = float(needed.min())
    assert safe.fits(prices, limit).sum() == (needed <= limit).sum() >= 1
    bars = model.error_bars
    for arguments, peak, fits in zip(
        prices.argument_bytes, prices.peak_bytes, safe.fits(prices, limit), strict=True
    ):
        odds = bars.fit_probability(float(arguments), float(peak), limit)
        assert fits == (odds >= SURE - 1e-9)
    # Without a safety, costs are as before.
    np.testing.assert_array_equal(model.cost(prices, limit), _cost(model, prices, limit))


def _cost(model: CostModel, prices: Prices, limit: float) -> np.ndarray:
    over = np.maximum(prices.peak_bytes - limit, 0.0) / model.initial_peak
    return prices.seconds / model.initial_seconds + 10.0 * over


def test_what_a_program_is_made_of_are_shares() -> None:
    for name in ("mlp", "t2b-tiny", "t2b-scan"):
        made = CostModel(Space(analyzed(name), Mesh.parse("data=4")), load("tpu-v5e")).made_of
        assert {*made} == {*MADE_OF} - {"exposed"}
        assert all(0.0 <= value <= 1.0 for value in made.values())
    assert made["loops"] > 0.3
    assert made["long loops"] > 0.0
