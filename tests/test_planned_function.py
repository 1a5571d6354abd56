"""``toast.jit``: calls as with ``jax.jit``, new plans for other types, and what it says."""

from __future__ import annotations

import functools
import pathlib
import sys
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import toast
from tests.helpers import f32
from toast.errors import MeshError, PlanError, PlanWarning, SearchError
from toast.planned_function import PlannedFunction

V5E: dict[str, Any] = {"mesh": "data=4,model=2", "hardware": "tpu-v5e"}
QUICK, AT_ONCE = toast.Settings(rounds=1), toast.Settings(budget=0)


def init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (64, 256)) / 8,
        "w2": jax.random.normal(second, (256, 64)) / 16,
    }


def train(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


def batch(size: int = 512) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, size, 64)).astype(np.float32)
    return x[0], x[1]


def assert_close(actual: Any, expected: Any, rtol: float = 2e-5) -> None:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for own, other in pairs:
        np.testing.assert_allclose(own, other, rtol=rtol, atol=1e-5)


def planned(function: Any = None, /, **options: Any) -> Any:
    return toast.jit(function, **{**V5E, "settings": QUICK, **options})


# -- calls as with jax.jit -----------------------------------------------------------------------


def test_a_train_step_runs_as_with_jax_jit() -> None:
    step, plain = planned(train, donate_argnums=0), jax.jit(train)
    mine = theirs = init(jax.random.key(0))
    mine = jax.tree.map(jnp.copy, mine)
    for _ in range(3):
        mine, value = step(mine, *batch())
        theirs, expected = plain(theirs, *batch())
        assert_close((mine, value), (theirs, expected))
    shardings = step.plan.shardings_for(step.mesh)
    assert jax.tree.map(lambda a: a.sharding, mine) == shardings.in_shardings[0]
    assert any(leaf.sharding.spec != P() for leaf in jax.tree.leaves(mine))


def test_results_are_donated_and_stay_where_they_are() -> None:
    step = planned(train, donate_argnums=0)
    params, _ = step(init(jax.random.key(0)), *batch())
    again, _ = step(params, *batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        step(params, *batch())
    step(again, *batch())


def test_it_is_a_decorator_with_and_without_options() -> None:
    @toast.jit(mesh="data=4", hardware="tpu-v5e", settings=QUICK)
    def doubled(x: jax.Array) -> jax.Array:
        """Twice as much."""
        return 2 * x

    assert isinstance(doubled, PlannedFunction)
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice as much.")
    assert doubled(jnp.ones((64, 32))).sharding.spec == P("data", None)
    with jax.set_mesh(jax.make_mesh((4,), ("rows",))):
        bare = toast.jit(lambda x: x + 1, hardware="tpu-v5e")
        assert bare(jnp.ones((64, 32))).sharding.spec == P("rows", None)


def test_keyword_arguments() -> None:
    def scaled(x: jax.Array, *, w: jax.Array, bias: float = 0.0, mesh: Any = None) -> Any:
        return x @ w + bias, mesh

    function, x = planned(scaled), jnp.ones((64, 32))
    assert_close(function(x, w=x.T), scaled(x, w=x.T))
    for names in (("w", "bias"), ("mesh", "w")):  # also those of toast.jit's own options
        given = {name: {"w": x.T, "bias": 2.0, "mesh": x}[name] for name in names}
        with pytest.warns(PlanWarning, match=r"planned again, .*\[.*\], was missing"):
            assert_close(function(x, **given), scaled(x, **given))
    assert len(function._variants) == 3
    with pytest.warns(PlanWarning, match="planned again, .*their order"):
        assert_close(function(w=x.T, x=x), scaled(x, w=x.T))


def test_positional_or_by_name_is_the_same_program_and_plan() -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    function, x = planned(product), jnp.ones((64, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(x, x.T)
        first = function.plan
        assert_close(function(x, w=x.T), x @ x.T)
        assert function.plan.digest == first.digest


def test_equal_programs_with_other_constants_are_not_mixed_up() -> None:
    function, x = planned(lambda x, n: x * n, static_argnums=1), jnp.ones((64, 32))
    for n in (2.0, 3.0, 2.0):
        assert_close(function(x, n), n * x)
    other = toast.jit(lambda x, n: x * n, static_argnums=1, plan=function.plan)
    assert_close(other(x, 5.0), 5 * x)


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "how"}])
def test_static_arguments(static: Any) -> None:
    def activated(x: jax.Array, how: Any, *, scale: float = 1.0) -> jax.Array:
        assert isinstance(how, tuple)
        return scale * getattr(jax.nn, how[0])(x) * how[1]

    function, plain = planned(activated, **static), jax.jit(activated, **static)
    x = jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)
    assert_close(function(x, ("relu", 2)), plain(x, ("relu", 2)))
    with pytest.warns(PlanWarning, match="planned again, for other arguments: static ones"):
        assert_close(function(x, ("tanh", 3)), plain(x, ("tanh", 3)))
    with pytest.warns(PlanWarning, match="planned again"):
        assert_close(function(x, how=("relu", 2), scale=2.0), plain(x, how=("relu", 2), scale=2.0))
    assert_close(function(x, ("relu", 2)), plain(x, ("relu", 2)))


