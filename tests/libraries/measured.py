"""A step of a library: planned, run in shards with donation, and compared with its unsharded run."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import toast
from tests.libraries.steps import Step
from toast import api, inputs
from toast.analysis import Analysis
from toast.hardware import Mesh, load
from toast.plan import Plan

MESH = Mesh.parse("data=4,model=2")
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step, its plan, and the differences between its runs."""

    analysis: Analysis
    plan: Plan
    #: The ops without a rule, described.
    without_rule: tuple[str, ...]
    #: Seconds of tracing and lowering, and of analysis and search.
    lowering_s: float
    planning_s: float
    #: The largest relative difference of results that are not carried, such as losses, and of
    #: carried arrays, after three steps.
    loss_error: float
    state_error: float


def planned(step: Step, mesh: Mesh | jax.sharding.Mesh = MESH) -> tuple[Plan, float, float]:
    """The plan of a step, the seconds of lowering it, and those of planning it."""
    begin = time.process_time()
    with step.context():
        program = api.program_of(step.function, *step.arguments, donate=range(step.carried))
    lowered = time.process_time()
    analysis = toast.analyze(program)
    machine = api.small_scale(analysis, inputs.mesh_of(mesh), load("tpu-v5e"))
    plan = toast.plan(analysis, mesh=mesh, hardware=machine)
    return plan, lowered - begin, time.process_time() - lowered


def measured(step: Step, mesh: Mesh | jax.sharding.Mesh = MESH) -> Measured:
    """Plans a step, and runs it three times in shards and whole."""
    plan, lowering_s, planning_s = planned(step, mesh)
    analysis = plan.analysis
    sharded = _results(plan.jit(*([mesh] if isinstance(mesh, jax.sharding.Mesh) else [])), step)
    jitted = hasattr(step.function, "lower")
    with step.context():
        whole = _results(step.function if jitted else jax.jit(step.function), step)
    return Measured(
        analysis, plan, tuple(analysis.program.describe(op) for op in analysis.without_rule),
        lowering_s, planning_s,
        max(relative_error(a[1], b[1]) for a, b in zip(sharded, whole, strict=True)),
        relative_error(sharded[-1][0], whole[-1][0]),
    )  # fmt: skip


def _results(function: Any, step: Step) -> list[tuple[Any, Any]]:
    """The state after each step, and the results that are not carried.

    The state is the carried results and the other arguments, which a step may update in place.
    Arguments are copied, as they are donated.
    """
    arguments = jax.tree.map(_copy, step.arguments)
    results = []
    for _ in range(STEPS):
        returned = function(*arguments)
        arguments = (*returned[: step.carried], *arguments[step.carried :])
        results.append((jax.tree.map(_copy, arguments), returned[step.carried :]))
    return results


def _copy(leaf: Any) -> Any:
    return jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf


def relative_error(actual: Any, expected: Any) -> float:
    """The largest difference of two trees of arrays, each relative to the largest of its array."""
    errors = [0.0]
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if not hasattr(other, "dtype"):
            assert one is other
            continue
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        a, b = np.asarray(one), np.asarray(other)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert np.isfinite(b).all()
        scale = float(np.abs(b.astype(np.float64)).max(initial=0.0))
        errors.append(float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) / max(scale, 1e-3))
    return max(errors)
