"""Exported names and rules, applied by Flax itself."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.export.small_plan import plan, values


def module_of(text: str) -> Any:
    module = types.ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), module.__dict__)
    return module


def equal(one: Any, two: Any, tree: Any) -> bool:
    same = jax.tree.map(lambda a, b, leaf: a.is_equivalent_to(b, leaf.ndim), one, two, tree)
    return bool(jax.tree.all(same))


def test_linen_applies_the_rules() -> None:
    nn = pytest.importorskip("flax.linen")
    exported, params = module_of(plan().export("flax")), values()[0]
    own = plan().shardings_for()
    mesh = own.in_shardings[1].mesh
    logical = exported.logical_specs(params, "params")
    shardings = nn.logical_to_mesh_sharding(logical, mesh, exported.RULES)
    assert equal(shardings, own.in_shardings[0], params)


def test_nnx_applies_the_rules() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.up = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
            self.down = nnx.Linear(32, 16, rngs=nnx.Rngs(0))

    def apply(network: Any, x: jax.Array) -> Any:
        return x @ network.up.kernel[...] @ network.down.kernel[...]

    pin = {
        "network.up.kernel.value": "P('data', 'model')",
        "network.down.kernel.value": "P('model')",
    }
    network = Network()
    own = toast.plan(
        apply, network, jnp.ones((8, 16)), mesh="data=2,model=2", hardware="tpu-v5e",
        settings=toast.Settings(rounds=1), constraints=toast.Constraints(pin=pin),
    )  # fmt: skip
    planned = own.shardings_for().in_shardings[0]
    mesh = planned.up.kernel.get_value().mesh
    exported = module_of(own.export("flax"))
    exported.annotate(network, "network")
    assert network.up.kernel.get_metadata("out_sharding") == ("embed", "mlp")
    state = nnx.state(network)
    with nnx.logical_axis_rules(exported.RULES):
        shardings = nnx.get_named_sharding(state, mesh)
    for kernel in (shardings.up.kernel, shardings.down.kernel):
        assert kernel is not None
    assert shardings.up.kernel.get_value().spec == planned.up.kernel.get_value().spec
    assert shardings.down.kernel.get_value().spec == planned.down.kernel.get_value().spec


def test_configurations_are_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(plan().export("maxtext"))
    assert config["mesh_axes"] == ["data", "tensor"]
    assert ["mlp", ["tensor"]] in config["logical_axis_rules"]
    text = plan().export("levanter")
    mesh = yaml.safe_load(text)["trainer"]["mesh"]
    assert mesh["axes"]["model"] == 2
    assert mesh["param_mapping"]["mlp"] == ["model"]
    older = "\n".join(line[2:] for line in text.partition("# trainer:")[2].splitlines())
    resources = yaml.safe_load(f"trainer:\n{older}")["trainer"]["axis_resources"]
    assert resources == {"batch": ["data"], "mlp": ["model"]}
