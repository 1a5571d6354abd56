"""Second stage: a program as relations (DataFrames) and as text for clingo."""

from toast.facts.base import read
from toast.facts.relations import Relations

__all__ = ["Relations", "read"]
