"""Seventh stage: shardings written back as Shardy, and run."""

from toast.apply.annotate import annotate
from toast.apply.execute import (
    Runnable,
    callable_of,
    collectives_in,
    in_shardings,
    jax_mesh,
    out_shardings,
)
from toast.apply.shardings import Shardings, Spec
from toast.apply.verify import OutputCheck, Verification, verify

__all__ = [
    "OutputCheck",
    "Runnable",
    "Shardings",
    "Spec",
    "Verification",
    "annotate",
    "callable_of",
    "collectives_in",
    "in_shardings",
    "jax_mesh",
    "out_shardings",
    "verify",
]
