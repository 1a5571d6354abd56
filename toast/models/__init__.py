"""Models to partition: the paper's, written as plain JAX functions."""

from toast.models.registry import Model, Strategies
from toast.models.zoo import ZOO, Entry, build

__all__ = ["ZOO", "Entry", "Model", "Strategies", "build"]
