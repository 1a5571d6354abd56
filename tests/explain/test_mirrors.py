"""Mirrored colors are those that actions of the search shard together."""

from __future__ import annotations

import random

from tests.explain.test_chains import dimensions, small
from tests.helpers import model_of
from toast.explain import mirrored


def test_as_the_decision_space_has_it() -> None:
    analysis = small("t2b")
    space, names = model_of(analysis, "data=2").space, analysis.names
    rng, seen = random.Random(0), set()
    every = [d for d in dimensions(analysis) if d.value < len(analysis.program.arguments)]
    for _ in range(60):
        one, other = rng.sample(every, 2)
        pair = [int(names.def_name[names.value_dim[d.value] + d.d]) for d in (one, other)]
        together = space.color_group_of(pair[0]) == space.color_group_of(pair[1])
        tied = bool(analysis.color[pair[0]] == analysis.color[pair[1]])
        assert mirrored(analysis, one, other) is bool(together and not tied)
        seen.add((bool(together), tied))
    assert seen == {(True, True), (True, False), (False, False)}
