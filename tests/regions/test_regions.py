"""Manual regions on meshes: axes, factors, prices, explanations, errors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32
from tests.regions.programs import CASES, shard_map
from toast import Constraints
from toast.analysis.query import facts
from toast.analysis.rules import factor_files
from toast.cost import CostModel, Memo, break_down
from toast.errors import MeshError, PinError, TargetError
from toast.evaluation.baselines import alpa, automap
from toast.facts import Relations
from toast.frontend import mlir, stablehlo
from toast.hardware import COLLECTIVES, Mesh, load
from toast.logic import solve
from toast.program import Program
from toast.resources import directory
from toast.search import TreeSearch
from toast.space import FREE, Space


@functools.cache
def analysed(name: str) -> toast.Analysis:
    case = CASES[name]
    return toast.analyze(case.function, *case.arguments, donate=case.donate)


def model_on(name: str, mesh: str) -> CostModel:
    return CostModel(Space(analysed(name), Mesh.parse(mesh)), load("tpu-v5e"))


def from_text(text: str) -> Program:
    return stablehlo.from_module(mlir.parse(text, "region"), name="region")


# -- reading -----------------------------------------------------------------------------------


def test_a_region_becomes_entries_a_body_and_exits() -> None:
    program = analysed("megatron").program
    kinds = [program.kind(op) for op in range(len(program.ops))]
    assert kinds[3:6] == ["manual_entry"] * 3
    assert kinds[-2:] == ["manual_exit", "return"]
    entry, total = program.signatures[program.ops[3].signature], kinds.index("all_reduce")
    assert entry.attribute("manual_axes") == ("data", "model")
    assert entry.attribute("manual_sizes") == (4, 2)
    assert (entry.attribute("split_axes"), entry.attribute("split_dimensions")) == (("data",), (0,))
    reduce = program.signatures[program.ops[total].signature]
    assert reduce.attribute("manual") == ("data", "model")
    assert reduce.attribute("axes") == ("model",)
    assert reduce.attribute("replica_groups") is None
    assert str(program.values[program.ops[total].results[0]].type) == "f32[8,16]"


def test_facts_state_the_region() -> None:
    text = Relations(analysed("megatron").program).to_lp()
    assert 'attribute(3,split_axes,0,"data").' in text
    assert 'attribute(6,manual,1,"model").' in text


def test_constraints_that_constrain_nothing_are_dropped() -> None:
    program = analysed("over_data").program
    assert not any("constraint" in signature.kind for signature in program.signatures)


#: A region over one axis, with a collective that names devices by ``{groups}``.
REGION = """module {{
  sdy.mesh @mesh = <["data"=4, "model"=2]>
  func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {{
    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{{"data", ?}}, {{?}}]>]
        out_shardings=[<@mesh, [{{"data", ?}}, {{?}}]>] manual_axes={{"data"}} (%a: tensor<2x4xf32>) {{
      %1 = "stablehlo.collective_permute"(%a) <{{
          channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
          source_target_pairs = dense<{pairs}> : tensor<{count}x2xi64>}}>
          : (tensor<2x4xf32>) -> tensor<2x4xf32>
      sdy.return %1 : tensor<2x4xf32>
    }} : (tensor<8x4xf32>) -> tensor<8x4xf32>
    return %0 : tensor<8x4xf32>
  }}
}}"""


@pytest.mark.parametrize(
    ("pairs", "count", "axes"),
    [
        ("[[0, 2], [2, 4], [4, 6], [6, 0], [1, 3], [3, 5], [5, 7], [7, 1]]", 8, ("data",)),
        ("[[0, 2], [1, 3]]", 2, ("data",)),
        ("[[0, 0], [1, 1]]", 2, ()),  # other devices get zeros
        ("[[0, 3], [2, 5]]", 2, ("data", "model")),
    ],
)
def test_axes_follow_from_numbers_of_devices(pairs: str, count: int, axes: Any) -> None:
    program = from_text(REGION.format(pairs=pairs, count=count))
    (found,) = [s.attribute("axes") for s in program.signatures if s.kind == "collective_permute"]
    assert found == axes


def test_parts_of_axes_are_refused() -> None:
    text = """module {
      sdy.mesh @mesh = <["data"=4]>
      func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
        %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"data":(1)2}]>]
            out_shardings=[<@mesh, [{"data":(1)2}]>] manual_axes={"data"} (%a: tensor<4xf32>) {
          sdy.return %a : tensor<4xf32>
        } : (tensor<8xf32>) -> tensor<8xf32>
        return %0 : tensor<8xf32>
      }
    }"""
    with pytest.raises(TargetError, match="uses a part of a mesh axis"):
        from_text(text)


def test_a_ragged_exchange_is_priced_and_names_devices_of_the_plans_mesh() -> None:
    rows, offsets = P("data"), (P("data"),) * 4

    @functools.partial(
        shard_map, in_specs=(rows, rows, *offsets), out_specs=rows, axis_names={"data"}
    )
    def exchanged(x: jax.Array, out: jax.Array, *slices: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(x, out, *slices, axis_name="data")

    offset = jax.ShapeDtypeStruct((16,), np.int32)
    plan = toast.plan(
        exchanged, f32(64, 16), f32(64, 16), *[offset] * 4, mesh="model=2,data=4",
        hardware="tpu-v5e",
    )  # fmt: skip
    (op,) = [s for s in plan.analysis.program.signatures if s.attribute("axes")]
    assert op.attribute("call_target_name") == "ragged_all_to_all"
    priced = [(c.kind, c.axes, c.bytes, c.count) for c in plan.transfers]
    assert priced == [("all_to_all", ("data",), 64 * 16 / 4 * 4, 1)]
    (call,) = [line for line in str(plan.annotated()).splitlines() if "@ragged" in line]
    assert "dense<[[0, 1, 2, 3], [4, 5, 6, 7]]>" in call


def test_gspmd_code_for_one_device_is_refused() -> None:
    text = """func.func public @main(%x: tensor<8xf32>) -> tensor<2xf32> {
      %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) : (tensor<8xf32>) -> tensor<2xf32>
      return %0 : tensor<2xf32>
    }"""
    with pytest.raises(
        TargetError, match=r"GSPMD's form; lower shard_map to sdy\.manual_computation"
    ):
        from_text(text)


def test_collectives_over_axes_of_one_device_are_dropped() -> None:
    mesh = AbstractMesh((1, 8), ("one", "data"), axis_types=(AxisType.Auto,) * 2)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("one"), out_specs=P("one"), axis_names={"one"}
    )
    def idle(x: jax.Array) -> jax.Array:
        y = lax.ppermute(lax.psum(2 * x, "one"), "one", [(0, 0)])
        return lax.all_gather(y, "one", tiled=True) + lax.axis_index("one")

    plan = toast.plan(
        idle, f32(32, 8), mesh="data=8", hardware="tpu-v5e", stages=(TreeSearch(effort=8),)
    )
    assert not {s.kind for s in plan.analysis.program.signatures} & set(COLLECTIVES)
    x = np.arange(256, dtype=np.float32).reshape(32, 8)
    np.testing.assert_array_equal(plan.jit()(x), 2 * x)


def test_a_permute_of_some_devices_is_no_identity() -> None:
    program = from_text(REGION.format(pairs="[[0, 0], [1, 1]]", count=2))
    assert any(s.kind == "collective_permute" for s in program.signatures)


# -- axes --------------------------------------------------------------------------------------


def test_the_axes_of_a_region_are_taken() -> None:
    space = Space(analysed("over_data"), Mesh.parse("data=4,model=2"))
    program = space.analysis.program
    held = space.resolved.regions.holders
    inside = [n for n, op in enumerate(program.ops) if program.kind(n) == "dot_general"]
    assert (held[inside, 0] == -1).all()
    assert (held[:, 1] == FREE).all()
    states = space.apply_each(space.initial, range(len(space.actions)))
    fixed = space.regions != FREE
    assert (states[:, fixed] == space.regions[fixed]).all()
    assert any(space.products[k] and (states[:, k, 1] >= 0).any() for k in range(len(fixed)))


@pytest.mark.parametrize(
    ("mesh", "matched"),
    [
        ("data=4,model=2", {"data": "data", "model": "model"}),
        ("tp=2,data=4", {"data": "data", "model": "tp"}),
        ("one=1,a=2,b=4", {"data": "b", "model": "a"}),
        ("data=4,model=2,pipe=2", {"data": "data", "model": "model"}),
    ],
)
def test_axes_match_by_name_then_by_size(mesh: str, matched: dict[str, str]) -> None:
    space = Space(analysed("megatron"), Mesh.parse(mesh))
    assert dict(space.resolved.regions.matched) == matched


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        ("data=8", "is manual over data=4, and the mesh has data=8; use data=4"),
        (
            "data=4,tp=4",
            "is manual over model=2, and the mesh has no such axis; name an axis model=2",
        ),
        ("data=4,a=2,b=2", "is manual over model=2, and the mesh has several axes of size 2; name"),
    ],
)
def test_a_mesh_without_the_axes_is_refused(mesh: str, problem: str) -> None:
    with pytest.raises(MeshError, match=problem) as error:
        toast.plan(analysed("megatron"), mesh=mesh, hardware="tpu-v5e")
    assert "shard_map at " in str(error.value)
    assert "programs.py:" in str(error.value)
    assert "\n" not in str(error.value)


def test_meshes_that_do_not_fit_are_skipped() -> None:
    plan = toast.plan(
        analysed("over_data"), devices=8, hardware="tpu-v5e",
        settings=toast.Settings(rounds=1), stages=(TreeSearch(effort=8),),
    )  # fmt: skip
    assert dict(plan.mesh.axes)[dict(plan.shardings.manual_axes)["data"]] == 4
    assert any("is manual over data=4" in row.skipped for row in plan.meshes)


def test_a_pin_that_contradicts_a_region_is_refused() -> None:
    @functools.partial(shard_map, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def named(x: jax.Array) -> jax.Array:
        return checkpoint_name(x * 2, "inner") + 1

    constraints = Constraints(pin={"inner": "P('data')"})
    with pytest.raises(PinError, match=r"the region of shard_map at .*py:\d+ takes axis data"):
        toast.plan(
            named, f32(32, 8), mesh="data=4,model=2", hardware="tpu-v5e", constraints=constraints
        )


def test_regions_with_contradictory_orders_of_axes() -> None:
    """The axes of each region come first on its values, so neither lets the other's pass."""
    rows = functools.partial(shard_map, in_specs=P("data"), out_specs=P("data"))
    columns = functools.partial(shard_map, in_specs=P("model"), out_specs=P("model"))

    def both(x: jax.Array) -> jax.Array:
        y = rows(lambda a: a - lax.pmean(a, "data"), axis_names={"data"})(x)
        return columns(lambda a: a - lax.pmean(a, "model"), axis_names={"model"})(y)

    plan = toast.plan(
        both, f32(32, 16), mesh="data=4,model=2", hardware="tpu-v5e",
        stages=(TreeSearch(effort=16),),
    )  # fmt: skip
    assert plan.verify().equal


