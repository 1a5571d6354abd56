"""Processes for what may hang, crash or take all memory: a script, some bytes in, some bytes out.

A child is a fresh interpreter: it does not look for modules in the working directory, has a limit
of time and of memory, and ends with its parent.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

#: What a child may take where a caller names nothing else.
SECONDS = 30.0
MEMORY_BYTES = 6 * 2**30

#: Of a child's answer, the most that is read.
_LARGEST_ANSWER = 2**31


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a child said, or why it said nothing."""

    #: Its exit status; negative for a signal.
    status: int
    output: bytes
    #: Which limit it met, or how it died: ``takes more than 30 seconds``; empty if it ended itself.
    failure: str = ""


def command(script: str | os.PathLike[str], *arguments: str) -> list[str]:
    """How an interpreter is started that runs no ``pickle.py`` of the working directory."""
    return [sys.executable, "-P", os.fspath(script), *arguments]


def environment() -> dict[str, str]:
    """The environment of a child: it finds the modules that this process finds.

    The working directory is no place of modules for it, as a relative entry would make it.
    """
    places = (place for place in sys.path if os.path.isabs(place))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def answer(
    script: pathlib.Path, request: bytes, *, seconds: float = SECONDS, needs_toast: bool = False
) -> Answer:
    """Run a script that reads ``request`` and writes its answer, within ``seconds``.

    The script bounds itself first of all (:mod:`toast.boundary.limits`).  ``needs_toast`` says that
    it imports what is installed beside the standard library in places of its parent's own.
    """
    try:
        done = subprocess.run(
            command(script), input=request, timeout=seconds, check=False, capture_output=True,
            env=environment() if needs_toast else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(-int(signal.SIGKILL), b"", f"takes more than {seconds:g} seconds")
    except OSError as failure:
        return Answer(-1, b"", f"cannot start a process: {failure.strerror or failure}")
    if len(done.stdout) > _LARGEST_ANSWER:
        return Answer(done.returncode, b"", "is too large")
    if done.returncode < 0 and -done.returncode != signal.SIGKILL:
        if -done.returncode == signal.SIGALRM or -done.returncode == signal.SIGXCPU:
            return Answer(done.returncode, b"", f"takes more than {seconds:g} seconds")
        name = signal.Signals(-done.returncode).name
        return Answer(done.returncode, b"", f"crashes its reader ({name}), or needs more memory")
    if done.returncode < 0:
        return Answer(done.returncode, b"", "ran out of memory")
    return Answer(done.returncode, done.stdout)
