"""The zoo's language models in the forms in which people train and serve them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.errors import TargetError
from toast.evaluation.baselines import manual
from toast.models import ZOO, Model, build, decoder, language_models
from toast.models.decoder import DecoderConfig, Kind
from toast.models.experts import Routing, capacity_of, expert_layer, route
from toast.models.layers import cross_entropy, materialised_loss, vocabulary_loss
from toast.models.optimizers import adam, adamw
from toast.models.parameters import initial

#: Parameters as published.  Those of Gemma 3 are without its vision encoder.
PUBLISHED = {
    "llama3.1-8b": 8.03e9, "llama3.1-70b": 70.55e9, "llama3.1-405b": 405.85e9, "llama2-7b": 6.74e9,
    "mistral-7b": 7.24e9, "qwen3-8b": 8.19e9, "qwen3-30b-a3b": 30.5e9, "mixtral-8x7b": 46.7e9,
    "deepseek-v2-lite": 15.7e9, "deepseek-v3": 671e9, "gemma3-4b": 3.884e9,
    "gemma3-12b": 11.771e9, "gemma3-27b": 27.016e9,
}  # fmt: skip

#: Models with all the parts of the decoder.
PARTS = ("llama3.1-8b", "gemma3-4b", "mixtral-8x7b", "deepseek-v3")

#: Compiled quickly rather than well: these programs run for an instant.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled(model: Model) -> Callable[..., Any]:
    return jax.jit(model.function, compiler_options=QUICKLY)


def tokens_of(model: Model) -> jax.Array:
    shape = model.arguments[-1].shape
    return jnp.asarray(np.random.default_rng(0).integers(0, 16, shape), jnp.int32)


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


@pytest.mark.parametrize("name", language_models.ENTRIES)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert build(name).parameter_count == pytest.approx(PUBLISHED[name], rel=0.002)
    assert build(name, unroll=1).parameter_count == build(name).parameter_count


def test_layers_are_in_scans() -> None:
    assert language_models.LLAMA31_8B.segments == ((32, (Kind(0, False),)),)
    local, everywhere = Kind(1024, False), Kind(0, False)
    cycle = (*(local,) * 5, everywhere)
    assert language_models.GEMMA3_4B.segments == ((5, cycle), (1, (local,) * 4))
    dense, experts = Kind(0, False), Kind(0, True)
    assert language_models.DEEPSEEK_V3.segments == ((3, (dense,)), (58, (experts,)))
    unrolled = dataclasses.replace(language_models.GEMMA3_4B, unroll=1)
    assert unrolled.segments == ((1, language_models.GEMMA3_4B.kinds),)


@pytest.mark.parametrize("name", PARTS)
def test_small_forms_learn(name: str) -> None:
    model = build(name, small=True)
    step, tokens = compiled(model), tokens_of(model)
    params, moments = initial(model.arguments[0], 0), zeros(model.arguments[1])
    count, losses = jnp.int32(0), []
    for _ in range(3):
        params, moments, count, loss = step(params, moments, count, tokens, tokens)
        losses.append(float(loss))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, moments)))
    assert losses[0] > losses[1] > losses[2]


def unrolled(segments: list[list[Any]], counts: list[int]) -> list[Any]:
    """Layers of segments one by one; ``counts`` are their repetitions."""
    layers = []
    for segment, times in zip(segments, counts, strict=True):
        for turn in range(times):
            take = functools.partial(jax.tree.map, lambda x, turn=turn: x[turn])
            layers += [take(layer) if times > 1 else layer for layer in segment]
    return layers


@pytest.mark.parametrize(
    ("config", "remat"),
    [
        (language_models.GEMMA3_4B, "none"),
        (language_models.DEEPSEEK_V2_LITE, "full"),
        (language_models.LLAMA31_8B, "gate+attention"),
    ],
)
def test_scans_and_recomputation_do_not_change_the_loss(config: DecoderConfig, remat: str) -> None:
    config = language_models.tiny(config)
    counts = [times for times, _ in config.segments]
    assert max(counts) > 1
    params = initial(decoder.parameter_shapes(config), 0)
    tokens = tokens_of(decoder.model(config, "tiny"))
    layers = [unrolled(params["layers"], counts)]
    other = dataclasses.replace(config, unroll=1, remat=remat)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), {**params, "layers": layers})
    expected = jax.tree.map(lambda s: (s.shape, s.dtype), decoder.parameter_shapes(other))
    assert shapes == expected
    results = []
    for form, given in ((config, params), (other, {**params, "layers": layers})):

        def loss(embedding: jax.Array, form: Any = form, given: Any = given) -> jax.Array:
            return decoder.loss(form, {**given, "embedding": embedding}, tokens, tokens)

        step = jax.jit(jax.value_and_grad(loss), compiler_options=QUICKLY)
        results.append(step(params["embedding"]))
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PARTS)
def test_a_prompt_and_single_tokens_give_the_same_logits(name: str) -> None:
    """And fill the pages with the same keys and values, in any order of the pages."""
    whole, single = (build(name, small=True, step=step) for step in ("prefill", "decode"))
    params, tokens, empty = (
        initial(whole.arguments[0], 0), tokens_of(whole), zeros(whole.arguments[1])
    )  # fmt: skip
    batch, pages = whole.arguments[2].shape
    order = np.random.default_rng(1).permutation(batch * pages)
    table = jnp.asarray(order.reshape(batch, pages), jnp.int32)
    start = jnp.zeros(batch, jnp.int32)
    logits, filled = compiled(whole)(params, empty, table, start, tokens)
    step, cache = compiled(single), empty
    for place in range(tokens.shape[1]):
        last, cache = step(params, cache, table, start + place, tokens[:, place : place + 1])
    np.testing.assert_allclose(last, logits, rtol=1e-3, atol=1e-5)
    for one, two in zip(jax.tree.leaves(cache), jax.tree.leaves(filled), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("step", ["prefill", "decode"])
@pytest.mark.parametrize("name", PARTS)
def test_serving_forms_are_analysed(name: str, step: str) -> None:
    analysis = toast.analyze(build(name, small=True, step=step))
    assert [analysis.program.describe(op) for op in analysis.without_rule] == []
    assert analysis.counts()["inconsistent_conflicts"] == 0


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_a_loss_in_parts_is_the_loss(parts: int) -> None:
    random = np.random.default_rng(0)
    x, output = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((2, 8, 4), (4, 10)))
    targets = jnp.asarray(random.integers(0, 10, (2, 8)), jnp.int32)

    def whole(x: jax.Array, output: jax.Array) -> jax.Array:
        return cross_entropy(x @ output, targets)

    def split(x: jax.Array, output: jax.Array) -> jax.Array:
        return vocabulary_loss(x, output, targets, parts)

    expected = jax.value_and_grad(whole, (0, 1))(x, output)
    actual = jax.value_and_grad(split, (0, 1))(x, output)
    for one, two in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_a_materialised_loss_is_the_loss() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 16, 8))
    output = jax.random.normal(jax.random.key(1), (8, 32))
    targets = jnp.arange(64).reshape(4, 16) % 32
    expected, actual = (
        jax.value_and_grad(loss, argnums=(0, 1))(x, output, targets)
        for loss in (lambda *args: vocabulary_loss(*args, 1), materialised_loss)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, actual, expected)


def test_a_materialised_loss_has_three_large_values_in_memory() -> None:
    """The logarithms of the probabilities, and two gradients, in float32."""
    model = build("llama3.1-8b", layers=2, batch=8, loss="materialised")
    plan = manual(
        toast.analyze(model), "fsdp=8", "h100", {"FSDP": ZOO["llama3.1-8b"].strategies["FSDP"]},
        memory_bytes=2.0**40,
    )  # fmt: skip
    logits = [
        buffer.bytes for buffer in plan.timeline.at_peak
        if plan.analysis.program.values[buffer.value].type.shape == (8, 8192, 128256)
    ]  # fmt: skip
    assert logits == [4 * 8192 * 128256] * 3


def test_gradients_in_float32_are_the_gradients() -> None:
    """Products in bfloat16 round each partial sum; float32 gradients are nearer to the true ones."""
    config = dataclasses.replace(
        language_models.tiny(language_models.LLAMA31_8B), precision="mixed", remat="names"
    )
    gradients = {}
    for name in ("compute", "f32"):
        model = decoder.model(dataclasses.replace(config, gradients=name), "tiny")
        params, moments = initial(model.arguments[0], 0), zeros(model.arguments[1])
        tokens = tokens_of(model)
        _, moments, _, _ = compiled(model)(params, moments, jnp.int32(0), tokens, tokens)
        gradients[name] = jax.tree.leaves(moments["first"])
    for one, other in zip(*gradients.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.1, atol=0.02 * float(np.abs(one).max()))


def test_gradients_in_float32_are_added_up_in_float32() -> None:
    moved = {}
    for name in ("compute", "f32"):
        model = build("llama3.1-8b", layers=2, batch=8, gradients=name)
        plan = manual(
            toast.analyze(model), "fsdp=8", "h100",
            {"FSDP": ZOO["llama3.1-8b"].strategies["FSDP"]}, memory_bytes=2.0**40,
        )  # fmt: skip
        moved[name] = sum(c.bytes for c in plan.after.collectives if c.kind == "reduce_scatter")
    layers = 2 * 218.1e6 / 8  # parameters of a device
    assert moved["f32"] - moved["compute"] == pytest.approx(2 * layers, rel=0.01)


def test_gradients_are_clipped_by_their_global_norm() -> None:
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    moments = {"first": zeros(params), "second": zeros(params)}
    gradients = jax.tree.map(lambda p: 3.0 * p, params)  # of norm 3 * sqrt(7)
    clipped = jax.tree.map(lambda g: g / (3.0 * 7.0**0.5), gradients)
    _, actual, _ = adamw(params, moments, jnp.int32(0), gradients, 0.1, decay=0.0)
    _, expected, _ = adam(params, moments, jnp.int32(0), clipped, 0.1)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), actual, expected)
    decayed, _, _ = adamw(params, moments, jnp.int32(0), zeros(params), 0.1, decay=0.5)
    np.testing.assert_allclose(decayed["a"], 0.95 * np.ones(3), rtol=1e-6)


@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_an_expert_takes_the_first_tokens(capacity: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 8, 6)).astype(np.float32)
    layer = {
        "expert_gate": random.normal(size=(4, 6, 5)), "expert_up": random.normal(size=(4, 6, 5)),
        "expert_down": random.normal(size=(4, 5, 6)),
    }  # fmt: skip
    routing = route(jnp.asarray(x), jnp.asarray(random.normal(size=(6, 4)), jnp.float32), 2)
    assert isinstance(routing, Routing)
    np.testing.assert_allclose(np.sum(routing.weight, axis=-1), 1.0, rtol=1e-5)
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in layer.items()}
    actual = expert_layer(weights, jnp.asarray(x), routing, capacity)
    expected = np.zeros_like(x)
    for group in range(2):
        taken = np.zeros(4, int)
        for token in range(8):
            for expert, weight in zip(
                routing.expert[group, token], routing.weight[group, token], strict=True
            ):
                if taken[expert] < capacity:
                    gate = x[group, token] @ layer["expert_gate"][expert]
                    hidden = (
                        gate / (1 + np.exp(-gate)) * (x[group, token] @ layer["expert_up"][expert])
                    )
                    expected[group, token] += weight * (hidden @ layer["expert_down"][expert])
                taken[expert] += 1
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


def test_capacity() -> None:
    assert capacity_of(4096, 8, 2, 1.25) == 1280
    assert capacity_of(16, 8, 2, 4.0) == 16
    assert capacity_of(16, 8, 2, 100.0) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "serve"}, "step serve: use train, prefill or decode"),
        ({"precision": "int8"}, "precision int8: use one of mixed, bf16, f32"),
        ({"remat": "quary"}, "remat quary: no value is named 'quary'; use none, full, names, or"),
        ({"offload": "q"}, "offload q: no value is named 'q'; use names of layer_input, query"),
        ({"remat": "query", "offload": "query+key"}, "query is in remat and in offload"),
        ({"remat": "none", "offload": "key"}, "offload needs remat: full, names"),
        ({"gradients": "bf16"}, "gradients bf16: use compute or f32"),
        ({"loss": "eager"}, "loss eager: use fused or materialised"),
        ({"sequence": 100}, "sequence 100: not a multiple of the 8 parts of the loss"),
        ({"sequence": 100, "step": "decode"}, "sequence 100: not a multiple of the 64 tokens"),
        ({"unroll": "yes"}, "unroll 'yes': expected a number"),
        ({"remat": 3}, "remat 3: expected a text"),
        ({"layers": 0}, "layers 0: must be at least 1"),
        ({"edges": 3}, "model llama3.1-8b has no option edges"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    def trace() -> None:
        model = build("llama3.1-8b", **options)
        jax.eval_shape(model.function, *model.arguments)

    with pytest.raises(TargetError, match=message):
        trace()


#: Training configurations as they are published, in the zoo's options.
CONFIGURATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama3.1-8b", {
        "batch": 24, "remat": "full", "offload": "layer_input+query+key+value+attention_output",
    }),
    ("mixtral-8x7b", {
        "batch": 3072, "sequence": 4096, "remat": "full",
        "offload": "layer_input+query+key+value+attention_output",
    }),
    ("gemma3-12b", {
        "batch": 256, "sequence": 32768, "remat": "layer_input", "loss_parts": 16,
    }),
    ("llama3.1-8b", {"batch": 16, "remat": "query+value+attention+gate", "loss": "materialised"}),
    ("llama2-7b", {"batch": 16, "sequence": 4096, "unroll": 1, "remat": "attention"}),
    ("deepseek-v2-lite", {"batch": 96, "sequence": 2048}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CONFIGURATIONS)
def test_published_configurations_can_be_said(name: str, options: dict[str, Any]) -> None:
    model = build(name, **{"layers": 6, **options})
    assert model.arguments[3].shape[0] == options["batch"]
    jax.eval_shape(model.function, *model.arguments)


def test_the_default_policy_keeps_named_values() -> None:
    """What the backward pass of a scan gets of each layer, beside its weights."""
    model = build("llama3.1-8b", layers=3)

    def stacks(remat: str) -> set[tuple[int, ...]]:
        program = toast.analyze(build("llama3.1-8b", layers=3, remat=remat)).program
        first = {
            value.type.shape for value in program.values
            if program.kind(value.op) == "dynamic_update_slice" and value.type.dtype == "bf16"
        }  # fmt: skip
        return {shape for shape in first if shape[:2] == (3, model.arguments[3].shape[0])}

    batch, sequence = model.arguments[3].shape
    layer_input = (3, batch, sequence, 4096)
    heads, keys = (3, batch, sequence, 8, 4, 128), (3, batch, sequence, 8, 128)
    gate = (3, batch, sequence, 14336)
    assert stacks("full") == {layer_input}
    assert stacks("names") == {layer_input, heads, keys}
    assert stacks("gate") == {layer_input, gate}
    assert {layer_input, heads, keys, gate} <= stacks("none")
