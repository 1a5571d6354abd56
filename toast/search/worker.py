"""A process that searches: tasks come in through its standard input, results leave by its output.

    python -P toast/search/worker.py

It reads :data:`Task` after :data:`Task` and answers each with its :class:`Round` as they come and
then a :class:`Found`, or the text of an error.  It is a fresh interpreter: a fork is unsafe beside
JAX's threads, and the ``spawn`` of ``multiprocessing`` would run the user's script again.  An
interrupt ends a search with the best so far; the end of the input, as when the parent dies, ends
the process.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import pickle
import queue
import signal
import sys
import threading
import types
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from toast.cost import CostModel
    from toast.search.search import Found, Round, Settings
    from toast.space import Action, States

    #: A model (``None`` for that of the task before), the limit of memory, settings and
    #: trajectories to begin with; proposals follow when they are there.
    Task = tuple[CostModel | None, float, Settings, tuple[tuple[Action, ...], ...]]


class _Interrupts:
    """Interrupts are for searches alone; one that comes too early ends its search at once."""

    def __init__(self) -> None:
        self.asked = self.heard = False
        # A shell's background jobs, and their children, ignore interrupts.
        signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: object) -> None:
        self.asked = True
        if self.heard:
            raise KeyboardInterrupt


def main() -> None:
    """Search as told until the input ends."""
    interrupts = _Interrupts()
    # What is printed by mistake must not stand between results.
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, messages), daemon=True).start()
    model: CostModel | None = None
    while True:
        task: Task = messages.get()
        model = task[0] or model
        assert model is not None
        proposals = functools.cache(messages.get)
        try:
            _send(results, _search(results, interrupts, model, task, proposals))
        except Exception as error:
            _send(results, f"{type(error).__name__}: {error}")
        interrupts.asked = interrupts.heard = False
        proposals()  # they may still be on their way


def _search(
    results: BinaryIO,
    interrupts: _Interrupts,
    model: CostModel,
    task: Task,
    proposals: Callable[[], tuple[States, ...]],
) -> Found:
    from toast.search.search import Search

    def tell(event: Round) -> None:
        interrupts.heard = False  # not in the middle of a message
        _send(results, event)
        interrupts.heard = True
        if interrupts.asked:
            raise KeyboardInterrupt

    _, memory_bytes, settings, start = task
    if interrupts.asked:
        settings = dataclasses.replace(settings, budget=0.0)
    search = Search(
        model, memory_bytes=memory_bytes, settings=settings, start=start, progress=tell,
        proposals=lambda _seconds: proposals(),  # who sends them keeps the time
    )  # fmt: skip
    interrupts.heard = True
    found = search.run()
    interrupts.heard = False
    return found


def _send(results: BinaryIO, message: object) -> None:
    rest = memoryview(pickle.dumps(message))
    while rest:
        rest = rest[results.write(rest) :]


def _read(source: BinaryIO, tasks: queue.SimpleQueue[Any]) -> None:
    """Pass on tasks; nobody waits for an answer when there are no more."""
    try:
        while True:
            tasks.put(pickle.load(source))
    finally:
        os._exit(0)


def _without_init() -> None:
    """Let ``toast.search`` be imported without ``toast/__init__.py``.

    That would bring jax, pandas and clingo, which a search does not need.
    """
    package = types.ModuleType("toast")
    package.__path__ = [str(pathlib.Path(__file__).resolve().parent.parent)]
    sys.modules["toast"] = package


if __name__ == "__main__":
    _without_init()
    main()
