"""How long each test takes, and the third of the tests that ``make quick`` runs.

``tests/durations.csv`` records the user CPU seconds of every test, those of its fixtures and of the
commands that it runs included: processor time, so that a busy machine counts nothing twice.
``pytest --record-durations`` writes those of the tests that ran into it; ``pytest --quick`` runs a
third of each file's tests, quick and slow ones, but none that takes more than 0.6 seconds.
"""

from __future__ import annotations

import csv
import pathlib
import resource
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping

import pytest

RECORD = pathlib.Path(__file__).with_name("durations.csv")
#: ``--quick`` runs one of so many tests of each file, and none that took longer than so many seconds.
QUICK_STEP = 3
QUICK_LIMIT = 0.6
#: Tests that took longer than so many seconds are ``slow``: ``make prove`` runs them.  The second
#: limit is for the quickest test of each file, so that most files have a test that always runs.
#: Tests of the documentation and of the wheel never are: what a new user does first is always tested.
SLOW_LIMIT, SLOW_LIMIT_OF_QUICKEST = 0.6, 2.5
#: Of these, the longest start first, so that no worker ends with one.
_NEVER_SLOW = ("tests/docs/", "tests/package/")
_PROPERTY = "user_cpu_seconds"

#: What tests had done by processes that are no children of this one.
elsewhere_seconds = 0.0


def read(path: pathlib.Path = RECORD) -> dict[str, float]:
    """The recorded user CPU seconds by test."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}


def quick(tests: Iterable[str], durations: Mapping[str, float]) -> set[str]:
    """Of each file's ``tests`` every third in the order of their durations, and those without one.

    Args:
        tests: Tests as pytest names them, ``tests/x/test_y.py::test_z[case]``.
        durations: User CPU seconds by test.
    """
    files: dict[str, list[str]] = defaultdict(list)
    chosen = set()
    for test in tests:
        if test in durations:
            files[test.partition("::")[0]].append(test)
        else:
            chosen.add(test)
    for listed in files.values():
        by_duration = sorted(listed, key=lambda test: (durations[test], test))
        chosen.update(t for t in by_duration[::QUICK_STEP] if durations[t] <= QUICK_LIMIT)
    return chosen


def slow(tests: Iterable[str], durations: Mapping[str, float]) -> set[str]:
    """Of ``tests``, those that take so long that only ``make prove`` runs them.

    Args:
        tests: Tests as pytest names them.
        durations: User CPU seconds by test, of all tests.
    """
    quickest: dict[str, str] = {}
    for test in sorted(durations, key=lambda test: (durations[test], test)):
        quickest.setdefault(test.partition("::")[0], test)
    chosen = set()
    for test in tests:
        is_quickest = quickest.get(test.partition("::")[0]) == test
        limit = SLOW_LIMIT_OF_QUICKEST if is_quickest else SLOW_LIMIT
        if durations.get(test, 0.0) > limit and not test.startswith(_NEVER_SLOW):
            chosen.add(test)
    return chosen


def write(durations: Mapping[str, float], path: pathlib.Path = RECORD) -> None:
    """Write the record, by test in alphabetical order."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("test", "seconds"))
        writer.writerows((test, f"{seconds:.2f}") for test, seconds in sorted(durations.items()))


class Durations:
    """The pytest plugin behind ``--quick`` and ``--record-durations``."""

    def __init__(self, config: pytest.Config) -> None:
        self.quick: bool = config.getoption("--quick")
        self.record: bool = config.getoption("--record-durations")
        self.measured: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Set a test's clock."""
        self.started = _user_cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Write onto each report what the test took up to here; workers send reports on."""
        report = yield
        report.user_properties.append((_PROPERTY, _user_cpu_seconds() - self.started))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test took, its teardown included."""
        seconds = dict(report.user_properties).get(_PROPERTY)
        if report.when == "teardown" and isinstance(seconds, float):
            self.measured[report.nodeid] = seconds

    @pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Mark the slow tests, and leave out what ``--quick`` does not run."""
        record = read()
        marked = slow([item.nodeid for item in items], record)
        for item in items:
            if item.nodeid in marked:
                item.add_marker("slow")
        # The sort is stable: the others stay with the fixtures that they share.
        items.sort(key=lambda item: -first_seconds(item.nodeid, record))
        if not self.quick:
            return
        chosen = quick([item.nodeid for item in items], record)
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the record; tests whose file is gone are dropped."""
        if self.record and not hasattr(session.config, "workerinput"):
            known = {**read(), **self.measured}
            root = session.config.rootpath
            write({t: s for t, s in known.items() if (root / t.partition("::")[0]).is_file()})


def first_seconds(test: str, record: Mapping[str, float]) -> float:
    """What a test takes that starts first; 0 for the others."""
    seconds = record.get(test, 0.0)
    return seconds if seconds > SLOW_LIMIT and test.startswith(_NEVER_SLOW) else 0.0


def _user_cpu_seconds() -> float:
    """Of this process, those it has waited for, and those elsewhere."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + children.ru_utime + elsewhere_seconds
