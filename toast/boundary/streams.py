"""The process's streams and working directory, as whoever started it left them.

A shell may start a command with a closed standard output, on a full disk, in a deleted folder or
under a locale without most characters.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Run a command line with streams that can be written, or that say that they cannot.

    At its end what was printed is flushed; where that fails, one line on the error stream says so
    and the exit code is 2.
    """
    _open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names need not be text, and a locale may lack the lines of tables.
            stream.reconfigure(errors="backslashreplace")
    _check_folder()
    try:
        yield
    finally:
        if failure := _flushed():
            _complain(f"cannot write to the standard output: {failure}")
            # After this exit code nothing else is left to say.
            sys.exit(2)


def _open_missing() -> None:
    """Open the streams that were closed: a file would get their numbers, and be printed to.

    What is written to the standard output fails then, as it should.
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
    """Why the standard output cannot be written; empty where it was."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()  # whoever read it has seen enough
    except (OSError, ValueError) as failure:
        _silence()
        return getattr(failure, "strerror", None) or str(failure)
    return ""


def _silence() -> None:
    """Let the interpreter's own flush at its end succeed."""
    with contextlib.suppress(OSError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, 1)
        os.close(handle)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"toast: {text}", file=sys.stderr, flush=True)
