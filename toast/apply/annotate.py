"""Writes shardings into StableHLO as Shardy annotations.

The sharding of every op result is closed, so that propagation changes nothing.  After each op, a
``sdy.sharding_constraint`` states the sharding in which the value is stored, because XLA does not
keep other shardings inside a function.  It equals the sharding in which the op computes the value,
except for partial sums that are scattered.  Before a use with another sharding is a further
constraint; uses with equal shardings share it.
"""

from __future__ import annotations

from typing import Any

from toast.errors import PlanError
from toast.frontend import mlir, stablehlo
from toast.frontend.mlir import ModuleSource
from toast.program import Program, Shardings


def annotate(program: Program, shardings: Shardings) -> Any:
    """A copy of the program's inlined module with one ``sdy.mesh`` and all shardings.

    Raises :class:`toast.errors.PlanError` if a sharding is impossible, or if the program is a fact
    base, which has no module.
    """
    source = program.source
    if not isinstance(source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no program to annotate or run")
    shardings.check(program)
    module = mlir.clone(source.module)
    copy = stablehlo.from_module(module, name=program.name)
    writer = mlir.ShardyWriter(module, shardings.mesh.axes)
    writer.set_function(
        [shardings.of(program, v) for v in program.argument_values], list(shardings.results)
    )
    copies: dict[tuple[Any, ...], Any] = {}
    for (op, index), spec in sorted(shardings.uses.items()):
        operation, place = copy.source.operand_sites[op, index]
        # A copy serves later uses in its own block; it is not visible in other blocks.
        key = (program.ops[op].operands[index], spec, operation.block)
        if key not in copies:
            copies[key] = writer.constrain(operation, place, spec)
        operation.operands[place] = copies[key]
    for operation, values in copy.source.results:
        specs = [shardings.of(program, v) for v in values]
        writer.set_results(
            operation,
            specs,
            [shardings.sums.get(v, spec) for v, spec in zip(values, specs, strict=True)],
        )
    writer.constrain_reshards()
    module.operation.verify()
    return module
