"""``toast.checkpoint`` and blocks that are found: names, policies, equal results."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import toast
from toast.api import program_of
from toast.errors import TargetError
from toast.frontend import memory_tracing
from toast.frontend.found_blocks import finding_blocks
from toast.frontend.memory_tracing import MemoryTrace
from toast.program import PRESETS, Block, MemoryPolicy, TracedMemory

LAYERS = 2


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def random(*shape: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(0), sum(shape))
    return jax.random.normal(key, shape) * 0.3


def stack() -> dict[str, jax.Array]:
    return {
        "wq": random(LAYERS, 8, 8), "wk": random(LAYERS, 8, 8), "up": random(LAYERS, 8, 12),
        "down": random(LAYERS, 12, 8),
    }  # fmt: skip


@jax.custom_vjp
def squashed(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


def squashed_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    result = jnp.tanh(x)
    return result, result


squashed.defvjp(squashed_forward, lambda result, g: (g * (1 - result**2),))


def layer(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """A layer with a kernel-like custom gradient, a custom rule, a jit and a scan inside."""
    query = checkpoint_name(x @ params["wq"], "query")
    key = x @ params["wk"]
    scores = jax.nn.softmax(query @ key.T)
    x = x + squashed(scores @ x)
    hidden = jax.jit(jax.nn.relu)(x @ params["up"])

    def twice(carried: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
        new = jnp.sin(carried * factor)
        return new, None

    hidden, _ = jax.lax.scan(twice, hidden, jnp.arange(1.0, 3.0))
    return x + hidden @ params["down"]


def scanned(layer: Callable[..., Any], x: jax.Array, params: Any) -> jax.Array:
    return jax.lax.scan(lambda x, one: (layer(x, one), None), x, params)[0]


def unrolled(layer: Callable[..., Any], x: jax.Array, params: Any) -> jax.Array:
    for number in range(LAYERS):
        x = layer(x, jax.tree.map(lambda leaf, number=number: leaf[number], params))
    return x


def losses() -> dict[str, Callable[..., jax.Array]]:
    def loss(run: Callable[..., Any], layer: Callable[..., Any], params: Any, x: Any) -> jax.Array:
        return jnp.sum(run(layer, x, params) ** 2)

    marked = toast.checkpoint(layer)
    jitted = toast.checkpoint(jax.jit(layer), name="layer")
    return {
        "marked scan": functools.partial(loss, scanned, marked),
        "marked layers": functools.partial(loss, unrolled, marked),
        "marked jit": functools.partial(loss, unrolled, jitted),
        "scan": functools.partial(loss, scanned, layer),
        "layers": functools.partial(loss, unrolled, layer),
    }


def traced(function: Callable[..., Any], policy: str, *arguments: Any) -> tuple[Any, TracedMemory]:
    trace = MemoryTrace(MemoryPolicy.parse(policy), None)
    with memory_tracing.tracing(trace), finding_blocks(trace):
        result = jax.jit(function).trace(*arguments)
    return result, trace.record("function")


def block_of(memory: TracedMemory) -> Block:
    (block,) = memory.blocks
    return block


def gradients_are_equal(form: str, policy: str) -> TracedMemory:
    """What was traced; fails if gradients differ from those without the policy."""
    step = jax.value_and_grad(losses()[form])
    params, x = stack(), random(6, 8)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(step)(params, x)
        trace, memory = traced(step, policy, params, x)
        result = trace.lower().compile()(params, x)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-4)
    jax.tree.map(close, result, expected)
    return memory


@pytest.mark.parametrize(
    ("form", "policy"),
    [
        *(("marked scan", p) for p in ("none", "named", "full", "minimal", "*: keep=scores,x*")),
        ("marked layers", "minimal"), ("marked jit", "full"), ("marked jit", "named"),
        ("scan", "none"), ("scan", "save_qkv_proj"), ("layers", "*: keep=x*"), ("layers", "named"),
    ],
)  # fmt: skip
def test_gradients_are_equal_under_every_policy(form: str, policy: str) -> None:
    memory = gradients_are_equal(form, policy)
    block = block_of(memory)
    assert block.runs == LAYERS
    assert {"query", "scores"} <= {*block.names}


#: The first layer recomputes all; the second keeps all, or what has a name.
BY_LAYERS = ("*[:1]: recompute=*; *[1:]: keep=*", "*[:1]: keep=query; *: keep=* recompute=@unnamed")


@pytest.mark.parametrize(
    ("form", "policy"),
    [
        ("marked scan", BY_LAYERS[1]), ("marked jit", BY_LAYERS[0]), ("scan", BY_LAYERS[0]),
        ("layers", BY_LAYERS[1]),
    ],
)  # fmt: skip
def test_layers_may_decide_differently(form: str, policy: str) -> None:
    memory = gradients_are_equal(form, policy)
    first, second = memory.blocks
    name = first.name.removesuffix("[:1]")
    assert (first.runs, second.runs, second.name) == (1, 1, f"{name}[1:]")
    assert memory.policy is not None
    assert "scores" in memory.policy.of(first.name).recompute
    assert "scores" in memory.policy.of(second.name).keep


@pytest.mark.parametrize("marked", [False, True])
def test_scans_from_the_end_are_cut_where_they_begin(marked: bool) -> None:
    """The first run is that of the last weights."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(x @ w)

    block = toast.checkpoint(layer) if marked else layer

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return block(x, w), x.sum()

        x, sums = jax.lax.scan(body, x, params, reverse=True)
        return (x**2).sum() + (sums * jnp.arange(3.0)).sum()

    params, x = random(3, 8, 8), random(6, 8)
    trace, memory = traced(jax.grad(loss), "*[:1]: recompute=*; *[1:]: keep=*", params, x)
    result = trace.lower().compile()(params, x)
    np.testing.assert_allclose(result, jax.grad(loss)(params, x), rtol=1e-4, atol=1e-5)
    lengths = [e.params["length"] for e in trace.jaxpr.eqns if e.primitive.name == "scan"]
    assert lengths == [1, 2, 2, 1]
    assert [block.runs for block in memory.blocks] == [1, 2]


