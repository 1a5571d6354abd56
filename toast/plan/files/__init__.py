"""Plan files: versioned JSON with keys that survive edits of the model.

The keys of arguments and results are their paths.  The keys of other values are those of their ops:
the kind, the path of JAX primitives, the source line, and the position among ops with the same
kind, path and line.  Labels of factors, not numbers, describe the state of an op.
``docs/plan.schema.json`` is the schema.
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
