"""The time of a step, op by op."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from toast.cost.entities import OP_SCOPES, Entity, Floats, Ints
from toast.cost.model import CostModel
from toast.cost.reshard_runs import reshard_runs
from toast.cost.terms import StepPart, Traffic
from toast.hardware import COLLECTIVES
from toast.space import States


@dataclasses.dataclass(frozen=True)
class OpCollective:
    """Collectives of one kind around one op, per step and device."""

    #: The number of the op.
    op: int
    #: The operand that is moved before the op; -1 for the op's result.
    operand: int
    #: The name in StableHLO, such as ``all_gather``.
    kind: str
    #: The mesh axes that they run along.
    axes: tuple[str, ...]
    #: Number per step, including the repetitions of loops.
    count: int
    #: Seconds of all of them.
    seconds: float
    #: Bytes of one result on a device.
    bytes: float
    #: The part of the seconds that products hide.
    hidden_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a step by op; the sums are those of the price before overlap.

    A collective that several uses share is listed once, at the first of the uses that run most
    often; so is a sum that XLA merges with others.
    """

    product_seconds: Floats  #: [ops] seconds of matrix products
    memory_seconds: Floats  #: [ops] seconds of memory-bound kernels
    #: Every collective, with the op or the use that it is for.
    collectives: tuple[OpCollective, ...]
    #: The same seconds by the name of the term: ``[ops]`` each.
    term_seconds: Mapping[str, Floats]
    #: Seconds of transfers to the host and back, which run beside everything else: ``[ops]``.
    host_seconds: Floats

    def __repr__(self) -> str:
        return f"<Breakdown of {len(self.product_seconds):,} ops>"


def break_down(model: CostModel, state: States) -> Breakdown:
    """Seconds by op under one state (``[classes, axes]``).

    Prices are per class of ops, values and uses; the members of a class share its seconds in
    proportion to how often each runs.  A collective is not divided: it belongs to one member.
    """
    t, layout = model.tables, model.layout(state[None])
    program, names = model.space.analysis.program, model.space.analysis.names
    repeats = np.array(program.repeats, dtype=np.float64)
    value_op = np.array([value.op for value in program.values], dtype=np.int64)
    moved = reshard_runs(
        program, names.use_op, names.use_value, partitioned=model.partitioned
    ).astype(np.float64)
    every_op, every_value = np.arange(len(repeats)), np.arange(len(value_op))
    of_op = _Spread(model.space.classes.of_op, repeats, every_op)
    spreads = {
        Entity.VALUE_CLASS: _Spread(t.value_class, repeats[value_op], value_op),
        Entity.USE_CLASS: _Spread(t.use_class, moved, names.use_op),
    }
    parts, by_term = np.zeros((len(StepPart), len(repeats))), {}
    for term, seconds in model.work(layout):
        spread, amount = spreads.get(term.scope, of_op), seconds[0]
        if term.scope in OP_SCOPES:
            amount = np.bincount(t.op_class(term.scope), amount, minlength=len(t.ops))
        by_term[term.name] = spread.over_ops(amount, len(repeats))
        parts[term.part] += by_term[term.name]
    movers = {
        Entity.VALUE_CLASS: (_Members(t.value_class, every_value, repeats[value_op]), value_op),
        Entity.USE_CLASS: (_Members(t.use_class, names.use_value, moved), names.use_op),
    }  # fmt: skip
    collectives: list[OpCollective] = []
    moves = list(model.traffic(layout))
    products = float(parts[StepPart.PRODUCTS].sum())
    for traffic, hidden in zip(moves, _hidden_shares(model, moves, products), strict=True):
        members, op = movers[traffic.term.scope]
        for x in np.flatnonzero(traffic.count[0]).tolist():
            axes, once = model.axis_names(traffic.axes[0, x]), float(traffic.once[0, x])
            for member, count in members.counts(x, float(traffic.count[0, x])):
                of_use = traffic.term.scope is Entity.USE_CLASS
                collectives.append(
                    OpCollective(
                        op=int(op[member]),
                        operand=int(names.use_index[member]) if of_use else -1,
                        kind=COLLECTIVES[traffic.kind],
                        axes=axes,
                        count=count,
                        seconds=count * once,
                        bytes=float(traffic.result[0, x]),
                        hidden_seconds=count * once * float(hidden[x]),
                    )
                )
    return Breakdown(
        product_seconds=parts[StepPart.PRODUCTS],
        memory_seconds=parts[StepPart.MEMORY],
        collectives=tuple(sorted(collectives, key=lambda c: (c.op, c.operand, c.kind))),
        term_seconds=by_term,
        host_seconds=parts[StepPart.HOST],
    )


