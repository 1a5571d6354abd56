"""Second stage: converts programs to relations (DataFrames) and to text for clingo, and back."""

from toast.facts.base import read
from toast.facts.relations import Relations, quoted

__all__ = ["Relations", "quoted", "read"]
