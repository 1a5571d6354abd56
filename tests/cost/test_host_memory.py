"""Values in the memory of the host: they take none of the device, and their transfers take time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import toast
from toast.analysis import Analysis
from toast.cost import CostModel, Memo, break_down
from toast.cost.host_memory import host_memory
from toast.evaluation.baselines import manual
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.plan import Plan
from toast.space import Space

#: Queries of four layers, and their inputs.
SHAPES = [(4, 8, 8192, 4096), (4, 8, 8192, 8, 4, 128)]


@functools.cache
def analysis_of(
    offload: str, *, layers: int = 4, remat: str = "key", unroll: int | None = None,
    platform: str = "tpu",
) -> Analysis:  # fmt: skip
    model = build(
        "llama3.1-8b", layers=layers, batch=8, remat=remat, offload=offload, unroll=unroll
    )
    return toast.analyze(model, platform=platform)


def fsdp(analysis: Analysis, hardware: Any = "tpu-v6e") -> Plan:
    strategies = {"FSDP": ZOO["llama3.1-8b"].strategies["FSDP"]}
    return manual(analysis, "fsdp=8", hardware, strategies, memory_bytes=2.0**50)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_stacks_of_scans_are_at_the_host(platform: str) -> None:
    program = analysis_of("layer_input+query", platform=platform).program
    at_host = host_memory(program)
    stacks = {program.values[v].type.shape for v in np.flatnonzero(at_host.inside)}
    assert {shape for shape in stacks if shape[0] == 4} == set(SHAPES)
    # The keys have a stack on the device.
    kept = (4, 8, 8192, 8, 128)
    assert kept in {value.type.shape for value in program.values} - stacks
    # Each value moves to the host once, and back once.
    assert [program.kind(program.values[v].op) for v in np.flatnonzero(at_host.moved)] == [
        "custom_call"
    ] * 4


def test_nothing_is_at_the_host_without_offloading() -> None:
    at_host = host_memory(analysis_of("").program)
    assert not at_host.inside.any()
    assert not at_host.moved.any()


def peaks(layers: int, unroll: int | None, hardware: str, platform: str) -> tuple[float, ...]:
    """The peaks if queries are computed again, kept, and moved to the host."""
    return tuple(
        fsdp(
            analysis_of(offload, layers=layers, remat=remat, unroll=unroll, platform=platform),
            hardware,
        ).after.peak_bytes
        for remat, offload in (("key", ""), ("key+query", ""), ("key", "query"))
    )


def test_values_at_the_host_take_no_memory_of_the_device() -> None:
    again, kept, moved = peaks(16, 1, "h100", "cuda")
    # A layer's queries of 8192 tokens have 64 MiB on a device; the peak may move elsewhere.
    assert kept - again > 0.3 * 16 * 2**26
    assert abs(moved - again) <= 1.1 * 2**26


def test_loops_that_fetch_copy_stacks_on_a_tpu() -> None:
    """Half of those of inputs, which have norms and longer sequences than the model is wide.

    XLA's peaks for 16 layers: 12.6, 14.5 and 13.5 GiB.
    """
    again, kept, moved = peaks(32, None, "tpu-v6e", "tpu")
    assert kept - again > 0.3 * 32 * 2**26
    assert moved - again == pytest.approx(32 * 2**26 / 2, abs=2 * 2**26)
    assert moved < kept


def test_stacks_at_the_host_are_not_in_the_timeline() -> None:
    plan = fsdp(analysis_of("query", layers=32))
    shapes = [plan.analysis.program.values[b.value].type.shape for b in plan.timeline.at_peak]
    assert (32, 8, 8192, 8, 4, 128) not in shapes


def test_values_outside_of_loops_stay_on_a_tpu_until_they_come_back() -> None:
    """XLA moves them to the host just before it moves them back."""
    again, kept, moved = peaks(16, 1, "tpu-v6e", "tpu")
    assert kept - again > 0.3 * 16 * 2**26
    assert moved == pytest.approx(kept, rel=0.01)


def test_transfers_run_beside_everything_else() -> None:
    analysis = analysis_of("layer_input+query")
    fast, slow = load("tpu-v6e"), dataclasses.replace(load("tpu-v6e"), host_bytes_per_s=1e9)
    moved = 2 * 4 * 2 * 2**26  # two values of four layers, to the host and back
    free = fsdp(analysis, dataclasses.replace(fast, host_bytes_per_s=1e15)).after
    assert fsdp(analysis).after.step_seconds == pytest.approx(free.step_seconds)
    late = fsdp(analysis, slow)
    assert late.after.step_seconds == pytest.approx(moved / 1e9)
    assert late.breakdown.term_seconds["host transfers"].sum() == pytest.approx(moved / 1e9)
    waiting = late.after.memory_seconds - free.memory_seconds
    assert waiting == pytest.approx(moved / 1e9 - free.step_seconds)


def test_the_memo_and_the_bound_know_transfers() -> None:
    space = Space(analysis_of("layer_input+query"), Mesh.parse("fsdp=8"))
    model = CostModel(space, dataclasses.replace(load("tpu-v6e"), host_bytes_per_s=1e9))
    prices, worth = model.price(space.initial[None]), Memo(model).price(space.initial[None])
    np.testing.assert_allclose(worth.seconds, prices.seconds)
    np.testing.assert_allclose(worth.peak_bytes, prices.peak_bytes)
    assert model.lower_bound() <= prices.seconds[0]
    transfers = break_down(model, space.initial).term_seconds["host transfers"].sum()
    assert prices.seconds[0] == pytest.approx(max(transfers, prices.seconds[0]))
