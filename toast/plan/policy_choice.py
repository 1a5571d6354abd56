"""The memory policy that recomputes least within a limit: an integer program."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import optimize, sparse

from toast.plan.residual_costs import Recomputation, ResidualCost
from toast.program import BlockPolicy, MemoryPolicy

#: Seconds that the solver may take, and the share by which its answer may be longer than the best.
_SECONDS, _GAP = 30.0, 1e-3


@dataclasses.dataclass(frozen=True)
class PolicyChoice:
    """A policy, and what it costs beside that which recomputes everything."""

    policy: MemoryPolicy
    #: Seconds of a step for recomputation, and to keep and offload residuals.
    seconds: float
    #: Bytes on a device that the residuals take.
    bytes: float
    #: Seconds of a step for recomputation alone.
    recomputed_seconds: float


def best_choice(costs: Recomputation, room: float) -> PolicyChoice | None:
    """The policy with the least recomputation whose residuals take at most ``room`` bytes.

    ``room`` is beside what is in memory if everything is recomputed; it is negative if that is too
    much, and only offloaded arguments of blocks help.  ``None`` if nothing does.
    """
    residuals, nodes = len(costs.residuals), len(costs.seconds)
    if not residuals:
        return PolicyChoice(_policy(costs, [], []), 0.0, 0.0, 0.0)
    # The unknowns: whether each residual is kept, or offloaded, and whether each node runs again.
    move = np.array([r.offload_seconds for r in costs.residuals])
    may_move = np.isfinite(move)
    kept = np.array([0.0 if r.is_input else r.bytes for r in costs.residuals])
    moved = np.array([-r.bytes if r.is_input else 0.0 for r in costs.residuals])
    keep = np.array([r.keep_seconds for r in costs.residuals])
    price = np.concatenate([keep, np.where(may_move, move, 0.0), costs.seconds])
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    lower: list[float] = []

    def row(least_sum: float, of: dict[int, float]) -> None:
        rows.extend([len(lower)] * len(of))
        columns.extend(of.keys())
        entries.extend(of.values())
        lower.append(least_sum)

    for user, node, residual in sorted({*costs.needs}):
        terms = {2 * residuals + node: 1.0}
        if residual >= 0:
            terms |= {residual: 1.0, residuals + residual: 1.0}
        if user >= 0:
            terms[2 * residuals + user] = -1.0
        row(1.0 if user < 0 else 0.0, terms)
    for number in range(residuals):  # kept or offloaded, not both
        row(-1.0, {number: -1.0, residuals + number: -1.0})
    row(-room, {n: -amount for n, amount in enumerate([*kept, *moved]) if amount})
    matrix = sparse.csr_array((entries, (rows, columns)), shape=(len(lower), len(price)))
    result = optimize.milp(
        price,
        constraints=optimize.LinearConstraint(matrix, lb=np.array(lower)),
        bounds=optimize.Bounds(0.0, np.concatenate([np.ones(residuals), may_move, np.ones(nodes)])),
        integrality=np.repeat([1, 1, 0], [residuals, residuals, nodes]),
        options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )
    if result.x is None:
        return None
    kept_now, moved_now = (result.x[: 2 * residuals] > 0.5).reshape(2, residuals).tolist()
    return priced(costs, _policy(costs, kept_now, moved_now))


def priced(costs: Recomputation, policy: MemoryPolicy) -> PolicyChoice:
    """What a policy with the names of residuals costs; infinite if it offloads what cannot be."""
    kept: list[ResidualCost] = []
    moved: list[ResidualCost] = []
    present: list[int] = []
    for number, residual in enumerate(costs.residuals):
        of_block = policy.of(residual.block)
        if residual.name in of_block.offload:
            moved.append(residual)
        elif residual.name in of_block.keep and not residual.is_input:
            kept.append(residual)
        else:
            continue
        present.append(number)
    again = costs.recomputed_seconds(present)
    return PolicyChoice(
        policy,
        again
        + math.fsum(residual.keep_seconds for residual in kept)
        + math.fsum(residual.offload_seconds for residual in moved),
        math.fsum(residual.bytes for residual in kept)
        - math.fsum(residual.bytes for residual in moved if residual.is_input),
        again,
    )


def _policy(costs: Recomputation, kept: list[bool], moved: list[bool]) -> MemoryPolicy:
    """The policy that keeps and offloads these residuals, and recomputes the others."""
    names: dict[str, dict[str, list[str]]] = {block: {} for block in costs.blocks}
    for residual, keep, move in zip(costs.residuals, kept, moved, strict=True):
        choice = "offload" if move else "keep" if keep or residual.is_input else "recompute"
        names[residual.block].setdefault(choice, []).append(residual.name)
    return MemoryPolicy(
        tuple(
            BlockPolicy(block, **{choice: tuple(some) for choice, some in choices.items()})
            for block, choices in names.items()
        )
    )


__all__ = ["PolicyChoice", "best_choice", "priced"]