# -- prices ------------------------------------------------------------------------------------


def test_collectives_are_priced_at_the_sizes_of_a_device() -> None:
    model = model_on("every_collective", "data=4,model=2")
    found = {t.kind: (t.axes, t.bytes, t.count) for t in model.transfers(model.space.unsharded)}
    size = 16 * 16 * 4
    assert {kind: found[kind] for kind in found if kind != "all_gather"} == {
        "collective_permute": (("data",), size, 1),
        "all_to_all": (("data",), size, 1),
        "reduce_scatter": (("data",), size / 4, 1),
        "all_reduce": (("data",), size, 1),
    }
    assert found["all_gather"][1] == size


def test_loops_repeat_collectives_of_regions() -> None:
    model = model_on("scanned", "data=4,model=2")
    prices = model.price(model.space.unsharded[None])
    assert prices.collective_count[0, COLLECTIVES.index("all_reduce")] == 3


def test_axes_that_pass_through_make_collectives_smaller() -> None:
    model = model_on("every_collective", "data=4,model=2")
    space = model.space
    program = space.analysis.program
    (total,) = [n for n in range(len(program.ops)) if program.kind(n) == "all_reduce"]
    k, state = int(space.classes.of_op[total]), space.unsharded.copy()
    state[k, 1] = 0
    (found,) = [t for t in model.transfers(state) if t.kind == "all_reduce"]
    assert found.bytes == 16 * 16 * 4 / 2


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_fold_has_the_same_sum(name: str) -> None:
    model = model_on(name, "data=4,model=2")
    space = model.space
    states = np.concatenate([
        space.unsharded[None], space.apply_each(space.initial, range(len(space.actions)))
    ])  # fmt: skip
    prices = model.price(states)
    worth = Memo(model).price(states)
    np.testing.assert_allclose(worth.seconds, prices.seconds, rtol=1e-9)
    np.testing.assert_allclose(worth.peak_bytes, prices.peak_bytes, rtol=1e-9)
    assert (prices.seconds >= model.lower_bound()).all()
    for state, collectives in zip(states, prices.collective_seconds, strict=True):
        listed = sum(c.seconds for c in break_down(model, state).collectives)
        assert listed == pytest.approx(collectives.sum())


