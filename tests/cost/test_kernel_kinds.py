"""Which products need no matrix unit, and how long they take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import toast
from toast.cost import CostModel, break_down
from toast.cost.kernel_kinds import kernel_kinds
from toast.hardware import Mesh, load
from toast.space import Space


def analyzed(form: str) -> toast.Analysis:
    arguments = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in SIZES[form]]
    return toast.analyze(
        lambda x, y: jnp.einsum(form, x, y), *arguments, platform="tpu", cache=False
    )


SIZES = {
    "blk,bln->blkn": ((512, 128, 64), (512, 128, 32)),
    "blk,blk->bl": ((512, 128, 64), (512, 128, 64)),
    "bk,bkn->bn": ((512, 128), (512, 128, 64)),
    "bmk,bkn->bmn": ((512, 128, 64), (512, 64, 32)),
    "k,k->": ((4096,), (4096,)),
}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("blk,bln->blkn", "multiply"), ("blk,blk->bl", "reduce"), ("bk,bkn->bn", "dot_general"),
        ("bmk,bkn->bmn", "dot_general"), ("k,k->", "dot_general"),
    ],
)  # fmt: skip
def test_products_without_a_sum_or_of_vectors_are_other_ops(form: str, kind: str) -> None:
    program = analyzed(form).program
    assert kind in kernel_kinds(program, 128)
    assert "dot_general" in kernel_kinds(program, 1), "only seen on TPUs"


@pytest.mark.parametrize("form", ["blk,bln->blkn", "blk,blk->bl"])
def test_they_take_as_long_as_memory_or_the_vector_unit(form: str) -> None:
    v5e = load("tpu-v5e")
    model = CostModel(Space(analyzed(form), Mesh.parse("data=4"), min_dimensions=0), v5e)
    parts = break_down(model, model.space.initial)
    assert parts.product_seconds.sum() == 0
    operands, result = 512 * 128 * (64 + 32), 512 * 128 * 64 * 32
    elements, moved = result, 2 * (operands + result)
    if form == "blk,blk->bl":
        elements, moved = 512 * 128 * 64, 2 * 512 * 128 * (2 * 64 + 1)
    by_unit = elements / v5e.vector_elements_per_s
    seconds = max(moved / v5e.memory_bytes_per_s, by_unit) + v5e.kernel_latency_s
    assert parts.memory_seconds.sum() == pytest.approx(seconds, rel=0.02)
