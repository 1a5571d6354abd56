"""A lower bound of the step time of every plan: the roofline.

It is a **relaxation**: every op class chooses on its own, whatever its neighbours do, and no data
moves between devices.  The price is then a sum of local terms over op classes, and each class takes
its cheapest choice.  All other terms cost nothing or more; so do collectives in every mode of
overlap, which hides at most their own time.  No legal state is therefore cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from toast.cost.entities import Entity, Floats
from toast.cost.layout import LocalLayout, held_by
from toast.cost.machine import Machine
from toast.cost.tables import Tables
from toast.cost.terms import LocalTerm, Term
from toast.space import States

#: States priced in one batch.
_BATCH = 1024


def class_seconds(
    tables: Tables, machine: Machine, terms: Iterable[Term], choices: Sequence[States]
) -> list[Floats]:
    """``[classes][choices]`` the least seconds of each choice of an op class, without collectives.

    ``choices`` are those of ``Space.choices``.
    """
    local = [term for term in terms if isinstance(term, LocalTerm)]
    least = [np.zeros(len(rows)) for rows in choices]
    most = max(map(len, choices), default=0)
    for start in range(0, most, _BATCH):
        number = np.arange(start, min(start + _BATCH, most))
        states = np.stack([rows[np.minimum(number, len(rows) - 1)] for rows in choices], axis=1)
        layout = LocalLayout(tables, machine, held_by(tables, states))
        seconds = np.zeros(states.shape[:2])
        for term in local:
            place = np.arange(len(states))[:, None], tables.op_class(term.scope)
            np.add.at(seconds, place, term.least_seconds(layout))
        for k, each in enumerate(least):
            part = each[start : start + _BATCH]
            part[:] = seconds[: len(part), k]
    return least


def least_argument_bytes(tables: Tables, machine: Machine, choices: Sequence[States]) -> float:
    """Bytes of the arguments on a device if each is sharded over as many devices as possible."""
    sizes = machine.axis_sizes.tolist()
    most = np.array([
        math.prod(size for a, size in enumerate(sizes) if (rows[:, a] >= 0).any())
        for rows in choices
    ])  # fmt: skip
    parts = most[tables.op_class(Entity.VALUE_CLASS)]
    return float((tables.values.bytes * tables.values.arguments / parts).sum())
