"""Operands of loops of products that XLA copies into another layout."""

from __future__ import annotations

import numpy as np

from toast.cost.axis_sets import axes_of
from toast.cost.entities import Bools, Entity, Floats, Ints
from toast.cost.layout import Layout
from toast.cost.terms.buffers import ROUNDED
from toast.cost.terms.kernels import share_away
from toast.cost.terms.term import Term
from toast.hardware.description import LANE_BYTES


class TurnedOperands(Term):
    """Copies of operands with the contracting dimension in the lanes, for loops of products.

    The gradient of a weight sums over tokens.  The kernel of the whole product transposes an
    operand as it reads it; a loop reads operands many times, so that XLA transposes before.  It
    puts the tokens into the lanes of the operand that they fill better than its last dimension
    does, or the slices of that; if both fill the lanes, into those of the left-hand side.  The copy
    takes the place of the operand in memory, whose last reader the loop mostly is.
    """

    name, scope = "turned operands", Entity.VALUE_CLASS

    def seconds(self, layout: Layout) -> Floats:
        hardware, values = layout.machine.hardware, layout.tables.values
        copied = copied_bytes(layout)
        if not copied.any():
            return np.zeros(copied.shape)
        sides = share_away(hardware, layout.value_memory) + share_away(hardware, copied)
        rounded = _rounded(layout)
        elements = copied / (rounded * np.maximum(values.element, 1.0)) * values.count
        element = hardware.relayout_bytes / hardware.memory_bytes_per_s
        return np.asarray(elements * (sides / 2) * element)

    def least_seconds(self, layout: Layout) -> Floats:
        return np.zeros(layout.value_memory.shape)


def copied_bytes(layout: Layout) -> Floats:
    """``[S, C]`` the bytes of the copies of turned operands; 0 for other values.

    Those that products round are rounded first.
    """
    return np.asarray(layout.value_memory * _padding(layout) * _rounded(layout))


def _rounded(layout: Layout) -> Floats:
    wide = layout.tables.values.element == LANE_BYTES
    return np.where(wide & bool(layout.machine.hardware.product_operands), ROUNDED, 1.0)


def _padding(layout: Layout) -> Floats:
    """``[S, C]`` the bytes of turned operands over those of the operands; 0 for others."""
    operands, values = layout.tables.operands, layout.tables.values
    padding = np.zeros(layout.value_memory.shape)
    lanes = layout.machine.hardware.lanes
    rows = np.flatnonzero((operands.last >= 0) & operands.contracted.any(axis=1))
    value, result = operands.value[rows], operands.result[rows]
    parted: Bools = layout.parted[:, result]
    if lanes <= 1 or not parted.any():
        return padding

    def padded(classes: Ints, dims: Ints) -> Floats:
        """``[S, rows]`` the lanes of a dimension of each class over the elements in them."""
        shards = layout.devices[axes_of(layout.settled[:, classes] == dims[:, None])]
        size = np.maximum(values.sizes[classes, dims] / shards, 1.0)
        return np.asarray(np.ceil(size / lanes) * lanes / size)

    last, other = operands.last[rows], operands.last_of_other[rows]
    # Whichever contracting dimension fills the lanes best is in them.
    tokens = np.full((len(layout.held), len(rows)), np.inf)
    for dim in range(operands.contracted.shape[1]):
        here = operands.contracted[rows, dim]
        tokens[:, here] = np.minimum(tokens, padded(value, np.full(len(rows), dim)))[:, here]
    whole = padded(value, values.rank[value] - 1)
    turned, other_turned = (tokens < padded(result, np.maximum(dims, 0)) for dims in (last, other))
    even = tokens == padded(result, last)
    turned |= even & operands.left[rows] & ~(other_turned & (other >= 0))
    # Kernels write values of narrow heads with the tokens in the lanes anyway, and those of the
    # gradient of logits as their loop needs it.
    turned &= parted & (whole <= tokens) & ~values.of_picked[value]
    np.maximum.at(padding.T, value, np.where(turned, tokens / whole, 0.0).T)
    return padding
