"""Gradients of picked logits of which devices need a part, though they compute all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import action
from toast.cost import CostModel, Memo
from toast.cost.liveness import liveness, summed_selections
from toast.cost.terms import SlicedSelections
from toast.hardware import Mesh, load
from toast.space import Space, States

ROWS, WIDTH, VOCABULARY = 1024, 512, 32768


def step(form: str) -> Any:
    def loss(weight: Any, x: Any, labels: Any) -> Any:
        logits = x @ weight
        if form == "log_softmax":
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
            return -picked.mean()
        picked = jnp.take_along_axis(logits, labels[:, None], 1)
        return (jax.nn.logsumexp(logits, -1)[:, None] - picked).mean()

    return jax.value_and_grad(loss)


def model_of(form: str = "log_softmax") -> CostModel:
    arguments = (
        jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    )
    analysis = toast.analyze(step(form), *arguments, platform="tpu", cache=False)
    return CostModel(Space(analysis, Mesh.parse("d=8"), min_dimensions=0), load("tpu-v5e"))


def vocabulary_sharded(model: CostModel, *, whole: bool) -> States:
    """Every op has a part of the vocabulary, but that of the picked ones, if it is ``whole``."""
    space = model.space
    state = space.apply(space.initial, action(space, "weight", 1, "d"))
    if whole:
        kinds = space.analysis.program.kinds
        state = state.copy()
        state[space.classes.of_op[[*kinds].index("scatter")]] = -1
    return state


@pytest.mark.parametrize("whole", [False, True])
def test_a_sliced_selection_is_written_whole(whole: bool) -> None:
    model = model_of()
    state = vocabulary_sharded(model, whole=whole)
    layout = model.layout(state[None])
    written = SlicedSelections().bytes(layout)[0].sum()
    size = ROWS * VOCABULARY * 4 / model.hardware.allocator_efficiency
    assert written == pytest.approx(size * whole)
    seconds = SlicedSelections().seconds(layout)[0].sum()
    assert seconds == pytest.approx(written / model.hardware.memory_bytes_per_s)
    program = model.space.analysis.program
    kinds = [program.kind(program.makers[b.value]) for b in model.timeline(state).buffers]
    assert ("scatter" in kinds) == whole


def test_neighbourhoods_have_the_same_selections() -> None:
    model = model_of()
    states = np.stack([vocabulary_sharded(model, whole=whole) for whole in (False, True)])
    priced, alone = Memo(model).price(states), model.price(states)
    assert np.allclose(priced.seconds, alone.seconds)
    assert np.allclose(priced.peak_bytes, alone.peak_bytes)
    assert priced.peak_bytes[1] > 1.2 * priced.peak_bytes[0]


@pytest.mark.parametrize(("form", "summed"), [("log_softmax", True), ("logsumexp", False)])
def test_which_selections_a_kernel_sums(form: str, summed: bool) -> None:
    analysis = model_of(form).space.analysis
    live = liveness(analysis.program, analysis.names.use_op, analysis.names.use_value, lanes=128)
    selected = summed_selections(analysis.program, live)
    kinds = [analysis.program.kind(analysis.program.makers[v]) for v in selected.tolist()]
    assert kinds == ["scatter"] * summed
