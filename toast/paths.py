"""Patterns of argument paths."""

from __future__ import annotations

import fnmatch
import functools
import re


def matches(pattern: str, path: str) -> bool:
    """Whether a path such as ``params['layers'][3]['wq']`` is like a pattern.

    ``*`` stands for anything and ``?`` for one character; brackets are themselves.  Keys may be
    written with points: ``params.layers[*].wq``.

    >>> matches("params*[3]['w?']", "params['layers'][3]['wq']")
    True
    >>> matches("params.layers[*].wq", "params['layers'][3]['wq']")
    True
    """
    if fnmatch.fnmatchcase(path, pattern.replace("[", "[[]")):
        return True
    return "." in pattern and fnmatch.fnmatchcase(".".join(keys(path)), ".".join(keys(pattern)))


def is_pattern(text: str) -> bool:
    """Whether :func:`matches` may hold of more than one path."""
    return "*" in text or "?" in text


@functools.lru_cache(maxsize=1 << 16)
def keys(path: str) -> tuple[str, ...]:
    """The keys of a path, the same of ``params['layers'][0]`` and ``params.layers[0]``."""
    return tuple(part for part in re.split(r"[.\[\]'\"]+", path) if part)
