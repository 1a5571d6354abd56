"""From a JAX function to a plan that runs, as a notebook: each ``# %%`` is a cell.

Editors and Jupyter (with jupytext) open it as one; in a notebook the last value of a cell is shown,
and analyses and plans show themselves as tables.  As a script it runs from top to bottom:

    python examples/first_plan.py
"""
# ruff: noqa: B018

# %% [markdown]
# # A first plan
# Eight CPU devices stand in for eight TPU chips, so that the plan can be run here.

# %%
from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import toast

# %% [markdown]
# A train step of a small network; nothing is computed yet.


# %%
def train_step(
    params: dict[str, jax.Array], x: jax.Array, y: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent; returns the parameters and the loss."""

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        hidden = jax.nn.relu(x @ p["w1"])
        return jnp.mean((hidden @ p["w2"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGUMENTS = ({"w1": f32(512, 2048), "w2": f32(2048, 512)}, f32(2048, 512), f32(2048, 512))

# %% [markdown]
# The analysis finds which dimensions must be sharded alike, and where sharding is ambiguous.

# %%
analysis = toast.analyze(train_step, *ARGUMENTS, donate=(0,))
analysis

# %%
analysis.arguments  # every relation is a DataFrame

# %% [markdown]
# The search decides; the plan says what, in which order, and why.

# %%
plan = toast.plan(analysis, mesh="data=4,model=2", hardware="tpu-v5e")
plan

# %%
for step in plan.steps:
    print(f"{step.axis}: {', '.join(step.dimensions)}: {step.reason}")

# %% [markdown]
# Why is an argument sharded as it is, where do collectives come from, and why not otherwise?

# %%
explained = plan.explain_argument("x")
for held in explained.held:
    print(f"x:{held.dimension} has {held.axis}: {held.cause}")
for free in explained.free:
    print(f"x:{free.dimension} has no {free.axis}: {free.why}")

# %%
for collective in plan.explain_collectives()[:3]:
    print(f"{collective.count} {collective.kind} of {collective.value}: {collective.why}")

# %%
alternative = plan.why_not("x", P(None, "model"))
assert alternative.pinned is not None
for line in alternative.pinned.numbers:
    print(f"{line.what}: {line.first:.4g} {line.unit}, then {line.second:.4g}")

# %% [markdown]
# Plans are files, and survive edits of the model: here it has more rows.

# %%
wider = (ARGUMENTS[0], f32(4096, 512), f32(4096, 512))
applied = toast.apply_plan(plan.to_dict(), train_step, *wider, donate=(0,))
assert applied.plan.arguments == plan.arguments
print(f"{len(applied.matched)} arguments match, now {applied.plan.after.step_seconds:.3g} s a step")

# %% [markdown]
# It runs as it is, on any devices; small values will do.

# %%
rng = np.random.default_rng(0)
values = jax.tree.map(lambda a: rng.normal(0, 0.02, a.shape).astype(a.dtype), ARGUMENTS)
single = jax.jit(train_step)(*values)[1]
sharded = plan.jit()(*values)[1]
np.testing.assert_allclose(single, sharded, rtol=1e-4)
print("the loss is the same on one device and on eight")
