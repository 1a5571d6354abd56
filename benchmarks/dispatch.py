"""Measure the dispatch of a plan: how long a call takes before the devices have computed anything.

    python benchmarks/dispatch.py [--leaves 1500] [--runs 30]

A step updates many small arrays on eight CPU devices.  The script prints the milliseconds of a call
of ``plan.jit()`` and of ``jax.jit`` with the plan's shardings (the minimum of several calls, which
alternate), and their ratio.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import toast
from toast.cli.elapsed import steps


def step(state: dict[str, jax.Array], change: jax.Array) -> Any:
    """The state after a step."""
    return jax.tree.map(lambda array: array + change, state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=1500)
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()

    state = {f"array{number}": jnp.ones((8, 8)) for number in range(options.leaves)}
    change = jnp.float32(1)
    plan = toast.plan(step, state, change, donate=0, mesh="data=8", hardware="tpu-v5e")
    planned = plan.jit()
    into, out = plan.shardings_for(jax.devices())
    plain = jax.jit(step, in_shardings=into, out_shardings=out, donate_argnums=0)
    calls: dict[str, Any] = {"jax.jit": plain, "plan.jit()": planned}
    states = {
        name: call(jax.device_put(jax.tree.map(jnp.copy, state), into[0]), change)
        for name, call in calls.items()
    }
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in steps(range(options.runs), lambda run: f"run {run}"):
        for name, call in calls.items():
            jax.block_until_ready(states[name])
            begin = time.perf_counter()
            states[name] = call(states[name], change)
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
    print(f"{options.leaves} arrays, milliseconds per call:")
    for name, value in seconds.items():
        print(f"  {name:12} {1e3 * value:6.1f}")
    print(f"  ratio        {seconds['plan.jit()'] / seconds['jax.jit']:6.2f}")


if __name__ == "__main__":
    main()
