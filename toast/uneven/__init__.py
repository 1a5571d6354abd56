"""Uneven dimensions: those that the axes of a mesh do not divide, padded (GShard, 3.3.1)."""

from toast.uneven.padded_forms import identity
from toast.uneven.padded_program import PaddedProgram, padded_program
from toast.uneven.padded_sizes import (
    UnevenDimension,
    elements_of_names,
    padded_sizes,
    recorded_dimensions,
    uneven_dimensions,
    with_moving,
)

__all__ = [
    "PaddedProgram",
    "UnevenDimension",
    "elements_of_names",
    "identity",
    "padded_program",
    "padded_sizes",
    "recorded_dimensions",
    "uneven_dimensions",
    "with_moving",
]
