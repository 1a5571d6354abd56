"""Other ways to shard a program, for comparison."""

from toast.baselines.manual import manual_states

__all__ = ["manual_states"]
