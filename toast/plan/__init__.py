"""Eighth stage: the plan, its reasons, and how to run it."""

from toast.plan.plan import (
    ArgumentRow,
    Collective,
    Plan,
    Prediction,
    Step,
    actions_like,
    describe_value,
    dimension_labels,
    folded,
    make_plan,
    place_of,
    spec_text,
)

__all__ = [
    "ArgumentRow",
    "Collective",
    "Plan",
    "Prediction",
    "Step",
    "actions_like",
    "describe_value",
    "dimension_labels",
    "folded",
    "make_plan",
    "place_of",
    "spec_text",
]
