"""Plain records, and those of their methods that later stages provide.

``Program``, ``Analysis``, ``Plan`` and the explanations are records: data, and what follows from it
in a line.  How they are explained, shown and searched is the business of later stages, which import
the records; no record imports them.  Such a method has its signature and its documentation in the
record, and :func:`late` calls the function that does the work::

    @late
    def why_not(self, argument: str, spec: Any) -> WhyNot:
        "..."
        raise NotImplementedError

:mod:`toast` says when it is imported where these functions are; the module of one is imported at
its first call.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: ``module:function`` of each method, by its qualified name.
_PROVIDERS: dict[str, str] = {}


def provide(functions: Mapping[str, str]) -> None:
    """Say which functions are the methods of records.

    ``functions`` are written as ``module:function``, by the qualified name of the method:
    ``{"Plan.why_not": "toast.explain.alternatives:why_not"}``.
    """
    _PROVIDERS.update(functions)


def provider(method: str) -> Callable[..., Any]:
    """The function that does the work of a method, by the method's qualified name."""
    module, _, name = _PROVIDERS[method].partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def providers() -> Mapping[str, str]:
    """Every method that a later stage provides, with ``module:function``."""
    return _PROVIDERS


def late(method: _Method) -> _Method:
    """A method whose work a later stage does; its own body never runs."""

    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return provider(method.__qualname__)(*arguments, **keywords)

    return call  # type: ignore[return-value]


class Record:
    """A frozen dataclass: notebooks show it, and copies and pickles hold its fields alone."""

    def __getstate__(self) -> dict[str, Any]:
        # Cached properties are computed again.
        fields: Any = self
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(fields)}

    @late
    def _repr_html_(self) -> str:
        """How notebooks show it."""
        raise NotImplementedError
