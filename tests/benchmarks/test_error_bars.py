"""The fit of error bars: it finds what matters, and covers programs that it has not seen."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import numpy as np
import pytest

from tests.benchmarks.test_evaluation import loaded
from toast.cost.error_bars import laws

loaded("grammar")
loaded("strangers")
error_bars = loaded("error_bars")


def drawn(programs: int, seed: int) -> object:
    """Five plans of each program: larger errors where there are more arguments."""
    random, names = np.random.default_rng(seed), ("arguments", "loops")
    made = np.repeat(random.uniform(size=(programs, len(names))), 5, axis=0)
    noise = np.repeat(random.standard_normal(programs), 5) + 0.3 * random.standard_normal(
        5 * programs
    )
    scale = np.exp(-2.5 + 2.0 * made[:, 0])
    return error_bars.Data(names, made, 0.4 * made[:, 0] + scale * noise, np.repeat(
        np.arange(programs), 5
    ))  # fmt: skip


@pytest.fixture(scope="module")
def law() -> object:
    return error_bars.learned(drawn(40, 0), drawn(20, 2))


def test_what_matters_is_found(law) -> None:  # type: ignore[no-untyped-def]
    assert "arguments" in law.features
    assert law.features["arguments"].scale > 1.0
    assert law.features["arguments"].location > 0.1
    constant = error_bars.learned(drawn(40, 0).only(()), drawn(20, 2).only(()))
    assert constant.features == {}


def test_programs_that_the_fit_has_not_seen_are_covered(law) -> None:  # type: ignore[no-untyped-def]
    new = drawn(200, 1)
    for odds in (0.5, 0.8, 0.9):
        within = []
        for made, ratio in zip(new.made, new.ratio, strict=True):
            spread = law.of(dict(zip(new.names, made, strict=True)))
            low, high = (spread.ratio((1 + sign * odds) / 2) for sign in (-1, 1))
            within.append(low <= np.exp(ratio) <= high)
        assert np.mean(within) == pytest.approx(odds, abs=0.1)


def test_two_kinds_have_half_of_the_weight_each(law) -> None:  # type: ignore[no-untyped-def]
    known, first = drawn(40, 0), drawn(20, 2)
    farther = error_bars.learned(known, dataclasses.replace(first, ratio=3.0 * first.ratio))
    assert farther.scale == law.scale
    low, high = (law.levels.index(level) for level in (0.05, 0.95))
    width, before = (each.quantiles[high] - each.quantiles[low] for each in (farther, law))
    assert 1.3 * before < width < 3.0 * before


def test_first_predictions_are_of_plans_of_the_open_half() -> None:
    strangers = sys.modules["strangers"]
    plans = {(row.seed, row.plan): row for row in strangers.read()}
    first = error_bars.first_predictions()
    assert first
    for key, known in first.items():
        assert key in plans
        assert not plans[key].held_out
        assert not np.isnan([*known]).all()


def test_the_data_file_is_what_is_learned(law, tmp_path: pathlib.Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "error_bars.toml"
    path.write_text(
        'programs = 40\nplatform = "tpu"\nelsewhere = 1.5\n'
        + error_bars.law_text("memory", law) + error_bars.law_text("step", law)
    )  # fmt: skip
    read = laws(path).memory
    assert read.features.keys() == law.features.keys()
    assert read.quantiles == pytest.approx(law.quantiles, abs=1e-3)
    assert read.of({"arguments": 0.5, "loops": 0.5}).ratio(0.9) == pytest.approx(
        law.of({"arguments": 0.5, "loops": 0.5}).ratio(0.9), rel=1e-2
    )


def test_plans_of_a_program_count_as_one_program() -> None:
    weight = error_bars.equal_weights(np.array([3, 3, 3, 8]))
    assert weight.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
