"""Child processes for code that may hang, crash or use all memory: bytes in, bytes out.

A child is a new interpreter.  It does not import modules from the working directory, its time and
memory are limited, and it ends with its parent.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

#: The default limits of a child.
SECONDS = 30.0
MEMORY_BYTES = 6 * 2**30

#: The most bytes of an answer.
_LARGEST_ANSWER = 2**31


@dataclasses.dataclass(frozen=True)
class Answer:
    """The output of a child, or the reason why there is none."""

    #: The exit status; negative for a signal.
    status: int
    output: bytes
    #: The limit that the child exceeded, or how it crashed, such as ``takes more than 30 seconds``;
    #: empty if it exited by itself.
    failure: str = ""


def command(script: str | os.PathLike[str], *arguments: str) -> list[str]:
    """The command that runs a script without importing modules from the working directory."""
    return [sys.executable, "-P", os.fspath(script), *arguments]


def environment() -> dict[str, str]:
    """The environment of a child that imports the same modules as this process.

    Relative entries of ``sys.path`` are left out: they would refer to the working directory.
    """
    places = (place for place in sys.path if os.path.isabs(place))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def answer(
    script: pathlib.Path, request: bytes, *, seconds: float = SECONDS, needs_toast: bool = False
) -> Answer:
    """Runs a script as a child process.

    :param script: the script; it must limit itself first (:mod:`toast.boundary.limits`).
    :param request: the standard input of the script.
    :param seconds: the time limit.
    :param needs_toast: whether the script imports more than the standard library.
    :returns: the standard output and how the child ended; no error is raised.
    """
    try:
        child = subprocess.run(
            command(script), input=request, timeout=seconds, check=False, capture_output=True,
            env=environment() if needs_toast else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(-int(signal.SIGKILL), b"", f"takes more than {seconds:g} seconds")
    except OSError as failure:
        return Answer(-1, b"", f"cannot start a process: {failure.strerror or failure}")
    if len(child.stdout) > _LARGEST_ANSWER:
        return Answer(child.returncode, b"", "is too large")
    if child.returncode < 0 and -child.returncode != signal.SIGKILL:
        if -child.returncode == signal.SIGALRM or -child.returncode == signal.SIGXCPU:
            return Answer(child.returncode, b"", f"takes more than {seconds:g} seconds")
        name = signal.Signals(-child.returncode).name
        return Answer(child.returncode, b"", f"crashes the reader ({name}), or needs more memory")
    if child.returncode < 0:
        return Answer(child.returncode, b"", "ran out of memory")
    return Answer(child.returncode, child.stdout)