def test_memory_in_a_region_is_that_of_a_device() -> None:
    """Whole values are split at the entry, so a device holds a quarter inside."""

    @functools.partial(shard_map, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def sorted_rows(x: jax.Array) -> jax.Array:
        return lax.sort(lax.sort(x, dimension=1), dimension=1, num_keys=1)

    analysis = toast.analyze(sorted_rows, f32(4096, 256))
    model = CostModel(Space(analysis, Mesh.parse("data=4")), load("tpu-v5e"))
    sizes = {b.bytes for b in model.timeline(model.space.unsharded).at_peak}
    assert 4096 * 256 * 4 / 4 in sizes


# -- explanations ------------------------------------------------------------------------------


@functools.cache
def train_step() -> toast.Plan:
    return toast.plan(
        analysed("train_step"), mesh="data=4,tp=2", hardware="tpu-v5e",
        stages=(TreeSearch(effort=24),),
    )  # fmt: skip


def test_notes_say_which_axes_regions_take() -> None:
    note = train_step().note
    assert "manual over data, tp at " in note
    assert "programs.py:" in note
    assert "axes of shard_map, matched with the mesh by size: model is tp" in note


def test_collectives_of_regions_are_explained() -> None:
    explained = [e for e in train_step().explain_collectives() if e.what == "manual"]
    assert {e.axes for e in explained} == {("data",), ("tp",)}
    for explanation in explained:
        assert "in a region that is manual over" in explanation.why
        (cause,) = explanation.causes
        assert str(cause).startswith(f"manual over '{explanation.axes[0]}' at ")
        assert "programs.py:" in str(cause)


def test_reshards_at_the_boundary_name_the_region() -> None:
    plan = train_step()
    causes = [c for e in plan.explain_collectives() if e.what == "reshard" for c in e.causes]
    assert causes
    assert any(cause.kind == "region" for cause in causes)


def test_a_plan_of_a_region_applies_to_a_changed_program() -> None:
    case = CASES["train_step"]

    def doubled(params: Any, x: jax.Array) -> Any:
        value, params = case.function(params, x)
        return 2 * value, params

    applied = toast.apply_plan(train_step(), doubled, *case.arguments, donate=(0,))
    assert applied.plan.arguments == train_step().arguments


def test_the_integer_program_knows_the_shards_of_an_exit() -> None:
    """The result follows the exit of the region, and is not gathered."""
    plan = alpa(analysed("megatron"), "data=4,model=2", "tpu-v5e")
    assert plan.shardings.results == ((("data",), ()),)


def test_propagation_knows_regions() -> None:
    plan = automap(analysed("over_data"), "data=4,model=2", "tpu-v5e", budget=2)
    assert plan.verify().equal


def test_callbacks_in_a_region_run_beside_further_axes() -> None:
    """XLA refuses to partition an op with effects; the further axes are manual around it."""
    parts: list[float] = []

    def part(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda total: parts.append(float(total)), x.sum())
        twice = jax.pure_callback(
            lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )
        return jax.lax.psum(twice, "x")

    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    function = jax.shard_map(part, mesh=mesh, in_specs=P("x"), out_specs=P())
    plan = toast.plan(function, f32(8, 4), mesh="x=4,y=2", hardware="tpu-v5e")
    (note,) = [line for line in plan.note.splitlines() if "callbacks" in line]
    assert note.endswith("every device runs them on its part, and their time is not in the price")
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    result = plan.jit()(x)
    jax.effects_barrier()
    np.testing.assert_allclose(result, 2 * x.reshape(4, 2, 4).sum(0))
    assert {*parts} == {*x.reshape(4, 8).sum(1).tolist()}


def test_callbacks_in_a_region_run_on_every_device() -> None:
    seen: list[float] = []

    @functools.partial(
        jax.shard_map, mesh=AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=P("data"), out_specs=P("data"),
    )  # fmt: skip
    def watched(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x * 2

    plan = toast.plan(
        watched, f32(32, 8), mesh="data=4", hardware="tpu-v5e", stages=(TreeSearch(effort=8),)
    )
    x = np.arange(256, dtype=np.float32).reshape(32, 8)
    np.testing.assert_array_equal(plan.jit()(x), 2 * x)
    jax.effects_barrier()
    assert sorted(seen) == x.reshape(4, -1).sum(1).tolist()


# -- logic -------------------------------------------------------------------------------------


def test_queries_know_regions() -> None:
    analysis = analysed("over_data")
    frame = analysis.query("manual(O,A), op(O,dot_general)")
    assert set(frame.A) == {"data"}
    assert len(frame) == 2
    held = analysis.query('fixed(O,"data",F), op(O,manual_entry)')
    assert set(held.F) == {"split(0)", "none"}


@pytest.mark.parametrize("name", ["megatron", "over_data", "nested"])
def test_logic_on_the_whole_program_derives_the_same(name: str) -> None:
    """Plain clingo and the product agree on programs with regions."""
    analysis = analysed(name)
    asked = [("factor", 5), ("fixed", 3), ("manual", 2), ("annotates", 3), ("shardable", 1)]
    show = [f"{predicate}/{arity}" for predicate, arity in asked]
    files = [*factor_files(), directory("rules") / "names.lp"]
    logic = solve(files, analysis.facts.to_lp(), show)
    relations = facts(analysis.vocabulary.relations, asked)
    text = "".join(f"{name}{row}.\n" for (name, _), rows in relations.items() for row in rows)
    ours = solve([], text, show)
    for predicate in show:
        assert set(logic[predicate]) == set(ours[predicate]), predicate
