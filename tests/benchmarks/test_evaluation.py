"""Benchmarks that resume: results by cell, in a file that survives being broken off."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import signal
import sys
import types
import xml.etree.ElementTree

import pytest

from toast.resources import directory

PATH = directory("rules").parent / "benchmarks" / "evaluation.py"


def loaded() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("evaluation", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["evaluation"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


evaluation = loaded()
METHODS = evaluation.METHODS
PLACE = ("mlp", "tpu-v5e", "d=4")


def cells() -> list[object]:
    found: list[object] = evaluation.cells([("mlp", (), "d=4")], ["tpu-v5e"], 3.0)
    return found


def row(
    step: float = 1.0, *, fits: bool = True, note: str = "", error: str = ""
) -> dict[str, object]:
    return {
        "step_seconds": step, "fits": fits, "note": note, "error": error, "cost": 0.5,
        "search_seconds": 2.0, "analysis_seconds": 0.1,
    }  # fmt: skip


def test_a_run_goes_on_where_it_was_broken_off(tmp_path: pathlib.Path) -> None:
    path, ran = tmp_path / "results.jsonl", []

    def run(cell: object) -> dict[str, object]:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(cell)
        return row(len(ran))

    with pytest.raises(KeyboardInterrupt):
        evaluation.results(cells(), evaluation.Store(path, "a"), run)
    assert len(path.read_text().splitlines()) == 2
    with path.open("a") as stream:
        stream.write('{"version": "a", "cell": {"mod')  # the line that was being written
    first, ran = list(ran), []
    done = evaluation.results(cells()[:4], evaluation.Store(path, "a"), run)
    assert first + ran == cells()[:4]
    assert list(done) == cells()[:4]
    assert done == {cell: evaluation.Store(path, "a").get(cell) for cell in done}


def test_results_of_other_sources_are_not_mixed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results.jsonl"
    old, new = evaluation.Store(path, "old"), evaluation.Store(path, "new")
    cell = cells()[0]
    old.put(cell, row(1.0))
    assert evaluation.Store(path, "new").get(cell) is None
    new.put(cell, row(2.0))
    assert evaluation.Store(path, "old").get(cell)["step_seconds"] == 1.0
    assert evaluation.Store(path, "new").get(cell)["step_seconds"] == 2.0


def test_only_searches_that_have_a_limit_depend_on_it() -> None:
    short, long = (evaluation.cells([("mlp", (), "d=4")], ["a100"], limit) for limit in (1.0, 9.0))
    differ = [a.method for a, b in zip(short, long, strict=True) if a != b]
    assert differ == ["automap", "alpa"]


def test_a_cell_is_run(tmp_path: pathlib.Path) -> None:
    store = evaluation.Store(tmp_path / "results.jsonl", evaluation.sources())
    table = evaluation.by_place(evaluation.results(cells(), store))
    assert list(table) == [PLACE]
    assert list(table[PLACE]) == list(METHODS)
    assert all(found["step_seconds"] > 0 for found in table[PLACE].values())
    assert all(json.dumps(found, allow_nan=False) for found in table[PLACE].values())


def test_an_interrupt_is_not_taken_for_a_result() -> None:
    """TOAST's search ends with its best when it is interrupted, which is no result to keep."""

    def caught() -> None:
        with evaluation.uninterrupted():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
            except KeyboardInterrupt:
                pass

    with pytest.raises(KeyboardInterrupt):
        caught()


def test_tables_say_who_wins_and_who_does_not_fit(tmp_path: pathlib.Path) -> None:
    methods = {
        "toast": row(1.0), "manual": row(0.9), "automap": row(3.0, note="stopped at its time limit"),
        "alpa": row(0.5, fits=False), "shardy": row(error="no"),
    }  # fmt: skip
    table = {PLACE: methods}
    assert evaluation.rivals(methods) == pytest.approx({"manual": 0.9, "automap": 3.0})
    text = evaluation.step_table(table)
    assert "| mlp | tpu-v5e | d=4 | 1000 | 900 | 3000* | OOM 500 | - | 0.900 (manual) |" in text
    said = "\n".join(evaluation.step_findings(table))
    assert "beaten in 1; nothing fits in 0." in said
    assert "manual takes 0.900 of TOAST's step" in said
    assert "do not fit: alpa 1" in said
    for panels in (evaluation.step_panels(table), evaluation.time_panels(table)):
        xml.etree.ElementTree.fromstring(evaluation.bars("ms", panels))


def test_a_section_is_replaced_and_the_rest_is_kept(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Head\n\n<!-- one -->\nold\n<!-- end of one -->\n\ntail\n")
    evaluation.write_section(page, "one", "new")
    evaluation.write_section(page, "two", "more")
    assert page.read_text() == (
        "# Head\n\n<!-- one -->\nnew\n<!-- end of one -->\n\ntail\n\n"
        "<!-- two -->\nmore\n<!-- end of two -->\n"
    )
