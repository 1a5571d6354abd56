"""Programs as relations and as text, and fact bases read back."""

from __future__ import annotations

import pathlib

import pytest

import toast
from tests.helpers import analyzed, f32, mlp
from toast import api, facts
from toast.errors import FactError
from toast.facts import Relations
from toast.logic import input_predicates, schema
from toast.resources import directory

BASES = sorted(p for p in directory("facts").glob("*.lp") if p.name != "schema.lp")


def test_relations_of_the_mlp() -> None:
    relations = Relations(api.program_of(mlp, f32(256, 32), f32(32, 64), f32(64, 16)))
    assert list(relations.op.columns) == ["op", "kind", "signature"]
    assert relations.op.kind.tolist() == [
        "argument", "argument", "argument", "dot_general", "constant", "broadcast_in_dim",
        "maximum", "dot_general", "return",
    ]  # fmt: skip
    assert relations.argument.argument.tolist() == ["x", "w1", "w2"]
    dot = relations.operand[relations.operand.op == 3]
    assert dot.value.tolist() == [0, 1]
    assert relations.dim[relations.dim.value == 0]["size"].tolist() == [256, 32]
    assert len(relations.result) == len(relations.value)


@pytest.mark.parametrize("base", BASES, ids=lambda p: p.stem)
def test_bases_survive_a_round_trip(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first = facts.read(base)
    copy = tmp_path / "copy.lp"
    copy.write_text(Relations(first).to_lp())
    second = facts.read(copy)
    assert second.ops == first.ops
    assert second.signatures == first.signatures


def test_lowered_programs_survive_a_round_trip(tmp_path: pathlib.Path) -> None:
    program = analyzed("t2b-tiny").program
    copy = tmp_path / "copy.lp"
    copy.write_text(Relations(program).to_lp())
    again = toast.analyze(copy)
    assert [s.kind for s in again.program.signatures] == [s.kind for s in program.signatures]
    ours = analyzed("t2b-tiny").counts()
    theirs = again.counts()
    assert {k: theirs[k] for k in ("names", "colors", "conflicts", "boxes", "argument_groups")} == {
        k: ours[k] for k in ("names", "colors", "conflicts", "boxes", "argument_groups")
    }


def test_schema_documents_every_predicate_with_writer_and_example() -> None:
    for declared in schema().values():
        assert "Written by:" in declared.text, declared.name
        assert f"Example: {declared.name}(" in declared.text, declared.name
    assert ("op", 2) in input_predicates()
    assert ("factor", 4) not in input_predicates()


GOOD = 'op(x,argument). result(x,0,x). dtype(x,"f32"). rank(x,1). dim(x,0,8).\n'
BAD = {
    "undeclared": (GOOD + "opp(y,add).\n", r"base.lp:2: predicate opp/2 is not declared; did you mean op\?"),
    "arity": (GOOD + "op(y).\n", r"base.lp:2: predicate op/1 is not declared; did you mean op/2\?"),
    "syntax": (GOOD + "op(y,add)\nop(z,add).\n", r"base.lp:3: syntax error"),
    "variable": (GOOD + "op(Y,add).\n", r"base.lp:2: not a ground fact"),
    "rule": (GOOD + "op(y,add) :- op(x,argument).\n", r"base.lp:2: not a fact"),
    "script": (GOOD + "#script (python)\nimport os\n#end.\n", r"base.lp:2: not a fact"),
    "derived": (GOOD + "color(x,x).\n", r"base.lp:2: predicate color/2 is not declared"),
    "order": (GOOD + "op(y,abs). operand(y,0,z). result(y,0,y). rank(y,0).\n", r"op y uses z"),
    "rank": (GOOD.replace("rank(x,1)", "rank(x,2)"), r"rank\(x,2\) does not match"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_bases_are_refused_with_file_and_line(case: str, tmp_path: pathlib.Path) -> None:
    text, message = BAD[case]
    (tmp_path / "base.lp").write_text(text)
    with pytest.raises(FactError, match=message) as caught:
        facts.read(tmp_path / "base.lp")
    assert "\n" not in str(caught.value)


def test_dimensions_beyond_32_bits_are_refused() -> None:
    with pytest.raises(
        FactError, match=r"dimension 0 of f32\[3000000000\] has 3000000000 elements"
    ):
        toast.analyze(lambda x: x + 1.0, f32(3_000_000_000))
