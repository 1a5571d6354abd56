"""What `toast rules check` finds in a user's rule files."""

from __future__ import annotations

import pathlib
import sys

import pytest
from typer.testing import CliRunner

from toast import api, cli
from toast.assurance.lint import check
from toast.errors import RuleError
from toast.logic import engine

CALL = """func.func public @main(%a: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.custom_call @mystery(%a) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
"""

WRONG = {
    "a dimension without a factor": (
        "rule(sort).\nfactor(Op,D,T,D) :- op(Op,sort), tensor_dim(Op,T,D,_), D < 1.\n",
        r"r.lp:1: rule of sort: .* dimension 1 of .* has no factor; map it",
    ),
    "sizes that differ": (
        "% two kinds\nrule((reverse; sort)).\n"
        "factor(Op,0,T,D) :- op(Op,reverse), tensor_dim(Op,T,D,_).\n",
        r"r.lp:2: rule of reverse: factor 0 maps dimensions of different size \(",
    ),
    "two factors at once": (
        "rule(tanh).\nfactor(Op,(D;a),T,D) :- op(Op,tanh), tensor_dim(Op,T,D,_).\n",
        r"r.lp:1: rule of tanh: .* dimension 0 has two factors at position 0",
    ),
    "a dimension that no op has": (
        "rule(tanh).\nfactor(Op,x,operand(0),70) :- op(Op,tanh).\n",
        r"r.lp:1: rule of tanh: factor x: operand\(0\) has no dimension 70",
    ),
    "a property of no factor": (
        "rule(tanh).\nfactor(Op,D,T,D) :- op(Op,tanh), tensor_dim(Op,T,D,_).\n"
        "need_replication(Op,typo) :- op(Op,tanh).\n",
        r"r.lp:1: rule of tanh: need_replication of typo: no dimension has this factor",
    ),
    "factors of a kind without a rule": (
        "need_replication(Op,0) :- op(Op,tanh).\n",
        r"r.lp:1: has no effect, since the file has no rule of tanh; add rule\(tanh\)",
    ),
    "a variable that nothing binds": (
        "rule(tanh).\nfactor(Op,D,T,E) :- op(Op,tanh), tensor_dim(Op,T,D,_).\n",
        r"r.lp:2: unsafe variables E: no positive atom of the body binds them$",
    ),
    "atoms without end": (
        "rule(tanh).\n%! up(X): counts.\nup(0).\nup(X+1) :- up(X).\n",
        r"r.lp: grounding makes more than 20000 atoms; bound its recursion",
    ),
    "joins without end": (
        "rule(tanh).\n%! up(X): counts.\nup(1..200).\n%! big(X): joins.\n"
        "big(1) :- up(A), up(B), up(C), up(D), up(E), up(F), A+B+C+D+E+F < 0.\n",
        r"r.lp: grounding takes more than 1 seconds; bound its recursion",
    ),
    "a fact of the program": (
        "tied(a, b).\n", r"r.lp:1: a rule file cannot derive tied/2, .* by frontend; remove the rule",
    ),
    "a fact of the analysis": (
        "decomposition_whole(Op,0) :- op(Op,composite).\n",
        r"r.lp:1: a rule file cannot derive decomposition_whole/2, .* by analysis of device-local",
    ),
    "a kind that depends on the program": (
        "composite_rule(X) :- op(_,X).\n",
        r'r.lp:1: composite_rule cannot depend on the program; .* composite_rule\("toast.attention"\)',
    ),
    "a kind that depends on it in two steps": (
        "%! mine(K): kinds.\nmine(K) :- op(_,K), K=sine.\nstays_whole(K) :- mine(K).\n",
        r"r.lp:3: stays_whole cannot depend on the program",
    ),
    "a kind that depends on the partitioner": (
        "stays_whole(sine) :- lowering(xla).\n", r"r.lp:1: stays_whole cannot depend on the program",
    ),
    "a composite that is a number": ("composite_rule(5).\n", r"r.lp:1: composite_rule of 5 names no op"),
    "a composite that is replaced": (
        'elementwise(tanh).\ncomposite_rule("norm").\n', r"r.lp:2: composite_rule of norm names no op",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_found(
    case: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "GROUND_ATOMS", 20_000)
    text, message = WRONG[case]
    # A machine that is busy grounds slowly.
    monkeypatch.setattr(engine, "GROUND_SECONDS", 1.0 if "takes more than" in message else 60.0)
    (tmp_path / "r.lp").write_text(text)
    with pytest.raises(RuleError, match=message) as caught:
        check([tmp_path])
    assert "\n" not in str(caught.value)


def test_rules_for_no_op_are_odd(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.lp"
    path.write_text("% mine\nrule(cnvolution).\n")
    assert check([path]) == (
        1, (f"{path}:2: no op is of kind cnvolution; did you mean convolution?",)
    )  # fmt: skip


def test_what_clingo_finds_odd_is_said(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.lp"
    path.write_text(
        "elementwise(tanh).\n%! half(X): of a name.\nhalf(Kind/2) :- elementwise(Kind).\n"
    )
    (odd,) = check([path])[1]
    assert odd == f"{path}:3: operation undefined: (Kind/2)"


def test_sound_files_are_counted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.lp").write_text("elementwise(tanh).\n")
    (tmp_path / "b.lp").write_text("stays_whole(sort).\n")
    assert check([tmp_path]) == (2, ())


def test_custom_calls_are_tried_on_a_program(tmp_path: pathlib.Path) -> None:
    (tmp_path / "r.lp").write_text('custom_call_rule("mystery").\n')
    assert check([tmp_path]) == (1, ())
    (tmp_path / "program.mlir").write_text(CALL)
    program = api.program_of(tmp_path / "program.mlir")
    with pytest.raises(RuleError, match=r"r.lp:1: rule of custom_call: .* has no factor"):
        check([tmp_path], program)


@pytest.mark.parametrize("command", [["rules", "check", "{}"], ["rules", "prove", "{}"]])
def test_without_hypothesis_one_line_says_what_to_install(
    command: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.lp"
    path.write_text("elementwise(sort).\n")
    for name in [name for name in sys.modules if name.startswith("toast.assurance")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    run = CliRunner().invoke
    result = run(cli.app, [word.format(path) for word in command])
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        "toast: hypothesis, which draws random ops, is not installed: pip install "
        "'toast-partitioner[rules]', or hypothesis"
    ]
    assert run(cli.app, ["rules", "list"]).exit_code == 0


def test_prove_takes_a_rule_file(tmp_path: pathlib.Path) -> None:
    run = CliRunner().invoke
    path = tmp_path / "r.lp"
    path.write_text("elementwise(sort).\n")
    wrong = run(cli.app, ["rules", "prove", str(path)])
    assert wrong.exit_code == 1
    assert "differs from the whole" in wrong.output
    path.write_text("elementwise(tanh).\n")
    sound = run(cli.app, ["rules", "prove", str(path), "--count", "5"])
    assert (sound.exit_code, "tanh" in sound.output) == (0, True)


def test_custom_calls_are_proven_by_a_reference(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.mlir").write_text(CALL)
    (tmp_path / "mystery_reference.py").write_text(
        "import jax\ndef rows(x):\n    return jax.nn.softmax(x, axis=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    rule = (
        'custom_call_rule("mystery").\n%! mine(Op): a call of it.\n'
        'mine(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"mystery").\n'
        "factor(Op,D,T,D) :- mine(Op), tensor_dim(Op,T,D,_).\n"
    )
    prove = ["rules", "prove", "program.mlir", "--rules", "r.lp"]
    prove += ["--reference", "mystery=mystery_reference:rows"]
    (tmp_path / "r.lp").write_text(rule)
    wrong = CliRunner().invoke(cli.app, prove)
    assert (wrong.exit_code, "factor 1: wrong" in wrong.output) == (1, True)
    (tmp_path / "r.lp").write_text(rule + "need_replication(Op,1) :- mine(Op).\n")
    assert CliRunner().invoke(cli.app, prove).exit_code == 0
    sys.modules.pop("mystery_reference")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return None", "its reference returns nothing, and the op has results of shapes [8, 4]"),
        ("return x, x", "its reference returns float32[8, 4], float32[8, 4], and the op has"),
        ("return 'text'", "its reference returns <U4[], and the op has"),
        ("return object()", "its reference returns object[], and the op has"),
        ("return x[0]", "its reference returns float32[4], and the op has"),
        ("raise ValueError", "its reference fails: ValueError:"),
        ("raise SystemExit(3)", "its reference fails: SystemExit: 3"),
    ],
)
def test_references_that_return_something_else(
    body: str, reason: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.mlir").write_text(CALL)
    (tmp_path / "odd_reference.py").write_text(f"def rows(x):\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.lp").write_text(
        'custom_call_rule("mystery").\n%! mine(Op): a call of it.\n'
        'mine(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"mystery").\n'
        "factor(Op,D,T,D) :- mine(Op), tensor_dim(Op,T,D,_).\n"
    )
    prove = ["rules", "prove", "program.mlir", "--rules", "r.lp"]
    prove += ["--reference", "mystery=odd_reference:rows"]
    done = CliRunner().invoke(cli.app, prove, env={"COLUMNS": "200"})
    sys.modules.pop("odd_reference")
    assert done.exit_code == 0, done.output
    assert f"2 not run: {reason}" in " ".join(done.output.split()), done.output
