"""Where programs come from and where plans go: frontends, backends, and the registry of both.

A frontend takes something (a function, a file, a model of some framework) and gives a
:class:`toast.program.Program`; a backend takes a program with its shardings and gives something
that runs, or that another tool reads.  Neither knows the other, and no stage between them knows
either.  One more of them is one module that registers it::

    from toast import ports

    class Traced:
        name = "traced"
        suffixes = frozenset({".traced"})
        takes_arguments = False
        cacheable = False

        def accepts(self, target): ...
        def program(self, target, *arguments, **options): ...

    ports.register_frontend(Traced())
"""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

from toast.errors import PlanError, TargetError

if TYPE_CHECKING:
    from toast.program import Program, Shardings


class Frontend(Protocol):
    """Reads programs: something in, a :class:`toast.program.Program` out."""

    #: How messages call it.
    name: str
    #: Endings of the files that it reads, such as ``.mlir``; empty for other targets.
    suffixes: frozenset[str]
    #: Whether its targets are functions, which take example arguments and options.
    takes_arguments: bool
    #: Whether a file that it reads is slow to read, so that commands that only look at the program
    #: cache it.
    cacheable: bool

    def accepts(self, target: Any) -> bool:
        """Whether it can read ``target``; decided without reading it."""

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        """The program of ``target``.

        ``arguments`` and ``options`` (``donate``, and the keywords of the function) are given only
        where :attr:`takes_arguments`.  Raises :class:`toast.errors.TargetError`.
        """


class Backend(Protocol):
    """Writes plans: a program and its shardings in, something that runs out."""

    #: What :meth:`toast.Plan.build` calls it by.
    name: str

    def build(self, program: Program, shardings: Shardings, **options: Any) -> Any:
        """``program``, sharded; ``options`` are the backend's own.

        Raises :class:`toast.errors.PlanError` where it cannot be built.
        """


#: Those that come with TOAST are ``module:object`` until they are needed.
_FRONTENDS: list[Frontend | str] = []
_BACKENDS: dict[str, Backend | str] = {}


def register_frontend(frontend: Frontend | str) -> None:
    """Add a frontend, or the place of one (``module:object``); it is asked before earlier ones."""
    _FRONTENDS.insert(0, frontend)


def register_backend(name: str, backend: Backend | str) -> None:
    """Add a backend, or the place of one (``module:object``), under a name."""
    _BACKENDS[name] = backend


def frontends() -> Iterator[Frontend]:
    """The frontends, those that were registered last first."""
    for number, frontend in enumerate(_FRONTENDS):
        if isinstance(frontend, str):
            _FRONTENDS[number] = frontend = cast(Frontend, _loaded(frontend))
        yield frontend


def frontend_of(target: Any) -> Frontend:
    """The frontend that reads ``target``.

    Raises :class:`toast.errors.TargetError` where there is none.
    """
    for frontend in frontends():
        if frontend.accepts(target):
            return frontend
    raise TargetError(
        f"{type(target).__name__} is nothing that TOAST reads; give a JAX function, a model or the "
        "path of a file"
    )


def reads(path: pathlib.Path) -> bool:
    """Whether a frontend reads files with the ending of ``path``."""
    return any(path.suffix in frontend.suffixes for frontend in frontends())


def backend(name: str) -> Backend:
    """A backend by its name.

    Raises :class:`toast.errors.PlanError` with the names that there are.
    """
    if name not in _BACKENDS:
        raise PlanError(f"there is no backend {name}; use one of {', '.join(sorted(_BACKENDS))}")
    place = _BACKENDS[name]
    if isinstance(place, str):
        _BACKENDS[name] = place = cast(Backend, _loaded(place))
    return place


def _loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
