"""Writes output files atomically, and recognizes plan files."""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import pathlib
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TextIO

from toast.boundary.regular_files import is_regular, read_text, shown
from toast.errors import ToastError

#: The path that stands for a command's standard output.
STANDARD = pathlib.Path("-")
#: The standard output, while it is reserved for the text of a path ``-``.
_standard: contextvars.ContextVar[TextIO | None] = contextvars.ContextVar("standard", default=None)


@contextlib.contextmanager
def standard_output(paths: Iterable[object]) -> Iterator[None]:
    """A context that reserves the standard output for the path ``-``, if it is among ``paths``.

    In it, ``print`` writes to the error stream.  Raises :class:`toast.errors.ToastError` if two
    paths are ``-``.
    """
    count = sum(path == STANDARD for path in paths)
    if count > 1:
        raise ToastError("two outputs are '-', the standard output; write one of them to a file")
    if not count:
        yield
        return
    token = _standard.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _standard.reset(token)


def _is_standard(path: pathlib.Path) -> bool:
    return path == STANDARD and _standard.get() is not None


def check_writable(paths: Iterable[str | pathlib.Path | None], error: type[ToastError]) -> None:
    """Checks before a long computation that :func:`write_all` can write ``paths``.

    ``None`` is ignored.  Raises ``error`` with the reason if a path cannot be written.
    """
    places: set[str] = set()
    for path in (pathlib.Path(p) for p in paths if p is not None):
        if _is_standard(path):
            continue
        if reason := _obstacle(path):
            raise error(f"{shown(path)}: cannot write: {reason}; check the folder")
        place = os.path.realpath(path)
        if place in places and is_regular(place) | (not os.path.lexists(place)):
            raise error(f"{shown(path)}: two outputs have this name; write them to different files")
        places.add(place)


def _obstacle(path: pathlib.Path) -> str:
    """The reason why a path cannot be written; empty if it can."""
    try:
        place = pathlib.Path(os.path.realpath(path))
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(place).st_mode
            if stat.S_ISDIR(mode):
                return "is a folder"
            if not stat.S_ISREG(mode):
                return "" if os.access(place, os.W_OK) else "Permission denied"
        if not stat.S_ISDIR(os.stat(place.parent).st_mode):
            return "Not a directory"
        if not os.access(place.parent, os.W_OK | os.X_OK):
            return "Permission denied"
    except OSError as failure:
        return failure.strerror or str(failure)
    except ValueError:
        return "not a file name"
    return ""


def write_all(texts: Mapping[str | pathlib.Path, str], error: type[ToastError]) -> None:
    """Writes texts to paths: all new files are complete before the first one replaces an old file.

    A file keeps its mode, and links are followed.  Devices, pipes and, in :func:`standard_output`,
    the path ``-`` are written after that.

    Raises ``error`` with the reason if a path cannot be written; no partial file remains.
    """
    streamed: list[tuple[pathlib.Path, str]] = []
    finished: list[tuple[str, pathlib.Path]] = []
    path = pathlib.Path()
    try:
        for path, text in ((pathlib.Path(p), t) for p, t in texts.items()):
            place = pathlib.Path(os.path.realpath(path))
            if _is_standard(path) or (place.exists() and not is_regular(place)):
                if not _is_standard(path) and place.is_dir():
                    raise IsADirectoryError(0, "is a folder")
                streamed.append((path, text))
                continue
            finished.append((_written(place, text), place))
        for temporary, path in finished:
            os.replace(temporary, path)
        for path, text in streamed:
            _stream(path, text)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise error(f"{shown(path)}: cannot write: {reason}; check the folder") from None
    finally:
        for temporary, _ in finished:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


#: The characters of a file's name that are in the name of its temporary file; names are limited.
_NAME_START = 40


def _written(place: pathlib.Path, text: str) -> str:
    """Writes a temporary file beside ``place``, with its mode; returns its path."""
    temporary = str(place.with_name(f".{place.name[:_NAME_START]}.{secrets.token_hex(6)}"))
    # The system applies the umask to the mode.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text.encode("utf-8", errors="backslashreplace"))
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(place).st_mode))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _stream(path: pathlib.Path, text: str) -> None:
    """Writes to the standard output, a device, or a pipe with a reader."""
    standard = _standard.get()
    if path == STANDARD and standard is not None:
        standard.write(text)
        standard.flush()
        return
    # O_NONBLOCK: otherwise opening a pipe waits for a reader.
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(handle, "wb") as stream:
        os.set_blocking(stream.fileno(), True)
        stream.write(text.encode("utf-8", errors="backslashreplace"))


def is_plan(path: str | pathlib.Path) -> bool:
    """Whether a file is a plan, possibly a damaged one.

    A JSON object is a plan if it has the keys of plans.  Other files are plans if their name ends
    in ``.json``.
    """
    named = str(path).endswith(".json")
    if not is_regular(path):
        return named
    try:
        text = read_text(path, ToastError)
        # Other files are not parsed.
        data = json.loads(text) if text.lstrip()[:1] == "{" else None
    except (ToastError, ValueError, RecursionError):
        return named
    if not isinstance(data, dict):
        return named
    return {"version", "arguments"} <= data.keys() or named
