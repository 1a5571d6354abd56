"""Ninth stage: explanations that need prices.

Those of the analysis alone are methods: :meth:`toast.Analysis.explain` says why two dimensions are
one, :meth:`toast.Analysis.explain_conflict` where two names of one color meet.
"""

from toast.explain.mirrors import mirrored
from toast.explain.resolutions import Priced, PricedResolution, resolutions

__all__ = ["Priced", "PricedResolution", "mirrored", "resolutions"]
