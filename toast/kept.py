"""What is kept on disk between runs: entries under a key of all that they follow from.

An entry holds JSON and arrays under a checksum of both and of their key; one that does not agree is
as good as none.  ``TOAST_CACHE=off`` turns it off.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from toast.errors import CacheWarning

#: What a folder may hold; the entries that were not used for longest go first.
_LARGEST_BYTES = 256 * 2**20
_CHECKSUM_BYTES = 32

#: The JSON of an entry, among its arrays.
_TEXT = "text"

#: What reading a damaged entry, or making something of it, may raise.
DAMAGE = (OSError, ValueError, KeyError, TypeError, IndexError)

#: Arrays of numbers by name.
Arrays = Mapping[str, Any]


def enabled() -> bool:
    """Whether entries may be kept and used."""
    return os.environ.get("TOAST_CACHE", "").lower() not in ("off", "0", "no")


def folder(kind: str) -> pathlib.Path:
    """Where entries are: ``$XDG_CACHE_HOME/toast/KIND`` or ``~/.cache/toast/KIND``.

    Raises OSError where there is no home folder.
    """
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return home.expanduser() / "toast" / kind
    except RuntimeError:
        raise OSError(errno.ENOENT, "no home folder; set XDG_CACHE_HOME") from None


def digest(parts: Iterable[bytes | str]) -> bytes:
    """A key of contents, in their order."""
    found = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        # Names of files need not be text.
        data = os.fsencode(part) if isinstance(part, str) else part
        found.update(len(data).to_bytes(8) + data)
    return found.digest()


def digest_of_files(files: Iterable[pathlib.Path]) -> bytes:
    """A key of the names and contents of files; raises OSError where one cannot be read."""
    return digest(part for file in files for part in (str(file), file.read_bytes()))


def load(kind: str, key: bytes) -> tuple[Any, dict[str, Any]] | None:
    """The JSON and the arrays of an entry; None where there is none, or a damaged one."""
    with contextlib.suppress(*DAMAGE):
        path = _path(kind, key)
        data = path.read_bytes()
        content = data[_CHECKSUM_BYTES:]
        if data[:_CHECKSUM_BYTES] != _checksum(key, content):
            return None
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        plain = json.loads(arrays.pop(_TEXT).tobytes())
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: kept longest
        return plain, arrays
    return None


def keep(kind: str, key: bytes, plain: Any, arrays: Arrays, what: str) -> None:
    """Write an entry, whole or not at all, and drop what there is too much of.

    Where it cannot be written, a :class:`toast.errors.CacheWarning` names ``what`` is not kept.
    """
    stream = io.BytesIO()
    text = np.frombuffer(json.dumps(plain).encode(), dtype=np.uint8)
    np.savez(stream, allow_pickle=False, **arrays, **{_TEXT: text})
    content = stream.getvalue()
    temporary = ""
    try:
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(_checksum(key, content) + content)
        os.replace(temporary, path)
        _prune(path.parent)
    except OSError as failure:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        where = failure.filename or kind
        warnings.warn(
            f"{where}: the {what} cannot be kept for the next time: {failure.strerror}; "
            "TOAST_CACHE=off stops trying",
            CacheWarning, stacklevel=3,
        )  # fmt: skip


def small(array: Any) -> Any:
    """Numbers in 32 bits, where all of them fit."""
    fits = array.dtype != bool and np.abs(array).max(initial=0) < 2**31
    return array.astype(np.int32) if fits else array


def _path(kind: str, key: bytes) -> pathlib.Path:
    return folder(kind) / f"{key.hex()}.toast"


def _checksum(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, key=key, digest_size=_CHECKSUM_BYTES).digest()


def _prune(where: pathlib.Path) -> None:
    """Drop the entries that were not used for longest, until the rest is small enough."""
    found = []
    for path in where.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = 0
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > _LARGEST_BYTES:
            with contextlib.suppress(OSError):
                path.unlink()
