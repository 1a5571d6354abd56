"""Rules proven by running ops on shards; a wrong rule is caught."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import pytest

from tests.helpers import f32
from tests.rules.test_models import PROGRAMS
from toast import api
from toast.assurance.prove import prove, tally
from toast.models import build


@pytest.mark.parametrize(
    "name", ["convnet", "cached attention", "graph network", "LSTM", "Fourier layer", "Shampoo"]
)
def test_rules_are_proven(name: str) -> None:
    function, shapes = PROGRAMS[name]
    proofs = prove(api.program_of(function, *shapes))
    assert [p for p in proofs if p.wrong] == []
    assert sum(p.outcome == "proven" for p in proofs) > 0.85 * len(proofs)


def test_the_figures_are_proven_throughout() -> None:
    for name in ("mlp", "attention"):
        proofs = prove(api.program_of(build(name)))
        assert {p.outcome for p in proofs if p.kind != "constant"} == {"proven"}


#: Kind, a program with one such op, and a rule that is wrong.
WRONG = {
    "sorted dimension passes through": (
        "sort", lambda x: jnp.sort(x, axis=1),
        "factor(Op,D,T,D) :- mine(Op), tensor_dim(Op,T,D,_).",
    ),
    "cumulative sum as a map": (
        "reduce_window", lambda x: jnp.cumsum(x, axis=1),
        "factor(Op,D,T,D) :- mine(Op), tensor_dim(Op,T,D,_).",
    ),
    "maximum put together by a sum": (
        "reduce", lambda x: jnp.max(x, axis=1),
        "factor(Op,D,operand(0),D) :- mine(Op), tensor_dim(Op,operand(0),D,_).\n"
        'factor(Op,0,result(0),0) :- mine(Op).\nreduction(Op,1,"add") :- mine(Op).',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_caught(case: str, tmp_path: pathlib.Path) -> None:
    """A user's rule takes the place of the shipped one; running it shows that it is wrong."""
    kind, function, rule = WRONG[case]
    path = tmp_path / "wrong.lp"
    path.write_text(
        f"rule({kind}).\n%! mine(Op): an op of the kind.\nmine(Op) :- op(Op,{kind}).\n{rule}\n"
    )
    proofs = prove(api.program_of(function, f32(8, 16)), [path])
    (row,) = [t for t in tally(proofs) if t.kind == kind]
    assert {p.factor for p in proofs if p.wrong} == {"1"}
    assert (row.wrong, row.proven) == (1, 1)


def test_large_ops_are_not_run() -> None:
    proofs = prove(api.program_of(lambda x: x + x, f32(4096, 4096)))
    assert {p.outcome for p in proofs} == {"too large to run"}
