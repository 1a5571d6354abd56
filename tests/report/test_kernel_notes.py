"""What is said about custom calls: a rule for those without one, and which run whole."""

from __future__ import annotations

import pathlib

import jax
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

import toast
from tests.cli.test_cli import run
from tests.helpers import f32
from tests.rules.kernels import GROUPED, Q, call, kernels, lowered, splash
from toast.cost import CostModel
from toast.evaluation import compare as stage
from toast.evaluation.oracle.explicit import explicit_collectives
from toast.hardware import Mesh, load
from toast.plan.shard import shardings_of
from toast.report import missing_rules
from toast.space import Space


def notes(path: pathlib.Path, *rules: pathlib.Path) -> list[str]:
    return missing_rules(toast.analyze(path, rules=rules, cache=False))


@pytest.mark.parametrize("kernel", ["", "my_kernel"])
def test_the_suggested_rule_works(kernel: str, tmp_path: pathlib.Path) -> None:
    path, rule = tmp_path / "program.mlir", tmp_path / "rule.lp"
    path.write_text(call("tpu_custom_call", ["64x16xf32", "8xf32"], ["64x4xf32"], kernel=kernel))
    first, said, *lines = notes(path)
    assert first.startswith(
        f"no rule for custom_call @tpu_custom_call {'(my_kernel) ' * bool(kernel)}f32[64,4] at "
    )
    assert first.endswith("not sharded; its price counts only its operands and results")
    assert said.startswith(
        f"a rule for {kernel or 'tpu_custom_call'} that shards its first dimension, in a file for --rules"
    )
    rule.write_text("\n".join(lines) + "\n")
    ((_, _, own),) = kernels(toast.analyze(path).program, [rule])
    assert own.einsum().startswith("([batch,(operand(0),1)],[(operand(1),0)]) -> ([batch,")
    (whole,) = notes(path, rule)
    assert whole.startswith(f"every device runs {kernel or 'tpu_custom_call'} whole, because XLA")
    rule.write_text("\n".join([*lines, "partitioned(Op) :- mine(Op)."]) + "\n")
    assert notes(path, rule) == []


def test_estimates_and_stated_rules_are_mentioned(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.mlir"
    config = {"custom_call_config": {"cost_estimate": {"flops": 100}}}
    path.write_text(call("tpu_custom_call", ["8x4xf32"], ["8x4xf32"], kernel="k", config=config))
    assert notes(path)[0].endswith("not sharded; its price is its cost estimate, on every device")
    stated = "sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=4}, custom>"
    path.write_text(call("CustomSPMDPartitioning", ["8x4xf32"], ["8x4xf32"], attributes=stated))
    (note,) = notes(path)
    assert note.startswith("calls of custom_partitioning do not state their costs")


KERNELS = """
func.func public @main(%x: tensor<64x16xf32>) -> tensor<64x16xf32> {
  %0 = stablehlo.custom_call @mine(%x) : (tensor<64x16xf32>) -> tensor<64x16xf32>
  %1 = stablehlo.custom_call @mine(%0) : (tensor<64x16xf32>) -> tensor<64x16xf32>
  %2 = stablehlo.custom_call @other(%1) : (tensor<64x16xf32>) -> tensor<64x16xf32>
  %3 = stablehlo.custom_call @stated(%2) {sdy.sharding_rule =
    #sdy.op_sharding_rule<([i, j])->([i, j]) {i=64, j=16}, custom>}
    : (tensor<64x16xf32>) -> tensor<64x16xf32>
  return %3 : tensor<64x16xf32>
}
"""


WHOLE = (
    "every device runs stated whole, because XLA does not partition a custom call; wrap it in "
    "jax.shard_map, or state partitioned(Op) in a rule file if it brings its own partitioning"
)


def test_notes_of_plans_name_each_kind_of_kernel_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.mlir"
    path.write_text(KERNELS)
    analysis = toast.analyze(path)
    plan = toast.plan(analysis, mesh="data=4", hardware="tpu-v5e")
    lines = plan.note.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"no rule for custom_call @mine f32[64,16] at {path}",
        f"no rule for custom_call @other f32[64,16] at {path}",
        WHOLE,
    ]
    assert "(1 of 2 such ops): its dimensions are not sharded; its price counts" in lines[0]
    assert "such ops" not in lines[1]
    added = missing_rules(analysis, noted=plan.note)
    assert added[0].startswith("a rule for mine that shards its first dimension")
    assert not {*added} & {*lines}
    (row,) = stage.compare(analysis, plan.mesh, plan.hardware, ["toast"])
    assert row.note == ""


def test_the_command_says_nothing_about_kernels_twice(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.mlir"
    path.write_text(KERNELS)
    result = run("plan", path, "--mesh", "data=4")
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    for line in (WHOLE, "no rule for custom_call @mine", "no rule for custom_call @other",
                 "a rule for mine that shards"):  # fmt: skip
        assert said.count(line) == 1


def test_plans_of_known_kernels_say_that_devices_run_them_whole() -> None:
    plan = toast.plan(lambda q, k, v: splash()(q, k, v), Q, GROUPED, GROUPED, mesh="data=2",
                      hardware="tpu-v5e")  # fmt: skip
    (note,) = plan.note.splitlines()
    assert note.startswith("every device runs splash_mha")


def test_functions_of_custom_partitioning_are_seen_on_one_device() -> None:
    """JAX inlines them; lowered for several devices, the module has a call without the function."""

    @custom_partitioning
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.numpy.tanh(x @ y)

    product.def_partition(lambda *_: None, sharding_rule="i k, k j -> i j")
    arguments = f32(64, 32), f32(32, 16)
    analysis = toast.analyze(product, *arguments, cache=False)
    kinds = {analysis.program.kind(op) for op in range(len(analysis.program.ops))}
    assert kinds == {"argument", "dot_general", "tanh", "return"}
    assert missing_rules(analysis) == []
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    analysis = toast.analyze(jax.jit(product, in_shardings=whole), *arguments, cache=False)
    (rule,) = (rule for _, _, rule in kernels(analysis.program, partitioned=False))
    assert rule.einsum() == "([0,1],[1,2]) -> ([0,2])"
    (note,) = missing_rules(analysis)
    assert note.endswith("so that JAX inlines these functions")


def test_collectives_around_a_kernel_are_those_of_shardy() -> None:
    """Shardy has no rule for the call either: it gathers the operands that are sharded."""
    program = lowered(lambda q, k, v: splash()(q * 2, k, v) + 1, Q, GROUPED, GROUPED)
    model = CostModel(Space(toast.analyze(program), Mesh.parse("data=2")), load("tpu-v5e"))
    space = model.space
    state = space.initial.copy()
    free = space.classes.divisor[:, 0] % 2 == 0
    state[free, 0] = 0
    ours = model.reshards(state)
    assert sum(ours.values()) > 0
    assert {kind for kind, _, _ in ours} == {"all_gather"}
    assert ours == explicit_collectives(program, shardings_of(model, state))


def test_kernels_in_regions_run_on_parts() -> None:
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(auto,))
    spec = jax.sharding.PartitionSpec("data")
    f = jax.shard_map(
        lambda q, k, v: splash()(q, k, v), mesh=mesh, in_specs=spec, out_specs=spec,
        check_vma=False,
    )  # fmt: skip
    analysis = toast.analyze(f, Q, GROUPED, GROUPED, platform="tpu", cache=False)
    assert not any("every device runs" in note for note in missing_rules(analysis))
