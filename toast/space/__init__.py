"""Fourth stage: the decision space of an analysed program on a mesh."""

from toast.space.actions import NONE, Action, Of, Refinements
from toast.space.classes import PRODUCTS, Classes
from toast.space.constraints import FREE, Constraints, Resolved, broken, resolve
from toast.space.space import ColorGroup, Resolving, Space, States

__all__ = [
    "FREE",
    "NONE",
    "PRODUCTS",
    "Action",
    "Classes",
    "ColorGroup",
    "Constraints",
    "Of",
    "Refinements",
    "Resolved",
    "Resolving",
    "Space",
    "States",
    "broken",
    "resolve",
]
