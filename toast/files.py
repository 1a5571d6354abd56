"""Files: what they hold, and writing them whole or not at all."""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import TextIO

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
        raise ToastError("two outputs are '-', the standard output; give one of them a file")
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
    for path in (pathlib.Path(p) for p in paths if p is not None):
        if _is_standard(path):
            continue
        reason = ""
        if path.is_dir():
            reason = "is a folder"
        elif not path.parent.exists():
            reason = "No such file or directory"
        elif not path.parent.is_dir():
            reason = "Not a directory"
        elif not os.access(path.parent, os.W_OK | os.X_OK):
            reason = "Permission denied"
        if reason:
            raise error(f"{path}: cannot write: {reason}; check the folder")


def write_all(texts: Mapping[str | pathlib.Path, str], error: type[ToastError]) -> None:
    """Write each text to its path: every one is finished before the first takes its place.

    Under :func:`standard_output`, the text of ``-`` is printed, after the others are in place.
    Raises ``error`` with the reason, leaving nothing half written behind.
    """
    printed = ""
    finished: list[tuple[str, pathlib.Path]] = []
    path = pathlib.Path()
    try:
        for path, text in ((pathlib.Path(p), t) for p, t in texts.items()):
            if _is_standard(path):
                printed = text
                continue
            if path.is_dir():
                raise IsADirectoryError(0, "is a folder")
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            finished.append((temporary, path))
            with os.fdopen(handle, "w") as stream:
                stream.write(text)
            os.chmod(temporary, 0o644)
        for temporary, path in finished:
            os.replace(temporary, path)
        standard = _standard.get()
        if printed and standard is not None:
            standard.write(printed)
            standard.flush()
    except OSError as failure:
        raise error(f"{path}: cannot write: {failure.strerror}; check the folder") from None
    finally:
        for temporary, _ in finished:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def is_plan(path: str | pathlib.Path) -> bool:
    """Whether a file has what plans begin with, damaged or not: by its content, not its name.

    A name that ends in ``.json`` is enough where the file is no JSON, or there is none.
    """
    named = str(path).endswith(".json")
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        # Other files are not parsed.
        data = json.loads(text) if text.lstrip()[:1] == "{" else None
    except (OSError, ValueError, RecursionError):
        return named
    if not isinstance(data, dict):
        return named
    return {"version", "arguments"} <= data.keys() or named
