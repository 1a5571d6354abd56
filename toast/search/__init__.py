"""Sixth stage: the search for the best plan."""

from toast.search.search import Found, Round, Search, Settings

__all__ = ["Found", "Round", "Search", "Settings"]
