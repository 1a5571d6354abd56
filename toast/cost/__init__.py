"""Fifth stage: vectorised prices of states (paper, section 4.5)."""

from toast.cost.model import Buffer, CostModel, Layout, Overlap, Prices, Timeline, Transfer

__all__ = [
    "Buffer", "CostModel", "Layout", "Overlap", "Prices", "Timeline", "Transfer",
]  # fmt: skip
