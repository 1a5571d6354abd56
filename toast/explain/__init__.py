"""Tenth stage: explanations of analyses and plans.

Two explanations are methods of the analysis: :meth:`toast.Analysis.explain` explains why two
dimensions have one color, :meth:`toast.Analysis.explain_conflict` where two names of one color
meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import lazy

if TYPE_CHECKING:
    from toast.explain.alternatives import other_policy
    from toast.explain.mirrors import mirrored
    from toast.explain.resolutions import Priced, PricedResolution, resolutions

__all__ = ["Priced", "PricedResolution", "mirrored", "other_policy", "resolutions"]

lazy.package(
    __name__,
    {
        "resolutions": (
            "Priced",
            "PricedResolution",
            "resolutions",
        ),
        "mirrors": ("mirrored",),
        "alternatives": ("other_policy",),
    },
)
