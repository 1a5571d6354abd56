"""A plan on several hosts: every host loads the same plan file and runs the same code.

Make the plan once, on any machine:

    python examples/multihost.py --plan step.json --make

Then start one process per host.  On a TPU slice, or under Slurm, JAX finds the other hosts itself:

    python examples/multihost.py --plan step.json

Elsewhere, say who is who.  This is host 0 of two, here with four CPU devices each:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 \
        python examples/multihost.py --plan step.json --hosts 2 --host 0 --address localhost:8476
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import toast

BATCH, WIDTH, HIDDEN = 256, 128, 512


def init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "w2": jax.random.normal(second, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }


def train(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> Any:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def shapes() -> tuple[Any, ...]:
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return jax.eval_shape(init, jax.random.key(0)), batch, batch


def make(path: str) -> None:
    """Search on one machine, for the mesh and the hardware of all hosts."""
    # This small model would fit every device; the pins show parameters that are split.
    pins = {"params['w1']": jax.P("data", "model"), "params['w2']": jax.P("model", None)}
    plan = toast.plan(
        jax.jit(train, donate_argnums=0), *shapes(), mesh="data=4,model=2", hardware="tpu-v5e",
        constraints=toast.Constraints(pin=pins),
    )  # fmt: skip
    plan.to_json(path)


def batches(shardings: Any, seed: int) -> list[jax.Array]:
    """The batch of a step; each host makes the parts of its own devices only."""
    x = np.random.default_rng(seed).normal(size=(2, BATCH, WIDTH)).astype(np.float32)
    return [
        jax.make_array_from_callback(whole.shape, sharding, lambda part, whole=whole: whole[part])
        for whole, sharding in zip(x, shardings, strict=True)
    ]


def run(path: str, steps: int) -> tuple[Any, list[float]]:
    """Train some steps; the last parameters and the loss of each step."""
    step = toast.jit(train, plan=path, donate_argnums=0)
    plan = step.plan_for(*shapes())  # compares the plan of all hosts
    params = step.init(init, jax.random.key(0))
    losses = []
    for number in range(steps):
        x, y = batches(plan.shardings_for(step.mesh).in_shardings[1:], number)
        params, loss = step(params, x, y)
        losses.append(float(loss))
    return params, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--plan", required=True, help="the plan file")
    parser.add_argument("--make", action="store_true", help="make the plan file, and end")
    parser.add_argument("--hosts", type=int, help="the number of hosts")
    parser.add_argument("--host", type=int, help="the number of this host, from 0")
    parser.add_argument("--address", help="host 0, as name:port")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--save", help="write the last parameters and losses to this .npz file")
    options = parser.parse_args()
    if options.make:
        make(options.plan)
        return
    if options.hosts != 1:
        jax.distributed.initialize(options.address, options.hosts, options.host)
    params, losses = run(options.plan, options.steps)
    whole = multihost_utils.process_allgather(params, tiled=True)
    if jax.process_index() == 0:
        print(f"{jax.process_count()} hosts, {jax.device_count()} devices: loss {losses[-1]:.6f}")
        if options.save:
            np.savez(options.save, losses=losses, **whole)


if __name__ == "__main__":
    main()
