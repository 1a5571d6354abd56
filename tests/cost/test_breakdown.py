"""A price taken apart by op adds up to the price."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.helpers import analyzed, model_of
from toast.cost import CostModel, break_down
from toast.cost.entities import Entity
from toast.hardware import COLLECTIVES
from toast.space import States


@functools.cache
def priced(name: str) -> CostModel:
    return model_of(analyzed(name, layers=2), "data=4,model=2")


def states(model: CostModel) -> list[States]:
    """The unsharded state, and some that sequences of actions lead to."""
    random = np.random.default_rng(0)
    found = [model.space.unsharded]
    for _ in range(4):
        state = model.space.unsharded
        for number in random.permutation(len(model.space.actions))[:6].tolist():
            state = model.space.apply(state, model.space.actions[number])
        found.append(state)
    return found


@pytest.mark.parametrize("name", ["t2b", "t2b-scan", "itx"])
def test_seconds_by_op_add_up(name: str) -> None:
    model = priced(name)
    for state in states(model):
        found, price = break_down(model, state), model.price(state[None])
        assert found.product_seconds.sum() == pytest.approx(price.matmul_seconds[0])
        assert found.memory_seconds.sum() == pytest.approx(price.memory_seconds[0])
        for k, kind in enumerate(COLLECTIVES):
            mine = [c for c in found.collectives if c.kind == kind]
            seconds = sum(c.seconds for c in mine)
            assert seconds == pytest.approx(price.collective_seconds[0, k], abs=1e-15)
            assert sum(c.count for c in mine) == pytest.approx(price.collective_count[0, k])
            assert all(c.count > 0 for c in mine)


def test_they_are_at_their_ops() -> None:
    model = priced("t2b")
    program = model.space.analysis.program
    for state in states(model):
        found = break_down(model, state)
        kinds = {program.kind(int(op)) for op in np.flatnonzero(found.product_seconds)}
        assert kinds <= {"dot_general", "convolution"}
        for collective in found.collectives:
            assert -1 <= collective.operand < len(program.ops[collective.op].operands)
            assert collective.axes


def test_one_that_uses_share_stands_at_the_first_of_them() -> None:
    model = priced("t2b")
    analysis = model.space.analysis
    program, names = analysis.program, analysis.names
    shared = 0
    for state in states(model):
        there = {(c.op, c.operand, c.kind) for c in break_down(model, state).collectives}
        for traffic in model.traffic(model.layout(state[None])):
            if traffic.term.scope is not Entity.USE_CLASS:
                continue
            for x in np.flatnonzero(traffic.count[0]).tolist():
                uses = np.flatnonzero(model.tables.use_class == x)
                for value in np.unique(names.use_value[uses]).tolist():
                    mine = [
                        (int(names.use_op[u]), int(names.use_index[u]), COLLECTIVES[traffic.kind])
                        for u in uses.tolist() if names.use_value[u] == value
                    ]  # fmt: skip
                    shared += len(mine) > 1
                    assert [use in there for use in mine] == [True] + [False] * (len(mine) - 1)
    assert shared
    assert set(program.repeats) == {1}
