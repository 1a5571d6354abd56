"""Eighth stage: the plan, its reasons, how to run it, and plans as files."""

from toast.files import is_plan
from toast.plan.alternatives import Alternative, CollectiveCount, WhyNot
from toast.plan.begin import begun, check_program, started
from toast.plan.diff import (
    ActionChange,
    Change,
    CollectiveChange,
    Difference,
    NumberChange,
    diff,
)
from toast.plan.explain import (
    ArgumentExplanation,
    Cause,
    CollectiveExplanation,
    FreeAxis,
    HeldAxis,
    numbered,
)
from toast.plan.files import VERSION, Origin, Saved, read, schema
from toast.plan.labels import describe_value, dimension_labels, folded, place_of, spec_text
from toast.plan.plan import ArgumentRow, Plan, Step, make_plan
from toast.plan.prediction import Collective, Prediction
from toast.plan.reapply import Applied, ArgumentChange, apply_saved, check_axes

__all__ = [
    "VERSION",
    "ActionChange",
    "Alternative",
    "Applied",
    "ArgumentChange",
    "ArgumentExplanation",
    "ArgumentRow",
    "Cause",
    "Change",
    "Collective",
    "CollectiveChange",
    "CollectiveCount",
    "CollectiveExplanation",
    "Difference",
    "FreeAxis",
    "HeldAxis",
    "NumberChange",
    "Origin",
    "Plan",
    "Prediction",
    "Saved",
    "Step",
    "WhyNot",
    "apply_saved",
    "begun",
    "check_axes",
    "check_program",
    "describe_value",
    "diff",
    "dimension_labels",
    "folded",
    "is_plan",
    "make_plan",
    "numbered",
    "place_of",
    "read",
    "schema",
    "spec_text",
    "started",
]
