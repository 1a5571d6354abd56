"""A process that searches: tasks come in through its standard input, results leave by its output.

    python -P toast/search/worker.py

It reads :data:`Task` after :data:`Task` and answers each with its :class:`Round` as they come and
then a :class:`Found`, or the text of an error.  It is a fresh interpreter: a fork is unsafe beside
JAX's threads, and the ``spawn`` of ``multiprocessing`` would run the user's script again.  An
interrupt ends a search with the best so far; the end of the input, as when the parent dies, ends
the process.
"""

from __future__ import annotations

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
    from toast.cost import CostModel
    from toast.search.search import Settings
    from toast.space import Action, States

    #: A model (``None`` for that of the task before), the limit of memory, settings, trajectories
    #: to begin with, and proposals.
    Task = tuple[
        CostModel | None, float, Settings, tuple[tuple[Action, ...], ...], tuple[States, ...]
    ]


def main() -> None:
    """Search as told until the input ends."""
    # A shell's background jobs, and their children, ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What is printed by mistake must not stand between results.
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, tasks), daemon=True).start()
    model: CostModel | None = None
    while True:
        new, memory_bytes, settings, start, proposals = tasks.get()
        model = new or model
        assert model is not None
        try:
            _send(results, _search(results, model, memory_bytes, settings, start, proposals))
        except Exception as error:
            _send(results, f"{type(error).__name__}: {error}")


def _search(
    results: BinaryIO,
    model: CostModel,
    memory_bytes: float,
    settings: Settings,
    start: tuple[tuple[Action, ...], ...],
    proposals: tuple[States, ...],
) -> object:
    from toast.search.search import Search

    return Search(
        model,
        memory_bytes=memory_bytes,
        settings=settings,
        start=start,
        proposals=lambda: proposals,
        progress=lambda event: _send(results, event),
    ).run()


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
