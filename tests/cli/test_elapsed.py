"""The line of long commands: the time so far, and the time that is left."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from toast.cli.elapsed import ElapsedLine, steps


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_times_are_shown_after_three_seconds() -> None:
    clock = Clock()
    line = ElapsedLine(clock)
    line.show("decision space 1 of 5: mesh a=2")
    assert str(line) == "decision space 1 of 5: mesh a=2"
    clock.now += 4
    assert str(line) == "decision space 1 of 5: mesh a=2 (4 s)"
    line.show("decision space 2 of 5: mesh b=2")
    assert str(line) == "decision space 2 of 5: mesh b=2 (4 s, about 16 s left)"
    clock.now += 3
    assert str(line) == "decision space 2 of 5: mesh b=2 (7 s, about 13 s left)"
    clock.now += 100
    assert str(line).endswith("(1:47 min, about 0 s left)")


def test_other_work_begins_its_own_count() -> None:
    clock = Clock()
    line = ElapsedLine(clock)
    for number in (1, 2):
        line.show(f"method {number} of 3, alpa: begins")
        clock.now += 10
    line.show("writing the report")
    assert str(line) == "writing the report (20 s)"
    round_ = SimpleNamespace(number=2, states=10, cost=0.5, search=1, searches=4)
    line.show(round_)
    assert str(line) == "search 1 of 4, 10 states, best cost 0.5 (20 s)"
    clock.now += 5
    line.show(SimpleNamespace(**{**vars(round_), "search": 2}))
    assert str(line).endswith("(25 s, about 15 s left)")
    line.show(SimpleNamespace(number=2, states=10, cost=0.5))
    assert str(line) == "search: round 3, 10 states, best cost 0.5 (25 s)"


def test_a_count_may_begin_anywhere() -> None:
    clock = Clock()
    line = ElapsedLine(clock)
    for number in (51, 52):
        line.show(f"{number} of 60: t2b")
        clock.now += 4
    assert str(line) == "52 of 60: t2b (8 s, about 32 s left)"


def test_steps_of_a_loop_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in steps(["t2b", "unet"]):
        print(name)
    assert capsys.readouterr() == ("t2b\nunet\n", "1 of 2: t2b\n2 of 2: unet\n")
    # At a terminal, the line is renewed, and what is printed is above it.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for name in steps(["t2b"], str.upper):
        print(name)
    output, line = capsys.readouterr()
    assert output == "t2b\n"
    assert "1 of 1: T2B" in line


def test_names_are_not_markup() -> None:
    line, output = ElapsedLine(), io.StringIO()
    line.show("pricing [/tmp/x].json")
    Console(file=output, width=80).print(line)
    assert output.getvalue() == "pricing [/tmp/x].json\n"
