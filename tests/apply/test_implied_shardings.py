"""Values without a constraint: Shardy's propagation gives them the plan's shardings."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir, passmanager

import toast
from tests.helpers import f32, model_of
from toast.apply import annotate
from toast.apply.implied_shardings import implied_values
from toast.cost import CostModel
from toast.evaluation.optimum import random_legal
from toast.frontend.mlir.modules import main_function, walk
from toast.models import build
from toast.plan.shard import shardings_of
from toast.space import States

EXPECTED, SHARDING = "expected", "sdy.sharding"

#: Ops without a constraint whatever the plan: sources, and products before a transpose.
FREE = ("stablehlo.constant", "stablehlo.iota", "stablehlo.dot_general")


def axes_in(attribute: Any) -> str:
    """The axes of each dimension of a sharding, open or closed; empty for a replicated value."""
    text = re.sub(r",? ?\?", "", str(attribute).split("@toast_mesh, ")[-1].split("]>")[0])
    return text if '"' in text else ""


def differing(model: CostModel, state: States) -> tuple[int, list[str]]:
    """The number of values without a constraint, and those that propagation shards otherwise.

    Constants may be whole everywhere: they cost nothing.
    """
    module = annotate(model.space.analysis.program, shardings_of(model, state))
    number = 0
    with module.context:
        for operation in [*walk(main_function(module, "test").operation.regions[0].blocks[0])]:
            if SHARDING not in operation.attributes or operation.name.startswith("sdy."):
                continue
            users = {
                use.owner.operation.name for result in operation.results for use in result.uses
            }
            free = "sdy.sharding_constraint" not in users
            if operation.name.startswith("chlo."):
                free = False  # XLA replaces them by others before, and Shardy has no rules for them
            if free and operation.name not in FREE:
                operation.attributes[EXPECTED] = operation.attributes[SHARDING]
                number += 1
            del operation.attributes[SHARDING]  # as XLA does
        copy = ir.Module.parse(str(module))
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(
            copy.operation
        )
        found = []
        for operation in walk(main_function(copy, "test").operation.regions[0].blocks[0]):
            if EXPECTED in operation.attributes:
                known = SHARDING in operation.attributes
                got = axes_in(operation.attributes[SHARDING]) if known else ""
                filled = operation.name == "stablehlo.broadcast_in_dim" and not got
                if got != axes_in(operation.attributes[EXPECTED]) and not filled:
                    found.append(f"{operation.name}: {got}")
    return number, found


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("t2b", "d=4,m=2"),
        ("unet", "x=2,y=2,z=2"),
        ("gns", "d=2,m=2"),
        ("resnet50", "d=4,m=2"),
        ("mamba2-1.3b", "d=4,m=2"),
        ("moe", "d=4,m=2"),
        ("vit-h", "x=2,y=2,z=2"),
    ],
)
def test_propagation_finds_them(name: str, mesh: str) -> None:
    model = model_of(toast.analyze(build(name, small=True)), mesh)
    total = 0
    for state in random_legal(model.space, 4, np.random.default_rng(0)):
        number, found = differing(model, state)
        assert not found
        total += number
    assert total


def test_resharded_values_are_stated() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x).T @ w)

    analysis = toast.analyze(step, f32(64, 32), f32(64, 16))
    model = model_of(analysis, "d=4", min_dimensions=0)
    program = analysis.program
    kinds = dict.fromkeys(range(len(program.values)), "")
    kinds |= {op.results[0]: program.kind(n) for n, op in enumerate(program.ops) if op.results}
    replicated = shardings_of(model, model.space.initial)
    implied = implied_values(program, replicated)
    assert {kinds[value] for value in implied} == {"tanh", "transpose"}  # not the returned one
    (transposed,) = (value for value in implied if kinds[value] == "transpose")
    product = next(n for n, op in enumerate(program.ops) if transposed in op.operands)
    uses = {(product, program.ops[product].operands.index(transposed)): ((), ("d",))}
    sharded = type(replicated)(
        replicated.mesh, replicated.values, uses, replicated.results, replicated.sums
    )
    assert transposed not in implied_values(program, sharded)
