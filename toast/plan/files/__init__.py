"""Plans as files: versioned JSON, keyed by what survives edits of the model.

Arguments and results are keyed by their paths, all other values by the op that makes them: its
kind, the path of JAX primitives and the source line that it comes from, and its place among the ops
that share these.  What an op computes in is said by the labels of its factors, never by numbers.
``docs/plan.schema.json`` says what the JSON looks like.
"""

from toast.plan.files.format import schema
from toast.plan.files.reading import read
from toast.plan.files.saved import (
    VERSION,
    Held,
    OpKey,
    Run,
    Saved,
    SavedAction,
    SavedArgument,
    SavedPart,
)
from toast.plan.files.writing import (
    class_places,
    constraints_data,
    hardware_digest,
    keyed_ops,
    plan_data,
)
from toast.plan.origin import Origin

__all__ = [
    "VERSION",
    "Held",
    "OpKey",
    "Origin",
    "Run",
    "Saved",
    "SavedAction",
    "SavedArgument",
    "SavedPart",
    "class_places",
    "constraints_data",
    "hardware_digest",
    "keyed_ops",
    "plan_data",
    "read",
    "schema",
]
