"""A term is one class: the price and all that follows from it have it at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers import analyzed
from toast.cost import (
    DEFAULT_TERMS,
    CostModel,
    LocalTerm,
    Memo,
    StepPart,
    Term,
    Traffic,
    break_down,
)
from toast.cost.axis_sets import GATHER
from toast.cost.entities import Entity, Floats
from toast.cost.layout import Layout, LocalLayout
from toast.cost.liveness import Lifetimes, LiveRanges
from toast.cost.terms import check
from toast.evaluation.joint_bounds import joint_bounds
from toast.evaluation.optimum import random_legal
from toast.hardware import Mesh, load
from toast.search.pairwise import Problem
from toast.space import Space, States


class Launches(LocalTerm):
    """Every op takes a microsecond, and another for each axis that it holds."""

    name, scope = "launches", Entity.OP_CLASS

    def seconds(self, layout: LocalLayout) -> Floats:
        axes = (layout.held < layout.tables.slots.dim.shape[1] - 1).sum(axis=2)
        return 1e-6 * layout.tables.ops.count * (1 + axes)


class Offload(Term):
    """Values are sent to the host at a gigabyte per second, if a device has an odd share."""

    name, scope, label = "offload", Entity.VALUE_CLASS, "staged"

    def _parts(self, layout: Layout) -> Floats:
        return np.asarray(1.0 + layout.settled.max(axis=2))

    def seconds(self, layout: Layout) -> Floats:
        return layout.value_bytes * self._parts(layout) * layout.tables.values.count / 1e9

    def lifetimes(self, ranges: LiveRanges) -> Lifetimes:
        start = ranges.live.start[ranges.stored]
        return Lifetimes(ranges.value_class[ranges.stored], start, start + 1, ranges.stored)

    def bytes(self, layout: Layout) -> Floats:
        return layout.value_bytes * self._parts(layout)


class Packing(LocalTerm):
    """Uses pack what they read at ten gigabytes per second."""

    name, scope, part = "packing", Entity.USE_CLASS, StepPart.PRODUCTS

    def seconds(self, layout: LocalLayout) -> Floats:
        return layout.use_bytes * layout.tables.uses.count / 1e10


class Notices(Term):
    """Uses that see another sharding than the definition's tell the host of it."""

    name, scope, label = "notices", Entity.USE_CLASS, "reshard"

    def seconds(self, layout: Layout) -> Floats:
        return 1e-5 * layout.tables.uses.count * layout.differs

    def traffic(self, layout: Layout) -> Iterator[Traffic]:
        size = np.full(layout.differs.shape, 64.0)
        yield Traffic(self, layout, GATHER, layout.differs, size, size, layout.tables.uses.count)


class Runtime(Term):
    """A hundredth of every argument is kept by the runtime all the time."""

    name, scope, resident = "runtime", Entity.VALUE_CLASS, True

    def bytes(self, layout: Layout) -> Floats:
        return 0.01 * layout.value_bytes * layout.tables.values.arguments


TOYS = (Launches(), Offload(), Packing(), Notices(), Runtime())


@functools.cache
def models(name: str, mesh: str, overlap: str = "none") -> tuple[CostModel, CostModel]:
    """Without the toys, and with them."""
    space = Space(analyzed(name), Mesh.parse(mesh), min_dimensions=0)
    options = {"overlap": overlap}
    plain = CostModel(space, load("tpu-v5e"), **options)  # type: ignore[arg-type]
    more = CostModel(space, load("tpu-v5e"), terms=(*DEFAULT_TERMS, *TOYS), **options)  # type: ignore[arg-type]
    return plain, more


def drawn(space: Space, number: int = 12) -> States:
    """Random states, legal ones and those that actions lead to."""
    random = np.random.default_rng(0)
    states = [space.initial, *random_legal(space, number, random)]
    for _ in range(number):
        state = space.initial
        for chosen in random.permutation(len(space.actions))[:4].tolist():
            state = space.apply(state, space.actions[chosen])
        states.append(state)
    return np.stack(states)


def by_hand(model: CostModel, state: States) -> dict[str, float]:
    """The toys' seconds, added up over every op, value and use of the program itself."""
    space, t = model.space, model.tables
    program, names, sizes = space.analysis.program, space.analysis.names, space.mesh.sizes
    layout = model.layout(state[None])
    seconds = dict.fromkeys(("launches", "offload", "packing", "notices", "gathers"), 0.0)
    for op, k in enumerate(space.classes.of_op.tolist()):
        seconds["launches"] += 1e-6 * program.repeats[op] * (1 + sum(state[k] >= 0))
    shards = lambda dims: float(np.prod([n for n, d in zip(sizes, dims) if d >= 0]))  # noqa: B905, E731
    for number, value in enumerate(program.values):
        c = t.value_class[number]
        dims, times = layout.settled[0, c], program.repeats[value.op]
        size = t.values.bytes[c] / shards(dims)
        seconds["offload"] += times * size * (1 + max(dims)) / 1e9
    most: dict[tuple[int, int], int] = {}  # a copy for each value and use class
    for op, value, u in zip(names.use_op, names.use_value, t.use_class, strict=True):
        key = int(value), int(u)
        most[key] = max(most.get(key, 0), program.repeats[op])
    for (value, u), times in most.items():
        before, after = layout.settled[0, t.value_class[value]], layout.used[0, u]
        differs = sum(1 << a for a in range(len(sizes)) if before[a] != after[a])
        share = t.uses.share[u] if differs else t.values.stored[t.value_class[value]]
        size = t.values.bytes[t.value_class[value]] * share / shards(after)
        seconds["packing"] += times * size / 1e10
        seconds["notices"] += 1e-5 * times * differs
        links = model.machine.collectives
        seconds["gathers"] += times * float(
            links.seconds(GATHER, np.array(64.0), np.array(differs)) if differs else 0.0
        )
    return seconds


