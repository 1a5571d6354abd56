"""Whether the backward pass gathers an argument again, or uses the copies of the forward pass."""

from __future__ import annotations

import fnmatch

import numpy as np

from toast.cost.entities import Entity
from toast.cost.liveness import PASSED_ON
from toast.explain.collective_causes import in_order, values_of
from toast.plan import GatheredCopies, Plan

#: Ops whose result is an argument, or a part of it.
_PARTS = PASSED_ON | {
    "carry", "dynamic_slice", "slice", "reshape", "convert", "transpose", "reduce_precision",
    "sdy_sharding_constraint", "optimization_barrier",
}  # fmt: skip

#: The passes that may use the copies of the forward pass.
_BACKWARD = ("backward", "recomputed")


def gathered_copies(plan: Plan, argument: int) -> GatheredCopies | None:
    """What the passes of a program gather of an argument.

    :param plan: a plan with a memory policy.
    :param argument: the number of the argument.
    :returns: the gathers; ``None`` if the forward pass gathers nothing of it, if the backward pass
        does not use it, or if the plan has no policy.
    """
    memory, program = plan.analysis.program.memory, plan.analysis.program
    if memory is None or memory.policy is None:
        return None
    parts, names = _parts(plan, argument), plan.analysis.names
    count, seconds, bytes_, again_count, again_seconds = 0.0, 0.0, 0.0, 0.0, 0.0
    once = plan.microbatches > 1
    for row in in_order(plan):
        moved = values_of(plan, row)
        mine = parts & {*moved}
        if row.traffic.term.scope is not Entity.USE_CLASS or not mine:
            continue
        if row.transfer.kind != "all_gather":
            continue
        uses = np.flatnonzero(plan.model.tables.use_class == row.x)
        uses = uses[np.isin(names.use_value[uses], [*mine])]
        passes = {program.passes[op] for op in names.use_op[uses].tolist()}
        times = row.transfer.count * len(mine) / len(moved)
        if passes & {*_BACKWARD}:
            again_count += times
            again_seconds += times * row.transfer.seconds
        else:
            once = once and bool(row.transfer.count < plan.microbatches * len(moved))
            count += times
            seconds += times * row.transfer.seconds
            bytes_ += times * row.transfer.bytes
    users = [
        op for op, value in zip(names.use_op.tolist(), names.use_value.tolist(), strict=True)
        if value in parts and program.passes[op] in _BACKWARD
    ]  # fmt: skip
    if not count or not users:
        return None
    again = again_count > 0
    in_loop = any(program.repeats[op] > plan.microbatches for op in users)
    return GatheredCopies(
        again=again,
        count=again_count if again else count,
        seconds=again_seconds if again else seconds,
        bytes=bytes_,
        inputs=() if once or in_loop else _inputs(plan, argument, parts, again=again),
        in_loop=in_loop,
        once=once,
    )


def _parts(plan: Plan, argument: int) -> set[int]:
    """The values that are an argument, or a part of it."""
    program = plan.analysis.program
    parts = {program.argument_values[argument]}
    for op in program.ops:  # what a loop carries is defined before its body
        if op.operands[:1] and op.operands[0] in parts:
            parts.update(op.results if program.signatures[op.signature].kind in _PARTS else ())
    return parts


def _inputs(plan: Plan, argument: int, parts: set[int], *, again: bool) -> tuple[str, ...]:
    """The arguments of blocks that may be the argument: those with the types of its parts."""
    program, memory = plan.analysis.program, plan.analysis.program.memory
    assert memory is not None
    assert memory.policy is not None
    types = {str(program.values[value].type) for value in parts}
    found: dict[str, None] = {}
    for block in memory.blocks:
        decision = memory.policy.of(block.name)
        for residual in block.residuals:
            stays = residual.name in decision.gathered
            if residual.kind != "input" or decision.keeps_all or stays == again:
                continue
            if types & {*residual.types}:
                found[residual.name] = None
    # Blocks that nobody marked have the paths of arguments as names, with * for numbers of layers.
    path = program.arguments[argument]
    mine = [name for name in found if fnmatch.fnmatchcase(path, name.replace("[", "[[]"))]
    return tuple(mine or found)


__all__ = ["gathered_copies"]
