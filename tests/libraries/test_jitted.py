"""Functions of ``flax.nnx.jit`` and ``equinox.filter_jit``, with their modules as arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.errors import PlanError, TargetError

MESH: dict[str, Any] = {"mesh": "data=4", "hardware": "tpu-v5e"}
X = jax.random.normal(jax.random.key(0), (128, 32))


def assert_same(actual: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        if hasattr(other, "shape"):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)
        else:
            assert one is other


def modules() -> tuple[Any, Any]:
    """A module with a normalisation, whose statistics change, and its optimiser."""
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    class Network(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.linear = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(64, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> Any:
            return self.norm(self.linear(x))

    network = Network()
    return network, nnx.Optimizer(network, optax.sgd(0.1), wrt=nnx.Param)


def in_place(network: Any, optimizer: Any, x: jax.Array) -> Any:
    from flax import nnx

    loss, gradient = nnx.value_and_grad(lambda network: ((network(x) - 1.0) ** 2).mean())(network)
    optimizer.update(network, gradient)
    return loss


def returning(network: Any, optimizer: Any, x: jax.Array) -> Any:
    return in_place(network, optimizer, x), network, optimizer


def test_updates_in_place_are_not_lost() -> None:
    pytest.importorskip("flax.nnx")
    with pytest.raises(TargetError, match=r"in_place: it updates \d+ arrays .* argument 0\.\w+"):
        toast.analyze(in_place, *modules(), X)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_updates_in_place_are_written_back(donate: tuple[int, ...], tree: bool) -> None:
    nnx = pytest.importorskip("flax.nnx")
    network, optimizer = modules()
    step = nnx.jit(in_place, donate_argnums=donate, **({"graph": False} if tree else {}))
    plan = toast.plan(step, network, optimizer, X, **MESH)
    program = plan.analysis.program
    assert bool(program.donated) == bool(donate)
    # The first result is that of the function; the others have the names of arguments.
    assert program.results[0] == "result"
    assert {*program.results[1:]} < {*program.arguments}
    run, kernel, expected = plan.jit(), network.linear.kernel, modules()
    for _ in range(3):
        loss = run(network, optimizer, X)
        assert_same((loss, network, optimizer), (in_place(*expected, X), *expected))
    assert network.linear.kernel is kernel
    if donate:  # else the plan may return another sharding
        assert kernel[...].sharding.spec == plan.in_shardings[0].linear.kernel.get_raw_value()
    assert "network.linear.kernel.value" in program.results


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_nnx_steps_that_return_their_modules(donate: tuple[int, ...]) -> None:
    nnx = pytest.importorskip("flax.nnx")
    network, optimizer = modules()
    plan = toast.plan(nnx.jit(returning, donate_argnums=donate), network, optimizer, X, **MESH)
    assert bool(plan.analysis.program.donated) == bool(donate)
    run, kind, kernel = plan.jit(), type(network), network.linear.kernel
    expected = modules()
    for _ in range(3):
        loss, network, optimizer = run(network, optimizer, X)
        wanted = in_place(*expected, X)
    assert_same((loss, network, optimizer), (wanted, *expected))
    assert isinstance(network, kind)
    assert network.linear.kernel is kernel
    assert plan.out_shardings[1].linear.kernel is not None


def tied() -> Any:
    """Modules that share a variable, and random state."""
    nnx = pytest.importorskip("flax.nnx")

    class Tied(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.embed = nnx.Embed(64, 32, rngs=nnx.Rngs(0))
            self.head, self.dropout = self.embed, nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, tokens: jax.Array) -> Any:
            return self.head.attend(self.dropout(self.embed(tokens)))

    return Tied()


def test_shared_variables_and_random_state() -> None:
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    tokens = jax.random.randint(jax.random.key(1), (64, 16), 0, 64)

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(*, model: Any, optimizer: Any, tokens: jax.Array) -> Any:
        loss, gradient = nnx.value_and_grad(lambda model: (model(tokens) ** 2).mean())(model)
        optimizer.update(model, gradient)
        return loss

    model, other = tied(), tied()
    one, two = (nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param) for m in (model, other))
    plan = toast.plan(step, model=model, optimizer=one, tokens=tokens, **MESH)
    names = plan.analysis.program.arguments
    assert [name for name in names if name.startswith("model.") and "embedding" in name] == [
        "model.embed.embedding.value"
    ]
    assert plan.analysis.program.donated
    run = plan.jit()
    for _ in range(3):
        loss = run(model=model, optimizer=one, tokens=tokens)
        wanted = step(model=other, optimizer=two, tokens=tokens)
        np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    assert model.head.embedding is model.embed.embedding
    assert int(model.dropout.rngs.count[...]) == 3
    untied = nnx.clone(model)
    untied.head = nnx.Embed(64, 32, rngs=nnx.Rngs(3))
    with pytest.raises(PlanError, match="were planned as one shared variable"):
        run(model=untied, optimizer=one, tokens=tokens)


def test_other_updates_in_place_are_refused() -> None:
    nnx = pytest.importorskip("flax.nnx")

    @nnx.jit
    def adding(network: Any, x: jax.Array) -> Any:
        network.sum = nnx.Param(x.sum())
        return network(x)

    @nnx.jit
    def replacing(network: Any, x: jax.Array) -> Any:
        network.scale = network.scale + 1
        return network(x)

    network, _ = modules()
    with pytest.raises(TargetError, match=r"adding: it adds, removes or replaces parts of its"):
        toast.analyze(adding, network, X)
    network.scale = nnx.data(jnp.ones(()))
    with pytest.raises(TargetError, match=r"replacing: it replaces the array argument 0\.scale in"):
        toast.analyze(replacing, network, X)


def test_static_arguments_of_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def scaled(network: Any, x: jax.Array, times: int) -> Any:
        return network.linear(x) * times

    network, _ = modules()
    plan = toast.plan(nnx.jit(scaled, static_argnums=2), network, X, 3, **MESH)
    assert_same(plan.jit()(network, X, 3), scaled(network, X, 3))
    with pytest.raises(PlanError, match="was planned with the static leaf"):
        plan.jit()(network, X, 4)
    plan = toast.plan(nnx.jit(scaled, static_argnames="times"), network, X, times=3, **MESH)
    assert_same(plan.jit()(network, X, times=3), scaled(network, X, 3))


def test_equinox_filter_jit() -> None:
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")
    adam = optax.adam(1e-2)
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))
    state = adam.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all-except-first")
    def step(x: jax.Array, model: Any, state: Any, scale: float) -> Any:
        def loss(model: Any) -> jax.Array:
            return jnp.mean((jax.vmap(model)(x) * scale) ** 2)

        value, gradient = eqx.filter_value_and_grad(loss)(model)
        updates, state = adam.update(gradient, state, eqx.filter(model, eqx.is_array))
        return value, eqx.apply_updates(model, updates), state

    plan = toast.plan(step, X, model, state, 3.0, **MESH)
    program = plan.analysis.program
    assert "model.layers[0].weight" in program.arguments
    assert 0 not in program.donated
    assert program.donated
    run = plan.jit()
    expected = jax.tree.map(lambda leaf: jnp.array(leaf) if eqx.is_array(leaf) else leaf,
                            (model, state))  # fmt: skip
    for _ in range(3):
        loss, model, state = run(X, model, state, 3.0)
        wanted, *expected = step(X, *expected, 3.0)
    assert_same((loss, model, state), (wanted, *expected))
    assert model.activation is expected[0].activation
    with pytest.raises(PlanError, match=r"= 3\.0, got 4\.0; make a new plan for it"):
        run(X, model, state, 4.0)


def test_methods_of_equinox_modules() -> None:
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):  # type: ignore[misc, name-defined]
        w: jax.Array

        @eqx.filter_jit
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w

        def plain(self, x: jax.Array) -> jax.Array:
            return x @ self.w

    layer, x = Layer(jnp.ones((64, 64))), jnp.ones((64, 64))
    for function in (layer, layer.__call__, layer.plain, eqx.filter_jit(layer.plain)):
        plan = toast.plan(function, x, mesh="data=4", hardware="tpu-v5e")
        np.testing.assert_allclose(plan.jit()(x), 64.0)


def test_a_module_that_a_step_closes_over_is_not_updated() -> None:
    nnx = pytest.importorskip("flax.nnx")
    count = nnx.Variable(jnp.zeros(()))

    def step(x: jax.Array) -> jax.Array:
        count[...] += 1
        return x

    with pytest.raises(TargetError, match="must take it as an argument"):
        toast.plan(step, jnp.ones(8), mesh="data=4", hardware="tpu-v5e")


def test_bound_arguments_of_nnx_functions_are_refused() -> None:
    """A trace with a bound module would leave the module without its attributes."""
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((8, 8)))

        @nnx.jit
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...]

    layer, x = Layer(), jnp.ones((8, 8))
    step = nnx.jit(lambda layer, x: layer(x))
    for bound in (
        layer,
        layer.__call__,
        functools.partial(step, layer),
        nnx.cached_partial(step, layer),
    ):
        with pytest.raises(TargetError, match=r"are bound .* with all its arguments"):
            toast.plan(bound, x, mesh="data=4", hardware="tpu-v5e")
    plan = toast.plan(Layer.__call__, layer, x, mesh="data=4", hardware="tpu-v5e")
    np.testing.assert_allclose(plan.jit()(layer, x), 8.0)
