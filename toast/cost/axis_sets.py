"""Sets of mesh axes as numbers, and the kinds of collectives between their devices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from toast.cost.entities import Bools, Ints

#: Sets of mesh axes: axis ``a`` is bit ``a``, as in :meth:`toast.hardware.Collectives.seconds`.
Axes = npt.NDArray[np.uint8]

#: Kinds of collectives, as :data:`toast.hardware.COLLECTIVES` numbers them.
GATHER, REDUCE, SCATTER, ALL_TO_ALL, PERMUTE = range(5)


def axes_of(condition: Bools) -> Axes:
    """``[...]`` the sets of axes for which ``condition`` (``[..., A]``) holds."""
    axes = condition[..., 0].astype(np.uint8)
    for axis in range(1, condition.shape[-1]):
        axes |= condition[..., axis].astype(np.uint8) << np.uint8(axis)
    return axes


def axis_numbers(axes: int) -> list[int]:
    """The axes of a set."""
    return [axis for axis in range(axes.bit_length()) if axes >> axis & 1]


#: ``[256]`` the axis of each set of one axis; -1 for other sets.
_ALONE: Ints = np.full(256, -1)
_ALONE[1 << np.arange(8)] = np.arange(8)


def single_axis(axes: Axes) -> Ints:
    """``[...]`` the axis of each set of one axis; -1 for other sets."""
    return np.asarray(_ALONE[axes])
