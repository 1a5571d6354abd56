"""Custom calls into Python: those of ``jax.debug.print``, ``pure_callback`` and ``io_callback``."""

from __future__ import annotations

import re

from toast.program.program import Program

#: The targets of custom calls into Python.
_CALLBACK = re.compile(r"python_\w*callback")


def calls_python(target: str) -> bool:
    """Whether a custom call to ``target`` runs a Python function."""
    return _CALLBACK.search(target) is not None


def callback_ops(program: Program) -> list[int]:
    """The ops that run a Python function."""
    calling = [
        calls_python(str(signature.attribute("call_target_name") or ""))
        for signature in program.signatures
    ]
    return [number for number, op in enumerate(program.ops) if calling[op.signature]]


def has_callback_functions(program: Program) -> bool:
    """Whether the Python functions of the callbacks are there: they are of this process."""
    return bool(getattr(getattr(program.source, "calling", None), "callbacks", ()))
