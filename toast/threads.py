"""Threads of the linear algebra that numpy and scipy use.

With several threads, sums of floating-point numbers depend on how many there are, so that a search
could find another plan on a machine with more cores.  Its matrices are too small for threads to
save time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from threadpoolctl import threadpool_limits

_lock = threading.Lock()
_limits: threadpool_limits | None = None
_blocks = 0


@contextlib.contextmanager
def blas_in_one_thread() -> Iterator[None]:
    """In the block, linear algebra of this process runs in one thread.

    Nested blocks, and blocks in several threads, are as one.
    """
    global _limits, _blocks
    with _lock:
        if not _blocks:
            _limits = threadpool_limits(limits=1, user_api="blas")
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks and _limits is not None:
                _limits.restore_original_limits()
                _limits = None
