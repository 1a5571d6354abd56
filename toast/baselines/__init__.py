"""Other ways to shard a program, for comparison."""

from toast.baselines.alpa import alpa
from toast.baselines.manual import manual_states

__all__ = ["alpa", "manual_states"]
