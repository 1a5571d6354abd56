"""The cache on disk: entries with keys that are digests of everything they depend on.

An entry contains JSON and arrays, and a checksum of both and of the key.  An entry with a wrong
checksum is ignored.  ``TOAST_CACHE=off`` disables the cache.
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
from toast.boundary.typed import Misfit
from toast.errors import CacheWarning, ToastError

#: The limit of a folder's size; the least recently used entries are removed first.
_LARGEST_BYTES = 256 * 2**20
_CHECKSUM_BYTES = 32

#: The name of the JSON of an entry among its arrays.
_TEXT = "text"

#: The errors that reading or using a damaged entry may raise.
DAMAGE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError,
    MemoryError, RecursionError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error,
    ToastError, Misfit,
)  # fmt: skip

#: Numpy arrays by name.
Arrays = Mapping[str, Any]


def enabled() -> bool:
    """Whether the cache is enabled."""
    return os.environ.get("TOAST_CACHE", "").lower() not in ("off", "0", "no")


def folder(kind: str) -> pathlib.Path:
    """The folder of the entries of a kind, in the user's cache folder.

    On Linux the cache folder is ``$XDG_CACHE_HOME/toast`` or ``~/.cache/toast``.  Raises OSError if
    the user has no home folder.
    """
    path = platformdirs.user_cache_path("toast", appauthor=False)
    if not path.is_absolute():  # the ~ was not expanded
        raise OSError(errno.ENOENT, "no home folder; set XDG_CACHE_HOME")
    return path / kind


def digest(parts: Iterable[bytes | str]) -> bytes:
    """The key of an entry that depends on ``parts``, in their order."""
    state = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        # File names may not be text.
        data = os.fsencode(part) if isinstance(part, str) else part
        state.update(len(data).to_bytes(8) + data)
    return state.digest()


def digest_of_files(files: Iterable[pathlib.Path]) -> bytes:
    """A digest of the names and contents of files; raises OSError if one cannot be read."""

    def content(file: pathlib.Path) -> bytes:
        try:
            return read_bytes(file, ToastError)
        except ToastError as error:
            raise OSError(errno.EINVAL, str(error)) from None

    return digest(part for file in files for part in (str(file), content(file)))


def load(kind: str, key: bytes) -> tuple[Any, dict[str, Any]] | None:
    """The JSON and the arrays of an entry; None if it is missing, damaged or forged."""
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
            os.utime(path)  # the most recently used entry
        return plain, arrays
    return None


def _arrays(content: bytes) -> dict[str, Any]:
    """The arrays of an entry; their sizes are checked, as a forged header may claim terabytes."""
    arrays = {}
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
            arrays[member.filename.removesuffix(".npy")] = array.reshape(shape, order=order)
    return arrays


def _secret(*, make: bool) -> bytes:
    """The key that signs the entries of this user, so that entries of others are ignored.

    With ``make``, a missing key is created.  Raises OSError if there is no key, or if other users
    can access its file.
    """
    place = folder("key")
    if make and not os.path.lexists(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".key.{secrets.token_hex(6)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_CHECKSUM_BYTES))
        try:
            # If another process was faster, its key is used.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, place)
        finally:
            os.unlink(temporary)
    status = os.lstat(place)
    owned = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    if not stat.S_ISREG(status.st_mode) or not owned or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "other users can access its key; remove it", str(place))
    return place.read_bytes()


def keep(kind: str, key: bytes, plain: Any, arrays: Arrays, what: str) -> None:
    """Writes an entry atomically, and removes old entries beyond the size limit.

    :param kind: the folder of the entry.
    :param key: its key (:func:`digest`).
    :param plain: its JSON data.
    :param arrays: its arrays.
    :param what: the name of its content in the :class:`toast.errors.CacheWarning` that is issued
        if it cannot be written.
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


def numbers(array: Any, shape: tuple[int, ...], end: int | None = None, *, least: int = 0) -> Any:
    """Whole numbers of an entry in 64 bits, of this shape (-1: any length), below ``end`` if given.

    Raises ValueError where they are none.
    """
    if array.dtype.kind != "i" or len(array.shape) != len(shape):
        raise ValueError("no numbers")
    if any(wanted not in (-1, size) for wanted, size in zip(shape, array.shape, strict=True)):
        raise ValueError(f"of shape {array.shape}")
    if end is not None and array.size and not (least <= array.min() and array.max() < end):
        raise ValueError("out of range")
    return array.astype(np.int64)


def small(array: Any) -> Any:
    """``array`` with 32-bit integers if all its numbers fit."""
    fits = array.dtype != bool and np.abs(array).max(initial=0) < 2**31
    return array.astype(np.int32) if fits else array


def _path(kind: str, key: bytes) -> pathlib.Path:
    return folder(kind) / f"{key.hex()}.toast"


def _checksum(secret: bytes, key: bytes, content: bytes) -> bytes:
    signed = hashlib.blake2b(secret + key, digest_size=_CHECKSUM_BYTES).digest()
    return hashlib.blake2b(content, key=signed, digest_size=_CHECKSUM_BYTES).digest()


def _prune(where: pathlib.Path) -> None:
    """Removes the least recently used entries until the rest is small enough."""
    entries = []
    for path in where.iterdir():
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            entries.append((status.st_mtime, status.st_size, path))
    total = 0
    for _, size, path in sorted(entries, reverse=True):
        total += size
        if total > _LARGEST_BYTES:
            with contextlib.suppress(OSError):
                path.unlink()
