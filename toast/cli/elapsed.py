"""The line that a long command shows: what runs, for how long, and how long still.

Benchmarks show it, too (:func:`steps`).
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

_T = TypeVar("_T")

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
        #: The work that is counted, its number and total; its first number, when it began, and when
        #: its present part did.
        self._counted = ("", 0, 0)
        self._first = 0
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
            self._first = number
        elif number > self._counted[1]:
            self._part = self._clock()
        self._counted = work, number, total

    @property
    def left(self) -> float | None:
        """The seconds that the counted work will still take; None if that is unknown."""
        work, number, total = self._counted
        if number == self._first or not self._text.startswith(work):
            return None
        each = (self._part - self._since) / (number - self._first)
        return max(each * (total - number + 1) - (self._clock() - self._part), 0.0)

    def __str__(self) -> str:
        spent = self._clock() - self._begin
        if spent < _SHOWN_FROM:
            return self._text
        left = "" if self.left is None else f", about {_seconds(self.left)} left"
        return f"{self._text} ({_seconds(spent)}{left})"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(str(self), no_wrap=True, overflow="ellipsis")  # names are not markup


@contextlib.contextmanager
def elapsed() -> Iterator[Callable[[Any], None]]:
    """A function that shows a message on the error stream, as :meth:`ElapsedLine.show` takes it.

    A terminal has one line, which is renewed, and what is printed in the block above it.  A file
    gets a line for each message.
    """
    line, console = ElapsedLine(), Console(stderr=True)

    def show(event: Any) -> None:
        line.show(event)
        if not console.is_terminal:
            print(line, file=sys.stderr, flush=True)

    if not console.is_terminal:
        yield show
        return
    with Live(
        line, console=console, transient=True, refresh_per_second=2,
        redirect_stdout=sys.stdout.isatty(),
    ):  # fmt: skip
        yield show


def steps(items: Iterable[_T], name: Callable[[_T], str] = str) -> Iterator[_T]:
    """The items of a loop; the error stream shows the present one, and the time left.

    >>> for model in steps(["t2b", "unet"]):
    ...     pass
    """
    every = list(items)
    with elapsed() as show:
        for number, item in enumerate(every, 1):
            show(f"{number} of {len(every)}: {name(item)}")
            yield item


def _seconds(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02} min" if whole >= 60 else f"{whole} s"


__all__ = ["ElapsedLine", "elapsed", "steps"]