def test_other_blocks_of_a_scan_that_is_cut() -> None:
    @toast.checkpoint
    def one(x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(x))

    @toast.checkpoint
    def other(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.cos(x @ w)

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (other(one(x), w), None), x, params)[0].sum()

    _, memory = traced(
        jax.grad(loss), "other[:1]: recompute=*; *: keep=*", random(3, 8, 8), random(6, 8)
    )
    runs = {block.name: block.runs for block in memory.blocks}
    assert runs == {"one": 3, "other[:1]": 1, "other[1:]": 2}


def residuals(trace: Any) -> int:
    """The bytes that the forward pass hands to the backward one: what scans stack."""
    sizes = [
        v.aval.size * v.aval.dtype.itemsize
        for e in trace.jaxpr.eqns if e.primitive.name == "scan" and not e.params["reverse"]
        for v in e.outvars
    ]  # fmt: skip
    return sum(sizes)


@pytest.mark.parametrize("form", ["marked scan", "scan"])
def test_policies_decide_what_is_kept(form: str) -> None:
    step = jax.value_and_grad(losses()[form])
    kept = {
        policy: residuals(traced(step, policy, stack(), random(6, 8))[0])
        for policy in ("none", "named", "*: keep=query", "full")
    }
    assert kept["none"] > kept["*: keep=query"]
    assert kept["named"] > kept["*: keep=query"] > kept["full"]
    assert kept["*: keep=query"] - kept["full"] == LAYERS * 6 * 8 * 4  # one f32[6,8] per layer


def test_results_of_the_forward_function_of_a_custom_gradient_have_names() -> None:
    _, memory = traced(jax.grad(losses()["marked scan"]), "full", stack(), random(6, 8))
    kinds = {residual.name: residual.kind for residual in block_of(memory).residuals}
    assert kinds["x.tanh"] == "kernel"
    assert kinds["query"] == "product"
    assert kinds["params['wq']"] == "input"


def test_names_say_where_values_come_from() -> None:
    @toast.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = jnp.exp(x @ w)
        return jnp.sin(hidden) * jnp.cos(x)

    _, memory = traced(jax.grad(lambda x, w: layer(x, w).sum()), "full", f32(4, 4), f32(4, 4))
    block = block_of(memory)
    assert block.names == ("x", "w", "hidden.dot_general", "hidden", "layer.sin", "layer.cos")
    assert str(block) == "layer (x, w, hidden.dot_general, hidden, layer.sin, layer.cos)"
    by_name = {residual.name: residual for residual in block.residuals}
    assert by_name["hidden"].source.startswith("test_checkpoints.py:")
    assert by_name["hidden"].source.endswith("(layer)")
    assert (by_name["hidden"].types, by_name["hidden"].size_bytes) == (("f32[4,4]",), 64)


