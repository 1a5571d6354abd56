"""Patterns of argument paths."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable

#: The least similarity, from 0 to 1, of a path that is close to a pattern; the default of difflib.
_LIKE = 0.6


def matches(pattern: str, path: str) -> bool:
    """Whether a path such as ``params['layers'][3]['wq']`` matches a pattern.

    ``*`` stands for any text and ``?`` for one character; brackets stand for themselves.  Keys may
    be written with dots: ``params.layers[*].wq``.

    >>> matches("params*[3]['w?']", "params['layers'][3]['wq']")
    True
    >>> matches("params.layers[*].wq", "params['layers'][3]['wq']")
    True
    """
    if fnmatch.fnmatchcase(path, pattern.replace("[", "[[]")):
        return True
    return "." in pattern and fnmatch.fnmatchcase(".".join(keys(path)), ".".join(keys(pattern)))


def is_pattern(text: str) -> bool:
    """Whether a text has wildcards, so that it may match several paths."""
    return "*" in text or "?" in text


#: A path whose keys are joined by dots, as those of PyTorch are, and its numbers.
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_DOTTED_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def folded(path: str) -> str:
    """A path, or a text with one, with ``*`` for list positions.

    >>> folded("params['layers'][3]['wq']")
    "params['layers'][*]['wq']"
    >>> folded("layers.3.attention.wq.weight")
    'layers.*.attention.wq.weight'
    """
    bracketed = re.sub(r"\[\d+\]", "[*]", path)
    return _DOTTED.sub(lambda match: _DOTTED_NUMBER.sub("*", match[0]), bracketed)


def list_positions(path: str) -> list[tuple[str, str]]:
    """The list positions in a path, each after the path of its list.

    >>> list_positions("layers.3.experts.0.weight")
    [('layers', '3'), ('layers.*.experts', '0')]
    """
    return [
        (folded(path[: match.start()].removesuffix(".")), match[1] or match[2])
        for match in re.finditer(r"\[(\d+)\]|(?<=\.)(\d+)(?=\.)", path)
    ]


@functools.lru_cache(maxsize=1 << 16)
def keys(path: str) -> tuple[str, ...]:
    """The keys of a path; equal for ``params['layers'][0]`` and ``params.layers[0]``."""
    return tuple(part for part in re.split(r"[.\[\]'\"]+", path) if part)


def near(pattern: str, paths: Iterable[str]) -> list[str]:
    """Up to three suggestions of paths for a pattern that matches none.

    First come paths of which the pattern matches a part.  Then come those with most of its
    characters in the same order (without ``*``), or with a similar last key.  Of paths that differ
    only in indices, one is listed.

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
        # A match of a single character means nothing.
        shared = sum(block.size for block in pieces.get_matching_blocks() if block.size > 1)
        return shared / max(len(letters), 1)

    last = re.sub(r"[*?]", "", _last_key(pattern))

    def ending(path: str) -> float:
        return difflib.SequenceMatcher(None, last, _last_key(path)).ratio()

    whole = {path: likeness(path) for path in known}
    ends = {path: ending(path) for path in known}
    alike: dict[str, str] = {}
    # Many paths may have one last key, such as ``kernel``; the other keys distinguish them.
    for path in sorted(known, key=lambda path: -whole[path] - ends[path]):
        if max(whole[path], ends[path]) >= _LIKE:
            alike.setdefault(folded(path), path)
    return (list(alike.values()) or known)[:3]


def _last_key(path: str) -> str:
    """The last key that is not a number."""
    return next((key for key in reversed(keys(path)) if not key.isdigit()), "")
