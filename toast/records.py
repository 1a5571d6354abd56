"""Plain records, and the methods that later stages implement for them.

``Program``, ``Analysis``, ``Plan`` and the explanations are records: data with short methods.
Later stages, which import the records, explain, show and search them; no record imports a later
stage.  The record has the signature and the documentation of such a method, and :func:`late` calls
the function that implements it::

    @late
    def why_not(self, argument: str, spec: Any) -> WhyNot:
        "..."
        raise NotImplementedError

The package :mod:`toast` lists these functions (:func:`provide`); the module of a function is
imported at its first call.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Instance = TypeVar("_Instance")

#: ``module:function`` of each method, by its qualified name.
_PROVIDERS: dict[str, str] = {}


def provide(functions: Mapping[str, str]) -> None:
    """Registers the functions that implement methods of records.

    ``functions`` maps the qualified name of a method to ``module:function``, as in
    ``{"Plan.why_not": "toast.explain.alternatives:why_not"}``.
    """
    _PROVIDERS.update(functions)


def uncached_copy(instance: _Instance) -> _Instance:
    """A shallow copy that computes its cached properties anew."""
    other = copy.copy(instance)
    for name in tuple(other.__dict__):
        if isinstance(getattr(type(instance), name, None), functools.cached_property):
            del other.__dict__[name]
    return other


def provider(method: str) -> Callable[..., Any]:
    """The function that implements the method with a qualified name."""
    module, _, name = _PROVIDERS[method].partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def providers() -> Mapping[str, str]:
    """All methods that later stages implement, with ``module:function``."""
    return _PROVIDERS


def late(method: _Method) -> _Method:
    """Marks a method that a later stage implements; its own body never runs."""

    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return provider(method.__qualname__)(*arguments, **keywords)

    return call  # type: ignore[return-value]


class Record:
    """A frozen dataclass that notebooks show; copies and pickles contain only its fields."""

    def __getstate__(self) -> dict[str, Any]:
        # Cached properties are left out and computed again.
        fields: Any = self
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(fields)}

    @late
    def _repr_html_(self) -> str:
        """The HTML that notebooks show."""
        raise NotImplementedError
