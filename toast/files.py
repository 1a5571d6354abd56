"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile

from toast.errors import ToastError


def write_whole(path: str | pathlib.Path, text: str, error: type[ToastError]) -> None:
    """Write ``text`` to ``path`` by renaming a finished file into place.

    Raises ``error`` with the reason, leaving no partial file behind.
    """
    path = pathlib.Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as failure:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise error(f"{path}: cannot write: {failure.strerror}; check the folder") from None
