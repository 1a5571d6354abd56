"""Fifth stage: vectorised prices of states (paper, section 4.5)."""

from toast.cost.breakdown import Breakdown, OpCollective, break_down
from toast.cost.layout import Layout
from toast.cost.memo import Memo
from toast.cost.model import CostModel, Overlap
from toast.cost.prices import Prices, Worth
from toast.cost.timeline import Buffer, Timeline
from toast.cost.transfers import Transfer

__all__ = [
    "Breakdown", "Buffer", "CostModel", "Layout", "Memo", "OpCollective", "Overlap", "Prices",
    "Timeline", "Transfer", "Worth", "break_down",
]  # fmt: skip
