"""``toast explain`` cites only rules that took part in the analysis: loaded, and with an answer."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import pytest

import toast
from tests.analysis.generated import program
from tests.explain.test_chains import ROOT, dimensions
from tests.helpers import f32
from toast import api
from toast.logic import strata
from toast.models import build
from toast.program import Program
from toast.resources import directory

#: Where a rule stands: file, and line.
Place = tuple[str, int]


@pytest.fixture
def took_part() -> Iterator[set[Place]]:
    """The rules that derive something, of all that are grounded from now on."""
    found: set[Place] = set()

    def look(model: strata.LogicModel, rules: Sequence[strata.Rule]) -> None:
        # Each rule once more, with its own place for a head.
        places = {}
        for rule in rules:
            _, implied, body = rule.text.partition(" :- ")
            if not implied:
                found.add(place(rule))
            elif "@" not in body:
                places[f"took_part_{len(places)}"] = rule, body
        model._ground("\n".join(f"{name} :- {body}" for name, (_, body) in places.items()))
        found.update(
            place(rule) for name, (rule, _) in places.items() if model.symbols(f"{name}/0")
        )

    strata.observers.append(look)
    yield found
    strata.observers.remove(look)


def place(rule: strata.Rule) -> Place:
    file = rule.file
    return str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file), rule.line


PROGRAMS = {
    **{f"generated {seed}": lambda seed=seed: program(seed) for seed in range(6)},
    **{
        name: lambda name=name: api.program_of(build(name, small=True))
        for name in ("t2b", "moe-scan")
    },
    # A fact base is analyzed in another process, where nobody could look on.
    "attention": lambda: dataclasses.replace(
        api.program_of(directory("facts") / "attention.lp"), foreign=False
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_cited_rules_took_part(name: str, took_part: set[Place]) -> None:
    drawn: Program = PROGRAMS[name]()
    analysis = toast.analyze(drawn)
    assert ("rules/names.lp", 18) in took_part
    rng, every = random.Random(0), dimensions(analysis)
    cited: set[Place] = set()
    for _ in range(12):
        chain = analysis.explain(*rng.sample(every, 2))
        cited |= {(rule.file, rule.line) for step in chain.steps for rule in step.rules}
    for number in range(min(3, len(analysis.resolutions))):
        conflict = analysis.explain_conflict(number)
        cited |= {(rule.file, rule.line) for step in conflict.chain.steps for rule in step.rules}
    assert cited
    assert cited <= took_part
    assert not {file for file, _ in took_part} & {"rules/closure.lp", "rules/answer.lp"}


def test_a_users_rule_is_cited_where_it_took_part(
    tmp_path: pathlib.Path, took_part: set[Place]
) -> None:
    mine = tmp_path / "mine.lp"
    mine.write_text("rule(tanh).\nfactor(Op,D,T,D) :- op(Op,tanh), tensor_dim(Op,T,D,_).\n")
    analysis = toast.analyze(lambda x: jnp.tanh(x) * 2.0, f32(8, 4), rules=[mine])
    chain = analysis.explain("x:1", "result:1")
    cited = {(rule.file, rule.line) for step in chain.steps for rule in step.rules}
    assert (str(mine), 2) in cited
    assert cited <= took_part
