"""Sixth stage: the search for the best plan."""

from toast.search.mcts import Found, Round, Search, Settings

__all__ = ["Found", "Round", "Search", "Settings"]
