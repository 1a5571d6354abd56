"""The memory policy of a plan for ``jax.checkpoint``."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import toast
from toast.errors import PlanError
from toast.frontend.residual_names import PRODUCTS
from toast.plan.jax_policy import jax_policy
from toast.program import Block, MemoryPolicy, Residual, TracedMemory
from toast.program.memory_policy import ResidualKind

TYPES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 16), (16, 32), (32, 16))]


def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = jnp.sin(checkpoint_name(x @ up, "hidden"))
    gate = checkpoint_name(jnp.tanh(hidden), "gate")
    return x + jnp.cos(gate @ down)


@functools.cache
def memory(remat: str) -> TracedMemory:
    block = toast.checkpoint(layer)

    def gradient(x: Any, up: Any, down: Any) -> Any:
        return jax.grad(lambda x: block(block(x, up, down), up, down).sum())(x)

    found = toast.analyze(gradient, *TYPES, remat=remat).program.memory
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("remat", "saved"),
    [
        ("layer: keep=hidden", ["f32[64,32]"]),
        ("layer: keep=hidden,gate", ["f32[64,32]", "f32[64,32]"]),
        ("layer: keep=@product", ["f32[64,16]", "f32[64,32]"]),
        ("full", []),
    ],
)
def test_a_function_without_toast_saves_the_same(
    remat: str, saved: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    again = jax.checkpoint(layer, policy=jax_policy(memory(remat)))
    given = [
        jax.random.normal(jax.random.key(n), t.shape) * 0.2 for n, t in enumerate(TYPES)
    ]  # fmt: skip
    gradients = [
        jax.grad(lambda *a, f=f: f(*a).sum(), argnums=(0, 1, 2))(*given) for f in (again, layer)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *gradients)
    print_saved_residuals(again, *given)
    lines = capsys.readouterr().out.splitlines()
    kept = [line for line in lines if "from the argument" not in line and "constant" not in line]
    shown = [re.findall(r"f(?:loat)?32\[[\d,]*\]", line)[0] for line in kept]
    assert sorted(text.replace("float", "f") for text in shown) == saved


def test_everything_may_be_kept() -> None:
    assert jax_policy(memory("none"), "layer") is jax.checkpoint_policies.everything_saveable


@pytest.mark.parametrize(
    ("remat", "block", "message"),
    [
        (
            "layer[:1]: recompute=*; layer[1:]: keep=hidden", "",
            "layers decide differently (layer[:1], layer[1:]), and a jax.checkpoint has one policy",
        ),
        ("full", "head", "no block is named head; use layer"),
        (
            "layer: keep=layer.dot_general", "",
            "layer: layer.dot_general has no name in the program, by which a policy of JAX could",
        ),
    ],
)  # fmt: skip
def test_what_no_policy_of_jax_says_is_an_error(remat: str, block: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        jax_policy(memory(remat), block)
    assert str(error.value).startswith(message)


def test_ranges_and_blocks_are_named() -> None:
    by_layer = memory("layer[:1]: recompute=*; layer[1:]: keep=hidden")
    assert callable(jax_policy(by_layer, "layer[1:]"))
    with pytest.raises(PlanError, match="the plan has no memory policy"):
        jax_policy(TracedMemory())
    blocks = tuple(dataclasses.replace(by_layer.blocks[0], name=name) for name in ("a", "b"))
    apart = TracedMemory(MemoryPolicy.parse("a: keep=hidden; b: recompute=*"), 1, blocks)
    with pytest.raises(PlanError, match=r"blocks decide differently \(a, b\); name one of them"):
        jax_policy(apart)
    assert callable(jax_policy(apart, "b"))


def test_a_program_without_blocks_has_no_such_policy() -> None:
    def gradient(w: Any, x: Any) -> Any:
        again = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w))
        return jax.grad(lambda w: again(w, x).sum())(w)

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    found = toast.analyze(gradient, square, square, remat="none").program.memory
    assert found is not None
    with pytest.raises(PlanError) as error:
        jax_policy(found)
    assert re.fullmatch(
        r"the plan has a memory policy, but no block that it decides about \(<lambda> at "
        r"test_jax_policy\.py:\d+ has a jax\.checkpoint of its own, which the plan leaves as it "
        r"is\); mark layers with toast\.checkpoint instead of jax\.checkpoint, and plan again",
        str(error.value),
    )
    with pytest.raises(PlanError, match="but no block that it decides about; mark layers with"):
        jax_policy(dataclasses.replace(found, own=()), "layer")


def residual(name: str, kind: ResidualKind = "product", *, own: bool = False) -> Residual:
    return Residual(name, kind, ("f32[4]",), 16, own=own)


def test_blocks_with_other_values_may_decide_alike() -> None:
    """Names that are generated, and their order, make no other policy of JAX."""
    gate, key = residual("gate", "other", own=True), residual("key", "other", own=True)
    blocks = (
        Block(
            "enc", (residual("enc.dot"), gate, key, residual("enc.dot.2"), residual("exp", "other"))
        ),
        Block(
            "dec", (key, residual("dec.dot"), residual("dec.dot.2"), residual("x", "other"), gate)
        ),
    )
    policy = MemoryPolicy.parse("*: keep=@product,gate,key")
    assert callable(jax_policy(TracedMemory(policy, 1, blocks)))
    apart = MemoryPolicy.parse("enc: keep=@product,gate,key; dec: keep=@product,gate")
    with pytest.raises(PlanError, match=r"blocks decide differently \(enc, dec\)"):
        jax_policy(TracedMemory(apart, 1, blocks))


@pytest.mark.parametrize("primitive", sorted(PRODUCTS))
def test_products_of_all_kinds_are_kept(primitive: str) -> None:
    blocks = (Block("layer", (residual("layer.dot"), residual("exp", "other"))),)
    policy = jax_policy(TracedMemory(MemoryPolicy.parse("layer: keep=@product"), 1, blocks))
    name, numbers = types.SimpleNamespace(name=primitive), (((1,), (0,)), ((), ()))
    assert policy(name, dimension_numbers=numbers) is True
    if primitive == "dot_general":
        assert not policy(name, dimension_numbers=(((2,), (1,)), ((0,), (0,))))
