"""A process that searches: tasks come in through its standard input, results leave by its output.

    python -P -c "from toast.search.worker import main; main()"

It is a fresh interpreter: a fork is unsafe beside JAX's threads, and the ``spawn`` and
``forkserver`` of ``multiprocessing`` would run the user's script again.  It imports neither JAX nor
what analyses programs.  The end of the input, as when the parent dies, ends the process.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from typing import IO, Any, NamedTuple

from toast.cost import CostModel
from toast.search.proposals import Proposals
from toast.search.search import Search
from toast.search.settings import Settings
from toast.search.stage import Stage
from toast.space import Action, States


class Task(NamedTuple):
    """A search."""

    number: int
    #: ``None`` for that of the task before.
    model: CostModel | None
    memory_bytes: float
    settings: Settings
    stages: tuple[Stage, ...]
    start: tuple[tuple[Action, ...], ...]
    #: Whether proposals follow, when they are there.
    proposed: bool


class Proposed(NamedTuple):
    """The proposals for a task."""

    number: int
    states: tuple[States, ...]


class Stop(NamedTuple):
    """A task is to end with its best so far."""

    number: int


def send(target: IO[bytes], message: object) -> None:
    """Write a message, however little of it a pipe takes at a time."""
    rest = memoryview(pickle.dumps(message))
    while rest:
        rest = rest[target.write(rest) :]
    target.flush()


class _Inbox:
    """Messages of the parent, sorted by the task that they are for."""

    def __init__(self, source: IO[bytes]) -> None:
        self.tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._source = source
        self._interrupts: dict[int, threading.Event] = {}
        self._proposals: dict[int, Proposals] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def interrupt(self, number: int) -> threading.Event:
        """Set when the task is to stop."""
        return self._interrupts[number]

    def proposals(self, number: int) -> Proposals:
        """Those of the task."""
        return self._proposals[number]

    def _read(self) -> None:
        try:
            while True:
                message: Any = pickle.load(self._source)
                if isinstance(message, Task):
                    interrupt = self._interrupts[message.number] = threading.Event()
                    proposals = self._proposals[message.number] = Proposals(interrupt)
                    if not message.proposed:
                        proposals.future.set_result(())
                    self.tasks.put(message)
                elif isinstance(message, Stop):
                    self._interrupts[message.number].set()
                elif isinstance(message, Proposed):
                    self._proposals[message.number].future.set_result(message.states)
        finally:  # nobody waits for an answer when there are no more
            os._exit(0)


def main() -> None:
    """Search as told until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and sends a message
    # What is printed by mistake must not stand between results.
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    inbox = _Inbox(sys.stdin.buffer)
    model: CostModel | None = None
    while True:
        task = inbox.tasks.get()
        model = task.model or model
        assert model is not None
        search = Search(
            model,
            memory_bytes=task.memory_bytes,
            settings=task.settings,
            stages=task.stages,
            start=task.start,
            proposals=inbox.proposals(task.number),
            progress=lambda event: send(results, event),
            interrupt=inbox.interrupt(task.number),
        )
        try:
            message: object = search.run()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        send(results, message)