def _hidden_shares(model: CostModel, moves: Sequence[Traffic], products: float) -> list[Floats]:
    """``[X]`` for each of ``moves``: the share of its collectives that products hide.

    ``products`` are the seconds of all products.  The shares add up to the hidden seconds of the
    price: those of one window are hidden alike.
    """
    shares: list[Floats] = [np.zeros(traffic.seconds.shape[1]) for traffic in moves]
    total = sum(float(traffic.seconds.sum()) for traffic in moves)
    if model.overlap == "full":
        return [share + min(1.0, products / max(total, 1e-300)) for share in shares]
    windows = model.tables.windows
    asked = np.zeros((1, len(windows.room)))
    behind = [k for k, traffic in enumerate(moves) if model.in_background(traffic)]
    for k in behind:
        scope, beside = moves[k].term.scope, moves[k].term.beside_op
        early = moves[k].seconds * model.early_share(moves[k])
        asked += windows.asked(scope, early, beside_op=beside)
    of_window = np.zeros(len(windows.room))
    for window, taken in windows.taken(asked, np.array([products])):
        of_window[window] = float(taken[0, 0]) / float(asked[0, window])
    covered = float(of_window @ asked[0])
    of_window *= model.hardware.overlap_efficiency * min(1.0, products / max(covered, 1e-300))
    for k in behind:
        of_class = windows.shares(moves[k].term.scope, beside_op=moves[k].term.beside_op)
        shares[k] = np.asarray(of_class.T @ of_window) * model.early_share(moves[k])
    return shares


class _Spread:
    """Divides the costs of classes among their members."""

    def __init__(self, of_member: Ints, weight: Floats, op: Ints) -> None:
        self.of_member, self.op = of_member, op
        total = np.bincount(of_member, weights=weight)
        #: ``[members]`` share of each member in its class.
        self.share: Floats = weight / np.maximum(total, 1e-300)[of_member]

    def over_ops(self, of_class: Floats, ops: int) -> Floats:
        """``[ops]`` the costs of each op's members."""
        each = of_class[self.of_member] * self.share if len(self.of_member) else np.zeros(0)
        return np.asarray(np.bincount(self.op, weights=each, minlength=ops), dtype=np.float64)


class _Members:
    """The members of classes that move a value: of uses of one value, the first that runs most."""

    def __init__(self, of_member: Ints, value: Ints, repeats: Floats) -> None:
        self._repeats = repeats
        order = np.lexsort((np.arange(len(value)), -repeats, value, of_member))
        pair = np.stack([of_member, value])[:, order]
        first = order[np.any(np.diff(pair, prepend=-1), axis=0)]
        #: By class, in program order.
        self._order: Ints = first[np.lexsort((first, of_member[first]))]
        self._of_member = of_member[self._order]

    def counts(self, x: int, times: float) -> list[tuple[int, int]]:
        """The members of class ``x``, with their parts of ``times`` collectives."""
        first, last = np.searchsorted(self._of_member, (x, x + 1))
        chosen = self._order[first:last]
        repeats = self._repeats[chosen]  # all equal
        if not len(chosen) or not (total := repeats.sum()):
            return []
        up_to = np.round(np.cumsum(repeats) * (times / total) / repeats[0]) * repeats[0]
        counts = np.diff(up_to, prepend=0.0).astype(np.int64)
        return [(m, n) for m, n in zip(chosen.tolist(), counts.tolist(), strict=True) if n]
