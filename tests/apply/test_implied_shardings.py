"""Values without a constraint: Shardy's propagation gives them the plan's shardings."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir, passmanager

import toast
from tests.helpers import f32, model_of, random_states
from toast.apply import annotate, verify
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


def fills(operation: Any) -> bool:
    """Whether an operation broadcasts a constant."""
    if operation.name != "stablehlo.broadcast_in_dim":
        return False
    owner = operation.operands[0].owner
    return not isinstance(owner, ir.Block) and owner.name in ("stablehlo.constant", "sdy.constant")


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
                filled = not got and fills(operation)
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
    states = random_legal(model.space, 3, np.random.default_rng(0))
    for state in (*states, *random_states(model.space, 3, seed=0)):
        number, found = differing(model, state)
        assert not found
        total += number
    assert total


def iota_summed(x: jax.Array) -> jax.Array:
    return x + jnp.sin(jax.lax.broadcasted_iota("float32", (64, 16), 0) * 0.5).sum(0)


def broadcast_summed(x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.broadcast_to(x[None], (128, 16)) * 2).sum(0)


def broadcast_multiplied(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(jnp.broadcast_to(x, (128, 16)) * 2) @ w)


def embedding(tokens: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.tanh(jax.nn.one_hot(tokens, 16) @ table)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (iota_summed, [f32(16)]),
        (broadcast_summed, [f32(16)]),
        (broadcast_multiplied, [f32(16), f32(16, 32)]),
        (embedding, [jax.ShapeDtypeStruct((64,), np.int32), f32(16, 32)]),
    ],
)
def test_axes_that_no_argument_decides(function: Any, shapes: list[Any]) -> None:
    model = model_of(toast.analyze(function, *shapes), "d=4,m=2", min_dimensions=0)
    for state in random_states(model.space, 16, seed=1):
        _, found = differing(model, state)
        assert not found


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


def test_a_resharded_operand_decides() -> None:
    analysis = toast.analyze(lambda x, w: jnp.tanh(x) @ w, f32(64, 32), f32(32, 16))
    model = model_of(analysis, "d=4", min_dimensions=0)
    program = analysis.program
    replicated = shardings_of(model, model.space.initial)
    tanh = next(n for n in range(len(program.ops)) if program.kind(n) == "tanh")
    (value,) = program.ops[tanh].results
    values = {**replicated.values, value: (("d",), ())}
    assert value not in implied_values(program, dataclasses.replace(replicated, values=values))
    sharded = dataclasses.replace(replicated, values=values, uses={(tanh, 0): (("d",), ())})
    assert value in implied_values(program, sharded)


def test_a_sum_is_scattered_where_a_broadcast_decides() -> None:
    """Else propagation would shard the rows first, and gather the weights instead."""
    model = model_of(toast.analyze(broadcast_multiplied, f32(16), f32(16, 32)), "m=8")
    program = model.space.analysis.program
    columns, rows, whole = ((), ("m",)), (("m",), ()), ((), ())
    product = next(n for n in range(len(program.ops)) if program.kind(n) == "dot_general")
    (result,) = program.ops[product].results
    values = {
        number: columns if number < result else rows
        for number, value in enumerate(program.values) if value.type.shape[:1] == (128,)
    }  # fmt: skip
    _, weights = program.argument_values
    shardings = dataclasses.replace(
        shardings_of(model, model.space.initial), values=values | {weights: rows}, uses={},
        results=(rows,), sums={result: whole},
    )  # fmt: skip
    (operand, _) = program.ops[product].operands
    assert operand not in implied_values(program, shardings)
    check = verify(program, shardings)
    assert check.equal
    assert check.collectives["all_reduce"] == 1
    assert check.collectives.get("all_gather", 0) <= 1
