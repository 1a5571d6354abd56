"""Lower bounds of the cost of each value and op, by joint choices of the op classes around it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from toast.cost.cut import Neighbourhoods
from toast.cost.entities import Entity, Floats
from toast.cost.layout import Layout, held_by
from toast.cost.model import CostModel
from toast.cost.terms import StepPart
from toast.space import States

#: States priced in one batch.
_BATCH = 1024


class JointBound(NamedTuple):
    """The least cost of one value or one op, by the choices of some op classes."""

    scope: tuple[int, ...]
    #: One axis per class of the scope, as long as it has choices.
    seconds: Floats
    #: The same axes, and one over moments: live bytes.
    memory: Floats


def joint_bounds(model: CostModel, room: float, *, most: int) -> list[JointBound]:
    """Bounds whose sum is at most the price: seconds, and live bytes at every moment.

    What is in fast memory counts among the live bytes: :meth:`toast.cost.machine.Machine.in_memory`
    of their sum is at most the memory of the price.

    They hold for states whose step takes at most ``room`` seconds, which limits what products hide.
    On one axis and with ``overlap="none"``, the sum of seconds is the price, except for sums that
    wait for a common one.  Raises ``ValueError`` if a value's neighbours have more than ``most``
    joint choices.
    """
    t, choices = model.tables, model.space.choices
    live = t.growth.toarray().cumsum(axis=0)  # [moments, columns]
    live = np.unique(np.vstack([live, np.zeros((1, live.shape[1]))]), axis=0)
    bounds, longest = [], 0.0
    for k, rows in enumerate(choices):
        states = np.repeat(model.space.unsharded[None], len(rows), axis=0)
        states[:, k] = rows
        parts = _of_op(model, states, k)
        longest += float(parts[StepPart.PRODUCTS].max())
        if parts.any():
            bounds.append(JointBound((k,), parts.sum(axis=0), np.zeros((len(rows), len(live)))))
    around, room = Neighbourhoods(t), min(room, longest)
    of_value, of_use = t.op_class(Entity.VALUE_CLASS), t.op_class(Entity.USE_CLASS)
    for c in range(len(t.values)):
        scope = tuple(sorted({int(of_value[c]), *of_use[t.uses.value == c].tolist()}))
        shape = tuple(len(choices[k]) for k in scope)
        if math.prod(shape) > most:
            raise ValueError(f"{math.prod(shape)} joint choices of {len(scope)} op classes")
        seconds, memory = zip(*(
            _of_value(model, around, states, c, room, live)
            for states in _joint_states(model, scope)
        ), strict=True)  # fmt: skip
        bounds.append(
            JointBound(
                scope,
                np.concatenate(seconds).reshape(shape),
                np.concatenate(memory).reshape(*shape, len(live)),
            )
        )
    return bounds


def _of_op(model: CostModel, states: States, k: int) -> Floats:
    """``[parts, S]`` seconds that depend on op class ``k`` alone."""
    parts = np.zeros((len(StepPart), len(states)))
    for term, seconds in model.op_work(held_by(model.tables, states), least=True):
        here = model.tables.op_class(term.scope) == k
        parts[term.part] += seconds[:, here].sum(axis=1)
    return parts


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


def _of_value(
    model: CostModel, around: Neighbourhoods, states: States, c: int, room: float, live: Floats
) -> tuple[Floats, Floats]:
    """The least seconds of value class ``c``, and its bytes at moments: ``[S]``, ``[S, moments]``.

    Other classes of the neighbourhood than its uses take the most favourable values.
    """
    piece = around.cut(np.full(len(states), c))
    held = held_by(model.tables, states[piece.ops.owner, piece.ops.row][None])
    layout = Layout(piece.tables, model.machine, held)
    seconds, memory = np.zeros(len(states)), np.zeros((len(states), len(live)))
    for term, spent in model.work(layout, least=True):
        if term.scope in piece.members and term.part is not StepPart.HOST:
            seconds += piece.total(term.scope, spent)
    # The order of the axes depends on the whole state.
    for traffic in model.traffic(layout, ordered=False):
        windows = model.most_hidden(traffic, room)
        seconds += piece.total(traffic.term.scope, traffic.least_count * (traffic.once - windows))
    for term in model.terms:
        if term.resident:
            memory += piece.total(term.scope, term.least_bytes(layout))[:, None]
    for term in model.buffers:
        size, members = piece.own(term.scope, term.least_bytes(layout)), piece.members[term.scope]
        column = members.row + model.tables.columns[term.name].start
        np.add.at(memory, members.owner, size[:, None] * live[:, column].T)
    return seconds, memory
