"""The zoo's models of images, audio and states, in the forms in which people train them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.errors import TargetError
from toast.models import build
from toast.models.mamba import state_space
from toast.models.optimizers import momentum
from toast.models.parameters import initial

#: Parameters as published; those of Whisper are 1550M, rounded.
PUBLISHED = {
    "vit-l": 304e6, "vit-h": 632e6, "dit-xl": 675e6, "whisper-large": 1.5435e9,
    "mamba2-1.3b": 1.344e9, "resnet50": 25.557e6,
}  # fmt: skip

#: Compiled quickly rather than well: these programs run for an instant.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert build(name).parameter_count == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "vit-h"])
def test_small_forms_learn(name: str) -> None:
    model = build(name, small=True)
    random = np.random.default_rng(0)

    def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == jnp.int32:
            return jnp.asarray(random.integers(0, 16, shape.shape), jnp.int32)
        return jnp.asarray(random.random(shape.shape), jnp.float32)

    params = initial(model.arguments[0], 0)
    moments = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), model.arguments[1])
    batch, count, losses = [drawn(s) for s in model.arguments[3:]], jnp.int32(0), []
    step = jax.jit(model.function, compiler_options=QUICKLY)
    for _ in range(3):
        params, moments, count, loss = step(params, moments, count, *batch)
        losses.append(float(loss))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, moments)))
    assert losses[0] > losses[1] > losses[2]
    assert int(count) == 3


@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_chunks_of_a_state_space_are_a_recurrence(chunk: int) -> None:
    random = np.random.default_rng(0)
    batch, sequence, heads, size, width = 2, 12, 3, 4, 5
    x = random.normal(size=(batch, sequence, heads, size)).astype(np.float32)
    decay = -random.random((batch, sequence, heads)).astype(np.float32)
    b, c = random.normal(size=(2, batch, sequence, width)).astype(np.float32)
    state, expected = np.zeros((batch, heads, size, width)), np.zeros(x.shape)
    for place in range(sequence):
        added = x[:, place, :, :, None] * b[:, place, None, None]
        state = np.exp(decay[:, place])[..., None, None] * state + added
        expected[:, place] = np.einsum("bhpz,bz->bhp", state, c[:, place])
    actual = state_space(*map(jnp.asarray, (x, decay, b, c)), chunk)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_momentum() -> None:
    params, zeros = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    gradients = {"w": jnp.array([1.0, -1.0])}
    once = momentum(params, zeros, jnp.int32(0), gradients, 0.1)
    np.testing.assert_allclose(once[1]["w"], [1.0001, -0.9999], rtol=1e-6)
    np.testing.assert_allclose(once[0]["w"], [0.89999, 1.09999], rtol=1e-6)
    twice = momentum(*once, gradients, 0.1)
    np.testing.assert_allclose(twice[1]["w"], [1.90018, -1.89980], rtol=1e-5)
    assert int(twice[2]) == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba2-1.3b", {"sequence": 1000}, "sequence 1000: not a multiple of the 256 positions"),
        ("vit-l", {"remat": "gate"}, "no value is named 'gate'; use none, full, names, or names"),
        ("dit-xl", {"precision": "f64"}, "precision f64: use one of mixed, bf16, f32"),
        ("vit-l", {"image": 100}, "image 100: not a multiple of the 16 pixels of a patch"),
        ("resnet50", {"remat": "full"}, "model resnet50 has no option remat"),
    ],
)
def test_options_that_cannot_be_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    def trace() -> None:
        model = build(name, **options)
        jax.eval_shape(model.function, *model.arguments)

    with pytest.raises(TargetError, match=message):
        trace()


def inner_jaxprs(jaxpr: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of the equations of a jaxpr."""
    for eqn in jaxpr.eqns:
        for leaf in jax.tree.leaves([*eqn.params.values()]):
            if hasattr(leaf, "eqns"):
                yield leaf
            elif hasattr(leaf, "jaxpr"):
                yield leaf.jaxpr


def value_names(jaxpr: Any) -> set[str]:
    """The names of ``checkpoint_name`` in a jaxpr and its inner ones."""
    names = {eqn.params["name"] for eqn in jaxpr.eqns if eqn.primitive.name == "name"}
    return names.union(*map(value_names, inner_jaxprs(jaxpr)))


@pytest.mark.parametrize("name", [
    "llama3.1-8b", "gemma3-4b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "vit-l", "dit-xl",
    "whisper-large", "mamba2-1.3b",
])  # fmt: skip
def test_names_for_recomputation_are_those_of_the_models_own_values(name: str) -> None:
    model = build(name, small=True, remat="none")
    names = value_names(jax.make_jaxpr(model.function)(*model.arguments).jaxpr)
    other = build(name, small=True, remat="unknown")
    with pytest.raises(TargetError, match="no value is named 'unknown'") as error:
        jax.eval_shape(other.function, *other.arguments)
    listed = str(error.value).partition("or names of ")[2].removesuffix(", joined by +")
    assert {*listed.split(", ")} == names
    assert {"latent", "sent", "gate", "up"} & names == {
        "deepseek-v2-lite": {"latent", "sent", "gate", "up"}, "mixtral-8x7b": {"sent"},
        "qwen3-30b-a3b": {"sent"}, "mamba2-1.3b": {"gate"}, "vit-l": {"up"}, "dit-xl": {"up"},
        "whisper-large": {"up"},
    }.get(name, {"gate", "up"})  # fmt: skip


@pytest.mark.parametrize("options", [{"unroll": 1, "layers": 2}, {"remat": "none", "batch": 8}])
@pytest.mark.parametrize("name", ["vit-h", "dit-xl", "whisper-large", "mamba2-1.3b"])
def test_forms_are_traced(name: str, options: dict[str, Any]) -> None:
    model = build(name, small=True, **options)
    loss = jax.eval_shape(model.function, *model.arguments)[3]
    assert loss.shape == ()


def test_attention_of_an_encoder_is_not_causal() -> None:
    program = toast.analyze(build("whisper-large", small=True)).program
    causal = [
        program.signatures[op.signature].attribute("causal")
        for number, op in enumerate(program.ops)
        if program.kind(number) == "composite"
    ]
    # Forward and backward: the encoder's, the decoder's own, and that from decoder to encoder.
    assert sorted(map(bool, causal)) == [False] * 4 + [True] * 2
