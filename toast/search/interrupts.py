"""Interrupts that are not lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def heard() -> Iterator[Callable[[], None]]:
    """In the block, a function that raises the interrupt that was raised before, if there was one.

    An exception in a callback of the garbage collector, and JAX has one, is printed and forgotten.
    Whatever is set to handle interrupts handles them here as well.
    """
    raised: list[KeyboardInterrupt] = []

    def check() -> None:
        if raised:
            raise raised[0]

    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield check  # there are none, or they are raised in the main thread
        return

    def note(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except KeyboardInterrupt as interrupt:
            raised.append(interrupt)
            raise

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, handler)
