"""Op classes: which ops share a state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import toast
from tests.helpers import analyzed, f32, refinements
from toast.hardware import Mesh
from toast.space import Scope, Space, classes


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def space_of(count: int) -> Space:
    analysis = toast.analyze(layers, [f32(512, 512)] * count, f32(1024, 512))
    return Space(analysis, Mesh.parse("data=2,model=2"))


def test_ops_of_a_class_have_like_neighbours_in_a_small_program() -> None:
    space = space_of(6)
    names, of_op = space.analysis.names, space.classes.of_op
    around: dict[int, set[object]] = {}
    for op in range(len(of_op)):
        uses = names.use_op == op
        makers = of_op[names.value_op[names.use_value[uses]]].tolist()
        made = names.value_op[names.use_value] == op
        users = zip(of_op[names.use_op[made]].tolist(), names.use_index[made], strict=True)
        around.setdefault(int(of_op[op]), set()).add((*makers, frozenset(users)))
    assert all(len(found) == 1 for found in around.values())


def test_equal_layers_may_be_sharded_by_turns() -> None:
    """As Megatron does: one by columns, the next by rows."""
    space = space_of(4)
    program = space.analysis.program
    products = [n for n in range(len(program.ops)) if program.kind(n) == "dot_general"]
    assert len({int(space.classes.of_op[op]) for op in products}) == 4


def test_layers_of_a_deep_network_share_classes() -> None:
    counts = [
        len(Space(analyzed("t2b", layers=n), Mesh.parse("data=2,model=2")).classes.count)
        for n in (6, 12)
    ]
    assert counts[0] == counts[1]


def test_classes_end_where_there_are_many() -> None:
    space = space_of(6)
    names = space.analysis.names
    start = np.zeros(len(names.signature), dtype=np.int64)
    finer = classes._apart(names, start)
    assert 1 < finer.max() < len(start)


def test_a_family_is_refined_as_one() -> None:
    space = Space(analyzed("t2b-tiny"), Mesh.parse("data=2,model=2"))
    family = space.classes.family
    largest = int(np.bincount(family).argmax())
    members = np.flatnonzero(family == largest)
    assert len(members) > 1
    for action in refinements(space, Scope.FAMILY, largest):
        assert {k for k, _ in action.part} <= set(members.tolist())
        after = space.apply(space.unsharded, action)
        assert (after[members] == after[members[0]]).all()
