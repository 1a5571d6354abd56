"""Rule files: declared, documented, silent, and never code."""

from __future__ import annotations

import pathlib

import pytest

import toast
from toast.errors import RuleError
from toast.logic import check_rules, schema, solve
from toast.logic.strata import FUNCTIONS
from toast.resources import directory

RULES = [
    *sorted(directory("rules").glob("*.lp")),
    *sorted((directory("rules") / "ops").glob("*.lp")),
]


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.stem)
def test_shipped_rules_declare_all_they_use(path: pathlib.Path) -> None:
    check_rules(path, functions=FUNCTIONS if path.stem == "built_in" else ())
    assert path.read_text().startswith("%%% "), "a rule file opens with its purpose"


QUERIES = sorted((directory("rules") / "queries").glob("*.lp"))


@pytest.mark.parametrize("path", QUERIES, ids=lambda p: p.stem)
def test_queries_declare_all_they_use(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    vocabulary = (directory("rules") / "queries" / "vocabulary.lp").read_text()
    together = tmp_path / "together.lp"
    own = "" if path.stem == "vocabulary" else path.read_text()
    together.write_text(vocabulary + own)
    check_rules(together)
    assert path.read_text().startswith("%%% "), "a rule file opens with its purpose"
    assert all(len(line) <= 100 for line in path.read_text().splitlines())
    assert f"`queries/{path.name}`" in README or f"`{path.name}`" in README


README = (directory("rules") / "README.md").read_text()


def test_every_declared_predicate_is_used() -> None:
    text = "".join(path.read_text() for path in RULES)
    for name, _ in schema():
        assert f"{name}(" in text or name in ("dtype", "repeats"), name


BAD = {
    "script": ("#script (python)\ndef main(c): pass\n#end.\n", r"r.lp:1: #script is not allowed"),
    "external": ("rule(x).\nrank(1,@evil(2)).\n", r"r.lp:2: @evil is not allowed"),
    "include": ('#include "/etc/passwd".\n', r"r.lp:1: #include is not allowed"),
    "undeclared": ("rule(my_op).\nfacter(Op,0,T,0) :- tensor(Op,T,_).\n",
                   r"r.lp:2: predicate facter/4 is not declared; did you mean factor\?"),
    "arity": ("rule(my_op, 2).\n", r"r.lp:1: predicate rule/2 is not declared; did you mean rule/1\?"),
    "syntax": ("rule(my_op)\nrule(other).\n", r"r.lp:2: syntax error"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_rule_files_are_refused_with_file_and_line(case: str, tmp_path: pathlib.Path) -> None:
    text, message = BAD[case]
    (tmp_path / "r.lp").write_text(text)
    with pytest.raises(RuleError, match=message) as caught:
        check_rules(tmp_path / "r.lp")
    assert "\n" not in str(caught.value)


MYSTERY = """func.func public @main(%a: tensor<64x32xf32>) -> tensor<64x32xf32> {
  %0 = stablehlo.custom_call @mystery(%a) : (tensor<64x32xf32>) -> tensor<64x32xf32>
  return %0 : tensor<64x32xf32>
}
"""
HEAD = """custom_call_rule("mystery").
%! mine(Op): a call of mystery.
mine(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"mystery").
"""


@pytest.fixture
def mystery(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "program.mlir"
    path.write_text(MYSTERY)
    return path


def test_unsafe_rules_are_refused_with_file_and_line(
    mystery: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "r.lp").write_text("rule(sort).\nfactor(Op,D,T,D) :- op(Op,sort).\n")
    with pytest.raises(RuleError, match=r"r.lp:2: unsafe variables"):
        toast.analyze(mystery, rules=[tmp_path])


def test_users_rules_add_an_op(mystery: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Adding an op is adding one file."""
    before = toast.analyze(mystery)
    assert [before.program.kind(op) for op in before.without_rule] == ["custom_call"]
    own = (
        f"%%% mystery: ij -> ij; the second dimension stays whole.\n{HEAD}"
        "factor(Op,D,T,D)       :- mine(Op), tensor_dim(Op,T,D,_).\n"
        "need_replication(Op,1) :- mine(Op).\n"
    )
    # XLA runs a custom call whole unless it is partitioned.
    for stated, whole in (("partitioned(Op) :- mine(Op).\n", "1"), ("", "0,1")):
        (tmp_path / "mystery.lp").write_text(own + stated)
        after = toast.analyze(mystery, rules=[tmp_path / "mystery.lp"])
        assert after.without_rule == ()
        (rule,) = [r for r, s in zip(after.rules, after.program.signatures, strict=True)
                   if s.kind == "custom_call"]  # fmt: skip
        assert rule.einsum() == f"([0,1]) -> ([0,1]) need_replication={{{whole}}}"
        assert rule.runs_whole == (not stated)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("factor(Op,0,T,D) :- mine(Op), tensor_dim(Op,T,D,_).", r"factor 0 maps dimensions of"),
        ("factor(Op,D,T,D) :- mine(Op), tensor_dim(Op,T,D,_), D = 0.", r"dimension 1 of .* has no"),
        ("factor(Op,(D;7),T,D) :- mine(Op), tensor_dim(Op,T,D,_).", r"two factors at position 0"),
    ],
)
def test_rules_that_contradict_themselves(
    rule: str, message: str, mystery: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "mystery.lp").write_text(f"{HEAD}{rule}\n")
    with pytest.raises(RuleError, match=message):
        toast.analyze(mystery, rules=[tmp_path])


def test_solving_is_silent() -> None:
    """Clingo has nothing to remark on the shipped rules."""
    files = [directory("facts") / "schema.lp", *RULES]
    assert solve(files, "", ("color/2",)) == {"color/2": []}
