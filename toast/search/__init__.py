"""Sixth stage: the search for the best plan."""

from toast.search.executors import check_executor
from toast.search.fixed_actions import begin_with_fixed
from toast.search.interrupts import noted_interrupts
from toast.search.jobs import Job
from toast.search.ledger import OVER_LIMIT, Ledger, SearchEnd, Trajectory
from toast.search.meshes import BestMesh, MeshResult, search_meshes
from toast.search.policies import best_policy, grow, with_best_policies
from toast.search.polish import Polishing
from toast.search.regions import actions_to, region_changes
from toast.search.restarts import find
from toast.search.search import DEFAULT_STAGES, Round, Search, SearchResult
from toast.search.settings import Settings
from toast.search.shorten import Shortening, shortest
from toast.search.stage import Budget, Stage, WhenImproved, check_stages
from toast.search.tree import TreeSearch

__all__ = [
    "DEFAULT_STAGES", "OVER_LIMIT", "BestMesh", "Budget", "Job", "Ledger",
    "MeshResult", "Polishing", "Round", "Search", "SearchEnd", "SearchResult", "Settings",
    "Shortening", "Stage", "Trajectory", "TreeSearch", "WhenImproved", "actions_to",
    "begin_with_fixed", "best_policy", "check_executor", "check_stages", "find", "grow",
    "noted_interrupts", "region_changes", "search_meshes", "shortest", "with_best_policies",
]  # fmt: skip