@pytest.mark.parametrize("name", ["t2b-tiny", "attention"])
def test_the_price_and_the_breakdown_have_it(name: str) -> None:
    plain, more = models(name, "a=2,b=2")
    states = drawn(plain.space)
    before, after = plain.price(states), more.price(states)
    for number, state in enumerate(states):
        toys = by_hand(plain, state)
        added = after.seconds[number] - before.seconds[number]
        assert added == pytest.approx(sum(toys.values()), rel=1e-9)
        matmul = after.matmul_seconds[number] - before.matmul_seconds[number]
        assert matmul == pytest.approx(toys["packing"], rel=1e-6)
        parts = break_down(more, state)
        for term in ("launches", "offload", "packing", "notices"):
            assert parts.term_seconds[term].sum() == pytest.approx(toys[term])
        assert parts.product_seconds.sum() == pytest.approx(after.matmul_seconds[number])
        assert parts.memory_seconds.sum() == pytest.approx(after.memory_seconds[number])
        gathers = sum(c.seconds for c in parts.collectives if c.kind == "all_gather")
        assert gathers == pytest.approx(after.collective_seconds[number, GATHER])
    arguments = 0.01 * sum(
        plain.tables.values.bytes[plain.tables.value_class[v]]
        for v in plain.space.analysis.program.argument_values
    )
    assert after.argument_bytes[0] - before.argument_bytes[0] == pytest.approx(arguments)
    assert (after.peak_bytes > before.peak_bytes).all()


@pytest.mark.parametrize("overlap", ["none", "partial", "full"])
def test_the_memo_has_it(overlap: str) -> None:
    _, more = models("t2b-tiny", "a=2,b=2", overlap)
    states = drawn(more.space)
    whole, parts = more.price(states), Memo(more).price(states)
    np.testing.assert_allclose(parts.seconds, whole.seconds, rtol=1e-12)
    np.testing.assert_allclose(parts.peak_bytes, whole.peak_bytes, rtol=1e-12)


def test_the_timeline_has_it() -> None:
    _, more = models("t2b-tiny", "a=2,b=2")
    labels = set()
    for state in drawn(more.space):
        line = more.timeline(state)
        assert line.peak_bytes == pytest.approx(more.price(state[None]).peak_bytes[0])
        labels |= {buffer.what for buffer in line.at_peak}
    assert "staged" in labels


@pytest.mark.parametrize("mesh", ["d=4", "d=2,m=2"])
def test_the_bounds_have_it(mesh: str) -> None:
    plain, more = models("mlp", mesh)
    states = drawn(more.space, 100)
    prices = more.price(states)
    # Of the roofline: what is local, at the best of an op class's choices.
    assert more.lower_bound() <= prices.seconds.min() * (1 + 1e-9)
    launches = 1e-6 * plain.tables.ops.count.sum()
    assert more.lower_bound() >= plain.lower_bound() + launches
    seconds, memory = np.zeros(len(states)), np.zeros((len(states), 1))
    for bound in joint_bounds(more, np.inf, most=1 << 18):
        index = tuple(
            (states[:, k][:, None] == more.space.choices[k][None]).all(axis=2).argmax(axis=1)
            for k in bound.scope
        )
        seconds, memory = seconds + bound.seconds[index], memory + bound.memory[index]
    assert (seconds <= prices.seconds * (1 + 1e-9)).all()
    least = more.machine.in_memory(memory.max(axis=1))
    assert (least <= prices.peak_bytes * (1 + 1e-9)).all()
    if mesh == "d=4":  # no shards change places: that is all, but for arguments in fast memory
        np.testing.assert_allclose(seconds, prices.seconds, rtol=2e-3)


@pytest.mark.parametrize("name", ["t2b-tiny", "attention"])
def test_the_pairwise_program_has_it(name: str) -> None:
    plain, more = models(name, "data=4,model=2")
    before, after = Problem(plain), Problem(more)
    random, strategies = np.random.default_rng(0), before.strategies
    compared = 0
    for draw in range(300):
        share = random.random() * (draw > 0)
        choice = random.integers(strategies.sizes) * (random.random(len(strategies.sizes)) < share)
        state = strategies.state(choice)
        kept = strategies.scattered[choice[strategies.leader], np.arange(len(state))]
        if (kept >= 0).any() or plain.layout(state[None]).scattered.any():
            continue  # here leaders decide what is scattered, and not uses
        added = after.seconds(choice) - before.seconds(choice)
        assert added == pytest.approx(sum(by_hand(plain, state).values()), rel=1e-6)
        compared += draw > 0
    assert compared > 5


def test_terms_that_say_what_their_scope_cannot() -> None:
    class Again(Offload):
        pass

    class Everywhere(Notices):
        name, scope = "everywhere", Entity.OP_CLASS

    class Later(Notices):
        name, scope = "later", Entity.COPY_PAIR

    class Nameless(Term):
        scope = Entity.USE_CLASS

    class Idle(LocalTerm):
        name, scope = "idle", Entity.OP_CLASS

    for term, message in (
        (Nameless(), "Nameless has no name"),
        (Idle(), "term 'idle': a LocalTerm must define seconds"),
        (Again(), "two terms have the name 'offload'"),
        (Everywhere(), "a term of an op class must be a LocalTerm"),
        (Later(), "a term of a pair of uses may define only memory"),
    ):
        with pytest.raises(ValueError, match=message):
            check((*DEFAULT_TERMS, *TOYS, term))
