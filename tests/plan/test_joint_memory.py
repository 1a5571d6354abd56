"""Policies that an integer program proposes, from what a survey costs."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.layered_steps import arrays, scanned_step, unrolled_step
from toast.cost import PolicyModel
from toast.cost.host_memory import host_memory
from toast.cost.policy_programs import PolicyPrograms
from toast.cost.residuals import residuals_of
from toast.errors import SearchError
from toast.hardware import load
from toast.models import build
from toast.plan import joint_memory
from toast.plan.maxtext_policy import maxtext_policy
from toast.plan.survey_policies import SurveyPolicies
from toast.plan.written_policies import written_ops
from toast.ports import HardwarePlatform
from toast.program import (
    Block,
    MemoryPolicy,
    Residual,
    RunRange,
    TracedMemory,
    preset,
    survey,
)

SETTINGS = toast.Settings(rounds=1)


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w["q"], x @ w["k"]))
    x = x + jnp.einsum("bqk,bkd->bqd", scores, x @ w["v"])
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


scanned, unrolled = scanned_step(layer), unrolled_step(layer)


def plan(step: Any, remat: Any, **options: Any) -> toast.Plan:
    options.setdefault("settings", SETTINGS)
    return toast.plan(
        step, *arrays(4, 16, 1024, 256), mesh="data=4", hardware="tpu-v5e", remat=remat, **options
    )


@pytest.fixture(scope="module", params=[scanned, unrolled])
def step(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def surveyed(step: Any) -> toast.Plan:
    return plan(step, survey())


def test_a_survey_is_the_full_recomputation(step: Any, surveyed: toast.Plan) -> None:
    assert surveyed.policy is not None
    # Names of values change no price: at the same shardings, prices are equal.
    again = plan(step, "full", start=surveyed, settings=toast.Settings(rounds=0))
    assert again.after.step_seconds == pytest.approx(surveyed.after.step_seconds)
    assert again.after.peak_bytes == pytest.approx(surveyed.after.peak_bytes)
    residuals = residuals_of(surveyed.analysis.program)
    assert {r.block for r in residuals.named} == {"layer"}
    names = [r.name for r in residuals.named if not r.is_input]
    assert len(names) > 6
    # What is kept does not run again, and neither does what only it needs.
    nothing, everything = (
        residuals.choices([preset(name).resolved(surveyed.analysis.program.memory.blocks)])  # type: ignore[union-attr]
        for name in ("full", "none")
    )
    assert residuals.running(nothing).all()
    assert residuals.running(everything).sum() < residuals.graph.nodes / 2
    # Four layers of float32[16,1024,1024] on four devices.
    costs = PolicyModel(surveyed.model, 2**40, [surveyed.policy]).memo(2**40).costs(surveyed.state)
    assert costs.kept_bytes.max() == 4 * 16 * 1024 * 1024 * 4 / 4


#: Policies, whose prices are those of the traced programs at the shardings of the survey.
EXPECTED = (
    "full", "minimal", "none", "named", "layer: keep=scores,layer.dot_general",
    "layer: keep=scores.sub,x_2 offload=layer.dot_general",
)  # fmt: skip


@pytest.mark.parametrize("policy", EXPECTED)
def test_simulated_prices_are_those_of_the_traced_program(
    step: Any, surveyed: toast.Plan, policy: str
) -> None:
    memory = surveyed.analysis.program.memory
    assert memory is not None
    text = MemoryPolicy.parse(policy).resolved(memory.blocks)
    policies = SurveyPolicies(surveyed)
    simulated = policies.priced(text)
    traced = plan(step, policy, start=surveyed, settings=toast.Settings(rounds=0))
    assert simulated.written
    assert simulated.step_seconds == pytest.approx(traced.after.step_seconds, rel=0.002)
    assert simulated.peak_bytes == pytest.approx(traced.after.peak_bytes, rel=0.025)
    # Quick estimates are near.
    quick = policies.presets().get(policy, simulated)
    assert quick.step_seconds == pytest.approx(traced.after.step_seconds, rel=0.13)
    assert quick.peak_bytes == pytest.approx(traced.after.peak_bytes, rel=0.3)


def test_a_program_is_written_once_for_its_price_and_for_its_start(
    surveyed: toast.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    under = PolicyPrograms.under

    def counted(self: Any, residuals: Any, choices: Any) -> Any:
        written.append(choices)
        return under(self, residuals, choices)

    monkeypatch.setattr(PolicyPrograms, "under", counted)
    memory = surveyed.analysis.program.memory
    assert memory is not None
    plan_of_survey = dataclasses.replace(surveyed)  # without prices of other tests
    policies = SurveyPolicies(plan_of_survey)
    policy = MemoryPolicy.parse("layer: keep=scores").resolved(memory.blocks)
    choice = policies.priced(policy)
    assert choice.written
    traced = dataclasses.replace(
        surveyed.analysis.program, memory=dataclasses.replace(memory, policy=policy)
    )
    ops = written_ops(plan_of_survey, traced)
    assert ops is not None
    assert len(written) == 1
    assert len(ops.state) == len(ops.program.ops)


@pytest.mark.parametrize(
    "policy",
    [
        "layer[:1]: recompute=*; layer[1:]: keep=*",
        "layer[:2]: offload=layer.dot_general keep=scores.sub; layer[2:]: keep=@product",
    ],
)
def test_simulated_prices_of_policies_by_layers(
    step: Any, surveyed: toast.Plan, policy: str
) -> None:
    memory = surveyed.analysis.program.memory
    assert memory is not None
    asked = MemoryPolicy.parse(policy)
    (block,) = memory.blocks
    parts = [dataclasses.replace(block, name=entry.block) for entry in asked.blocks]
    simulated = SurveyPolicies(surveyed).priced(asked.resolved(parts))
    traced = plan(step, policy, start=surveyed, settings=toast.Settings(rounds=0))
    assert traced.policy == simulated.policy
    assert simulated.written == (step is unrolled)  # a scan would be cut
    time, space = (0.002, 0.025) if simulated.written else (0.1, 0.08)
    assert simulated.step_seconds == pytest.approx(traced.after.step_seconds, rel=time)
    if not simulated.written and "offload" in policy:
        pytest.xfail("the peak that is estimated for a scan that would be cut is 11 % too high")
    assert simulated.peak_bytes == pytest.approx(traced.after.peak_bytes, rel=space)


def test_plans_of_other_policies_start_with_the_shardings_of_the_survey() -> None:
    """Gradients outside of blocks have other paths, and masks are not sharded over the batch."""

    @toast.checkpoint
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        scores = jnp.einsum("bqd,bkd->bqk", x @ w["q"], x @ w["k"])
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
        x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x @ w["v"])
        return x + jax.nn.silu(x @ w["up"]) @ w["down"]

    def masked(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for number in range(2):
                y = layer(y, jax.tree.map(lambda w, n=number: w[n], weights))
            return jnp.mean(y**2)

        return jax.value_and_grad(loss)(weights)

    def planned(remat: Any, **options: Any) -> toast.Plan:
        shapes = arrays(2, 16, 1024, 256)
        return toast.plan(
            masked, *shapes, mesh="data=4,model=4", hardware="tpu-v5e", remat=remat, **options
        )

    surveyed = planned(survey(), settings=SETTINGS)
    memory = surveyed.analysis.program.memory
    assert memory is not None
    policies = SurveyPolicies(surveyed)
    (block,) = memory.blocks
    policy = MemoryPolicy.parse("layer[:1]: recompute=*; layer[1:]: keep=*")
    parts = [
        dataclasses.replace(block, name=str(runs))
        for runs in RunRange("layer").cut(policy.cuts("layer"))
    ]
    traced = planned(policy, start=surveyed, settings=toast.Settings(rounds=0))
    expected = policies.priced(policy.resolved(parts)).step_seconds
    assert traced.after.step_seconds == pytest.approx(expected, rel=0.05)


def test_surveys_from_pickles_and_of_similar_programs_are_starts() -> None:
    surveyed = plan(unrolled, survey())
    first, again = (
        plan(unrolled, "none", start=start, settings=toast.Settings(rounds=0))
        for start in (surveyed, pickle.loads(pickle.dumps(surveyed)))
    )
    assert again.after.step_seconds == pytest.approx(first.after.step_seconds)
    fewer = toast.plan(
        unrolled, *arrays(3, 16, 1024, 256), mesh="data=4", hardware="tpu-v5e", remat="none",
        start=surveyed, settings=toast.Settings(rounds=0),
    )  # fmt: skip
    assert 0.5 < fewer.after.step_seconds / first.after.step_seconds < 1.0


def test_ops_of_the_forward_pass_start_as_the_survey_computes_them_again() -> None:
    """Without recomputation, derivatives of activations are computed in the forward pass."""
    target = build("unet", channels=128, blocks=2, image=32)

    def planned(remat: Any, rounds: int, **options: Any) -> toast.Plan:
        return toast.plan(
            target, mesh="data=4,model=4", hardware="tpu-v5e", remat=remat,
            settings=toast.Settings(rounds=rounds), **options
        )  # fmt: skip

    surveyed = planned(survey(), 1)
    memory = surveyed.analysis.program.memory
    assert memory is not None
    policy = MemoryPolicy.parse("none").resolved(memory.blocks)
    expected = SurveyPolicies(surveyed).priced(policy)
    traced = planned("none", 0, start=surveyed)
    assert traced.after.step_seconds == pytest.approx(expected.step_seconds, rel=0.005)
    assert traced.after.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.02)


def test_layers_decide_alike_at_the_price_of_one_policy(step: Any, surveyed: toast.Plan) -> None:
    memory = surveyed.analysis.program.memory
    assert memory is not None
    policies = SurveyPolicies(surveyed)
    alike = preset("minimal").resolved(memory.blocks)
    residuals = residuals_of(surveyed.analysis.program, {"layer": (1,)})
    cut = MemoryPolicy(tuple(
        dataclasses.replace(alike.blocks[0], block=name) for name in residuals.blocks
    ))  # fmt: skip
    one, other = policies.priced(alike), policies.priced(cut)
    assert residuals.blocks == ("layer[:1]", "layer[1:]")
    assert len(residuals.named) == 2 * len(residuals_of(surveyed.analysis.program).named)
    if step is unrolled:  # loops have slices of the weights
        assert other.step_seconds == pytest.approx(one.step_seconds)
        assert other.peak_bytes == pytest.approx(one.peak_bytes)
    assert other.step_seconds == pytest.approx(one.step_seconds, rel=0.03)


def test_the_last_layers_keep_what_fits() -> None:
    """Full recomputation takes 20 MiB, and everything that is kept 146 MiB."""
    surveyed = plan(unrolled, survey(), memory_bytes=125 * 2**20)
    policies = SurveyPolicies(surveyed)
    alike, by_layers = policies.best(), policies.by_layers()
    assert by_layers is not None
    assert by_layers.fits
    assert [entry.block for entry in by_layers.policy.blocks] == ["layer[:1]", "layer[1:]"]
    traced = [
        plan(unrolled, choice.policy, start=surveyed, settings=toast.Settings(rounds=0))
        for choice in (by_layers, alike)
    ]
    assert all(each.fits for each in traced)
    assert traced[0].after.step_seconds < 0.95 * traced[1].after.step_seconds
    assert "remat, last 3 of 4 runs of layer; everything is kept" in traced[0].note
    assert policies.by_layers(2.0**40) is None  # everything fits
    with pytest.raises(toast.ToastError, match=r"^layers decide differently \(layer\[:1\], layer"):
        traced[0].to_maxtext()


def test_the_best_policy_is_within_the_limit(step: Any) -> None:
    full, none = plan(step, "full").after, plan(step, "none").after
    limit = full.peak_bytes + 0.4 * (none.peak_bytes - full.peak_bytes)
    surveyed = plan(step, survey(), memory_bytes=limit)
    policies = SurveyPolicies(surveyed)
    best = policies.best()
    assert best.fits
    assert best.peak_bytes <= limit
    for choice in policies.presets().values():
        assert not choice.fits or best.step_seconds <= choice.step_seconds * (1 + 1e-3)
    # It is that of the state which the search found best at such prices.
    traced = plan(step, best.policy, start=surveyed)
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
    with pytest.raises(toast.ToastError, match="no plan") as error:
        plan(scanned, "auto", memory_bytes=2**20)
    assert "find what fits: toast.fit(find='batch')" in str(error.value)
    assert isinstance(error.value, SearchError)
    assert not error.value.plan.fits
    assert error.value.smallest_peak <= error.value.plan.after.peak_bytes
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


def test_the_batch_is_cut_rather_than_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of a smaller microbatch fits, and takes less time than what runs again.

    That of a large program is cut only if this saves more of the step.
    """

    @toast.checkpoint
    def dense(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    def loss(weights: Any, x: Any) -> Any:
        for pair in weights:
            x = dense(x, pair)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def whole(weights: Any, x: Any) -> Any:
        return jax.value_and_grad(loss)(weights, x)

    accumulated = toast.accumulate(whole, batch_argnums=1)
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shapes = [(half((2048, 8192)), half((8192, 2048)))] * 8, half((1 << 17, 2048))

    def planned(step: Any, remat: str, **options: Any) -> toast.Plan:
        return toast.plan(
            step, *shapes, mesh="data=4", hardware="tpu-v5e", settings=SETTINGS, remat=remat,
            **options,
        )  # fmt: skip

    kept = planned(whole, "none")
    limit = 0.7 * kept.after.peak_bytes
    one = planned(accumulated, "auto", memory_bytes=limit, microbatches=1)
    cut = planned(accumulated, "auto", memory_bytes=limit)
    assert one.fits
    assert one.after.step_seconds > 1.02 * kept.after.step_seconds
    assert cut.fits
    assert cut.microbatches == 2
    assert cut.after.step_seconds < one.after.step_seconds
    assert "chose the first of" in cut.note
    assert "none in 2 microbatches" in cut.note
    for free in (
        planned(accumulated, "auto", memory_bytes=2 * kept.after.peak_bytes),
        planned(whole, "auto", memory_bytes=limit),  # it accumulates nothing
    ):
        assert free.microbatches == 1
        assert "microbatches" not in free.note
    monkeypatch.setattr(joint_memory, "_MORE_OPS", 0)
    for worth, count in ((0.01, 2), (0.5, 1)):
        monkeypatch.setattr(joint_memory, "_WORTH_SECONDS", worth)
        large = planned(accumulated, "auto", memory_bytes=limit)
        assert large.microbatches == count
        assert large.note.count(" microbatches ") == count - 1


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


def multiplied(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def rounded(x: Any, w: Any) -> Any:
    narrow = w.astype(jnp.bfloat16)
    return jnp.tanh(x.astype(jnp.bfloat16) @ narrow).astype(jnp.float32)


def weighted(layer: Any, weights: Any, x: Any) -> Any:
    block = toast.checkpoint(layer, name="layer")

    def loss(weights: Any) -> Any:
        y = x
        for w in weights:
            y = block(y, w)
        return jnp.mean(y**2)

    return jax.grad(loss)(weights)


@pytest.mark.parametrize(
    ("layer", "name", "once_each"), [(multiplied, "w", 3), (rounded, "narrow", 2)]
)
def test_gathered_weights_are_gathered_once(layer: Any, name: str, once_each: int) -> None:
    """Where gathers take no time beside products, it is gathered again without ``gathered=w``.

    The rows of the first layer that rounds its weight are gathered instead.
    """
    step = functools.partial(weighted, layer)
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 3
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    pins = {"x": P("data"), **{f"weights[{number}]": P("data") for number in range(3)}}

    def gathers(policy: str) -> tuple[toast.Plan, float]:
        planned = toast.plan(
            step, weights, x, mesh="data=2", hardware="tpu-v5e", settings=SETTINGS,
            constraints=toast.Constraints(pin=pins), remat=policy, overlap="gathers",
        )  # fmt: skip
        size = 2 * 1024**2  # products round weights to bfloat16 before the gather
        of_weights = [t for t in planned.transfers if (t.kind, t.bytes) == ("all_gather", size)]
        return planned, sum(t.count for t in of_weights)

    _, again = gathers("layer: recompute=*")
    once, count = gathers(f"layer: recompute=* gathered={name}")
    assert count == once_each < again
    assert f"uses copies of {name} again" in once.note
    assert once.policy == MemoryPolicy.from_dict(once.policy.to_dict())  # type: ignore[union-attr]
    given = jax.tree.map(lambda s: jax.random.normal(jax.random.key(2), s.shape) * 0.1, weights)
    batch = jax.random.normal(jax.random.key(3), x.shape)
    near = 1e-4 if layer is multiplied else 0.02
    for result, expected in zip(once.jit()(given, batch), step(given, batch), strict=True):
        np.testing.assert_allclose(result, expected, rtol=near, atol=near * 1e-2)


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
    cut = dataclasses.replace(memory("minimal", "query"), microbatches=4)
    assert maxtext_policy(cut).splitlines()[:2] == [
        "remat_policy: minimal", "gradient_accumulation_steps: 4",
    ]  # fmt: skip
    assert "per_device_batch_size" in maxtext_policy(cut)
    # MaxText's own policy none recomputes everything.
    for text in ("none", "layer: keep=*"):
        kept = maxtext_policy(memory(text, "query", "sum", "layer_input")).splitlines()
        assert kept[0].startswith("# the plan keeps everything; MaxText computes again what has no")
        assert kept[1:] == ["remat_policy: minimal_with_context"]
    experts = maxtext_policy(memory("none", "query", "expert_gate")).splitlines()
    assert experts[1] == "remat_policy: custom"
    assert {"moe_mlpwi_0: device", "context: device", "mlpwo: device"} < {*experts}
    with pytest.raises(
        toast.ToastError,
        match="no residual of the plan has a name of MaxText: it has sum, scores; name them with",
    ):
        maxtext_policy(memory("layer: keep=sum", "sum", "scores"))
    with pytest.raises(toast.ToastError, match="has no memory policy"):
        plan(scanned, None).to_maxtext()


def test_a_joint_plan_searches_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a preset's policy wins, the preset has had a search of its own, and only one."""
    searched: list[tuple[str, bool]] = []
    attempt = joint_memory._JointSearch._attempt

    def recorded(self: Any, policy: Any, name: str, start: Any = None) -> Any:
        searched.append((str(policy) if name == "proposed" else name, start is None))
        return attempt(self, policy, name, start)

    monkeypatch.setattr(joint_memory._JointSearch, "_attempt", recorded)
    planned = toast.plan(
        scanned, *arrays(2, 4, 16, 8), mesh="data=2", hardware="tpu-v5e", settings=SETTINGS,
        remat="auto",
    )  # fmt: skip
    assert len(searched) == len({*searched})
    assert planned.policy
    if planned.policy.preset:
        assert (planned.policy.preset, True) in searched


def test_a_policy_by_layers_of_a_large_program_is_traced_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_memory, "_MORE_OPS", 0)
    events: list[Any] = []
    planned = plan(unrolled, "auto", memory_bytes=125 * 2**20, progress=events.append)
    assert planned.fits
    assert planned.policy
    assert [entry.block for entry in planned.policy.blocks] == ["layer[:1]", "layer[1:]"]
    first, second, *_ = [e for e in events if isinstance(e, str) and e.startswith("remat ")]
    assert (first, second) == ("remat survey", "remat proposed")
    assert "chose the first of" in planned.note


def test_numbers_that_do_not_divide_the_batch_are_not_tried() -> None:
    """Keeping everything would need two microbatches of the three sequences."""

    def planned(remat: str, **options: Any) -> toast.Plan:
        return toast.plan(
            accumulated, *arrays(4, 3, 1024, 256), mesh="data=1", hardware="tpu-v5e", remat=remat,
            settings=SETTINGS, **options,
        )  # fmt: skip

    limit = 0.8 * planned("none").after.peak_bytes
    best = planned("auto", memory_bytes=limit)
    assert best.fits
    assert best.microbatches == 1


def test_without_a_link_to_the_host_no_policy_offloads(step: Any) -> None:
    """Transfers at an unknown rate are not free: no preset and no choice has them."""
    bare = dataclasses.replace(load("tpu-v5e"), host_bytes_per_s=np.inf)
    assert not bare.has_host_link
    size = arrays(4, 16, 1024, 256)
    settings = toast.Settings(rounds=1)
    whole = toast.plan(step, *size, mesh="data=4", hardware=bare, settings=settings)
    surveyed = toast.plan(
        step, *size, mesh="data=4", hardware=bare, remat=survey(), settings=settings
    )
    presets = SurveyPolicies(surveyed).presets()
    assert {"none", "full"} <= presets.keys()
    assert not any(choice.policy.offloads for choice in presets.values())
    between = (whole.after.peak_bytes + surveyed.after.peak_bytes) / 2
    tight = toast.plan(
        step, *size, mesh="data=4", hardware=bare, remat="auto", settings=settings,
        memory_bytes=between,
    )  # fmt: skip
    assert tight.policy is not None
    assert not tight.policy.offloads
