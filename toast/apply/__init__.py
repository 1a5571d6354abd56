"""Seventh stage: writes shardings into a program, runs it, and checks its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import lazy

if TYPE_CHECKING:
    from toast.apply.annotate import annotate
    from toast.apply.device_meshes import axis_names, jax_mesh, platform_of
    from toast.apply.execute import PytreeJit, Runnable, callable_of
    from toast.apply.hosts import plan_digest
    from toast.apply.initial import initial
    from toast.apply.module_functions import collectives_in
    from toast.apply.partition_specs import JitShardings, in_shardings, jit_shardings, out_shardings
    from toast.apply.restored_state import argument_types, check_mesh, placed_state
    from toast.apply.verify import OutputCheck, Verification, verify

__all__ = [
    "JitShardings",
    "OutputCheck",
    "PytreeJit",
    "Runnable",
    "Verification",
    "annotate",
    "argument_types",
    "axis_names",
    "callable_of",
    "check_mesh",
    "collectives_in",
    "in_shardings",
    "initial",
    "jax_mesh",
    "jit_shardings",
    "out_shardings",
    "placed_state",
    "plan_digest",
    "platform_of",
    "verify",
]

# Lazy, because plans are priced and explained without JAX.
lazy.package(
    __name__,
    {
        "annotate": ("annotate",),
        "device_meshes": (
            "axis_names",
            "jax_mesh",
            "platform_of",
        ),
        "execute": (
            "PytreeJit",
            "Runnable",
            "callable_of",
        ),
        "module_functions": ("collectives_in",),
        "partition_specs": (
            "JitShardings",
            "in_shardings",
            "jit_shardings",
            "out_shardings",
        ),
        "hosts": ("plan_digest",),
        "initial": ("initial",),
        "restored_state": ("argument_types", "check_mesh", "placed_state"),
        "verify": (
            "OutputCheck",
            "Verification",
            "verify",
        ),
    },
)
