"""Lines of the source files in the locations of ops."""

from __future__ import annotations

import contextlib
import pathlib

from toast.boundary.printable import printable
from toast.boundary.regular_files import is_within, read_text
from toast.errors import ToastError

#: Source files larger than this are not quoted.
_LARGEST_BYTES = 2**24


class SourceLines:
    """Reads lines of source files.

    For a program that was ``traced`` in this process, every file is read.  A program from a file
    may name any file of the reader, such as ``~/.ssh/id_ed25519``; for such a program only files
    below ``folder`` are read, and none if it is ``None``.
    """

    def __init__(self, folder: pathlib.Path | None, *, traced: bool) -> None:
        self._folder, self._traced = folder, traced
        self._files: dict[str, list[str]] = {}

    def line(self, file: str, number: int) -> str:
        """A line, counted from 1; empty if it must not be quoted or does not exist."""
        if file not in self._files:
            self._files[file] = self._read(file)
        lines = self._files[file]
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def _read(self, file: str) -> list[str]:
        path = pathlib.Path(file)
        if self._folder is not None:
            path = self._folder / file
        # Links are resolved: their targets must be below the folder too.
        if not self._traced and (self._folder is None or not is_within(path, self._folder)):
            return []
        with contextlib.suppress(ToastError):
            text = read_text(path, ToastError, most=_LARGEST_BYTES)
            return [printable(line) for line in text.split("\n")]
        return []
