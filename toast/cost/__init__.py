"""Fifth stage: vectorised prices of states (paper, section 4.5)."""

from toast.cost.breakdown import Breakdown, OpCollective, break_down
from toast.cost.entities import Entity
from toast.cost.error_bars import ErrorBars, Interval
from toast.cost.layout import Layout
from toast.cost.memo import Memo, memo_of
from toast.cost.model import CostModel, Overlap
from toast.cost.policy_prices import PolicyCosts, PolicyMemo, PolicyModel, PricedPolicy
from toast.cost.prices import Prices, Transfer, Worth
from toast.cost.residuals import Choices, Recomputation, Residuals
from toast.cost.step_schedule import StepSchedule, step_schedule
from toast.cost.terms import DEFAULT_TERMS, LocalTerm, StepPart, Term, Traffic
from toast.cost.timeline import Buffer, Timeline

__all__ = [
    "DEFAULT_TERMS",
    "Breakdown",
    "Buffer",
    "Choices",
    "CostModel",
    "Entity",
    "ErrorBars",
    "Interval",
    "Layout",
    "LocalTerm",
    "Memo",
    "OpCollective",
    "Overlap",
    "PolicyCosts",
    "PolicyMemo",
    "PolicyModel",
    "PricedPolicy",
    "Prices",
    "Recomputation",
    "Residuals",
    "StepPart",
    "StepSchedule",
    "Term",
    "Timeline",
    "Traffic",
    "Transfer",
    "Worth",
    "break_down",
    "memo_of",
    "step_schedule",
]  # fmt: skip
