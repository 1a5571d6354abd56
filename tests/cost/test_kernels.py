"""Kernels are priced by their costs: whole as XLA runs them, and in shards if they are partitioned."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

import toast
from tests.rules.kernels import GROUPED, Q, call, splash_gradient
from toast.analysis.rules import solve_rules
from toast.cost import CostModel, Memo, break_down
from toast.hardware import Mesh, load
from toast.program import KernelCost
from toast.space import Space, States

#: Of the TPU v5e.
PEAK, BANDWIDTH = load("tpu-v5e").peak("bf16"), load("tpu-v5e").memory_bytes_per_s

RULE = """custom_call_rule("mine").
%! mine(Op): a call of it.
mine(Op) :- op(Op,custom_call), attribute(Op,call_target_name,"mine").
factor(Op,D,T,D)              :- mine(Op), tensor_dim(Op,T,D,_).
kernel_cost(Op,flops,1000000,work)  :- mine(Op).
kernel_cost_over(Op,work,(0; 1))    :- mine(Op).
kernel_cost(Op,bytes,100,more)      :- mine(Op).
kernel_cost_over(Op,more,0)         :- mine(Op).
kernel_cost(Op,workspace,4096,room) :- mine(Op).
kernel_cost_over(Op,room,0)         :- mine(Op).
kernel_cost(Op,workspace,1024,less) :- mine(Op).
"""


def model_of(
    tmp_path: pathlib.Path,
    rule: str,
    mesh: str = "data=4",
    shape: str = "256x64xbf16",
    hardware: str = "tpu-v5e",
) -> CostModel:
    (tmp_path / "program.mlir").write_text(call("mine", [shape], [shape]))
    (tmp_path / "rule.lp").write_text(rule)
    analysis = toast.analyze(tmp_path / "program.mlir", rules=[tmp_path / "rule.lp"], cache=False)
    return CostModel(Space(analysis, Mesh.parse(mesh)), load(hardware))


def sharded(model: CostModel, factor: int, axis: int = 0) -> States:
    """All ops sharded along a dimension."""
    state = model.space.initial.copy()
    state[:, axis] = factor
    return state


def kernel_seconds(model: CostModel, state: States) -> float:
    return float(break_down(model, state).term_seconds["kernels"].sum())


@pytest.mark.parametrize(("hardware", "work"), [("tpu-v5e", 1 + 8 * 256 / 8192), ("h100", 8)])
def test_gpus_compute_ragged_products_once_for_each_group(hardware: str, work: float) -> None:
    """The kernel of TPUs skips the rows of other groups, but for a tile at the end of each."""
    rows, weights = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((8192, 4096), (8, 4096, 8192)))
    plan = toast.plan(
        jax.lax.ragged_dot, rows, weights, jax.ShapeDtypeStruct((8,), "int32"),
        mesh="data=4", hardware=hardware,
    )  # fmt: skip
    rules = plan.analysis.rules  # CPUs have another form of the op
    flops = sum(cost.amount for rule in rules for cost in rule.costs if cost.quantity == "flops")
    assert flops == pytest.approx(work * 2 * 8192 * 4096 * 8192)
    assert plan.after.matmul_seconds == pytest.approx(plan.before.matmul_seconds / 4, rel=0.05)
    assert plan.arguments[next(iter(plan.arguments))] == ((), ())
    # On GPUs, the results of all groups are in memory until they are added up.
    result_bytes = 8192 * 8192 * 2
    needed = (
        8192 * 4096 * 2 + 8 * 4096 * 8192 * 2 + (8 + 1 if hardware == "h100" else 1) * result_bytes
    )
    assert plan.before.peak_bytes == pytest.approx(needed, rel=2e-2)


def test_ragged_products_of_little_depth_move_the_results_of_all_groups_on_gpus() -> None:
    def experts(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        product = jax.lax.ragged_dot(rows, weights, sizes)
        return jax.grad(lambda w: jax.lax.ragged_dot(rows, w, sizes).sum())(weights), product

    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((8192, 16), (8, 16, 256))]
    sizes = jax.ShapeDtypeStruct((8,), "int32")
    rows, weights, result = 8192 * 16, 8 * 16 * 256, 8192 * 256
    for platform, groups in (("cuda", 8), ("tpu", 0)):
        analysis = toast.analyze(experts, *shapes, sizes, platform=platform)
        model = CostModel(Space(analysis, Mesh.parse("data=2")), load("tpu-v5e"))
        # Those of the product are written and read; the gradient reads its operands for each group.
        forward = rows + weights + result + 2 * groups * result
        backward = weights + (1 + groups) * (rows + result)
        assert kernel_seconds(model, model.space.initial) == pytest.approx(
            2 * (forward + backward) / BANDWIDTH, rel=1e-3
        )


def test_a_kernel_is_a_roofline(tmp_path: pathlib.Path) -> None:
    model = model_of(tmp_path, RULE)
    assert kernel_seconds(model, model.space.initial) == pytest.approx(256 * 64 * 1e6 / PEAK)
    # The bytes of operand and result count once, with those that the kernel moves besides.
    memory = model_of(tmp_path, RULE.replace("1000000", "1"))
    moved = 2 * 256 * 64 * 2 + 100 * 256
    assert kernel_seconds(memory, memory.space.initial) == pytest.approx(moved / BANDWIDTH)
    seconds = break_down(memory, memory.space.initial).term_seconds
    assert not seconds["reads"].any()
    assert not seconds["writes"].any()


def test_a_kernel_may_read_a_part_of_an_operand(tmp_path: pathlib.Path) -> None:
    """Of the operand, a quarter of the rows; the result is written whole."""
    part = """partitioned(Op) :- mine(Op).
