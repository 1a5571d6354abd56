"""Bad input to device-local programs: one line that names the op, the factor, the axes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.cli.test_cli import run
from tests.helpers import f32
from toast.errors import PinError, PlanError
from toast.lower import local_forms
from toast.plan.shard import lowered_state

QUICK = toast.Settings(rounds=1)


def planned(function: Callable[..., Any], *shapes: Any, mesh: str = "data=4", **pin: Any) -> Any:
    return toast.plan(
        function, *shapes, mesh=mesh, hardware="tpu-v5e", settings=QUICK,
        constraints=toast.Constraints(pin=pin),
    )  # fmt: skip


def message(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_state_of_another_program_names_op_and_factor() -> None:
    model = planned(lambda x: x.sum(0) * 2, f32(64, 8)).model
    with pytest.raises(PlanError) as error:
        lowered_state(model, np.full_like(model.space.unsharded, 5))
    assert "factors, and the state shards its factor 5 along data" in message(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state[:1], "not (1, 1)"),
        (lambda state: state[0], "not (1,)"),
        (lambda state: [*state.tolist(), [0]], "has shape"),
        (lambda state: state.astype(float), "the number of a factor for each op class and axis"),
        (lambda state: np.full_like(state, -5), "the number of a factor"),
        (lambda state: "state", "has shape"),
    ],
)
def test_what_is_no_state_is_refused(change: Callable[[Any], Any], said: str) -> None:
    model = planned(lambda x: x.sum(0) * 2, f32(64, 8)).model
    with pytest.raises(PlanError) as error:
        lowered_state(model, change(model.space.unsharded))
    assert said in message(error)
    assert "use plan.state" in message(error)


def test_devices_that_are_none() -> None:
    plan = planned(lambda x: x.sum(0) * 2, f32(64, 8))
    first, *_ = jax.devices()
    for devices in ("data=4", [0, 1, 2, 3], [first, first, first, first]):
        with pytest.raises(PlanError, match=r"use|give a jax.sharding.Mesh|list each device once"):
            plan.jit(devices, lowering="local")


@pytest.mark.parametrize(
    ("annotate", "said"),
    [
        (lambda x: toast.shard(x, [[0, 1], [2]]), "rows of the device assignment have different"),
        (lambda x: toast.shard(x, [0, 1]), "use 1 for a dimension that stays whole"),
        (lambda x: toast.split(x, True, 2), "use a dimension below 2"),
        (lambda x: toast.split(x.sum(), 0, "data"), "the array is a scalar; use toast.replicate"),
    ],
)
def test_annotations_that_do_not_match_their_array(annotate: Any, said: str) -> None:
    with pytest.raises(PinError) as error:
        annotate(jnp.zeros((8, 8)))
    assert said in message(error)


def test_a_state_with_more_devices_than_elements_names_op_and_factor() -> None:
    model = planned(lambda x: jnp.sum(x * 2, axis=0), f32(3, 8), mesh="data=8").model
    state = np.full_like(model.space.unsharded, -1)
    (reduce,) = np.flatnonzero(
        [
            model.space.analysis.program.kind(op) == "reduce"
            for op in model.space.classes.representative.tolist()
        ]
    )
    state[reduce] = 1  # the summed dimension
    with pytest.raises(PlanError) as error:
        lowered_state(model, state)
    assert "reduce f32[8] at " in message(error)
    assert "8 devices (data) do not divide factor" in message(error)


def test_a_local_form_that_fails_names_op_and_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("sizes\nthat do not fit")

    plan = planned(lambda x: jnp.pad(x, ((0, 0), (1, 1))) * 2, f32(64, 8), x="P('data')")
    monkeypatch.setitem(local_forms.LOCAL_FORMS, "pad", fails)
    with pytest.raises(PlanError) as error:
        plan.lowered()
    assert "pad f32[64,10] at " in message(error)
    assert "no local form along factor 0 (data): sizes that do not fit" in message(error)


def test_an_op_that_is_invalid_on_shards_names_op_and_factor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its local form, a slice has the sizes of the whole."""
    plan = planned(
        lambda x, i: jax.lax.dynamic_slice(x, (0, i), (64, 2)) * 2,
        f32(64, 8), jax.ShapeDtypeStruct((), "int32"), x="P('data')",
    )  # fmt: skip
    monkeypatch.delitem(local_forms.LOCAL_FORMS, "dynamic_slice")
    with pytest.raises(PlanError) as error:
        plan.lowered()
    assert "dynamic_slice f32[64,2] at " in message(error)
    assert "along factor 0 (data)" in message(error)


