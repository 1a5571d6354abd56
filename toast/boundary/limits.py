"""What a child does first: bound its memory, its time and what it may open.

Scripts that must start fast load this file by its path; it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import signal


def bound(memory_bytes: int | None = None, seconds: float | None = None) -> None:
    """Bound the memory and the time of this process, where the system can."""
    try:
        import resource
    except ImportError:  # not POSIX
        return
    # What is bounded already may be bounded lower than this.
    with contextlib.suppress(OSError, ValueError):
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if seconds is not None:
        # Also where the parent is gone, which would have ended it.
        signal.alarm(int(seconds) + 2)


def close_files() -> None:
    """Let this process open nothing any more; what is open stays open."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
