"""A process that searches: it reads tasks from its standard input and writes results.

    python -P -c "from toast.search.worker import main; main()"

It is a fresh interpreter: a fork is unsafe beside JAX's threads, and the ``spawn`` and
``forkserver`` methods of ``multiprocessing`` would run the user's script again.  It imports neither
JAX nor the analysis.  The process ends with its input, for example when the parent dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, Any, NamedTuple

from threadpoolctl import threadpool_limits

from toast.cost import CostModel
from toast.search.proposals import Proposals
from toast.search.search import Search
from toast.search.settings import Settings
from toast.search.stage import Stage
from toast.space import Action, States


class Task(NamedTuple):
    """A search."""

    number: int
    #: A pickled :class:`toast.cost.CostModel`; ``None`` for that of the previous task.
    model: bytes | None
    memory_bytes: float
    settings: Settings
    stages: tuple[Stage, ...]
    start: tuple[tuple[Action, ...], ...]
    #: Whether proposals follow in a later message.
    proposed: bool


class Proposed(NamedTuple):
    """The proposals for a task."""

    number: int
    states: tuple[States, ...]


class Stop(NamedTuple):
    """Ends a task with its best plan so far."""

    number: int


def pickled(model: CostModel) -> bytes:
    """A model for a process; it has no program."""
    return pickle.dumps(model.for_search(), pickle.HIGHEST_PROTOCOL)


def start_process(code: str) -> subprocess.Popen[bytes]:
    """A process that runs ``code``, which calls :func:`main`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    # A setting of Dask's, with which every array would be mapped anew.
    environment.pop("MALLOC_TRIM_THRESHOLD_", None)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        # Ctrl-C goes to the parent only, which sends a message.
        start_new_session=True,
    )


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes to a process that has ended."""
    for pipe in (process.stdin, process.stdout):
        assert pipe
        with contextlib.suppress(OSError):  # unwritten data has no reader
            pipe.close()


def send(target: IO[bytes], message: object) -> None:
    """Write a whole message; a pipe may take only a part at a time."""
    rest = memoryview(pickle.dumps(message))
    while rest:
        rest = rest[target.write(rest) :]
    target.flush()


class _Inbox:
    """Messages of the parent, by task."""

    def __init__(self, source: IO[bytes]) -> None:
        self.tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._source = source
        self._interrupts: dict[int, threading.Event] = {}
        self._proposals: dict[int, Proposals] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def interrupt(self, number: int) -> threading.Event:
        """The event that is set when the task must stop."""
        return self._interrupts[number]

    def proposals(self, number: int) -> Proposals:
        """The proposals of the task."""
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
        finally:  # the parent no longer waits for results
            os._exit(0)


def main(idle_seconds: float | None = None) -> None:
    """Run tasks until the input ends, or until none has come for ``idle_seconds``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and sends a message
    # Stray output must not mix with the results.
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    inbox = _Inbox(sys.stdin.buffer)
    threadpool_limits(limits=1, user_api="blas")  # to the end of the process
    model: CostModel | None = None
    while True:
        try:
            task = inbox.tasks.get(timeout=idle_seconds)
        except queue.Empty:
            os._exit(0)  # the other thread waits for input, and would hold up a usual exit
        if task.model is not None:
            model = pickle.loads(task.model)
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
