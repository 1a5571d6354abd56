"""Pricing by parts that are priced once is pricing."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toast.cost.memo
from tests.helpers import after_each, analyzed, refinements
from toast.cost import CostModel, Memo
from toast.cost.memo import _GOLDEN, GrowingArray, _Numbers
from toast.evaluation.optimum import random_legal
from toast.hardware import Mesh, load
from toast.space import Action, Constraints, Scope, Space, States

PROGRAMS = [
    ("t2b-tiny", {}),
    ("t2b-scan", {"small": True}),
    ("gns", {"small": True}),
    ("unet", {"small": True}),
    ("moe", {"small": True}),
    ("mlp", {}),
]


def changes(space: Space, random: np.random.Generator) -> list[Action]:
    """Of colors, of their parts and of single op classes."""
    single = refinements(space, Scope.CLASS, *random.permutation(len(space.initial))[:20].tolist())
    parts = refinements(space, Scope.COLOR)
    return [*space.actions, *(parts[i] for i in random.permutation(len(parts))[:40]), *single]


def near_ones(space: Space, state: States, random: np.random.Generator) -> States:
    """States that one or two changes make of a state, and the state itself."""
    offered = changes(space, random)
    once = after_each(space, state, offered)
    twice = np.concatenate([after_each(space, s, offered[-30:]) for s in once[-30::10]])
    return np.concatenate([state[None], once, twice])


@pytest.mark.parametrize("hardware", ["tpu-v5e", "a100"])
@pytest.mark.parametrize(
    ("name", "options", "overlap"),
    [*((*program, "partial") for program in PROGRAMS), ("mlp", {}, "none"), ("mlp", {}, "full")],
)
def test_by_parts(name: str, options: dict[str, int], overlap: str, hardware: str) -> None:
    """Of states that sum, gather, trade places and keep copies, on two and three axes."""
    random = np.random.default_rng(0)
    for mesh in ("a=2,b=2", "a=2,b=2,c=2", *["a=2,b=1,c=2,d=2,e=1,f=1"] * (name == "mlp")):
        space = Space(analyzed(name, **options), Mesh.parse(mesh), min_dimensions=0)
        model = CostModel(space, load(hardware), overlap=overlap)  # type: ignore[arg-type]
        memo = Memo(model)
        for state in (space.initial, *random_legal(space, 1, random)):
            batch = near_ones(space, state, random)
            whole, found = model.price(batch), memo.price(batch)
            np.testing.assert_allclose(found.seconds, whole.seconds, rtol=1e-12)
            np.testing.assert_allclose(found.peak_bytes, whole.peak_bytes, rtol=1e-12)


@pytest.fixture(scope="module")
def several() -> tuple[CostModel, States]:
    space = Space(analyzed("t2b-scan", small=True), Mesh.parse("a=2,b=2"))
    random = np.random.default_rng(1)
    (state,) = random_legal(space, 1, random)
    return CostModel(space, load("tpu-v5e")), near_ones(space, state, random)


def test_prices_do_not_depend_on_what_was_priced_before(several: tuple[CostModel, States]) -> None:
    model, batch = several
    at_once, memo = Memo(model).price(batch), Memo(model)
    order = np.random.default_rng(2).permutation(len(batch))
    for part in np.array_split(order, 7):
        found = memo.price(batch[part])
        np.testing.assert_array_equal(found.seconds, at_once.seconds[part])
        np.testing.assert_array_equal(found.peak_bytes, at_once.peak_bytes[part])


@pytest.mark.parametrize("call", range(8))
def test_an_interrupt_amid_what_it_learns_leaves_it_whole(
    several: tuple[CostModel, States], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = several
    memo, append, calls = Memo(model), GrowingArray.append, itertools.count()

    def interrupted(rows: GrowingArray, new: npt.NDArray[np.generic]) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        append(rows, new)

    with monkeypatch.context() as patched:
        patched.setattr(GrowingArray, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memo.price(batch)
    np.testing.assert_array_equal(memo.price(batch).seconds, Memo(model).price(batch).seconds)


def test_what_is_forgotten_is_priced_again(
    several: tuple[CostModel, States], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = several
    memo = Memo(model)
    before = memo.price(batch)
    monkeypatch.setattr(toast.cost.memo, "_MOST", 10)
    again = memo.price(batch)
    np.testing.assert_array_equal(again.seconds, before.seconds)
    np.testing.assert_array_equal(again.peak_bytes, before.peak_bytes)


def test_an_order_that_pins_ask_for_is_kept() -> None:
    pinned = Constraints(pin={"x": "P(('b', 'a'), None)"})
    space = Space(analyzed("mlp"), Mesh.parse("a=2,b=2"), constraints=pinned)
    assert space.major is not None
    model, random = CostModel(space, load("tpu-v5e")), np.random.default_rng(3)
    batch = near_ones(space, space.initial, random)
    np.testing.assert_allclose(
        Memo(model).price(batch).seconds, model.price(batch).seconds, rtol=1e-12
    )


def test_a_mesh_of_one_device() -> None:
    space = Space(analyzed("mlp"), Mesh.parse("a=1"))
    model = CostModel(space, load("tpu-v5e"))
    found = Memo(model).price(space.initial[None])
    assert found.seconds[0] == pytest.approx(model.initial_seconds)
    assert found.peak_bytes[0] == pytest.approx(model.initial_peak)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True), max_size=8))
def test_keys_have_numbers(batches: list[list[int]]) -> None:
    """Also those that fall on one slot of the table."""
    numbers, known = _Numbers(), {}
    inverse = pow(int(_GOLDEN), -1, 1 << 64)
    together = [(number * inverse + (1 << 63)) % (1 << 64) - (1 << 63) for number in range(500)]
    for batch in (*batches, together):
        keys = np.array(batch, dtype=np.int64)
        expected = [known.get(key, -1) for key in batch]
        assert numbers.of(keys).tolist() == expected
        new = [key for key in batch if key not in known]
        found = numbers.add(np.array(new, dtype=np.int64))
        known.update(zip(new, found.tolist(), strict=True))
    assert sorted(known.values()) == [*range(len(known))]
    assert numbers.of(np.array([*known], dtype=np.int64)).tolist() == [*known.values()]
