"""Models, entries of the zoo, and the frontend for models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from toast import ports
from toast.errors import TargetError
from toast.inputs import is_whole
from toast.models.parameters import count
from toast.program import Program

#: The expert strategies of a model by name: dimensions of arguments (paths with ``*``; negative
#: dimensions count from the last) and their mesh axes: ``"first"``, ``"last"``, ``"all"``, or the
#: name of an axis.
Strategies = Mapping[str, Sequence[tuple[str, int, str]]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A JAX function with example arguments."""

    #: The name, as the command line takes it.
    name: str
    #: The function, as ``jax.jit`` takes it.
    function: Callable[..., Any]
    #: Example arguments: pytrees of arrays or ``jax.ShapeDtypeStruct``.
    arguments: tuple[Any, ...]
    #: Positions of arguments whose buffers the function may reuse.
    donate: tuple[int, ...] = ()
    #: Positions of arguments with parameters.
    learned: tuple[int, ...] = (0,)
    #: The sizes that it was built with, such as ``batch`` and ``sequence``.
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(count(self.arguments[position]) for position in self.learned)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo: its summary, and functions that build it and its small form."""

    summary: str
    build: Callable[..., Model]
    small: Callable[..., Model]
    #: Sizes and other options that the command line can change.
    options: tuple[str, ...] = ()
    #: Its expert strategies.
    strategies: Strategies = dataclasses.field(default_factory=dict)


def training(name: str, step: Callable[..., Any], params: Any, moments: Any, *batch: Any) -> Model:
    """A train step as a model that donates its parameters, moments and step count."""
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return Model(name, step, (params, moments, count, *batch), donate=(0, 1, 2))


def entry(
    model: Callable[[Any, str], Model],
    name: str,
    summary: str,
    sizes: tuple[Any, Any],
    options: tuple[str, ...],
    strategies: Strategies,
    **changes: Any,
) -> Entry:
    """An entry of the zoo for a full and a small configuration.

    :param model: builds a model from a configuration and a name.
    :param sizes: the full and the small configuration, frozen dataclasses.
    :param options: fields of the configuration that the command line can change.
    :param changes: changes to both configurations.
    """
    full, small = (dataclasses.replace(config, **changes) for config in sizes)
    return Entry(
        summary,
        builder(model, full, name),
        builder(model, small, f"{name}-tiny"),
        options,
        strategies,
    )


def builder(model: Callable[[Any, str], Model], config: Any, name: str) -> Callable[..., Model]:
    """A function that takes changes to ``config``, a frozen dataclass, and builds its model."""

    def build(**options: Any) -> Model:
        for option, value in options.items():
            current = getattr(config, option)
            if current is not None and isinstance(value, str) != isinstance(current, str):
                word = "text" if isinstance(current, str) else "number"
                raise TargetError(f"{option} {value!r}: expected a {word}")
        chosen = dataclasses.replace(config, **options)
        sizes = {name: size for name, size in vars(chosen).items() if is_whole(size)}
        return dataclasses.replace(model(chosen, name), sizes=sizes)

    return build


class _Models:
    """The frontend for models; it traces their functions at their example arguments."""

    name = "models"
    suffixes: frozenset[str] = frozenset()
    takes_arguments = False
    takes_platform = True
    traces = True
    cacheable = False

    def accepts(self, target: Any) -> bool:
        return isinstance(target, Model)

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        frontend = ports.frontend_of(target.function)
        return frontend.program(
            target.function, *target.arguments, donate=target.donate, name=target.name, **options
        )


# A model exists only if this module is imported.
ports.register_frontend(_Models())
