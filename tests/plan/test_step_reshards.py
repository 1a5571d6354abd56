"""Steps that return what they take, without donating it."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import toast
from tests.helpers import f32
from toast.cli import app
from toast.plan.step_reshards import returned_trees, step_reshards
from toast.program import Spec

Params = dict[str, jax.Array]
SHAPES = {"w1": f32(1024, 4096), "w2": f32(4096, 1024)}, f32(8192, 1024), f32(8192, 1024)


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - y) ** 2)


def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


def momentum(count: Any, *args: Any, state: Any) -> tuple[Any, ...]:
    params, x, y = args
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
    return value, jax.tree.map(jnp.subtract, params, state), state, count + 1


@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_a_step_that_returns_its_parameters_is_told_to_donate_them(hardware: str) -> None:
    plan = toast.plan(step, *SHAPES, mesh="data=4,model=2", hardware=hardware)
    (found,) = plan.step_reshards
    tree = found.tree
    assert (tree.argument, tree.result, tree.position) == ("params", "result[0]", 0)
    assert tree.pairs == ((0, 0), (1, 1))
    assert found.arrays
    assert found.seconds > 0
    assert found.text in plan.note
    assert "donate=(0,), or --donate 0" in plan.note
    assert plan.note.count("\n") == 0
    donated = toast.plan(step, *SHAPES, donate=0, mesh="data=4,model=2", hardware=hardware)
    assert not donated.step_reshards
    assert not donated.note
    # Both ways of using the result as the next argument cost about the same.
    total = plan.after.step_seconds + found.seconds
    assert donated.after.step_seconds <= total * 1.02


def test_what_the_reshard_between_steps_costs() -> None:
    """The collectives that bring arrays from where they leave to where they come in."""
    plan = toast.plan(step, *SHAPES, mesh="data=4,model=2", hardware="tpu-v5e")
    size = 1024 * 4096 * 4
    none, data, model = ((), ()), (("data",), ()), (("model",), ())
    both, turned = (("data", "model"), ()), (("model", "data"), ())
    other = ((), ("data",))

    def between(before: Spec, after: Spec) -> tuple[int, float]:
        rest = plan.shardings.results[1:]
        specs = (after, rest[0])
        (found,) = step_reshards(plan.model, lambda number: specs[number], (before, *rest))
        assert found.bytes > 0 or not found.seconds
        return found.arrays, found.seconds

    def takes(kind: str, size: float, *axes: str) -> tuple[int, float]:
        return 1, plan.model.machine.collectives.cheapest(kind, size, axes).seconds(size)

    assert between(both, both) == (0, 0)
    assert between(none, both) == (1, 0)  # each device keeps its part
    assert between(both, none) == takes("all_gather", size, "data", "model")
    assert between(both, data) == takes("all_gather", size / 4, "model")
    assert between(data, other) == takes("all_to_all", size / 4, "data")
    assert between(both, turned) == takes("collective_permute", size / 8, "data", "model")
    assert between(data, model) == takes("all_gather", size / 2, "data")


def test_trees_are_found_wherever_they_stand() -> None:
    params, *batch = SHAPES
    analysis = toast.analyze(
        momentum, jax.ShapeDtypeStruct((), jnp.int32), params, *batch, state=params
    )
    found = [(t.argument, t.result, t.position) for t in returned_trees(analysis)]
    assert found == [("args[0]", "result[1]", 1), ("state", "result[2]", -1)]


def test_single_arrays_are_found_in_train_steps() -> None:
    def update(w: Any, v: Any, x: Any) -> tuple[Any, Any]:
        gradients = jax.grad(lambda w, v: ((x @ w @ v) ** 2).sum(), (0, 1))(w, v)
        return w - gradients[0], v - gradients[1]

    shapes = f32(64, 32), f32(32, 64), f32(16, 64)
    found = [(t.argument, t.result) for t in returned_trees(toast.analyze(update, *shapes))]
    assert found == [("w", "result[0]"), ("v", "result[1]")]
    assert not returned_trees(toast.analyze(lambda x: x / 2, shapes[0]))


def test_gradients_and_donated_trees_are_no_next_arguments() -> None:
    assert not returned_trees(toast.analyze(jax.grad(loss), *SHAPES))
    assert not returned_trees(toast.analyze(step, *SHAPES, donate=0))
    assert not returned_trees(toast.analyze(lambda p, x: {"w1": p["w1"]}, *SHAPES[:2]))


def test_donate_on_the_command_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "returning.py").write_text(
        "import tests.plan.test_step_reshards as t\nfrom toast.models import Model\n"
        "def model(): return Model('step', t.step, t.SHAPES)\n"
        "def half(x): return x / 2\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ("--mesh", "data=4,model=2")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments])

    found = run("plan", "returning:model", *options)
    assert "Note: params is returned as result[0] but not donated" in found.stdout
    assert "reshard between steps (see note)" in found.stdout
    found = run("plan", "returning:model", *options, "--donate", "0", "--json", "plan.json")
    assert found.exit_code == 0
    assert "Note:" not in found.stdout
    again = run("explain", "plan.json", "returning:model", "--argument", "x")
    assert again.exit_code == 0
    assert "note" not in again.stderr, again.stderr
    found = run("plan", "returning:half", "--arg", "f32[64]", "--mesh", "a=2", "--donate", "0")
    assert found.exit_code == 0, found.output
    found = run("plan", "returning:model", *options, "--donate", "3")
    assert found.exit_code == 2
    assert "--donate 3: step has 3 arguments, counted from 0" in found.stderr
