"""Writes shardings into StableHLO as Shardy annotations.

The sharding of every op result is closed, so that propagation changes nothing.  After an op, a
``sdy.sharding_constraint`` states the sharding in which the value is stored, because XLA does not
keep other shardings inside a function.  It equals the sharding in which the op computes the value,
except for partial sums that are scattered.  Where the sharding follows from those around it, there
is no constraint (:mod:`toast.apply.implied_shardings`).  Before a use with another sharding is a
further constraint; uses with equal shardings share it.  There is a constraint for each step of a
reshard.

Manual regions (``jax.shard_map``) are moved to the plan's mesh.  The shardings of their operands
and results have the axes of the region first.  Inside, shardings have the other axes only.

XLA's partitioner expands products of groups of rows (``jax.lax.ragged_dot``): it multiplies all
rows with the matrix of each group.  These products are manual computations, in which a device runs
XLA's kernel for its shards.

XLA makes one product of a product and the transpose of its result, as in gradients of weights, but
only if nothing is between them.  Otherwise it sums the result, and the optimizer copies weights and
moments into the layout of the transposed sum.  So the constraints of such a product are written
after the transpose.

Arrays of which a device accesses a single element pass an ``optimization_barrier``
(:mod:`toast.apply.single_elements`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir

from toast.apply.implied_shardings import implied_values
from toast.apply.single_elements import single_elements
from toast.cost.reshard_steps import (
    RESTORED,
    crowded_dimensions,
    exchanged_dimensions,
    reshard_steps,
)
from toast.errors import PlanError
from toast.frontend import mlir
from toast.frontend.mlir import ModuleSource
from toast.program import Program, Shardings, Spec
from toast.space import BOUNDARY, matched_axes

#: Ops that a device runs on its shards, out of the partitioner's sight.
_CONFINED = frozenset({"chlo_ragged_dot"})


def annotate(program: Program, shardings: Shardings) -> Any:
    """A copy of the program's inlined module with one ``sdy.mesh`` and all shardings.

    Raises :class:`toast.errors.PlanError` if a sharding is impossible, or if the program is a fact
    base, which has no module.
    """
    source = program.source
    if not isinstance(source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no program to annotate or run")
    shardings.check(program)
    copy = source.copied()
    module = copy.module
    writer = mlir.ShardyWriter(module, shardings.mesh.axes)
    writer.set_function(
        [shardings.of(program, v) for v in program.argument_values], list(shardings.results)
    )
    sizes = dict(shardings.mesh.axes)
    copies: dict[tuple[Any, ...], Any] = {}
    for (op, index), spec in sorted(shardings.uses.items()):
        operation, place = copy.operand_sites[op, index]
        # A copy serves later uses in its own block; it is not visible in other blocks.
        key = (program.ops[op].operands[index], spec, operation.block)
        if key not in copies:
            stored = shardings.of(program, program.ops[op].operands[index])
            shape = program.values[program.ops[op].operands[index]].type.shape
            copies[key] = writer.constrain(operation, place, _way(stored, spec, shape, sizes))
        operation.operands[place] = copies[key]
    matched = dict(shardings.manual_axes) or matched_axes(program, shardings.mesh)
    everywhere = _in_regions_of_all_axes(program, shardings, matched)
    for op, index in single_elements(program, shardings):
        if op not in everywhere:
            operation, place = copy.operand_sites[op, index]
            writer.guard(operation, place, shardings.at(program, op, index))
    regions: dict[Any, tuple[list[Spec], list[Spec]]] = {}
    for op in range(len(program.ops)) if matched else ():
        if program.kind(op) in BOUNDARY:
            operands, results = regions.setdefault(copy.operations[op], ([], []))
            if program.kind(op) == "manual_entry":
                value = program.ops[op].operands[0]
                operands.append(shardings.uses.get((op, 0), shardings.of(program, value)))
            else:
                results.append(shardings.of(program, program.ops[op].results[0]))
    ways_of_products: dict[Any, tuple[Spec, ...]] = {}
    implied = implied_values(program, shardings)
    for operation, values in copy.results:
        if program.values[values[0]].op in everywhere:
            continue
        specs = [shardings.of(program, v) for v in values]
        computed = [shardings.sums.get(v, spec) for v, spec in zip(values, specs, strict=True)]
        op = program.values[values[0]].op
        signature = program.signatures[program.ops[op].signature]
        if signature.kind in _CONFINED and signature.attribute("manual") is None:
            operands = [shardings.at(program, op, n) for n in range(len(operation.operands))]
            operation = writer.confine(operation, operands, computed[0])
        ways = [
            [*dict.fromkeys((parts, *_way(parts, spec, program.values[v].type.shape, sizes)))]
            for v, spec, parts in zip(values, specs, map(_scattered, computed, specs), strict=True)
        ]
        if before := ways_of_products.pop(operation, ()):
            ways = [[spec for spec, _ in itertools.groupby((*before, *ways[0]))]]
        elif len(values) == 1 and values[0] in implied:
            ways = [[]]
        if signature.kind == "dot_general" and (transpose := _only_transpose(operation)):
            order = ir.DenseI64ArrayAttr(transpose.attributes["permutation"])
            ways_of_products[transpose] = tuple(tuple(way[d] for d in order) for way in ways[0])
            ways = [[]]
        writer.set_results(operation, ways, computed)
    writer.constrain_reshards()
    writer.run_callbacks_once()
    writer.move_regions(matched, regions)
    writer.confine_callbacks()
    module.operation.verify()
    return module


def _way(
    before: Spec, after: Spec, shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Spec, ...]:
    """The shardings to state on the way from ``before`` to ``after``, which is the last of them.

    Of several steps, XLA would make one that gathers the whole value, unless each is stated.  What
    is sliced at the end needs no statement.
    """
    crowded = crowded_dimensions(shape, before, after, sizes)
    steps = reshard_steps(before, after, crowded, exchanged_dimensions(before, after, sizes))
    between = (step.after for step, later in itertools.pairwise(steps) if later.kind != "slice")
    return (*(spec for spec in between if RESTORED not in str(spec)), after)


def _only_transpose(operation: Any) -> Any | None:
    """The transpose beside an op with one result that is the only op to use the result."""
    users = [use.owner.operation for use in operation.results[0].uses]
    if len(users) == 1 and users[0].name == "stablehlo.transpose":
        return users[0].opview if users[0].block == operation.operation.block else None
    return None


def _scattered(computed: Spec, stored: Spec) -> Spec:
    """A sharding with the axes of ``stored`` into which a sum that is ``computed`` is scattered."""
    there = {axis for axes in computed for axis in axes}
    return tuple(
        (*axes, *(axis for axis in goal if axis not in there))
        for axes, goal in zip(computed, stored, strict=True)
    )


def _in_regions_of_all_axes(
    program: Program, shardings: Shardings, matched: Mapping[str, str]
) -> frozenset[int]:
    """The ops in manual regions that together take all axes: nothing can be sharded there."""
    real = {name for name, size in shardings.mesh.axes if size > 1}
    inside = []
    for signature in program.signatures:
        axes = signature.attribute("manual") if matched else None
        taken = {matched[str(axis)] for axis in axes} if isinstance(axes, tuple) else set()
        inside.append(bool(taken) and taken >= real)
    return frozenset(n for n, op in enumerate(program.ops) if inside[op.signature])
