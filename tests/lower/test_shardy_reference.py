"""Local programs against those of Shardy's own passes: equal numbers, and no more bytes."""

from __future__ import annotations

import importlib.metadata
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32, random_states
from tests.lower import shardy_reference
from toast.apply import Runnable
from toast.cost import CostModel
from toast.hardware import Mesh, load
from toast.lower import LocalProgram
from toast.plan.shard import lowered_state, shardings_of
from toast.space import Space

VERSION = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))

pytestmark = pytest.mark.skipif(VERSION < (0, 12), reason="the passes of older versions crash")


class Case(NamedTuple):
    """A program of named arrays, a mesh, and a plan: the shardings of arguments."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    mesh: str
    pin: Mapping[str, Any]


def mlp(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.relu(x @ w) @ v


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, v)


def norm(x: Any, scale: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale


def convolution(x: Any, w: Any) -> Any:
    y = lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )  # fmt: skip
    return jnp.tanh(y)


def layers(x: Any, w: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), x.mean()), x, w)


def gradients(w: Any, v: Any, x: Any) -> Any:
    return jax.grad(lambda w, v: (mlp(x, w, v) ** 2).mean(), (0, 1))(w, v)


CASES = {
    "mlp": Case(
        mlp, (f32(64, 32), f32(32, 64), f32(64, 32)), "a=4,b=2",
        {"x": P("b"), "w": P(None, "a"), "v": P("a")},
    ),
    "contracting": Case(
        mlp, (f32(64, 32), f32(32, 64), f32(64, 32)), "a=2,b=4",
        {"x": P(None, "a"), "w": P("a", "b"), "v": P("b")},
    ),
    "gradients": Case(
        gradients, (f32(32, 64), f32(64, 32), f32(64, 32)), "a=4,b=2",
        {"x": P("b"), "w": P(None, "a"), "v": P("a")},
    ),
    "heads": Case(
        attention, (f32(4, 8, 8, 16),) * 3, "a=4,b=2",
        {"q": P("b", None, "a"), "k": P("b", None, "a"), "v": P("b", None, "a")},
    ),
    "keys": Case(
        attention, (f32(4, 8, 8, 16),) * 3, "a=4,b=2", {"q": P("b"), "k": P("b", "a"), "v": P("b", "a")},
    ),
    "norm": Case(norm, (f32(16, 64), f32(64)), "a=4,b=2", {"x": P("b", "a"), "scale": P("a")}),
    "convolution": Case(
        convolution, (f32(8, 8, 8, 4), f32(3, 3, 4, 8)), "a=4,b=2",
        {"x": P("a"), "w": P(None, None, None, "b")},
    ),
    "scan": Case(
        layers, (f32(16, 32), f32(3, 32, 32)), "a=4,b=2", {"x": P("b"), "w": P(None, "a")}
    ),
}  # fmt: skip


#: Cases in which all collectives are the same.  In others, sums are scattered where uses want parts,
#: neighbours exchange edges of images, loops gather the weights of one step at a time, and gradients
#: need fewer permutes.
ALIKE = ("mlp", "contracting", "norm")


def run_ours(local: LocalProgram, arguments: Any) -> list[Any]:
    runnable = Runnable(local.program, local.shardings, module_of=lambda *_: local.module)
    return [np.asarray(result) for result in runnable.run_flat([*map(jnp.asarray, arguments)])]


def counted(local: LocalProgram) -> Counter[shardy_reference.Collective]:
    """How often each collective runs in a step."""
    sizes = dict(local.shardings.mesh.axes)
    counts = Counter[shardy_reference.Collective]()
    for (kind, axes, size), times in local.counts().items():
        around = sizes if kind == "collective_permute" else axes
        devices = math.prod(sizes[axis] for axis in around)
        counts[kind, devices, size] += times
    return counts


@pytest.mark.parametrize("name", CASES)
def test_local_programs_are_those_of_shardy(name: str) -> None:
    """The plan of each case, and random states of it."""
    case = CASES[name]
    analysis = toast.analyze(case.function, *case.shapes, lowering="local")
    plan = toast.plan(
        analysis, mesh=case.mesh, hardware="tpu-v5e", constraints=toast.Constraints(pin=case.pin)
    )  # fmt: skip
    model = CostModel(Space(analysis, Mesh.parse(case.mesh)), load("tpu-v5e"))
    random = np.random.default_rng(0)
    arguments = [random.normal(size=shape.shape).astype("f4") for shape in case.shapes]
    expected = jax.tree.leaves(jax.jit(case.function)(*arguments))
    states = [
        (plan.model, plan.state),
        *((model, s) for s in random_states(model.space, 4, seed=1)),
    ]
    locals_ = [lowered_state(*pair) for pair in states]
    program = analysis.program
    answers = shardy_reference.run([
        shardy_reference.job(program, shardings_of(*pair), arguments) for pair in states
    ])  # fmt: skip
    for local, answer in zip(locals_, answers, strict=True):
        assert not isinstance(answer, str), answer
        shardings = local.shardings
        for place, (ours, whole) in enumerate(
            zip(run_ours(local, arguments), expected, strict=True)
        ):
            theirs = shardy_reference.assembled(
                shardings.mesh, program.values[program.result_values[place]].type,
                shardings.results[place], answer.shards[place],
            )  # fmt: skip
            np.testing.assert_allclose(theirs, whole, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        ours, theirs = counted(local), answer.counts
        if name in ALIKE:
            assert ours == theirs
        else:
            assert shardy_reference.sent(ours) <= shardy_reference.sent(theirs)