kernel_cost(Op,elements,1,operand(0))      :- mine(Op).
kernel_cost_over(Op,operand(0),(0; 1))     :- mine(Op).
kernel_share(Op,operand(0),1,4)            :- mine(Op).
"""
    rule = RULE.replace("1000000", "1")
    model = model_of(tmp_path, rule + part)
    moved = (1 / 4 + 1) * 256 * 64 * 2 + 100 * 256
    assert kernel_seconds(model, model.space.initial) == pytest.approx(moved / BANDWIDTH)
    assert kernel_seconds(model, sharded(model, 0)) == pytest.approx(moved / BANDWIDTH / 4)


def test_a_partitioned_kernel_is_divided_among_devices(tmp_path: pathlib.Path) -> None:
    whole = model_of(tmp_path, RULE)
    assert not (whole.space.classes.divisor > 1)[whole.space.classes.of_op[1]].any()
    parts = model_of(tmp_path, RULE + "partitioned(Op) :- mine(Op).\n")
    rows, columns = (kernel_seconds(parts, sharded(parts, factor)) for factor in (0, 1))
    assert rows == columns == pytest.approx(256 * 64 * 1e6 / PEAK / 4)
    assert kernel_seconds(parts, parts.space.initial) == pytest.approx(4 * rows)


def test_a_workspace_is_in_memory_while_the_kernel_runs(tmp_path: pathlib.Path) -> None:
    """On devices without fast memory, where small temporaries would be."""
    rule, hardware = RULE + "partitioned(Op) :- mine(Op).\n", "h100"
    plain = model_of(tmp_path, rule.replace("workspace", "flops"), hardware=hardware)
    model = model_of(tmp_path, rule, hardware=hardware)
    for state, size in ((model.space.initial, 4096 * 256), (sharded(model, 0), 4096 * 64)):
        more = model.price(state[None]).peak_bytes - plain.price(state[None]).peak_bytes
        assert more == pytest.approx(size + 1024)
        timeline = model.timeline(state)
        assert {buffer.what: buffer.bytes for buffer in timeline.at_peak}[
            "workspace"
        ] == size + 1024
        assert np.allclose(Memo(model).price(state[None]).peak_bytes, timeline.peak_bytes)


def test_attention_has_a_rate_of_its_own(tmp_path: pathlib.Path) -> None:
    """Kernels with products and many exponentials; others have the rate of products."""
    exponentials = (
        "kernel_cost(Op,transcendentals,1000,scores) :- mine(Op).\n"
        "kernel_cost_over(Op,scores,(0; 1)) :- mine(Op).\n"
    )
    both = RULE + exponentials
    for rule, share in ((both, 0.4), (RULE, 1.0)):
        model = model_of(tmp_path, rule)
        alike = dataclasses.replace(model.hardware, attention_efficiency=None)
        seconds = kernel_seconds(CostModel(model.space, alike), model.space.initial)
        slow = dataclasses.replace(
            model.hardware, attention_efficiency=0.4 * model.hardware.matmul_efficiency
        )
        slower = CostModel(model.space, slow)
        assert kernel_seconds(slower, model.space.initial) == pytest.approx(seconds / share)


def test_small_products_take_a_latency() -> None:
    shapes = [jax.ShapeDtypeStruct((size, size), "bfloat16") for size in (128, 128)]
    space = Space(toast.analyze(jax.numpy.matmul, *shapes), Mesh.parse("data=4"))
    machine = dataclasses.replace(load("h100"), product_latency_s=0.0)
    late = dataclasses.replace(machine, product_latency_s=4e-6)
    plain, model = CostModel(space, machine), CostModel(space, late)
    assert model.initial_seconds == pytest.approx(plain.initial_seconds + 4e-6)
    assert model.lower_bound() == pytest.approx(plain.lower_bound() + 4e-6)


def test_the_allocator_has_gaps() -> None:
    """All bytes in memory count with gaps; time does not change."""
    shapes = [jax.ShapeDtypeStruct((size, size), "bfloat16") for size in (128, 128)]
    space = Space(toast.analyze(jax.numpy.matmul, *shapes), Mesh.parse("data=4"))
    machine = load("h100")
    plain, model = (
        CostModel(space, machine),
        CostModel(space, dataclasses.replace(machine, allocator_efficiency=0.8)),
    )
    assert model.initial_peak == pytest.approx(plain.initial_peak / 0.8)
    assert model.initial_seconds == plain.initial_seconds
    assert model.timeline(space.initial).peak_bytes == pytest.approx(model.initial_peak)
    prices = Memo(model).price(space.initial[None])
    assert prices.peak_bytes[0] == pytest.approx(model.initial_peak)


def test_exponentials_count_alone(tmp_path: pathlib.Path) -> None:
    """Beside products, kernels compute them faster than XLA's own kernels do."""
    rule = RULE.replace("flops,1000000", "transcendentals,10")
    model = model_of(tmp_path, rule)
    expected = 256 * 64 * 10 / load("tpu-v5e").transcendentals_per_s
    assert kernel_seconds(model, model.space.initial) == pytest.approx(expected)
    both = model_of(tmp_path, rule + "kernel_cost(Op,flops,1,work) :- mine(Op).\n")
    assert kernel_seconds(both, both.space.initial) < expected


