"""Calls of TOAST's own functions in a process of their own, with limits of time and of memory.

    python -P toast/boundary/apart.py

The process reads the name of a function, its arguments and its limits as a pickle, and writes its
result as one: both ends are this program, and the process confines what a call takes, not what it
may do.
"""

from __future__ import annotations

import importlib
import pathlib
import pickle
import sys
import warnings
from typing import Any

from toast.boundary import children, limits
from toast.errors import ToastError

#: What a call may take where a caller names nothing else.
SECONDS, MEMORY_BYTES = 120.0, 12 * 2**30


def call(function: str, *arguments: Any, seconds: float = SECONDS) -> Any:
    """The result of ``module:function``, called in another process.

    What it warns of is warned of here.  Raises the :class:`toast.errors.ToastError` that it raises,
    and :class:`Limit` where it ends otherwise.
    """
    request = pickle.dumps((function, arguments, seconds))
    answer = children.answer(
        pathlib.Path(__file__), request, seconds=seconds, needs_toast=True
    )  # fmt: skip
    if answer.failure or answer.status:
        raise Limit(answer.failure or "ends its process")
    kind, content, remarks = pickle.loads(answer.output)
    for message, category in remarks:
        warnings.warn(message, category, stacklevel=3)
    if kind == "limit":
        raise Limit(content)
    if kind == "error":
        raise content
    return content


class Limit(Exception):
    """Which limit a call met: ``takes more than 120 seconds``."""


def main() -> None:
    """Call the function that standard input names."""
    function, arguments, seconds = pickle.load(sys.stdin.buffer)
    limits.bound(MEMORY_BYTES, seconds)
    module, _, name = function.partition(":")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kind, content = "result", getattr(importlib.import_module(module), name)(*arguments)
        except ToastError as error:
            kind, content = "error", error
        except MemoryError:
            kind, content = "limit", "ran out of memory"
        except RecursionError:
            kind, content = "limit", "is nested too deeply"
    remarks = [(str(remark.message), remark.category) for remark in caught]
    sys.stdout.buffer.write(pickle.dumps((kind, content, remarks)))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
