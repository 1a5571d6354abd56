"""Rules in strata: functions see whole relations, whatever the order of rules and files."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from toast.errors import RuleError
from toast.logic import Edges, LogicModel, closures, solve
from toast.logic.strata import read_terms, written

RULES = """% Rules come in no order at all.
alone(Node) :- class(Node,Node), not shared(Node).
shared(First) :- class(Node,First), Node != First.
class(Node,First) :- (Node,First) = @components(link,node).
link(X,Y) :- step(X,Y).
link(X,Y) :- step(X,Z), step(Z,Y).
node(X) :- step(X,_).
node(Y) :- step(_,Y).
node(9).
unused(X) :- missing(X).
"""


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "rules.lp"
    path.write_text(RULES)
    return path


def model(*steps: tuple[int, int]) -> LogicModel:
    made = LogicModel()
    made.state_rows({"step/2": [f"({one},{other})" for one, other in steps]})
    return made


def test_functions_are_called_behind_their_relations(file: pathlib.Path) -> None:
    made = model((1, 2), (2, 3), (5, 4))
    made.derive([file], ["alone/1", "class/2"])
    assert sorted(made.atoms("class/2")) == [(1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (9, 9)]
    assert made.atoms("alone/1") == [(9,)]
    assert made.numbers("class/2").tolist() == [list(row) for row in made.atoms("class/2")]
    assert made.atoms("unused/1") == []


def test_relations_may_be_arrays(file: pathlib.Path) -> None:
    made = model((1, 2), (5, 4))
    edges = np.array([[2, 3], [3, 4]])
    made.derive([file], ["class/2"], arrays={"link": Edges(10, edges)})
    assert sorted(made.atoms("class/2")) == [(1, 1), (2, 2), (4, 2), (5, 5), (9, 9)]


def test_what_is_stated_is_not_derived(file: pathlib.Path) -> None:
    made = model((1, 2))
    made.state_rows({"class/2": ["(7,7)"]})
    made.derive([file], ["alone/1"])
    assert made.atoms("alone/1") == [(7,)]
    assert made.atoms("node/1") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a(X) :- not b(X).\nb(1).", r"r.lp:1: unsafe variables X"),
        (
            "a(X,Y) :- (X,Y) = @components(a,b).",
            "a function takes a relation that depends",
        ),
        (
            "a(X) :- (X,Y) = @closure(b,c).",
            r"@closure with 2 relations: no such function; there are",
        ),
        ("a(X) :- (X,Y) = @same(b,c).", r"@same with 2 relations: no such function"),
        ("{ a(1) }.", r"r.lp:1: the head is not an atom"),
        ("a(1 2).", r"r.lp:1: syntax error"),
    ],
)
def test_errors_name_the_place(text: str, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "r.lp").write_text(text)
    with pytest.raises(RuleError, match=message) as caught:
        LogicModel().derive([tmp_path / "r.lp"], ["a/1", "a/2"])
    assert "\n" not in str(caught.value)


def test_terms_are_read_as_they_are(tmp_path: pathlib.Path) -> None:
    text = r"""a(1,-7,x,f(x,(1,2)),"s \"q\" , ( \\",(3,),"",g_1(h)). a(0,0,y,z,"\n",(),"(",0)."""
    (tmp_path / "r.lp").write_text(text)
    made = LogicModel()
    made.derive([tmp_path / "r.lp"], ["a/8"])
    symbols = made.symbols("a/8")
    assert made.atoms("a/8") == solve([tmp_path / "r.lp"], "", ["a/8"])["a/8"]
    assert [written(term) for term in read_terms(symbols, quotes=True)] == list(map(str, symbols))


def test_closures_of_terms() -> None:
    """Nodes of several kinds are in clingo's order."""
    assert closures.components([(("f", 1), 3), ("b", "a")], [("f", 1), "b", 3]) == [
        (("f", 1), 3), ("b", "a"), (3, 3),
    ]  # fmt: skip
    assert closures.same([("x", 1), ("y", 2), ("z", 1), ("x", 3), ("z", 3)]) == [
        ("x", "x"), ("y", "y"), ("z", "x"),
    ]  # fmt: skip
    # A ring of four, one of which looks otherwise: the two beside it are twins.
    steps = [(n, "next", (n + 1) % 4) for n in range(4)] + [
        ((n + 1) % 4, "next", n) for n in range(4)
    ]
    looks = [(n, n == 0) for n in range(4)]
    assert closures.twins(looks, steps) == [(0, 0), (1, 1), (2, 2), (3, 1)]
    edges = np.array([[0, 1], [1, 3], [2, 3]])
    assert closures.paths(edges, [(0, 3), (0, 2), (2, 3), (3, 0)]) == [(0, 3), (2, 3)]