def test_ops_without_a_local_form_are_named_with_what_the_price_lacks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of pooling: ``select_and_scatter`` along its windows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pooled.py").write_text(
        "import jax\n\n\ndef step(x):\n"
        "    pool = lambda x: jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, (1, 2, 1),\n"
        "                                           (1, 2, 1), 'VALID').sum()\n"
        "    return jax.grad(pool)(x)\n"
    )
    monkeypatch.setattr(local_forms, "slides", lambda *_: False)
    target = "pooled:step", "--arg", "f32[4,64,8]"
    pins = "--pin", "x=P(None, 'data')", "--pin", "result=P(None, 'data')"
    assert run("plan", *target, "--mesh", "data=4", *pins, "--json", "plan.json").exit_code == 0
    result = run("lower", "plan.json", *target[:1], *target[1:])
    assert result.exit_code == 1, result.output
    assert "Ops without a local form, which run whole along factors" in result.stdout
    assert "select_and_scatter f32[4,64,8]" in result.stdout
    assert "The price does not have their collectives: 1 in a step, 8 KiB" in " ".join(
        result.stdout.split()
    )


@pytest.mark.parametrize(
    ("rows", "devices", "pin"), [(3, 8, "x"), (7, 4, "x"), (3, 8, "result"), (5, 4, "result")]
)
def test_uneven_shards_of_arguments_and_results(rows: int, devices: int, pin: str) -> None:
    """JAX shards only whole shards of arguments and results, also of padded programs."""
    for uneven in (0, 1):
        with pytest.raises(PinError) as error:
            toast.plan(
                lambda x: x * 2, f32(rows, 8), mesh=f"data={devices}", hardware="tpu-v5e",
                settings=QUICK, constraints=toast.Constraints(pin={pin: "P('data')"}),
                uneven=uneven,
            )  # fmt: skip
        assert f"{devices} devices (data) do not divide dimension 0" in message(error)
        assert f"of {rows} elements" in message(error)


def test_uneven_shards_of_annotations() -> None:
    with pytest.raises(PinError) as error:
        planned(lambda x: toast.split(x, 0, "data") * 2, f32(3, 8), mesh="data=8")
    assert "split(0, 'data') at " in message(error)
    assert "8 devices (data) do not divide dimension 0 of 3 elements" in message(error)


@pytest.mark.parametrize("lowering", ["xla", "local"])
def test_meshes_larger_than_the_devices_there_are(lowering: str) -> None:
    plan = planned(lambda x: x * 2, f32(64, 8), mesh="data=16")
    for devices, text in (
        (None, "mesh data=16 needs 16 devices, but JAX has 8"),
        (jax.devices()[:4], "mesh data=16 needs 16 devices, but JAX has 4"),
        (
            jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",)),
            "is for mesh data=16, not data=8",
        ),
        (7, "devices 7: give a jax.sharding.Mesh, or a list of devices"),
    ):
        with pytest.raises(PlanError) as error:
            plan.jit(devices, lowering=lowering)
        assert text in message(error)
    with pytest.raises(PlanError, match="needs 16 devices, but JAX has 8"):
        plan.verify(lowering=lowering)


def test_device_assignments_that_are_no_permutations() -> None:
    for tiles, text in (
        ([[0, 1], [2, 2]], "no permutation of devices; use each of 0 to 3 once"),
        ([[0, 1], [2, 4]], "no permutation of devices; use each of 0 to 3 once"),
        ([[0.0, 1.0]], "no permutation of devices"),
        ([[0, 1, 2, 3, 4, 5, 6, 7]] * 2, "no permutation of devices"),
        ([[0, 2], [1, 3]], "it has 4 devices, and mesh data=8 has 8"),
    ):
        with pytest.raises(PinError) as error:
            planned(lambda x: toast.shard(x, tiles) * 2, f32(64, 8), mesh="data=8")  # noqa: B023
        assert text in message(error)
        assert "test_bad_input.py:" in message(error)


def test_a_region_for_more_devices_than_the_mesh_has() -> None:
    script = (
        "import jax, numpy as np, toast\n"
        "from jax.sharding import PartitionSpec as P\n"
        "mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))\n"
        "f = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P('data'), out_specs=P('data'))\n"
        "x = jax.ShapeDtypeStruct((64, 8), 'float32')\n"
        "try:\n"
        "    toast.plan(f, x, mesh='data=4', hardware='tpu-v5e')\n"
        "except toast.ToastError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 1, done.stdout
    assert "data" in done.stdout


def test_pins_that_contradict_annotations_on_both_lowerings() -> None:
    for lowering in ("xla", "local"):
        with pytest.raises(PinError) as error:
            toast.plan(
                lambda x: toast.replicate(x) * 2, f32(64, 8), mesh="data=4", hardware="tpu-v5e",
                constraints=toast.Constraints(pin={"x": P("data")}), lowering=lowering,
            )  # fmt: skip
        assert "replicate at " in message(error)
        assert "contradicts pin x=P('data'" in message(error)