def test_typed_keys_and_scalars() -> None:
    def noisy(key: jax.Array, x: jax.Array, scale: Any) -> Any:
        new, own = jax.random.split(key)
        return new, x + scale * jax.random.normal(own, x.shape), scale + 1

    function, x = planned(noisy), jnp.ones((64, 32))
    key, scale = jax.random.key(0), 1
    other, expected_scale = key, scale
    for _ in range(3):  # the scale is a number of Python, then an array: another type, same program
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            key, own, scale = function(key, x, scale)
        other, expected, expected_scale = jax.jit(noisy)(other, x, expected_scale)
        assert_close(own, expected)
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        assert (jax.random.key_data(key) == jax.random.key_data(other)).all()
    assert int(scale) == int(expected_scale) == 4


def test_methods() -> None:
    @jax.tree_util.register_static
    class Model:
        @planned
        def double(self, x: jax.Array) -> jax.Array:
            return 2 * x

        @functools.partial(planned, static_argnums=0)
        def triple(self, x: jax.Array) -> jax.Array:
            return 3 * x

        def plain(self, x: jax.Array) -> jax.Array:
            return 4 * x

    model, x = Model(), jnp.ones((64, 32))
    assert_close(model.double(x), 2 * x)
    assert_close(model.triple(x), 3 * x)
    assert_close(planned(model.plain)(x), 4 * x)


def test_functions_of_jax_jit_keep_their_options() -> None:
    step = planned(jax.jit(train, donate_argnums=0))
    params, _ = step(init(jax.random.key(0)), *batch())
    step(params, *batch())
    assert step.plan.analysis.program.donated == {0, 1}
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_captured_arrays_are_arguments() -> None:
    table = jnp.arange(64.0 * 2048).reshape(64, 2048) / 1e4
    function, x = planned(lambda x: x @ table), jnp.ones((32, 64))
    for _ in range(2):
        assert_close(function(x), x @ table)
    assert function.plan.analysis.program.captured_arrays


def test_inside_other_functions() -> None:
    function, x = planned(lambda x: jnp.sin(x)), jnp.ones((64, 32))
    assert_close(jax.jit(lambda x: function(x) * 2)(x), 2 * jnp.sin(x))
    assert_close(function(x), jnp.sin(x))
    assert_close(jax.jit(lambda x: function(x) * 2)(x), 2 * jnp.sin(x))
    with pytest.raises(PlanError, match="cannot be differentiated"):
        jax.grad(lambda x: function(x).sum())(x)
    with pytest.raises(PlanError, match=r"jax\.vmap cannot map"):
        jax.vmap(function)(jnp.ones((2, 64, 32)))


def test_programs_without_devices_lower() -> None:
    step = planned(train, donate_argnums=0)
    text = step.lower(init(jax.random.key(0)), *(f32(*a.shape) for a in batch())).as_text()
    assert "stablehlo.dot_general" in text


def test_device_local_programs() -> None:
    step = planned(train, donate_argnums=0, lowering="local")
    params, value = step(init(jax.random.key(0)), *batch())
    assert_close((params, value), jax.jit(train)(init(jax.random.key(0)), *batch()))


def test_wide_types() -> None:
    with jax.enable_x64(True):
        function, x = planned(lambda x: x @ x.T), jnp.ones((64, 32))
        assert x.dtype == jnp.float64
        for _ in range(2):
            result = function(x)
            assert result.dtype == jnp.float64
        assert_close(result, x @ x.T)


