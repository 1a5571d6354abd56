"""Seventh stage: shardings written back as Shardy, and run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import lazy
from toast.program import Shardings, Spec

if TYPE_CHECKING:
    from toast.apply.annotate import annotate
    from toast.apply.execute import (
        JitShardings,
        Runnable,
        callable_of,
        collectives_in,
        in_shardings,
        jax_mesh,
        jit_shardings,
        out_shardings,
    )
    from toast.apply.verify import OutputCheck, Verification, verify

__all__ = [
    "JitShardings",
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
    "jit_shardings",
    "out_shardings",
    "verify",
]

# Plans are priced and explained without JAX.
lazy.package(
    __name__,
    {
        "annotate": ("annotate",),
        "execute": (
            "JitShardings",
            "Runnable",
            "callable_of",
            "collectives_in",
            "in_shardings",
            "jax_mesh",
            "jit_shardings",
            "out_shardings",
        ),
        "verify": (
            "OutputCheck",
            "Verification",
            "verify",
        ),
    },
)
