"""Prices of batches of states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Prices:
    """Predictions for ``S`` states, per device."""

    seconds: Floats  #: [S] step time
    matmul_seconds: Floats  #: [S] matrix products
    memory_seconds: Floats  #: [S] memory-bound kernels, and waiting for the memory of the host
    collective_seconds: Floats  #: [S, 5] by kind, in the order of COLLECTIVES
    collective_count: Floats  #: [S, 5] collectives of each kind
    collective_bytes: Floats  #: [S, 5] bytes of results a device holds after each collective
    hidden_seconds: Floats  #: [S] of collectives, beside products
    sent_bytes: Floats  #: [S] bytes a device sends in rings
    peak_bytes: Floats  #: [S] arguments and temporaries at the peak
    argument_bytes: Floats  #: [S] arguments
    output_bytes: Floats  #: [S] results, also those in donated arguments
    #: [S] besides the peak: constants that XLA may write (:mod:`toast.cost.random_bits`)
    constant_bytes: Floats


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Equal collectives, as XLA leaves them; all of them add up to a state's prices."""

    #: The name in StableHLO, such as ``all_gather``.
    kind: str
    #: The mesh axes that it runs along.
    axes: tuple[str, ...]
    #: Of one result on a device.
    bytes: float
    #: Number per step: XLA merges some that are in the program, and recomputes constants.
    count: float
    #: The cheapest algorithm on the links, and the seconds of one.
    algorithm: str
    #: Seconds of one.
    seconds: float
    #: Whether shards exchange their edges (of a window, slice or pad).
    edges: bool = False


class Worth(NamedTuple):
    """The prices of ``S`` states that a search needs."""

    seconds: Floats  # [S] step time
    peak_bytes: Floats  # [S]
    argument_bytes: Floats  # [S]


def highest(growth: Floats) -> Floats:
    """``[S]`` the most memory besides arguments; ``growth`` is ``[S, M]``, by moment."""
    live = np.cumsum(growth, axis=1)
    return np.asarray(np.maximum(live.max(axis=1, initial=0.0), 0.0))


def joined(prices: Sequence[Prices]) -> Prices:
    """The prices of several batches, in order."""
    return Prices(*(np.concatenate(fields) for fields in zip(*map(_fields, prices), strict=True)))


def _fields(prices: Prices) -> tuple[Floats, ...]:
    return tuple(getattr(prices, field.name) for field in dataclasses.fields(prices))
