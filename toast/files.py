"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Mapping

from toast.errors import ToastError


def write_all(texts: Mapping[str | pathlib.Path, str], error: type[ToastError]) -> None:
    """Write each text to its path: every one is finished before the first takes its place.

    Raises ``error`` with the reason, leaving nothing half written behind.
    """
    finished: list[tuple[str, pathlib.Path]] = []
    path = pathlib.Path()
    try:
        for path, text in ((pathlib.Path(p), t) for p, t in texts.items()):
            if path.is_dir():
                raise IsADirectoryError(0, "is a folder")
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            finished.append((temporary, path))
            with os.fdopen(handle, "w") as stream:
                stream.write(text)
            os.chmod(temporary, 0o644)
        for temporary, path in finished:
            os.replace(temporary, path)
    except OSError as failure:
        raise error(f"{path}: cannot write: {failure.strerror}; check the folder") from None
    finally:
        for temporary, _ in finished:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
