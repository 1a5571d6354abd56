"""Sixth stage: the search for the best plan."""

from toast.search.exhaustive import Optimum, best_legal, best_reachable
from toast.search.search import Found, Round, Search, Settings
from toast.search.start import begin_fixed

__all__ = [
    "Found", "Optimum", "Round", "Search", "Settings", "begin_fixed", "best_legal",
    "best_reachable",
]  # fmt: skip
