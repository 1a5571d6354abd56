"""Checks and repairs the process's streams and working directory.

A shell may start a command with a closed standard output, on a full disk, in a deleted folder or
with a locale that lacks most characters.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """A context for a command, in which it can write to its streams.

    At the end the standard output is flushed.  If that fails, the error stream gets one line and
    the exit code is 2.
    """
    _open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may not be text, and a locale may lack the lines of tables.
            stream.reconfigure(errors="backslashreplace")
    _check_folder()
    try:
        yield
    finally:
        if failure := _flushed():
            _complain(f"cannot write to the standard output: {failure}")
            # This replaces any other exit code.
            sys.exit(2)


def _open_missing() -> None:
    """Opens closed streams: otherwise the next opened file would become the standard output.

    Writing to a standard output that was closed still fails.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            writes = number == 2
            handle = os.open(os.devnull, os.O_WRONLY if writes else os.O_RDONLY)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError:
        _complain("the working directory does not exist; change to another folder")
        sys.exit(2)


def _flushed() -> str:
    """Flushes the standard output; returns the reason if that fails, else an empty text."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()  # the reader has closed the pipe
    except (OSError, ValueError) as failure:
        _silence()
        return getattr(failure, "strerror", None) or str(failure)
    return ""


def _silence() -> None:
    """Lets the interpreter's flush at exit succeed."""
    with contextlib.suppress(OSError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, 1)
        os.close(handle)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"toast: {text}", file=sys.stderr, flush=True)
