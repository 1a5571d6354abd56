"""Python's garbage collector, kept away from the objects of a program.

A traced and lowered program has a million objects, and JAX as many.  The collector would visit all
of them several times during a search, which takes up to a tenth of its time and frees nothing.  It
would also look at new objects after every two thousand, and JAX clears lists of its own each time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: New objects after which the collector looks at them, and how many such looks precede one at
#: those that it has seen, and at all of them.
_MANY, _OFTEN, _SELDOM = 200_000, 10, 100


#: Whether a block is open.
_inside = False


@contextlib.contextmanager
def older_objects_stay() -> Iterator[None]:
    """In the block, the collector visits only objects that are made in it, and seldom.

    Nested blocks, and blocks in several threads, are as one.  If the caller has frozen objects
    (``gc.freeze``), they stay frozen, and the block has no effect.
    """
    global _inside
    # The collector counts frozen objects one by one, so a nested block does not ask for them.
    if _inside or gc.get_freeze_count():
        yield
        return
    before, _inside = gc.get_threshold(), True
    gc.freeze()
    if 0 < before[0] < _MANY:
        gc.set_threshold(_MANY, _OFTEN, _SELDOM)
    try:
        yield
    finally:
        _inside = False
        gc.set_threshold(*before)
        gc.unfreeze()
