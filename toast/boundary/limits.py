"""Limits that a child process sets for itself first: memory, time and files.

Scripts that must start quickly load this file by its path; it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import signal


def bound(memory_bytes: int | None = None, seconds: float | None = None) -> None:
    """Limits the memory and the time of this process, if the system supports it."""
    try:
        import resource
    except ImportError:  # not POSIX
        return
    # An existing limit may be lower.
    with contextlib.suppress(OSError, ValueError):
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if seconds is not None:
        # This also ends the process if its parent, which has the same limit, no longer exists.
        signal.alarm(int(seconds) + 2)


def close_files() -> None:
    """Prevents this process from opening files; open files stay open."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
