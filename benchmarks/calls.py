"""The cost of a call of ``toast.jit``, against calls of ``jax.jit`` and of the libraries' jit.

    python benchmarks/calls.py [--leaves 4,64,1024] [--calls 2000]

Each step takes and returns many small arrays, so that its time is that of the dispatch.  Steps of
``jax.jit`` have the shardings of the plan; both take and return sharded arrays, donated.  The ratio
is the median over pairs of rounds, which alternate.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cli.elapsed import steps

ROUNDS = 9


def state_of(leaves: int) -> dict[str, jax.Array]:
    return {f"w{number}": jnp.ones((8, 8)) for number in range(leaves)}


def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    return {name: w * 0.5 + x for name, w in state.items()}, x.sum()


def seconds(function: Callable[..., Any], state: Any, x: Any, calls: int) -> tuple[float, Any]:
    """The seconds of a call, and the state after the last one."""
    begin = time.perf_counter()
    for _ in range(calls):
        state, value = function(state, x)
    end = time.perf_counter()
    jax.block_until_ready((state, value))
    return (end - begin) / calls, state


def compare(
    ours: Callable[..., Any], theirs: Callable[..., Any], states: Any, x: Any, calls: int
) -> tuple[float, float, float]:
    """The medians of the seconds of a call of each, and of the ratio of pairs of rounds."""
    own, other = states
    times = []
    for number in range(ROUNDS + 1):
        first, own = seconds(ours, own, x, calls)
        second, other = seconds(theirs, other, x, calls)
        if number:  # the first round compiles
            times.append((first, second))
    ratio = statistics.median(a / b for a, b in times)
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times), ratio


def plain(leaves: int, calls: int) -> tuple[float, float, float]:
    ours = toast.jit(step, mesh="data=2", hardware="tpu-v5e", donate_argnums=0)
    plan = ours.plan_for(state_of(leaves), jnp.ones((8, 8)))
    shardings = plan.shardings_for(ours.mesh)
    theirs = jax.jit(
        step, in_shardings=shardings.in_shardings, out_shardings=shardings.out_shardings,
        donate_argnums=0,
    )  # fmt: skip
    placed = [
        jax.device_put((state_of(leaves), jnp.ones((8, 8))), shardings.in_shardings)
        for _ in range(2)
    ]
    return compare(ours, theirs, [state for state, _ in placed], placed[0][1], calls)


def equinox(leaves: int, calls: int) -> tuple[float, float, float]:
    import equinox

    def turned(x: jax.Array, state: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        return step(state, x)

    theirs = equinox.filter_jit(turned, donate="all-except-first")
    ours = toast.jit(theirs, mesh="data=2", hardware="tpu-v5e")
    plan = ours.plan_for(jnp.ones((8, 8)), state_of(leaves))
    x, first = jax.device_put(
        (jnp.ones((8, 8)), state_of(leaves)), plan.shardings_for(ours.mesh).in_shardings
    )
    second = jax.tree.map(jnp.copy, first)
    return compare(
        lambda state, x: ours(x, state), lambda state, x: theirs(x, state), (first, second), x,
        calls,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--leaves", default="4,64,1024", help="numbers of arrays, by commas")
    parser.add_argument("--calls", type=int, default=1000, help="calls per round")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'':12} {'arrays':>6} {'toast.jit':>12} {'its jit':>12} {'ratio':>6}")
    functions = {"jax.jit": plain, "filter_jit": equinox}
    sizes = [int(leaves) for leaves in options.leaves.split(",")]
    cases = [(name, leaves) for name in functions for leaves in sizes]
    for name, leaves in steps(cases, lambda case: f"{case[0]}, {case[1]} arrays"):
        try:
            own, other, ratio = functions[name](leaves, max(20, options.calls * 4 // leaves))
        except ImportError:
            print(f"{name:12} {leaves:6} is not installed")
            continue
        print(f"{name:12} {leaves:6} {own * 1e6:9.1f} us {other * 1e6:9.1f} us {ratio:6.2f}")


if __name__ == "__main__":
    main()
