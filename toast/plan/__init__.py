"""Ninth stage: plans, their reasons, and plan files."""

from toast.files import is_plan
from toast.plan.cache_copy_notes import cache_copy_notes
from toast.plan.diff import (
    ActionChange,
    Change,
    CollectiveChange,
    Difference,
    diff,
)
from toast.plan.files import VERSION, Origin, Saved, read, schema
from toast.plan.joint_memory import is_joint, joint_plan
from toast.plan.kernel_notes import kernel_notes
from toast.plan.labels import describe_value, dimension_labels, place_of, spec_text
from toast.plan.make_plan import make_plan
from toast.plan.memory_advice import AdvisedValue, MemoryAdvice, memory_advice
from toast.plan.memory_notes import memory_notes
from toast.plan.misfit_notes import misfit_note
from toast.plan.network_notes import network_notes
from toast.plan.padding import (
    MOST_ADDED,
    Padding,
    may_gain,
    needed,
    padded,
    padding_gain,
    padding_note,
)
from toast.plan.plan import ArgumentRow, Plan, Step
from toast.plan.policy_bound import least_memory, misfit_proof
from toast.plan.prediction import Collective, NumberChange, Prediction, fit_text, odds_text
from toast.plan.program_notes import loop_notes, program_notes
from toast.plan.random_bit_notes import random_bit_notes
from toast.plan.reapply import Applied, ArgumentChange, apply_saved, check_axes
from toast.plan.reasons import (
    AnnotationExplanation,
    ArgumentExplanation,
    Cause,
    CollectiveExplanation,
    FreeAxis,
    GatheredCopies,
    HeldAxis,
)
from toast.plan.same_shardings import with_same_shardings
from toast.plan.small_collectives import small_collective_notes
from toast.plan.starting_plan import check_program, saved_start, start_actions
from toast.plan.survey_policies import is_survey, with_policies, without_policies
from toast.plan.why_not import Alternative, CollectiveCount, WhyNot
from toast.plan.written_policies import written_ops

__all__ = [
    "MOST_ADDED",
    "VERSION",
    "ActionChange",
    "AdvisedValue",
    "Alternative",
    "AnnotationExplanation",
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
    "GatheredCopies",
    "HeldAxis",
    "MemoryAdvice",
    "NumberChange",
    "Origin",
    "Padding",
    "Plan",
    "Prediction",
    "Saved",
    "Step",
    "WhyNot",
    "apply_saved",
    "cache_copy_notes",
    "check_axes",
    "check_program",
    "describe_value",
    "diff",
    "dimension_labels",
    "fit_text",
    "is_joint",
    "is_plan",
    "is_survey",
    "joint_plan",
    "kernel_notes",
    "least_memory",
    "loop_notes",
    "make_plan",
    "may_gain",
    "memory_advice",
    "memory_notes",
    "misfit_note",
    "misfit_proof",
    "needed",
    "network_notes",
    "odds_text",
    "padded",
    "padding_gain",
    "padding_note",
    "place_of",
    "program_notes",
    "random_bit_notes",
    "read",
    "saved_start",
    "schema",
    "small_collective_notes",
    "spec_text",
    "start_actions",
    "with_policies",
    "with_same_shardings",
    "without_policies",
    "written_ops",
]
