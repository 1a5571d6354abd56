"""Runs the searches of threads in processes.

The threads of an interpreter take turns, and its memory may be set up for other work: Dask's
workers, for example, give the memory of every array back to the system.
"""

from __future__ import annotations

import atexit
import pickle
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from toast.search.search import Round, SearchResult
from toast.search.worker import Proposed, Task, close_pipes, send, start_process
from toast.space import States

#: Seconds after which a process without a search ends.
_IDLE_SECONDS = 120.0

_WORKER = f"from toast.search.worker import main; main({_IDLE_SECONDS})"


class _Idle:
    """Processes without a search."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def take(self) -> subprocess.Popen[bytes]:
        """A process that runs, or a new one."""
        while True:
            with self._lock:
                process = self._processes.pop() if self._processes else None
            if process is None:
                return start_process(_WORKER)
            if process.poll() is None:
                return process
            _end(process)

    def give(self, process: subprocess.Popen[bytes]) -> None:
        """Keep a process for the next search."""
        with self._lock:
            self._processes.append(process)

    def end(self) -> None:
        """End all of them."""
        while self._processes:
            _end(self._processes.pop())


_idle = _Idle()
atexit.register(_idle.end)


def search_in_process(task: Task, proposals: Sequence[States]) -> SearchResult | str | None:
    """The result of a search, or why the search failed; ``None`` if the process died."""
    process = _idle.take()
    assert process.stdin
    assert process.stdout
    message: Any = None
    try:
        send(process.stdin, task)
        send(process.stdin, Proposed(task.number, tuple(proposals)))
        while isinstance(message := pickle.load(process.stdout), Round):
            pass
    except (OSError, EOFError):
        _end(process)
        return None
    except BaseException:
        _end(process)
        raise
    _idle.give(process)
    result: SearchResult | str = message
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and close its pipes."""
    process.kill()
    process.wait()
    close_pipes(process)
