"""Fifth stage: vectorised prices of states (paper, section 4.5)."""

from toast.cost.breakdown import Breakdown, OpCollective, break_down
from toast.cost.model import Buffer, CostModel, Layout, Overlap, Prices, Timeline, Transfer

__all__ = [
    "Breakdown", "Buffer", "CostModel", "Layout", "OpCollective", "Overlap", "Prices", "Timeline",
    "Transfer", "break_down",
]  # fmt: skip
