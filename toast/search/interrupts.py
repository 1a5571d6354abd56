"""Interrupts that end a search with the best plan so far, wherever they come."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple


class _Block(NamedTuple):
    """A block of the main thread that notes interrupts."""

    event: threading.Event
    #: What handles interrupts outside of all blocks.
    handler: Callable[[int, FrameType | None], Any]


_blocks: list[_Block] = []


@contextlib.contextmanager
def noted_interrupts(*, raising: bool = False) -> Iterator[threading.Event]:
    """In the block, an event that an interrupt sets.

    An interrupt that is raised may come anywhere: a callback of the garbage collector, and JAX has
    one, prints and forgets it; numpy turns it into some other error; between two searches it loses
    their results.  So the first one only sets the event, and the second one is raised; with
    ``raising`` the first one is raised as well.  Blocks within a block share its event.

    Where SIGINT has a handler of the user's own, that handler is called, and what it raises counts
    as the interrupt.  Where interrupts are ignored, or in another thread than the main one, the
    event is never set.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield threading.Event()
        return
    block = _blocks[-1] if _blocks else _Block(threading.Event(), before)

    def note(number: int, frame: FrameType | None) -> None:
        try:
            block.handler(number, frame)
        except KeyboardInterrupt:
            first = not block.event.is_set()
            block.event.set()
            if raising or not first:
                raise

    signal.signal(signal.SIGINT, note)
    _blocks.append(block)
    try:
        yield block.event
    finally:
        _blocks.pop()
        signal.signal(signal.SIGINT, before)
