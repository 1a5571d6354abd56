"""Lines of source files that a program names as the places of its ops."""

from __future__ import annotations

import contextlib
import pathlib

from toast.boundary.printable import printable
from toast.boundary.regular_files import is_within, read_text
from toast.errors import ToastError

#: Source files larger than this are not quoted.
_LARGEST_BYTES = 2**24


class SourceLines:
    """Lines of files: all of a program that was ``traced`` in this process.

    A program that comes from a file may name any file of its reader's, ``~/.ssh/id_ed25519`` too.
    So of such a program only files below ``folder`` are read, and none where that is ``None``.
    """

    def __init__(self, folder: pathlib.Path | None, *, traced: bool) -> None:
        self._folder, self._traced = folder, traced
        self._files: dict[str, list[str]] = {}

    def line(self, file: str, number: int) -> str:
        """A line, counted from 1; empty where it must not be quoted, or is not there."""
        if file not in self._files:
            self._files[file] = self._read(file)
        lines = self._files[file]
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def _read(self, file: str) -> list[str]:
        path = pathlib.Path(file)
        if self._folder is not None:
            path = self._folder / file
        # Links are followed: what they lead to must lie below the folder as well.
        if not self._traced and (self._folder is None or not is_within(path, self._folder)):
            return []
        with contextlib.suppress(ToastError):
            text = read_text(path, ToastError, most=_LARGEST_BYTES)
            return [printable(line) for line in text.split("\n")]
        return []
