"""Ranges of the runs of a block: ``layer[:12]`` are the first twelve, ``layer[12:]`` the others."""

from __future__ import annotations

import dataclasses
import math
import re

from toast.errors import TargetError

_RANGE = re.compile(r"(.*)\[(\d*):(\d*)\]")


@dataclasses.dataclass(frozen=True)
class RunRange:
    """Runs of a block, by their numbers in the forward pass."""

    #: The name of the block, or a pattern.
    block: str
    first: int = 0
    #: The number after the last; infinite for all further runs.
    end: float = math.inf

    @staticmethod
    def parse(text: str) -> RunRange:
        """The runs of a text: ``layer``, ``layer[:12]``, ``layer[4:12]``, ``layer[12:]``.

        Raises :class:`toast.errors.TargetError` for a range without runs.
        """
        match = _RANGE.fullmatch(text)
        if match is None:
            return RunRange(text)
        block, first, end = match.groups()
        runs = RunRange(block, int(first or 0), float(end or math.inf))
        if runs.first >= runs.end:
            raise TargetError(
                f"remat {text}: has no runs; write {block}[:N] for the first N runs of {block}, "
                f"and {block}[N:] for the others"
            )
        return runs

    @property
    def is_part(self) -> bool:
        """Whether there are other runs."""
        return self.first > 0 or self.end < math.inf

    def includes(self, other: RunRange) -> bool:
        """Whether all runs of another range, of the same block, are in it."""
        return self.first <= other.first and other.end <= self.end

    def cut(self, cuts: tuple[int, ...]) -> list[RunRange]:
        """The ranges between ``cuts``, which are sorted."""
        inside = [cut for cut in cuts if self.first < cut < self.end]
        firsts, ends = [self.first, *inside], [*map(float, inside), self.end]
        return [RunRange(self.block, *edges) for edges in zip(firsts, ends, strict=True)]

    def __str__(self) -> str:
        if not self.is_part:
            return self.block
        end = f"{self.end:.0f}" if self.end < math.inf else ""
        return f"{self.block}[{self.first or ''}:{end}]"


__all__ = ["RunRange"]
