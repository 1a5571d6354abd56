"""Shardings written into StableHLO as Shardy annotations.

Every op result carries its sharding, closed, so that propagation has nothing left to decide. A
``sdy.sharding_constraint`` behind it says where it is kept (the same, or of a sum in parts where it
is scattered), since XLA keeps no other sharding of values inside a function. In front of every use
that demands another sharding stands a further constraint, shared by equal demands.
"""

from __future__ import annotations

from typing import Any

from toast.errors import PlanError
from toast.frontend import mlir, stablehlo
from toast.frontend.mlir import ModuleSource
from toast.program import Program, Shardings


def annotate(program: Program, shardings: Shardings) -> Any:
    """A copy of the program's module (calls inlined) with one ``sdy.mesh`` and all shardings.

    Raises :class:`toast.errors.PlanError` when a sharding is impossible, or when the program is a
    fact base and has no module.
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
        # A copy serves later uses in its own block; other blocks may not see it.
        key = (program.ops[op].operands[index], spec, operation.block)
        if key not in copies:
            copies[key] = writer.constrain(operation, place, spec)
        operation.operands[place] = copies[key]
    for operation, values in copy.source.results:
        kept = [shardings.of(program, v) for v in values]
        writer.set_results(
            operation, kept, [shardings.sums.get(v, k) for v, k in zip(values, kept, strict=True)]
        )
    writer.constrain_reshards()
    module.operation.verify()
    return module
