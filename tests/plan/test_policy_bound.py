"""No memory policy, sharding or number of microbatches beats the lower bounds."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import f32, printed
from toast import report
from toast.hardware import Hardware, load
from toast.plan import Plan
from toast.plan.policy_bound import least_memory, misfit_proof, policy_bound
from toast.plan.survey_policies import SurveyPolicies
from toast.program import BlockPolicy, MemoryPolicy, survey
from toast.program.memory_policy import CHOICES
from toast.search import Polishing

LAYERS, ROWS, WIDTH = 2, 4096, 256
#: Little search: bounds hold for every plan.
QUICK: Any = {"settings": toast.Settings(rounds=1), "stages": (Polishing(),)}


@functools.cache
def machine() -> Hardware:
    """A device whose steps are little longer than their products."""
    real = load("tpu-v5e")
    links = dataclasses.replace(real.interconnect, bandwidth_bytes_per_s=1e15, latency_s=1e-12)
    return dataclasses.replace(
        real, interconnect=links, memory_bytes_per_s=50 * real.memory_bytes_per_s,
        kernel_latency_s=0.0, transcendentals_per_s=math.inf, vector_elements_per_s=math.inf,
        vector_products_per_s=math.inf, transposed_elements_per_s=math.inf,
    )  # fmt: skip


def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = jnp.sin(x @ up)
    return x + jax.nn.relu(hidden * jnp.tanh(hidden)) @ down


def scanned(up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
    block = toast.checkpoint(layer, prevent_cse=False)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (block(x, *w), None), x, weights)[0] ** 2)

    gradients = toast.accumulate(jax.grad(loss), batch_argnums=1)((up, down), x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, (up, down), gradients)


def unrolled(up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
    def loss(up: Any, down: Any) -> Any:
        y = x
        for number in range(LAYERS):
            y = toast.checkpoint(layer)(y, up[number], down[number])
        return jnp.mean(y**2)

    return jax.value_and_grad(loss, argnums=(0, 1))(up, down)


def plan(step: Any, remat: Any, **options: Any) -> Plan:
    shapes = f32(LAYERS, WIDTH, 4 * WIDTH), f32(LAYERS, 4 * WIDTH, WIDTH), f32(ROWS, WIDTH)
    given = {"mesh": "data=4", "hardware": machine(), **options}
    return toast.plan(step, *shapes, remat=remat, uneven=0, **QUICK, **given)


@functools.cache
def surveyed(step: Any) -> Plan:
    return plan(step, survey())


def bound(step: Any, limit: float, **options: Any) -> float:
    return policy_bound(dataclasses.replace(surveyed(step), memory_bytes=limit), **options)


def any_policy(step: Any, chance: random.Random) -> MemoryPolicy:
    memory = surveyed(step).analysis.program.memory
    assert memory is not None
    entries = []
    for block in memory.blocks:
        names: dict[str, list[str]] = {choice: [] for choice in CHOICES}
        for residual in block.residuals:
            may = ("keep", "offload") if residual.kind == "input" else CHOICES
            names[chance.choice(may)].append(residual.name)
        entries.append(BlockPolicy(block.name, **{c: tuple(n) for c, n in names.items()}))
    return MemoryPolicy(tuple(entries))


@pytest.mark.parametrize("step", [scanned, unrolled])
def test_no_policy_and_no_sharding_is_faster(step: Any) -> None:
    chance, closest = random.Random(0), math.inf
    for policy in ("none", "full", any_policy(step, chance), any_policy(step, chance)):
        found = plan(step, policy)
        space, generator = found.model.space, np.random.default_rng(0)
        states = np.stack(
            [rows[generator.integers(len(rows), size=100)] for rows in space.choices], axis=1
        )
        states = np.concatenate([states, found.state[None]])
        prices = found.model.price(states)
        assert least_memory(found) <= prices.peak_bytes.min()
        longest = bound(step, prices.peak_bytes.min())
        for number in np.flatnonzero(prices.seconds < longest).tolist():
            least = bound(step, prices.peak_bytes[number])
            assert least <= prices.seconds[number] * (1 + 1e-9)
        closest = min(closest, found.after.step_seconds / bound(step, found.after.peak_bytes))
    assert closest < 1.2  # the bound is worth something


def test_microbatches_are_not_faster() -> None:
    for count in (2, 8):
        found = plan(scanned, "full", microbatches=count)
        least = bound(scanned, found.after.peak_bytes, most_microbatches=8)
        assert least <= found.after.step_seconds


def test_less_memory_takes_longer() -> None:
    least = least_memory(surveyed(scanned), results=False)
    most = SurveyPolicies(surveyed(scanned)).presets()["none"].peak_bytes
    shares = (1.0, 0.25, 0.1, 0.02, 0.0)
    rising = [bound(scanned, least + share * (most - least)) for share in shares]
    assert rising == sorted(rising)
    assert rising[0] < rising[-1] < math.inf
    assert bound(scanned, least - 1) == math.inf
    # A device with a faster link to the host may offload instead.
    fast = dataclasses.replace(machine(), host_bytes_per_s=1e15)
    other = dataclasses.replace(surveyed(scanned), memory_bytes=least, hardware=fast)
    assert policy_bound(other) == pytest.approx(rising[0])


def test_the_joint_plan_says_how_far_it_is_from_the_bound(tmp_path: pathlib.Path) -> None:
    best = plan(scanned, "auto", microbatches=1)
    assert 0 < best.policies_bound_seconds <= best.after.step_seconds
    assert type(best.policies_bound_seconds) is float, "plan files have no numbers of numpy"
    text = printed(report.plan_tables(best))
    assert "of every memory policy" in text
    best.to_json(tmp_path / "plan.json")
    again = toast.apply_plan(tmp_path / "plan.json", best.analysis, hardware=machine()).plan
    assert again.policies_bound_seconds == best.policies_bound_seconds
    stated = plan(scanned, "full")
    assert stated.policies_bound_seconds is None
    assert "policies_bound_seconds" not in stated.to_dict()
    assert "of every memory policy" not in printed(report.plan_tables(stated))


def test_that_nothing_fits_is_proved() -> None:
    assert misfit_proof(plan(unrolled, "full")) == ""
    small = dataclasses.replace(machine(), memory_limit_bytes=2**21)
    found = plan(unrolled, "full", hardware=small)
    # 4 MiB of weights, 4 MiB of inputs and the gradients, on 4 devices.
    assert found.note.splitlines()[-1] == (
        "no sharding without padding and no memory policy fits: arguments and results alone take "
        "at least 3 MiB per device"
    )
