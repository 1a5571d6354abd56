"""What a batch of states costs, and the sums that it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Prices:
    """Predictions for ``S`` states, per device."""

    seconds: Floats  # [S] step time
    matmul_seconds: Floats  # [S]
    memory_seconds: Floats  # [S] memory-bound kernels
    collective_seconds: Floats  # [S, 5] by kind, in the order of COLLECTIVES
    collective_count: Floats  # [S, 5]
    collective_bytes: Floats  # [S, 5] bytes of results a device holds after each collective
    hidden_seconds: Floats  # [S] of the collectives, that products run beside
    sent_bytes: Floats  # [S] bytes a device sends, round rings
    peak_bytes: Floats  # [S] arguments and temporaries at the worst moment
    argument_bytes: Floats  # [S]
    output_bytes: Floats  # [S] results, those in donated arguments included

    def of(self, states: npt.NDArray[np.integer[Any]]) -> Prices:
        """Those of some states, in their order."""
        return Prices(*(array[states] for array in _fields(self)))


class Parts(NamedTuple):
    """What prices are made of, for ``S`` states: sums over classes, all of them."""

    matmul_seconds: Floats  # [S]
    memory_seconds: Floats  # [S]
    seconds: Floats  # [S, 5] of collectives by kind
    times: Floats  # [S, 5]
    moved_bytes: Floats  # [S, 5]
    sent_bytes: Floats  # [S]
    asked: Floats  # [S, G] seconds of collectives by window (:mod:`toast.cost.overlap`)
    argument_bytes: Floats  # [S]
    output_bytes: Floats  # [S]
    growth: Floats  # [S, moments] bytes by which temporaries grow from one moment to the next


def joined(prices: Sequence[Prices]) -> Prices:
    """Prices of states that follow each other."""
    return Prices(*(np.concatenate(fields) for fields in zip(*map(_fields, prices), strict=True)))


def _fields(prices: Prices) -> tuple[Floats, ...]:
    return tuple(getattr(prices, field.name) for field in dataclasses.fields(prices))
