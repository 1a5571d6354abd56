"""Every error a user can cause: one class per kind, one line per message.

A message says what is wrong, where it is (file:line, op, axis or argument) and what to do.
The command line prints the message alone and exits with code 2.
"""

from __future__ import annotations


class ToastError(Exception):
    """Base of all errors that are the input's fault; the text is one line for the user.

    It speaks of Python; ``shell`` is the remedy in words of the command line, which stands there in
    place of what is behind the last semicolon.
    """

    def __init__(self, message: str = "", *, shell: str = "") -> None:
        super().__init__(message)
        self.shell = shell

    @property
    def in_shell(self) -> str:
        """The text for who is on the command line."""
        text = str(self)
        return f"{text.rpartition('; ')[0]}; {self.shell}" if self.shell else text


class TargetError(ToastError):
    """The program to partition cannot be found, loaded, lowered or parsed."""


class FactError(ToastError):
    """A fact base uses an undeclared predicate, a wrong arity, or does not parse."""


class RuleError(ToastError):
    """A rule file does not parse, uses an undeclared predicate, or breaks a sanity relation."""


class QueryError(ToastError):
    """A query does not parse, uses an unknown predicate, or needs a plan that is not there."""


class RuleWarning(UserWarning):
    """Something odd in a rule file, which may be meant."""


class ArgumentWarning(UserWarning):
    """An example argument is not what the program computes with."""


class CacheWarning(UserWarning):
    """Something cannot be kept for the next time."""


class MeshError(ToastError):
    """A mesh does not parse, or an axis fits no dimension of the program."""


class PinError(ToastError):
    """A sharding that the user fixes matches nothing, cannot be, or contradicts another."""


class HardwareError(ToastError):
    """A hardware description is unknown, incomplete or implausible."""


class SearchError(ToastError):
    """No plan satisfies what was asked, e.g. an impossible memory limit."""


class PlanError(ToastError):
    """A plan cannot be applied or executed as asked."""


class ExplainError(ToastError):
    """A dimension, an argument or a conflict that is asked about does not exist."""
