"""What is kept on disk between runs: entries under a key of all that they follow from.

An entry holds JSON and arrays under a checksum of both and of their key; one that does not agree is
as good as none.  ``TOAST_CACHE=off`` turns it off.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import io
import json
import math
import os
import pathlib
import secrets
import stat
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import platformdirs

from toast.boundary.regular_files import read_bytes
from toast.errors import CacheWarning, ToastError

#: What a folder may hold; the entries that were not used for longest go first.
_LARGEST_BYTES = 256 * 2**20
_CHECKSUM_BYTES = 32

#: The JSON of an entry, among its arrays.
_TEXT = "text"

#: What reading a damaged entry, or making something of it, may raise.
DAMAGE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError,
    MemoryError, RecursionError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error,
    ToastError,
)  # fmt: skip

#: Arrays of numbers by name.
Arrays = Mapping[str, Any]


def enabled() -> bool:
    """Whether entries may be kept and used."""
    return os.environ.get("TOAST_CACHE", "").lower() not in ("off", "0", "no")


def folder(kind: str) -> pathlib.Path:
    """Where entries of a kind are: a folder of the user's cache.

    That is ``$XDG_CACHE_HOME/toast`` or ``~/.cache/toast`` on Linux, and where other systems have
    it.  Raises OSError where there is no home folder.
    """
    path = platformdirs.user_cache_path("toast", appauthor=False)
    if not path.is_absolute():  # the ~ is still there
        raise OSError(errno.ENOENT, "no home folder; set XDG_CACHE_HOME")
    return path / kind


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

    def content(file: pathlib.Path) -> bytes:
        try:
            return read_bytes(file, ToastError)
        except ToastError as error:
            raise OSError(errno.EINVAL, str(error)) from None

    return digest(part for file in files for part in (str(file), content(file)))


def load(kind: str, key: bytes) -> tuple[Any, dict[str, Any]] | None:
    """The JSON and the arrays of an entry; None where there is none, or a damaged or forged one."""
    with contextlib.suppress(*DAMAGE):
        path = _path(kind, key)
        data = read_bytes(path, ToastError, most=_LARGEST_BYTES)
        content = data[_CHECKSUM_BYTES:]
        expected = _checksum(_secret(make=False), key, content)
        if not hmac.compare_digest(data[:_CHECKSUM_BYTES], expected):
            return None
        arrays = _arrays(content)
        plain = json.loads(arrays.pop(_TEXT).tobytes())
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: kept longest
        return plain, arrays
    return None


def _arrays(content: bytes) -> dict[str, Any]:
    """The arrays of an entry, each as large as its bytes: a header may promise terabytes."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(content)) as members:
        for member in members.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(content):
                raise ValueError("not as it was written")
            stream = io.BytesIO(members.read(member))
            if np.lib.format.read_magic(stream) != (1, 0):
                raise ValueError("not as it was written")
            shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
            rest = bytearray(stream.read())
            if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(rest):
                raise ValueError("not as it was written")
            array = np.frombuffer(rest, dtype=dtype)
            order: Any = "F" if by_column else "C"
            found[member.filename.removesuffix(".npy")] = array.reshape(shape, order=order)
    return found


def _secret(*, make: bool) -> bytes:
    """What only this user's entries are signed with.

    In a folder that others may write, entries of theirs are no good.  Raises OSError where there is
    none, and where its file is not the user's alone.
    """
    place = folder("key")
    if make and not os.path.lexists(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".key.{secrets.token_hex(6)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_CHECKSUM_BYTES))
        try:
            # Another process may have been faster; its key holds.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, place)
        finally:
            os.unlink(temporary)
    status = os.lstat(place)
    owned = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if not stat.S_ISREG(status.st_mode) or not owned or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "its key is not this user's alone; remove it", str(place))
    return place.read_bytes()


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
        secret = _secret(make=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(_checksum(secret, key, content) + content)
        os.replace(temporary, path)
        _prune(path.parent)
    except OSError as failure:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        where = failure.filename or kind
        warnings.warn(
            f"{where}: the {what} cannot be cached: {failure.strerror}; "
            "set TOAST_CACHE=off to disable the cache",
            CacheWarning, stacklevel=3,
        )  # fmt: skip


def small(array: Any) -> Any:
    """Numbers in 32 bits, where all of them fit."""
    fits = array.dtype != bool and np.abs(array).max(initial=0) < 2**31
    return array.astype(np.int32) if fits else array


def _path(kind: str, key: bytes) -> pathlib.Path:
    return folder(kind) / f"{key.hex()}.toast"


def _checksum(secret: bytes, key: bytes, content: bytes) -> bytes:
    signed = hashlib.blake2b(secret + key, digest_size=_CHECKSUM_BYTES).digest()
    return hashlib.blake2b(content, key=signed, digest_size=_CHECKSUM_BYTES).digest()


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
