"""``toast.jit`` of functions of ``flax.nnx.jit`` and ``equinox.filter_jit``, and of methods."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.libraries.test_jitted import X, assert_same, in_place, modules
from toast.errors import PlanError, PlanWarning, TargetError
from toast.plan.step_reshards import StepReshard, donation_text, returned_trees

V5E: dict[str, Any] = {
    "mesh": "data=4", "hardware": "tpu-v5e", "settings": toast.Settings(rounds=1),
}  # fmt: skip


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_a_step_of_nnx_updates_its_modules(donate: tuple[int, ...]) -> None:
    nnx = pytest.importorskip("flax.nnx")
    step = toast.jit(nnx.jit(in_place, donate_argnums=donate), **V5E)
    network, optimizer = modules()
    expected = modules()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if not donate else "error", PlanWarning)
        for _ in range(3):
            loss = step(network, optimizer, X)
            assert_same((loss, network, optimizer), (in_place(*expected, X), *expected))
    assert len(step._variants) == 1
    assert network.linear.kernel[...].sharding.mesh == step.mesh
    with pytest.warns(PlanWarning) as caught:
        step(network, optimizer, X[:64])
    assert "planned again" in str(caught[-1].message)


def test_updates_without_nnx_jit_are_not_lost() -> None:
    pytest.importorskip("flax.nnx")
    with pytest.raises(TargetError, match=r"in_place: it updates \d+ arrays"):
        toast.jit(in_place, **V5E)(*modules(), X)


@pytest.mark.filterwarnings("ignore:.*not donated")
def test_methods_of_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Counter(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((32, 64)))
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))

        @nnx.jit
        def plain(self, x: jax.Array) -> Any:
            self.count[...] += 1
            return x @ self.w[...]

        planned = toast.jit(plain, **V5E)

    model = Counter()
    for _ in range(2):
        assert_same(model.planned(X), X @ model.w[...])
        assert_same(toast.jit(model.plain, **V5E)(X), X @ model.w[...])
    assert int(model.count[...]) == 4


def test_initial_modules_of_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.linear = nnx.Linear(32, 64, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, deterministic=True)

        def __call__(self, x: jax.Array) -> Any:
            return self.dropout(self.linear(x))

    def build() -> Any:
        return Network(nnx.Rngs(0))

    @nnx.jit
    def apply(network: Any, x: jax.Array) -> Any:
        return network(x)

    function = toast.jit(apply, **V5E)
    plan = function.plan_for(build(), X)
    network = plan.init(build, function.mesh)
    assert_same(function(network, X), build()(X))
    assert network.linear.kernel[...].sharding.mesh == function.mesh


def equinox_step() -> tuple[Any, Any, Any]:
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")
    optimizer = optax.adam(1e-2)

    def build(key: jax.Array) -> Any:
        return eqx.nn.MLP(32, 8, 64, 2, key=key)

    def step(model: Any, state: Any, x: jax.Array) -> Any:
        def loss(model: Any) -> jax.Array:
            return ((jax.vmap(model)(x) - 1.0) ** 2).mean()

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    def begin(key: jax.Array) -> Any:
        model = build(key)
        return model, optimizer.init(eqx.filter(model, eqx.is_array))

    return step, begin, eqx


def test_a_step_of_equinox() -> None:
    step, begin, eqx = equinox_step()
    function = toast.jit(eqx.filter_jit(step, donate="all-except-first"), **V5E)
    own, other = begin(jax.random.key(0)), begin(jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        for _ in range(3):
            *own, value = function(*own, X + 0)
            *other, expected = step(*other, X)
            assert_same((value, own), (expected, other))
    assert len(function._variants) == 1
    with pytest.warns(PlanWarning, match=r"not donated.*use equinox\.filter_jit\(donate=\.\.\.\)"):
        toast.jit(eqx.filter_jit(step), **V5E).plan_for(*own, X)
    with pytest.raises(PlanError, match="has its own options; pass donate_argnums to the library"):
        toast.jit(eqx.filter_jit(step), donate_argnums=0)


def test_initial_modules_of_equinox() -> None:
    step, begin, eqx = equinox_step()
    function = toast.jit(eqx.filter_jit(step, donate="all"), **V5E)
    plan = function.plan_for(*begin(jax.random.key(1)), X)
    model, state = plan.init(begin, function.mesh, jax.random.key(1))
    kernel, expected = model.layers[0].weight, begin(jax.random.key(1))[0].layers[0].weight
    assert kernel.sharding.mesh == function.mesh
    assert model.activation is begin(jax.random.key(1))[0].activation
    assert (np.asarray(kernel) == np.asarray(expected)).all()
    types = plan.types_for(function.mesh)[0]
    assert types.activation is model.activation
    assert types.layers[0].weight.sharding == kernel.sharding
    placed = plan.place(begin(jax.random.key(1))[0], function.mesh)
    assert placed.layers[0].weight.sharding == kernel.sharding
    function(model, state, X + 0)


def test_a_module_with_parts_that_stay_is_updated_without_donation() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((32, 64)))
            self.table = nnx.Variable(jnp.ones((64, 4)))

        def __call__(self, x: jax.Array) -> Any:
            return x @ self.w[...] @ self.table[...]

    @nnx.jit
    def halve(network: Any, x: jax.Array) -> Any:
        network.w[...] *= 0.5
        return network(x)

    (tree,) = returned_trees(toast.analyze(halve, Network(), X))
    assert (tree.argument, tree.result, tree.position, len(tree.pairs)) == (
        "network", "network", 0, 1,
    )  # fmt: skip
    text = donation_text([StepReshard(tree, 0, 0.0, 0.0)], "donate_argnums=(0,)")
    assert text.startswith("network is updated in place but not donated, so old and new values")
