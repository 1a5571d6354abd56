"""The folders of data: ``rules/``, ``facts/`` and ``hardware/``.

A wheel contains them inside the package (``toast/_data``).  In a checkout, and so in an editable
install, they are the top-level folders.
"""

from __future__ import annotations

import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parent


def directory(name: str) -> pathlib.Path:
    """A folder of this installation: ``"rules"``, ``"facts"``, ``"hardware"`` or ``"docs"``."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
