"""Benchmarks that resume: results by cell, in a file that survives being broken off."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import types
import xml.etree.ElementTree

import pytest

from toast.resources import directory

PATH = directory("rules").parent / "benchmarks" / "evaluation.py"


def loaded(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, PATH.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


evaluation = loaded("evaluation")
figure9, figure10 = loaded("figure9"), loaded("figure10")
METHODS = evaluation.METHODS
PLACE = ("mlp", "tpu-v5e", "d=4")


def cells() -> list[object]:
    found: list[object] = evaluation.cells([("mlp", (), "d=4")], ["tpu-v5e"], 3.0)
    return found


def row(
    step: float = 1.0,
    *,
    fits: bool = True,
    note: str = "",
    error: str = "",
    seconds: float = 2.0,
) -> dict[str, object]:
    found = {
        "step_seconds": step, "fits": fits and not error, "note": note, "error": error, "cost": 0.5,
        "peak_bytes": 2.0**30, "search_seconds": seconds, "analysis_seconds": 0.1,
    }  # fmt: skip
    # As a method's row that failed is stored.
    return found | dict.fromkeys(("step_seconds", "cost", "peak_bytes")) if error else found


STOPPED = "stopped at its time limit"


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


@pytest.mark.parametrize(("times", "limit"), [(0.0, 3.0), (1.0, 3.0), (26.0, 52.0)])
def test_automap_may_take_so_many_times_our_search(
    times: float, limit: float, tmp_path: pathlib.Path
) -> None:
    limits = {}

    def run(cell: object) -> dict[str, object]:
        limits[cell.method] = cell.limit  # type: ignore[attr-defined]
        return row(seconds=2.0)

    store = evaluation.Store(tmp_path / "rows", "v")
    found = evaluation.results(cells(), store, run, times=times)
    assert limits == {"toast": 0, "manual": 0, "automap": limit, "alpa": 3.0, "shardy": 0}
    limits.clear()
    assert evaluation.results(cells(), store, run, times=times) == found
    assert not limits, "all of them are stored"


def test_rows_where_automap_takes_so_many_times_our_search() -> None:
    far, near = (
        {"toast": row(seconds=1.0), "automap": row(seconds=s, note=STOPPED)} for s in (26.0, 20.0)
    )
    better = far | {"automap": {**far["automap"], "cost": 0.1}}
    table = {("a",): far, ("b",): near, ("c",): better}
    (said,) = figure9.automap_findings(table)
    assert "finds no better plan in 1 of 3 rows. Exceptions: b; c." in said


def test_what_failed_is_run_again(tmp_path: pathlib.Path) -> None:
    path, cell = tmp_path / "results.jsonl", cells()[0]
    evaluation.Store(path, "a").put(cell, row(error="out of luck"))
    done = evaluation.results([cell], evaluation.Store(path, "a"), lambda _cell: row(2.0))
    assert done[cell]["step_seconds"] == 2.0
    assert evaluation.Store(path, "a").get(cell)["error"] == ""


@pytest.mark.parametrize("path", sorted(PATH.parent.glob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_import_their_own_checkout(path: pathlib.Path) -> None:
    """And not what is installed: figures would be of code that nobody can see."""
    lines = path.read_text().splitlines()
    imports = [n for n, line in enumerate(lines) if line.startswith(("import toast", "from toast"))]
    own = [n for n, line in enumerate(lines) if line.startswith(("sys.path.insert(0", "from eval"))]
    assert not imports or own[0] < imports[0]


def test_what_is_hashed_is_what_runs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "toast").mkdir()
    (tmp_path / "toast" / "__init__.py").write_text("raise SystemExit('another toast')")
    words = [sys.executable, PATH.with_name("figure8.py"), "--limit", "0"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert "another toast" not in ended.stderr
    assert ended.returncode == 2
    assert "numpy" in evaluation.versions()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--limit", "-3"), "--limit -3: give a number of seconds above 0"),
        (("--limit", "nan"), "--limit nan: give a number of seconds above 0"),
        (("--times", "-1"), "--times -1: give a number that is not negative"),
        (("--page", "nowhere.md"), "--page nowhere.md: no such file"),
        (("--store", "nowhere/rows"), "nowhere/rows: cannot write: No such file or directory"),
    ],
)
def test_wrong_options_end_it_before_the_long_work(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["figure8.py", *words])
    with pytest.raises(SystemExit) as ended:
        evaluation.options_of("about")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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


def test_tables_show_the_fastest_and_plans_that_do_not_fit(tmp_path: pathlib.Path) -> None:
    methods = {
        "toast": row(1.0), "manual": row(0.9), "automap": row(3.0, note=STOPPED),
        "alpa": row(0.5, fits=False), "shardy": row(error="no"),
    }  # fmt: skip
    table = {PLACE: methods}
    assert evaluation.rivals(methods) == pytest.approx({"manual": 0.9, "automap": 3.0})
    text = evaluation.step_table(table)
    assert "| mlp | tpu-v5e | d=4 | 1000 | 900 | 3000* | OOM 500 | - | 0.900 (manual) |" in text
    said = "\n".join(evaluation.step_findings(table))
    assert "slower than another method in 1. No plan fits in 0 rows" in said
    assert "the step of manual is 0.900 times TOAST's (cost 0.5" in said
    assert evaluation.standing(table).verdict == "does not hold in the rows listed above"
    assert "do not fit: alpa 1" in said
    for panels in (evaluation.step_panels(table), evaluation.time_panels(table)):
        xml.etree.ElementTree.fromstring(evaluation.bars("ms", panels))


def test_rows_without_a_plan_that_fits_are_listed() -> None:
    lost = {"toast": row(1.1, fits=False), "manual": row(1.0, fits=False), "alpa": row(error="no")}
    won = {"toast": row(1.0), "manual": row(2.0, fits=False), "alpa": row(0.5, fits=False)}
    found = evaluation.standing({("a", "b", "c"): lost, PLACE: won})
    assert (found.wins, found.losses, found.worse) == (1, (), 1)
    assert found.unfit == (
        "a, b, c: no plan fits; the step of manual is 0.909 times TOAST's "
        "(peak 1 GiB; TOAST's: 1 GiB)",
    )
    assert found.verdict.startswith("holds where a plan fits, but not in all other rows")
    assert evaluation.standing({PLACE: won}).verdict == "holds"
    lost["toast"]["step_seconds"] = 0.9
    found = evaluation.standing({("a", "b", "c"): lost})
    assert found.unfit == ("a, b, c: no plan fits; no step is shorter than TOAST's",)
    assert found.verdict == "holds where a plan fits"


def test_failed_searches_have_no_ratio() -> None:
    automap = row(note=STOPPED, seconds=60)
    table = {
        PLACE: {"toast": row(seconds=4), "automap": automap, "alpa": row(error="no", seconds=1)},
        ("a", "b", "c"): {"toast": row(seconds=2), "automap": automap, "alpa": row(seconds=6)},
    }
    assert "| 0.1 | 4 | 60* | - | at least 15.0 | - |" in figure9.table_of(table)
    said = "\n".join(figure9.findings(table, 60.0))
    assert (
        "* automap: 22.5 times TOAST's search time (median; 15.0 to 30.0). The limit ended" in said
    )
    assert "* alpa: 3.0 times" in said
    assert "No ratio in 1 of 2 rows" in said
    assert "the fastest in all rows. Here this holds." in said
    assert "limit of 60 s is 15.0 to 30.0 times TOAST's search time" in said
    assert "could be measured in 1 of 2 rows" in said


@pytest.mark.parametrize(
    ("alpa", "verdict"),
    [
        (row(seconds=1), "does not hold in the rows listed above"),
        (row(seconds=1, note=STOPPED), "is undecided where the limit ended"),
        (row(error="no"), "holds"),
    ],
)
def test_a_search_that_the_limit_ended_does_not_count_as_faster(
    alpa: dict[str, object], verdict: str
) -> None:
    table = {PLACE: {"toast": row(), "automap": row(seconds=9), "alpa": alpa}}
    assert f"the fastest in all rows. Here this {verdict}" in "\n".join(
        figure9.findings(table, 1.0)
    )


def test_a_row_without_a_plan_is_not_comparable() -> None:
    assert figure10.comparable({"toast": row(1.04), "manual": row(1.0)})
    assert not figure10.comparable({"toast": row(1.06), "manual": row(1.0)})
    assert not figure10.comparable({"toast": row(1.0, fits=False), "manual": row(2.0)})
    assert not figure10.comparable({"toast": row(error="no"), "manual": row(1.0)})
    assert figure10.comparable({"toast": row(1.0), "manual": row(error="no")})


def test_a_section_is_replaced_and_the_rest_is_kept(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Head\n\n<!-- one -->\nold\n<!-- end of one -->\n\ntail\n")
    evaluation.write_section(page, "one", "new")
    evaluation.write_section(page, "two", "more")
    assert page.read_text() == (
        "# Head\n\n<!-- one -->\nnew\n<!-- end of one -->\n\ntail\n\n"
        "<!-- two -->\nmore\n<!-- end of two -->\n"
    )
