"""Programs drawn at random, small enough for pure logic: what the analysis must hold for.

They have square matrices, so that colors meet themselves; layers, each with the same ops; loops,
branches, gradients and donated parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.helpers import f32
from toast import api
from toast.program import Program

#: Elements along most dimensions.
WIDTH = 8

Values = list[Any]
#: One op on the values so far; parameters of the layer come by place.
Step = Callable[[Values, Values], Any]


def _steps(rng: random.Random, count: int, parameters: int) -> list[Step]:
    """``count`` ops, drawn: each takes earlier values, or parameters, by place."""
    steps: list[Step] = []
    for _ in range(count):
        one, other, place = rng.randrange(8), rng.randrange(8), rng.randrange(max(parameters, 1))
        kinds: list[Step] = [
            lambda v, p, a=one: jnp.tanh(v[-1 - a % len(v)]),
            lambda v, p, a=one: v[-1 - a % len(v)].T,
            lambda v, p, a=one, b=other: v[-1 - a % len(v)] + v[-1 - b % len(v)],
            lambda v, p, a=one, b=other: v[-1 - a % len(v)] @ v[-1 - b % len(v)],
            lambda v, p, a=one: v[-1 - a % len(v)] / jnp.sum(v[-1 - a % len(v)], 1, keepdims=True),
            lambda v, p, a=one: jnp.broadcast_to(jnp.max(v[-1 - a % len(v)], 0), (WIDTH, WIDTH)),
            lambda v, p, a=one: jnp.tanh(v[-1 - a % len(v)].reshape(2, -1, 4)).reshape(WIDTH, -1),
            lambda v, p, a=one: jnp.pad(v[-1 - a % len(v)][1:], ((1, 0), (0, 0))),
        ]
        if parameters:
            kinds += [
                lambda v, p, a=one, w=place: v[-1 - a % len(v)] @ p[w],
                lambda v, p, a=one, w=place: v[-1 - a % len(v)] * p[w],
                lambda v, p, a=one, w=place: jnp.tanh(v[-1 - a % len(v)] @ p[w]) @ p[w].T,
            ]
        steps.append(rng.choice(kinds))
    return steps


def _run(steps: list[Step], x: Any, parameters: Values) -> Any:
    values = [x]
    for step in steps:
        values.append(step(values, parameters))
    return values[-1] + values[len(values) // 2]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a program is like."""

    layers: int
    parameters: int
    body: list[Step]
    before: list[Step]
    form: str
    gradient: bool
    donated: bool


@functools.cache
def drawn(seed: int) -> Drawn:
    """The same for the same seed."""
    rng = random.Random(seed)
    layers, parameters = rng.randint(1, 3), rng.randint(0, 2)
    body = _steps(rng, rng.randint(2, 6 if layers < 3 else 4), parameters)
    return Drawn(
        layers,
        parameters,
        body,
        before=_steps(rng, rng.randint(0, 3), 0),
        form=rng.choice(["unrolled", "unrolled", "scan", "fori", "cond"]),
        gradient=rng.random() < 0.4 and len(body) * layers < 7,
        donated=rng.random() < 0.5,
    )


@functools.cache
def program(seed: int) -> Program:
    """The program itself."""
    its = drawn(seed)
    layers, parameters, body, form = its.layers, its.parameters, its.body, its.form

    def forward(weights: list[Values], x: Any) -> Any:
        x = _run(its.before, x, [])
        if form == "scan" and parameters:
            stacked = [jnp.stack(each) for each in zip(*weights, strict=True)]
            return lax.scan(lambda c, w: (_run(body, c, w), None), x, stacked)[0]
        if form == "fori" and not its.gradient:
            return lax.fori_loop(0, 3, lambda _, c: _run(body, c, weights[0]), x)
        if form == "cond":
            x = lax.cond(x[0, 0] > 0, lambda c: _run(body, c, weights[0]), jnp.transpose, x)
        for weight in weights:
            x = _run(body, x, weight)
        return x

    def step(weights: list[Values], x: Any) -> Any:
        if its.gradient:
            change = jax.grad(lambda w, c: jnp.sum(forward(w, c)), argnums=(0, 1))(weights, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, (weights, x), change)
        return weights, forward(weights, x)

    square = f32(WIDTH, WIDTH)
    weights = [[square] * parameters for _ in range(layers)]
    return api.program_of(step, weights, square, donate=(0, 1) if its.donated else ())
