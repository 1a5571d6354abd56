"""TOAST: the automatic partitioner for JAX.

>>> import toast
>>> sorted(name for name in toast.__all__ if name.islower())
['analyze', 'apply_plan', 'diff', 'plan']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import lazy

if TYPE_CHECKING:
    from toast.analysis import Analysis
    from toast.api import analyze, apply_plan, plan
    from toast.errors import ToastError
    from toast.hardware import Hardware, Mesh
    from toast.plan import Applied, Plan
    from toast.plan.diff import Difference, diff
    from toast.search import Settings
    from toast.space import Constraints

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "Applied",
    "Constraints",
    "Difference",
    "Hardware",
    "Mesh",
    "Plan",
    "Settings",
    "ToastError",
    "analyze",
    "apply_plan",
    "diff",
    "plan",
]

lazy.package(
    __name__,
    {
        "analysis": ("Analysis",),
        "plan": (
            "Applied",
            "Difference",
            "Plan",
            "diff",
        ),
        "space": ("Constraints",),
        "hardware": (
            "Hardware",
            "Mesh",
        ),
        "search": ("Settings",),
        "errors": ("ToastError",),
        "api": (
            "analyze",
            "apply_plan",
            "plan",
        ),
    },
)
