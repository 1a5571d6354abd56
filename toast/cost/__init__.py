"""Fifth stage: vectorised prices of states (paper, section 4.5)."""

from toast.cost.model import CostModel, Layout, Prices

__all__ = ["CostModel", "Layout", "Prices"]
