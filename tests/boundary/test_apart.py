"""Programs of strangers are analyzed in a process with limits."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

import toast
from tests.helpers import analyzed
from toast.analysis import analyze_program
from toast.boundary import apart
from toast.errors import RuleError, RuleWarning, TargetError
from toast.logic import strata

FACTS = pathlib.Path(__file__).parents[2] / "facts" / "mlp.lp"


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        ("time:sleep", 9, "takes more than 1 seconds"),
        ("builtins:bytearray", 2**36, "ran out of memory"),
        ("os:abort", None, r"crashes the reader \(SIGABRT\)"),
        ("os:_exit", 7, "ends its process"),
    ],
)
def test_a_call_meets_its_limits(function: str, argument: object, message: str) -> None:
    arguments = () if argument is None else (argument,)
    with pytest.raises(apart.Limit, match=message):
        apart.call(function, *arguments, seconds=1 if function == "time:sleep" else 60)


def test_results_and_errors_come_back(tmp_path: pathlib.Path) -> None:
    assert apart.call("math:hypot", 3, 4) == 5.0
    with pytest.raises(TargetError, match="no ops"):
        apart.call("toast.analysis:analyze_program", nothing())


def nothing() -> toast.Program:
    return dataclasses.replace(analyzed("mlp").program, ops=(), source=None)


def test_a_strangers_program_is_grounded_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    grounded: list[object] = []
    monkeypatch.setattr(strata, "observers", [lambda _model, rules: grounded.append(rules)])
    monkeypatch.setenv("TOAST_CACHE", "off")
    foreign = toast.analyze(FACTS)
    assert foreign.program.foreign
    assert foreign.independent[0] == foreign.resolutions
    assert not grounded
    own = analyze_program(dataclasses.replace(foreign.program, foreign=False))
    assert grounded
    assert own.counts() == foreign.counts()
    assert own.independent == foreign.independent


def test_an_analysis_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "call", lambda *_: stop())

    def stop() -> None:
        raise apart.Limit("takes more than 120 seconds")

    with pytest.raises(TargetError, match="mlp: analyzing it takes more than 120 seconds; "):
        toast.analyze(FACTS)


def test_what_is_odd_about_rules_is_said_here(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.lp"
    path.write_text("elementwise(tanh) :- colour(tanh).\n%! colour(Kind): never said.\n")
    with pytest.warns(RuleWarning, match="does not occur"):
        toast.analyze(FACTS, rules=[path])
    path.write_text(
        "factor(Op,0,T,D) :- op(Op,dot_general), tensor_dim(Op,T,D,_).\nrule(dot_general).\n"
    )
    with pytest.raises(RuleError, match=r"r.lp:\d+: "):
        toast.analyze(FACTS, rules=[path])
