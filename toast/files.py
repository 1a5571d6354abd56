"""Files: what they hold, and writing them whole or not at all."""

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

#: In place of a path: a command's standard output.
STANDARD = pathlib.Path("-")
#: The standard output, where a text goes to it.
_standard: contextvars.ContextVar[TextIO | None] = contextvars.ContextVar("standard", default=None)


@contextlib.contextmanager
def standard_output(paths: Iterable[object]) -> Iterator[None]:
    """Keep the standard output for the text of the path ``-``, if it is among ``paths``.

    What is printed meanwhile goes to the error stream.  Raises
    :class:`toast.errors.ToastError` where two texts would go there.
    """
    taken = [path for path in paths if path == STANDARD]
    if len(taken) > 1:
        raise ToastError("two outputs are '-', the standard output; write one of them to a file")
    if not taken:
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
    """Complain before the long work of paths that :func:`write_all` could not write.

    Raises ``error`` with the reason; ``None`` is no path.
    """
    seen: set[str] = set()
    for path in (pathlib.Path(p) for p in paths if p is not None):
        if _is_standard(path):
            continue
        if reason := _obstacle(path):
            raise error(f"{shown(path)}: cannot write: {reason}; check the folder")
        place = os.path.realpath(path)
        if place in seen and is_regular(place) | (not os.path.lexists(place)):
            raise error(f"{shown(path)}: two outputs have this name; give each a file of its own")
        seen.add(place)


def _obstacle(path: pathlib.Path) -> str:
    """Why a path cannot be written; empty where it can."""
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
        return "not a name of a file"
    return ""


def write_all(texts: Mapping[str | pathlib.Path, str], error: type[ToastError]) -> None:
    """Write each text to its path: every one is finished before the first takes its place.

    A file keeps its mode, and links are followed.  Devices and pipes are not replaced: they are
    written, as is, under :func:`standard_output`, the text of ``-``, after the files are in place.
    Raises ``error`` with the reason, leaving nothing half written behind.
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


#: Characters of a name that its unfinished file has: names have a limit.
_KEPT = 40


def _written(place: pathlib.Path, text: str) -> str:
    """A new file beside ``place`` with the text, and the mode that the finished one has."""
    temporary = str(place.with_name(f".{place.name[:_KEPT]}.{secrets.token_hex(6)}"))
    # The system takes the umask off the mode.
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
    """Write to the standard output, a device, or a pipe that somebody reads."""
    standard = _standard.get()
    if path == STANDARD and standard is not None:
        standard.write(text)
        standard.flush()
        return
    # A pipe that nobody reads would be waited for.
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(handle, "wb") as stream:
        os.set_blocking(stream.fileno(), True)
        stream.write(text.encode("utf-8", errors="backslashreplace"))


def is_plan(path: str | pathlib.Path) -> bool:
    """Whether a file has what plans begin with, damaged or not: by its content, not its name.

    A name that ends in ``.json`` is enough where the file is no JSON, or there is none.
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
