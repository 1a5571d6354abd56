"""Other methods that shard a program, for comparison."""

from toast.evaluation.baselines.alpa import alpa
from toast.evaluation.baselines.automap import automap, shardy
from toast.evaluation.baselines.manual import manual, manual_states
from toast.evaluation.baselines.propagated import Propagator, Sharded

__all__ = ["Propagator", "Sharded", "alpa", "automap", "manual", "manual_states", "shardy"]
