"""Pairs of policies and shardings, judged by the compiler: the programs, and the report."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import pytest

from tests.benchmarks.test_evaluation import loaded
from toast.program import PRESETS

grammar, strangers = loaded("grammar"), loaded("strangers")
layered_steps, recomputation = loaded("layered_steps"), loaded("recomputation")


def row(program: str, ours: float, theirs: float, **changes: object) -> object:
    values = {
        field.name: {"int": 0, "float": 1.0}.get(field.type, "") for field in
        dataclasses.fields(recomputation.Row)
    }  # fmt: skip
    values |= {"program": f"{program}, 2 layers, scanned", "peak_gib": ours, "xla_peak_gib": theirs}
    return recomputation.Row(
        **values | {"verdict": "compiled", "limit_gib": 2.0, "remat": "full"} | changes
    )


@pytest.mark.parametrize("number", [2, 3, 5])
def test_programs_can_be_traced_and_experts_find_their_arguments(number: int) -> None:
    stack = dataclasses.replace(layered_steps.stacks()[number], layers=1)
    stranger = stack.stranger(number)
    jax.eval_shape(stranger.model.function, *stranger.model.arguments)
    assert {plan for _, plan in recomputation.pairs_of(number)} <= {"found", *stranger.strategies}


def test_there_are_enough_pairs() -> None:
    stacks = layered_steps.stacks()
    pairs = [[*recomputation.pairs_of(number)] for number in stacks]
    assert all(len({*each}) == len(each) for each in pairs)
    assert sum(map(len, pairs)) >= 60
    assert sum(stack.scanned for stack in stacks.values()) >= 3
    assert {remat for each in pairs for remat, _ in each} == {*PRESETS, "auto"} - {"named"}


def test_the_report_counts_plans_that_were_wrongly_said_to_fit(tmp_path: pathlib.Path) -> None:
    rows = [
        row("bert", 1.0, 1.25),
        row("bert", 1.9, 2.1, verdict="out of memory"),  # by 5 %
        row("bert", 1.9, 2.05, verdict="out of memory"),  # by 2.5 %
        row("vit", 3.0, 2.0, seed=1, remat="none"),
        row("vit", 1.0, 1.0, seed=1, verdict="the compiler died", plan="FSDP"),
    ]
    text = recomputation.report(rows)
    assert "| **open** | 3 | 1 | 20.0% | 20.0% | -20% | 1 of 3 | 0 of 0 |" in text
    assert "| vit (scanned, held out) | 2 | 1 | 50.0% | 50.0% | +50% | 0 of 0 | 1 of 1 |" in text
    assert "| `full` | 4 | 1 |" in text
    assert "* vit, full, FSDP: the compiler died" in text
    path = tmp_path / "rows.csv"
    strangers.write(rows, path)
    assert strangers.rows_in(path, recomputation.Row) == rows
