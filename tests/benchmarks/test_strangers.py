"""The corpus of unknown programs: drawn by seeds, and the figures of its report."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pathlib

import jax
import pytest

from tests.benchmarks.test_evaluation import loaded
from toast.paths import matches

grammar, strangers = loaded("grammar"), loaded("strangers")


def row(seed: int, plan: str, ours: float, theirs: float, **changes: object) -> object:
    values = {
        field.name: {"int": 0, "float": 1.0}.get(field.type, "") for field in
        dataclasses.fields(strangers.Row)
    }  # fmt: skip
    values |= {
        "seed": seed,
        "plan": plan,
        "step_ms": ours,
        "xla_step_ms": theirs,
        "unstated_ms": 0.0,
    }
    return strangers.Row(**values | {"verdict": "compiled", "limit_gib": 2.0} | changes)


def test_a_seed_decides_everything() -> None:
    first, second = grammar.draw(3), grammar.draw(3)
    assert first.words == second.words
    assert (first.mesh, first.hardware) == (second.mesh, second.hardware)
    assert str(jax.eval_shape(first.model.function, *first.model.arguments)) == str(
        jax.eval_shape(second.model.function, *second.model.arguments)
    )
    assert len({grammar.draw(seed).words for seed in range(20)}) == 20


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_programs_can_be_traced_and_experts_find_their_arguments(seed: int) -> None:
    stranger = grammar.draw(seed)
    jax.eval_shape(stranger.model.function, *stranger.model.arguments)
    assert all(stranger.strategies.values())


@pytest.mark.parametrize("number", range(24))
def test_programs_of_engineers_can_be_traced_and_experts_find_their_arguments(number: int) -> None:
    pytest.importorskip("optax")
    loaded("engineers")
    loaded("engineers_later")
    stranger = strangers.program_of(grammar.ENGINEERS + number)
    assert stranger.seed == grammar.ENGINEERS + number
    model = stranger.model
    jax.eval_shape(model.function, *model.arguments)
    names = inspect.signature(model.function).parameters
    paths = [
        f"{name}{jax.tree_util.keystr(path)}"
        for name, argument in zip(names, model.arguments, strict=True)
        for path, _ in jax.tree_util.tree_leaves_with_path(argument)
    ]
    for steps in stranger.strategies.values():
        assert all(any(matches(pattern, path) for path in paths) for pattern, _, _ in steps)


def test_regret_is_that_of_the_plan_that_we_rank_first() -> None:
    rows = [row(0, "a", 2.0, 3.0), row(0, "b", 1.0, 4.0), row(0, "c", 3.0, 2.0)]
    assert strangers.regrets(rows) == {0: 2.0}
    # A plan that we do not think to fit comes last, and one that cannot run is no reference.
    rows[1] = dataclasses.replace(rows[1], peak_gib=3.0)
    assert strangers.regrets(rows) == {0: 1.5}
    rows[2] = dataclasses.replace(rows[2], verdict="out of memory", xla_step_ms=math.nan)
    assert strangers.regrets(rows) == {0: 1.0}
    rows[0] = dataclasses.replace(rows[0], verdict="out of memory", xla_step_ms=math.nan)
    rows.append(row(0, "d", 5.0, 5.0, peak_gib=3.0))
    assert strangers.regrets(rows) == {0: math.inf}
    assert strangers.regrets(rows[:1]) == {}


def test_the_report_keeps_both_halves_apart(tmp_path: pathlib.Path) -> None:
    rows = [row(0, "a", 1.1, 1.0), row(0, "b", 2.0, 2.0), row(1, "a", 3.0, 2.0),
            row(1, "b", 4.0, 4.0), row(3, "a", 1.0, 1.0, verdict="the compiler died")]  # fmt: skip
    text = strangers.report(rows)
    assert "| programs (plans) | 1 (2) | 2 (3) |" in text
    assert (
        "| step, with those that exist: the same | 5.0%, 9.0%, +10% | 25.0%, 45.0%, +50% |" in text
    )
    assert "* 1: the compiler died" in text
    path = tmp_path / "rows.csv"
    strangers.write(rows, path)
    assert strangers.read(path) == rows


def test_intervals_are_reported_and_written_if_they_are_known(tmp_path: pathlib.Path) -> None:
    ends = ("peak_low_gib", "peak_high_gib", "step_low_ms", "step_high_ms")
    unknown = [row(0, "a", 1.0, 1.0, **dict.fromkeys(ends, math.nan))]
    strangers.write(unknown, tmp_path / "unknown.csv")
    assert "peak_low_gib" not in (tmp_path / "unknown.csv").read_text()
    assert math.isnan(strangers.read(tmp_path / "unknown.csv")[0].step_high_ms)
    assert "interval" not in strangers.report(unknown)
    known = [row(0, "a", 1.0, theirs, step_low_ms=0.8, step_high_ms=1.5) for theirs in (0.7, 1, 2)]
    strangers.write(known, tmp_path / "known.csv")
    assert strangers.read(tmp_path / "known.csv") == known
    text = strangers.report(known)
    assert "| peak within the 80 % interval | 3 of 3 (100%), 0 above | - |" in text
    assert "| step within the 80 % interval | 1 of 3 (33%), 1 above | - |" in text


def test_lost_programs_stay_if_all_are_predicted_again() -> None:
    lost = [row(1, "", math.nan, math.nan, verdict="lost: the compiler died", state="")]
    assert [*strangers.priced(lost, "xla")] == lost


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [3]), ("0:4", [0, 1, 2, 3]), ("0:6:2", [0, 2, 4]), ("3,8,20:24:2", [3, 8, 20, 22])],
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert strangers.seeds_in(text) == seeds
