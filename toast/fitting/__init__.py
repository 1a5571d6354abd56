"""Sizes that fit: the largest batch or sequence, the fewest devices, and what a plan lacks.

:func:`fit` answers questions, and :func:`remedies_for` says what a plan that does not fit needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import lazy

if TYPE_CHECKING:
    from toast.fitting.fit_table import Fit, FitRow, PlanRequest, Remedy
    from toast.fitting.remedies import remedies_for
    from toast.fitting.requests import RequestPlanner
    from toast.fitting.size_fit import fit
    from toast.fitting.size_question import find_fit

__all__ = [
    "Fit",
    "FitRow",
    "PlanRequest",
    "Remedy",
    "RequestPlanner",
    "find_fit",
    "fit",
    "remedies_for",
]

lazy.package(
    __name__,
    {
        "fit_table": ("Fit", "FitRow", "PlanRequest", "Remedy"),
        "requests": ("RequestPlanner",),
        "remedies": ("remedies_for",),
        "size_fit": ("fit",),
        "size_question": ("find_fit",),
    },
)
