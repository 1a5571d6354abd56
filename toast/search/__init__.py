"""Sixth stage: the search for the best plan."""

from toast.search.exhaustive import Optimum, best_legal, best_reachable
from toast.search.ledger import OVER_LIMIT
from toast.search.meshes import Tried, search_meshes
from toast.search.parallel import Job, find
from toast.search.search import Found, Round, Search, Settings
from toast.search.start import begin_fixed

__all__ = [
    "OVER_LIMIT", "Found", "Job", "Optimum", "Round", "Search", "Settings", "Tried", "begin_fixed",
    "best_legal", "best_reachable", "find", "search_meshes",
]  # fmt: skip
