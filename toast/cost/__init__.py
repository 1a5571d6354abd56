"""Fifth stage: vectorised prices of states (paper, section 4.5)."""

from toast.cost.model import COLLECTIVES, CostModel, Layout, Prices

__all__ = ["COLLECTIVES", "CostModel", "Layout", "Prices"]
