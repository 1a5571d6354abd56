"""Reads regular files of limited size, and refuses pipes, devices and folders.

Opening a FIFO waits for a writer, and ``/dev/zero`` has no end.  Files are therefore opened without
waiting, and their kind is checked before they are read.
"""

from __future__ import annotations

import errno
import os
import pathlib
import stat

from toast.boundary.printable import shortened
from toast.errors import ToastError

#: The default limit of a file's size, in bytes.
LARGEST_BYTES = 2**30


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a regular file or a link to one; never raises an error."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(
    path: str | os.PathLike[str], error: type[ToastError], *, most: int = LARGEST_BYTES
) -> bytes:
    """The content of a regular file of at most ``most`` bytes.

    Raises ``error`` with one line, ``PATH: cannot read: REASON; check the path``.
    """
    reason = ""
    try:
        # O_NONBLOCK: otherwise opening a FIFO waits.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as stream:
            status = os.fstat(stream.fileno())
            if stat.S_ISDIR(status.st_mode):
                reason = "it is a folder"
            elif not stat.S_ISREG(status.st_mode):
                reason = "it is a pipe, a device or a socket, not a regular file"
            elif status.st_size > most:
                reason = too_large(status.st_size, most)
            else:
                data = stream.read(most + 1)
                if len(data) <= most:
                    return data
                reason = too_large(len(data), most)  # it grew, or the system reports no size
    except IsADirectoryError:
        reason = "it is a folder"
    except OSError as failure:
        # Sockets and devices without a driver cannot be opened.
        special = failure.errno in (errno.ENXIO, errno.ENODEV)
        reason = "it is not a regular file" if special else failure.strerror or str(failure)
    except ValueError:  # a NUL
        reason = "not a file name"
    raise error(f"{shown(path)}: cannot read: {reason}; check the path")


def read_text(
    path: str | os.PathLike[str],
    error: type[ToastError],
    *,
    most: int = LARGEST_BYTES,
    encoding: str = "utf-8",
) -> str:
    """The text of a regular file with UNIX line endings.

    ``most`` and ``error`` are those of :func:`read_bytes`; ``error`` is also raised for a file that
    is not text in ``encoding``.
    """
    data = read_bytes(path, error, most=most)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        raise error(f"{shown(path)}: cannot read: not text; check the path") from None
    return text.replace("\r\n", "\n")


def too_large(size: int, most: int) -> str:
    """The reason for refusing a file: ``3,000 bytes; the limit is 2,000``."""
    return f"{size:,} bytes; the limit is {most:,}"


def shown(path: str | os.PathLike[str]) -> str:
    """A path for a message: on one line, shortened if it is long."""
    return shortened(os.fspath(path))


def beside(file: str | os.PathLike[str], name: str) -> pathlib.Path | None:
    """The regular file in the folder of ``file`` that has the last part of ``name``, if any.

    An untrusted file may refer to other files only in this way: the folder part of ``name`` is
    ignored, and links that leave the folder are not followed.
    """
    folder = pathlib.Path(file).parent
    last = pathlib.PurePath(name).name
    path = folder / last
    return path if last and is_regular(path) and is_within(path, folder) else None


def is_within(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is in ``folder`` or below after resolving links; never raises an error."""
    try:
        return pathlib.Path(path).resolve().is_relative_to(pathlib.Path(folder).resolve())
    except (OSError, RuntimeError, ValueError):
        return False
