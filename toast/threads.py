"""Threads of the linear algebra that numpy and scipy use.

With several threads, sums of floating-point numbers depend on how many there are, so that a search
could find another plan on a machine with more cores.  Its matrices are too small for threads to
save time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from threadpoolctl import threadpool_limits


def blas_in_one_thread() -> AbstractContextManager[object]:
    """In the block, linear algebra of this process runs in one thread."""
    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
