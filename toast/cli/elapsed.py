"""The line that a long command shows at a terminal: what runs, for how long, and how long still."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

#: Times are shown from this many seconds on.
_SHOWN_FROM = 3.0

#: What tells how far the work is: ``mesh 3 of 28``.
_COUNT = re.compile(r"(\d+) of (\d+)")


class ElapsedLine:
    """A line that Rich renders anew several times a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._text = "starting"
        #: The work that is counted, its number and total; when it began, and its present part.
        self._counted = ("", 0, 0)
        self._since = self._part = self._begin

    def show(self, event: Any) -> None:
        """Show a message, or a :class:`toast.search.Round`."""
        if not isinstance(event, str):
            what = f"search: round {event.number + 1}"
            if getattr(event, "searches", 1) > 1:
                what = f"search {event.search} of {event.searches}"
            event = f"{what}, {event.states} states, best cost {event.cost:.4g}"
        self._text = event
        count = _COUNT.search(event)
        if not count:
            return
        work, number, total = event[: count.start()], int(count[1]), int(count[2])
        if (work, total) != (self._counted[0], self._counted[2]) or number < self._counted[1]:
            self._since = self._part = self._clock()
        elif number > self._counted[1]:
            self._part = self._clock()
        self._counted = work, number, total

    @property
    def left(self) -> float | None:
        """The seconds that the counted work will still take; None if that is unknown."""
        work, number, total = self._counted
        if number < 2 or not self._text.startswith(work):
            return None
        each = (self._part - self._since) / (number - 1)
        return max(each * (total - number + 1) - (self._clock() - self._part), 0.0)

    def __str__(self) -> str:
        spent = self._clock() - self._begin
        if spent < _SHOWN_FROM:
            return self._text
        left = "" if self.left is None else f", about {_seconds(self.left)} left"
        return f"{self._text} ({_seconds(spent)}{left})"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(str(self), no_wrap=True, overflow="ellipsis")  # names are not markup


def _seconds(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02} min" if whole >= 60 else f"{whole} s"


__all__ = ["ElapsedLine"]
