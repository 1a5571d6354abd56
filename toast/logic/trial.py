"""Grounds a program in a process of its own, to find out whether grounding ends.

Run as a script, by path: it must start fast and imports nothing of TOAST.  Reads JSON from its
standard input: ``files``, ``facts`` and ``atoms``, the limit.  Exits with 3 beyond it, else with 0;
errors of the program itself are left for the caller to find.
"""

from __future__ import annotations

import json
import os
import sys

import clingo

BEYOND = 3


class _Counter(clingo.Observer):  # type: ignore[misc]
    def __init__(self, limit: int) -> None:
        self._left = limit

    def rule(self, choice: bool, head: object, body: object) -> None:
        self._left -= 1
        if self._left < 0:
            os._exit(BEYOND)


def main() -> None:
    """Ground what standard input names."""
    given = json.load(sys.stdin)
    control = clingo.Control(logger=lambda _code, _text: None)
    control.register_observer(_Counter(given["atoms"]))
    try:
        for file in given["files"]:
            control.load(file)
        control.add("base", [], given["facts"])
        control.ground([("base", [])])
    except RuntimeError:
        pass


if __name__ == "__main__":
    main()
