"""Sixth stage: the search for the best plan."""

from toast.search.search import Found, Round, Search, Settings
from toast.search.start import begin_fixed

__all__ = ["Found", "Round", "Search", "Settings", "begin_fixed"]
