"""Other ways to shard a program, for comparison."""

from toast.baselines.alpa import alpa
from toast.baselines.automap import automap, shardy
from toast.baselines.manual import manual, manual_states
from toast.baselines.propagated import Propagator, Sharded

__all__ = ["Propagator", "Sharded", "alpa", "automap", "manual", "manual_states", "shardy"]
