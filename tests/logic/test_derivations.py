"""Which rule, at which line, derives an atom."""

from __future__ import annotations

import pathlib

import pytest

from toast.errors import RuleError
from toast.logic import derivations, rule_line

TEXT = """% A comment first.
a(1..2).
b(X) :-
    a(X),
    X > 1.
b((3;4)).
b(X) :- b(X), a(X).
-b(7).
{ c(1) }.
"""


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "rules.lp").write_text(TEXT)
    return tmp_path / "rules.lp"


def test_every_rule_that_derives_an_atom_is_named(file: pathlib.Path) -> None:
    found = derivations([file], "a(5).", ("b/1", "c/1"))
    assert found["b/1"] == {
        (2,): [(file, 3), (file, 7)],
        (3,): [(file, 6)],
        (4,): [(file, 6)],
        (5,): [(file, 3), (file, 7)],
    }
    assert found["c/1"] == {}, "a choice derives nothing"


def test_a_changed_file_is_read_again(file: pathlib.Path) -> None:
    assert derivations([file], "", ("b/1",))["b/1"][3,] == [(file, 6)]
    file.write_text("\n" * 20 + TEXT)
    assert derivations([file], "", ("b/1",))["b/1"][3,] == [(file, 26)]
    file.unlink()
    with pytest.raises(RuleError, match="no such file"):
        derivations([file], "", ("b/1",))


def test_the_line_of_a_rule(file: pathlib.Path) -> None:
    assert rule_line(file, ("b", 1)) == 3
    assert rule_line(file, ("b", 1), "b(") == 7
    with pytest.raises(RuleError, match="no rule for d/2"):
        rule_line(file, ("d", 2))
