"""Patterns of argument paths."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable

#: Likeness of a path, from 0 to 1, from which on it is near a pattern; that of difflib.
_LIKE = 0.6


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


def near(pattern: str, paths: Iterable[str]) -> list[str]:
    """Up to three paths that somebody may have meant by a pattern that matches none.

    First those that it matches a part of, then those that have most of its letters in pieces of
    their own order, ``*`` left out, or a last key like its own.  Layers that are alike are there
    once.

    >>> near("params*wq", ["params['embedding']", "params['layers'][0]['wq']"])[0]
    "params['layers'][0]['wq']"
    >>> near("params.layers[*].q", ["params['layers'][0]['up']", "params['layers'][0]['wq']"])[0]
    "params['layers'][0]['wq']"
    """
    known = list(dict.fromkeys(paths))
    letters = re.sub(r"[*?]", "", pattern)
    glob = letters != pattern

    def likeness(path: str) -> float:
        if matches(f"*{pattern}*", path):
            return 2.0
        pieces = difflib.SequenceMatcher(None, letters, path, autojunk=False)
        if not glob:
            return pieces.ratio()
        # A single letter is anywhere.
        shared = sum(block.size for block in pieces.get_matching_blocks() if block.size > 1)
        return shared / max(len(letters), 1)

    last = re.sub(r"[*?]", "", _last_key(pattern))

    def ending(path: str) -> float:
        return difflib.SequenceMatcher(None, last, _last_key(path)).ratio()

    whole = {path: likeness(path) for path in known}
    ends = {path: ending(path) for path in known}
    alike: dict[str, str] = {}
    # Many paths may have one last key, as layers' kernels do: the others tell them apart.
    for path in sorted(known, key=lambda path: -whole[path] - ends[path]):
        if max(whole[path], ends[path]) >= _LIKE:
            alike.setdefault(re.sub(r"\[\d+\]", "[*]", path), path)
    return (list(alike.values()) or known)[:3]


def _last_key(path: str) -> str:
    """The last key that is no number."""
    return next((key for key in reversed(keys(path)) if not key.isdigit()), "")
