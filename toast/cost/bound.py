"""Lower bounds of prices: of every plan, and of what each value costs by the ops around it.

The bound of a plan's step is a **relaxation**: every op class chooses for itself, whatever its
neighbours do, and nothing is ever moved between devices.  What remains of a price is then a sum
over op classes (products as padded to tiles, what is written and read, exponentials), and each
takes the choice that is least.  Collectives cost nothing or more in every mode of overlap, since
no more of them is hidden than there is; so no legal state is cheaper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from toast.cost.layout import Layout, axes_of, held_by
from toast.cost.model import CostModel
from toast.space import States

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: States that are looked at together.
_BATCH = 1024


def class_seconds(model: CostModel) -> list[Floats]:
    """``[classes][choices]`` the least that each choice of an op class costs without collectives.

    Choices are those of ``Space.choices``.
    """
    t, choices = model.tables, model.space.choices
    found = [np.zeros(len(rows)) for rows in choices]
    most = max(map(len, choices), default=0)
    for start in range(0, most, _BATCH):
        stop = min(start + _BATCH, most)
        number = np.arange(start, stop)
        states = np.stack(
            [rows[np.minimum(number, len(rows) - 1)] for rows in choices], axis=1
        )  # [stop - start, K, A]
        layout = model.layout(states)
        seconds = np.zeros(states.shape[:2])
        if len(t.tensor_class):
            seconds[:, np.unique(t.tensor_class)] += model.product_seconds(layout.held)
        rows = np.arange(len(states))[:, None]
        np.add.at(seconds, (rows, t.slot_class[t.value_slot]), _made(model, layout))
        np.add.at(seconds, (rows, t.slot_class[t.use_slot]), _read(model, layout))
        for k, each in enumerate(found):
            each[start:stop] = seconds[: len(each[start:stop]), k]
    return found


def _made(model: CostModel, layout: Layout) -> Floats:
    """Seconds to write each value and for its exponentials: ``[S, C]``, at least.

    A partial sum is written in as many parts as it could be left scattered in.
    """
    t = model.tables
    own = axes_of(layout.defined >= 0)
    written = t.value_bytes * t.value_written * t.value_count / model.hardware.memory_bytes_per_s
    vector = t.value_transcendentals / model.hardware.transcendentals_per_s
    parts = model.collectives.devices
    return np.asarray(written / parts[own | layout.partial] + vector / parts[own])


def _read(model: CostModel, layout: Layout) -> Floats:
    """Seconds to read each use: ``[S, U]``, at least (resharded ones may be rounded before)."""
    t = model.tables
    size = t.value_bytes[t.use_value] * np.minimum(t.use_share, 1.0) * t.use_reads
    parts = model.collectives.devices[axes_of(layout.used >= 0)]
    return np.asarray(size / parts / model.hardware.memory_bytes_per_s)


def least_seconds(model: CostModel) -> float:
    """Seconds of the roofline: every op class at its own best choice."""
    return float(sum(each.min() for each in class_seconds(model)))


def least_argument_bytes(model: CostModel) -> float:
    """Bytes of the arguments on a device where each is sharded over as many as can be."""
    t = model.tables
    most = np.array([
        math.prod(
            size for a, size in enumerate(model.space.mesh.sizes) if (rows[:, a] >= 0).any()
        )
        for rows in model.space.choices
    ])  # fmt: skip
    owner = t.slot_class[t.value_slot[t.argument_columns]]
    return float((t.value_bytes[t.argument_columns] / most[owner]).sum())


class Term(NamedTuple):
    """What one value, or one op, costs at least, by the choices of some op classes."""

    scope: tuple[int, ...]
    #: One axis per class of the scope, as long as it has choices.
    seconds: Floats
    #: ... and one more, over moments: bytes that are alive.
    memory: Floats


def terms(model: CostModel, room: float, *, most: int) -> list[Term]:
    """Terms whose sum is no more than a price: seconds, and live bytes at every moment.

    They hold for states whose step takes at most ``room`` seconds: products hide no more than
    that.  On one axis and with ``overlap="none"`` the sum of seconds is the price, but for sums
    that wait for a common one.  Raises ``ValueError`` where a value's neighbours have more than
    ``most`` joint choices.
    """
    t, choices = model.tables, model.space.choices
    live = t.growth.toarray().cumsum(axis=0)  # [moments, columns]
    live = np.unique(np.vstack([live, np.zeros((1, live.shape[1]))]), axis=0)
    products = _products(model)
    found = [
        Term((k,), seconds, np.zeros((len(seconds), len(live)))) for k, seconds in products.items()
    ]
    room = min(room, sum(float(seconds.max()) for seconds in products.values()))
    owner = _column_owners(model)
    for c in range(len(t.value_slot)):
        uses = np.flatnonzero(t.use_value == c)
        scope = tuple(sorted({int(t.slot_class[s]) for s in (t.value_slot[c], *t.use_slot[uses])}))
        shape = tuple(len(choices[k]) for k in scope)
        if math.prod(shape) > most:
            raise ValueError(f"{math.prod(shape)} joint choices of {len(scope)} op classes")
        columns = np.flatnonzero(owner == c)
        held = live[:, columns] + 0.0
        held[:, columns == c] += (t.argument_columns == c).sum()
        seconds, memory = [], []
        for states in _joint_states(model, scope):
            spent, sizes = _value_price(model, states, c, uses, room)
            seconds.append(spent)
            memory.append(sizes[:, columns] @ held.T)
        found.append(
            Term(
                scope,
                np.concatenate(seconds).reshape(shape),
                np.concatenate(memory).reshape(*shape, len(live)),
            )
        )
    return found


def _products(model: CostModel) -> dict[int, Floats]:
    """Seconds of each class of products under each of its choices."""
    t, choices = model.tables, model.space.choices
    found = {}
    for column, k in enumerate(np.unique(t.tensor_class).tolist()):
        states = np.repeat(model.space.unsharded[None], len(choices[k]), axis=0)
        states[:, k] = choices[k]
        found[k] = model.product_seconds(held_by(model.tables, states))[:, column]
    return found


def _joint_states(model: CostModel, scope: tuple[int, ...]) -> Iterator[States]:
    """States with every combination of choices of ``scope``, in order, in batches."""
    choices = [model.space.choices[k] for k in scope]
    every = itertools.product(*(range(len(rows)) for rows in choices))
    while part := list(itertools.islice(every, _BATCH)):
        number = np.array(part, dtype=np.int64)
        states = np.repeat(model.space.unsharded[None], len(number), axis=0)
        for column, k in enumerate(scope):
            states[:, k] = choices[column][number[:, column]]
        yield states


def _column_owners(model: CostModel) -> Ints:
    """The value class of each column of the timeline; -1 for what depends on other values too."""
    t = model.tables
    every = np.arange(len(t.value_slot))
    pairs = [t.use_value[later] for later, _ in t.pairs]
    return np.concatenate([every, t.use_value, *pairs, every, every, np.full(len(every), -1)])


def _value_price(
    model: CostModel, states: States, c: int, uses: Ints, room: float
) -> tuple[Floats, Floats]:
    """Seconds of value class ``c``, and bytes of all columns: ``[S]`` and ``[S, columns]``."""
    t, layout = model.tables, model.layout(states)
    settled, used = model.sizes(layout)
    rate = model.hardware.memory_bytes_per_s
    seconds = settled[:, c] * t.value_written[c] * t.value_count[c] / rate
    seconds += (used[:, uses] * t.use_reads[uses]).sum(axis=1) / rate
    vector = t.value_transcendentals[c] / model.hardware.transcendentals_per_s
    seconds += vector / model.collectives.devices[axes_of(layout.defined[:, c] >= 0)]
    # Sums may wait for a common one: then the others cost nothing.
    spared = min(1.0, float(t.merge_share[t.merge_class == c].sum()))
    for timed in model.timed(layout, settled, used):
        move = timed.move
        if move.places:
            continue  # which axes are major depends on the whole state
        columns = uses if move.of_uses else np.array([c])
        alone = 1 - np.broadcast_to(move.spared, timed.times.shape)
        if not move.of_uses:
            alone = np.full_like(alone, 1.0 if move.edges else 1 - spared)
        paid = timed.times * alone * (timed.once - model.most_hidden(timed, room))
        seconds += paid[:, columns].sum(axis=1)
    return seconds, model.columns(layout, *model.in_memory(layout, settled, used))
