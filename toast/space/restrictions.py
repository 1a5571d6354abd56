"""Factors of an op that are not sharded together (``excludes`` and ``whole_mesh`` in the rules)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast.space.actions import NONE

if TYPE_CHECKING:
    from toast.analysis import SignatureRule

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Restrictions:
    """The restrictions of ``K`` op classes with at most ``F`` factors each.

    The last row and column of a table are those of no factor, which is number -1.
    """

    restricted: Bools  # [K] whether a class has any
    excludes: Bools  # [R, F + 1, F + 1] pairs of factors that are not sharded together
    whole_mesh: Bools  # [R, F + 1] factors that are sharded only if every axis shards the op
    row: Ints  # [K] the row of a class in the tables; the last one for a class without restrictions

    @staticmethod
    def of(rules: Sequence[SignatureRule], factors: int) -> Restrictions:
        """From the rule of each class; classes have at most ``factors`` factors."""
        restricted = np.array([bool(r.excludes or r.whole_mesh) for r in rules], dtype=bool)
        rows = np.flatnonzero(restricted)
        excludes = np.zeros((len(rows) + 1, factors + 1, factors + 1), dtype=bool)
        whole_mesh = np.zeros((len(rows) + 1, factors + 1), dtype=bool)
        for number, k in enumerate(rows.tolist()):
            for one, other in rules[k].excludes:
                excludes[number, one, other] = excludes[number, other, one] = True
            whole_mesh[number, list(rules[k].whole_mesh)] = True
        row = np.full(len(rules), len(rows), dtype=np.int64)
        row[rows] = np.arange(len(rows))
        return Restrictions(restricted, excludes, whole_mesh, row)

    def allow(self, held: npt.NDArray[np.int8], classes: Ints) -> Bools:
        """Whether op classes may have these shardings.

        :param held: ``[..., classes, axes]`` the factor that holds each axis, or -1.
        :param classes: the op class of each.
        :returns: ``[..., classes]``.
        """
        allowed = np.ones(held.shape[:-1], dtype=bool)
        chosen = np.flatnonzero(self.restricted[classes])
        if not len(chosen):
            return allowed
        held, row = held[..., chosen, :], self.row[classes[chosen]]
        wrong = np.zeros(held.shape[:-1], dtype=bool)
        for one, other in itertools.combinations(range(held.shape[-1]), 2):
            wrong |= self.excludes[row, held[..., one], held[..., other]]
        alone = (held == NONE).any(axis=-1)
        if alone.any():
            wrong |= alone & self.whole_mesh[row[:, None], held].any(axis=-1)
        allowed[..., chosen] = ~wrong
        return allowed
