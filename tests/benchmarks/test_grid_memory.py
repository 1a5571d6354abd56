"""The paper's grid with memory policies: its places, verdicts and table."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import toast
from tests.benchmarks.test_evaluation import loaded
from toast.models import build
from toast.plan import least_memory

evaluation = loaded("evaluation")
grid_memory = loaded("grid_memory")
PLACE = grid_memory.Place("t7b", "a100", "data=4,model=4")


def row(**changes: Any) -> dict[str, str]:
    values = {
        **PLACE._asdict(), "limit_gib": 30.0, "sharding_fits": False, "sharding_ms": 700.0,
        "sharding_gib": 31.0, "fits": True, "step_ms": 600.0, "peak_gib": 25.0, "microbatches": 2,
        "policy": "full", "least_gib": 5.0, "seconds": 61.2,
    }  # fmt: skip
    return {name: str(value) for name, value in {**values, **changes}.items()}


def test_the_grid_has_the_rows_of_the_figures_and_the_large_models() -> None:
    places = grid_memory.places()
    cells = {cell.place for cell in evaluation.grid(False, 1.0)}
    assert cells <= {*places}
    assert len(places) == len({*places})
    assert ("llama3-8b", "tpu-v3", "data=8,model=4") in places
    assert ("moe", "tpu-v3", "data=8,model=4") in places


def test_a_row_fits_or_has_the_bound() -> None:
    assert grid_memory.verdict(row()) == "fits"
    proof = grid_memory.verdict(row(fits=False, least_gib=30.5))
    assert proof == "no plan fits: at least 30.5 GiB of 30 GiB"
    open_ = grid_memory.verdict(row(fits=False, least_gib=29.5))
    assert open_ == "no plan found; the bound is 29.5 GiB of 30 GiB"


def test_the_table_counts_its_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_memory, "TABLE", tmp_path / "grid.csv")
    every = [row(), row(fits=False, least_gib=31), row(mesh="data=8,model=4", sharding_fits=True)]
    text = " ".join(grid_memory.page_text(every).split())
    assert "Shardings alone fit in 1 of 3 rows of t7b" in text
    assert (
        "Of the other 2, a plan with a policy fits in 1, and that no plan fits is proved in 1"
        in text
    )
    assert (
        "| t7b | a100 | data=4,model=4 | 700 ms | 31 GiB | 600 ms | 25 GiB | full | 2 | 30 GiB "
        "| fits | 61.2 s |"
    ) in text
    grid_memory.write_rows({PLACE: row()})
    assert grid_memory.read_rows() == {PLACE: row()}
    assert list(grid_memory.planned([PLACE], again=False)) == [row()]


def test_the_bound_is_below_the_peak_of_the_plan() -> None:
    plan = toast.plan(build("mlp"), mesh="data=4", hardware="tpu-v5e")
    assert 0 < least_memory(plan) <= plan.after.peak_bytes