def test_arguments_may_be_anywhere() -> None:
    step = planned(train)
    params = init(jax.random.key(0))
    expected = jax.jit(train)(params, *batch())
    elsewhere = jax.device_put(params, jax.devices()[7])
    mesh = jax.make_mesh((2,), ("other",))
    other = jax.device_put(params, NamedSharding(mesh, P("other")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        for own in (params, elsewhere, other, jax.tree.map(np.asarray, params), elsewhere, other):
            assert_close(step(own, *batch()), expected)
    assert len(step._variants) == 1


@pytest.mark.parametrize("mesh", ["data=4,model=2", {"data": 8}])
def test_constraints_name_axes_of_the_mesh(mesh: Any) -> None:
    def product(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x @ x.T, P("data"))

    x = np.ones((64, 32), np.float32)
    assert planned(product, mesh=mesh, settings=AT_ONCE).plan_for(x).mesh.devices == 8
    with pytest.raises(RuntimeError, match="requires a non-empty mesh"):  # of JAX, for another axis
        planned(lambda x: jax.lax.with_sharding_constraint(x, P("rows")))(x)


@pytest.mark.parametrize("form", [np.asarray, jnp.asarray], ids=["numpy", "uncommitted"])
def test_results_are_compiled_as_the_first_arguments(
    form: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def count(state: Any, x: jax.Array) -> Any:
        number, total = state
        return (number + 1, total + x), x.sum()

    step = planned(count, donate_argnums=0, mesh="data=2", settings=AT_ONCE)
    step.plan_for((0, np.ones((64, 32), np.float32)), np.ones((64, 32), np.float32))
    state = 0, form(np.ones((64, 32), np.float32))
    with jax.log_compiles():
        for _ in range(3):
            state, _ = step(state, form(np.ones((64, 32), np.float32)))
    assert sum("Compiling jit(count)" in record.getMessage() for record in caplog.records) == 1
    assert state[0].weak_type  # as the result of jax.jit


def test_static_arguments_by_position_and_arrays_elsewhere() -> None:
    def scaled(x: jax.Array, factors: tuple[int, ...], y: jax.Array) -> jax.Array:
        return x * sum(factors) + y

    function = planned(scaled, static_argnums=1, mesh="data=2")
    one = jax.device_put(jnp.ones((64, 32)), jax.devices()[7])
    assert_close(function(one, (2, 3), np.ones((64, 32), np.float32)), 6 * np.ones((64, 32)))


def test_calls_place_their_arguments_if_these_are_elsewhere_again_and_again() -> None:
    step = planned(train, donate_argnums=0)
    params, theirs = init(jax.random.key(0)), init(jax.random.key(0))
    for _ in range(5):
        x, y = jax.device_put(batch(), NamedSharding(jax.make_mesh((8,), ("all",)), P(None, "all")))
        params, value = step(params, x, y)
        theirs, expected = jax.jit(train)(theirs, *batch())
        assert_close(value, expected)
    (variant,) = step._variants.values()
    assert variant.call is not variant.pytrees.function


def test_callbacks_and_trees_without_arrays() -> None:
    seen: list[Any] = []

    def traced(nothing: Any, empty: Any, x: jax.Array) -> Any:
        jax.debug.callback(seen.append, x.sum())
        return nothing, empty, {"x": x + 1}

    function = planned(traced)
    for _ in range(2):
        assert_close(
            function(None, {}, jnp.ones((64, 32))), (None, {}, {"x": jnp.full((64, 32), 2.0)})
        )
    jax.effects_barrier()
    assert [float(s) for s in seen] == [2048.0, 2048.0]


def test_several_threads_plan_once() -> None:
    calls: list[Any] = []
    function = planned(lambda x: calls.append(1) or x + 1)  # type: ignore[func-returns-value]
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(function(jnp.ones((64, 32)))))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert len(calls) == 1


# -- meshes --------------------------------------------------------------------------------------


def test_without_a_mesh_it_takes_all_devices() -> None:
    function = toast.jit(lambda x, w: x @ w, settings=QUICK)
    with pytest.warns(PlanWarning, match="no hardware file describes devices of kind 'cpu'"):
        result = function(jnp.ones((512, 64)), jnp.ones((64, 128)))
    assert function.mesh.size == len(jax.devices())
    assert result.sharding.mesh == function.mesh
    assert function.plan.meshes


def test_a_list_of_devices_and_a_single_device() -> None:
    for devices in (jax.devices()[4:], jax.devices()[5:6]):
        function = toast.jit(jnp.tanh, mesh=devices, hardware="tpu-v5e", settings=QUICK)
        assert function(jnp.ones((64, 32))).sharding.device_set == set(devices)


def ambiguous(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def named(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("ij,jk->ik", x, w, out_sharding=P("data", None))


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("function", [ambiguous, named])
def test_explicit_meshes(function: Any, wanted: bool) -> None:
    """jax.jit asks for ``out_sharding`` where both operands are split; the plan needs none."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    put = functools.partial(jax.device_put, np.full((64, 64), 0.1, np.float32))
    x, w = put(NamedSharding(mesh, P(None, "model"))), put(NamedSharding(mesh, P("model", None)))
    step = toast.jit(function, mesh=mesh, hardware="tpu-v5e", settings=QUICK)
    if wanted:
        with jax.set_mesh(mesh):
            result = step(x, w)
            again = step(x, w) + result
    else:
        result = step(x, w)
        again = step(x, w) + result
    assert result.sharding.mesh == mesh
    assert_close(again, 2 * np.asarray(x) @ np.asarray(w))


def test_a_shard_map_over_explicit_axes() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P("data")))

    def summed(x: jax.Array) -> jax.Array:
        def part(x: jax.Array) -> jax.Array:
            return jax.lax.psum(x, "data")

        return jax.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P())(x)

    assert_close(toast.jit(summed, mesh=mesh, hardware="tpu-v5e", settings=AT_ONCE)(x), summed(x))


def test_manual_axes_are_refused() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Manual,) * 2)
    with pytest.raises(PlanError, match="mesh axes data, model are Manual; give"):
        toast.jit(jnp.tanh, mesh=mesh, hardware="tpu-v5e", settings=AT_ONCE)(jnp.ones((64, 32)))


# -- kept plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_file", [False, True])
def test_a_kept_plan_replaces_the_search(as_file: bool, tmp_path: pathlib.Path) -> None:
    params = init(jax.random.key(0))
    plan = toast.plan(jax.jit(train, donate_argnums=0), params, *batch(), **V5E, settings=QUICK)
    plan.to_json(tmp_path / "step.json")
    step = toast.jit(train, plan=tmp_path / "step.json" if as_file else plan, donate_argnums=0)
    expected = jax.jit(train)(params, *batch())
    assert_close(step(jax.tree.map(jnp.copy, params), *batch()), expected)
    assert step.plan.arguments == plan.arguments
    assert step.plan.digest == plan.digest
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    step = toast.jit(train, plan=plan, mesh=mesh, donate_argnums=0)
    params, _ = step(params, *batch())
    assert params["w1"].sharding.mesh == mesh


def test_a_kept_plan_of_another_program_says_so() -> None:
    plan = toast.plan(train, init(jax.random.key(0)), *batch(), **V5E, settings=QUICK)

    def train_deeper(params: Any, x: jax.Array, y: jax.Array) -> Any:
        return train(params, x, y + x @ params["w3"])

    step = toast.jit(train_deeper, plan=plan)
    params = {**init(jax.random.key(0)), "w3": jnp.ones((64, 64))}
    with (
        pytest.warns(PlanWarning, match=r"another form of the program, params\['w3'\] differ"),
        pytest.warns(PlanWarning, match="not donated"),
    ):
        step(params, *batch())
    with pytest.raises(PlanError, match="'constraints' for a kept plan"):
        toast.jit(train, plan=plan, constraints=toast.Constraints())


# -- other types ---------------------------------------------------------------------------------


def test_other_shapes_are_planned_again_and_said() -> None:
    step = planned(train, donate_argnums=0)
    params, _ = step(init(jax.random.key(0)), *batch())
    first = step.plan
    with pytest.warns(
        PlanWarning, match=r"planned again, .*: x is f32\[256,64\], was f32\[512,64\]"
    ):
        params, _ = step(params, *batch(256))
    assert step.plan is not first
    assert step.plan.mesh == first.mesh
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params, _ = step(params, *batch())
        assert step.plan is first
        params, _ = step(params, *batch(256))
    assert len(step._variants) == 2


def test_a_batch_that_no_axis_divides_runs_like_the_last_one() -> None:
    apply = planned(lambda w, x: jnp.tanh(x @ w), mesh="data=8")
    w, x = jnp.ones((30, 10)), jnp.ones((64, 30))
    apply(w, x)
    with pytest.warns(PlanWarning) as caught:
        assert_close(apply(w, x[:5]), jnp.tanh(x[:5] @ w))
    assert "sharded where the last plan still fits" in str(caught[0].message)
    with pytest.raises(MeshError, match="divides no dimension"):
        planned(lambda w, x: jnp.tanh(x @ w), mesh="data=8")(w, x[:5])


def test_numbers_and_arrays_have_other_results() -> None:
    def scaled(x: jax.Array, by: Any) -> jax.Array:
        return x * by

    x = jnp.ones((64, 32), jnp.bfloat16)
    scale = planned(scaled, mesh="data=8")
    assert scale(x, 2.0).dtype == jnp.bfloat16
    with pytest.warns(PlanWarning, match=r"by is f32\[\], was f32\[\] of a weak type"):
        assert scale(x, np.float32(3)).dtype == jnp.float32
    assert [scale(x, by).dtype for by in (2.0, jnp.float32(3))] == [jnp.bfloat16, jnp.float32]
    ahead = planned(scaled, mesh="data=8")
    ahead.plan_for(x, jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.warns(PlanWarning, match="planned again"):
        assert ahead(x, 2.0).dtype == jnp.bfloat16
    assert len(scale._variants) == 2


def test_the_methods_of_jitted_functions() -> None:
    step = planned(lambda x, *, scale: jnp.tanh(x) * scale)
    x = jnp.ones((64, 32))
    assert step.eval_shape(x, scale=2.0).shape == (64, 32)
    assert not step._variants
    first = step.plan_for(x, scale=2.0)
    step.clear_cache()
    with pytest.raises(PlanError, match="no plan before its first call"):
        _ = step.plan
    assert_close(step(x, scale=2.0), 2 * jnp.tanh(x))
    assert step.plan is not first


# -- what it says --------------------------------------------------------------------------------


def test_a_missing_donation_is_priced_in_one_line() -> None:
    def adam_like(params: Any, moments: Any, x: jax.Array, y: jax.Array) -> Any:
        new, value = train(params, x, y)
        moments = jax.tree.map(lambda m, p, n: 0.9 * m + (p - n), moments, params, new)
        return jax.tree.map(jnp.subtract, params, moments), moments, value

    params = init(jax.random.key(0))
    step = planned(adam_like, mesh="data=8")
    with pytest.warns(PlanWarning, match="not donated") as caught:
        step.plan_for(params, params, *batch(4096))
    (line,) = [str(w.message) for w in caught]
    assert "params and moments are returned" in line
    assert line.endswith("use donate_argnums=(0, 1)")
    assert "to reshard" in line
    assert "\n" not in line
    planned(adam_like, donate_argnums=(0, 1)).plan_for(params, params, *batch(4096))


def test_a_plan_that_does_not_fit_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    params = jax.tree.map(lambda a: f32(*(2048 * n for n in a.shape)), init(jax.random.key(0)))
    x = f32(64, 64 * 2048)
    step = planned(train)
    with pytest.warns(PlanWarning) as caught:
        step.plan_for(params, x, x)
    first, second = (str(warning.message) for warning in caught)
    assert "does not fit" in first
    assert "use donation, more devices" in first
    assert "not donated" in second
    assert "\033" not in first
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.warns(PlanWarning) as caught:
        planned(train).plan_for(params, x, x)
    assert str(caught[0].message).startswith("\033[1;31mtrain: does not fit")
    with pytest.raises(SearchError, match="no plan on mesh"):
        planned(train, memory_bytes=2**20).plan_for(params, x, x)


def test_a_function_that_jit_refuses_raises_the_error_of_jax() -> None:
    def branching(x: jax.Array) -> Any:
        return 1 if x.sum() > 0 else 2

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        planned(branching)(jnp.ones((64, 32)))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    with pytest.raises(TypeError):
        planned(lambda x: x)("text")
    with pytest.raises(ValueError, match="Non-hashable static"):
        planned(lambda x, n: x, static_argnums=1)(jnp.ones((64, 32)), [1])
    with pytest.raises(TypeError):
        toast.jit(3)
    with pytest.raises(TypeError, match="missing"):
        planned(train)(init(jax.random.key(0)))


def test_modules_of_pytorch_are_planned_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net:
        def __call__(self, x: Any) -> Any:
            return x

    monkeypatch.setitem(sys.modules, "torch.nn", SimpleNamespace(Module=Net))
    with pytest.raises(
        PlanError, match=r"Net is of PyTorch.*use toast.plan\(Net, \.\.\.\)\.to_torch"
    ):
        toast.jit(Net())


def test_bad_options() -> None:
    with pytest.raises(
        PlanError, match=r"toast\.jit has no option 'budget'; use the options of jax"
    ):
        toast.jit(train, budget=3)
    with pytest.raises(PlanError, match="train is planned already"):
        toast.jit(planned(train))
    with pytest.raises(PlanError, match=r"train has no plan before its first call"):
        _ = planned(train).plan
    with pytest.raises(PlanError, match=r"nothing\.json"):
        toast.jit(train, plan="nothing.json")(init(jax.random.key(0)), *batch())


# -- initial values ------------------------------------------------------------------------------


def test_initial_values_are_sharded_from_birth_and_equal() -> None:
    assert jax.config.jax_threefry_partitionable
    pins = {"params['w1']": P("data", "model"), "params['w2']": P("model", None)}
    step = planned(train, donate_argnums=0, constraints=toast.Constraints(pin=pins))
    plan = step.plan_for(jax.eval_shape(init, jax.random.key(0)), *batch())
    params = plan.init(init, step.mesh, jax.random.key(3))
    expected = init(jax.random.key(3))
    assert (
        jax.tree.map(lambda a: a.sharding, params)
        == (plan.shardings_for(step.mesh).in_shardings[0])
    )
    for own, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert own.addressable_shards[0].data.size < other.size
        assert (np.asarray(own) == np.asarray(other)).all()
    moved = jax.device_put(expected, plan.shardings_for(step.mesh).in_shardings[0])
    assert jax.tree.map(lambda a: a.sharding, moved) == jax.tree.map(lambda a: a.sharding, params)
    step(step.init(init, jax.random.key(3)), *batch())


def test_initial_values_of_several_arguments() -> None:
    def adam(params: Any, state: Any, x: jax.Array, *, y: jax.Array) -> Any:
        params, value = train(params, x, y)
        return params, {"m": state["m"], "count": state["count"] + 1}, value

    def both(key: jax.Array) -> Any:
        params = init(key)
        return params, {"m": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), int)}

    x, y = batch()
    step = planned(adam, donate_argnums=(0, 1))
    plan = step.plan_for(*jax.eval_shape(both, jax.random.key(0)), x, y=y)
    step(*plan.init(both, step.mesh, jax.random.key(0)), x, y=y)
    ones = plan.init(lambda: jnp.ones((512, 64)), step.mesh, argument="y")
    assert ones.sharding.spec == plan.shardings_for(step.mesh).in_shardings[1]["y"].spec
    for wrong, message in (
        (lambda key: {"w1": jnp.ones(3)}, r"lacks the leaf \['w2'\]"),
        (
            lambda key: jax.tree.map(lambda a: a[:2], init(key)),
            r"leaf \['w1'\] is float32\[2, 256\]",
        ),
        (lambda key: {**init(key), "w3": 0.0}, r"a further leaf \['w3'\]"),
    ):
        with pytest.raises(PlanError, match=message):
            plan.init(wrong, step.mesh, jax.random.key(0))
    with pytest.raises(
        PlanError, match="has no argument 'z'; use one of params, state, x, y, or a position"
    ):
        plan.init(init, step.mesh, jax.random.key(0), argument="z")


# -- memory policies and microbatches ------------------------------------------------------------


def train_in_layers(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def layer(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.nn.relu(x @ weights["w1"]) @ weights["w2"]) + x

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return toast.checkpoint(layer)(weights, x), None

        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    gradient = toast.accumulate(jax.value_and_grad(loss), batch_argnums=1)
    value, gradients = gradient(params, x)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


@pytest.mark.filterwarnings("ignore:.*not donated")
@pytest.mark.parametrize(
    ("options", "policy"),
    [({"remat": "full"}, "full"), ({"microbatches": 4}, ""), ({"remat": "auto"}, "auto")],
)
def test_functions_have_memory_policies_and_microbatches(
    options: dict[str, Any], policy: str, tmp_path: pathlib.Path
) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    params, (x, _) = jax.vmap(init)(keys), batch(64)
    expected = jax.jit(train_in_layers)(params, x)
    step = planned(train_in_layers, **options)
    assert_close(step(params, x), expected)
    assert step.plan.microbatches == options.get("microbatches", 1)
    assert (step.plan.policy is not None) == bool(policy)
    step.plan.to_json(tmp_path / "step.json")
    kept = toast.jit(train_in_layers, plan=tmp_path / "step.json")
    assert_close(kept(params, x), expected)
    assert (kept.plan.policy, kept.plan.microbatches) == (
        step.plan.policy, step.plan.microbatches
    )  # fmt: skip
    with pytest.warns(PlanWarning, match="planned again"):
        step(params, batch(128)[0])
    assert step.plan.policy == kept.plan.policy
