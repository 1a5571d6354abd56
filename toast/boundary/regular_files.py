"""Files that are read: regular ones of a bounded size, never a pipe, a device or a folder.

Opening a FIFO waits for a writer, and ``/dev/zero`` has no end.  A file is opened without waiting,
and is looked at before anything of it is read.
"""

from __future__ import annotations

import errno
import os
import pathlib
import stat

from toast.boundary.printable import shortened
from toast.errors import ToastError

#: The largest file that is read where a caller names no other limit, in bytes.
LARGEST_BYTES = 2**30


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a regular file, or a link to one; no error whatever it is."""
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
        # Without waiting: the open of a FIFO would.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as stream:
            status = os.fstat(stream.fileno())
            if stat.S_ISDIR(status.st_mode):
                reason = "it is a folder"
            elif not stat.S_ISREG(status.st_mode):
                reason = "it is a pipe, a device or a socket, no regular file"
            elif status.st_size > most:
                reason = too_large(status.st_size, most)
            else:
                data = stream.read(most + 1)
                if len(data) <= most:
                    return data
                reason = too_large(len(data), most)  # it grew, or the system says no size
    except IsADirectoryError:
        reason = "it is a folder"
    except OSError as failure:
        # A socket, or a device without a driver, cannot even be opened.
        special = failure.errno in (errno.ENXIO, errno.ENODEV)
        reason = "it is no regular file" if special else failure.strerror or str(failure)
    except ValueError:  # a NUL
        reason = "not a name of a file"
    raise error(f"{shown(path)}: cannot read: {reason}; check the path")


def read_text(
    path: str | os.PathLike[str],
    error: type[ToastError],
    *,
    most: int = LARGEST_BYTES,
    encoding: str = "utf-8",
) -> str:
    """The text of a regular file, with the ends of lines of UNIX; raises as :func:`read_bytes`."""
    data = read_bytes(path, error, most=most)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        raise error(f"{shown(path)}: cannot read: not text; check the path") from None
    return text.replace("\r\n", "\n")


def too_large(size: int, most: int) -> str:
    """Why a file is not read: ``3,000 bytes, more than 2,000``."""
    return f"{size:,} bytes, more than the {most:,} that are read"


def shown(path: str | os.PathLike[str]) -> str:
    """A path for a message: on one line, and not too long."""
    return shortened(os.fspath(path))


def beside(file: str | os.PathLike[str], name: str) -> pathlib.Path | None:
    """The regular file that lies in the folder of ``file`` and has the name that ``name`` ends in.

    This is how a file that came from elsewhere may name another one: no other folder is looked at,
    and no link out of this one is followed.
    """
    folder = pathlib.Path(file).parent
    last = pathlib.PurePath(name).name
    found = folder / last
    return found if last and is_regular(found) and is_within(found, folder) else None


def is_within(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether ``path``, its links followed, lies in ``folder`` or below; no error otherwise."""
    try:
        return pathlib.Path(path).resolve().is_relative_to(pathlib.Path(folder).resolve())
    except (OSError, RuntimeError, ValueError):
        return False
