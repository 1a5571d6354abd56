"""Where a page comes from: the version of TOAST, the date and the command."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shlex
from importlib import metadata
from typing import Any

from toast.plan import Plan


@dataclasses.dataclass(frozen=True)
class PageOrigin:
    """What a report says about its own origin."""

    #: As for a shell; empty for the command that makes the plan again.
    command: str = ""
    #: None for today, or the day of ``SOURCE_DATE_EPOCH`` if the environment has it.
    date: datetime.date | None = None

    def data(self, plan: Plan) -> dict[str, Any]:
        """The origin of a page on ``plan`` as plain data."""
        return {
            "version": metadata.version("toast-partitioner"),
            "date": str(self.date or _today()),
            "command": self.command or _command(plan),
        }


def _today() -> datetime.date:
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdecimal() and len(epoch) < 12:
        return datetime.datetime.fromtimestamp(int(epoch), datetime.UTC).date()
    return datetime.datetime.now(datetime.UTC).date()


def _command(plan: Plan) -> str:
    """The command that makes a plan again; empty for a plan that Python made."""
    if plan.origin is None:
        return ""
    hardware = plan.origin.hardware or plan.hardware.name
    words = ["toast", "plan", *plan.origin.words, "--mesh", str(plan.mesh), "--hardware", hardware]
    return shlex.join([*words, *(["--seed", str(plan.seed)] if plan.seed else [])])


__all__ = ["PageOrigin"]
