"""Fourth stage: the decision space of an analysed program on a mesh."""

from toast.space.constraints import Constraints
from toast.space.space import NONE, Action, Classes, ColorGroup, Resolving, Space, States

__all__ = [
    "NONE",
    "Action",
    "Classes",
    "ColorGroup",
    "Constraints",
    "Resolving",
    "Space",
    "States",
]
