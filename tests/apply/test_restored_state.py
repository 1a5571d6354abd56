"""A restored state on the devices of a plan, and where it does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.export.small_plan import plan, train_step, types, values
from toast.errors import PlanError


def numpy_params() -> Any:
    return jax.tree.map(np.asarray, values()[0])


def test_types_have_the_shardings() -> None:
    params, tokens = plan().types_for()
    own = plan().shardings_for().in_shardings
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == own[0]
    assert (tokens.shape, tokens.dtype, tokens.sharding) == ((64, 16), jnp.int32, own[1])


def test_a_state_is_placed() -> None:
    params = numpy_params()
    placed = plan().place(params)
    assert placed["up"].sharding == plan().shardings_for().in_shardings[0]["up"]
    assert (np.asarray(placed["up"]) == params["up"]).all()
    both = plan().place((params, values()[1]))
    assert isinstance(both, tuple)
    assert both[1].sharding == plan().shardings_for().in_shardings[1]
    assert isinstance(plan().place([params]), list)
    tokens = plan().place(values()[1], argument=1)
    assert tokens.sharding == both[1].sharding
    results = plan().jit()(*both)
    assert results[0]["up"].shape == (512, 1024)


def test_a_state_of_other_devices_is_placed() -> None:
    """A state that eight devices hold goes on the four of the plan."""
    mesh = jax.make_mesh((8,), ("all",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    params = jax.device_put(numpy_params(), spec)
    assert plan().place(params)["up"].sharding.mesh.devices.size == 4


@pytest.mark.parametrize(("change", "text"), [
    ({"up": np.ones((512, 48), np.float32)},
     r"params\['up'\]: dimension 1 has 48 elements in the state, and 1024 in the plan; restore"),
    ({"up": np.ones(16, np.float32)}, r"params\['up'\]: it has 1 dimensions in the state, and 2"),
    ({"up": np.ones((512, 1024), np.float16)}, "it is float16 in the state, and float32 in the plan"),
    ({"new": np.ones(3)}, r"compared with params, it has a further leaf \['new'\]"),
])  # fmt: skip
def test_a_state_that_does_not_fit_the_plan(change: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text) as error:
        plan().place({**numpy_params(), **change})
    assert "\n" not in str(error.value)


def test_a_mesh_that_does_not_fit_the_state() -> None:
    mesh = jax.make_mesh((3, 2), ("data", "model"), devices=jax.devices()[:6])
    for ask in (plan().types_for, plan().shardings_for, lambda m: plan().place(numpy_params(), m)):
        with pytest.raises(PlanError, match=(
            r"params\['down'\]: dimension 1 has 512 elements, which 3 devices \(data\) of mesh "
            r"data=3,model=2 do not divide; the plan is for mesh data=2,model=2; plan again"
        )):  # fmt: skip
            ask(mesh)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with pytest.raises(PlanError, match="the plan is for mesh data=2,model=2, not data=4,model=2"):
        plan().types_for(mesh)


def test_the_argument_must_exist() -> None:
    with pytest.raises(PlanError, match="no argument 5; use one of params, tokens, or a pos"):
        plan().place(numpy_params(), argument=5)
    assert plan().place(numpy_params(), argument="params")["up"].sharding.mesh.devices.size == 4
    with pytest.raises(PlanError, match="compared with params, it is one array, not a tree; pass"):
        plan().place(np.ones(3), argument="params")


def test_keyword_arguments_have_types() -> None:
    params, tokens = types()
    own = toast.plan(
        train_step, params, tokens=tokens, mesh="data=2", hardware="tpu-v5e",
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    positional, keywords = own.types_for()
    assert positional[0]["up"].shape == (512, 1024)
    assert keywords["tokens"].shape == tokens.shape
    assert own.place(numpy_params())["up"].shape == (512, 1024)


def test_programs_of_files_have_no_trees() -> None:
    analysis = plan().analysis
    program = dataclasses.replace(analysis.program, source=None)
    own = dataclasses.replace(plan(), analysis=dataclasses.replace(analysis, program=program))
    for ask in (own.types_for, lambda: own.place(np.ones(3))):
        with pytest.raises(PlanError, match="without pytrees"):
            ask()
