"""Python's garbage collector, kept away from the objects of a program.

A traced and lowered program has a million objects, and JAX as many.  The collector would visit all
of them several times during a search, which takes up to a tenth of its time and frees nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def older_objects_stay() -> Iterator[None]:
    """In the block, the collector visits only objects that are made in it.

    Nested blocks, and blocks in several threads, are as one.  If the caller has frozen objects
    (``gc.freeze``), they stay frozen, and the block has no effect.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