def test_outside_of_plans_it_is_jax_checkpoint() -> None:
    ours, theirs = toast.checkpoint(layer), jax.checkpoint(layer)
    one = jax.tree.map(lambda leaf: leaf[0], stack())
    texts = [
        str(jax.make_jaxpr(jax.grad(lambda x, f=f: f(x, one).sum()))(random(6, 8)))
        for f in (ours, theirs)
    ]
    assert texts[0] == texts[1]


def test_functions_that_jax_traced_before_are_traced_again() -> None:
    step = jax.jit(jax.grad(losses()["marked jit"]))
    plain = str(jax.make_jaxpr(step)(stack(), random(6, 8)))
    full, _ = traced(step, "full", stack(), random(6, 8))
    none, _ = traced(step, "none", stack(), random(6, 8))
    assert len({plain, str(full.jaxpr), str(none.jaxpr)}) == 3
    assert str(jax.make_jaxpr(step)(stack(), random(6, 8))) == plain


def test_static_and_keyword_arguments() -> None:
    @functools.partial(toast.checkpoint, static_argnums=1)
    def layer(x: jax.Array, twice: bool, *, scale: jax.Array) -> tuple[jax.Array, None]:
        y = jnp.sin(x * scale)
        return (jnp.sin(y) if twice else y), None

    def loss(x: jax.Array) -> jax.Array:
        return layer(x, True, scale=jnp.float32(2))[0].sum()

    x = random(4, 4)
    trace, memory = traced(jax.grad(loss), "full", x)
    np.testing.assert_allclose(trace.lower().compile()(x), jax.grad(loss)(x), rtol=1e-6)
    assert block_of(memory).names[:2] == ("x", "scale")


def test_a_checkpoint_of_the_program_stays_and_is_named() -> None:
    own = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(scanned(own, x, params) ** 2)

    with pytest.raises(TargetError, match=r"^step: remat full: there is no scan and no repeated "
        r"layer that may be recomputed; what stays as it is: layer at test_checkpoints.py:\d+ has a "
        r"jax.checkpoint of its own with policy dots_saveable; use toast.checkpoint\(layer\) around "
        r"other layers, or in place of jax.checkpoint$"
    ):  # fmt: skip
        program_of(_named(jax.grad(loss), "step"), stack(), f32(6, 8), remat="full")


def own_inside(x: jax.Array, one: dict[str, jax.Array]) -> jax.Array:
    """A layer with a ``jax.checkpoint`` of the program for a part of it."""
    own = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("query"))
    return x + own(jnp.tanh(x @ one["wk"]), one)


def nested(x: jax.Array, one: dict[str, jax.Array]) -> jax.Array:
    return x + toast.checkpoint(layer)(jnp.tanh(x @ one["wk"]), one)


def gradient_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(scanned(function, x, params) ** 2)

    return _named(jax.grad(loss), "step")


def test_a_checkpoint_of_the_program_inside_of_a_block_is_named() -> None:
    step = gradient_of(toast.checkpoint(own_inside))
    memory = program_of(step, stack(), f32(6, 8), remat="none").memory
    assert memory is not None
    (place,) = block_of(memory).recomputes
    assert re.fullmatch(r"layer at test_checkpoints.py:\d+", place)
    assert memory.own == (
        f"{place} has a jax.checkpoint of its own with policy save_only_these_names, which "
        "recomputes in own_inside whatever the plan does",
    )
    for policy in ("*: keep=query", "own_inside: keep=quer*"):
        name = policy.partition("=")[2].replace("*", "[*]")
        with pytest.raises(TargetError, match=rf": {name} is a name in {place}, a jax.checkpoint of "
            r"the program's own, whose policy is kept; use toast.checkpoint in its place, or other "
            r"names; those of own_inside \("
        ):  # fmt: skip
            program_of(step, stack(), f32(6, 8), remat=policy)


def test_a_checkpoint_of_the_program_excludes_the_scan_around_it() -> None:
    with pytest.raises(TargetError, match=r"has a jax.checkpoint of its own with policy "
        r"save_only_these_names, so that the plan decides nothing about the rest of the scan at "
        r"test_checkpoints.py:\d+ \(scanned\); use toast.checkpoint"
    ):  # fmt: skip
        program_of(gradient_of(own_inside), stack(), f32(6, 8), remat="full")


