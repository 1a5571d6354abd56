"""Policies that an integer program proposes, from what a survey costs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.cost.host_memory import host_memory
from toast.hardware import load
from toast.models import build
from toast.plan.maxtext_policy import maxtext_policy
from toast.plan.policy_choice import best_choice, priced
from toast.plan.residual_costs import Recomputation, ResidualCost, recomputation
from toast.ports import HardwarePlatform
from toast.program import (
    PRESETS,
    Block,
    MemoryPolicy,
    Residual,
    TracedMemory,
    preset,
    survey,
)

SETTINGS = toast.Settings(rounds=1)


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w["q"], x @ w["k"]))
    x = x + jnp.einsum("bqk,bkd->bqd", scores, x @ w["v"])
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


def arrays(layers: int, batch: int, sequence: int, width: int) -> tuple[Any, Any]:
    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    square = shape(layers, width, width)
    weights = {
        "q": square, "k": square, "v": square, "up": shape(layers, width, 4 * width),
        "down": shape(layers, 4 * width, width),
    }  # fmt: skip
    return weights, shape(batch, sequence, width)


def scanned(weights: Any, x: Any) -> Any:
    block = toast.checkpoint(layer, prevent_cse=False)

    def loss(weights: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)[0] ** 2)

    return jax.value_and_grad(loss)(weights)


def unrolled(weights: Any, x: Any) -> Any:
    block = toast.checkpoint(layer)

    def loss(weights: Any) -> Any:
        y = x
        for number in range(len(weights["q"])):
            y = block(y, jax.tree.map(lambda w, n=number: w[n], weights))
        return jnp.mean(y**2)

    return jax.value_and_grad(loss)(weights)


def plan(step: Any, remat: Any, **options: Any) -> toast.Plan:
    return toast.plan(
        step, *arrays(4, 16, 1024, 256), mesh="data=4", hardware="tpu-v5e", settings=SETTINGS,
        remat=remat, **options,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[scanned, unrolled])
def step(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_survey_is_the_full_recomputation_with_names(step: Any) -> None:
    surveyed, full = plan(step, survey()), plan(step, "full")
    assert surveyed.policy == full.policy
    assert surveyed.after.step_seconds == pytest.approx(full.after.step_seconds, rel=0.05)
    costs = recomputation(surveyed)
    names = [r.name for r in costs.residuals if not r.is_input]
    assert len(names) > 6
    assert {r.block for r in costs.residuals} == {"layer"}
    # Four layers of float32[16,1024,1024] on four devices.
    wide = max((r for r in costs.residuals if not r.is_input), key=lambda r: r.bytes)
    assert wide.bytes == 4 * 16 * 1024 * 1024 * 4 / 4
    everything = range(len(costs.residuals))
    assert costs.recomputed_seconds(()) > 2 * costs.recomputed_seconds(everything)
    # What is kept goes through memory, so the step is shorter by less.
    assert (
        costs.recomputed_seconds(())
        > full.after.step_seconds - plan(step, "none").after.step_seconds
    )


def test_proposals_take_the_memory_that_they_say(step: Any) -> None:
    surveyed = plan(step, survey())
    costs = recomputation(surveyed)
    room = 0.4 * sum(r.bytes for r in costs.residuals if not r.is_input)
    choice = best_choice(costs, room)
    assert choice is not None
    assert 0 < choice.bytes <= room
    # The search may find shardings with less.
    traced = plan(step, choice.policy)
    assert traced.after.peak_bytes <= (surveyed.after.peak_bytes + choice.bytes) * 1.1
    assert traced.after.step_seconds < surveyed.after.step_seconds


@pytest.mark.parametrize("share", [0.5, 1.01])
def test_no_preset_is_better_than_auto(step: Any, share: float) -> None:
    presets = [plan(step, name) for name in ("none", "full", "minimal")]
    full, none = sorted(p.after.peak_bytes for p in presets)[::2]
    limit = full + share * (none - full)
    best = plan(step, "auto", memory_bytes=limit)
    assert best.fits
    fitting = [p.after.step_seconds for p in presets if p.after.peak_bytes <= limit]
    assert best.after.step_seconds <= min(fitting) * 1.01
    assert best.note.startswith("remat=auto chose the first of ")


def test_a_limit_that_no_policy_meets() -> None:
    with pytest.raises(toast.ToastError, match="no plan"):
        plan(scanned, "auto", memory_bytes=2**20)
    small = dataclasses.replace(load("tpu-v5e"), memory_limit_bytes=2**20)
    best = toast.plan(
        scanned, *arrays(4, 16, 1024, 256), mesh="data=4", hardware=small, settings=SETTINGS,
        remat="auto",
    )  # fmt: skip
    assert not best.fits
    assert "does not fit" in best.note


def accumulated(weights: Any, x: Any) -> Any:
    block = toast.checkpoint(layer, prevent_cse=False)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)[0] ** 2)

    return toast.accumulate(jax.value_and_grad(loss), batch_argnums=1)(weights, x)


def test_the_batch_is_cut_if_nothing_else_helps() -> None:
    full = plan(accumulated, "full").after.peak_bytes
    limit = 0.75 * full
    cut = plan(accumulated, "auto", memory_bytes=limit)
    assert cut.fits
    assert cut.microbatches > 1
    assert f"in {cut.microbatches} microbatches" in cut.note
    with pytest.raises(toast.ToastError):
        plan(accumulated, "auto", memory_bytes=limit, microbatches=1)
    with pytest.raises(toast.ToastError):
        plan(scanned, "auto", memory_bytes=limit)  # it accumulates nothing


def test_the_joint_plan_runs() -> None:
    shapes = arrays(2, 4, 16, 8)
    planned = toast.plan(
        scanned, *shapes, mesh="data=2", hardware="tpu-v5e", settings=SETTINGS, remat="auto"
    )
    given = jax.tree.map(lambda s: jax.random.normal(jax.random.key(1), s.shape) * 0.3, shapes)
    for result, expected in zip(
        jax.tree.leaves(planned.jit()(*given)), jax.tree.leaves(scanned(*given)), strict=True
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_presets_are_priced_as_proposals_are() -> None:
    surveyed = plan(scanned, survey())
    memory = surveyed.analysis.program.memory
    assert memory is not None
    costs = recomputation(surveyed)
    full = priced(costs, preset("full").resolved(memory.blocks))
    minimal = priced(costs, preset("minimal").resolved(memory.blocks))
    none = priced(costs, preset("none").resolved(memory.blocks))
    assert full.bytes == 0 < minimal.bytes < none.bytes
    assert full.seconds == costs.recomputed_seconds(()) > minimal.seconds


def test_models_with_composites_offload() -> None:
    """The form for CPUs has no transfers; prices are those of the form for the hardware."""
    target = build("qwen3-8b", layers=2, sequence=1024)
    analysis = toast.analyze(
        target, remat="qkv_proj_offloaded", platform=HardwarePlatform.of(load("tpu-v5e"))
    )
    program = analysis.program
    calls = [s for s in program.signatures if s.kind == "custom_call"]
    assert {s.attribute("call_target_name") for s in calls} == {"annotate_device_placement"}
    assert host_memory(program).moved.sum() == 6  # queries, keys and values, there and back


def graph(random: np.random.Generator) -> Recomputation:
    """A chain of nodes with random further needs; every second node has a name."""
    nodes, residuals, needs = 10, [], []
    for node in range(nodes):
        number = -1
        if node % 2:
            number = len(residuals)
            residuals.append(
                ResidualCost(
                    "block", f"r{number}", float(random.integers(1, 9)), 0.01, False,
                    float(random.choice([0.5, math.inf])),
                )
            )  # fmt: skip
        users = {node + 1, *random.integers(node + 1, nodes + 1, 2).tolist()}
        needs += [(user if user < nodes else -1, node, number) for user in users]
    seconds = tuple(random.uniform(0.1, 2.0, nodes).tolist())
    return Recomputation(("block",), tuple(residuals), seconds, tuple(needs))


@pytest.mark.parametrize("seed", range(5))
def test_the_proposal_is_the_best_of_all_policies(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = graph(random)
    for room in (0.0, 7.0, 15.0, 99.0):
        best = math.inf
        for choices in itertools.product(("recompute", "keep", "offload"), repeat=5):
            some = list(zip(choices, costs.residuals, strict=True))
            if sum(r.bytes for choice, r in some if choice == "keep") > room:
                continue
            present = [n for n, choice in enumerate(choices) if choice != "recompute"]
            seconds = costs.recomputed_seconds(present)
            seconds += sum(r.keep_seconds for choice, r in some if choice == "keep")
            seconds += sum(r.offload_seconds for choice, r in some if choice == "offload")
            best = min(best, seconds)
        choice = best_choice(costs, room)
        assert choice is not None
        assert choice.bytes <= room
        assert choice.seconds == pytest.approx(best, rel=2e-3)


def test_offloaded_arguments_of_blocks_make_room() -> None:
    costs = Recomputation(
        ("block",), (ResidualCost("block", "x", 8.0, 0.0, True, 0.5),), (1.0,), ((-1, 0, -1),)
    )
    kept, moved = best_choice(costs, 0.0), best_choice(costs, -8.0)
    assert kept is not None
    assert str(kept.policy) == "block: keep=x"
    assert moved is not None
    assert str(moved.policy) == "block: offload=x"
    assert best_choice(costs, -9.0) is None


def test_blocks_without_residuals_are_recomputed() -> None:
    choice = best_choice(Recomputation(("empty",), (), (), ()), 1.0)
    assert choice is not None
    assert str(choice.policy) == "empty: recompute=*"
    assert MemoryPolicy((PRESETS["full"],)).of("empty").keep == ()


def test_policies_as_maxtext_has_them() -> None:
    def memory(text: str, *names: str) -> TracedMemory:
        residuals = tuple(Residual(name, "product", (), 8) for name in names)
        blocks = (Block("layer", residuals),)
        return TracedMemory(MemoryPolicy.parse(text).resolved(blocks), 1, blocks)

    some = memory(
        "layer: keep=query,gate,sum offload=attention", "query", "gate", "sum", "attention", "mlpwo"
    )
    assert maxtext_policy(some).splitlines() == [
        "remat_policy: custom", "context: offload", "mlpwi_0: device", "mlpwo: remat",
        "query_proj: device", "# device, without a name in MaxText: sum",
    ]  # fmt: skip
    assert maxtext_policy(memory("minimal", "query")) == "remat_policy: minimal\n"
    assert maxtext_policy(memory("none", "query")).splitlines()[1] == "query_proj: device"
    with pytest.raises(toast.ToastError, match="no residual of the plan has a name of MaxText"):
        maxtext_policy(memory("layer: keep=sum", "sum"))
    with pytest.raises(toast.ToastError, match="has no memory policy"):
        plan(scanned, None).to_maxtext()
