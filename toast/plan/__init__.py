"""Eighth stage: the plan, its reasons, how to run it, and plans as files."""

from toast.plan.diff import (
    ActionChange,
    Change,
    CollectiveChange,
    Difference,
    NumberChange,
    diff,
)
from toast.plan.files import VERSION, Origin, Saved, read
from toast.plan.labels import describe_value, dimension_labels, spec_text
from toast.plan.plan import ArgumentRow, Plan, Step, make_plan
from toast.plan.prediction import Collective, Prediction
from toast.plan.reapply import Applied, ArgumentChange, actions_like, apply_saved

__all__ = [
    "VERSION",
    "ActionChange",
    "Applied",
    "ArgumentChange",
    "ArgumentRow",
    "Change",
    "Collective",
    "CollectiveChange",
    "Difference",
    "NumberChange",
    "Origin",
    "Plan",
    "Prediction",
    "Saved",
    "Step",
    "actions_like",
    "apply_saved",
    "describe_value",
    "diff",
    "dimension_labels",
    "make_plan",
    "read",
    "spec_text",
]
