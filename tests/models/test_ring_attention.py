"""Attention of split sequences: keys that XLA gathers, and keys that go around a ring."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import toast
from tests.helpers import f32
from toast.apply import collectives_in
from toast.apply.verify import verify
from toast.cost import CostModel
from toast.errors import TargetError
from toast.evaluation.baselines import manual_states
from toast.hardware import Mesh, load
from toast.models import build
from toast.models.attention import attention
from toast.models.ring_attention import ring_attention
from toast.plan.shard import shardings_of
from toast.search import TreeSearch
from toast.space import Space

MESH = AbstractMesh((4,), ("ring",), axis_types=(AxisType.Auto,))
#: Two sequences of 64 tokens, 2 groups of 3 heads of 8.
QUERY, KEY = f32(2, 64, 2, 3, 8), f32(2, 64, 2, 8)
#: Bytes of the part of the keys that one of four devices has.
PART = 2 * 64 * 2 * 8 * 4 / 4


def gradients(attend: Any, query: Any, key: Any, value: Any, weights: Any) -> Any:
    def loss(*arguments: jax.Array) -> jax.Array:
        return jnp.sum(attend(*arguments) * weights)

    return jax.grad(loss, (0, 1, 2))(query, key, value)


in_ring = functools.partial(ring_attention, mesh=MESH, axis="ring")


@functools.cache
def planned() -> toast.Plan:
    return toast.plan(
        functools.partial(gradients, in_ring), QUERY, KEY, KEY, QUERY, mesh="ring=4,x=2",
        hardware="tpu-v5e", settings=toast.Settings(rounds=1), stages=(TreeSearch(effort=16),),
    )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_computes_attention_and_its_gradients(causal: bool) -> None:
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    random = np.random.default_rng(0)
    arguments = [
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((2, 32, 2, 3, 8), (2, 32, 2, 8), (2, 32, 2, 4))
    ]

    def loss(attend: Any, *arguments: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend(*arguments, causal=causal)))

    ring = functools.partial(ring_attention, mesh=mesh, axis="ring")
    actual, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2)))(*arguments)
        for attend in (ring, attention)
    )
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_the_collectives_of_a_ring_are_those_that_run() -> None:
    """Forwards, keys and values go to three other devices; backwards their gradients go home, too."""
    plan = planned()
    predicted = [(c.kind, c.count, c.bytes) for c in plan.after.collectives if c.count]
    permutes = 2 * 3 + 2 * 3 + 2 * 4
    # The other axis halves the batch, or the groups of heads.
    assert predicted == [("collective_permute", permutes, permutes * PART / 2)]
    assert collectives_in(plan.jit().compiled_text()) == {"collective_permute": permutes}
    assert plan.verify().equal


def test_a_device_of_a_ring_computes_its_queries_and_all_keys_before_them() -> None:
    """All devices run as long as the last one, which sees all parts, its own one causally."""
    analysis = planned().analysis
    program = analysis.program
    flops = [
        sum(c.amount for c in analysis.rules[op.signature].costs if c.quantity == "flops")
        for op in program.ops
        if program.signatures[op.signature].kind == "composite"
    ]
    pairs = 2 * 16 * 16 * 2 * 3
    forward, backward = 2 * pairs * 16, 2 * pairs * (3 * 8 + 2 * 8)
    assert flops == [forward / 2, *[forward] * 3, backward / 2, *[backward] * 3]


def test_xla_gathers_the_keys_of_split_queries() -> None:
    """Where sequences are split without a ring: a device gathers keys and values, and the gradients
    of these are sums."""
    analysis = toast.analyze(functools.partial(gradients, attention), QUERY, KEY, KEY, QUERY)
    model = CostModel(Space(analysis, Mesh.parse("x=4")), load("tpu-v5e"))
    names = ("query", "key", "value", "weights")
    strategy = {"sequence": [(name, 1, "all") for name in names]}
    (state,) = dict(manual_states(model, strategy)).values()
    kinds = ("all_gather", "reduce_scatter")
    assert dict(model.reshards(state)) == {(kind, ("x",), 4 * PART): 2 for kind in kinds}
    verified = verify(analysis.program, shardings_of(model, state))
    assert verified.equal
    assert verified.collectives["all_gather"] == 2
    assert "collective_permute" not in verified.collectives


def test_a_decoder_may_have_a_ring() -> None:
    """Its program has the permutes of every global layer, which are two of five."""
    plain, ring = (build("gemma3-4b", small=True, ring=devices) for devices in (1, 4))
    assert plain.arguments == ring.arguments
    counts = []
    for model in (plain, ring):
        program = toast.analyze(model).program
        counts.append(
            sum(program.kind(op) == "collective_permute" for op in range(len(program.ops)))
        )
    assert counts[0] == 0
    assert counts[1] > 0


@pytest.mark.parametrize("options", [{"ring": 3}, {"ring": 4, "step": "decode"}])
def test_a_ring_divides_a_sequence(options: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match="use a divisor of the sequence of 16 tokens, in step="):
        build("llama3.1-8b", small=True, **options)
