"""The models of the papers as plain JAX functions."""

from toast.models.registry import Entry, Model, Strategies
from toast.models.zoo import ZOO, build

__all__ = ["ZOO", "Entry", "Model", "Strategies", "build"]