def test_attention_has_the_price_of_its_products() -> None:
    """Forwards 2 products, backwards 4 for keys and 3 for queries, of the blocks of the mask."""
    program = splash_gradient()
    model = CostModel(Space(toast.analyze(program), Mesh.parse("data=2")), load("tpu-v5e"))
    seconds = break_down(model, model.space.initial).term_seconds["kernels"]
    product = 2 * 2 * 8 * 1024 * 1024 * 128 * 3 / 4 / PEAK / model.hardware.attention_share
    # Reading and writing takes longer than the forward products.
    moved = 2 * (np.prod(Q.shape) * 2 + np.prod(GROUPED.shape) * 2) + np.prod(Q.shape) * 4
    forward, *backward = seconds[seconds > 0]
    assert forward == pytest.approx(max(2 * product, moved / BANDWIDTH), rel=0.05)
    assert backward == pytest.approx([4 * product, 3 * product])


def test_an_estimate_is_the_price_of_a_kernel_without_a_rule(tmp_path: pathlib.Path) -> None:
    config = {"custom_call_config": {"cost_estimate": {"flops": 10**15, "transcendentals": 1}}}
    path = tmp_path / "program.mlir"
    path.write_text(call("tpu_custom_call", ["8x8xbf16"], ["8x8xbf16"], kernel="k", config=config))
    analysis = toast.analyze(path, cache=False)
    model = CostModel(Space(analysis, Mesh.parse("data=2")), load("tpu-v5e"))
    assert kernel_seconds(model, model.space.initial) == pytest.approx(1e15 / PEAK)


def test_costs_are_cached(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOAST_CACHE", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "program.mlir").write_text(call("mine", ["8x8xf32"], ["8x8xf32"]))
    read = "kernel_cost(Op,elements,4,operand(0)) :- mine(Op).\n"
    over = "kernel_cost_over(Op,operand(0),0) :- mine(Op).\n"
    (tmp_path / "rule.lp").write_text(RULE + read + over)
    first, again = (
        toast.analyze(tmp_path / "program.mlir", rules=[tmp_path / "rule.lp"]) for _ in range(2)
    )
    assert first.rules == again.rules == solve_rules(first.program, [tmp_path / "rule.lp"])
    (rule,) = (rule for rule in again.rules if rule.costs)
    assert rule.runs_whole
    assert KernelCost("bytes", 128.0, (0,), 0) in rule.costs
    assert KernelCost("workspace", 1024.0, ()) in rule.costs


@pytest.mark.parametrize(("hardware", "share"), [("tpu-v5e", 2.0), ("h100", 1.0)])
def test_small_elements_fill_a_lane(hardware: str, share: float) -> None:
    """A TPU writes zeros of bf16 as slowly as those of as many float32 elements."""
    described = load(hardware)
    wide, small = described.fill_bytes_per_s(np.array([4.0, 2.0]))
    assert wide / small == share
