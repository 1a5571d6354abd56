"""Dimensions that the axes of the mesh do not divide, and what padding them would gain.

A dimension of 50,257 elements, say, can only be sharded after it is padded to 50,304.  To estimate
the gain, a search runs on the same program as if such dimensions had the larger size: only the
number of shards changes, the prices are those of the program as it is.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from toast.analysis import Analysis
from toast.cost import CostModel
from toast.hardware import Mesh
from toast.plan.plan import Plan
from toast.program import PaddedDimension
from toast.space import States
from toast.uneven import PaddedProgram, elements_of_names, padded_sizes, with_moving
from toast.units import listed, size_text, time_text

Ints = npt.NDArray[np.int64]

#: The largest share of elements that padding adds in notes.
MOST_ADDED = 0.02

#: The least share of the cost that padding must save.
_LEAST_SAVED = 0.05

#: The most dimensions that a note names.
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Padding:
    """Dimensions that could be sharded if they were larger, and a plan that does so."""

    #: A dimension of each color and size, such as ``params['embed']:0``, its elements, and those
    #: after padding.
    dimensions: tuple[tuple[str, int, int], ...]
    #: The step time and the peak on a device, now and with padding.
    seconds: tuple[float, float]
    bytes: tuple[float, float]

    @property
    def small(self) -> bool:
        """Whether it adds at most 2 % to each dimension."""
        return all(to <= (1 + MOST_ADDED) * size for _, size, to in self.dimensions)

    @property
    def text(self) -> str:
        """A note in one line: the dimensions, the new sizes and the prices."""
        named = [f"{name} has {size:,} elements; pad it to {to:,}"
                 for name, size, to in self.dimensions]  # fmt: skip
        return (
            f"the axes do not divide some dimensions: {listed(named, _NAMED)}. A plan could then "
            f"take about {time_text(self.seconds[1])} per step instead of "
            f"{time_text(self.seconds[0])}, with a peak of {size_text(self.bytes[1])} instead of "
            f"{size_text(self.bytes[0])}"
        )


def padded(analysis: Analysis, mesh: Mesh, most_added: float = MOST_ADDED) -> Analysis | None:
    """The analysis as if dimensions that the axes of the mesh do not divide were padded.

    All axes together divide the new size or, if that adds more than a share ``most_added`` of the
    elements, as many devices as possible.  ``None`` if there is no such dimension.
    """
    larger = padded_sizes(analysis, mesh, most_added)
    if (larger == analysis.names.divisor).all():
        return None
    larger = with_moving(analysis, larger)
    return dataclasses.replace(analysis, names=dataclasses.replace(analysis.names, divisor=larger))


def may_gain(model: CostModel, cost: float) -> bool:
    """Whether a plan may cost a twentieth less than ``cost`` (4.5), by the lower bound.

    ``model`` is a model of the analysis from :func:`padded`.
    """
    return model.quick_bound <= (1 - _LEAST_SAVED) * cost * model.initial_seconds


def padding_gain(
    model: CostModel,
    state: States,
    *,
    seconds: tuple[float, float],
    peaks: tuple[float, float],
    costs: tuple[float, float],
) -> Padding | None:
    """What padding gains; ``None`` for less than a twentieth of the cost.

    :param model: a model of the analysis from :func:`padded`, and its best ``state``
        (``[classes, axes]``).
    :param seconds: the step time of the plan of the program as it is, and of ``state``; likewise
        the ``peaks`` in bytes and the ``costs`` (4.5).
    """
    if costs[1] > (1 - _LEAST_SAVED) * costs[0]:
        return None
    analysis, space = model.space.analysis, model.space
    names, sizes = analysis.names, np.array(space.mesh.sizes, dtype=np.int64)
    holders = space.of_ops(state)[names.name_op]
    factor = np.arange(names.count) - names.first_name[names.name_op]
    shards = np.where(holders == factor[:, None], sizes, 1).prod(axis=1)
    elements = elements_of_names(analysis)
    split = np.flatnonzero((elements > 0) & (names.divisor > elements) & (elements % shards > 0))
    pairs = np.stack([analysis.color[split], elements[split]], axis=1)
    kinds = np.unique(pairs, axis=0)
    # The first name of a kind is a dimension of an argument, if there is one.
    larger = names.divisor > elements
    first = [
        np.argmax((analysis.color == c) & (elements == size) & larger) for c, size in kinds.tolist()
    ]
    dimensions = tuple(
        (analysis.name_label(name), int(elements[name]), int(names.divisor[name]))
        for name in sorted(map(int, first))
    )
    return Padding(dimensions, seconds, peaks) if dimensions else None


def needed(plan: Plan, larger: PaddedProgram, original: Analysis) -> tuple[PaddedDimension, ...]:
    """The padded dimensions that ``plan`` shards along axes that do not divide them unpadded.

    ``larger`` is the program of the plan, ``original`` the analysis of it without padding.
    """
    sizes = np.array(plan.model.space.mesh.sizes, dtype=np.int64)
    ops, factors = _places(larger, original)
    held = plan.op_state[ops]  # [names, axes]
    shards = np.where(held == factors[:, None], sizes, 1).prod(axis=1)
    used = (ops >= 0) & (original.names.divisor % shards > 0)
    return tuple(d.record for d in larger.dimensions if (d.names & used).any())


def padding_seconds(plan: Plan, larger: PaddedProgram, original: Analysis) -> float:
    """About how much of the time of a step padding takes, without collectives.

    These are the ops that pad, cut and mask, and the share of elements that padding adds to others.
    The arguments are those of :func:`needed`.
    """
    seconds = plan.breakdown.product_seconds + plan.breakdown.memory_seconds
    share = np.ones(len(seconds))
    share[: len(original.program.arguments)] = 0.0
    ops, _ = _places(larger, original)
    here = ops >= 0
    share[ops[here]] = 0.0
    logs = np.zeros(len(seconds))
    for dimension in larger.dimensions:
        record = dimension.record
        np.add.at(logs, ops[here & dimension.names], np.log(record.elements / record.padded))
    share[ops[here]] = 1.0 - np.exp(logs[ops[here]])
    return float((seconds * share).sum())


def _places(larger: PaddedProgram, original: Analysis) -> tuple[Ints, Ints]:
    """``[names]`` the op of the padded program with each name, or -1, and its factor there."""
    names = original.names
    ops = np.array(larger.ops, dtype=np.int64)[names.name_op]
    return ops, np.arange(names.count) - names.first_name[names.name_op]


def padding_note(plan: Plan, larger: PaddedProgram, original: Analysis, whole: Plan | None) -> str:
    """A note in one line: what is padded, what it costs, and what it saves.

    ``whole`` is the plan of the program without padding, or ``None`` if there is none; the other
    arguments are those of :func:`needed`.
    """
    spent = padding_seconds(plan, larger, original)
    shown = listed([str(d.record) for d in larger.dimensions], _NAMED)
    text = (
        f"padded, as the axes do not divide them: {shown}. Padding takes about {time_text(spent)} "
        f"of a step of {time_text(plan.after.step_seconds)}"
    )
    if whole is None:
        return f"{text}; without it, no plan satisfies the pins and annotations"
    return (
        f"{text}; without it, a step takes {time_text(whole.after.step_seconds)}, with a peak of "
        f"{size_text(whole.after.peak_bytes)} instead of {size_text(plan.after.peak_bytes)}"
    )
