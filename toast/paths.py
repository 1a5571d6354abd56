"""Patterns of argument paths."""

from __future__ import annotations

import fnmatch


def matches(pattern: str, path: str) -> bool:
    """Whether a path such as ``params['layers'][3]['wq']`` is like a pattern.

    ``*`` stands for anything and ``?`` for one character; brackets are themselves.

    >>> matches("params*[3]['w?']", "params['layers'][3]['wq']")
    True
    """
    return fnmatch.fnmatchcase(path, pattern.replace("[", "[[]"))
