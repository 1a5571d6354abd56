"""Where the time of a step goes, op by op: a price taken apart."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from toast.cost.model import CostModel
from toast.hardware import COLLECTIVES
from toast.space import States

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class OpCollective:
    """Collectives of one kind around one op, per step and device."""

    op: int
    #: The operand that is moved before the op; -1 for what is made of the op's result.
    operand: int
    kind: str
    axes: tuple[str, ...]
    #: How often, loops counted.
    count: int
    seconds: float
    #: Bytes that a device holds after one.
    bytes: float


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a step by op; their sums are those of the price, before anything is hidden.

    A collective that several uses share stands once, at the first of those that run most often; of
    sums that XLA takes into one, one has it.
    """

    product_seconds: Floats  # [ops]
    memory_seconds: Floats  # [ops]
    collectives: tuple[OpCollective, ...]

    def __repr__(self) -> str:
        return f"<Breakdown of {len(self.product_seconds):,} ops>"


def break_down(model: CostModel, state: States) -> Breakdown:
    """Seconds by op under one state: ``[classes, axes]``.

    Prices are per class of ops, values and uses; within one, seconds are spread evenly over its
    members, as often as each runs.  Collectives are not cut: each is one member's.
    """
    t, layout = model.tables, model.layout(state[None])
    program, names = model.space.analysis.program, model.space.analysis.names
    repeats = np.array(program.repeats, dtype=np.float64)
    value_op = np.array([value.op for value in program.values], dtype=np.int64)
    of_op = _Spread(model.space.classes.of_op, repeats, np.arange(len(repeats)))
    of_value = _Spread(t.value_class, repeats[value_op], value_op)
    of_use = _Spread(t.use_class, repeats[names.use_op], names.use_op)

    products = np.zeros(len(t.count))
    if len(t.tensor_class):
        products[np.unique(t.tensor_class)] = model.product_seconds(layout.held)[0]
    settled, used = model.sizes(layout)
    rate = model.hardware.memory_bytes_per_s
    shards = model.collectives.devices[_held(layout.defined[0])]
    made = settled[0] * t.value_written * t.value_count / rate
    made += t.value_transcendentals / model.hardware.transcendentals_per_s / shards
    read = used[0] * t.use_reads / rate
    found: list[OpCollective] = []
    made_at = _Members(t.value_class, np.arange(len(value_op)), repeats[value_op])
    moved_at = _Members(t.use_class, names.use_value, repeats[names.use_op])
    for timed in model.timed(layout, settled, used):
        members, op = (moved_at, names.use_op) if timed.move.of_uses else (made_at, value_op)
        times = (timed.times * (1 - timed.move.spared))[0]
        kind = COLLECTIVES[timed.kind]
        for x in np.flatnonzero(times > 0).tolist():
            held = int(timed.move.axes[0, x])
            axes = tuple(n for a, n in enumerate(model.space.mesh.names) if held >> a & 1)
            once, size = float(timed.once[0, x]), float(timed.result[0, x])
            for member, count in members.counts(x, float(times[x])):
                operand = int(names.use_index[member]) if timed.move.of_uses else -1
                found.append(
                    OpCollective(int(op[member]), operand, kind, axes, count, count * once, size)
                )
    return Breakdown(
        product_seconds=of_op.over_ops(products, len(repeats)),
        memory_seconds=of_value.over_ops(made, len(repeats)) + of_use.over_ops(read, len(repeats)),
        collectives=tuple(sorted(found, key=lambda c: (c.op, c.operand, c.kind))),
    )


def _held(dims: npt.NDArray[np.int8]) -> Ints:
    """The set of axes, as a bit mask, that shard each of ``[C, A]``."""
    return np.asarray(((dims >= 0) << np.arange(dims.shape[1])).sum(axis=1))


class _Spread:
    """What classes cost, over their members."""

    def __init__(self, of_member: Ints, weight: Floats, op: Ints) -> None:
        self.of_member, self.op = of_member, op
        total = np.bincount(of_member, weights=weight)
        #: ``[members]`` each one's share of its class.
        self.share: Floats = weight / np.maximum(total, 1e-300)[of_member]

    def over_ops(self, of_class: Floats, ops: int) -> Floats:
        """``[ops]`` what the members of each op get."""
        each = of_class[self.of_member] * self.share if len(self.of_member) else np.zeros(0)
        return np.asarray(np.bincount(self.op, weights=each, minlength=ops), dtype=np.float64)


class _Members:
    """The members of classes that move a value: of uses of one value, the first that runs most."""

    def __init__(self, of_member: Ints, value: Ints, repeats: Floats) -> None:
        self._repeats = repeats
        order = np.lexsort((np.arange(len(value)), -repeats, value, of_member))
        pair = np.stack([of_member, value])[:, order]
        kept = order[np.any(np.diff(pair, prepend=-1), axis=0)]
        #: By class, in program order.
        self._order: Ints = kept[np.lexsort((kept, of_member[kept]))]
        self._of_member = of_member[self._order]

    def counts(self, x: int, times: float) -> list[tuple[int, int]]:
        """The members of class ``x`` with their parts of what happens so many times."""
        first, last = np.searchsorted(self._of_member, (x, x + 1))
        chosen = self._order[first:last]
        repeats = self._repeats[chosen]  # all alike
        if not len(chosen) or not (total := repeats.sum()):
            return []
        up_to = np.round(np.cumsum(repeats) * (times / total) / repeats[0]) * repeats[0]
        counts = np.diff(up_to, prepend=0.0).astype(np.int64)
        return [(m, n) for m, n in zip(chosen.tolist(), counts.tolist(), strict=True) if n]
