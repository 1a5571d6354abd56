"""Plans with a memory policy and microbatches: prices, files, runs, errors."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from toast.errors import HardwareError, PlanError, TargetError
from toast.hardware import load

LAYERS = 4
SETTINGS = toast.Settings(rounds=1)


@toast.checkpoint
def layer(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    hidden = jnp.sin(x @ params["first"])
    return x + hidden @ params["second"]


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, one: (layer(x, one), None), x, params)
    return jnp.mean(x**2)


def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    value, gradient = toast.accumulate(jax.value_and_grad(loss), batch_argnums=1)(params, x)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


def arrays(rows: int, width: int) -> tuple[dict[str, Any], Any]:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {
        "first": shape((LAYERS, width, 2 * width)),
        "second": shape((LAYERS, 2 * width, width)),
    }
    return params, shape((rows, width))


PLANS: dict[str, toast.Plan] = {}


def plan(remat: Any = None, microbatches: int | None = None, **options: Any) -> toast.Plan:
    key = repr((remat, microbatches, options))
    if key not in PLANS:
        PLANS[key] = _plan(remat, microbatches, **options)
    return PLANS[key]


def _plan(remat: Any, microbatches: int | None, **options: Any) -> toast.Plan:
    return toast.plan(
        step, *arrays(2**16, 512), mesh="data=4", hardware="tpu-v5e", settings=SETTINGS,
        remat=remat, microbatches=microbatches, **options,
    )  # fmt: skip


def test_a_plan_has_its_policy() -> None:
    assert plan().policy is None
    policy = plan("minimal").policy
    assert policy is not None
    assert policy.label == "minimal"
    assert policy.of("layer").keep == (
        "x",
        "params['first']",
        "params['second']",
        "hidden.dot_general",
    )
    assert policy.of("layer").recompute == ("hidden",)
    first, second, *_ = plan("minimal").note.splitlines()
    kept = "hidden.dot_general"
    assert first == f"remat minimal, {LAYERS} runs of layer; recomputed: hidden; kept: {kept}"
    assert re.fullmatch(
        r"recomputation takes about [\d.]+ % of the step, and at most 256 MiB less waits on the "
        r"device for the backward pass",
        second,
    )


def test_recomputation_costs_time_and_frees_memory() -> None:
    none, minimal, full = plan("none"), plan("minimal"), plan("full")
    assert full.after.peak_bytes < minimal.after.peak_bytes < none.after.peak_bytes
    assert full.after.matmul_seconds > minimal.after.matmul_seconds
    assert minimal.after.matmul_seconds == pytest.approx(none.after.matmul_seconds, rel=0.01)


def test_microbatches_free_memory() -> None:
    one, four = plan("none"), plan("none", 4)
    assert (one.microbatches, four.microbatches) == (1, 4)
    assert four.after.peak_bytes < one.after.peak_bytes
    assert four.analysis.program.memory is not None
    assert four.analysis.program.memory.blocks[0].runs == 4 * LAYERS


def test_offloaded_values_leave_the_device() -> None:
    batch = toast.Constraints(fix={"x:0": "data"})
    kept = plan("layer: keep=hidden.dot_general", constraints=batch)
    offloaded = plan("layer: offload=hidden.dot_general", constraints=batch)
    assert offloaded.after.peak_bytes < kept.after.peak_bytes
    assert offloaded.after.step_seconds > kept.after.step_seconds  # the link is slow
    bare = dataclasses.replace(load("tpu-v5e"), host_bytes_per_s=float("inf"))
    with pytest.raises(HardwareError) as error:
        toast.plan(
            step, *arrays(64, 8), mesh="data=4", hardware=bare, remat="layer: offload=hidden"
        )
    assert str(error.value) == (
        "remat layer: offload=hidden: the file of tpu-v5e has no [host] with the speed of the link "
        "to the memory of the host; keep or recompute these values, or add [host] to the file"
    )


def test_auto_takes_the_best_policy() -> None:
    begin = time.perf_counter()
    best = plan("auto")
    wall = time.perf_counter() - begin
    # The seconds are those of all plans and of the choice of policies, not of the last plan.
    assert 0.9 * wall < sum(best.seconds.values()) < 1.1 * wall
    assert {"search", "memory policies"} < {*best.seconds}
    presets = map(plan, ("none", "minimal", "full"))
    assert best.after.step_seconds == min(each.after.step_seconds for each in presets)
    assert best.note.startswith("remat=auto chose the first of ")
    peak = plan("minimal").after.peak_bytes * 1.01
    small = plan("auto", memory_bytes=peak)
    assert small.fits
    assert "compared with everything kept under the same shardings, the step takes " in small.note
    assert "recomputation takes about" not in small.note
    assert small.policy != plan("none").policy


@pytest.mark.parametrize(
    "policy", ["none", "full", "layer[:3]: recompute=*; layer[3:]: keep=hidden"]
)
def test_the_plan_runs_its_program(policy: str) -> None:
    shapes = arrays(16, 8)
    planned = toast.plan(
        step, *shapes, mesh="data=4", hardware="tpu-v5e", settings=SETTINGS, remat=policy,
        microbatches=2,
    )  # fmt: skip
    key = jax.random.key(0)
    given = jax.tree.map(lambda s: jax.random.normal(key, s.shape) * 0.2, shapes)
    result = planned.jit()(*given)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, result, step(*given))
    assert planned.verify().equal


def test_files_keep_the_policy(tmp_path: pathlib.Path) -> None:
    planned = plan("layer[:1]: keep=hidden; layer[1:]: recompute=*", 2)
    planned.to_json(tmp_path / "plan.json")
    applied = toast.apply_plan(tmp_path / "plan.json", step, *arrays(2**16, 512))
    assert applied.same_program
    assert applied.plan.policy == planned.policy
    assert applied.plan.microbatches == 2
    other = toast.apply_plan(tmp_path / "plan.json", step, *arrays(2**16, 512), remat="full")
    assert not other.same_program
    assert other.plan.policy == plan("full").policy


def test_what_is_not_traced_has_no_policy() -> None:
    lowered = jax.jit(step).lower(*arrays(16, 8))
    with pytest.raises(TargetError) as error:
        toast.plan(lowered, mesh="data=4", hardware="tpu-v5e", remat="full")
    assert str(error.value) == (
        "remat='full': needs a function that can be traced again, not a Lowered; pass the function "
        "itself"
    )
    with pytest.raises(TargetError, match=r"^microbatches: has no effect for a target of type "):
        toast.plan(plan().analysis, mesh="data=4", hardware="tpu-v5e", microbatches=2)


def test_notes_say_what_is_recomputed_first() -> None:
    (full,) = (line for line in plan("full").note.splitlines() if line.startswith("remat"))
    assert full == "remat full, 4 runs of layer; recomputed: hidden"
    assert plan("none").note.splitlines()[0] == "remat none, 4 runs of layer; everything is kept"
    moved = plan("layer: offload=hidden.dot_general,x").note.splitlines()
    assert "; offloaded: hidden.dot_general, x" in moved[0]
    assert "at most 512 MiB less waits on the device for the backward pass" in moved[1]


def test_ranges_are_those_of_one_microbatch() -> None:
    ranges = "layer[:1]: keep=@product; layer[1:3]: recompute=*; layer[3:]: keep=*"
    once, four = (plan(ranges, number).note.splitlines() for number in (1, 4))
    assert [line.partition(";")[0] for line in once[:3]] == [
        "remat, first 1 of 4 runs of layer",
        "remat, 2 of 4 runs of layer, from number 2 on",
        "remat, last 1 of 4 runs of layer",
    ]
    assert four[0] == "the batch is cut into 4 microbatches"
    assert [line.partition(";")[0] for line in four[1:4]] == [
        f"{line.partition(';')[0]}, in each of 4 microbatches" for line in once[:3]
    ]


def test_another_policy_is_an_alternative_in_python() -> None:
    given, why_not = arrays(2**16, 512), functools.partial(toast.why_not, budget=1.0)
    kept = plan("none")
    full = why_not(kept, step, *given, remat="full")
    assert (full.argument, full.spec, full.now) == ("remat", "full", ("none",))
    assert not full.better
    assert full.searched is not None
    assert full.accept().policy == plan("full").policy
    # Costs are those of one program, so that they compare as steps do.
    steps = full.accept().after.step_seconds / kept.after.step_seconds
    assert full.searched.cost / kept.cost == pytest.approx(steps) != 1.0
    assert full.plan_cost == kept.cost
    assert why_not(plan("full"), step, *given, remat="none").better

    cut = why_not(kept, step, *given, microbatches=4)
    assert (cut.now, cut.accept().microbatches, cut.accept().policy) == (("1",), 4, kept.policy)
    moved = why_not(kept, step, *given, offload=["hidden.dot_general", "layer_input"])
    assert moved.now == ("keep = hidden.dot_general,layer_input",)
    assert moved.accept().policy.of("layer").offload == ("x", "hidden.dot_general")
    again = why_not(plan("full"), step, *given, keep="hidden")
    assert again.accept().policy.of("layer").keep[-1] == "hidden"


def test_why_not_says_what_it_needs() -> None:
    given = arrays(2**16, 512)
    for option, value in (("remat", "full"), ("microbatches", 4)):
        said = f"^{option}={value!r}: no argument has this name, .*; use toast.why_not\\(plan, "
        with pytest.raises(PlanError, match=said):
            plan("none").why_not(option, value)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (given, {}, "toast.why_not: no alternative; use one of remat, microbatches, keep, "),
        (given, {"remat": "full", "keep": "x"}, "toast.why_not: remat and keep; use one of "),
        (arrays(2**15, 512), {"remat": "full"}, "has other arguments than the program of the plan"),
        (given, {"remat": "full", "donate": 0}, "other arguments are donated than in the plan; "),
        (
            given,
            {"recompute": "hidden"},
            "recompute=hidden: the plan has hidden recomputed already",
        ),
        (given, {"remat": "half"}, "neither a policy nor a preset"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(toast.ToastError, match=message):
            toast.why_not(plan("full"), step, *arguments, budget=0.0, **options)
    with pytest.raises(PlanError, match=r"^keep=hidden: the plan has no memory policy, which this "
        r"would change; use remat='\*: keep=\* keep=hidden', or make the plan with remat=$"
    ):  # fmt: skip
        toast.why_not(plan(), step, *given, keep="hidden", budget=0.0)


def test_the_note_says_what_the_program_recomputes_itself() -> None:
    def outer(x: Any, w: Any) -> Any:
        own = jax.checkpoint(lambda x, w: jnp.sin(x @ w["second"]))
        return x + own(jnp.sin(x @ w["first"]), w)

    def whole(marked: Any, params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, one: (marked(x, one), None), x, params)
        return jnp.mean(x**2)

    def note(marked: Any, remat: str) -> list[str]:
        gradient = jax.grad(functools.partial(whole, marked))
        return toast.plan(
            gradient, *arrays(1024, 128), mesh="data=4", hardware="tpu-v5e", settings=SETTINGS,
            remat=remat,
        ).note.splitlines()  # fmt: skip

    place = r"<lambda> at test_remat.py:\d+"
    none = note(toast.checkpoint(outer), "none")
    kept = f"remat none, 4 runs of outer; everything is kept but what {place} recomputes"
    assert re.fullmatch(kept, none[0])
    said = (
        f"left as it is: {place} has a jax.checkpoint of its own, which recomputes in outer "
        "whatever the plan does; toast.checkpoint in its place lets plans decide"
    )
    assert re.fullmatch(said, none[1])
    beside = (
        f"left as it is: {place} has a jax.checkpoint of its own, so that the plan decides nothing "
        r"about the rest of the scan at test_remat.py:\d+ \(whole\); toast.checkpoint in its "
        "place lets plans decide"
    )
    assert any(re.fullmatch(beside, line) for line in note(outer, "auto"))


def test_policies_with_several_blocks_share_a_line() -> None:
    def two(weights: Any, x: Any) -> Any:
        def first(w: Any, x: Any) -> Any:
            return jnp.sin(x @ w)

        def second(w: Any, x: Any) -> Any:
            return jnp.tanh(jnp.cos(x @ w))

        x = toast.checkpoint(first)(weights, x)
        return toast.checkpoint(second)(weights, x).sum()

    f32 = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    planned = toast.plan(
        jax.grad(two), f32, f32, mesh="data=4", hardware="tpu-v5e", settings=SETTINGS, remat="full"
    )
    lines = planned.note.splitlines()
    assert lines[0].startswith("remat full, first; recomputed: ")
    assert lines[1].startswith("remat full, second; recomputed: ")
    assert lines[2].startswith("recomputation takes about ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"remat": jax.checkpoint_policies.dots_saveable},
            "remat=.*: a policy of JAX belongs to",
        ),
        ({"remat": True}, "remat=True: use a preset such as 'full', names of values, or 'auto'"),
        ({"remat": "full", "microbatches": "auto"}, "microbatches='auto': use a number"),
        ({"remat": "auto", "microbatches": "auto"}, "microbatches='auto': use a number"),
    ],
)
def test_options_of_jax_are_no_options_of_a_plan(options: dict[str, Any], said: str) -> None:
    """They are no arguments of the function, either: it would not take them."""
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    with pytest.raises(toast.ToastError, match=said):
        toast.plan(jax.grad(lambda x: (x**2).sum()), x, mesh="d=2", hardware="tpu-v5e", **options)


def test_lowered_programs_have_no_joint_plan() -> None:
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    lowered = jax.jit(jax.grad(lambda x: (x**2).sum())).lower(x)
    with pytest.raises(toast.ToastError, match="remat='auto': needs a function"):
        toast.plan(lowered, mesh="d=2", hardware="tpu-v5e", remat="auto")


def test_a_policy_of_a_mark_counts_outside_of_plans() -> None:
    nothing = jax.checkpoint_policies.nothing_saveable

    def marked(weights: Any, x: Any) -> Any:
        one = toast.checkpoint(lambda x, w: jnp.sin(x @ w), name="own", policy=nothing)
        return jnp.mean(one(one(x, weights[0]), weights[1]))

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    planned = toast.plan(
        jax.grad(marked), shapes, jax.ShapeDtypeStruct((256, 64), jnp.float32), mesh="data=2",
        hardware="tpu-v5e", remat="none", settings=SETTINGS,
    )  # fmt: skip
    assert planned.note.splitlines()[0] == (
        "remat none, 2 runs of own; everything is kept; toast.checkpoint(policy=) counts outside "
        "of plans only"
    )
