"""Fourth stage: the decision space of an analyzed program on a mesh (states and actions)."""

from toast.space.actions import NONE, Action, Refinements, Scope
from toast.space.classes import PRODUCTS, Classes
from toast.space.constraints import Constraints, Resolved, broken, resolve
from toast.space.manual_axes import (
    BOUNDARY,
    FREE,
    matched_axes,
    place_of_region,
    region_axes,
    region_notes,
    split_axes,
)
from toast.space.space import ColorGroup, Resolving, Space, States

__all__ = [
    "BOUNDARY",
    "FREE",
    "NONE",
    "PRODUCTS",
    "Action",
    "Classes",
    "ColorGroup",
    "Constraints",
    "Refinements",
    "Resolved",
    "Resolving",
    "Scope",
    "Space",
    "States",
    "broken",
    "matched_axes",
    "place_of_region",
    "region_axes",
    "region_notes",
    "resolve",
    "split_axes",
]
