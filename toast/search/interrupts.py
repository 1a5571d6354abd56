"""Interrupts: an interrupted search returns its best plan so far."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple


class _Block(NamedTuple):
    """A block of the main thread that records interrupts."""

    event: threading.Event
    #: The handler of interrupts outside of all blocks.
    handler: Callable[[int, FrameType | None], Any]


_blocks: list[_Block] = []


@contextlib.contextmanager
def noted_interrupts(*, raising: bool = False) -> Iterator[threading.Event]:
    """Yield an event that the first interrupt in the block sets; the second one is raised.

    Python may raise an interrupt anywhere: a callback of the garbage collector (JAX has one) prints
    and ignores it; numpy turns it into another error; between two searches it loses their results.
    With ``raising``, the first interrupt is raised, too.  Nested blocks share one event.

    If the user has a handler of SIGINT, it is called; a ``KeyboardInterrupt`` that it raises counts
    as the interrupt.  The event is never set if interrupts are ignored, or outside the main thread.
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
