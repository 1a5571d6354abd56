"""Models and optimisers as users write them: flax.nnx, optax and equinox.

Each train step is analysed with no op left without a rule; and planned, run sharded and unsharded,
and compared.  The libraries are optional: what is not installed is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.assurance.test_interchange import compare
from tests.helpers import f32
from toast import api
from toast.apply import verify
from toast.hardware import Mesh, load

MESH = Mesh.parse("d=4,m=2")

#: A function with abstract arguments.
Traced = tuple[Callable[..., Any], tuple[Any, ...]]


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def check(function: Callable[..., Any], arguments: tuple[Any, ...], *, run: bool = True) -> None:
    program = api.program_of(function, *arguments)
    analysis = toast.analyze(program)
    assert [program.describe(op) for op in analysis.without_rule] == []
    assert compare(program) > 0  # our rules and Shardy's
    plan = toast.plan(
        analysis, mesh=MESH, hardware=api.small_scale(analysis, MESH, load("tpu-v5e")), uneven=0
    )
    assert plan.steps, "something can be sharded"
    if run:
        # Gradients of normalisations cancel, so that rounding weighs more.
        found = verify(program, plan.shardings, rtol=5e-5)
        assert found.equal, [o for o in found.outputs if not o.equal]


# -- flax.nnx ------------------------------------------------------------------------------------


def nnx_step(make: Callable[[Any, Any], Any], *inputs: Any, loss: Callable[..., Any]) -> Traced:
    nnx = pytest.importorskip("flax.nnx")
    model = make(nnx, nnx.Rngs(0))
    graph, state = nnx.split(model)

    def step(state: Any, *batch: Any) -> Any:
        model = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(lambda m: loss(m, *batch))(model)
        parameters = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients))
        return nnx.state(model), value

    return step, (abstract(state), *inputs)


def convnet(nnx: Any, rngs: Any) -> Any:
    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.first = nnx.Conv(4, 16, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.last = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.avg_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
            return self.last(self.dropout(nnx.relu(self.second(x)).mean((1, 2))))

    return Net()


def transformer_block(nnx: Any, rngs: Any) -> Any:
    class Block(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.embed = nnx.Embed(64, 32, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
            self.scale = nnx.RMSNorm(32, rngs=rngs)
            self.up = nnx.Linear(32, 64, rngs=rngs)
            self.down = nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
            x = x + self.down(nnx.gelu(self.up(self.scale(x))))
            return self.embed.attend(x)

    return Block()


def recurrent(nnx: Any, rngs: Any) -> Any:
    return nnx.RNN(nnx.LSTMCell(16, 32, rngs=rngs))


def squares(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


NNX = {
    "convnet": lambda: nnx_step(convnet, f32(8, 16, 16, 4), f32(8, 8), loss=squares),
    "transformer": lambda: nnx_step(transformer_block, tokens(8, 16), f32(8, 16, 64), loss=squares),
    "LSTM": lambda: nnx_step(recurrent, f32(8, 12, 16), f32(8, 12, 32), loss=squares),
}


@pytest.mark.parametrize("name", NNX)
def test_flax_modules(name: str) -> None:
    # Dropout's mask and running statistics are state like any other.
    check(*NNX[name]())


# -- optax ---------------------------------------------------------------------------------------


def optimisers(optax: Any) -> dict[str, Any]:
    return {
        "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
        "adam": optax.adam(1e-3),
        "adamw": optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
        ),
        "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
        "lion": optax.lion(1e-4),
        "lamb": optax.lamb(1e-3),
        "rmsprop": optax.rmsprop(1e-3, centered=True),
        "adagrad": optax.adagrad(1e-2),
        "yogi": optax.yogi(1e-3),
        "novograd": optax.novograd(1e-3),
        "muon": optax.contrib.muon(1e-3),
        "accumulated adam": optax.MultiSteps(optax.adam(1e-3), 2),
    }


OPTIMISERS = (
    "sgd", "adam", "adamw", "adafactor", "lion", "lamb", "rmsprop", "adagrad", "yogi", "novograd",
    "muon", "accumulated adam",
)  # fmt: skip


def mlp_loss(parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in parameters[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ parameters[-1]["w"] - y) ** 2)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optax_train_steps(name: str) -> None:
    optax = pytest.importorskip("optax")
    pytest.importorskip("optax.contrib")
    optimiser = optimisers(optax)[name]
    parameters = [
        {"w": jnp.zeros((16, 32)), "b": jnp.zeros(32)}, {"w": jnp.zeros((32, 32)), "b": jnp.zeros(32)},
        {"w": jnp.zeros((32, 8))},
    ]  # fmt: skip

    def step(parameters: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(mlp_loss)(parameters, x, y)
        updates, state = optimiser.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    # Random state is no state these optimisers can be in (a sign of a rounded difference may flip):
    # signs and orthogonalisations are analysed and planned, not run.
    run = name not in ("lion", "yogi", "muon")
    state = abstract(jax.eval_shape(optimiser.init, parameters))
    check(step, (abstract(parameters), state, f32(64, 16), f32(64, 8)), run=run)


# -- equinox -------------------------------------------------------------------------------------


def equinox_models(eqx: Any, key: jax.Array) -> dict[str, tuple[Any, Callable[..., Any], Any, Any]]:
    class Attention(eqx.Module):  # type: ignore[misc]
        inner: Any
        norm: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.vmap(self.norm)(x + self.inner(x, x, x))

    class Recurrent(eqx.Module):  # type: ignore[misc]
        cell: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            start = jnp.zeros(self.cell.hidden_size)
            return jax.lax.scan(lambda h, y: (self.cell(y, h),) * 2, start, x)[1]

    mlp = eqx.nn.MLP(16, 8, 32, 2, key=key)
    conv = eqx.nn.Sequential([
        eqx.nn.Conv2d(4, 16, 3, padding=1, key=key), eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.MaxPool2d(2, 2), eqx.nn.Conv2d(16, 8, 3, key=key),
    ])  # fmt: skip
    attention = Attention(eqx.nn.MultiheadAttention(4, 32, key=key), eqx.nn.LayerNorm(32))
    return {
        "MLP": (mlp, mlp, f32(64, 16), f32(64, 8)),
        "convolutions": (conv, conv, f32(8, 4, 16, 16), f32(8, 8, 6, 6)),
        "attention": (attention, attention, f32(8, 16, 32), f32(8, 16, 32)),
        "GRU": (Recurrent(eqx.nn.GRUCell(16, 32, key=key)),) * 2 + (f32(8, 12, 16), f32(8, 12, 32)),
    }


@pytest.mark.parametrize("name", ["MLP", "convolutions", "attention", "GRU"])
def test_equinox_train_steps(name: str) -> None:
    eqx = pytest.importorskip("equinox")
    model, _, x, y = equinox_models(eqx, jax.random.key(0))[name]
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def step(parameters: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(parameters: Any) -> jax.Array:
            return jnp.mean((jax.vmap(eqx.combine(parameters, static))(x) - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

    check(step, (abstract(parameters), x, y))
