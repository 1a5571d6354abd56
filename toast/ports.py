"""The protocols of frontends and backends, and their registry.

A frontend converts a target (a function, a file, a model of some framework) to a
:class:`toast.program.Program`.  A backend converts a program and its shardings to something that
runs or that another tool reads.  They do not depend on each other, and no other stage depends on
one of them.  A module adds a frontend or a backend by registering it::

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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

from toast.errors import PlanError, TargetError

if TYPE_CHECKING:
    from toast.hardware import Hardware
    from toast.program import Program, Shardings


class HardwarePlatform(str):
    """The platform of the hardware of a plan, in JAX's words; empty if unknown.

    A frontend that gets it as the option ``platform`` lowers for it if that makes a difference.
    Another text is what the user chose.
    """

    #: JAX's name of the kind of device; empty if unknown.
    device_kind: str = ""

    @staticmethod
    def of(hardware: Hardware) -> HardwarePlatform:
        """The platform of a kind of device."""
        platform = HardwarePlatform(hardware.platform)
        platform.device_kind = hardware.device_kind
        return platform

    def __repr__(self) -> str:
        return f"HardwarePlatform({str(self)!r}, {self.device_kind!r})"


class Frontend(Protocol):
    """Converts targets to programs."""

    #: The name in messages.
    name: str
    #: Suffixes of the files that it reads, such as ``.mlir``; empty for other targets.
    suffixes: frozenset[str]
    #: Whether its targets are functions, which take example arguments and options.
    takes_arguments: bool
    #: Whether its files are slow to read, so that read-only commands cache their programs.
    cacheable: bool

    def accepts(self, target: Any) -> bool:
        """Whether it can read ``target``; it decides this without reading ``target``."""

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        """The program of ``target``.

        ``arguments`` and ``options`` (``donate`` and the keywords of the function) are empty unless
        :attr:`takes_arguments`.  A frontend with an attribute ``takes_platform`` that is true may
        get the option ``platform``, which may be a :class:`HardwarePlatform`.  One with an
        attribute ``traces`` that is true traces functions of JAX, with the memory policy that is
        requested (:mod:`toast.frontend.memory_tracing`).  Raises
        :class:`toast.errors.TargetError`.
        """


class Backend(Protocol):
    """Converts a program and its shardings to something that runs."""

    #: The name for :meth:`toast.Plan.build`.
    name: str

    def build(self, program: Program, shardings: Shardings, **options: Any) -> Any:
        """The sharded program; ``options`` are specific to the backend.

        Raises :class:`toast.errors.PlanError` if it cannot be built.
        """


class Confirmation(Protocol):
    """Plans a program until a compiler confirms that the plan fits."""

    def __call__(
        self,
        planned: Callable[[float | None], Any],
        hardware: Hardware,
        memory_bytes: float | None = None,
        progress: Callable[[Any], None] | None = None,
    ) -> Any:
        """The plan; parameters are those of :func:`toast.evaluation.confirmed.confirmed_plan`."""


#: Those of TOAST are ``module:object`` until they are used.
_FRONTENDS: list[Frontend | str] = []
_BACKENDS: dict[str, Backend | str] = {}
_CONFIRMATIONS: list[Confirmation | str] = []


def register_frontend(frontend: Frontend | str) -> None:
    """Adds a frontend, or the place of one (``module:object``); it is asked before earlier ones."""
    _FRONTENDS.insert(0, frontend)


def register_backend(name: str, backend: Backend | str) -> None:
    """Adds a backend, or the place of one (``module:object``), under a name."""
    _BACKENDS[name] = backend


def register_confirmation(confirmation: Confirmation | str) -> None:
    """Adds what asks a compiler, or its place (``module:object``); the last one is used."""
    _CONFIRMATIONS.append(confirmation)


def confirmation() -> Confirmation:
    """What asks a compiler whether a plan fits."""
    place = _CONFIRMATIONS[-1]
    return cast(Confirmation, _loaded(place)) if isinstance(place, str) else place


def frontends() -> Iterator[Frontend]:
    """The frontends; the last registered one comes first."""
    for number, frontend in enumerate(_FRONTENDS):
        if isinstance(frontend, str):
            _FRONTENDS[number] = frontend = cast(Frontend, _loaded(frontend))
        yield frontend


def frontend_of(target: Any) -> Frontend:
    """The frontend that reads ``target``.

    Raises :class:`toast.errors.TargetError` if no frontend does.
    """
    for frontend in frontends():
        if frontend.accepts(target):
            return frontend
    raise TargetError(
        f"TOAST cannot read a {type(target).__name__}; use a JAX function, a model or the path of "
        "a file"
    )


def reads(path: pathlib.Path) -> bool:
    """Whether a frontend reads files with the suffix of ``path``."""
    return any(path.suffix in frontend.suffixes for frontend in frontends())


def backend(name: str) -> Backend:
    """The backend with a name.

    Raises :class:`toast.errors.PlanError` with the known names if there is none.
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
