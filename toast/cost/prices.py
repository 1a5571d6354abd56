"""What a batch of states costs."""

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


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives that are alike, as XLA leaves them; all of them add up to a state's prices."""

    kind: str
    axes: tuple[str, ...]
    #: Of the result that a device holds after each.
    bytes: float
    #: In a step: of those that stand in the program, XLA merges some, and makes constants anew.
    count: float
    #: The cheapest that the links allow, and what one takes.
    algorithm: str
    seconds: float
    #: Whether shards exchange their edges (of a window, slice or pad).
    edges: bool = False


class Worth(NamedTuple):
    """What a search asks of ``S`` states."""

    seconds: Floats  # [S] step time
    peak_bytes: Floats  # [S]


def highest(growth: Floats) -> Floats:
    """The most that is in memory besides arguments, which grows as told: ``[S]`` of ``[S, M]``."""
    live = np.cumsum(growth, axis=1)
    return np.asarray(np.maximum(live.max(axis=1, initial=0.0), 0.0))


def joined(prices: Sequence[Prices]) -> Prices:
    """Prices of states that follow each other."""
    return Prices(*(np.concatenate(fields) for fields in zip(*map(_fields, prices), strict=True)))


def _fields(prices: Prices) -> tuple[Floats, ...]:
    return tuple(getattr(prices, field.name) for field in dataclasses.fields(prices))
