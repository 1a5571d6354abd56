"""Programs of memory policies, written from a survey, are those that JAX traces."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import toast
from tests.layered_steps import arrays, scanned_step, unrolled_step
from toast.cost.policy_programs import NotWritten, PolicyProgram, PolicyPrograms
from toast.cost.residuals import residuals_of
from toast.hardware import load
from toast.ports import HardwarePlatform
from toast.program import MemoryPolicy, Program, RunRange, survey
from toast.program.soundness import unsound
from toast.search import Settings


def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w["q"], x @ w["k"]))
    x = x + jnp.einsum("bqk,bkd->bqd", scores, jnp.sin(x) @ w["v"])
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


scanned, unrolled = scanned_step(layer), unrolled_step(layer)


def rotary(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Causal attention with rotary embeddings, whose tables and mask depend on constants alone."""
    length, width = x.shape[1:]
    angles = jnp.arange(length)[:, None] * 0.1 ** jnp.arange(width // 2)[None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def turned(y: jax.Array) -> jax.Array:
        left, right = jnp.split(y, 2, axis=-1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    scores = jnp.einsum("bqd,bkd->bqk", turned(x @ w["q"]), turned(x @ w["k"]))
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x @ w["v"])
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


def recurrent(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """A recurrence over the sequence: a scan inside of a block."""

    def body(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(state @ w["q"] + row)
        return state, state

    rows = jax.lax.scan(body, jnp.zeros_like(x[:, 0]), (x @ w["k"]).swapaxes(0, 1))[1]
    return x + rows.swapaxes(0, 1) @ w["v"]


def traced(step: Any, remat: Any) -> Program:
    platform = HardwarePlatform.of(load("tpu-v5e"))
    return toast.analyze(step, *arrays(3, 8, 32, 64), remat=remat, platform=platform).program


@pytest.fixture(scope="module", params=[scanned, unrolled])
def step(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def surveyed(step: Any) -> Program:
    return traced(step, survey())


def written(surveyed: Program, text: str) -> PolicyProgram:
    """The program of a policy, which may have decisions for ranges of runs."""
    policy = MemoryPolicy.parse(text)
    assert surveyed.memory is not None
    (block,) = surveyed.memory.blocks
    cuts = {block.name: policy.cuts(block.name)}
    residuals = residuals_of(surveyed, cuts)
    parts = [
        type(block)(str(runs), block.residuals, block.runs)
        for runs in RunRange(block.name).cut(cuts[block.name])
    ]
    choices = residuals.choices([policy.resolved(parts)])
    return PolicyPrograms(surveyed).under(residuals, choices)


def ops(program: Program) -> collections.Counter[tuple[str, str, int, str]]:
    """How often a program has each op, but for names and what depends on constants alone."""
    found: collections.Counter[tuple[str, str, int, str]] = collections.Counter()
    constant: set[int] = set()
    for number, op in enumerate(program.ops):
        kind = program.kind(number)
        if kind in ("constant", "iota") or (op.operands and constant.issuperset(op.operands)):
            constant.update(op.results)
        elif kind != "sdy_sharding_constraint":
            types = " ".join(str(program.values[value].type) for value in op.results)
            # A transfer may be told before or after the recomputation begins.
            of = "" if kind == "custom_call" else program.passes[number]
            found[kind, types, program.repeats[number], of] += 1
    return found


@pytest.mark.parametrize(
    "policy",
    [
        "full", "none", "named", "minimal", "minimal_offloaded",
        "layer: keep=scores,layer.dot_general",
        "layer: keep=scores.sub,x_2 offload=layer.dot_general",
        "layer: keep=scores offload=x",
    ],
)  # fmt: skip
def test_the_program_of_a_policy_is_that_which_jax_traces(
    step: Any, surveyed: Program, policy: str
) -> None:
    if jax.__version_info__ < (0, 11) and step is scanned and policy == "named":
        pytest.xfail("paths of JAX 0.10 do not tell that it lowers silu once in a scan")
    found = written(surveyed, policy).program
    assert not unsound(found)
    assert ops(found) == ops(traced(step, policy))


def test_layers_that_decide_differently(step: Any, surveyed: Program) -> None:
    policy = "layer[:1]: recompute=*; layer[1:]: keep=*"
    if step is scanned:  # JAX traces two loops
        with pytest.raises(NotWritten, match="a policy for some iterations of a loop"):
            written(surveyed, policy)
        return
    assert ops(written(surveyed, policy).program) == ops(traced(step, policy))


def test_ops_of_the_survey_are_known(surveyed: Program) -> None:
    found = written(surveyed, "minimal")
    for number, origin in enumerate(found.origin.tolist()):
        if origin >= 0:
            assert found.program.kind(number) == surveyed.kind(origin)
            assert found.program.location(number) == surveyed.location(origin)
    added = {found.program.kind(n) for n, origin in enumerate(found.origin.tolist()) if origin < 0}
    assert "reduce_precision" in added


@pytest.mark.parametrize("policy", ["none", "full", "minimal"])
@pytest.mark.parametrize("of_layers", [scanned_step, unrolled_step])
def test_blocks_with_constants(of_layers: Any, policy: str) -> None:
    step = of_layers(rotary)
    found = written(traced(step, survey()), policy).program
    assert not unsound(found)
    assert ops(found) == ops(traced(step, policy))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_blocks_with_a_scan_have_residuals(microbatches: int) -> None:
    shapes = arrays(2, 8, 16, 32)
    step = toast.accumulate(
        unrolled_step(recurrent), batch_argnums=1, microbatches=microbatches
    )  # fmt: skip
    program = toast.analyze(step, *shapes, remat=survey(), platform="tpu").program
    assert {residual.block for residual in residuals_of(program, {}).named} == {"recurrent"}
    plan = toast.plan(
        step, *shapes, mesh="data=2", hardware="tpu-v5e", remat="auto",
        settings=Settings(rounds=20),
    )  # fmt: skip
    assert plan.policy is not None


@jax.custom_vjp
def powers(x: jax.Array) -> jax.Array:
    """Sums of rows; the gradient uses those of squares, which the same op computes."""
    return both_powers(x)[0]


def both_powers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    zero = jnp.zeros((), x.dtype)
    first, second = jax.lax.reduce(
        (x, x * x), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (2,)
    )
    return first, second


powers.defvjp(
    lambda x: both_powers(x),
    lambda squares, g: (jnp.broadcast_to((g * squares)[..., None], (*g.shape, 64)),),
)


def test_results_of_one_op_that_only_the_backward_pass_needs() -> None:
    """They have no names in the forward pass, and are kept with the other results of the op."""

    def rows(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        return jnp.sin(x @ w["q"]) + jnp.sin(powers(x @ w["k"]))[..., None] * x

    step = unrolled_step(rows)
    surveyed = traced(step, survey())
    found = written(surveyed, "none").program
    assert not unsound(found)

    def passes(program: Program) -> list[str]:
        two = [n for n, op in enumerate(program.ops) if len(op.results) == 2]
        return [program.passes[n] for n in two if program.kinds[n] == "reduce"]

    assert passes(surveyed) == ["forward"] * 3 + ["recomputed"] * 3
    assert passes(found) == ["forward"] * 3
    kept = written(surveyed, "rows: keep=rows.powers,rows.reduce").program
    assert passes(kept) == passes(traced(step, "rows: keep=rows.powers,rows.reduce"))


@pytest.mark.parametrize("policy", ["none", "full"])
def test_blocks_that_the_backward_pass_does_not_need(policy: str) -> None:
    """A frozen block is not computed again, whatever the policy."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            frozen = jax.tree.map(lambda w: jax.lax.stop_gradient(w[0]), weights)
            y = jax.lax.stop_gradient(toast.checkpoint(rotary)(x, frozen))
            return jnp.mean(toast.checkpoint(layer)(y, jax.tree.map(lambda w: w[1], weights)) ** 2)

        return jax.value_and_grad(loss)(weights)

    surveyed = traced(step, survey())
    residuals = residuals_of(surveyed, {})
    assert surveyed.memory is not None
    choices = residuals.choices([MemoryPolicy.parse(policy).resolved(surveyed.memory.blocks)])
    found = PolicyPrograms(surveyed).under(residuals, choices).program
    assert not unsound(found)
    kinds = [
        collections.Counter((kind, types, runs) for kind, types, runs, _ in ops(program).elements())
        for program in (found, traced(step, policy))
    ]  # fmt: skip
    assert kinds[0] == kinds[1]


def test_a_custom_gradient_reads_what_is_computed_again_by_its_own_name() -> None:
    """The survey names what the function returns; JAX names what its gradient reads, too."""

    @jax.custom_vjp
    def root(x: jax.Array) -> jax.Array:
        return jnp.sqrt(x * x + 1)

    def forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        result = checkpoint_name(jnp.sqrt(x * x + 1), "root")
        return result, (x, result)

    def backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array]:
        x, result = residuals
        return (gradient * x / result,)

    root.defvjp(forward, backward)
    step = unrolled_step(lambda x, w: root(x @ w["q"]) @ w["down"].T[:, : x.shape[-1]])
    surveyed = traced(step, survey())
    found, jaxs = written(surveyed, "full").program, traced(step, "full")
    assert not unsound(found)

    def readers(program: Program) -> list[str]:
        """The kinds of the ops that the divisions of the backward pass read."""
        return [
            program.kinds[program.makers[op.operands[1]]]
            for number, op in enumerate(program.ops)
            if program.kinds[number] == "divide" and program.passes[number] == "backward"
        ]

    assert readers(jaxs).count("sdy_sharding_constraint") > 1
    assert readers(found) == readers(jaxs)
