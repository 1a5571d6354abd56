"""``pytest --quick`` runs a third of each file's tests; ``tests/durations.csv`` says how long each takes."""

from __future__ import annotations

import pathlib

from tests import durations


def test_a_third_of_each_file_is_quick() -> None:
    measured = {f"tests/a.py::t{i}": i / 10 for i in range(9)} | {"tests/b.py::t": 0.0}
    assert durations.quick(measured, measured) == {
        "tests/a.py::t0", "tests/a.py::t3", "tests/a.py::t6", "tests/b.py::t",
    }  # fmt: skip


def test_long_tests_are_not_quick_and_new_ones_are() -> None:
    tests = ["tests/a.py::long", "tests/a.py::new"]
    assert durations.quick(tests, {"tests/a.py::long": 5.0}) == {"tests/a.py::new"}


def test_the_quickest_test_of_a_file_may_take_longer() -> None:
    measured = {
        "tests/a.py::t0": 0.7, "tests/a.py::t1": 0.8, "tests/b.py::t0": 0.1, "tests/b.py::t1": 0.7,
        "tests/c.py::t": 9.0, "tests/docs/d.py::t": 9.0,
    }  # fmt: skip
    assert durations.slow([*measured, "tests/c.py::new"], measured) == {
        "tests/a.py::t1", "tests/b.py::t1", "tests/c.py::t",
    }  # fmt: skip


def test_the_longest_pages_start_first() -> None:
    measured = {"tests/docs/a.py::t": 9.0, "tests/docs/b.py::t": 0.5, "tests/x/c.py::t": 99.0}
    firsts = {test: durations.first_seconds(test, measured) for test in measured}
    assert firsts == {**dict.fromkeys(measured, 0.0), "tests/docs/a.py::t": 9.0}


def test_the_record_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    measured = {"tests/a.py::t[a,b]": 1.25, 'tests/a.py::t["]': 0.5}
    durations.write(measured, tmp_path / "durations.csv")
    assert durations.read(tmp_path / "durations.csv") == measured
    assert durations.read(tmp_path / "none.csv") == {}


def test_the_record_is_of_most_tests() -> None:
    files = {test.partition("::")[0] for test in durations.read()}
    folder = durations.RECORD.parent
    there = {f"tests/{path.relative_to(folder)}" for path in folder.glob("**/test_*.py")}
    assert len(files & there) >= 0.7 * len(there)