def test_a_block_in_a_block_is_a_part_of_it() -> None:
    step = gradient_of(toast.checkpoint(nested))
    trace, memory = traced(step, "none", stack(), random(6, 8))
    assert "query" in block_of(memory).names
    assert not memory.own
    assert "checkpoint" not in str(trace.jaxpr)  # nothing is recomputed
    full, _ = traced(step, "full", stack(), random(6, 8))
    for some in (trace, full):
        ours, theirs = some.lower().compile()(stack(), random(6, 8)), step(stack(), random(6, 8))
        for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = name
    return named


def spoken(x: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
    jax.debug.print("{}", one)
    return jnp.sin(x * one), None


@jax.custom_vjp
def logged(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


def logged_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    jax.experimental.io_callback(lambda _: None, None, x)
    return jnp.sin(x), x


logged.defvjp(logged_forward, lambda x, g: (g * jnp.cos(x),))


def of_scan(x: jax.Array, ones: jax.Array) -> jax.Array:
    return jax.lax.scan(spoken, x, ones)[0].sum()


def of_marked(x: jax.Array, ones: jax.Array) -> jax.Array:
    return toast.checkpoint(spoken)(x, ones[0])[0].sum()


@pytest.mark.parametrize("loss", [of_scan, of_marked])
def test_blocks_with_effects_are_left_alone(loss: Callable[..., Any]) -> None:
    with pytest.raises(TargetError, match=r": spoken has side effects \(debug_\w+ at "
        r"test_checkpoints.py:\d+ \(spoken\)\); use toast.checkpoint"):  # fmt: skip
        program_of(_named(jax.grad(loss), "step"), f32(4), f32(3), remat="full")


def tanh_layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    x = x / jnp.sqrt(jnp.mean(x**2))
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def cosine_layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    x = x / jnp.sqrt(jnp.mean(x**2))
    return x + jnp.cos(x @ w["first"]) @ w["last"] * jnp.sin(x)


def weights(layers: int, *names: str) -> list[dict[str, Any]]:
    first, second = names
    return [{first: f32(8, 16), second: f32(16, 8)} for _ in range(layers)]


def unmarked(loss: Callable[..., Any], *arguments: Any) -> TracedMemory:
    memory = program_of(_named(jax.grad(loss), "step"), *arguments, remat="full").memory
    assert memory is not None
    return memory


@pytest.mark.parametrize("counts", [(4, 4), (2, 2), (3, 5)])
def test_all_layers_of_two_kinds_are_found(counts: tuple[int, int]) -> None:
    """The last equation of a layer is like that of the other kind, before the first layer."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for one in params["tanh"]:
            x = tanh_layer(x, one)
        for one in params["cosine"]:
            x = cosine_layer(x, one)
        return jnp.mean(x**2)

    first, second = counts
    params = {"tanh": weights(first, "up", "down"), "cosine": weights(second, "first", "last")}
    memory = unmarked(loss, params, f32(4, 8))
    assert tuple(block.runs for block in memory.blocks) == counts
    assert memory.own == ()


def test_a_layer_apart_from_the_others_is_named() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for one in params[:3]:
            x = tanh_layer(x, one)
        return jnp.mean(tanh_layer(jnp.sort(x), params[3]) ** 2)

    memory = unmarked(loss, weights(4, "up", "down"), f32(4, 8))
    assert [block.runs for block in memory.blocks] == [3]
    (own,) = memory.own
    assert re.fullmatch(
        r"test_checkpoints.py:\d+ \(tanh_layer\) has the equations of tanh_layer, but is in none of "
        r"its 3 runs; use toast.checkpoint around layers to include it", own
    ), own  # fmt: skip


def test_effects_in_layers_that_nobody_marked_are_named() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for one in params["plain"]:
            x = tanh_layer(x, one)
        for one in params["loud"]:
            x = cosine_layer(x, one)
            jax.debug.print("{}", x[0, 0])
        return jnp.mean(x**2)

    params = {"plain": weights(3, "up", "down"), "loud": weights(3, "first", "last")}
    memory = unmarked(loss, params, f32(4, 8))
    assert [block.runs for block in memory.blocks] == [3]
    (own,) = memory.own
    assert re.fullmatch(
        r"loss has side effects \(debug_\w+ at test_checkpoints.py:\d+ \(loss\)\)", own
    ), own


def test_inputs_of_layers_have_the_paths_of_arguments() -> None:
    def inputs(loss: Callable[..., Any], *arguments: Any) -> list[str]:
        (block,) = unmarked(loss, *arguments).blocks
        return [r.name for r in block.residuals if r.kind == "input" and not r.alias]

    def flax(params: Any, x: jax.Array) -> jax.Array:
        for number in range(3):
            one = jax.tree.map(lambda w: w.astype(jnp.float32), params[f"layer_{number}"])
            x = tanh_layer(x, one)
        return jnp.mean(x**2)

    def scanned_with_constant(params: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ one) @ params["shared"], None

        return jnp.mean(jax.lax.scan(body, x, params["stack"])[0])

    halves = [
        {key: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16) for key, w in one.items()}
        for one in weights(3, "up", "down")
    ]
    layers = {f"layer_{number}": one for number, one in enumerate(halves)}
    assert inputs(flax, layers, f32(4, 8)) == [
        "params['layer_*']['down']",
        "params['layer_*']['up']",
    ]
    stacks = {"shared": f32(8, 8), "stack": f32(3, 8, 8)}
    assert inputs(scanned_with_constant, stacks, f32(4, 8)) == ["params['shared']", "one"]


@pytest.mark.parametrize("marked", [False, True])
def test_pure_callbacks_are_called_again(marked: bool) -> None:
    @jax.custom_vjp
    def sine(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), x

    sine.defvjp(forward, lambda x, g: (g * jnp.cos(x),))

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + sine(jnp.tanh(x @ w)) @ w

    block = toast.checkpoint(layer) if marked else layer

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for one in params:
            x = block(x, one)
        return jnp.mean(x**2)

    calls = {}
    for remat in ("none", "full"):
        program = program_of(jax.grad(loss), [f32(8, 8)] * 3, f32(4, 8), remat=remat)
        assert program.memory is not None
        assert program.memory.own == ()
        calls[remat] = program.kinds.count("custom_call")
    assert calls == {"none": 3, "full": 6}


def test_custom_gradients_with_effects_are_said_to_be_kept() -> None:
    def loss(x: jax.Array, ones: jax.Array) -> jax.Array:
        x = toast.checkpoint(lambda x: jnp.sin(jnp.sin(x)), name="waves")(x)
        return toast.checkpoint(lambda x: logged(jnp.sin(x)), name="noisy")(x).sum()

    program = program_of(jax.grad(loss), f32(4), f32(3), remat="full")
    assert program.memory is not None
    assert [block.name for block in program.memory.blocks] == ["waves"]
    (own,) = program.memory.own
    assert own.startswith(
        "noisy has side effects in the custom gradient of logged at test_checkpoints.py:"
    )


def test_inference_has_nothing_to_recompute() -> None:
    with pytest.raises(TargetError) as error:
        program_of(_named(lambda x: jnp.sin(x), "serve"), f32(4), remat="full")
    assert str(error.value) == (
        "serve: remat full: nothing is differentiated in it, so that there is nothing to "
        "recompute; leave out remat, or plan the train step"
    )


def test_a_function_without_layers_says_what_to_do() -> None:
    with pytest.raises(TargetError) as error:
        program_of(_named(jax.grad(lambda x: jnp.sin(x).sum()), "step"), f32(4), remat="minimal")
    assert str(error.value) == (
        "step: remat minimal: there is no scan and no repeated layer that may be recomputed; use "
        "toast.checkpoint(layer) around its layers"
    )


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("layr: keep=query", "remat layr: keep=query: no block is named layr; use layer"),
        ("layer: keep=gate", "remat layer: keep=gate: no residual is named gate; those of layer "),
        (
            "layer[5:]: recompute=*",
            "remat layer[5:]: recompute=*: layer has no such runs; use layer",
        ),
        ("save_out_proj", "remat save_out_proj: no residual of layer "),
    ],
)
def test_names_that_no_residual_has(policy: str, message: str) -> None:
    step = jax.grad(losses()["marked scan"])
    with pytest.raises(TargetError) as error:
        program_of(step, stack(), f32(6, 8), remat=policy)
    assert str(error.value).startswith(message)
    assert ";" in str(error.value)


def test_offloaded_values_go_to_the_host_and_back() -> None:
    step = jax.grad(losses()["marked scan"])
    trace, memory = traced(step, "*: offload=query,x", stack(), random(6, 8))
    text = trace.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count('_xla_buffer_placement = "pinned_host"') == 2
    assert memory.policy is not None
    assert memory.policy.of("layer").offload == ("x", "query")


def test_every_preset_names_itself() -> None:
    assert all(MemoryPolicy.parse(name).label == name for name in PRESETS)


def test_an_auxiliary_result_that_is_no_array_leaves_the_function_as_it_is() -> None:
    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, str]:
        return jnp.sum(scanned(layer, x, params) ** 2), "text"

    trace = MemoryTrace(MemoryPolicy.parse("full"), None)
    with memory_tracing.tracing(trace), finding_blocks(trace):
        _, aux = jax.grad(loss, has_aux=True)(stack(), random(6, 8))
    assert aux == "text"


#: Lengths of scans, how many iterations are unrolled, and whether all are in a loop.
UNROLLED = [(2, 1, True), (2, 2, False), (2, 0, False), (5, 4, False), (4, 2, True), (1, 1, False)]


@pytest.mark.parametrize(("length", "unroll", "is_loop"), UNROLLED)
@pytest.mark.parametrize("marked", [False, True])
def test_blocks_have_a_barrier_unless_they_are_in_a_loop(
    length: int, unroll: int, is_loop: bool, marked: bool
) -> None:
    """XLA inlines a loop of one trip, and iterations that are left over are outside."""
    block = toast.checkpoint(layer) if marked else layer
    params = {name: w[np.zeros(length, int)] for name, w in stack().items()}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params, unroll=unroll)
        return x.sum()

    if length == 1 and not marked:
        return  # nothing is found
    program = program_of(jax.grad(loss), params, random(4, 8), remat="full")
    assert ("optimization_barrier" in program.kinds) != is_loop


@pytest.mark.parametrize("form", ["marked scan", "scan"])
def test_a_part_of_a_scan_that_is_no_loop_has_a_barrier(form: str) -> None:
    loss = losses()[form]
    block = block_of(traced(jax.grad(loss), "full", stack(), random(4, 8))[1])
    policy = f"{block.name}[:1]: recompute=*; {block.name}[1:]: keep=*"
    program = program_of(jax.grad(loss), stack(), random(4, 8), remat=policy)
    assert "optimization_barrier" in program.kinds


@pytest.mark.parametrize("marked", [False, True])
def test_blocks_take_and_return_keys_of_random_numbers(marked: bool) -> None:
    def noisy(carried: Any, w: jax.Array) -> Any:
        x, key = carried
        key, mine = jax.random.split(key)
        return jnp.tanh(x @ w) * jax.random.bernoulli(mine, 0.9, x.shape), key

    block = toast.checkpoint(noisy) if marked else noisy

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        first = x, jax.random.key(0)
        (x, _), _ = jax.lax.scan(lambda x, w: (block(x, w), None), first, params)
        return x.sum()

    program = program_of(jax.grad(loss), random(2, 8, 8), random(4, 8), remat="full")
    assert program.memory
    (found,) = program.memory.blocks
    assert [r.name for r in found.residuals if r.alias == "layer_input"]


@pytest.mark.parametrize("layers", [2, 3, 8])
@pytest.mark.parametrize("longer", [False, True])
def test_layers_may_have_several_products_alike(layers: int, longer: bool) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for first, second in params:
            hidden = jnp.tanh(x @ first)
            x = x + (jnp.cos(jnp.sin(hidden) @ second) if longer else hidden @ second)
        return jnp.mean(x**2)

    square = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    program = toast.api.program_of(
        jax.grad(loss), [(square, square)] * layers, square, remat="full"
    )
    assert program.memory is not None
    (block,) = program.memory.blocks
    assert block.runs == layers


def test_blocks_of_two_convolutions_alike_are_found() -> None:
    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for first, second in params:
            x = x + convolved(jax.nn.relu(convolved(x, first)), second)
        return jnp.mean(x**2)

    kernel = jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
    images = jax.ShapeDtypeStruct((4, 16, 16, 8), jnp.float32)
    program = toast.api.program_of(jax.grad(loss), [(kernel, kernel)] * 4, images, remat="full")
    assert program.memory is not None
    assert [block.runs for block in program.memory.blocks] == [4]
