"""Custom calls into Python: those of ``jax.debug.print``, ``pure_callback`` and ``io_callback``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toast.frontend.mlir.ops import call_target
from toast.program import calls_python


def is_callback(operation: Any) -> bool:
    """Whether an op runs a Python function."""
    return calls_python(call_target(operation))


def callbacks_of(lowered: Any) -> tuple[Callable[..., Any], ...]:
    """The Python functions of a ``jax.stages.Lowered``, which callbacks name by number."""
    arguments = getattr(getattr(lowered, "_lowering", None), "compile_args", {})
    return tuple(arguments.get("host_callbacks") or ())
