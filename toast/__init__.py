"""TOAST: the automatic partitioner for JAX.

>>> import toast
>>> sorted(name for name in toast.__all__ if name.islower())
['analyze', 'plan']
"""

from toast.analysis import Analysis
from toast.api import analyze, plan
from toast.errors import ToastError
from toast.hardware import Hardware, Mesh
from toast.plan import Plan
from toast.search import Settings
from toast.space import Constraints

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "Constraints",
    "Hardware",
    "Mesh",
    "Plan",
    "Settings",
    "ToastError",
    "analyze",
    "plan",
]
