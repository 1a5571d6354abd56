"""All errors that a user can cause: one class per kind, one line per message.

A message states the problem, its place (file and line, op, axis or argument) and the remedy.
The command line prints only the message and exits with code 2.
"""

from __future__ import annotations

from typing import Any


class ToastError(Exception):
    """Base class of all errors in the input; the text is one line for the user.

    The remedy in ``message`` is for Python.  On the command line, ``shell`` replaces the part after
    the last semicolon.
    """

    def __init__(self, message: str = "", *, shell: str = "") -> None:
        super().__init__(message)
        self.shell = shell

    @property
    def in_shell(self) -> str:
        """The text for the command line."""
        text = str(self)
        return f"{text.rpartition('; ')[0]}; {self.shell}" if self.shell else text


class TargetError(ToastError):
    """The program to partition cannot be found, loaded, lowered or parsed."""


class AccumulationError(TargetError):
    """The program accumulates no gradients, so that its batch cannot be cut into microbatches."""


class FactError(ToastError):
    """A fact base uses an undeclared predicate, a wrong arity, or does not parse."""


class RuleError(ToastError):
    """A rule file does not parse, uses an undeclared predicate, or breaks a sanity relation."""


class QueryError(ToastError):
    """A query does not parse, uses an unknown predicate, or needs a plan but has none."""


class RuleWarning(UserWarning):
    """A suspicious part of a rule file, which may be intended."""


class ArgumentWarning(UserWarning):
    """An example argument has another type than the program computes with."""


class CacheWarning(UserWarning):
    """Something cannot be cached."""


class PlanWarning(UserWarning):
    """A plan may not be what the user wants: a default, a missing donation, a lack of memory."""


class MeshError(ToastError):
    """A mesh is invalid, or one of its axes divides no dimension of the program."""


class PinError(ToastError):
    """A constraint matches nothing, cannot hold, or contradicts another constraint."""


class HardwareError(ToastError):
    """A hardware description is unknown, incomplete or implausible."""


class SearchError(ToastError):
    """No plan satisfies the request, for example the memory limit, or a setting is invalid."""

    #: The plan that needs more memory than the user allows, if there is one.
    plan: Any = None
    #: The smallest peak that its search found, in bytes.
    smallest_peak: float = 0.0


class PlanError(ToastError):
    """A plan cannot be read, applied or run."""


class ExplainError(ToastError):
    """The dimension, argument or conflict to explain does not exist."""
