"""Programs that several test modules use."""

from __future__ import annotations

import functools
import io
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

import toast
from toast.cost import CostModel, break_down
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.space import Action, Scope, Space, States

#: The models of the zoo without those that differ from another one in their sizes alone.
FORMS = tuple(
    name for name in ZOO
    if name not in (
        "llama3.1-70b", "llama3.1-405b", "llama2-7b", "mistral-7b", "gemma3-12b", "gemma3-27b", "vit-h",
    )
)  # fmt: skip


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def printed(what: object, width: int = 250) -> str:
    """As on a wide console of the user's own, where markup counts."""
    console = rich.console.Console(width=width, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def same_for_any_jax(text: str) -> str:
    """An explanation of a traced program without what differs between versions of JAX.

    Ops and values are numbered in the order in which they appear; how JAX calls the way to a loop's
    body is left out, as are line numbers in Python files.
    """
    numbers = itertools.count()
    number = functools.cache(lambda old: str(next(numbers)))
    text = re.sub(r"(\.py):\d+", r"\1:N", text)
    # JAX gives what it has traced before the location of the first caller, whichever test that was.
    text = re.sub(r"tests/(?:\w+/)*test_\w+\.py", "tests/TEST.py", text)
    text = re.sub(r"jit\(\w+\)/(?:\w+\(\)/)*while/body/eval_jaxpr/", "", text)
    return re.sub(r"(?<=[#%])\d+", lambda match: number(match[0]), text)


def mlp(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w1) @ w2


@functools.cache
def analyzed(name: str, **options: Any) -> toast.Analysis:
    """The analysis of a zoo model, made once."""
    return toast.analyze(build(name, **options))


def model_of(
    analysis: toast.Analysis, mesh: str, hardware: str = "tpu-v5e", **options: bool | int
) -> CostModel:
    space = Space(analysis, Mesh.parse(mesh), **options)  # type: ignore[arg-type]
    return CostModel(space, load(hardware))


def term_seconds(hardware: str, function: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Seconds of each term of a function on one device."""
    analysis = toast.analyze(function, *arguments, platform="tpu", cache=False)
    space = Space(analysis, Mesh.parse("a=2"), min_dimensions=0)
    found = break_down(CostModel(space, load(hardware)), space.initial).term_seconds
    return {name: float(seconds.sum()) for name, seconds in found.items()}


def action(space: Space, argument: str, d: int, axis: str, resolution: int = 0) -> Action:
    """The action on the color of an argument's dimension."""
    program, names = space.analysis.program, space.analysis.names
    value = program.argument_values[program.arguments.index(argument)]
    group = int(space.color_group_of(int(names.def_name[names.value_dim[value] + d])))
    bits = (resolution,) * len(space.color_groups[group].bits)
    return Action(group, bits, space.mesh.names.index(axis))


def refinements(space: Space, scope: Scope, *numbers: int) -> list[Action]:
    """The refinements of families, classes, ..., of these numbers, or all of them."""
    table = space.refinements
    every = np.flatnonzero(table.scope == scope)
    return table.actions(table.rows(scope, np.array(numbers)) if numbers else every)


def after_each(space: Space, state: States, actions: Iterable[Action]) -> States:
    """``state`` after each of ``actions``: ``[actions, classes, axes]``."""
    return np.stack([space.apply(state, action) for action in actions])


def random_states(space: Space, count: int, seed: int) -> list[States]:
    """States after random actions."""
    random = np.random.default_rng(seed)
    states = []
    for _ in range(count):
        state = space.initial
        most = min(len(space.actions), 5)
        for number in random.choice(len(space.actions), size=most, replace=False):
            state = space.apply(state, space.actions[number])
        states.append(state)
    return states
