"""The memory policy of one state with the shortest step within a limit: an integer program."""

from __future__ import annotations

import numpy as np
from scipy import optimize, sparse

from toast.cost import Choices, PolicyCosts, Recomputation
from toast.cost.entities import Floats

#: Seconds that the solver may take, and the share by which its answer may be longer than the best.
_SECONDS, _GAP = 10.0, 1e-3

#: A moved residual counts as this share of its seconds, even if its transfers are hidden.
_HIDDEN = 1e-3


def best_choice(costs: PolicyCosts, graph: Recomputation, limit: float) -> Choices | None:
    """The best policy within ``limit`` bytes; ``None`` if nothing is within the limit."""
    user, node, residual = graph.user, graph.node, graph.residual
    many, nodes = len(costs.keep_seconds), len(costs.node_seconds)
    may_move = np.isfinite(costs.move_seconds)
    move = np.where(may_move, costs.move_seconds, 0.0)
    may_share = costs.share_seconds > 0
    may_run = np.isfinite(costs.node_seconds)
    node_seconds = np.where(may_run, costs.node_seconds, 0.0)
    # Unknowns: whether each residual is kept, moved, or has its copies used again; whether each
    # node runs; and the seconds in which the device waits for the host.
    first = 3 * many
    width = first + nodes + 1
    price = np.concatenate([
        costs.keep_seconds, costs.keep_seconds + _HIDDEN * move, -costs.share_seconds,
        node_seconds, [1.0],
    ])  # fmt: skip
    rows: list[sparse.csr_array] = []
    lower: list[Floats] = []

    def add(left: sparse.csr_array | Floats, least: Floats) -> None:
        rows.append(sparse.csr_array(left))
        lower.append(np.asarray(least, dtype=np.float64))

    edges, number = np.arange(len(user)), np.arange(many)
    some, inner = residual >= 0, user >= 0
    rows_of = [edges, edges[some], edges[some], edges[inner]]
    column = [first + node, residual[some], many + residual[some], first + user[inner]]
    entry = [np.ones(len(edges)), np.ones(some.sum()), np.ones(some.sum()), -np.ones(inner.sum())]
    place = np.concatenate(rows_of), np.concatenate(column)
    needs = sparse.csr_array((np.concatenate(entry), place), shape=(len(edges), width))
    add(needs, np.where(inner, 0.0, 1.0))
    add(  # kept or moved, not both
        sparse.csr_array(
            (-np.ones(2 * many), (np.tile(number, 2), np.arange(2 * many))), shape=(many, width)
        ),
        -np.ones(many),
    )
    # Memory at each moment; those are left out at which everything fits.
    most = costs.bytes + (costs.kept_bytes + costs.shared_bytes).sum(axis=0)
    tight = np.flatnonzero(most > limit)
    if len(tight):
        taken = np.concatenate([
            costs.kept_bytes[:, tight], -costs.freed_bytes[:, tight], costs.shared_bytes[:, tight],
            costs.node_bytes[:, tight], np.zeros((1, len(tight))),
        ])  # fmt: skip
        room = limit - costs.bytes[tight] + costs.node_bytes[:, tight].sum(axis=0)
        scale = max(limit, 1.0)
        taken[np.abs(taken) < 1e-6 * scale] = 0.0
        add(-taken.T / scale, -room / scale)
    if may_move.any():  # seconds beyond those of the rest of the step
        beside = np.concatenate([
            costs.keep_seconds, costs.keep_seconds - move, -costs.share_seconds,
            node_seconds, [1.0],
        ])  # fmt: skip
        rest = costs.busy_seconds - node_seconds.sum()
        add(beside[None], np.array([-rest]))
    upper = np.concatenate([np.ones(many), may_move, may_share, may_run, [np.inf]])
    integral = np.repeat([1, 0], [first, nodes + 1])
    result = optimize.milp(
        price,
        constraints=optimize.LinearConstraint(
            sparse.vstack(rows, format="csr"), lb=np.concatenate(lower)
        ),
        bounds=optimize.Bounds(0.0, upper),
        integrality=integral,
        options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )
    if result.x is None:
        return None
    keep, moved, shared = (result.x[:first].reshape(3, many) > 0.5)[:, None]
    return Choices(keep & ~moved, moved, shared, np.zeros_like(keep))


__all__ = ["best_choice"]
